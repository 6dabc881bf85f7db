"""Settings and fixtures that all tests share."""

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

# The machine may be busy with real engines, so that an example may take long.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# What tests import stays until the end: a collection of garbage would look at all of it each time.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries report leaks


LONGEST = (
    "equivalence/test_equivalence.py",
    "models/test_meshes.py",
    "benchmarks/test_plan.py",
    "recipes/test_async_grpo.py",
    "two_nodes/test_two_nodes.py",
    "recipes/test_replayed_run.py",
    "survival/test_config_fuzz.py",
    "recipes/test_run_ends.py",
    "survival/test_killed_roles.py",
    "recipes/test_tensor_parallel_run.py",
    "recipes/test_colocated_run.py",
)
"""The files that take longest, the longest first.

On a fresh machine, the first one builds the tiny policy; the next two do without.
"""


def pytest_collection_modifyitems(items):
    """Start with the longest files, so that no worker is left with one at the end.

    A file is one worker's (`--dist loadfile`): its tests share clusters, engines and runs.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item):
        longest = [n for n, end in enumerate(LONGEST) if item.path.as_posix().endswith(end)]
        return longest[0] if longest else len(LONGEST) + (item.path not in slow)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def tiny_policy():
    """The demo's policy; built once per machine, by one of all workers of all test runs."""
    with FileLock(Path(tempfile.gettempdir(), f"tiny_policy-{os.getuid()}.lock")):
        subprocess.run([sys.executable, "-m", "grpo_components.examples.tiny_policy"], check=True)
