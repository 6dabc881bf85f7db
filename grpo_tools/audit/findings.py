"""Names the rules of the audit and collects the outcome of their checks."""

from __future__ import annotations

import textwrap
from collections import Counter

from grpo_components.plain_text import one_line

RULES = {
    "parses": "every line is an event with all its fields",
    "chain": "every line has the hash of itself and its predecessor; receipts.end names the last",
    "header": "every attempt begins with a start; attempts are numbered 0, 1, 2, ...",
    "config": "every attempt has the settings of its config.yaml",
    "steps": "steps are consecutive, from 1 or from where an attempt resumes",
    "versions": "a step adds 1 to the policy version, or 0 if it was skipped",
    "contract": "no trained token is older than max_staleness, or newer than the trainer",
    "sampled": "a generator acknowledged the version of every trained token (0: the base model)",
    "acknowledged": "no generator loads a version older than its own or newer than the trainer's",
    "checksums": "a version has one checksum: as published, and on every generator",
    "issued": "groups are issued once, numbered 0, 1, 2, ...",
    "prompts": "a prompt is issued again only if it was handed back, and trained at most once",
    "reissued": "prompts that were handed back are issued before new ones",
    "curriculum": "each new prompt of a curriculum is what seed and success rates draw",
    "reused": "a step reuses what the priority chooses, within max_staleness and max_uses",
    "generated": "a group is generated at most once, after it was issued or restarted",
    "ended": "a group is trained or dropped once, after it was generated",
    "batches": "every step trains groups_per_step groups, new and reused",
    "synchronous": "at max_staleness 0 no group is dropped as stale",
    "tokens": "a step trains at most as many tokens as its responses have",
    "hashes": "every batch has a hash, and no two are equal",
    "correction": "a step that was not skipped has a correction_mass",
    "metrics": "logs/metrics.jsonl has the same version, tokens, staleness and correction mass",
    "accounted": "issued = trained + dropped + living at the end, and no prompt is lost",
    "books": "generated = trained + masked + filtered + failed + dropped + in flight: residual 0",
    "complete": "the run has an end; finished says whether all steps were done",
    "one_run": "receipts, config and checkpoints are of one run; latest is of a step that counts",
}
"""Rule -> what it requires; in the order of the printed table."""

_MAX_CHARS = 300


class FatalViolation(Exception):
    """A violation after which the remaining records cannot be checked."""


class Findings:
    """Counts the checks of each rule and keeps the rule's first violation."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        self.broken: dict[str, str] = {}
        """Broken rule -> its first violation as one line of text; in the order found."""
        self.where = ""
        """File and line that is being checked; the text of a violation begins with it."""

    def check(self, rule: str, holds: bool, problem: str, *, fatal: bool = False) -> bool:
        """Record a check of a rule and return `holds`; a failed `fatal` check ends the audit."""
        self.checked[rule] += 1
        if not holds:
            line = one_line(f"{self.where}: {problem}")
            self.broken.setdefault(rule, textwrap.shorten(line, _MAX_CHARS, placeholder="..."))
            if fatal:
                raise FatalViolation
        return holds

    def table(self) -> str:
        """Return one line per rule: its name, how often it was checked, and the outcome."""
        width = max(map(len, RULES))
        lines = [f"{'rule':{width}}  {'checked':>8}  outcome"]
        for rule, requirement in RULES.items():
            outcome = f"ok: {requirement}" if self.checked[rule] else f"not checked: {requirement}"
            if rule in self.broken:
                outcome = f"BROKEN: {self.broken[rule]}"
            lines.append(f"{rule:{width}}  {self.checked[rule]:>8}  {outcome}")
        return "\n".join(lines) + "\n"
