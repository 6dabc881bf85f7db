"""Explores all interleavings of a small run: `make interleavings`.

    PYTHONPATH=tests python -m interleavings.explore max_staleness=1 steps=2 crash=trainer_0
    PYTHONPATH=tests python -m interleavings.explore --race group_not_given_back
    PYTHONPATH=tests python -m interleavings.explore --race torn_checkpoint --schedule 3.0.1
    PYTHONPATH=tests python -m interleavings.explore --tables  # of the page of results; hours

The keys are those of `Bound` in `world.py`. A schedule is the number of the step taken at each
point; with `--schedule` it is run again, and shown step by step with the events of the run.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from interleavings.exploring import Explored, Run, explore, prepared
from interleavings.races import RACES
from interleavings.rules import Finals
from interleavings.world import Bound

GENERATORS = ("generator_0", "generator_1")
_SYNCHRONOUS = Bound(max_staleness=0, steps=2)
_ASYNCHRONOUS = Bound(max_staleness=1, steps=2)
_DEATHS: tuple[dict[str, Any], ...] = (
    {"crash": GENERATORS},
    {"crash": GENERATORS, "max_restarts": 0},
    {"crash": ("replay_buffer",)},
    {"crash": ("parameter_server",)},
    {"crash": ("reference_0",), "references": 1},
    {"crash": ("trainer_0",)},
)
BOUNDS = (
    *(replace(_SYNCHRONOUS, stale_groups=how) for how in ("drop", "wait")),
    *(replace(_ASYNCHRONOUS, stale_groups=how) for how in ("drop", "wait")),
    *(replace(_ASYNCHRONOUS, push_every=2, stale_groups=how) for how in ("drop", "wait")),
    *(replace(_SYNCHRONOUS, failing=(0,)), replace(_SYNCHRONOUS, steps=3)),
    replace(_SYNCHRONOUS, steps=1, early=2),
    *(replace(_SYNCHRONOUS, steps=1, **death) for death in _DEATHS),
    *(replace(_SYNCHRONOUS, **death) for death in _DEATHS),
    *(replace(_ASYNCHRONOUS, **death) for death in _DEATHS),
    *(
        Bound(max_staleness=eta, push_every=push, stale_groups=how)
        for eta, push in ((1, 1), (1, 2), (2, 1), (2, 2))
        for how in ("drop", "wait")
    ),
)
"""What `--tables` explores, those that take longest last."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of `Bound`, e.g. steps=2")
    parser.add_argument("--race", choices=RACES, help="plant this race, in its own bound")
    parser.add_argument("--schedule", help="run this one, e.g. 0.1.3.2")
    parser.add_argument("--order", default="depth", help="depth, or a seed")
    parser.add_argument("--max-cpu-s", type=float, default=1800, help="for each bound")
    parser.add_argument("--tables", action="store_true", help="explore all bounds, plant all races")
    options = parser.parse_intermixed_args()
    with prepared() as logs:
        if options.tables:
            return tables(logs, options.max_cpu_s)
        race = RACES.get(options.race)
        bound = bound_of(options.keys, race.bound if race else Bound())
        with race.planted() if race else contextlib.nullcontext():
            if options.schedule is not None:
                numbers = [int(number) for number in options.schedule.split(".") if number]
                return show(bound, numbers, logs)
            order = options.order
            order = int(order) if order.isdigit() else order
            found = explore(bound, logs=logs, order=order, max_cpu_s=options.max_cpu_s)
            sys.stdout.write(f"{row(bound, found)}\n")
            if found.failure is None:
                return 0
            sys.stdout.write(f"--schedule {'.'.join(map(str, found.failure.schedule))}\n")
            return show(bound, found.failure.schedule, logs)


def bound_of(keys: Sequence[str], bound: Bound) -> Bound:
    changes: dict[str, Any] = {}
    for key, _, text in (given.partition("=") for given in keys):
        values = tuple(int(each) if each.isdigit() else each for each in text.split(",") if each)
        changes[key] = values if isinstance(getattr(bound, key), tuple) else values[0]
    return replace(bound, **changes)


def show(bound: Bound, schedule: Sequence[int], logs: Path) -> int:
    """Run a schedule, then the first choices, and write what happens; return 1 if it fails."""
    run = Run(bound, logs, Finals())
    seen, numbers = 0, iter(schedule)
    while run.choices and run.world is not None:
        world = run.world
        number = next(numbers, 0)
        step, others = len(run.taken) + 1, len(run.choices) - 1
        label = run.take(number)
        besides = f"   ({others} others possible)" if others else ""
        sys.stdout.write(f"{step:4} {label}{besides}\n")
        for event in world.events[seen:]:
            shown = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("event", "attempt"))
            sys.stdout.write(f"         {event['event']}: {shown}\n")
        seen = len(world.events)
    sys.stdout.write(f"{run.problem or 'the run ends, and every rule holds'}\n")
    run.close()
    return int(bool(run.problem))


def row(bound: Bound, found: Explored) -> str:
    always, defaults = ("max_staleness", "steps"), vars(Bound())
    shown = ", ".join(
        f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in vars(bound).items()
        if value != defaults[key] or key in always
    )
    schedules = f"{found.schedules:,}" if found.whole else "not all"
    figures = f"{found.states:,} | {found.runs:,} | {schedules} | {found.longest or '-'}"
    failed = found.failure.problem if found.failure else "none"
    return f"| {shown} | {figures} | {found.cpu_s:.0f} | {failed} |"


def tables(logs: Path, max_cpu_s: float) -> int:
    """Write the tables of the page of results; return 1 if a rule breaks or a race escapes."""
    failed = False
    for bound in BOUNDS:
        found = explore(bound, logs=logs, max_cpu_s=max_cpu_s)
        sys.stdout.write(f"{row(bound, found)}\n")
        failed |= found.failure is not None
    for name, race in RACES.items():
        with race.planted():
            found = explore(race.bound, logs=logs, order=1, max_cpu_s=max_cpu_s)
        how = found.failure.problem if found.failure else "NOT FOUND"
        cells = f"`{name}`: {race.what} | {found.runs} | {found.cpu_s:.1f} | {how}"
        sys.stdout.write(f"| {cells} |\n")
        failed |= found.failure is None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
