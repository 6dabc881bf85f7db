"""Checks a run's receipts record by record, over all its attempts."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path

from grpo_components.exchange.books import Amount, Books
from grpo_components.records.receipt_shapes import mismatch
from grpo_tools.audit.chain import Chain
from grpo_tools.audit.choices import begin_draws, begin_reuse, check_choice
from grpo_tools.audit.cross_checks import ConfigCheck, MetricsCheck
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.groups import check_ends, follow_events
from grpo_tools.audit.history import History, Record
from grpo_tools.audit.weights import Weights, check_contract
from grpo_tools.json_lines import records_of

_FORMAT = 2


class RunAudit:
    """Checks a run's receipts line by line."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self._name, self._findings, self._check = path.name, findings, findings.check
        self._chain = Chain(path, findings)
        starts = [
            (start["attempt"], start["steps_done"])
            for start in records_of(path, b'"record": "start"')
            if type(start.get("attempt")) is type(start.get("steps_done")) is int
        ]
        self._config = ConfigCheck(path.parent, max(starts, default=(0, 0))[0], findings)
        self._metrics = MetricsCheck(path.parent, findings)
        events = path.parent / "logs" / "events.jsonl"
        self._resume_points = [step for _, step in starts]
        self.books = Books(self._resume_points, lambda: records_of(events))
        self._snapshots = {0: History()}
        self._history = History()
        self._start: Record = {}
        self._weights = Weights(self._history, findings)
        self._ended = False

    def follow(self, line: bytes, number: int) -> None:
        """Check the next line."""
        where = self._findings.where = f"{self._name} line {number}"
        fields = self._chain.follow(line.removesuffix(b"\n"))
        record: Record = {}
        try:
            record = json.loads(fields)
            problem = mismatch(record)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        self._check("parses", problem is None, problem or "", fatal=True)
        kind, attempt = record["record"], record["attempt"]
        what = f"step {record['step']}" if kind == "step" else f"{kind} record"
        self._findings.where = f"{where} (attempt {attempt}, {what})"
        if kind == "start":
            self._begin(record)
        else:
            self._check("header", bool(self._start), "there is no start record", fatal=True)
            known = self._start["attempt"]
            self._check(
                "header",
                attempt == known and not self._ended,
                f"is within attempt {known}" + (", after its end" if self._ended else ""),
                fatal=True,
            )
            (self._step if kind == "step" else self._end)(record)
        self.books.follow(record)
        self._check_books()
        self._config.follow(record)
        self._metrics.follow(record)

    def finish(self, unfinished: bool) -> None:
        """Make the checks that need the whole file, after its last line."""
        self._findings.where = f"{self._name}, at its end"
        self._check("header", bool(self._start), "there is no start record", fatal=True)
        if not (unfinished and not self._ended):
            last = f"after step {self._history.step} of {self._start['num_steps']}"
            self._check("complete", self._ended, f"no end record {last}: the run was killed")
        self.books.finish()
        self._check_books()
        self._chain.finish(unfinished)
        self._metrics.finish()

    def summary(self) -> str:
        """Return one line on the run: attempts, steps, policy version and counts of groups."""
        h = self._history
        again = f", {h.reused} trained again" if h.reused else ""
        books = f"books, in groups/tokens: {self.books.line()}\n" if self.books.known else ""
        return (
            f"{self._start.get('attempt', 0) + 1} attempt(s), {h.step} steps, policy version "
            f"{h.policy_version}: {h.issued} groups issued = {h.trained} trained + {h.dropped} "
            f"dropped or filtered + {len(h.living)} living{again}\n{books}"
        )

    def _check_books(self) -> None:
        if self.books.known:
            balanced = not self.books.problem and self.books.residual == Amount()
            self._check("books", balanced, f"{self.books.problem}: {self.books.line()}")

    def _begin(self, start: Record) -> None:
        expected = self._start["attempt"] + 1 if self._start else 0
        attempt, step = start["attempt"], start["steps_done"]
        known = start["format"] == _FORMAT
        self._check("header", known, f"format is {start['format']}", fatal=True)
        self._check("header", attempt == expected, f"attempt {expected} is missing", fatal=True)
        self._check(
            "steps",
            step in self._snapshots,
            f"resumes after step {step}, which is not recorded",
            fatal=True,
        )
        self._history = deepcopy(self._snapshots[step])
        left = self._history.policy_version
        self._check(
            "versions",
            start["policy_version"] == left,
            f"starts with version {start['policy_version']}, but step {step} ended with {left}",
        )
        self._weights = Weights(self._history, self._findings)
        begin_draws(start, self._start, self._history, self._findings)
        begin_reuse(start, self._history, self._findings)
        self._start, self._ended = start, False

    def _step(self, record: Record) -> None:
        check, h = self._check, self._history
        step, start, after = record["step"], record["trained_from"], record["policy_version"]
        check("steps", step == h.step + 1, f"follows step {h.step}", fatal=True)
        check(
            "versions",
            start == h.policy_version,
            f"trained from {start}, not from {h.policy_version}",
        )
        check("versions", after - start in (0, 1), f"changes version {start} to {after}")
        check_contract(record, self._start["max_staleness"], self._findings)
        self._weights.follow(record, newest=after)
        trained, reused = follow_events(record, self._start, h, self._findings)
        check_choice(record, trained, reused, h, self._findings)
        h.reused += len(reused)

        wanted, groups = self._start["groups_per_step"], [*trained.values(), *reused.values()]
        check("batches", len(groups) == wanted, f"trains {len(groups)} groups, not {wanted}")
        tokens = sum(record["token_versions"].values())
        sampled = sum(group.response_tokens or 0.0 for group in groups)
        sampled = round(sampled * self._start["group_size"])
        check("tokens", tokens <= sampled, f"trains {tokens} of {sampled} tokens")
        share = tokens / sampled if sampled else None
        stated = record["trained_share"]
        same = stated is None if share is None else stated and math.isclose(stated, share)
        check("tokens", bool(same), f"trained_share is {stated}, but {share} by the events")
        listed = [(t["group_id"], t["prompt_index"], t["epoch"]) for t in record["trained"]]
        events = [(group_id, *group.prompt) for group_id, group in trained.items()]
        check("totals", listed == events, "the list of trained prompts differs from the events")

        batch_hash, mass = record["batch_hash"], record["correction_mass"]
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

    def _end(self, record: Record) -> None:
        check, h, wanted = self._check, self._history, self._start["groups_per_step"]
        check("steps", record["step"] == h.step, f"ends after step {record['step']}, not {h.step}")
        check(
            "versions",
            record["policy_version"] == h.policy_version,
            f"policy_version is not {h.policy_version}",
        )
        # A run may be stopped after it trained a step and before it wrote the step's record.
        self._weights.follow(record, newest=h.policy_version + (not record["finished"]))
        trained, reused = follow_events(record, self._start, h, self._findings)
        number = len(trained) + len(reused)
        whole = not number or (not record["finished"] and number == wanted)
        check("batches", whole, f"{number} groups are trained outside any step")
        check_ends(record, h, self._findings)
        finished = h.step == self._start["num_steps"]
        check("complete", record["finished"] == finished, f"finished is {record['finished']}")
        self._ended = True
