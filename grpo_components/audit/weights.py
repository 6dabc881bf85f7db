"""Follows which weights each generator had, and which of them sampled what was trained."""

from __future__ import annotations

from grpo_components.audit.findings import Report
from grpo_components.audit.history import History, Record


class Weights:
    """The weights of an attempt's generators; each of them begins with the base model.

    Args:
        history: of the run up to the attempt; it is brought up to date.
        report: told what is checked.
    """

    def __init__(self, history: History, report: Report) -> None:
        self._history, self._check = history, report.check
        self._versions: dict[str, int] = {}
        """That each generator of the attempt has."""

    def follow(self, record: Record, newest: int) -> None:
        """Check the pulls of a record, and the versions that sampled what it trained.

        Args:
            record: a step or end record.
            newest: policy version of the trainer at its end.
        """
        self._acknowledgements(record, newest)
        self._sampled(record)

    def _acknowledgements(self, record: Record, newest: int) -> None:
        h, check = self._history, self._check
        stated = {name: (g["version"], g["checksum"]) for name, g in record["generators"].items()}
        for said in record["acknowledged"]:
            name, version = said["generator"], said["version"]
            had = self._versions.get(name, 0)
            check(
                "acknowledged",
                had <= version <= newest,
                f"{name} loads version {version}; it had {had}, the trainer is at {newest}",
            )
            known = h.checksums.setdefault(version, said["published"])
            check(
                "checksums",
                said["checksum"] == said["published"] == known,
                f"{name} loads version {version} with {said['checksum']}, published is "
                f"{said['published']}, known before {known}",
            )
            self._versions[name] = version
            h.unacknowledged.pop(version, None)
        expected = dict.fromkeys(stated, (0, None)) | {
            name: (version, h.checksums.get(version)) for name, version in self._versions.items()
        }
        check("totals", stated == expected, "generators have not what they acknowledged")

    def _sampled(self, record: Record) -> None:
        # A response may sample with new weights a moment before they are acknowledged.
        h = self._history
        late = min(h.unacknowledged, default=None)
        self._check(
            "sampled",
            late is None,
            f"version {late} was trained in step {h.unacknowledged.get(late or 0)}, and no "
            "generator acknowledged it",
        )
        for version in map(int, record.get("token_versions", {})):
            if version and version not in h.checksums:
                h.unacknowledged[version] = record["step"]


def check_contract(record: Record, bound: int, report: Report) -> None:
    """Check the versions that sampled a step's tokens against the staleness contract.

    Args:
        record: a step record.
        bound: largest staleness, in policy versions.
        report: told what is checked.
    """
    check, start = report.check, record["trained_from"]
    versions = sorted(int(v) for v in record["token_versions"])
    oldest = start - versions[0] if versions else None
    check(
        "contract",
        oldest is None or oldest <= bound,
        f"a token of version {versions[:1]} is trained from {start}; max_staleness is {bound}",
    )
    check(
        "contract",
        not versions or versions[-1] <= start,
        f"a token of version {versions[-1:]} is trained from {start}: from the future",
    )
    check(
        "contract",
        record["max_staleness"] == oldest,
        f"max_staleness is {record['max_staleness']}, by the token versions it is {oldest}",
    )
    sampled = all(record["token_versions"].values())
    check("contract", sampled, "token_versions has a version that sampled no token")
