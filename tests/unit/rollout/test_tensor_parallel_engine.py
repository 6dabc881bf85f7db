"""Real vLLM with two tensor-parallel workers: weights, versions, and the end of its processes."""

import pickle
import signal
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from lib.real_engine import PROMPTS, assert_same, done, logprobs_of, submit, under_way
from safetensors.torch import load_file

from grpo_components.exchange.shared_weights import open_shared


def shared_memory(processes):
    """What processes have mapped of /dev/shm."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    paths = {line.split(maxsplit=5)[-1] for text in maps for line in text.splitlines()}
    return [path for path in paths if path.startswith("/dev/shm/")]


@pytest.mark.timeout(600)
def test_two_workers_take_weights_under_load_and_end_together(
    make_engine, checkpoints, force_cuda_defaults, monkeypatch
):
    """With the scheduling of a GPU; the equivalence ladder has that of a CPU."""
    from grpo_components.rollout import vllm_weights
    from grpo_components.rollout.engine import EngineStoppedError

    monkeypatch.setattr(vllm_weights, "_PART_BYTES", 2**14)  # tensors in more than two parts
    old, new = checkpoints / "untied_A", checkpoints / "untied_B"
    force_cuda_defaults()
    engine = make_engine(old, workers=2)
    core = engine._backend._core
    workers = [psutil.Process(each.proc.pid) for each in core.model_executor.workers]
    assert len(workers) == 2 and core.batch_queue is not None
    shared = shared_memory(workers)
    assert shared and all(path.endswith(" (deleted)") for path in shared), "or a kill leaves names"

    running = under_way(engine, max_tokens=300)
    engine.load_weights(7, load_file(new / "model.safetensors")).result(timeout=60)
    for prompt, future in zip(PROMPTS, running, strict=True):
        completion = future.result(timeout=60)
        versions = completion.token_versions
        assert set(np.diff(versions)) == {0, 7}
        gap = np.abs(completion.logprobs - logprobs_of(old, prompt, completion))
        assert gap[versions == 0].max() < 1e-4 < 1e-2 < gap[versions == 7].max()
    after, fresh = done(submit(engine)), done(submit(make_engine(new)))
    assert_same(after, fresh, atol=1e-4)
    assert {int(v) for each in after for v in each.token_versions} == {7}

    running = submit(engine, max_tokens=400)
    workers[1].send_signal(signal.SIGKILL)
    died = rf"worker process VllmWorker-1 \(pid {workers[1].pid}\) died, killed by signal 9"
    with pytest.raises(EngineStoppedError, match=died):
        running[0].result(timeout=60)
    with pytest.raises(EngineStoppedError, match=died):
        submit(engine, max_tokens=1)[0].result(timeout=60)
    engine.close()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


class Workers:
    """Stands in for vLLM's executor: two workers that take what they are sent, in this process."""

    def __init__(self, loads):
        self.loads, self.taken, self.sent, self.opened = loads, {}, [], []

    def collective_rpc(self, method, timeout, non_block, args=()):
        assert timeout > 0 and non_block
        self.sent.append(len(pickle.dumps(args)))
        future = Future()
        future.set_result([getattr(self, method.__name__)(number, *args) for number in (0, 1)])
        return future

    def _begin(self, number):
        return {"norm", "qkv"}

    def _load_part(self, number, shared):
        self.opened.append(shared)
        self.taken |= open_shared(shared)
        return self.loads[number] & shared_names(shared)

    def _finish(self, number):
        return None


def shared_names(shared):
    return {name for name, *_ in shared.entries}


def test_each_worker_must_have_loaded_all_its_parameters(build_engine):
    from grpo_components.rollout.vllm_weights import load_into_workers

    tensors = {"norm": torch.randn(2**16), "qkv": torch.randn(2**20)}
    workers = Workers([{"norm", "qkv"}, {"norm", "qkv"}])
    load_into_workers(workers, tensors)
    assert all(torch.equal(workers.taken[name], tensor) for name, tensor in tensors.items())
    assert max(workers.sent) < 1000, "bytes: the tensors themselves are not sent"
    for shared in workers.opened:
        with pytest.raises(OSError):
            open_shared(shared)
    with pytest.raises(RuntimeError, match=r"worker 1 did not load the parameters norm$"):
        load_into_workers(Workers([{"norm", "qkv"}, {"qkv"}]), tensors)
