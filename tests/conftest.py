"""Settings and fixtures that all tests share."""

import subprocess
import sys

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

# The machine may be busy with real engines: how long an example takes says nothing here.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(items):
    """Runs of the whole stack first: what takes minutes must not be what a worker has left."""

    def whole(item):
        return item.get_closest_marker("slow") or "tiny_policy" in item.fixturenames

    items.sort(key=lambda item: not whole(item))  # the other worker steals from what is left


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """The demo's policy; built once per machine, by one of the workers that want it."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "tiny_policy.lock"):
        subprocess.run([sys.executable, "-m", "grpo_components.examples.tiny_policy"], check=True)
