"""Checks that each group and token that a run generated has one outcome: trained, dropped, ..."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from grpo_components.files import Record, records_of

TRAINED_FROM = ("trained", "off_policy", "skipped", "written")
"""Outcomes (keys of `OF_TOKENS`) whose tokens a step event also counts, in `token_versions`."""
OF_TOKENS = {
    "trained": "trained",
    "stale": "masked: older than max_staleness",
    "overlong": "masked: cut off (mask_overlong)",
    "off_policy": "masked: off_policy gave weight 0",
    "unanswered": "masked: no agent's client kept it",
    "failed": "in failed samples of trained groups",
    "skipped": "in skipped steps and updates",
    "written": "written to a file, not trained",
}
"""Outcome of a sampled token in a training step -> description; see docs/reproducibility.md."""
_AGAIN = "lost in a restart, generated again"
_UNDONE = "undone by a rollback or resume"
_IN_FLIGHT = "in flight at the end"
_LAST = (_AGAIN, _UNDONE, _IN_FLIGHT)
_ORDER = [*OF_TOKENS.values(), "filtered", "dropped: failed", "dropped: stale"]


@dataclass(frozen=True)
class Amount:
    """A number of groups, and of tokens that the policy sampled for them."""

    groups: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.groups + other.groups, self.tokens + other.tokens)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.groups - other.groups, self.tokens - other.tokens)

    def __str__(self) -> str:
        return f"{self.groups:,}/{self.tokens:,}"


@dataclass
class _Account:
    """Groups and tokens by outcome, of all steps so far that no rollback or resume undid."""

    outcomes: dict[str, Amount] = field(default_factory=dict)
    stock: dict[int, int] = field(default_factory=dict)
    """Id of a generated group that has no outcome yet -> tokens sampled for it."""
    again: Amount = Amount()
    """How often groups were trained again (`groups`), and with how many tokens (`tokens`)."""
    ungenerated: int = 0
    """Number of groups dropped before their generation ended."""

    def end(self, cause: str, groups: int, tokens: int) -> None:
        self.outcomes[cause] = self.outcomes.get(cause, Amount()) + Amount(groups, tokens)

    def in_flight(self) -> Amount:
        return Amount(len(self.stock), sum(self.stock.values()))

    def total(self) -> Amount:
        return sum(self.outcomes.values(), self.in_flight())


class Books:
    """Adds up the events of receipts.jsonl, and checks: generated = the sum of all outcomes.

    The left side counts each group when its generation ends. The right side counts its outcome: the
    trainers count the tokens of a step's groups, by outcome. The ledger (the driver's list of
    groups) counts the tokens of dropped groups and of groups that have no outcome yet. A wrong
    count on either side shows as a residual.
    """

    def __init__(self, resume_points: Iterable[int]) -> None:
        self.generated = Amount()
        self.problem = ""
        """First contradiction, such as a group with two different counts; empty if none."""
        self._resume_points = set(resume_points)
        self._account = _Account()
        self._kept: dict[int, _Account] = {0: _Account()}
        self._undone = Amount()
        self._batch: list[int] = []
        """Ids of the new (not reused) groups of the step being trained."""
        self._reused: set[int] = set()

    @property
    def again(self) -> Amount:
        """How often groups were trained again (`groups`), and with how many tokens (`tokens`)."""
        return self._account.again

    @property
    def residual(self) -> Amount:
        """Generated groups and tokens minus all outcomes: 0 if the accounts balance."""
        return self.generated - self._account.total() - self._undone

    def outcomes(self) -> dict[str, Amount]:
        """Return description -> groups and tokens, for each outcome that occurred."""
        found = {_UNDONE: self._undone, _IN_FLIGHT: self._account.in_flight()}
        found |= self._account.outcomes
        order = [*_ORDER, *sorted(found.keys() - {*_ORDER, *_LAST}), *_LAST]
        return {cause: found[cause] for cause in order if found.get(cause, Amount()) != Amount()}

    def table(self) -> list[tuple[str, int, int]]:
        """Return rows (what, groups, tokens): what was generated, each outcome, the residual."""
        rows = {"generated": self.generated, **self.outcomes(), "residual": self.residual}
        return [(what, amount.groups, amount.tokens) for what, amount in rows.items()]

    def beside(self) -> list[str]:
        """Return lines on what the balance leaves out: repeated trainings, ungenerated groups."""
        lines = []
        if again := self.again.groups:
            lines.append(f"{again:,} uses of groups trained again: {self.again.tokens:,} tokens")
        if none := self._account.ungenerated:
            lines.append(f"{none:,} groups were dropped before their generation ended")
        return lines

    def line(self) -> str:
        """Return the balance as one line of text, each amount as groups/tokens."""
        right = " + ".join(f"{amount} {cause}" for cause, amount in self.outcomes().items())
        return f"{self.generated} generated = {right or 0}; residual {self.residual}"

    def follow(self, event: Record) -> None:
        """Add the next event of receipts.jsonl to the accounts."""
        account = self._account
        match event["event"]:
            case "start":
                self._begin(event)
            case "finish":
                tokens = sum(event["response_tokens"])
                self.generated += Amount(1, tokens)
                account.stock[event["group"]] = tokens
            case "interrupt":
                if (tokens := account.stock.pop(event["group"], None)) is not None:
                    account.end(_AGAIN, 1, tokens)
            case "drop":
                for group, counted in zip(event["groups"], event["tokens"], strict=False):
                    self._drop(group, event["reason"], counted, account)
            case "sample":
                self._batch = event["groups"]
                self._reused = {each["group"] for each in event.get("reused") or ()}
            case "step":
                self._train(event, account)
            case "end":
                given = {each["group"]: each["tokens"] for each in event["living"]}
                self._carry({group: n for group, n in given.items() if n is not None}, account)
            case _:
                pass

    def _begin(self, start: Record) -> None:
        before, now = self._account, deepcopy(self._kept.get(start["steps_done"], _Account()))
        self._undone += before.total() - now.total()
        carried = {int(group): tokens for group, tokens in start["carried"].items()}
        for group in [group for group in now.stock if group not in carried]:
            now.end(_AGAIN, 1, now.stock.pop(group))
        self._carry(carried, now)
        self._account, self._batch = now, []

    def _carry(self, counted: Mapping[int, int], account: _Account) -> None:
        """Check groups without an outcome against the ledger's token counts; adopt those counts."""
        for group in sorted(counted.keys() | account.stock.keys()):
            self._compare(group, account.stock.get(group), counted.get(group), "the ledger counts")
        account.stock = dict(counted)

    def _compare(self, group: int, known: int | None, found: int | None, who: str) -> None:
        if known != found and not self.problem:
            generated = "not generated" if known is None else f"generated with {known} tokens"
            self.problem = f"group {group} is {generated}, but {who} {found}"

    def _drop(self, group: int, reason: str, tokens: int | None, account: _Account) -> None:
        known = account.stock.pop(group, None)
        self._compare(group, known, tokens, f"it is dropped as {reason} with")
        if tokens is None:
            account.ungenerated += 1
        else:
            account.end(reason if reason == "filtered" else f"dropped: {reason}", 1, tokens)

    def _train(self, step: Record, account: _Account) -> None:
        skipped = step["policy_version"] == step["trained_from"]
        counts = {int(group): causes for group, causes in step["tokens"].items()}
        foreign = counts.keys() - {*self._batch} - self._reused
        if foreign and not self.problem:
            self.problem = f"tokens of group {min(foreign)} count, which the step did not take"
        for group in counts.keys() - {*self._batch}:
            account.again += Amount(1, counts[group].get("trained", 0))
        for group in self._batch:
            causes, known = counts.get(group), account.stock.pop(group, None)
            self._compare(group, known, causes and sum(causes.values()), "the trainers count")
            if causes is None:
                continue
            kind = "written" if "written" in causes else "skipped" if skipped else "trained"
            account.end(OF_TOKENS[kind], 1, 0)
            for cause, tokens in causes.items():
                account.end(OF_TOKENS[cause], 0, tokens)
        found = sum(n for c in counts.values() for cause, n in c.items() if cause in TRAINED_FROM)
        stated = sum(step["token_versions"].values())
        if found != stated and not self.problem:
            self.problem = f"token_versions has {stated} tokens, the groups' counts {found}"
        if step["step"] in self._resume_points:
            self._kept[step["step"]] = deepcopy(account)


def close_books(folder: Path) -> Books:
    """Return the token accounts of a run that has ended, is running or was killed."""
    path = folder / "receipts.jsonl"
    try:
        books = Books(start["steps_done"] for start in records_of(path, b'"event": "start"'))
        for event in records_of(path):
            books.follow(event)
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"a line is not as expected: {problem}") from error
    return books
