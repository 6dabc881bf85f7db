"""Real vLLM: an engine that slept without memory, and got new weights, is a fresh engine.

vLLM frees no memory on a CPU. `lose_memory` makes its sleep real there: everything that a GPU would
lose is overwritten, and vLLM's own code of a GPU worker saves and restores what it does there.
"""

from concurrent.futures import wait

import numpy as np
import pytest
import torch
from lib import real_engine
from lib.real_engine import assert_same, under_way, weights

from grpo_components.rollout.engine import EngineAsleepError

LONG = [int(i) for i in np.random.default_rng(0).integers(1, 255, 300)]


def ask(engine, prompt=LONG):
    return real_engine.ask(engine, prompt, 16, seed=1, stop_token_ids=[0])


def answers(engine):
    """Of a prompt that fills several blocks of the cache, and of short ones beside it."""
    return real_engine.done([ask(engine), *(ask(engine, ids) for ids in real_engine.PROMPTS)])


def spoil(values, with_value=torch.nan):
    for tensor in values:
        if isinstance(tensor, torch.Tensor):
            tensor.data.fill_(with_value if tensor.is_floating_point() else 0)


def no_weight(x, weight, bias):
    raise AssertionError("the packed weights of this layer were never loaded again")


class LostMemory:
    """vLLM's sleep-mode backend, of one worker; keeps none of the weights and no KV cache."""

    def __init__(self, worker, calls):
        self.runner, self.calls = worker.model_runner, calls

    def suspend(self, level):
        self.calls.append(f"sleep {level}")
        for module in self.runner.model.modules():
            spoil([*module._parameters.values(), *module._buffers.values()])
            # What is neither is lost as well, unless it is in CPU memory on a GPU, too.
            others = {name for name in vars(module) if not name.endswith("_cpu")} - {"kv_cache"}
            spoil(vars(module)[name] for name in others)
            if hasattr(module, "cpu_linear"):  # closes over weights that are packed for oneDNN
                module.cpu_linear = no_weight
        # No NaN: the CPU's kernel multiplies what lies behind a sequence's end in a block by 0.
        spoil(self.runner.kv_caches, with_value=1e4)

    def resume(self, tags):
        self.calls.append(f"wake {' and '.join(tags)}")


@pytest.fixture
def lose_memory(build_engine, monkeypatch):
    """Engines built from now on sleep at level 2; returns what happens, in order."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from grpo_components.rollout import vllm_backend

    calls, load = [], vllm_backend.load_into_worker

    def recorded_load(worker, tensors):
        calls.append("load")
        load(worker, tensors)

    monkeypatch.setitem(vllm_backend._SLEEP_LEVELS, "cpu", 2)
    monkeypatch.setattr(vllm_backend, "load_into_worker", recorded_load)
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(CPUWorker, name, getattr(Worker, name))
    backend = property(lambda worker: LostMemory(worker, calls))
    monkeypatch.setattr(CPUWorker, "sleep_mode_backend", backend)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (2**30, 2**31))
    return calls


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_an_engine_that_lost_its_memory_is_a_fresh_one_with_new_weights(
    make_engine, checkpoints, lose_memory, force_cuda_defaults, kind
):
    if kind == "untied":
        force_cuda_defaults()  # asynchronous scheduling
    engine = make_engine(checkpoints / f"{kind}_A")
    before = answers(engine)
    fresh = None
    for version, name in ((1, "B"), (1, "B"), (2, "A")):
        assert engine.sleep().result() == 0
        engine.load_weights(version, weights(checkpoints / f"{kind}_{name}")).result()
        assert lose_memory == ["sleep 2", "wake weights", "load", "wake kv_cache"]
        lose_memory.clear()
        after = answers(engine)
        assert {int(v) for c in after for v in c.token_versions} == {version}
        if name == "B":
            fresh = fresh or answers(make_engine(checkpoints / f"{kind}_B"))
            assert_same(after, fresh)
    assert_same(after, before)


@pytest.mark.parametrize("scheduling", ["synchronous", "asynchronous"])
def test_a_sleeping_engine_has_aborted_what_ran_and_refuses_what_comes(
    make_engine, checkpoints, force_cuda_defaults, scheduling
):
    """On a CPU the memory stays; everything else is as on a GPU."""
    if scheduling == "asynchronous":
        force_cuda_defaults()
    engine = make_engine(checkpoints / "tied_A")
    running = under_way(engine)
    aborted = engine.sleep().result()
    assert aborted > 0
    wait(running)
    errors = [future.exception() for future in running]
    assert sum(isinstance(error, EngineAsleepError) for error in errors) == aborted
    assert engine.sleep().result() == 0, "it sleeps already"
    with pytest.raises(EngineAsleepError):
        ask(engine).result()
    with pytest.raises(ValueError, match="missing"):  # and it goes on sleeping
        engine.load_weights(1, {}).result()
    with pytest.raises(EngineAsleepError):
        ask(engine).result()
    engine.load_weights(1, weights(checkpoints / "tied_B")).result()
    assert_same([ask(engine).result()], [ask(make_engine(checkpoints / "tied_B")).result()])
    left = engine._backend._engine.output_processor.request_states
    assert not left, "nothing of the aborted is left"
