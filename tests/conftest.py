"""What all tests share: hypothesis runs the same examples every time, so that a red test stays red."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "paceline",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("paceline")
