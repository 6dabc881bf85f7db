"""The audit of a run's receipts, offline: `python -m grpo_components.audit OUTPUT_DIR`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_components.audit_folder import check_one_run
from grpo_components.running.receipt_shapes import mismatch

RULES = {
    "parses": "every line is a record with all its fields",
    "header": "every attempt begins with its start record, and attempts count up from 0",
    "steps": "steps follow one another from 1, or from where an attempt goes on",
    "versions": "a step adds 1 to the policy version, or 0 where it was skipped",
    "contract": "no trained token is older than max_staleness, or from the future",
    "sampled": "every trained token's version was acknowledged (0 is the base model)",
    "acknowledged": "no generator goes back, or ahead of the trainer",
    "checksums": "a version has one checksum, the published one, on every generator",
    "issued": "groups are issued once, numbered from 0 without a gap",
    "prompts": "no prompt is issued again unless handed back, none is trained twice",
    "reissued": "prompts that were handed back come before any new one",
    "generated": "a group is generated at most once, after it was issued or restarted",
    "ended": "a group is trained or dropped once, after it was generated",
    "batches": "every step trains groups_per_step groups",
    "synchronous": "at max_staleness 0 nothing is dropped as stale",
    "tokens": "no more tokens are trained than their groups' responses have",
    "hashes": "every batch has a hash, no two the same",
    "correction": "the correction mass is finite and not negative",
    "totals": "a record's sums and lists agree with its events",
    "accounted": "issued = trained + dropped + living at the end, and no prompt is lost",
    "complete": "the run has an end record, and finished says whether all steps were done",
    "one_run": "receipts, config and checkpoints are of one run, latest of the steps that count",
}
"""What is checked, in this order."""

_Record = dict[str, Any]
_Prompt = tuple[int, int]


class Broken(Exception):
    """The records cannot be followed any further."""


class Report:
    """How often each rule was checked, and where it was first broken."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        self.broken: dict[str, str] = {}
        """The first violation of each broken rule, in the order of finding."""
        self.where = ""
        """Record that is being checked."""

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
            self.broken.setdefault(rule, f"{self.where}: {otherwise}")
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


@dataclass
class _Group:
    """A living group."""

    prompt: _Prompt
    response_tokens: float | None = None
    """In the mean over its responses; None until it is generated."""


@dataclass
class _History:
    """What the records up to some step say; a resumed attempt goes on from one."""

    step: int = 0
    policy_version: int = 0
    issued: int = 0
    trained: int = 0
    dropped: int = 0
    living: dict[int, _Group] = field(default_factory=dict)
    waiting: Counter[_Prompt] = field(default_factory=Counter)
    issued_prompts: set[_Prompt] = field(default_factory=set)
    trained_prompts: set[_Prompt] = field(default_factory=set)
    batch_hashes: set[str] = field(default_factory=set)
    checksums: dict[int, str] = field(default_factory=dict)
    """Of each acknowledged version."""
    unacknowledged: dict[int, int] = field(default_factory=dict)
    """Versions of trained tokens that no generator acknowledged yet, and the step."""


