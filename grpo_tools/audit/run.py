"""Checks receipts.jsonl, a run's log of events, by a state machine over all attempts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from grpo_components.files import records_of
from grpo_tools.audit.chain import END_FILE, End, link, read_end, split
from grpo_tools.audit.choices import Choices, Group, Prompt, Record
from grpo_tools.audit.cross_checks import check_config, check_metrics, read_metrics
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.shapes import mismatch
from grpo_tools.books import Amount, Books

_FORMAT = 4
"""Format version of the receipts that these rules describe."""
_STATES = ("in_flight", "buffered", "in_training")
_NO_BATCH: Record = {"groups": ()}


@dataclass
class History:
    """State of a run after a step; an attempt that resumes after that step continues from it."""

    step: int = 0
    policy_version: int = 0
    issued: int = 0
    trained: int = 0
    dropped: int = 0
    reused: int = 0
    """How often steps trained a group again."""
    living: dict[int, Group] = field(default_factory=dict)
    """Groups that are neither trained nor dropped, by group number."""
    waiting: Counter[Prompt] = field(default_factory=Counter)
    """Prompt of dropped groups -> number of times that it must still be issued again."""
    issued_prompts: set[Prompt] = field(default_factory=set)
    trained_prompts: set[Prompt] = field(default_factory=set)
    batch_hashes: set[str] = field(default_factory=set)
    checksums: dict[int, str] = field(default_factory=dict)
    """Policy version that a generator acknowledged -> checksum of its weights."""
    unacknowledged: dict[int, int] = field(default_factory=dict)
    """Policy version that no generator acknowledged yet -> last step that trained its tokens."""
    choices: Choices = field(default_factory=Choices)


class RunAudit:
    """Checks a run's receipts line by line."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self._folder, self._name = path.parent, path.name
        self._findings, self._check = findings, findings.check
        # Read before the records: read after them, it could name a record written in between.
        self._known_end = read_end(path)
        self._chain_end = End()
        self._reached = self._known_end == self._chain_end
        starts = [
            (start["attempt"], start["steps_done"])
            for start in records_of(path, b'"event": "start"')
            if type(start.get("attempt")) is type(start.get("steps_done")) is int
        ]
        self._last_attempt = max(starts, default=(0, 0))[0]
        self._metrics = read_metrics(path.parent)
        """Logged metrics of steps that the receipts have not reached yet, by attempt and step."""
        self._resume_points = [step for _, step in starts]
        self.books = Books(self._resume_points)
        self._snapshots, self._history = {0: History()}, History()
        self._start: Record = {}
        self._loaded: dict[str, int] = {}
        """Generator -> the policy version that it loaded last in this attempt."""
        self._batch: Record = _NO_BATCH
        """The event `sample` of the next step: the groups that it trains."""
        self._ended = False
        self._follow: dict[str, Callable[[Record], None]] = {
            "start": self._begin,
            "issue": self._issue,
            "finish": self._finish,
            "interrupt": self._interrupt,
            "drop": self._drop,
            "sample": self._sample,
            "load": self._load,
            "step": self._step,
            "end": self._end,
        }
        """Name of an event -> its check; of other events, only the fields are checked."""

    def follow(self, line: bytes, number: int) -> None:
        """Check the next line of the receipts: its hash, its fields and the rules of its event."""
        where = self._findings.where = f"{self._name} line {number}"
        fields, event = self._check_link(line.removesuffix(b"\n")), Record()
        try:
            event = json.loads(fields)
            cut_off = None if line.endswith(b"\n") else "the line has no end: the file was cut off"
            problem = cut_off or mismatch(event)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        self._check("parses", problem is None, problem or "", fatal=True)
        name, attempt = event["event"], event["attempt"]
        what = f"step {event['step']}" if name == "step" else name
        self._findings.where = f"{where} (attempt {attempt}, {what})"
        if name != "start":
            self._check("header", bool(self._start), "there is no start", fatal=True)
            known = self._start["attempt"]
            within = f"is within attempt {known}" + (", after its end" if self._ended else "")
            self._check("header", attempt == known and not self._ended, within, fatal=True)
        if name in self._follow:
            self._follow[name](event)
        self.books.follow(event)
        self._check_books()

    def finish(self, unfinished: bool) -> None:
        """Make the checks that need the whole file, after its last line."""
        self._findings.where = f"{self._name}, at its end"
        self._check("header", bool(self._start), "there is no start", fatal=True)
        if not (unfinished and not self._ended):
            last = f"after step {self._history.step} of {self._start['num_steps']}"
            self._check("complete", self._ended, f"no end {last}: the run was killed")
        self._check_books()
        self._check_chain_end(unfinished)
        if self._metrics:
            self._findings.where, (attempt, step) = "receipts.jsonl", min(self._metrics)
            problem = f"step {step} of attempt {attempt} is only in logs/metrics.jsonl"
            self._check("metrics", False, problem)

    def summary(self) -> str:
        """Summarize the run: attempts, steps, policy version, numbers of groups, token accounts."""
        h = self._history
        again = f", {h.reused} trained again" if h.reused else ""
        books = f"books, in groups/tokens: {self.books.line()}\n" if self._start else ""
        books += "".join(f"note: books: {line}\n" for line in self.books.beside())
        return (
            f"{self._start.get('attempt', 0) + 1} attempt(s), {h.step} steps, policy version "
            f"{h.policy_version}: {h.issued} groups issued = {h.trained} trained + {h.dropped} "
            f"dropped or filtered + {len(h.living)} living{again}\n{books}"
        )

    def _check_link(self, line: bytes) -> bytes:
        """Check the hash of a line, and return the line without the hash."""
        fields, stated = split(line)
        expected = link(self._chain_end.chain, fields)
        problem = "hash mismatch: this record or its predecessor was changed, or a record between "
        self._check("chain", stated == expected, f"{problem}them is missing")
        self._chain_end = End(self._chain_end.records + 1, stated or expected)
        self._reached |= self._chain_end == self._known_end
        return fields

    def _check_chain_end(self, unfinished: bool) -> None:
        """Check that `receipts.end` has the last record's number and hash.

        If `unfinished`, it may have those of any earlier record: the run may still be writing.
        """
        self._findings.where, known, found = END_FILE, self._known_end, self._chain_end.records
        if known is None:
            problem = "missing or damaged; it has the hash of the last record"
            self._check("chain", False, problem)
            return
        # A run killed after writing a record and before updating receipts.end has one extra.
        complete = self._reached and (unfinished or found <= known.records + 1)
        problem = f"names record {known.records} with hash {known.chain[:8]}...; "
        problem += f"the receipts have {found} records and not this one"
        self._check("chain", complete, problem)

    def _check_books(self) -> None:
        balanced = not self.books.problem and self.books.residual == Amount()
        self._check("books", balanced, f"{self.books.problem}: {self.books.line()}")

    def _begin(self, start: Record) -> None:
        check, attempt, step = self._check, start["attempt"], start["steps_done"]
        expected = self._start["attempt"] + 1 if self._start else 0
        check("header", start["format"] == _FORMAT, f"format is {start['format']}", fatal=True)
        check("header", attempt == expected, f"attempt {expected} is missing", fatal=True)
        known = step in self._snapshots
        check("steps", known, f"resumes after step {step}, which is not recorded", fatal=True)
        h = self._history = deepcopy(self._snapshots[step])
        left, version = h.policy_version, start["policy_version"]
        problem = f"starts with version {version}, but step {step} ended with {left}"
        check("versions", version == left, problem)
        for number, group in h.living.items():  # what is in no checkpoint is generated again
            if str(number) not in start["carried"]:
                group.tokens, group.in_flight = None, False
        h.choices.begin(start, self._start, self._findings)
        check_config(self._folder, start, self._last_attempt, check)
        self._loaded, self._batch = {}, _NO_BATCH
        self._start, self._ended = start, False

    def _issue(self, event: Record) -> None:
        check, h = self._check, self._history
        number, prompt = event["group"], (event["prompt"], event["epoch"])
        if again := h.living.get(number):  # its generator was lost
            lost = not again.in_flight and again.prompt == prompt
            check("issued", lost, f"group {number} is issued again, or with another prompt")
            again.in_flight = True
            return
        in_order = number == h.issued
        check("issued", in_order, f"group {number} is issued, expected {h.issued}")
        if number < h.issued:
            return
        handed_back, known = h.waiting[prompt] > 0, prompt in h.issued_prompts
        problem = f"group {number} issues prompt {_name(prompt)} again"
        check("prompts", handed_back or not known, problem)
        first = next(iter(+h.waiting), None)
        if not handed_back:
            h.choices.check_draw(prompt, number, self._findings)
        problem = f"group {number} has a new prompt, but prompt {_name(first or prompt)} was handed"
        check("reissued", handed_back or known or first is None, f"{problem} back")
        h.waiting -= Counter([prompt])  # also removes counts of 0
        h.issued_prompts.add(prompt)
        h.issued, h.living[number] = number + 1, Group(prompt)

    def _finish(self, event: Record) -> None:
        if group := self._living_group(event["group"]):
            number, check = event["group"], self._check
            check("generated", group.tokens is None, f"group {number} is generated twice")
            size = len(event["response_tokens"])
            problem = f"group {number} has {size} responses"
            check("generated", size == self._start["group_size"], problem)
            group.tokens = sum(event["response_tokens"])
            choices = self._history.choices
            choices.add_result(event, group.prompt, self._findings)

    def _interrupt(self, event: Record) -> None:
        if group := self._living_group(event["group"]):
            group.tokens, group.in_flight = None, False

    def _living_group(self, number: int) -> Group | None:
        group = self._history.living.get(number)
        self._check("generated", group is not None, f"group {number} is not living")
        return group

    def _drop(self, event: Record) -> None:
        reason, numbers, check = event["reason"], event["groups"], self._check
        check("ended", bool(reason.strip()), f"groups {numbers[:8]} are dropped without a reason")
        counted = len(numbers) == len(event["tokens"])
        problem = f"{len(numbers)} groups are dropped, {len(event['tokens'])} counted"
        check("ended", counted, problem)
        if self._start["max_staleness"] == 0:
            problem = f"groups {numbers[:8]} are dropped as stale"
            check("synchronous", reason != "stale", problem)
        for number in numbers:
            if group := self._end_group(number, reason):
                self._history.dropped += 1
                self._history.waiting[group.prompt] += int(event["reissue"])

    def _end_group(self, number: int, reason: str | None) -> Group | None:
        group = self._history.living.pop(number, None)
        verb = f"dropped as {reason}" if reason else "trained"
        known = group is not None
        if self._check("ended", known, f"group {number} is {verb}, but is not living"):
            assert group is not None
            ready = group.tokens is not None or reason == "failed"
            self._check("ended", ready, f"group {number} is {verb} before it is generated")
        return group

    def _sample(self, event: Record) -> None:
        self._batch, step = event, self._history.step
        problem = f"a batch for step {event['step']} follows step {step}"
        self._check("steps", event["step"] == step + 1, problem)

    def _step(self, event: Record) -> None:
        check, h = self._check, self._history
        step, start, after = event["step"], event["trained_from"], event["policy_version"]
        check("steps", step == h.step + 1, f"follows step {h.step}", fatal=True)
        check(
            "versions", start == h.policy_version, f"trained from {start}, not {h.policy_version}"
        )
        check("versions", after - start in (0, 1), f"changes version {start} to {after}")
        self._check_contract(event)
        self._check_weights(event, newest=after)
        trained = self._train()
        again = h.choices.end_step(self._batch, event, trained, self._findings)
        h.reused, self._batch = h.reused + len(again), _NO_BATCH
        wanted, groups = self._start["groups_per_step"], [*trained.values(), *again.values()]
        check("batches", len(groups) == wanted, f"trains {len(groups)} groups, not {wanted}")
        tokens = sum(event["token_versions"].values())
        sampled = sum(group.tokens or 0 for group in groups)
        check("tokens", tokens <= sampled, f"trains {tokens} of {sampled} tokens")
        batch_hash, mass = event["batch_hash"], event["correction_mass"]
        problem = "repeats an earlier batch hash" if batch_hash else "has no batch hash"
        check("hashes", bool(batch_hash) and batch_hash not in h.batch_hashes, problem)
        h.batch_hashes.add(batch_hash)
        if after != start:  # a skipped step may lack its correction mass
            problem = "correction_mass is null, but the step was not skipped"
            check("correction", mass is not None, problem)
        check_metrics(self._metrics, event, check)
        h.step, h.policy_version = step, after
        if step in self._resume_points:
            self._snapshots[step] = deepcopy(h)

    def _train(self) -> dict[int, Group]:
        """Check that the step may train its new groups, and return them."""
        h, trained = self._history, dict[int, Group]()
        for number in self._batch["groups"]:
            if group := self._end_group(number, None):
                h.trained += 1
                again = group.prompt in h.trained_prompts
                self._check("prompts", not again, f"prompt {_name(group.prompt)} is trained again")
                h.trained_prompts.add(group.prompt)
                trained[number] = group
        return trained

    def _check_contract(self, step: Record) -> None:
        """Check that no trained token is too old, or newer than the trainer."""
        check, start, bound = self._check, step["trained_from"], self._start["max_staleness"]
        versions = sorted(map(int, step["token_versions"]))
        oldest, newest = (versions[0], versions[-1]) if versions else (start, start)
        trains = f"from version {start}, trains tokens of version"
        check("contract", start - oldest <= bound, f"{trains} {oldest}; max_staleness is {bound}")
        check("contract", newest <= start, f"{trains} {newest}, which is newer")
        sampled = all(step["token_versions"].values())
        check("contract", sampled, "token_versions has a version with 0 tokens")

    def _load(self, load: Record) -> None:
        h, name, version = self._history, load["role"], load["version"]
        had, published = self._loaded.get(name, 0), load["published"]
        self._check("acknowledged", had <= version, f"{name} loads {version}; it had {had}")
        known = h.checksums.setdefault(version, published)
        problem = f"{name} loads version {version} with {load['checksum']}; published is "
        problem += f"{published}, earlier {known}"
        self._check("checksums", load["checksum"] == published == known, problem)
        self._loaded[name] = version
        h.unacknowledged.pop(version, None)

    def _check_weights(self, event: Record, newest: int) -> None:
        """Check that generators loaded each version that steps trained, and none from the future.

        `newest` is the newest version that the trainer can have: a generator may load weights
        before the event of the step that made them.
        """
        h, check = self._history, self._check
        ahead = max(self._loaded.values(), default=0)
        problem = f"a generator has version {ahead}, the trainer {newest}"
        check("acknowledged", ahead <= newest, problem)
        # A generator may sample with new weights shortly before it acknowledges them.
        late = min(h.unacknowledged, default=None)
        problem = f"step {h.unacknowledged.get(late or 0)} trained tokens of version {late}, which "
        check("sampled", late is None, f"{problem}no generator acknowledged")
        for version in map(int, event.get("token_versions", {})):
            if version and version not in h.checksums:
                h.unacknowledged[version] = event["step"]

    def _end(self, event: Record) -> None:
        check, h = self._check, self._history
        check("steps", event["step"] == h.step, f"ends after step {event['step']}, not {h.step}")
        same = event["policy_version"] == h.policy_version
        check("versions", same, f"policy_version is not {h.policy_version}")
        # A run may be stopped after it trained a step and before it wrote the step's event.
        self._check_weights(event, newest=h.policy_version + (not event["finished"]))
        self._check_left(event)
        finished = h.step == self._start["num_steps"]
        check("complete", event["finished"] == finished, f"finished is {event['finished']}")
        self._ended = True

    def _check_left(self, event: Record) -> None:
        """Check that the end event lists exactly the living groups and the prompts to reissue."""
        check, h = self._check, self._history
        living = {g["group"]: (g["prompt"], g["epoch"]) for g in event["living"]}
        once = len(living) == len(event["living"])
        check("accounted", once, "`living` lists a group twice")
        known = {number: group.prompt for number, group in h.living.items()}
        differing = sorted(living.items() ^ known.items())
        name = differing and differing[0][0]
        check("accounted", not differing, f"`living` and the events disagree on group {name}")
        for group in event["living"] if not differing else ():
            generated, state = h.living[group["group"]].tokens is not None, group["state"]
            problem = f"group {group['group']} is {state}"
            problem += f", but {'generated' if generated else 'not generated'}"
            consistent = state in _STATES and (generated or state == "in_flight")
            check("accounted", consistent, problem)
        waiting = Counter((p["prompt"], p["epoch"]) for p in event["waiting"])
        unlike = sorted((waiting - h.waiting) + (h.waiting - waiting))
        name = _name(unlike[0]) if unlike else ""
        check("accounted", not unlike, f"`waiting` and the events disagree on prompt {name}")
        problem = f"{h.issued} issued, {h.trained} trained + {h.dropped} dropped + {len(living)}"
        sums = h.issued == h.trained + h.dropped + len(living)
        check("accounted", sums, f"{problem} living")


def _name(prompt: Prompt) -> str:
    return f"{prompt[0]} of epoch {prompt[1]}"
