"""The ledger: where every prompt's group is in its life, and when the next one may start."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.replay.event_order import Turns

State = Literal["in_flight", "buffered", "in_training"]
Kind = Literal["issued", "generated", "restarted", "dropped", "trained"]
Prompt = dict[str, Any]
_COUNTERS = ("policy_version", "steps_done", "issued", "trained_groups")


@dataclass(frozen=True)
class GroupEvent:
    """One thing that happened to a group."""

    kind: Kind
    group_id: int
    prompt_index: int
    epoch: int
    response_tokens: float | None = None
    """Sampled tokens per response, in the mean; None before they are known."""
    reason: str | None = None
    """Why it was dropped: stale, failed or filtered."""
    reissue: bool = False
    """Whether the prompt of a dropped group will be issued again."""


@dataclass
class LedgerEntry:
    """One living group."""

    group_id: int
    """Its number in the order of admission, from 0."""
    prompt: Prompt
    epoch: int
    needed_version: int
    """The oldest policy version that it may be generated with."""
    start_version: int
    """Version of its generator when it started; never below `needed_version`."""
    target_step: int
    """Training step that it is admitted for, from 0: the turn of its place in the queue."""
    state: State = "in_flight"
    reference_kl: list[float] | None = None
    """[G] estimated KL to the reference of each response, in nats; None without a reference."""
    text: Any = None
    """Reference of the group as a person would read it, for the rollout log; None once restored."""
    parts: Sequence[Any] = ()
    """The packed group and its summary, as the loops hand them on; empty until it is generated."""
    response_tokens: float | None = None
    """Sampled tokens per response, in the mean; None until it is generated."""

    @property
    def prompt_index(self) -> int:
        """Row of the data set."""
        return self.prompt["prompt_index"]


class Ledger:
    """Every group from issued to trained or dropped, and the versions that admission rests on.

    All changes and waits happen on one event loop. Every wait has a time-out that names who waited;
    it does not end while an evaluation keeps the generators' weights.

    Args:
        contract: how stale a trained group may be.
        num_steps: training steps of the run; no group is admitted that none of them needs.
        prompts: endless (prompt, epoch) pairs; each is handed out once.
    """

    def __init__(
        self,
        contract: StalenessContract,
        num_steps: int,
        prompts: Iterator[tuple[Prompt, int]],
    ) -> None:
        self.num_steps = num_steps
        self.policy_version = 0
        """The trainer's, as its last step reported it."""
        self.published_version = 0
        """The newest that generators can pull; version 0 is the base model that they start with."""
        self.steps_done = 0
        self.attempt = 0
        """Which life of the run; it names the groups issued in it."""
        self.issued = 0
        self.trained_groups = 0
        self.dropped_groups: Counter[str] = Counter()
        self._contract, self._prompts = contract, prompts
        self._living: dict[int, LedgerEntry] = {}
        self._reissued: deque[tuple[Prompt, int]] = deque()
        self._interrupted: deque[LedgerEntry] = deque()
        """Groups whose generation was cut short: admitted again, under their numbers, first."""
        self._events: list[GroupEvent] = []
        self._changed = asyncio.Condition()
        self.turns = Turns()
        """Where every change is told of; in a replay each of them waits for its turn."""

    @property
    def finished(self) -> bool:
        """Whether every step of the run is done."""
        return self.steps_done >= self.num_steps

    @property
    def waiting_prompts(self) -> list[tuple[Prompt, int]]:
        """(prompt, epoch) pairs that were handed back and will be issued before any new one."""
        return list(self._reissued)

    def living(self) -> list[LedgerEntry]:
        """The groups that were issued and neither trained nor dropped, in that order."""
        return sorted([*self._living.values(), *self._interrupted], key=lambda e: e.group_id)

    def drain_events(self) -> list[GroupEvent]:
        """What happened to groups since the last call, in the order in which it happened."""
        events, self._events = self._events, []
        return events

    def in_state(self, state: State) -> list[LedgerEntry]:
        """The living groups in one state, in the order of admission."""
        return [entry for entry in self._living.values() if entry.state == state]

    async def admit(self, generator: str, timeout_s: float) -> LedgerEntry | None:
        """Wait until a group may start, and issue it.

        Args:
            generator: whose rollout waits.
            timeout_s: longest wait.

        Returns:
            The new group; None when no more groups are needed.

        Raises:
            TimeoutError: if the trainer published nothing that lets it start.
        """
        is_next = await self.turns.turn("issue", role=generator)
        if not (self.turns.replaying and is_next):
            await self._until(
                lambda: self.finished or (is_next and self._may_start()),
                timeout_s,
                f"{generator}'s rollout waited for the training loop to publish newer weights than "
                f"version {self.published_version}",
            )
        if self.finished:
            return None
        needed = self._needed_version()
        # Counted in steps, not versions: after a skipped step the two differ.
        target_step = self._contract.step_of(self.steps_done, len(self._living))
        if self._interrupted:
            entry = self._interrupted.popleft()
            entry.needed_version = entry.start_version = needed
            entry.target_step = target_step
        else:
            prompt, epoch = self._reissued.popleft() if self._reissued else next(self._prompts)
            entry = LedgerEntry(self.issued, prompt, epoch, needed, needed, target_step)
            self.issued += 1
            self._record("issued", entry)
        self._living[entry.group_id] = entry
        self.turns.happened(
            "issue",
            role=generator,
            group=entry.group_id,
            prompt=entry.prompt_index,
            epoch=entry.epoch,
            target_step=target_step,
            needed_version=needed,
        )
        return entry

    async def give_back(self, entry: LedgerEntry) -> None:
        """Record that a group in flight is generated by nobody: it is admitted again, first."""
        del self._living[entry.group_id]
        self._interrupt(entry)
        await self._wake()

    async def should_pull(self, generator: str, version: int, cause: str) -> bool:
        """Whether a generator asks for the newest weights now: where its own are older.

        Args:
            generator: its name.
            version: that it has.
            cause: what it needs them for; once per group or evaluation.
        """
        newer = version < self.published_version
        if due := self.turns.decided("pull", newer, role=generator, cause=cause):
            await self.turns.take("pull", role=generator, cause=cause)
        return due

    def next_batch(self, num_groups: int) -> tuple[int, int, tuple[list[int], list[int]] | None]:
        """What to take from the buffer for the next step.

        Args:
            num_groups: of a step.

        Returns:
            That number, the version that the step starts from, and in a replay the very groups to
            take and to drop as stale.
        """
        event = self.turns.upcoming(
            lambda e: e["event"] == "sample" or (e["event"] == "drop" and e["reason"] == "stale")
        )
        recorded = None
        if event is not None:
            sampled = event["event"] == "sample"
            recorded = (event["groups"], []) if sampled else ([], event["groups"])
        return num_groups, self.policy_version, recorded

    async def until_none_is_doomed(self, timeout_s: float) -> None:
        """Wait while a step without the groups in flight dooms some (`stale_groups: wait`).

        Args:
            timeout_s: longest wait.

        Raises:
            TimeoutError: if such a group stayed in flight.
        """

        if self.turns.replaying:  # it takes what the recorded run took
            return

        def start_versions(state: State) -> list[int]:
            return [entry.start_version for entry in self.in_state(state)]

        await self._until(
            lambda: (
                not self._contract.must_wait(
                    start_versions("buffered"), start_versions("in_flight"), self.policy_version
                )
            ),
            timeout_s,
            "the training loop waited for groups in flight that its next step would make stale",
        )

    async def finish_generation(self, group_id: int, response_tokens: Sequence[int]) -> None:
        """Record that the generation of a group ended.

        Args:
            group_id: a group in flight.
            response_tokens: sampled tokens of each of its responses.
        """
        await self.turns.take("finish", group=group_id, response_tokens=list(response_tokens))
        entry = self._living[group_id]
        entry.response_tokens = sum(response_tokens) / len(response_tokens)
        self._record("generated", entry)

    async def enter_buffer(self, group_id: int) -> None:
        """Record that a group lies in the replay buffer, unless it was consumed already."""
        await self.turns.take("buffer", group=group_id)
        if group_id in self._living and self._living[group_id].state == "in_flight":
            self._living[group_id].state = "buffered"
        await self._wake()

    async def take(self, group_ids: Iterable[int], stale: Sequence[int] = ()) -> list[LedgerEntry]:
        """Record what was taken from the buffer; in a new run before any other task runs.

        Args:
            group_ids: of the groups that the next step trains; none where there were too few.
            stale: of the groups that were found too old; their prompts are issued again.

        Returns:
            The entries of the groups to train, in the same order.
        """
        await self._drop(stale, "stale", reissue=True)
        entries = [self._living[group_id] for group_id in group_ids]
        if entries:
            groups = [entry.group_id for entry in entries]
            await self.turns.take("sample", step=self.steps_done + 1, groups=groups)
        for entry in entries:
            entry.state = "in_training"
        await self._wake()
        return entries

    async def finish_step(self, policy_version: int) -> None:
        """Record the end of a training step, whatever became of its policy version."""
        await self.turns.take("step", step=self.steps_done + 1, version=policy_version)
        groups = self.in_state("in_training")
        for entry in groups:
            del self._living[entry.group_id]
            self._record("trained", entry)
        self.trained_groups += len(groups)
        self.policy_version = policy_version
        self.steps_done += 1
        await self._wake()

    async def publish(self, version: int) -> None:
        """Record the newest version that generators can pull."""
        await self.turns.take("publish", version=version)
        self.published_version = version
        await self._wake()

    async def drop(self, group_ids: Iterable[int], reason: str, reissue: bool = False) -> None:
        """Record that groups will never be trained.

        Args:
            group_ids: living groups.
            reason: for the account; stale, failed or filtered.
            reissue: hand their prompts out again, before any new one.
        """
        await self._drop(list(group_ids), reason, reissue)
        await self._wake()

    async def _drop(self, group_ids: Sequence[int], reason: str, reissue: bool) -> None:
        if group_ids:
            group_ids = list(group_ids)
            await self.turns.take("drop", groups=group_ids, reason=reason, reissue=reissue)
        for group_id in group_ids:
            entry = self._living.pop(group_id)
            self.dropped_groups[reason] += 1
            self._record("dropped", entry, reason, reissue)
            if reissue:
                self._reissued.append((entry.prompt, entry.epoch))

    def state_dict(self) -> dict[str, Any]:
        """The whole account at this moment, between two training steps, in plain values."""
        assert not self.in_state("in_training"), "a checkpoint lies between two steps"
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "dropped_groups": dict(self.dropped_groups),
            "living": [vars(entry) | {"text": None, "parts": ()} for entry in self.living()],
            "reissued": self.waiting_prompts,
            "events": [asdict(event) for event in self._events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from another ledger's account, maybe under another contract or number of steps.

        What was in flight is lost, and so is what lay in the buffer where the contract does not
        let it be trained in its turn: these groups start again, under their numbers.
        `published_version` is 0 until the restored weights are published.

        Args:
            state: what `state_dict` returned.
        """
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.published_version = 0
        self.dropped_groups = Counter(state["dropped_groups"])
        self._reissued = deque(state["reissued"])
        self._events = [GroupEvent(**event) for event in state["events"]]
        entries = [LedgerEntry(**entry) for entry in state["living"]]
        buffered = [entry for entry in entries if entry.state == "buffered"]
        buffered.sort(key=lambda entry: (entry.start_version, entry.group_id))
        kept: set[int] = set()
        for entry in buffered:
            turn = self._contract.step_of(self.policy_version, len(kept))
            if self._contract.may_train(entry.start_version, turn):
                kept.add(entry.group_id)
        self._living = {entry.group_id: entry for entry in entries if entry.group_id in kept}
        self._interrupted.clear()
        for entry in entries:
            if entry.group_id not in kept:
                self._interrupt(entry)

    def _interrupt(self, entry: LedgerEntry) -> None:
        entry.state, entry.parts, entry.text = "in_flight", (), None
        entry.response_tokens, entry.reference_kl = None, None
        self._interrupted.append(entry)
        self._record("restarted", entry)

    def _record(
        self,
        kind: Kind,
        entry: LedgerEntry,
        reason: str | None = None,
        reissue: bool = False,
    ) -> None:
        self._events.append(
            GroupEvent(
                kind,
                entry.group_id,
                entry.prompt_index,
                entry.epoch,
                entry.response_tokens,
                reason,
                reissue,
            )
        )

    def _needed_version(self) -> int:
        return self._contract.needed_version(self.policy_version, len(self._living))

    def _may_start(self) -> bool:
        still_needed = self._contract.groups_of(self.num_steps - self.steps_done)
        if len(self._living) >= still_needed:
            return False
        return self.published_version >= self._needed_version()

    async def _until(self, condition: Callable[[], bool], timeout_s: float, waiting: str) -> None:
        while True:
            pinnings = self.turns.pinnings
            # asyncio.timeout, unlike wait_for, lets no task run between the condition and return.
            try:
                async with asyncio.timeout(timeout_s), self._changed:
                    await self._changed.wait_for(condition)
                return
            except TimeoutError:
                if pinnings == self.turns.pinnings and not self.turns.pinned:
                    raise TimeoutError(f"{waiting}; gave up after {timeout_s:g} s") from None

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
