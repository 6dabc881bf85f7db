"""The ledger: tracks the state of every group, and decides when the next group may start."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger_entry import LedgerEntry, State
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.trajectory import GroupSummary, Prompt

_COUNTERS = ("policy_version", "steps_done", "issued", "trained_groups")


class Ledger:
    """Tracks every group until it is trained or dropped, and decides when groups are admitted.

    Every change is recorded in `events`; in a replay, a change waits for its recorded turn. All
    changes and waits happen on one event loop. Every wait has a time-out, whose error says who
    waited. An evaluation that pins the generators' weights suspends the time-outs.
    """

    def __init__(
        self,
        contract: StalenessContract,
        num_steps: int,
        prompts: Iterator[tuple[Prompt, int]],
    ) -> None:
        self.num_steps = num_steps
        self.policy_version = 0
        """The trainers' policy version after their last step."""
        self.published_version = 0
        """Newest policy version that generators can pull; they start with 0, the base model."""
        self.steps_done = 0
        self.issued = 0
        self.trained_groups = 0
        self.dropped_groups: Counter[str] = Counter()
        self.events = EventOrder()
        """Event order that records every change; `open_run` replaces it by the run's."""
        self.reuse = GroupReuse(contract)
        """Chooses trained groups to train again; `open_run` replaces this default."""
        self._contract, self._prompts = contract, prompts
        self._living: dict[int, LedgerEntry] = {}
        self._reissued: deque[tuple[Prompt, int]] = deque()
        self._interrupted: deque[LedgerEntry] = deque()
        """Groups whose generation was cut short; they are admitted first, with their old ids."""
        self._changed = asyncio.Event()
        """Event that is set at the next change; a new event then takes its place."""
        self._opened = asyncio.Event()
        """Like `_changed`, but only for changes that may let a group start: hundreds await it."""
        self._pins = 0
        """Counts starts and ends of `pin_weights`; it is odd while an evaluation pins weights."""

    @property
    def finished(self) -> bool:
        """Whether every step of the run is done."""
        return self.steps_done >= self.num_steps

    @property
    def attempt(self) -> int:
        """Number of this attempt of the run, from 0; a resume or rollback starts the next one."""
        return self.events.attempt

    @property
    def waiting_prompts(self) -> list[tuple[Prompt, int]]:
        """(prompt, epoch) pairs of dropped groups, to be issued again before any new prompt."""
        return list(self._reissued)

    @property
    def weights_pinned(self) -> bool:
        """Whether a running evaluation needs the generators' weights unchanged."""
        return self._pins % 2 == 1

    @contextmanager
    def pin_weights(self) -> Iterator[None]:
        """Context manager: suspends time-outs while an evaluation needs unchanged weights."""
        self._pins += 1
        try:
            yield
        finally:
            self._pins += 1

    def living(self) -> list[LedgerEntry]:
        """Return the groups that are neither trained nor dropped, sorted by group id."""
        return sorted([*self._living.values(), *self._interrupted], key=lambda e: e.group_id)

    def in_state(self, state: State) -> list[LedgerEntry]:
        """Return the living groups in one state, in the order of admission."""
        return [entry for entry in self._living.values() if entry.state == state]

    async def admit(self, generator: str, timeout_s: float) -> LedgerEntry | None:
        """Wait until a group may start; return its entry, or None once the run is finished."""
        is_next = await self.events.wait_turn("issue", role=generator)
        if not (self.events.recording and is_next):
            await self._until(
                lambda: self.finished or (is_next and self._may_start()),
                lambda: self._opened,
                timeout_s,
                f"{generator}'s rollout waited for the training loop (timeouts.batch_s, "
                "train_step_s, weights_s) to publish newer weights than "
                f"version {self.published_version}",
            )
        if self.finished:
            return None
        needed = self._needed_version()
        # Counted in steps, not versions: after a skipped step the two differ.
        ahead, reused = len(self._living), self.reuse.counts
        target_step = self._contract.step_of(self.steps_done, ahead, reused)
        if self._interrupted:
            entry = self._interrupted.popleft()
            entry.needed_version = entry.start_version = needed
            entry.target_step = target_step
        else:
            prompt, epoch = self._reissued.popleft() if self._reissued else next(self._prompts)
            entry = LedgerEntry(self.issued, prompt, epoch, needed, needed, target_step)
            self.issued += 1
        self._living[entry.group_id] = entry
        group = {"group": entry.group_id, "prompt": entry.prompt_index, "epoch": entry.epoch}
        need = {"target_step": target_step, "needed_version": needed}
        self.events.record("issue", role=generator, **group, **need)
        return entry

    def give_back(self, entry: LedgerEntry) -> None:
        """Take back a group in flight whose generator was lost, to admit it before new groups."""
        del self._living[entry.group_id]
        self._interrupt(entry)
        self.events.note("interrupt", group=entry.group_id)
        self._wake()

    async def should_pull(self, generator: str, version: int, cause: str) -> bool:
        """Decide whether a generator pulls newer weights now; if so, record the pull."""
        pull, recording = {"role": generator, "cause": cause}, self.events.recording
        due = recording.has("pull", **pull) if recording else version < self.published_version
        if due:
            await self.events.take("pull", **pull)
        return due

    def next_batch(self, num_groups: int) -> tuple[Any, ...]:
        """Return the arguments of `ReplayBuffer.take` for the next step."""
        recording = self.events.recording
        recorded = recording.next_batch() if recording else None
        again = [part for each in self.reuse.chosen for part in each.entry.parts]
        return num_groups - len(self.reuse.chosen), self.policy_version, recorded, *again

    async def until_none_is_doomed(self, num_groups: int, timeout_s: float) -> None:
        """Wait until a batch can be taken without making a group in flight too old to train.

        Used with `stale_groups: wait`; see `StalenessContract.must_wait`. The batch must be
        complete: a group that is admitted while the step waits for the rest could become too old.
        """
        if self.events.recording:  # the recording says which groups are taken
            return

        def start_versions(state: State) -> list[int]:
            return [entry.start_version for entry in self.in_state(state)]

        def may_take() -> bool:
            buffered, in_flight = start_versions("buffered"), start_versions("in_flight")
            reused = self.reuse.counts
            doomed = self._contract.must_wait(buffered, in_flight, self.policy_version, reused)
            return len(buffered) >= num_groups - reused.next and not doomed

        await self._until(
            may_take,
            lambda: self._changed,
            timeout_s,
            f"the training loop waited for {num_groups} groups in replay_buffer and those in "
            "flight that its next step would make stale (timeouts.batch_s)",
        )

    async def finish_generation(
        self, group_id: int, response_tokens: Sequence[int], scored: Sequence[bool] | None = None
    ) -> None:
        """Record that a group was generated: its token counts and, from `scored`, its successes."""
        entry, result = self._living[group_id], {}
        if scored is not None:
            result = {"prompt": entry.prompt_index, "successes": sum(scored), "scored": len(scored)}
        tokens = list(response_tokens)
        await self.events.take("finish", group=group_id, response_tokens=tokens, **result)
        entry.tokens = sum(response_tokens)

    async def enter_buffer(self, group_id: int) -> None:
        """Record that a group is in the replay buffer, unless a step has taken it already."""
        await self.events.take("buffer", group=group_id)
        if group_id in self._living and self._living[group_id].state == "in_flight":
            self._living[group_id].state = "buffered"
        self._wake(opened=False)

    async def take(
        self,
        group_ids: Iterable[int],
        stale: Sequence[int] = (),
        summaries: Sequence[GroupSummary] = (),
    ) -> list[LedgerEntry]:
        """Record which groups left the buffer; return the groups to train, new before reused ones.

        In a live run, no other task runs before the record is made.
        """
        await self.drop(stale, "stale", reissue=True)
        entries = [self._living[group_id] for group_id in group_ids]
        if not entries:
            return []
        groups = [entry.group_id for entry in entries]
        reuse = self.reuse.begin_step(entries, summaries)
        await self.events.take("sample", step=self.steps_done + 1, groups=groups, **reuse)
        for entry in entries:
            entry.state = "in_training"
        self._wake(opened=False)
        return entries + [each.entry for each in self.reuse.chosen]

    def finish_step(self, policy_version: int, outcome: Mapping[str, Any] | None = None) -> None:
        """Record the end of a training step, and what it trained.

        In a replay, no await may lie between the turn of the event `step` and this call.
        """
        versions = {"trained_from": self.policy_version, "policy_version": policy_version}
        self.events.record("step", outcome, step=self.steps_done + 1, **versions)
        groups = self.in_state("in_training")
        for entry in groups:
            del self._living[entry.group_id]
            entry.state = "trained"
        self.trained_groups += len(groups)
        self.reuse.end_step(self.policy_version, policy_version)
        self.policy_version = policy_version
        self.steps_done += 1
        self._wake()

    async def publish(self, version: int) -> None:
        """Record that generators can now pull `version`, the newest policy version."""
        await self.events.take("publish", version=version)
        self.published_version = version
        self._wake()

    async def drop(self, group_ids: Iterable[int], reason: str, reissue: bool = False) -> None:
        """Record that groups will never be trained; `reissue`: their prompts are issued again."""
        if not (groups := list(group_ids)):
            return
        tokens = [self._living[group_id].tokens for group_id in groups]
        why = {"reason": reason, "reissue": reissue}
        await self.events.take("drop", groups=groups, **why, tokens=tokens)
        for group_id in groups:
            entry = self._living.pop(group_id)
            self.dropped_groups[reason] += 1
            if reissue:
                self._reissued.append((entry.prompt, entry.epoch))
        self._wake()

    def stored(self) -> list[LedgerEntry]:
        """Return the groups that a checkpoint stores: buffered ones, then those to reuse."""
        return self.in_state("buffered") + self.reuse.kept

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state between two training steps, as plain values."""
        assert not self.in_state("in_training"), "a checkpoint lies between two steps"
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "dropped_groups": dict(self.dropped_groups),
            "living": [entry.state_dict() for entry in self.living()],
            "reissued": self.waiting_prompts,
            **self.reuse.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; the contract and the number of steps may have changed since.

        Groups in flight are lost, and so are buffered groups that the contract makes too old for
        the step they would be trained in. All of them are generated again, with their old ids.
        `published_version` is 0 until the restored weights are published.
        """
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.published_version = 0
        self.dropped_groups = Counter(state["dropped_groups"])
        self.reuse.load_state_dict(state, self.policy_version)
        self._reissued = deque(state["reissued"])
        entries = [LedgerEntry(**entry) for entry in state["living"]]
        buffered = [entry for entry in entries if entry.state == "buffered"]
        buffered.sort(key=lambda entry: (entry.start_version, entry.group_id))
        kept: set[int] = set()
        for entry in buffered:
            turn = self._contract.step_of(self.policy_version, len(kept), self.reuse.counts)
            if self._contract.may_train(entry.start_version, turn):
                kept.add(entry.group_id)
        self._living = {entry.group_id: entry for entry in entries if entry.group_id in kept}
        self._interrupted.clear()
        for entry in entries:
            if entry.group_id not in kept:
                self._interrupt(entry)

    def _interrupt(self, entry: LedgerEntry) -> None:
        entry.state, entry.parts, entry.text = "in_flight", (), None
        entry.tokens, entry.reference_kl = None, None
        self._interrupted.append(entry)

    def _needed_version(self) -> int:
        ahead, reused = len(self._living), self.reuse.counts
        return self._contract.needed_version(self.policy_version, ahead, reused)

    def _may_start(self) -> bool:
        steps_left = self.num_steps - self.steps_done
        still_needed = self._contract.groups_of(steps_left, self.reuse.counts)
        if len(self._living) >= still_needed:
            return False
        return self.published_version >= self._needed_version()

    async def _until(
        self,
        condition: Callable[[], bool],
        change: Callable[[], asyncio.Event],
        timeout_s: float,
        waiting: str,
    ) -> None:
        while True:
            pins = self._pins
            # asyncio.timeout, unlike wait_for, lets no task run between the condition and return.
            try:
                async with asyncio.timeout(timeout_s):
                    while not condition():
                        await change().wait()
                return
            except TimeoutError:
                if pins == self._pins and not self.weights_pinned:
                    raise TimeoutError(f"{waiting}; gave up after {timeout_s:g} s") from None

    def _wake(self, opened: bool = True) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if opened:
            self._opened.set()
            self._opened = asyncio.Event()
