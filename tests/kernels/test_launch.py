"""The direct launch of `Kernel` against Triton's own: the same binary, with the same arguments. Nothing is compiled or
run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.kernels import _triton
from paceline.kernels._triton import HAS_TRITON, Kernel, triton

if not HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

STREAM = 77


class FakeDriver:
    """A driver that Triton's runtime accepts as a GPU's."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """What Triton compiles for one of its keys. Its launcher is Triton's, except for the part in C."""

    def __init__(self, launches: list[tuple[Any, ...]], number: int, scratch: int) -> None:
        self.function, self.packed_metadata = number, (4, 1, number)
        self.run: Any = object.__new__(CudaLauncher)
        vars(self.run).update(
            num_ctas=1,
            global_scratch_size=scratch,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=number % 2 == 0,
            launch=lambda *args: launches.append(args),
        )

    def launch_metadata(self, *_: Any) -> None:
        return None


def _scale(x, out, count, factor, WIDTH, DOUBLE):  # type: ignore[no-untyped-def]
    """A kernel that is never compiled."""


_scale.__annotations__ = {"WIDTH": triton.language.constexpr, "DOUBLE": triton.language.constexpr}


class Bench:
    def __init__(self, scratch: int = 0) -> None:
        self.function, self.launches, self.num_compiled = JITFunction(_scale), list[tuple[Any, ...]](), 0
        self.num_runs = 0
        self._scratch = scratch
        self.function._do_compile = self._compile
        self._run, self.function.run = self.function.run, self._counted
        self.kernel = Kernel(self.function)

    def _compile(self, key: str, signature: Any, device: int, *_: Any) -> Compiled:
        self.num_compiled += 1
        compiled = Compiled(self.launches, self.num_compiled, self._scratch)
        self.function.device_caches[device][0][key] = compiled
        return compiled

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.num_runs += 1
        return self._run(*args, **kwargs)

    def seen(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> tuple[Any, ...]:
        """The launcher's arguments: up to its metadata, and the kernel's arguments that are not compiled in."""
        kernel[grid](*args, **constants)
        (got,) = self.launches
        self.launches.clear()
        *head, _launch_metadata, _enter, _exit = got[:13]
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in got[13 : 13 + len(args)]]
        assert len(got) == 13 + len(args) + len(constants) - 1, "num_warps is not an argument, all others are counted"
        return (*head, *values)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    monkeypatch.setattr(_triton, "current_device", fake.get_current_device)
    monkeypatch.setattr(_triton, "current_stream", fake.get_current_stream)
    return fake


BUFFERS = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)}
TENSORS = st.builds(lambda dtype, at: BUFFERS[dtype][at:], st.sampled_from(list(BUFFERS)), st.sampled_from([0, 1, 8]))
NUMBERS = st.sampled_from([0, 1, 2, 15, 16, 17, 32, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**35, 1.0, 0.5, 16.0])
CALLS = st.tuples(
    st.sampled_from([(3,), (3, 2), (3, 2, 5)]),
    TENSORS,
    TENSORS,
    NUMBERS,
    NUMBERS,
    st.sampled_from([1, 16, 64]),
    st.booleans(),
    st.sampled_from([4, 8]),
    st.integers(0, 1),
)


@given(st.lists(CALLS, min_size=2, max_size=12))
def test_a_direct_launch_equals_tritons(calls: list[Any]) -> None:
    bench, fake = Bench(), triton.runtime.driver.active
    for _ in range(2):
        for grid, x, out, count, factor, width, double, warps, device in calls:
            fake.device = device
            args, constants = (x, out, count, factor), {"WIDTH": width, "DOUBLE": double, "num_warps": warps}
            direct = bench.seen(bench.kernel, grid, *args, **constants)
            assert direct == bench.seen(bench.function, grid, *args, **constants)
    runs = bench.num_runs
    for grid, x, out, count, factor, width, double, warps, device in calls:
        fake.device = device
        bench.kernel[grid](x, out, count, factor, WIDTH=width, DOUBLE=double, num_warps=warps)
    assert bench.num_runs == runs, "a second launch with the same key went through Triton"


def launch(bench: Bench, *args: Any, **constants: Any) -> int:
    """How many launches went through Triton."""
    before = bench.num_runs
    bench.kernel[(1,)](*args, **{"WIDTH": 16, "DOUBLE": False, **constants})
    return bench.num_runs - before


def test_launches_with_different_binaries_have_different_keys() -> None:
    bench, x = Bench(), torch.zeros(64)
    assert [launch(bench, x, x, 5, 0.5) for _ in range(3)] == [1, 0, 0]
    for args in ((x[1:], x, 5, 0.5), (x, x[1:], 5, 0.5), (x, x.int(), 5, 0.5), (x, x, 1, 0.5), (x, x, 16, 0.5)):
        compiled = bench.num_compiled
        assert launch(bench, *args) == 1 and bench.num_compiled == compiled + 1
        assert launch(bench, *args) == 0
    assert launch(bench, x, x, 5, 0.5, WIDTH=32) == 1
    before = bench.num_runs
    bench.kernel[(1,)](x, x, 5, 0.5, DOUBLE=16, WIDTH=False)
    assert bench.num_runs == before + 1, "constants are distinguished by name"
    assert launch(bench, x[4:], x[8:], 5, 0.5) == 0, "other addresses, equally aligned"


def test_unusual_launches_always_go_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    bench = Bench()
    for args in ((x, None, 5, 0.5), (x, 5, x, 0.5), (x, x, True, 0.5)):
        assert [launch(bench, *args) for _ in range(2)] == [1, 1]
    assert launch(bench, x, x, 5, 0.5) == 1
    with monkeypatch.context() as hooked:
        hooked.setattr(triton.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
        assert launch(bench, x, x, 5, 0.5) == 1, "a profiler has a hook"
    assert launch(bench, x, x, 5, 0.5) == 0
    hungry = Bench(scratch=64)
    allocator = SimpleNamespace(get=lambda: lambda size, align, stream: x)
    monkeypatch.setattr("triton.runtime._allocation._allocator", allocator)
    assert [launch(hungry, x, x, 5, 0.5) for _ in range(2)] == [1, 1], "Triton allocates scratch memory"


def test_a_kernel_that_was_compiled_ahead_is_launched_and_triton_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    kernel = SimpleNamespace(launch=lambda *args: seen.append(args))
    monkeypatch.setattr(Kernel, "load", lambda function, args, constants: kernel if args[2] == 5 else None)
    bench, x = Bench(), torch.zeros(64)
    assert [launch(bench, x, x, 5, 0.5) for _ in range(2)] == [0, 0]
    assert seen == [((1,), STREAM, [x.data_ptr()] * 2)] * 2
    assert launch(bench, x, x, 6, 0.5) == 1, "one that was not is compiled by Triton"
