"""`native/native.c` against its reference, and what happens where it cannot be compiled."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ConfigError
from paceline.engine.cpu import native
from paceline.engine.cpu.native import (
    Batch,
    Model,
    NativeError,
    NativeLibrary,
    PackedMatrix,
    native_library,
    round_inputs,
)
from paceline.model.quantized import quantize
from tests.helpers import clang_library, library_with_tiles, needs_compiler, portable_library
from tests.model.test_quantized import Q
from tests.resolving import plan_of, quantization, resolved
from tests.tiny_gguf import save_gguf

pytestmark = needs_compiler


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["this CPU", "clang", "4 1 0", "8 1 1", "16 0 0"])
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """The library with the instructions of this CPU, of the compiler that is found and of clang, and in plain C with
    the layouts of other CPUs."""
    if request.param == "clang":
        return clang_library()
    return native_library() if request.param == "this CPU" else portable_library(*map(int, request.param.split()))


@pytest.fixture(params=["this CPU", "clang"])
def with_tiles(request: pytest.FixtureRequest) -> NativeLibrary:
    if request.param == "this CPU":
        return library_with_tiles()
    return library if (library := clang_library()).has_tiles else portable_library(16, 0, 0, 1, "clang")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "channels", "columns"), [(1, 1, 32), (3, 70, 96), (9, 33, 80), (4, 16, 7)])
def test_a_product_equals_the_reference(
    library: NativeLibrary, bits: int, rows: int, channels: int, columns: int
) -> None:
    weight, x, bias = quantize(random(channels, columns), bits), random(rows, columns, seed=1), random(channels, seed=2)
    x[0] *= 100
    expected = round_inputs(x).double() @ weight.dequantize().double().T + bias
    found = library.linear(PackedMatrix(library, weight, bias), x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_other_rows(library: NativeLibrary, bits: int) -> None:
    matrix, x = PackedMatrix(library, quantize(random(48, 128), bits)), random(11, 128, seed=1)
    together = library.linear(matrix, x)
    for row in range(len(x)):
        assert torch.equal(library.linear(matrix, x[row : row + 1])[0], together[row])


TILE_SHAPES = [(1, 1, 32), (3, 70, 96), (33, 33, 80), (16, 16, 7), (40, 64, 2100)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "channels", "columns"), TILE_SHAPES)
def test_a_product_of_tiles_equals_the_reference(
    with_tiles: NativeLibrary, bits: int, rows: int, channels: int, columns: int
) -> None:
    weight, x, bias = quantize(random(channels, columns), bits), random(rows, columns, seed=1), random(channels, seed=2)
    x[0] *= 100
    expected = x.bfloat16().double() @ weight.dequantize().bfloat16().double().T + bias
    found = with_tiles.linear(PackedMatrix(with_tiles, weight, bias), x, tiles=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_a_row_of_tiles_does_not_depend_on_the_other_rows(with_tiles: NativeLibrary) -> None:
    matrix, x = PackedMatrix(with_tiles, quantize(random(48, 128), 4)), random(35, 128, seed=1)
    x[20, 7] = float("nan")
    together = with_tiles.linear(matrix, x, tiles=True)
    assert together[20].isnan().all()
    for row in (0, 1, 15, 16, 19, 21, 34):
        assert torch.equal(with_tiles.linear(matrix, x[row : row + 1], tiles=True)[0], together[row])


def test_tiles_with_other_results_are_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, right = portable_library(16, 0, 0, 1), NativeLibrary.linear
    monkeypatch.setattr(library, "has_tiles", True)
    native._check(library)
    assert library.has_tiles
    monkeypatch.setattr(
        NativeLibrary, "linear", lambda self, matrix, x, tiles=False: right(self, matrix, x, tiles=tiles) * (1 + tiles)
    )
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        native._check(library)
    assert not library.has_tiles and "prompts are computed without AMX" in caplog.text


@pytest.mark.parametrize("bits", [4, 8])
def test_embeddings_are_gathered_and_normed(library: NativeLibrary, bits: int) -> None:
    """A model without layers."""
    weight, norm, tokens = quantize(random(75, 80), bits), random(80, seed=1), torch.tensor([74, 0, 33, 33, 8])
    embedding, x = PackedMatrix(library, weight), torch.empty(5, 80)
    model = Model(embedding=embedding.struct, norm=norm.data_ptr(), hidden=80, embedding_scale=2.0)
    model.num_heads = model.num_kv_heads = 1
    batch = Batch(num_tokens=5, tokens=tokens.data_ptr(), x=x.data_ptr(), num_threads=2)
    scratch = torch.empty(library.scratch_bytes(ctypes.byref(model), ctypes.byref(batch)) + 64, dtype=torch.uint8)
    batch.scratch = -(-scratch.data_ptr() // 64) * 64
    library.forward(ctypes.byref(model), ctypes.byref(batch))
    rows = 2 * weight.dequantize()[tokens]
    torch.testing.assert_close(x, rows * rows.square().mean(1, keepdim=True).rsqrt() * norm, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_row(library: NativeLibrary, value: float) -> None:
    matrix, x = PackedMatrix(library, quantize(random(32, 64), 4)), random(6, 64, seed=1)
    expected = library.linear(matrix, x)
    x[2, 40] = value
    found = library.linear(matrix, x)
    assert found[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(found[rest], expected[rest])


def test_rows_of_zeros_and_of_tiny_values_give_zeros(library: NativeLibrary) -> None:
    x = torch.zeros(2, 64)
    x[1] = 1e-42
    found = library.linear(PackedMatrix(library, quantize(random(16, 64), 8)), x)
    assert (found.abs() < 1e-30).all()


# ---------------------------------------------------------------------- machines where it cannot be used


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    native_library.cache_clear()
    yield
    native_library.cache_clear()


def test_without_a_compiler_weights_are_expanded_and_the_log_says_so(
    no_compiler: None, smollm2_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        found = resolved(smollm2_path)
        found.log_choices()
    assert (found.weights.dtype, found.weights.quantization) == ("float32", "none")
    assert "there is no C compiler: install gcc" in caplog.text


def test_without_a_compiler_quantization_that_was_asked_for_is_an_error(no_compiler: None, smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match="'q8', which needs kernels compiled for this CPU: there is no C compiler"):
        resolved(smollm2_path, quantization="q8")


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'native.c: no such instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    with pytest.raises(NativeError, match=r"no such instruction\): set CC to another compiler"), native._compiled():
        pass
    assert not list(tmp_path.glob("cpu-kernels/*")), "something was left behind"


def test_where_nothing_can_be_kept_the_library_is_compiled_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))  # not writable for root either
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O1"))  # compiled in half the time
    with caplog.at_level(logging.WARNING, "paceline.engine"), native._compiled() as path:
        made = NativeLibrary(path)
    native._check(made)
    assert "cannot be written (Not a directory): kernels are compiled at every start; set PACELINE_HOME" in caplog.text
    assert not list((tmp_path / "temporary").iterdir()), "something was left behind"
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(NativeError, match="nor a temporary folder: set PACELINE_HOME to another"), native._compiled():
        pass


def test_a_folder_that_machines_share_has_a_library_for_each_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Machine code for one CPU may be illegal on another."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda compiler, flags, folder: _touched(folder / "native.so"))
    found = []
    for cpu in ("flags: avx2", "flags: avx2 avx512f", "flags: avx2"):
        monkeypatch.setattr(native, "_cpu", lambda cpu=cpu: cpu)
        with native._compiled() as path:
            found.append(path)
    assert found[0] == found[2] != found[1] and {*found} == {*tmp_path.glob("cpu-kernels/*")}


def test_a_change_of_any_file_or_of_the_compiler_compiles_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda compiler, flags, folder: _touched(folder / "native.so"))
    monkeypatch.setattr(native, "FOLDER", Path(shutil.copytree(native.FOLDER, tmp_path / "native")))
    files = sorted(native.FOLDER.iterdir())
    assert {path.suffix for path in files} == {".c", ".h"}

    def path_of_library() -> Path:
        with native._compiled() as path:
            return path

    found = [path_of_library()]
    assert path_of_library() == found[0]
    for path in files:
        path.write_text(path.read_text() + "\n")
        found.append(path_of_library())
    monkeypatch.setattr(native, "_run", lambda command: "another version of the compiler")
    found.append(path_of_library())
    assert len({*found}) == len(files) + 2


@pytest.mark.parametrize(
    ("installed", "expected"), [({"gcc", "cc", "clang"}, "gcc"), ({"cc", "clang"}, "cc"), ({"clang"}, "clang")]
)
def test_gcc_is_taken_before_clang(installed: set[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: name if name in installed else None)
    assert native.c_compiler() == expected
    monkeypatch.setenv("CC", "clang")
    assert native.c_compiler() == "clang"


def test_the_error_of_a_compiler_is_reported_rather_than_how_many_there_are(tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho \"native.c:1:10: fatal error: 'a.h' file not found\" >&2\n")
    with (tmp_path / "cc").open("a") as script:
        script.write("echo '1 error generated.' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    with pytest.raises(NativeError, match=r"\(native.c:1:10: fatal error: 'a.h' file not found\)"):
        native._run([str(tmp_path / "cc")])


def _touched(path: Path) -> Path:
    path.touch()
    return path


def test_a_library_with_other_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeLibrary.linear
    monkeypatch.setattr(NativeLibrary, "linear", lambda self, matrix, x, **how: right(self, matrix, x, **how) * 1.001)
    native_library.cache_clear()
    try:
        with pytest.raises(NativeError, match="differ from the reference"):
            native_library()
    finally:
        monkeypatch.undo()
        native_library.cache_clear()


@pytest.mark.parametrize("num_threads", [2, 3, 9])
def test_threads_that_sleep_at_barriers_give_the_results_of_one(num_threads: int) -> None:
    """More threads than cores, which cannot all wait without sleeping; and more than there are rows or tiles."""
    library, found = native_library(), []
    matrix, x = PackedMatrix(library, quantize(random(96, 64), 4)), random(7, 64, seed=1)

    def run() -> None:
        for count in (1, *[num_threads] * 300):
            torch.set_num_threads(count)
            found.append(library.linear(matrix, x))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 301 and all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("count", "policy", "expected"),
    [("0", None, 0), ("300k", "passive", 300_000), (None, "PASSIVE", 0), (None, "active", None), (None, None, None)],
)
def test_threads_spin_as_long_as_those_of_libgomp(
    count: str | None, policy: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: as long as measured to be good."""
    for name, value in (("GOMP_SPINCOUNT", count), ("OMP_WAIT_POLICY", policy)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    num_spins = native_library()._library.num_spins
    num_spins.restype = ctypes.c_int64
    assert num_spins() == expected or (expected is None and num_spins() >= 4000)


def test_checking_the_library_starts_no_openmp_threads() -> None:
    """With the executor's there would be more than cores, and those of libgomp sleep between regions and in torch."""
    started = []

    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def run() -> None:
        torch.set_num_threads(2)
        before = num_threads()
        native_library.cache_clear()
        library = native_library()
        started.append(num_threads() - before)
        library.linear(PackedMatrix(library, quantize(torch.randn(64, 32), 8)), torch.randn(1, 32))
        started.append(num_threads() - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert started == [0, 1]


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "cpu", ("float32", "gguf")),
        ({"quantization": "gguf"}, "cpu", ("float32", "gguf")),
        ({"dtype": "float32"}, "cpu", ("float32", "none")),
        ({"dtype": "bfloat16"}, "cpu", ("bfloat16", "none")),
        ({"quantization": "none"}, "cpu", ("float32", "none")),
        ({"quantization": "q8"}, "cpu", ("float32", "q8")),
        ({"tp": 2}, "cpu", ("float32", "gguf")),
        ({}, "cuda", ("bfloat16", "none")),  # the model is small
        ({"quantization": "gguf"}, "cuda", ("bfloat16", "gguf")),
        ({"quantization": "q8"}, "cuda", ("bfloat16", "q8")),
        ({"quantization": "none"}, "cuda", ("bfloat16", "none")),
    ],
)
def test_precision_that_is_chosen(
    options: dict[str, Any], device: str, expected: tuple[str, str], smollm2_path: Path
) -> None:
    plan = plan_of(smollm2_path, device, **options)
    assert (plan.dtype, plan.quantization) == expected


def test_a_file_of_sixteen_bits_and_random_weights_are_not_quantized(tmp_path: Path) -> None:
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for path in (save_gguf(tmp_path / "t.gguf", kinds=dict.fromkeys(matrices, Q.F16)), None):
        assert quantization(path) == "none"


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"dtype": "float16"}, "cuda", "dtype is 'float16'"),
        ({"dtype": "bfloat16"}, "cpu", "dtype is 'bfloat16'"),
    ],
)
def test_quantization_that_is_not_possible_is_refused(
    options: dict[str, Any], device: str, message: str, smollm2_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(smollm2_path, device, quantization="q4", **options)
