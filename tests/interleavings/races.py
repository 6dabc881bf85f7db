"""Races to plant, each in one method while a schedule is explored: all of them must be found."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from interleavings.roles import Generator
from interleavings.world import NEVER_S, Bound

from grpo_components.cluster.handles import (
    GeneratorHandle,
    ParameterServerHandle,
    ReplayBufferHandle,
    Roles,
)
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.journal import Journal


@dataclass(frozen=True)
class Race:
    """A fault in one method, and a small job in which it shows."""

    what: str
    bound: Bound
    owner: type
    method: str
    fault: Callable[..., Any]
    """Gets the method that it replaces, then the method's own arguments."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        original = getattr(self.owner, self.method)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            return self.fault(original, *args, **kwargs)

        with mock.patch.object(self.owner, self.method, faulty):
            yield


def _may_start_by_trainers_version(_: Any, self: Ledger) -> bool:
    still_needed = self._contract.groups_of(self.num_steps - self.steps_done)
    is_needed = len(self._living) < still_needed
    return is_needed and self.policy_version >= self._needed_version()


async def _take_one_less(original: Any, self: ReplayBuffer, number: int, *given: Any) -> Any:
    return await original(self, max(1, number - 1), *given)


def _batch_as_it_came(original: Any, self: ReplayBuffer, items: Any) -> Any:
    came = self._buffer[:]
    return sorted(original(self, items), key=lambda item: -came.index(item))


def _version_at_the_end(original: Any, self: Generator, group: Any) -> Any:
    return original(self, group._replace(first=group.last))


async def _version_before_the_swap(
    original: Any, self: WeightSync, generator: GeneratorHandle, cause: str
) -> None:
    if generator.version < self._ledger.published_version:
        generator.version, before = self._ledger.published_version, generator.version
        newest = await self._roles.server.newest(before)
        loaded = await generator.load_weights(*newest[:2])
        assert loaded is not None


def _keep_in_flight(_: Any, self: Ledger, entry: Any) -> None:
    self._wake()


async def _drop_for_good(original: Any, self: Ledger, ids: Any, reason: str, **_: Any) -> None:
    await original(self, ids, reason)


def _never_wait(*_: Any) -> bool:
    return False


async def _look_at_once(original: Any, self: Ledger, num_groups: int, timeout_s: float) -> None:
    await original(self, 0, timeout_s)


async def _add_whatever_happened(_: Any, self: ReplayBufferHandle, entry: Any) -> None:
    await self.role.call("add", *entry.parts, timeout_s=NEVER_S)
    await self._ledger.enter_buffer(entry.group_id)


async def _version_of_a_restart(
    original: Any, self: WeightSync, generator: Any, entry: Any
) -> None:
    await original(self, generator, entry)
    if generator.version:  # a wait for an answer, in which the generator may die
        await self._roles.server.newest()
    entry.start_version = generator.version


async def _nothing(*_: Any) -> None:
    pass


async def _save_prompts_later(
    original: Any, self: Journal, step: int, roles: Roles, batch: Any
) -> None:
    await roles.trainers.hold_state(in_background=False)
    self.held[0]["prompts"] = self._prompts.state_dict()
    await original(self, step, roles, batch)


_GENERATORS = ("generator_0", "generator_1")
_TWO_ROLLOUTS = Bound(generators=1, rollouts_in_flight=2, max_staleness=1)
_OVERTAKEN = Bound(max_staleness=1, steps=3)

RACES = {
    "trainers_version": Race(
        "admission counts the trainers' version in place of the published one",
        Bound(max_staleness=1, push_every=2, steps=3),
        *(Ledger, "_may_start", _may_start_by_trainers_version),
    ),
    "part_of_a_batch": Race(
        "a step takes fewer groups than a batch",
        Bound(max_staleness=0, groups_per_step=2, steps=1),
        *(ReplayBuffer, "take", _take_one_less),
    ),
    "batch_as_it_came": Race(
        "a batch has its groups in the order in which they came",
        Bound(max_staleness=0, groups_per_step=2, steps=1),
        *(ReplayBuffer, "_remove", _batch_as_it_came),
    ),
    "label_at_the_end": Race(
        "a group is labelled with the version at its end",
        *(_TWO_ROLLOUTS, Generator, "summary", _version_at_the_end),
    ),
    "label_before_the_swap": Race(
        "a generator's version is set before it has loaded the weights",
        Bound(generators=1, rollouts_in_flight=2, max_staleness=0, groups_per_step=2, steps=2),
        *(WeightSync, "pull", _version_before_the_swap),
    ),
    "group_not_given_back": Race(
        "the group of a lost generator stays in flight",
        Bound(max_staleness=0, steps=1, crash=_GENERATORS, max_restarts=0),
        *(Ledger, "give_back", _keep_in_flight),
    ),
    "stale_prompt_lost": Race(
        "the prompt of a stale group is not issued again",
        *(_OVERTAKEN, Ledger, "drop", _drop_for_good),
    ),
    "wait_lets_expire": Race(
        "with `wait`, a step does not wait for groups in flight that it makes too old",
        Bound(max_staleness=1, steps=3, stale_groups="wait"),
        *(StalenessContract, "must_wait", _never_wait),
    ),
    "wait_for_no_batch": Race(
        "with `wait`, a step looks for groups that it makes too old before its batch is there",
        Bound(max_staleness=1, steps=3, stale_groups="wait"),
        *(Ledger, "until_none_is_doomed", _look_at_once),
    ),
    "buffer_not_refilled": Race(
        "a restarted buffer is not filled again",
        Bound(max_staleness=0, steps=1, generators=1, crash=("replay_buffer",)),
        *(ReplayBufferHandle, "refill", _nothing),
    ),
    "added_after_taken": Race(
        "a restarted buffer gets a group again that a step has taken",
        Bound(max_staleness=0, steps=2, crash=("replay_buffer",)),
        *(ReplayBufferHandle, "add", _add_whatever_happened),
    ),
    "version_of_a_restart": Race(
        "a group whose generator restarts while it pulls is labelled with the base model's version",
        Bound(max_staleness=0, steps=2, generators=1, crash=("generator_0",)),
        *(WeightSync, "pull_if_due", _version_of_a_restart),
    ),
    "server_forgets": Race(
        "a restarted server does not get the last push again",
        Bound(max_staleness=0, steps=2, generators=1, crash=("parameter_server",)),
        *(ParameterServerHandle, "push_again", _nothing),
    ),
    "buffer_survives_rollback": Race(
        "the buffer keeps its groups when the run returns to a checkpoint",
        Bound(max_staleness=1, steps=2, generators=1, crash=("trainer_0",)),
        *(ReplayBufferHandle, "begin_again", _nothing),
    ),
    "torn_checkpoint": Race(
        "a checkpoint has the prompts' position of a later moment than the ledger",
        Bound(max_staleness=0, steps=2, generators=1, crash=("trainer_0",)),
        *(Journal, "save", _save_prompts_later),
    ),
}
