"""Closes a run's books: what became of every group and every token that was generated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_components.exchange.books_tail import read_tail

TokenCause = Literal[
    "trained",
    "stale",
    "overlong",
    "off_policy",
    "unanswered",
    "failed",
    "skipped",
    "written",
]
"""What a training step made of a sampled token; docs/receipts.md explains the causes."""
TRAINED_FROM = ("trained", "off_policy", "skipped", "written")
"""Causes of the tokens that a step's `token_versions` counts."""
_OF_TOKENS = {
    "trained": "trained",
    "stale": "masked: older than max_staleness",
    "overlong": "masked: cut off (mask_overlong)",
    "off_policy": "masked: off_policy gave weight 0",
    "unanswered": "masked: no agent's client kept it",
    "failed": "in failed samples of trained groups",
    "skipped": "in skipped steps and updates",
    "written": "written to a file, not trained",
}
_AGAIN = "lost in a restart, generated again"
_UNDONE = "undone by a rollback or resume"
_UNRECORDED = "trained, but killed before the record"
_IN_FLIGHT = "in flight at the end"
_ORDER = [*_OF_TOKENS.values(), "filtered", "dropped: failed", "dropped: stale"]
Record = Mapping[str, Any]
Reader = Callable[[str], Iterable[Record]]


@dataclass
class Amount:
    """A number of groups, and of tokens that the policy sampled for them."""

    groups: int = 0
    tokens: int = 0

    def add(self, groups: int, tokens: int) -> None:
        """Add groups and tokens."""
        self.groups += groups
        self.tokens += tokens


@dataclass
class _Account:
    """What became of groups up to a step, as far as no rollback or resume undid it."""

    outcomes: dict[str, Amount] = field(default_factory=dict)
    stock: dict[int, int] = field(default_factory=dict)
    """Group that is generated and has no outcome yet -> tokens sampled for it."""
    again: Amount = field(default_factory=Amount)
    """Groups trained by one more step: each such use."""
    ungenerated: int = 0
    """Groups dropped before their generation ended."""

    def end(self, cause: str, groups: int, tokens: int) -> None:
        self.outcomes.setdefault(cause, Amount()).add(groups, tokens)

    def total(self) -> Amount:
        total = Amount(len(self.stock), sum(self.stock.values()))
        for amount in self.outcomes.values():
            total.add(amount.groups, amount.tokens)
        return total


