"""An engine's idle time has a cause, and its room for sequences a measured share."""

import pytest

from grpo_components import time_use
from grpo_components.rollout import engine_use
from grpo_components.rollout.engine_use import NO_GROUP, NO_REWARD, EngineUse


def test_idle_time_has_a_cause_and_the_share_of_sequences_is_a_mean_over_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time_use.time, "perf_counter", lambda: now[0])
    use = EngineUse(4)

    def passes(seconds):
        now[0] += seconds

    passes(1)
    with use.rollout():
        use.begin("sampling", 2)
        passes(10)
        use.begin("loading weights", 2)
        passes(3)
        use.begin("sampling", 8)  # 4 of them wait in the engine
        passes(5)
        use.begin("idle", 0)
        with use.rollout():
            passes(7)
        passes(2)
    passes(4)
    found = use.report()
    assert found["seconds"] == {NO_GROUP: 5, NO_REWARD: 9, "sampling": 15, "loading weights": 3}
    assert found["cpu_seconds"].keys() == found["seconds"].keys()
    assert found["sequence_share"] == pytest.approx((10 * 2 + 3 * 2 + 5 * 4) / (4 * now[0]))


def test_steps_are_summed_by_their_sequences_and_apart_if_prompts_entered(monkeypatch):
    now, cpu = [0.0], [0.0]
    monkeypatch.setattr(time_use.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(engine_use.time, "thread_time", lambda: cpu[0])
    use = EngineUse(64)
    for sequences, prompts in ((5, 5), (5, 0), (8, 0), (9, 1)):
        use.begin("sampling", sequences)
        with use.step(prompts, 20 * prompts):
            now[0] += 2
            cpu[0] += 1
    assert use.report()["engine_steps"] == {
        "8+": [1, 5, 5, 100, 2, 1],
        "8": [2, 13, 0, 0, 4, 2],
        "16+": [1, 9, 1, 20, 2, 1],
    }