class _Audit:
    """Follows the records of one file."""

    def __init__(self, resume_points: Iterable[int], report: Report) -> None:
        self._report, self._check = report, report.check
        self._resume_points = set(resume_points)
        self._snapshots = {0: _History()}
        self._history = _History()
        self._start: _Record = {}
        self._generators: dict[str, int] = {}
        """Version that each generator of the attempt has."""
        self._ended = False

    def follow(self, line: str, number: int) -> None:
        """Check the next line."""
        self._report.where = f"line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            record = None
            self._check("parses", False, f"no JSON ({error})", fatal=True)
        problem = mismatch(record)
        self._check("parses", problem is None, problem or "", fatal=True)
        assert isinstance(record, dict)
        kind = record["record"]
        self._report.where = f"attempt {record['attempt']}, {kind} record"
        if kind == "start":
            self._begin(record)
            return
        self._check("header", bool(self._start), "there is no start record", fatal=True)
        attempt = self._start["attempt"]
        self._check(
            "header",
            record["attempt"] == attempt and not self._ended,
            f"lies in attempt {attempt}" + (", after its end" if self._ended else ""),
            fatal=True,
        )
        if kind == "step":
            self._report.where = f"attempt {attempt}, step {record['step']}"
            self._step(record)
        else:
            self._end(record)

    def finish(self, unfinished: bool) -> None:
        """Check what can only be said at the end of the file."""
        self._report.where = "end of the file"
        self._check("header", bool(self._start), "there is no start record", fatal=True)
        if not (unfinished and not self._ended):
            last = f"after step {self._history.step} of {self._start['num_steps']}"
            self._check("complete", self._ended, f"no end record {last}: the run was killed")

    def summary(self) -> str:
        """What the run was, in one line."""
        h = self._history
        return (
            f"{self._start.get('attempt', 0) + 1} attempt(s), {h.step} steps, policy version "
            f"{h.policy_version}: {h.issued} groups issued = {h.trained} trained + {h.dropped} "
            f"dropped or filtered + {len(h.living)} living\n"
        )

    def _begin(self, start: _Record) -> None:
        expected = self._start["attempt"] + 1 if self._start else 0
        attempt, step = start["attempt"], start["steps_done"]
        self._check("header", start["format"] == 1, f"format is {start['format']}", fatal=True)
        self._check("header", attempt == expected, f"attempt {expected} is missing", fatal=True)
        self._check(
            "steps",
            step in self._snapshots,
            f"goes on after step {step}, which was not recorded",
            fatal=True,
        )
        self._history = deepcopy(self._snapshots[step])
        left = self._history.policy_version
        self._check(
            "versions",
            start["policy_version"] == left,
            f"starts with version {start['policy_version']}, step {step} left {left}",
        )
        self._start, self._generators, self._ended = start, {}, False

    def _step(self, record: _Record) -> None:
        check, h = self._check, self._history
        step, start, after = record["step"], record["trained_from"], record["policy_version"]
        check("steps", step == h.step + 1, f"follows step {h.step}", fatal=True)
        check("versions", start == h.policy_version, f"trained from {start}, not the one before")
        check("versions", after - start in (0, 1), f"from version {start} to {after}")
        self._contract(record)
        self._acknowledgements(record, newest=after)
        self._sampled(record)
        trained = self._events(record)

        wanted = self._start["groups_per_step"]
        check("batches", len(trained) == wanted, f"trains {len(trained)} groups, not {wanted}")
        tokens = sum(record["token_versions"].values())
        sampled = sum(group.response_tokens or 0.0 for group in trained.values())
        sampled = round(sampled * self._start["group_size"])
        check("tokens", tokens <= sampled, f"trains {tokens} of {sampled} tokens")
        listed = [(t["group_id"], t["prompt_index"], t["epoch"]) for t in record["trained"]]
        events = [(group_id, *group.prompt) for group_id, group in trained.items()]
        check("totals", listed == events, "the list of trained prompts is not that of the events")

        batch_hash, mass = record["batch_hash"], record["correction_mass"]
        fresh = bool(batch_hash) and batch_hash not in h.batch_hashes
        check("hashes", fresh, "has no batch hash" if not batch_hash else "an earlier batch's hash")
        h.batch_hashes.add(batch_hash)
        if mass is not None or after != start:  # a skipped step has none
            sound = mass is not None and math.isfinite(mass) and mass >= 0
            check("correction", sound, f"correction_mass is {mass}")

        h.step, h.policy_version = step, after
        if step in self._resume_points:
            self._snapshots[step] = deepcopy(h)

    def _contract(self, record: _Record) -> None:
        bound, start = self._start["max_staleness"], record["trained_from"]
        versions = sorted(int(v) for v in record["token_versions"])
        oldest = start - versions[0] if versions else None
        self._check(
            "contract",
            oldest is None or oldest <= bound,
            f"a token of version {versions[:1]} is trained from {start}; max_staleness is {bound}",
        )
        self._check(
            "contract",
            not versions or versions[-1] <= start,
            f"a token of version {versions[-1:]} is trained from {start}: from the future",
        )
        self._check(
            "contract",
            record["max_staleness"] == oldest,
            f"max_staleness is {record['max_staleness']}, by the token versions it is {oldest}",
        )

    def _acknowledgements(self, record: _Record, newest: int) -> None:
        h = self._history
        stated = {name: (g["version"], g["checksum"]) for name, g in record["generators"].items()}
        for said in record["acknowledged"]:
            name, version = said["generator"], said["version"]
            had = self._generators.get(name, 0)
            self._check(
                "acknowledged",
                had <= version <= newest,
                f"{name} loads version {version}; it had {had}, the trainer is at {newest}",
            )
            known = h.checksums.setdefault(version, said["published"])
            self._check(
                "checksums",
                said["checksum"] == said["published"] == known,
                f"{name} loads version {version} with {said['checksum']}, published is "
                f"{said['published']}, known before {known}",
            )
            self._generators[name] = version
            h.unacknowledged.pop(version, None)
        expected = dict.fromkeys(stated, (0, None)) | {
            name: (version, h.checksums.get(version)) for name, version in self._generators.items()
        }
        self._check("totals", stated == expected, "generators have not what they acknowledged")

    def _sampled(self, record: _Record) -> None:
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

    def _events(self, record: _Record) -> dict[int, _Group]:
        """Follow a record's events; returns the groups that they train."""
        h, totals = self._history, _Totals()
        trained: dict[int, _Group] = {}
        for event in record["events"]:
            if "issued" in event:
                self._issue(event)
                totals.issued += 1
            elif "generated" in event:
                number = event["generated"]
                group = h.living.get(number)
                if self._check("generated", group is not None, f"group {number} is not living"):
                    assert group is not None
                    again = group.response_tokens is not None
                    self._check("generated", not again, f"group {number} is generated again")
                    group.response_tokens = event["response_tokens"]
                totals.add("generated", event["response_tokens"])
            elif "restarted" in event:
                number = event["restarted"]
                group = h.living.get(number)
                if self._check("generated", group is not None, f"group {number} is not living"):
                    assert group is not None
                    group.response_tokens = None
            else:
                group = self._end_group(event)
                tokens = group.response_tokens if group else None
                totals.add(event.get("reason", "trained"), tokens)
                if group and "trained" in event:
                    trained[event["trained"]] = group
        stale = [e["dropped"] for e in record["events"] if e.get("reason") == "stale"]
        if self._start["max_staleness"] == 0:
            self._check("synchronous", not stale, f"groups {stale} are dropped as stale")
        problem = totals.mismatch(record["groups"])
        self._check("totals", not problem, f"groups.{problem} is not that of the events")
        return trained

    def _issue(self, event: _Record) -> None:
        h, number, prompt = self._history, event["issued"], (event["prompt_index"], event["epoch"])
        before = f"the one before is {h.issued - 1}" if h.issued else "it is the first"
        in_order = self._check("issued", number == h.issued, f"group {number} is issued; {before}")
        if not in_order and number < h.issued:
            return
        handed_back = h.waiting[prompt] > 0
        known = prompt in h.issued_prompts
        self._check(
            "prompts",
            handed_back or not known,
            f"group {number} issues prompt {_name(prompt)} again",
        )
        first = next(iter(+h.waiting), None)
        self._check(
            "reissued",
            handed_back or known or first is None,
            f"group {number} is new, prompt {_name(first or prompt)} was handed back before",
        )
        h.waiting -= Counter([prompt])  # keeps what is above 0
        h.issued_prompts.add(prompt)
        h.issued = number + 1
        h.living[number] = _Group(prompt)

    def _end_group(self, event: _Record) -> _Group | None:
        h, reason = self._history, event.get("reason")
        number = event["dropped"] if reason else event["trained"]
        group = h.living.pop(number, None)
        verb = f"dropped as {reason}" if reason else "trained"
        if not self._check("ended", group is not None, f"group {number}, not living, is {verb}"):
            return None
        assert group is not None
        ready = group.response_tokens is not None or reason == "failed"
        self._check("ended", ready, f"group {number} is {verb} before it is generated")
        if reason:
            h.dropped += 1
            if event["reissue"]:
                h.waiting[group.prompt] += 1
        else:
            h.trained += 1
            again = group.prompt in h.trained_prompts
            self._check("prompts", not again, f"prompt {_name(group.prompt)} is trained again")
            h.trained_prompts.add(group.prompt)
        return group

    def _end(self, record: _Record) -> None:
        check, h, wanted = self._check, self._history, self._start["groups_per_step"]
        check("steps", record["step"] == h.step, f"ends after step {record['step']}, not {h.step}")
        check("versions", record["policy_version"] == h.policy_version, "another policy version")
        # A run may be stopped between a step and its record.
        self._acknowledgements(record, newest=h.policy_version + (not record["finished"]))
        self._sampled(record)
        trained = self._events(record)
        whole = not trained or (not record["finished"] and len(trained) == wanted)
        check("batches", whole, f"{len(trained)} groups are trained outside of a step")

        living = {g["group_id"]: (g["prompt_index"], g["epoch"]) for g in record["living"]}
        known = {number: group.prompt for number, group in h.living.items()}
        odd = sorted(living.items() ^ known.items())
        check("accounted", not odd, f"group {odd and odd[0][0]} is not where its events left it")
        for group in record["living"] if not odd else ():
            generated = h.living[group["group_id"]].response_tokens is not None
            sound = generated or group["state"] == "in_flight"
            check("accounted", sound, f"group {group['group_id']} is {group['state']}, ungenerated")
        waiting = Counter((p["prompt_index"], p["epoch"]) for p in record["waiting"])
        odd = sorted((waiting - h.waiting) + (h.waiting - waiting))
        lost = f"prompt {_name(odd[0])} is lost or waits unasked" if odd else ""
        check("accounted", not odd, lost)
        check(
            "accounted",
            h.issued == h.trained + h.dropped + len(living),
            f"{h.issued} issued, {h.trained} trained + {h.dropped} dropped + {len(living)} living",
        )
        finished = h.step == self._start["num_steps"]
        check("complete", record["finished"] == finished, f"finished is {record['finished']}")
        self._ended = True


