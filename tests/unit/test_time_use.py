"""The seconds of all activities add up to the time since the start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components import time_use
from grpo_components.time_use import TimeUse


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6)), max_size=20))
def test_wall_and_cpu_seconds_count_for_the_activity_that_used_them(stays):
    with pytest.MonkeyPatch.context() as patch:
        now, expected = [100.0], dict.fromkeys("abc", 0.0)
        for clock in ("perf_counter", "process_time"):
            patch.setattr(time_use.time, clock, lambda: now[0])
        use, activity = TimeUse("a"), "a"
        for following, seconds in stays:
            now[0] += seconds
            expected[activity] += seconds
            assert use.begin(following) == pytest.approx(seconds, abs=1e-6)
            activity = following
        on_cpu = use.totals()["cpu_seconds"]
        assert on_cpu == pytest.approx({each: expected[each] for each in on_cpu}, abs=1e-6)
        now[0] += 1
        expected[activity] += 1
        seconds = use.totals()["seconds"]
    assert sum(seconds.values()) == pytest.approx(now[0] - 100)
    assert seconds == pytest.approx({each: expected[each] for each in seconds}, abs=1e-6)
