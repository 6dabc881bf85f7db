"""The seconds of all activities add up to the time since the start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components import time_use
from grpo_components.time_use import TimeUse


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6)), max_size=20))
def test_cpu_seconds_count_for_the_activity_that_used_them(stays):
    with pytest.MonkeyPatch.context() as patch:
        now, expected = [100.0], dict.fromkeys("abc", 0.0)
        patch.setattr(time_use.time, "process_time", lambda: now[0])
        use, activity = TimeUse("a"), "a"
        for following, seconds in stays:
            now[0] += seconds
            expected[activity] += seconds
            use.begin(following)
            activity = following
        found = use.cpu_seconds()
    for each, value in found.items():
        assert value == pytest.approx(expected[each], abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6)), max_size=20))
def test_the_parts_add_up_to_the_wall_time(stays):
    with pytest.MonkeyPatch.context() as patch:
        now, expected = [100.0], dict.fromkeys("abc", 0.0)
        patch.setattr(time_use.time, "perf_counter", lambda: now[0])
        use, activity = TimeUse("a"), "a"
        for following, seconds in stays:
            now[0] += seconds
            expected[activity] += seconds
            assert use.begin(following) == pytest.approx(seconds, abs=1e-6)
            activity = following
        now[0] += 1
        expected[activity] += 1
        seconds = use.seconds()
    assert sum(seconds.values()) == pytest.approx(now[0] - 100)
    for each, value in seconds.items():
        assert value == pytest.approx(expected[each], abs=1e-6)