class Books:
    """Adds up the records of receipts.jsonl: generated = the sum of all outcomes.

    The left side counts each group where its generation ended. The right side counts it where it
    left: the trainers count the tokens of a step's groups by what they do with each, the ledger
    those of dropped and of living groups. So a count that is wrong on either side is a residual.
    Attempts of older versions, whose records have no such counts, are left out.
    """

    def __init__(
        self, resume_points: Iterable[int], events: Callable[[], Iterable[Record]]
    ) -> None:
        self.generated = Amount()
        self.unrecorded = Amount()
        """What of it a killed attempt generated after its last record."""
        self.notes: list[str] = []
        """What is not known, one line each."""
        self.problem = ""
        """First group whose two sides differ, or other contradiction; empty if there is none."""
        self._resume_points, self._events = set(resume_points), events
        self._account: _Account | None = None
        self._kept: dict[int, _Account | None] = {0: _Account()}
        self._undone = Amount()
        self._start: Record = {}
        self._step, self._ended = 0, True

    @property
    def known(self) -> bool:
        """Whether any record so far has the counts of the books."""
        return self._account is not None or bool(self.generated.groups)

    @property
    def again(self) -> Amount:
        """How often groups were trained by one more step, and with how many tokens."""
        return self._account.again if self._account else Amount()

    @property
    def residual(self) -> Amount:
        """Generated groups and tokens less those of all outcomes: 0 if the books close."""
        right = self._account.total() if self._account else Amount()
        right.add(self._undone.groups, self._undone.tokens)
        left = self.generated
        return Amount(left.groups - right.groups, left.tokens - right.tokens)

    def outcomes(self) -> dict[str, Amount]:
        """Return the right side: cause in words -> its groups and tokens; none without either."""
        found = dict(self._account.outcomes) if self._account else {}
        found[_UNDONE] = self._undone
        stock = self._account.stock if self._account else {}
        found[_IN_FLIGHT] = Amount(len(stock), sum(stock.values()))
        order = [*_ORDER, *sorted(found.keys() - {*_ORDER, *_LAST}), *_LAST]
        rows = ((cause, found[cause]) for cause in order if cause in found)
        return {cause: amount for cause, amount in rows if amount != Amount()}

    def table(self) -> list[tuple[str, int, int]]:
        """Return the rows (what, groups, tokens) of both sides and of the residual."""
        rows = {"generated": self.generated, **self.outcomes(), "residual": self.residual}
        return [(what, amount.groups, amount.tokens) for what, amount in rows.items()]

    def beside(self) -> list[str]:
        """Return in words what is not in the balance, one line each."""
        lines = []
        if again := self.again.groups:
            lines.append(f"{again:,} uses of groups trained again: {self.again.tokens:,} tokens")
        if late := self.unrecorded.groups:
            lines.append(
                f"{late:,} of the groups ({self.unrecorded.tokens:,} tokens) were generated after "
                "the last record of a killed attempt: from logs/events.jsonl"
            )
        if self._account and (none := self._account.ungenerated):
            lines.append(f"{none:,} groups were dropped before their generation ended")
        return lines + self.notes

    def line(self) -> str:
        """Return both sides in one line, each amount as groups and tokens."""
        right = " + ".join(f"{_of(amount)} {cause}" for cause, amount in self.outcomes().items())
        return f"{_of(self.generated)} generated = {right or 0}; residual {_of(self.residual)}"

    def follow(self, record: Record) -> None:
        """Add the next record."""
        if record["record"] == "start":
            self._begin(record)
            return
        if self._account is not None:
            self._add_events(record, self._account)
        self._step, self._ended = record["step"], record["record"] == "end"
        if self._ended and self._account is not None:
            given = {each["group_id"]: each.get("tokens") for each in record["living"]}
            self._carry({group: n for group, n in given.items() if n is not None}, self._account)
        elif self._step in self._resume_points:
            self._kept[self._step] = deepcopy(self._account)

    def finish(self) -> None:
        """Add what a killed last attempt did after its last record; call it after all records."""
        if not self._ended:
            self._add_tail()
            self._ended = True

    def _begin(self, start: Record) -> None:
        self.finish()
        before, step = self._account, start["steps_done"]
        now = deepcopy(self._kept.get(step))
        for account, sign in ((before, 1), (now if before else None, -1)):
            total = account.total() if account else Amount()
            self._undone.add(sign * total.groups, sign * total.tokens)
        self._start, self._ended, self._step = start, False, start["steps_done"]
        if "carried" not in start:
            self.notes.append(f"attempt {start['attempt']} is of a version that kept no such books")
            self._undone.add(*_pair(now.total() if now and before else Amount()))
            self._account = None
            return
        carried = {int(group): tokens for group, tokens in start["carried"].items()}
        if now is None:  # the step is of an older version
            now = _Account(stock=dict(carried))
            self.generated.add(len(carried), sum(carried.values()))
        elif before is None:
            self.generated.add(*_pair(now.total()))
        for group in [group for group in now.stock if group not in carried]:
            now.end(_AGAIN, 1, now.stock.pop(group))
        self._carry(carried, now)
        self._account = now

    def _carry(self, counted: Mapping[int, int], account: _Account) -> None:
        """Go on with the ledger's own count of the generated living groups."""
        for group in sorted(counted.keys() | account.stock.keys()):
            self._compare(group, account.stock.get(group), counted.get(group), "the ledger counts")
        account.stock = dict(counted)

    def _compare(self, group: int, known: int | None, found: int | None, who: str) -> None:
        if known != found and not self.problem:
            generated = "not generated" if known is None else f"generated with {known} tokens"
            self.problem = f"group {group} is {generated}, but {who} {found}"

    def _add_events(self, record: Record, account: _Account) -> None:
        counts = {int(group): causes for group, causes in record.get("tokens", {}).items()}
        batch: set[int] = set()
        for event in record["events"]:
            if "generated" in event:
                group = event["generated"]
                tokens = round(event["response_tokens"] * self._start["group_size"])
                self.generated.add(1, tokens)
                account.stock[group] = tokens
            elif "restarted" in event:
                if (tokens := account.stock.pop(event["restarted"], None)) is not None:
                    account.end(_AGAIN, 1, tokens)
            elif "dropped" in event:
                self._drop(event["dropped"], event["reason"], event.get("tokens"), account)
            elif "trained" in event:
                batch.add(event["trained"])
                self._train(event["trained"], counts.get(event["trained"]), record, account)
            elif "reused" in event:
                batch.add(event["reused"])
                causes = counts.get(event["reused"], {})
                account.again.add(1, causes.get("trained", 0))
        for group in counts.keys() - batch:
            self._train(group, counts[group], record, account)
        if record["record"] == "step":
            found = sum(n for c in counts.values() for cause, n in c.items() if cause in _COUNTED)
            stated = sum(record["token_versions"].values())
            if found != stated and not self.problem:
                self.problem = f"token_versions has {stated} tokens, the groups' counts {found}"

    def _drop(self, group: int, reason: str, tokens: int | None, account: _Account) -> None:
        known = account.stock.pop(group, None)
        self._compare(group, known, tokens, f"it is dropped as {reason} with")
        if tokens is None:
            account.ungenerated += 1
        else:
            account.end(_dropped(reason), 1, tokens)

    def _train(
        self, group: int, causes: Mapping[str, int] | None, record: Record, account: _Account
    ) -> None:
        known = account.stock.pop(group, None)
        if causes is None and record["record"] == "end" and known is not None:
            account.end(_UNRECORDED, 1, known)
            return
        found = None if causes is None else sum(causes.values())
        self._compare(group, known, found, "the trainers count")
        if causes is None:
            return
        skipped = record["policy_version"] == record.get("trained_from")
        kind = "written" if "written" in causes else "skipped" if skipped else "trained"
        account.end(_OF_TOKENS[kind], 1, 0)
        for cause, tokens in causes.items():
            account.end(_OF_TOKENS[cause], 0, tokens)

    def _add_tail(self) -> None:
        account, attempt = self._account, self._start["attempt"]
        if account is None:
            return
        tail = read_tail(self._events(), attempt, self._step)
        if tail is None:
            self.notes.append(
                f"attempt {attempt} was killed: what it generated after its last record is not "
                "known, because logs/events.jsonl does not have the attempt"
            )
        elif tail.gap is not None and not self.problem:
            lacks = f"lacks what follows number {tail.gap} of attempt {attempt}"
            self.problem = f"logs/events.jsonl {lacks}, which was killed"
        batch: list[int] = []
        for event in tail.events if tail else ():
            if event["event"] == "finish":
                tokens = sum(event["response_tokens"])
                for amount in (self.generated, self.unrecorded):
                    amount.add(1, tokens)
                account.stock[event["group"]] = tokens
            elif event["event"] == "sample":
                batch = event["groups"]
            else:
                ended = batch if event["event"] == "step" else event["groups"]
                cause = _UNRECORDED if event["event"] == "step" else _dropped(event["reason"])
                for group in ended:
                    if (tokens := account.stock.pop(group, None)) is not None:
                        account.end(cause, 1, tokens)


