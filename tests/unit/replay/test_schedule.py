"""What entered an engine before which step is written down, and a replay keeps to it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from lib.rows import read_rows, write_rows

from grpo_components.errors import ReplayError
from grpo_components.rollout.schedule import STOP, Schedule, open_schedule, schedule_file
from grpo_tools.replay.recorded_run import RecordedSchedule, read_schedule


def replay(*entries, timeout_s=10.0, **options):
    return Schedule(recorded=RecordedSchedule(entries, timeout_s, **options))


def entered(schedule, steps):
    """What enters before each step of an engine that is never idle, and nothing after it."""
    taken = []
    for step in steps:
        while (command := schedule.take(step, idle=False)) is not None:
            taken.append((step, command))
    return taken


def test_a_new_run_takes_what_has_come_and_writes_it_down(tmp_path):
    schedule = open_schedule(str(tmp_path), number=1)
    schedule.put("group 3 sample 0", "a")
    schedule.put("weights 2", "b")
    assert entered(schedule, [0, 1]) == [(0, "a"), (0, "b")]
    schedule.put("group 3 sample 1", "c")
    assert entered(schedule, [2]) == [(2, "c")]
    schedule.put(STOP, "end")
    assert schedule.take(3, idle=True) == "end"
    schedule.close()
    life, *lines = read_rows(schedule_file(tmp_path, 1))
    assert life == {"life": 0, "probe_tokens": 40}
    assert [(line["step"], line["entered"]) for line in lines] == [
        (0, ["group 3 sample 0", "weights 2"]),
        (2, ["group 3 sample 1"]),
    ]


def test_weights_of_an_idle_engine_are_written_before_it_waits(tmp_path):
    schedule = open_schedule(str(tmp_path))
    schedule.put("weights 1", "w")
    assert schedule.take(0, idle=True) == "w"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(schedule.take, 0, True)
        while "weights 1" not in schedule_file(tmp_path, 0).read_text():
            threading.Event().wait(0.001)
        schedule.put("group 0 sample 0", "g")
        assert waiting.result(10) == "g"


def test_of_several_commands_with_one_name_the_first_is_taken_first():
    schedule = replay((0, "group 0 sample 0"), (1, "group 0 sample 0"))
    schedule.put("group 0 sample 0", "first turn")
    schedule.put("group 0 sample 0", "second turn")
    assert entered(schedule, [0, 1]) == [(0, "first turn"), (1, "second turn")]


def test_a_command_that_does_not_come_ends_the_wait_with_what_is_there_instead():
    schedule = replay((4, "weights 3"), (4, "group 0 sample 0"), timeout_s=0.01)
    schedule.put("group 0 sample 0", "g")
    assert schedule.take(3, idle=False) is None
    with pytest.raises(ReplayError) as error:
        schedule.take(4, idle=False)
    parts = ("0.01 s for weights 3", "step 4", "group 0 sample 0")
    assert all(part in str(error.value) for part in parts)


def test_a_command_that_the_recorded_run_never_had_is_refused_at_once():
    schedule = replay((0, "weights 3"))
    schedule.put("weights 3", "w")
    for name in ("weights 4", "weights 3"):
        with pytest.raises(ReplayError, match=f"had no {name} here"):
            schedule.put(name, "w")


def test_an_engine_that_runs_dry_where_the_recorded_one_went_on_has_diverged():
    schedule = replay((9, "group 5 sample 0"))
    with pytest.raises(ReplayError, match=r"dry before its step 7; .* group 5 sample 0 .* step 9"):
        schedule.take(7, idle=True)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("recorded", [[], [(0, "weights 1")], [(5, "weights 1")]])
def test_an_engine_can_be_stopped_in_the_middle_of_a_replay(recorded, idle):
    schedule = replay(*recorded)
    schedule.put(STOP, "end")
    assert schedule.take(0, idle) == "end"


def test_each_life_of_a_killed_generator_keeps_its_own_schedule(tmp_path):
    """One that ended before its engine was built has none; a torn line is of no life."""
    first, second = tmp_path / "first", tmp_path / "second"
    for life, names in ((0, ["a", "b"]), (2, ["b", "c"])):
        schedule = open_schedule(str(first), restart_count=life)
        for name in names:
            schedule.put(name, name)
        assert entered(schedule, [0]) == [(0, name) for name in names]
        schedule.close()
        if life == 0:
            with schedule_file(first, 0).open("a") as file:
                file.write('{"step": 1, "ent')

    def replayed(life):
        recorded = partial(read_schedule, str(first), 0.5)
        return open_schedule(str(second), recorded, restart_count=life)

    for life, names in ((0, ["a", "b"]), (1, []), (2, ["b", "c"])):
        schedule = replayed(life)
        for name in ["c", "b", "a"]:
            if life < 2 or name != "a":
                schedule.put(name, name)  # a killed one may get more than the recorded one took
        assert entered(schedule, [0, 1]) == [(0, name) for name in names]
        schedule.close()
    kept = read_rows(schedule_file(second, 0))
    assert [line["life"] for line in kept if "life" in line] == [0, 1, 2]
    with pytest.raises(ReplayError, match="had no a here"):
        replayed(2).put("a", "a")


def test_a_killed_engine_waits_or_goes_on_after_its_last_command():
    schedule = replay((0, "a"), timeout_s=0.01, killed=True)
    schedule.put("a", "a")
    assert entered(schedule, range(5)) == [(0, "a")]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(schedule.take, 5, True)
        schedule.put("b", "b")
        schedule.put(STOP, "end")
        assert waiting.result(10) == "end"


def test_what_was_never_taken_is_given_back():
    schedule = replay((0, "weights 1"), (1, "weights 2"))
    schedule.put("weights 2", "b")
    schedule.put("weights 1", "a")
    assert schedule.take(0, idle=False) == "a"
    assert schedule.drain() == ["b"] and schedule.drain() == []


def test_a_replay_reads_a_probe_as_long_as_the_recorded_one(tmp_path):
    write_rows(schedule_file(tmp_path, 0), {"life": 0, "probe_tokens": 24})
    assert Schedule(recorded=read_schedule(str(tmp_path), 0.05)).probe_tokens == 24
