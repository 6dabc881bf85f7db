"""Checks a run's receipts event by event, over all its attempts."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

from grpo_components.replay.recorded_run import FORMAT
from grpo_tools.audit.chain import Chain
from grpo_tools.audit.choices import begin_draws, begin_reuse, check_choice
from grpo_tools.audit.cross_checks import ConfigCheck, MetricsCheck
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.groups import FOLLOW, Batch, check_end, train
from grpo_tools.audit.history import History, Record
from grpo_tools.audit.shapes import mismatch
from grpo_tools.audit.weights import Weights, check_contract
from grpo_tools.books import Amount, Books
from grpo_tools.json_lines import records_of


class RunAudit:
    """Checks a run's receipts line by line."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self._name, self._findings, self._check = path.name, findings, findings.check
        self._chain = Chain(path, findings)
        starts = [
            (start["attempt"], start["steps_done"])
            for start in records_of(path, b'"event": "start"')
            if type(start.get("attempt")) is type(start.get("steps_done")) is int
        ]
        self._config = ConfigCheck(path.parent, max(starts, default=(0, 0))[0], findings)
        self._metrics = MetricsCheck(path.parent, findings)
        self._resume_points = [step for _, step in starts]
        self.books = Books(self._resume_points)
        self._snapshots = {0: History()}
        self._history = History()
        self._start: Record = {}
        self._weights = Weights(self._history, findings)
        self._batch = Batch()
        self._ended = False

    def follow(self, line: bytes, number: int) -> None:
        """Check the next line."""
        where = self._findings.where = f"{self._name} line {number}"
        fields = self._chain.follow(line.removesuffix(b"\n"))
        event: Record = {}
        try:
            event = json.loads(fields)
            problem = mismatch(event)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        self._check("parses", problem is None, problem or "", fatal=True)
        name, attempt = event["event"], event["attempt"]
        what = f"step {event['step']}" if name == "step" else name
        self._findings.where = f"{where} (attempt {attempt}, {what})"
        if name == "start":
            self._begin(event)
        else:
            self._check("header", bool(self._start), "there is no start", fatal=True)
            known = self._start["attempt"]
            within = f"is within attempt {known}" + (", after its end" if self._ended else "")
            self._check("header", attempt == known and not self._ended, within, fatal=True)
            self._follow(name, event)
        self.books.follow(event)
        self._check_books()
        self._config.follow(event)
        self._metrics.follow(event)

    def finish(self, unfinished: bool) -> None:
        """Make the checks that need the whole file, after its last line."""
        self._findings.where = f"{self._name}, at its end"
        self._check("header", bool(self._start), "there is no start", fatal=True)
        if not (unfinished and not self._ended):
            last = f"after step {self._history.step} of {self._start['num_steps']}"
            self._check("complete", self._ended, f"no end {last}: the run was killed")
        self._check_books()
        self._chain.finish(unfinished)
        self._metrics.finish()

    def summary(self) -> str:
        """Return one line on the run: attempts, steps, policy version and counts of groups."""
        h = self._history
        again = f", {h.reused} trained again" if h.reused else ""
        books = f"books, in groups/tokens: {self.books.line()}\n" if self._start else ""
        return (
            f"{self._start.get('attempt', 0) + 1} attempt(s), {h.step} steps, policy version "
            f"{h.policy_version}: {h.issued} groups issued = {h.trained} trained + {h.dropped} "
            f"dropped or filtered + {len(h.living)} living{again}\n{books}"
        )

    def _check_books(self) -> None:
        balanced = not self.books.problem and self.books.residual == Amount()
        self._check("books", balanced, f"{self.books.problem}: {self.books.line()}")

    def _follow(self, name: str, event: Record) -> None:
        if name == "step":
            self._step(event)
        elif name == "end":
            self._end(event)
        elif name == "load":
            self._weights.add(event)
        elif name == "sample":
            self._batch = Batch(event["groups"], event.get("worths"), event.get("reused") or [])
            self._findings.check(
                "steps",
                event["step"] == self._history.step + 1,
                f"a batch for step {event['step']} follows step {self._history.step}",
            )
        elif name in FOLLOW:
            FOLLOW[name](event, self._start, self._history, self._findings)

    def _begin(self, start: Record) -> None:
        expected = self._start["attempt"] + 1 if self._start else 0
        attempt, step = start["attempt"], start["steps_done"]
        known = start["format"] == FORMAT
        self._check("header", known, f"format is {start['format']}", fatal=True)
        self._check("header", attempt == expected, f"attempt {expected} is missing", fatal=True)
        self._check(
            "steps",
            step in self._snapshots,
            f"resumes after step {step}, which is not recorded",
            fatal=True,
        )
        h = self._history = deepcopy(self._snapshots[step])
        left = h.policy_version
        self._check(
            "versions",
            start["policy_version"] == left,
            f"starts with version {start['policy_version']}, but step {step} ended with {left}",
        )
        for number, group in h.living.items():  # what is in no checkpoint is generated again
            if str(number) not in start["carried"]:
                group.tokens, group.in_flight = None, False
        self._weights, self._batch = Weights(h, self._findings), Batch()
        begin_draws(start, self._start, h, self._findings)
        begin_reuse(start, h, self._findings)
        self._start, self._ended = start, False

    def _step(self, event: Record) -> None:
        check, h, batch = self._check, self._history, self._batch
        step, start, after = event["step"], event["trained_from"], event["policy_version"]
        check("steps", step == h.step + 1, f"follows step {h.step}", fatal=True)
        check(
            "versions",
            start == h.policy_version,
            f"trained from {start}, not from {h.policy_version}",
        )
        check("versions", after - start in (0, 1), f"changes version {start} to {after}")
        check_contract(event, self._start["max_staleness"], self._findings)
        self._weights.follow(event, newest=after)
        trained, reused = train(batch, event, self._start, h, self._findings)
        check_choice(event, trained, reused, h, self._findings)
        h.reused, self._batch = h.reused + len(reused), Batch()

        wanted, groups = self._start["groups_per_step"], [*trained.values(), *reused.values()]
        check("batches", len(groups) == wanted, f"trains {len(groups)} groups, not {wanted}")
        tokens, sampled = (
            sum(event["token_versions"].values()),
            sum(group.tokens or 0 for group in groups),
        )
        check("tokens", tokens <= sampled, f"trains {tokens} of {sampled} tokens")

        batch_hash, mass = event["batch_hash"], event["correction_mass"]
        unique = bool(batch_hash) and batch_hash not in h.batch_hashes
        check(
            "hashes",
            unique,
            "has no batch hash" if not batch_hash else "repeats an earlier batch hash",
        )
        h.batch_hashes.add(batch_hash)
        if after != start:  # a skipped step may lack its correction mass
            check(
                "correction",
                mass is not None,
                "correction_mass is null, but the step was not skipped",
            )

        if h.curriculum is not None:
            h.curriculum.end_step()
        h.step, h.policy_version = step, after
        if step in self._resume_points:
            self._snapshots[step] = deepcopy(h)

    def _end(self, event: Record) -> None:
        check, h = self._check, self._history
        check("steps", event["step"] == h.step, f"ends after step {event['step']}, not {h.step}")
        check(
            "versions",
            event["policy_version"] == h.policy_version,
            f"policy_version is not {h.policy_version}",
        )
        # A run may be stopped after it trained a step and before it wrote the step's event.
        self._weights.follow(event, newest=h.policy_version + (not event["finished"]))
        check_end(event, h, self._findings)
        finished = h.step == self._start["num_steps"]
        check("complete", event["finished"] == finished, f"finished is {event['finished']}")
        self._ended = True
