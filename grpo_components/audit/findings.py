"""The rules of the audit, how often each was checked, and where it was first broken."""

from __future__ import annotations

from collections import Counter

from grpo_components.plain_text import one_line

RULES = {
    "parses": "every line is a record with all its fields",
    "chain": "every record holds the hash of itself and the one before, the last as receipts.end",
    "header": "every attempt begins with its start record, and attempts count up from 0",
    "config": "the settings of every attempt are those of its config.yaml",
    "steps": "steps follow one another from 1, or from where an attempt goes on",
    "versions": "a step adds 1 to the policy version, or 0 where it was skipped",
    "contract": "no trained token is older than max_staleness, or from the future",
    "sampled": "every trained token's version was acknowledged (0 is the base model)",
    "acknowledged": "no generator goes back, or ahead of the trainer",
    "checksums": "a version has one checksum, the published one, on every generator",
    "loads": "logs/events.jsonl has every acknowledged pull, with the same checksum",
    "issued": "groups are issued once, numbered from 0 without a gap",
    "prompts": "no prompt is issued again unless handed back, none is trained twice",
    "reissued": "prompts that were handed back come before any new one",
    "generated": "a group is generated at most once, after it was issued or restarted",
    "ended": "a group is trained or dropped once, after it was generated",
    "batches": "every step trains groups_per_step groups",
    "synchronous": "at max_staleness 0 nothing is dropped as stale",
    "tokens": "no more tokens are trained than their groups' responses have",
    "hashes": "every batch has a hash, no two the same",
    "correction": "the correction mass is within what the config's off_policy can give",
    "metrics": "logs/metrics.jsonl has the same version, tokens, staleness and correction mass",
    "totals": "a record's sums and lists agree with its events",
    "accounted": "issued = trained + dropped + living at the end, and no prompt is lost",
    "complete": "the run has an end record, and finished says whether all steps were done",
    "one_run": "receipts, config and checkpoints are of one run, latest of the steps that count",
}
"""What is checked, in this order."""

_MAX_CHARS = 300


class Broken(Exception):
    """The records cannot be followed any further."""


class Report:
    """How often each rule was checked, and where it was first broken."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        self.broken: dict[str, str] = {}
        """The first violation of each broken rule in one plain line, in the order of finding."""
        self.notes: list[str] = []
        """What a person should know beside the rules, each in one line."""
        self.where = ""
        """File and line of the record that is being checked."""

    def check(self, rule: str, holds: bool, otherwise: str, *, fatal: bool = False) -> bool:
        """Count a check; returns whether it holds.

        Args:
            rule: key of RULES.
            holds: the outcome.
            otherwise: what is wrong where it does not hold.
            fatal: whether the following records make no sense then.

        Raises:
            Broken: where a fatal check does not hold.
        """
        self.checked[rule] += 1
        if not holds:
            said = one_line(f"{self.where}: {otherwise}"[: 2 * _MAX_CHARS])
            if len(said) > _MAX_CHARS:
                said = f"{said[: _MAX_CHARS - 3]}..."
            self.broken.setdefault(rule, said)
            if fatal:
                raise Broken
        return holds

    def table(self) -> str:
        """One line per rule: its name, how often it was checked, and the outcome."""
        width = max(map(len, RULES))
        lines = [f"{'rule':{width}}  {'checked':>8}  outcome"]
        for rule, sentence in RULES.items():
            outcome = f"ok: {sentence}" if self.checked[rule] else f"not checked: {sentence}"
            if rule in self.broken:
                outcome = f"BROKEN: {self.broken[rule]}"
            lines.append(f"{rule:{width}}  {self.checked[rule]:>8}  {outcome}")
        return "\n".join(lines) + "\n"
