"""What all tests share: hypothesis runs the same examples every time, so that a red test stays red."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Without a GPU, kernels run in Triton's interpreter. It must be asked for before Triton is first imported.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "paceline",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("paceline")
