"""Worker processes end together, and with the process of their engine."""

import ctypes
import mmap
import multiprocessing
import os
import signal
import time

import pytest
from lib.processes import is_alive, until

from grpo_components.rollout import worker_processes
from grpo_components.rollout.worker_processes import (
    WorkerProcesses,
    remove_names,
    worker_environment,
)

SPAWN = multiprocessing.get_context("spawn")


def stay_in_a_kernel(connection=None):
    """Never return to Python, like a worker that waits for another one within a step."""
    if connection is not None:
        import grpo_components.rollout.worker_setup  # noqa: F401 -- vLLM imports it in each worker

        connection.send(os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).sleep(600)


def engine(connection):
    """A process with a worker, which tells the worker's pid."""
    SPAWN.Process(target=stay_in_a_kernel, args=(connection,), daemon=True).start()
    time.sleep(600)


def test_a_worker_dies_with_its_engine_even_if_both_get_no_chance_to_exit():
    ours, theirs = SPAWN.Pipe()
    parent = SPAWN.Process(target=engine, args=(theirs,))
    parent.start()
    assert ours.poll(60), "the worker did not start within 60 s"
    worker = ours.recv()
    parent.kill()
    parent.join()
    assert until(lambda: not is_alive(worker), 10)


@pytest.fixture
def processes():
    started = [
        multiprocessing.get_context("fork").Process(target=stay_in_a_kernel, name=f"Worker-{n}")
        for n in range(3)
    ]
    for process in started:
        process.start()
    yield started
    for process in started:
        process.kill()


def test_the_first_worker_that_dies_is_named_and_the_others_are_killed(processes):
    workers = WorkerProcesses(processes)
    os.kill(processes[1].pid, signal.SIGUSR2)
    assert workers.failure(RuntimeError("cancelled")) == (
        f"its worker process Worker-1 (pid {processes[1].pid}) died, killed by signal 12"
    )
    for process in processes:
        process.join(10)
    assert [process.exitcode for process in processes] == [-9, -12, -9]


def test_workers_that_are_closed_have_not_failed(processes):
    workers = WorkerProcesses(processes)
    workers.close()
    assert not any(process.is_alive() for process in processes)
    assert workers.failure(RuntimeError("of the engine itself")) == ""
    assert workers.failure(TimeoutError("a step")).endswith("did not answer in time: a step")


def test_the_environment_is_that_of_the_workers_only(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), worker_environment(3):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        raise KeyError
    assert dict(os.environ) == before


def test_only_names_of_memory_that_the_process_shares_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_processes, "_SHARED", (f"{tmp_path}/psm_", f"{tmp_path}/vllm_"))
    for name in ("psm_mapped", "psm_not_mapped", "another_mapped"):
        (tmp_path / name).write_bytes(b"shared")
    views = []
    for name in ("psm_mapped", "another_mapped"):
        with (tmp_path / name).open("r+b") as file:
            views.append(mmap.mmap(file.fileno(), 0))
    remove_names(None)
    remove_names(None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another_mapped", "psm_not_mapped"]
    assert [view[:] for view in views] == [b"shared"] * 2