class _Totals:
    """A record's sums, made again from its events."""

    def __init__(self) -> None:
        self.issued = 0
        self._tokens: dict[str, list[float | None]] = {}

    def add(self, what: str, response_tokens: float | None) -> None:
        self._tokens.setdefault(what, []).append(response_tokens)

    def mismatch(self, groups: _Record) -> str:
        """The first field that says something else, or nothing."""
        if groups["issued"] != self.issued:
            return "issued"
        stated = {key: groups[key] for key in ("generated", "filtered", "trained")}
        stated |= groups["dropped"]
        for what in stated | self._tokens:
            values = self._tokens.get(what, [])
            known = [tokens for tokens in values if tokens is not None]
            mean = sum(known) / len(known) if known else None
            amount = stated.get(what, {"count": 0, "response_tokens_mean": None})
            said = amount["response_tokens_mean"]
            same = said == mean or (said is not None and mean and math.isclose(said, mean))
            if amount["count"] != len(values) or not same:
                return what
        return ""


def _name(prompt: _Prompt) -> str:
    return f"{prompt[0]} of epoch {prompt[1]}"


def audit(path: Path, unfinished: bool = False) -> tuple[Report, str]:
    """Check a file of receipts, streaming.

    Args:
        path: of receipts.jsonl.
        unfinished: a run without its end record (killed, or still running) is no violation.

    Returns:
        The report, and one line about the run.

    Raises:
        FileNotFoundError: if there is no record.
    """
    if not path.stat().st_size:
        raise FileNotFoundError(path)
    report = Report()
    following = _Audit(_resume_points(path), report)
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if unfinished and not line.endswith("\n"):
                    break  # torn while it was written
                following.follow(line, number)
        following.finish(unfinished)
    except Broken:
        pass
    report.where = str(path.parent)
    check_one_run(path, report.check)
    return report, following.summary()


def _resume_points(path: Path) -> list[int]:
    """The steps after which attempts go on; what cannot be read is found later."""
    points: list[int] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith('{"record": "start"'):
                try:
                    points.append(json.loads(line)["steps_done"])
                except (json.JSONDecodeError, KeyError):
                    continue
    return [step for step in points if isinstance(step, int)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of rules.

    Returns:
        The exit code: 0 where all rules hold, 1 where one is broken, 2 without receipts.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_components.audit", description=__doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="of the run")
    parser.add_argument(
        "--unfinished", action="store_true", help="the run was killed or is still running"
    )
    options = parser.parse_args(arguments)
    path = options.output_dir / "receipts.jsonl"
    try:
        report, summary = audit(path, options.unfinished)
    except OSError:
        sys.stderr.write(f"no receipts in {path}\n")
        return 2
    sys.stdout.write(report.table() + summary)
    if report.broken:
        rule = next(iter(report.broken))
        sys.stdout.write(f"broken: {rule} ({RULES[rule]}): {report.broken[rule]}\n")
        return 1
    sys.stdout.write("every rule holds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
