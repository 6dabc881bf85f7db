"""Settings and fixtures that all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# The machine may be busy with real engines: how long an example takes says nothing here.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items):
    """Runs of the whole stack one at a time, from the start on, beside the other tests."""

    def whole(item):
        return item.get_closest_marker("slow") or "tiny_policy" in item.fixturenames

    for item in items:
        if whole(item):
            item.add_marker(pytest.mark.xdist_group("whole stack"))
    items.sort(key=lambda item: not whole(item))
