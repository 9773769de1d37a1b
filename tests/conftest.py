"""What all tests share: hypothesis runs the same examples every time, so that a red test stays red."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

# Tiny models gain nothing by a second thread, and wait for it. It must be said before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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

# `make test` distributes files over processes. These take longest and start first, so that the processes end together.
LONGEST = (
    "tests/pages/test_sim_page.py",
    "tests/server/test_ray_serve.py",
    "tests/oracle/test_axes.py",
    "tests/server/test_replicas.py",
    "tests/simulator/test_experiments.py",
    "tests/scheduler/test_state_machine.py",
    "tests/server/test_processes.py",
    "tests/server/test_limits.py",
    "tests/kernels/test_variants.py",
    "tests/server/test_disaggregation.py",
    "tests/parallel/test_processes.py",
    "tests/cluster/test_kv_nixl.py",
    "tests/simulator/test_fit.py",
    "tests/parallel/test_cpu.py",
    "tests/engine/cuda/test_executor.py",
    "tests/test_deployment.py",
    "tests/scheduler/test_policy.py",
    "tests/bench/test_offline.py",
    "tests/cluster/test_kv_engines.py",
    "tests/cli/test_sim.py",
    "tests/engine/cuda/test_drafts.py",
    "tests/parallel/test_cuda.py",
    "tests/parallel/test_weight_updates.py",
    "tests/engine/cuda/test_draft_masks.py",
    "tests/checks/test_checks.py",
    "tests/simulator/test_routing.py",
    "tests/server/test_openapi.py",
    "tests/engine/cuda/test_draft_model.py",
    "tests/model/test_oracle.py",
    "tests/sampling/test_grammar.py",
    "tests/server/test_batch_processes.py",
    "tests/server/test_admin.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # one process: in the order of the command line
        return
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    """The garbage collector need not look at what was imported and collected again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: tests with servers and browsers often wait."""
    return min((os.cpu_count() or 1) + 2, 8)


@pytest.fixture(scope="session", autouse=True)
def _one_ssl_context() -> Iterator[None]:
    """Every `httpx.get` would read all certificates of the machine, which takes longer than most requests."""
    if "httpx" not in sys.modules:
        yield
        return
    from httpx._transports import default

    with patch.object(default, "create_ssl_context", cache(default.create_ssl_context)):
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file: fetched once per machine, then found in the cache."""
    from paceline.model.fetch import fetch_default

    return fetch_default()


@pytest.fixture(scope="session", autouse=True)
def _no_drafts_by_default() -> Iterator[None]:
    """How many drafts a pass has depends on measured times, so tests that count passes or deltas ask for drafts."""
    resolve = sys.modules.get("paceline.engine.build.resolution")
    if resolve is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "why_no_drafts", lambda *_: "tests ask for drafts")
        yield


@pytest.fixture(scope="session", autouse=True)
def _faster_interpreter() -> Iterator[None]:
    """Where a collected test has imported Triton, its interpreter runs faster."""
    if "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.kernels.faster_interpreter import faster_interpreter

    with faster_interpreter():
        yield
