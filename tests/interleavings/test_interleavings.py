"""All schedules of the smallest runs keep every rule, and planted races are found."""

import random
from dataclasses import replace

import pytest
from interleavings.exploring import Run, explore, prepared
from interleavings.races import RACES
from interleavings.rules import Finals
from interleavings.states import state_of
from interleavings.world import Bound
from lib.properties import many

from grpo_tools.replay.recorded_run import ORDERED

SYNCHRONOUS = Bound(max_staleness=0, steps=1)
BOUNDS = {
    "synchronous": SYNCHRONOUS,
    "answers come early": replace(SYNCHRONOUS, generators=1, early=1),
    "asynchronous, one generator": Bound(generators=1, rollouts_in_flight=2, steps=2),
    "a failing prompt": replace(SYNCHRONOUS, failing=(0,)),
    **{
        f"{role} dies": replace(SYNCHRONOUS, generators=1, crash=(role,))
        for role in ("replay_buffer", "parameter_server")
    },
}
LARGER = {
    "a generator is given up": replace(
        SYNCHRONOUS, crash=("generator_0", "generator_1"), max_restarts=0
    ),
    "a generator dies": replace(SYNCHRONOUS, generators=1, crash=("generator_0",)),
    "a trainer dies": replace(SYNCHRONOUS, generators=1, crash=("trainer_0",)),
    "anyone dies": Bound(
        steps=2,
        references=1,
        crash=("generator_0", "trainer_0", "replay_buffer", "parameter_server", "reference_0"),
    ),
}
SLOW = {
    *("label_at_the_end", "stale_prompt_lost", "wait_lets_expire", "torn_checkpoint"),
    *("added_after_taken", "version_of_a_restart", "server_forgets", "buffer_not_refilled"),
    "wait_for_no_batch",
}
"""Races that take hundreds of runs to find: `make interleavings` plants them, too."""


@pytest.fixture(scope="module")
def logs():
    with prepared() as folder:
        yield folder


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_every_schedule_of_a_small_run_keeps_every_rule(bound, logs):
    found = explore(bound, logs=logs)
    assert found.failure is None and found.whole
    assert found.schedules > 1


@pytest.mark.parametrize("bound", LARGER.values(), ids=LARGER)
def test_random_schedules_of_larger_runs_keep_every_rule(bound, logs):
    found = explore(bound, logs=logs, order=0, max_runs=150)
    assert found.failure is None and found.runs == 150


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] if n in SLOW else []) for n in RACES]
)
def test_a_planted_race_is_found_and_its_schedule_shows_it_again(name, logs):
    race = RACES[name]
    with race.planted():
        found = explore(race.bound, logs=logs, order=1)
        assert found.failure is not None, f"{race.what}: not found in {found.runs} runs"
        assert followed(race.bound, found.failure.schedule, logs) == found.failure.problem
    assert followed(race.bound, found.failure.schedule, logs) != found.failure.problem


def followed(bound, schedule, logs):
    """Run a schedule for as long as it fits, and return the rule that it breaks."""
    run = Run(bound, logs, Finals())
    for number in schedule:
        if number < len(run.choices):
            run.take(number)
    run.close()
    return run.problem


def test_equal_states_go_on_alike_however_they_were_reached(logs):
    """What a state leaves out makes no difference: each choice leads to the same next state."""
    bound = Bound(generators=1, rollouts_in_flight=2, steps=2, crash=("trainer_0", "generator_0"))
    labels, following, chance, again = {}, {}, random.Random(0), 0
    for _ in range(60):
        run, state, taken = Run(bound, logs, Finals()), None, ""
        while run.choices:
            before, state = state, state_of(run.world)
            again += state in labels
            assert labels.setdefault(state, possible(run)) == possible(run)
            if before is not None and labels[before].count(taken) == 1:
                assert following.setdefault((before, taken), state) == state
            taken = run.take(chance.randrange(len(run.choices)))
        assert not run.problem
        run.close()
    assert again > 200


REPLAYED = {
    "synchronous": Bound(max_staleness=0),
    "asynchronous": Bound(steps=5, groups_per_step=2, rollouts_in_flight=2, failing=(1, 4)),
    "few pushes and pulls": Bound(steps=5, max_staleness=2, push_every=2, pull_every=3),
    "waits for stale groups": Bound(steps=5, generators=1, stale_groups="wait", references=1),
}


@pytest.mark.parametrize("bound", REPLAYED.values(), ids=REPLAYED)
def test_any_run_is_replayed_in_its_order_by_any_schedule(bound, logs):
    chance, orders = random.Random(0), set()
    for _ in range(many(40)):
        first = at_random(Run(bound, logs, Finals()), chance)
        late = chance.choice(("", "load_weights"))
        again = at_random(Run(bound, logs, Finals(), first.events), chance, late)
        assert loaded(first) == loaded(again)
        events = [
            [e | {"token_versions": None} for e in world.events if e["event"] in ORDERED]
            for world in (first, again)
        ]
        assert events[0] == events[1]
        assert again.recording.summary() == f"{len(events[0])} events in the recorded order"
        orders.add(str(events[0]))
    assert len(orders) > 1, "there is nothing that a replay could make otherwise"


def loaded(world):
    """Versions that each generator loaded, in order."""
    loads = [(e["role"], e["version"]) for e in world.events if e["event"] == "load"]
    return sorted(loads, key=lambda each: each[0])


def at_random(run, chance, late=""):
    """Run one schedule to its end, `late` calls as late as can be; returns the world then."""
    while run.choices:
        numbers = range(len(run.choices))
        others = [n for n in numbers if not late or late not in run.choices[n].label]
        run.take(chance.choice(others or numbers))
    assert not run.problem, run.problem
    world = run.world
    run.close()
    return world


def possible(run):
    return sorted(choice.label for choice in run.choices)
