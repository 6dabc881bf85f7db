"""Explores every schedule of a bound: each is run again from its start."""

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from interleavings.around import without_ray
from interleavings.rules import Finals, check_end
from interleavings.states import state_of
from interleavings.world import Bound, Choice, World

from grpo_components.exchange.event_order import Event

MAX_STEPS = 2000
"""Steps of one schedule; more means that it never ends."""
_RUNS_PER_COLLECTION = 100


@dataclass(frozen=True)
class Failure:
    schedule: list[int]
    """Number of the choice taken at each point, from 0."""
    problem: str


@dataclass
class Explored:
    runs: int = 0
    """Schedules that were run, most of them until they met an earlier one."""
    states: int = 0
    """Different states that were seen."""
    schedules: int = 0
    """Different whole schedules that this covers; 0 unless nothing is left to explore."""
    longest: int = 0
    """Steps of the longest one."""
    cpu_s: float = 0.0
    whole: bool = False
    """Whether nothing is left to explore."""
    failure: Failure | None = None
    following: dict[bytes, list[bytes | None]] = field(default_factory=dict, repr=False)
    """The state after each choice, by the state before it; None: not followed yet."""


@contextmanager
def prepared() -> Iterator[Path]:
    """Context manager: gives a folder, keeps Ray away, and collects garbage only between runs."""
    with tempfile.TemporaryDirectory() as folder, without_ray():
        (Path(folder) / "logs").mkdir()
        World(Bound(), Path(folder)).close()  # imports what is imported late
        # A schedule that is left half-way leaves coroutines, whose end asyncio reports.
        hook, sys.unraisablehook = sys.unraisablehook, lambda given: None
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield Path(folder)
        finally:
            gc.enable()
            gc.collect()
            gc.unfreeze()
            sys.unraisablehook = hook


class Run:
    def __init__(
        self, bound: Bound, logs: Path, finals: Finals, replayed: Sequence[Event] | None = None
    ) -> None:
        self.taken: list[int] = []
        self.choices: Sequence[Choice] = []
        self.problem, self._finals = "", finals
        self.world: World | None = None
        self._guarded(lambda: setattr(self, "world", World(bound, logs, replayed)))
        self._look()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # whatever breaks is what is looked for
            self.problem = _cause(error)

    def take(self, number: int) -> str:
        """Take one of the choices, and return what it was."""
        choice, world = self.choices[number], self.world
        assert world is not None, "it has begun"
        self.taken.append(number)
        self._guarded(lambda: world.take(choice))
        self._look()
        return choice.label

    def _look(self) -> None:
        world = self.world
        self.choices = [] if self.problem or world is None else world.choices()
        if self.problem or self.choices or world is None:
            return
        if world.main.done():
            self._guarded(lambda: world.main.result())
            self.problem = self.problem or check_end(world, self._finals)
        else:
            self.problem = f"deadlock: {_waiting(world)}"

    def close(self) -> None:
        if self.world is not None:
            self.world.close()
        self.world = None


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def _waiting(world: World) -> str:
    ledger = world.ledger
    living = ", ".join(f"{entry.group_id} {entry.state}" for entry in ledger.living())
    counts = f"{ledger.steps_done} steps done, version {ledger.published_version} published"
    return f"nothing can go on; {counts}, groups: {living or 'none'}"


def explore(
    bound: Bound,
    *,
    logs: Path,
    order: int | str = "depth",
    max_runs: float = float("inf"),
    max_cpu_s: float = float("inf"),
) -> Explored:
    """Explore every schedule of a bound, until one fails.

    A schedule is followed until it comes to a state where another one has been: what comes after
    that is the same for both.
    """
    began = time.process_time()
    found, finals, chance = Explored(), Finals(), random.Random(order)
    todo: list[tuple[list[int], bytes | None]] = [([], None)]
    while todo and found.runs < max_runs and found.failure is None:
        if time.process_time() - began > max_cpu_s:
            break
        if order != "depth":
            chosen = chance.randrange(len(todo))
            todo[chosen], todo[-1] = todo[-1], todo[chosen]
        prefix, parent = todo.pop()
        run = Run(bound, logs, finals)
        for number in prefix:
            run.take(number)
        todo += _follow(run, parent, found.following, order, chance)
        found.runs += 1
        if run.problem:
            found.failure = Failure(run.taken, run.problem)
        run.close()
        if found.runs % _RUNS_PER_COLLECTION == 0:
            gc.collect()
    found.whole = not todo and found.failure is None
    found.states = len(found.following)
    if found.whole:
        found.schedules, found.longest = paths(found.following)
    found.cpu_s = time.process_time() - began
    return found


def _follow(
    run: Run,
    parent: bytes | None,
    following: dict[bytes, list[bytes | None]],
    order: int | str,
    chance: random.Random,
) -> list[tuple[list[int], bytes | None]]:
    """Follow a run until it fails, ends or meets another; return what is left to follow later."""
    later: list[tuple[list[int], bytes | None]] = []
    while not run.problem and run.world is not None:
        state = state_of(run.world)
        if parent is not None:
            following[parent][run.taken[-1]] = state
        if state in following:
            break
        following[state] = [None] * len(run.choices)
        numbers = list(range(len(run.choices)))
        if order != "depth":
            chance.shuffle(numbers)
        later += [([*run.taken, number], state) for number in numbers[:0:-1]]
        if not numbers:
            break
        parent = state
        run.take(numbers[0])
        if len(run.taken) > MAX_STEPS:
            run.problem = f"more than {MAX_STEPS} steps: it never ends"
    return later


def paths(following: dict[bytes, list[bytes | None]]) -> tuple[int, int]:
    """Return the number of ways from the first state to an end, and the steps of the longest."""
    counts: dict[bytes, tuple[int, int]] = {}
    open_states: set[bytes] = set()
    first = next(iter(following))
    stack = [first]
    while stack:
        state = stack[-1]
        after = [each for each in following[state] if each is not None]
        missing = [each for each in after if each not in counts]
        if missing:
            open_states.add(state)
            assert missing[0] not in open_states, "a run may go in circles, and never end"
            stack.append(missing[0])
            continue
        open_states.discard(stack.pop())
        ways = sum(counts[each][0] for each in after) if after else 1
        counts[state] = ways, 1 + max(counts[each][1] for each in after) if after else 0
    return counts[first]
