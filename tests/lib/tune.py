"""Starts whole runs, checks that nothing of them is left, and starts other commands."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from lib.forked_run import ForkedRun
from lib.whole_runs import RECIPE, TUNE, temporary_files

VLLM = "generator.backend=vllm"
"""The backend that runs with GPUs have; on a CPU, the default is transformers."""


@pytest.fixture
def tune(tiny_policy, tmp_path):
    """Give `start(*overrides)` -> (process, folder of the run); checks that nothing is left."""
    with starter(tiny_policy, tmp_path) as start:
        yield start


@contextlib.contextmanager
def starter(tiny_policy, folder):
    """Give a function that starts runs below a folder; check afterwards that nothing is left.

    The driver of a run is forked, unless it is to start as a `new_interpreter`.
    """
    mark, running, before = uuid.uuid4().hex, [], []

    def start(
        *overrides,
        recipe=RECIPE,
        config="tiny_async_grpo",
        cwd=folder,
        env=(),
        new_interpreter=False,
    ):
        output_dir = folder / f"run{len(running)}"
        paths = (f"output_dir={output_dir}", f"base_model_path={tiny_policy}")
        command = [TUNE, "run", recipe, "--config", config, *paths, VLLM, *overrides]
        environment = {**os.environ, "GRPO_TEST": mark, **dict(env)}
        if new_interpreter:
            out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, cwd=cwd, env=environment, **out)
        else:
            process = ForkedRun(command, cwd=cwd, env=environment)
        running.append(process)
        before.extend(temporary_files(process.pid))  # of an earlier process with this pid
        return process, output_dir

    try:
        yield start
    finally:
        for process in running:
            if process.poll() is None:  # the test failed: let the run clean up
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
    _, left = psutil.wait_procs(processes_of(mark), timeout=10)  # killed, maybe not gone yet
    assert [command_line(process) for process in left] == []
    left = [path for process in running for path in temporary_files(process.pid)]
    assert set(left) <= set(before)


def processes_of(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("GRPO_TEST") == mark:
                found.append(process)
    return found


def command_line(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()


@pytest.fixture
def interpreter():
    """Give a function that runs a new Python to its end, and returns its exit code and output."""

    def run(*arguments, **options):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run
