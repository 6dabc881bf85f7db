"""Settings and fixtures that all tests share."""

import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from lib.properties import many

from grpo_components.quiet import engine_environment

pytest_plugins = ["lib.costs", "lib.tiers", "lib.shared_runs", "lib.tune", "lib.finished_runs"]

# The machine may be busy with real engines, so that an example may take long.
settings.register_profile(
    "busy", deadline=None, max_examples=many(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")


# What tests import stays until the end: a collection of garbage would look at all of it each time.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries report leaks


@pytest.fixture(scope="module")
def engine_variables():
    """Set the environment variables of a process with an engine: vLLM reads them at its import."""
    with mock.patch.dict(os.environ, engine_environment("cpu", "WARNING")):
        yield


@pytest.fixture
def num_gpus(monkeypatch):
    """Return a function that makes this machine seem to have a number of GPUs."""

    def has(count):
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    return has


@pytest.fixture(scope="session")
def tiny_policy():
    """Return the folder of the demo's policy; only tests of the same version of its code use it.

    Built once per machine, by one of all workers of all sessions.
    """
    module = "grpo_components.examples.tiny_policy"
    source = Path(find_spec(module).origin).read_bytes()
    shared = Path(tempfile.gettempdir(), "torchtune-async-grpo")
    folder = shared / f"tests-{os.getuid()}" / f"policy-{hashlib.sha256(source).hexdigest()[:8]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists() and (shared / "tiny_policy").exists():
            shutil.copytree(shared / "tiny_policy", folder)  # the command keeps an equal build
        subprocess.run([sys.executable, "-m", module, "--output-dir", folder], check=True)
    return folder
