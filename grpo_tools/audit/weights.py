"""Checks which policy versions the generators loaded, and which sampled the trained tokens."""

from __future__ import annotations

from grpo_tools.audit.findings import Findings
from grpo_tools.audit.history import History, Record


class Weights:
    """Checks which weights the generators of an attempt load; all begin with the base model."""

    def __init__(self, history: History, findings: Findings) -> None:
        self._history, self._check = history, findings.check
        self._versions: dict[str, int] = {}
        """Generator -> the policy version that it loaded last."""
        self._loads: list[Record] = []

    def add(self, load: Record) -> None:
        """Note that a generator loaded weights; `follow` checks it."""
        self._loads.append(load)

    def follow(self, event: Record, newest: int) -> None:
        """Check the loads before a step or an end, and the versions of the trained tokens.

        Weights may be loaded before the step's event that made them, so its version is the newest.
        """
        h, check = self._history, self._check
        for load in self._loads:
            name, version = load["role"], load["version"]
            had = self._versions.get(name, 0)
            check(
                "acknowledged",
                had <= version <= newest,
                f"{name} loads version {version}; it had {had}, the trainer has {newest}",
            )
            known = h.checksums.setdefault(version, load["published"])
            check(
                "checksums",
                load["checksum"] == load["published"] == known,
                f"{name} loads version {version} with {load['checksum']}; published is "
                f"{load['published']}, earlier {known}",
            )
            self._versions[name] = version
            h.unacknowledged.pop(version, None)
        self._loads = []
        self._check_sampled(event)

    def _check_sampled(self, event: Record) -> None:
        # A generator may sample with new weights shortly before it acknowledges them.
        h = self._history
        late = min(h.unacknowledged, default=None)
        self._check(
            "sampled",
            late is None,
            f"step {h.unacknowledged.get(late or 0)} trained tokens of version {late}, which no "
            "generator acknowledged",
        )
        for version in map(int, event.get("token_versions", {})):
            if version and version not in h.checksums:
                h.unacknowledged[version] = event["step"]


def check_contract(record: Record, bound: int, findings: Findings) -> None:
    """Check the staleness contract: no trained token is too old, or newer than the trainer."""
    check, start = findings.check, record["trained_from"]
    versions = sorted(int(v) for v in record["token_versions"])
    oldest = start - versions[0] if versions else None
    check(
        "contract",
        oldest is None or oldest <= bound,
        f"trains tokens of version {versions[:1]} from version {start}; max_staleness is {bound}",
    )
    check(
        "contract",
        not versions or versions[-1] <= start,
        f"trains tokens of version {versions[-1:]} from version {start}, which is older",
    )
    sampled = all(record["token_versions"].values())
    check("contract", sampled, "token_versions has a version with 0 tokens")
