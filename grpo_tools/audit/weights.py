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

    def follow(self, record: Record, newest: int) -> None:
        """Check a record's pulls (weight loads by generators) and its trained tokens' versions."""
        self._check_pulls(record, newest)
        self._check_sampled(record)

    def _check_pulls(self, record: Record, newest: int) -> None:
        h, check = self._history, self._check
        stated = {name: (g["version"], g["checksum"]) for name, g in record["generators"].items()}
        for pull in record["acknowledged"]:
            name, version = pull["generator"], pull["version"]
            had = self._versions.get(name, 0)
            check(
                "acknowledged",
                had <= version <= newest,
                f"{name} loads version {version}; it had {had}, the trainer has {newest}",
            )
            known = h.checksums.setdefault(version, pull["published"])
            check(
                "checksums",
                pull["checksum"] == pull["published"] == known,
                f"{name} loads version {version} with {pull['checksum']}; published is "
                f"{pull['published']}, earlier {known}",
            )
            self._versions[name] = version
            h.unacknowledged.pop(version, None)
        expected = dict.fromkeys(stated, (0, None)) | {
            name: (version, h.checksums.get(version)) for name, version in self._versions.items()
        }
        check("totals", stated == expected, "`generators` differs from what they acknowledged")

    def _check_sampled(self, record: Record) -> None:
        # A generator may sample with new weights shortly before it acknowledges them.
        h = self._history
        late = min(h.unacknowledged, default=None)
        self._check(
            "sampled",
            late is None,
            f"step {h.unacknowledged.get(late or 0)} trained tokens of version {late}, which no "
            "generator acknowledged",
        )
        for version in map(int, record.get("token_versions", {})):
            if version and version not in h.checksums:
                h.unacknowledged[version] = record["step"]


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
    check(
        "contract",
        record["max_staleness"] == oldest,
        f"max_staleness is {record['max_staleness']}, but {oldest} by its token versions",
    )
    sampled = all(record["token_versions"].values())
    check("contract", sampled, "token_versions has a version with 0 tokens")
