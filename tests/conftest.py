"""Settings and fixtures that all tests share."""

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


def pytest_collection_modifyitems(items):
    """Start with the longest end-to-end runs, so that no worker is left with one at the end."""

    def longest_first(item):
        limit = item.get_closest_marker("timeout")
        is_long = item.get_closest_marker("slow") or "tiny_policy" in item.fixturenames
        return not is_long, -limit.args[0] if limit else 0

    items.sort(key=longest_first)


@pytest.fixture(scope="session")
def tiny_policy():
    """The demo's policy; built once per machine, by one of all workers of all test runs."""
    with FileLock(Path(tempfile.gettempdir(), f"tiny_policy-{os.getuid()}.lock")):
        subprocess.run([sys.executable, "-m", "grpo_components.examples.tiny_policy"], check=True)