_LAST = (_AGAIN, _UNRECORDED, _UNDONE, _IN_FLIGHT)
_COUNTED = frozenset(TRAINED_FROM)


def close_books(read: Reader, resume_points: Sequence[int] | None = None) -> Books:
    """Return the books of a run that has ended, is running or was killed."""
    try:
        if resume_points is None:
            starts = (each for each in read("receipts.jsonl") if each["record"] == "start")
            resume_points = [start["steps_done"] for start in starts]
        books = Books(resume_points, lambda: read("logs/events.jsonl"))
        for record in read("receipts.jsonl"):
            books.follow(record)
        books.finish()
        books.table()  # fails if a count is no number
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"a record is not as expected: {problem}") from error
    return books


def reader_of(output_dir: Path) -> Reader:
    """Return the function that `close_books` takes, for a folder that can be trusted."""

    def read(name: str) -> Iterator[Record]:
        path = output_dir / name
        with path.open(encoding="utf-8") if path.exists() else nullcontext(()) as lines:
            yield from (json.loads(line) for line in lines if line.endswith("\n"))

    return read


def _dropped(reason: str) -> str:
    return reason if reason == "filtered" else f"dropped: {reason}"


def _of(amount: Amount) -> str:
    return f"{amount.groups:,}/{amount.tokens:,}"


def _pair(amount: Amount) -> tuple[int, int]:
    return amount.groups, amount.tokens
