"""Settings and fixtures that all tests share."""

from hypothesis import HealthCheck, settings

# The machine may be busy with real engines: how long an example takes says nothing here.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
