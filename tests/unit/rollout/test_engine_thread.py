"""CUDA's state belongs to a thread: the one that steps an engine also builds and closes it."""

import threading

import pytest

from grpo_components.rollout.engine import Engine, EngineStoppedError


class Backend:
    def __init__(self, threads):
        self._threads = threads
        self._threads.append(("built", threading.current_thread()))

    def step(self):
        self._threads.append(("stepped", threading.current_thread()))
        raise RuntimeError("a step failed")

    def add(self, request_id, request):
        pass

    def failure(self, error):
        return ""

    def close(self):
        self._threads.append(("closed", threading.current_thread()))


def test_one_thread_builds_steps_and_closes_an_engine():
    found = []
    engine = Engine(lambda: Backend(found), {}, 1)
    answer = engine.submit([1], max_tokens=1, temperature=1.0, seed=0, stop_token_ids=[])
    with pytest.raises(EngineStoppedError):
        answer.result(30)
    engine.close()
    assert [what for what, _ in found] == ["built", "stepped", "closed"]
    assert len({thread for _, thread in found}) == 1
    assert found[0][1] is not threading.current_thread()


def test_what_stops_an_engine_from_being_built_is_raised_where_it_is_opened():
    def build():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        Engine(build, {}, 1)
