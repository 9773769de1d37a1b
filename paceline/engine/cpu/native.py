"""Compiles `native/native.c` for this CPU, once, and loads it.

The library is kept in the cache folder, under a name made of all files of `native/`, the compiler and the CPU: machine
code for one CPU may not run on another, and several machines may share the folder. Where it cannot be written, each
process compiles its own copy. The library uses the thread pool of torch, whatever compiler it is made with. Before it
is used, its results are compared with the reference; a library that cannot be built or gives other results is reported,
and weights are then expanded to floating point, which needs no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.model.fetch import cache_folder
from paceline.model.quantized import GROUP, QuantizedTensor, quantize

FOLDER = Path(__file__).with_suffix("")  # native.c and its headers
LOADING_THREADS = 2  # each holds one matrix beside its packed form
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_COMPILE_S = 120
_TOLERANCE = 1e-4  # of a result of magnitude 1: sums of float32 in another order
log = logging.getLogger("paceline.engine")


class NativeError(RuntimeError):
    """The library cannot be used. The message says why, and what to do."""


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", ctypes.c_void_p),
        ("attention_post_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("mlp_post_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("rope", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("embedding", Matrix),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("ffn", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("score_cap", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("full_qk_norm", ctypes.c_int32),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("num_decode_rows", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("kv_indices", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
    )


class LowRankPart(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("rank", ctypes.c_int64),
    )


class AdaptedMatrix(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(LowRankPart)), ("num_parts", ctypes.c_int64))


def return_free_memory() -> None:
    """Gives memory that is no longer used back to the system, where the C library can (glibc): it keeps the heaps of
    threads that have loaded weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PackedMatrix:
    """A quantized matrix in the library's layout."""

    __slots__ = ("_data", "_library", "bits", "shape", "struct")

    def __init__(self, library: NativeLibrary, weight: QuantizedTensor, bias: Tensor | None = None) -> None:
        rows, columns = weight.values.shape
        self._library, self.shape, self.bits = library, (rows, columns), weight.bits
        self._data = (library.pack(weight), bias)
        pointer = None if bias is None else bias.data_ptr()
        self.struct = Matrix(self._data[0].data_ptr(), pointer, rows, columns, weight.bits, 0)

    @property
    def num_bytes(self) -> int:
        return self._data[0].nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x W' + b."""
        return self._library.linear(self, x)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its values, by multiplication with the unit matrix."""
        assert self._data[1] is None, "the bias would be added"
        return self.multiply(torch.eye(self.shape[1])).T.to(dtype)


def title_of_bits(matrices: Collection[PackedMatrix]) -> str:
    """For humans."""
    fewest, most = (pick(one.bits for one in matrices) for pick in (min, max))
    return f"{fewest}-bit" if fewest == most else f"{fewest}- and {most}-bit"


class NativeLibrary:
    """The functions of `native/native.c`."""

    def __init__(self, path: Path) -> None:
        try:
            _share_openmp()
            self._library = library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(
                f"{path} cannot be loaded ({error}): set PACELINE_HOME to a folder that is not mounted noexec"
            ) from None
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("isa", ctypes.c_char_p, ()),
            ("has_tiles", ctypes.c_int32, ()),
            ("packed_bytes", integer, (integer, integer, ctypes.c_int32)),
            ("pack", None, (pointer, pointer, pointer, integer, integer, ctypes.c_int32, pointer)),
            ("scratch_bytes", integer, (pointer, pointer)),
            ("rounded_bytes", integer, (integer, integer)),
            ("forward", None, (pointer, pointer)),
            ("linear", None, (pointer, pointer, integer, pointer, pointer, integer, ctypes.c_int32)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.forward, self.scratch_bytes = library.forward, library.scratch_bytes
        self.isa: str = library.isa().decode()
        self.has_tiles = bool(library.has_tiles())  # products of bfloat16 tiles, for prompts

    def pack(self, weight: QuantizedTensor) -> Tensor:
        (rows, columns), bits = weight.values.shape, weight.bits
        packed = torch.empty(self._library.packed_bytes(rows, columns, bits), dtype=torch.uint8)
        values, scales, offsets = (one.contiguous() for one in (weight.values, weight.scales, weight.offsets))
        self._library.pack(
            values.data_ptr(), scales.data_ptr(), offsets.data_ptr(), rows, columns, bits, packed.data_ptr()
        )
        return packed

    def linear(self, matrix: PackedMatrix, x: Tensor, *, tiles: bool = False) -> Tensor:
        """x W' + b, with x [rows, columns] rounded to 15 bits; tiles: with x and W in bfloat16, as for prompts."""
        x, rows = x.contiguous(), len(x)
        out = torch.empty(rows, matrix.struct.rows)
        scratch = torch.empty(self._library.rounded_bytes(rows, matrix.struct.columns), dtype=torch.uint8)
        self._library.linear(
            ctypes.byref(matrix.struct),
            x.data_ptr(),
            rows,
            out.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
            tiles,
        )
        return out


@lru_cache(maxsize=1)
def native_library() -> NativeLibrary:
    """The library for this machine. Raises NativeError if there is none."""
    with _compiled() as path:
        library = NativeLibrary(path)
    with one_thread():
        _check(library)
    return library


@contextmanager
def one_thread() -> Iterator[None]:
    """For what torch and the library compute outside of the executor's thread. OpenMP keeps a pool of threads for each
    thread that has used several, and where a process has more of them than cores, all of them sleep at its barriers
    instead of waiting: between forward passes, and in all that torch computes. Loading is faster, too: it is hundreds
    of small copies, each of which would synchronise all threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def round_inputs(x: Tensor) -> Tensor:
    """x as the library rounds it before a multiplication: 15 bits in groups of 32. The reference."""
    rest = -x.shape[-1] % GROUP
    groups = torch.nn.functional.pad(x, (0, rest)).view(len(x), -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / (127 * 128)
    scaled = groups * torch.where(scales > 0, 1 / scales, 0.0)
    rounded = torch.trunc(scaled + torch.copysign(torch.full_like(scaled, 0.5), scaled))  # halves away from zero
    return (rounded * scales).view(len(x), -1)[:, : x.shape[-1]]


def _check(library: NativeLibrary) -> None:
    generator = torch.Generator().manual_seed(0)
    for bits in (4, 8):
        weight = quantize(torch.randn(37, 80, generator=generator) / 9, bits)
        x = torch.randn(5, 80, generator=generator)
        matrix, dequantized = PackedMatrix(library, weight), weight.dequantize()
        error = float((library.linear(matrix, x) - round_inputs(x) @ dequantized.T).abs().max())
        if not error < _TOLERANCE:
            raise NativeError(
                f"their results with {bits} bits ({library.isa}) differ from the reference by {error:.3g}: set CC to "
                "another compiler"
            )
        if library.has_tiles:
            expected = x.bfloat16().float() @ dequantized.bfloat16().float().T
            error = float((library.linear(matrix, x, tiles=True) - expected).abs().max())
            if not error < _TOLERANCE:
                log.warning("prompts are computed without AMX, whose results differ by %.3g: set CC", error)
                library.has_tiles = False


def _share_openmp() -> None:
    """Lets the library find the OpenMP functions that torch has loaded, so that the two use one pool of threads. Where
    torch has another OpenMP, the one of the compiler is loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found = [line.split()[-1] for line in maps if "libgomp" in line]
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def c_compiler() -> str:
    """CC, or what is installed: gcc first, whose code is a little faster than clang's (docs/log/cpu.md)."""
    found = os.environ.get("CC") or next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)
    if found is None:
        raise NativeError("there is no C compiler: install gcc or clang")
    return found


@contextmanager
def _compiled() -> Iterator[Path]:
    """The path of the library, which is compiled if it is not in the cache."""
    if platform.system() != "Linux":
        raise NativeError(f"they are made for Linux, and this is {platform.system()}: use Linux")
    compiler = c_compiler()
    flags = (*_FLAGS, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native")
    sources = [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sorted(FOLDER.glob("*.[ch]"))]
    version = _run([compiler, "--version"])
    key = hashlib.sha256("\0".join([*sources, version, *flags, _cpu()]).encode()).hexdigest()
    folder = cache_folder() / "cpu-kernels"
    target = folder / f"{key[:32]}.so"
    with ExitStack() as stack:
        if not target.is_file():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                scratch, is_kept = tempfile.TemporaryDirectory(dir=folder), True
            except OSError as error:  # a read-only volume of models, or another user's
                scratch, is_kept = _temporary_folder(folder, error), False
            made = _compile(compiler, flags, Path(stack.enter_context(scratch)))
            target = made.rename(target) if is_kept else made
            log.info("compiled kernels for this CPU into %s", target)
        yield target


def _temporary_folder(cache: Path, error: OSError) -> tempfile.TemporaryDirectory[str]:
    """For the time in which the library is compiled and loaded: a loaded one needs no file."""
    try:
        found = tempfile.TemporaryDirectory(prefix="paceline-")
    except OSError:
        raise NativeError(
            f"{cache} cannot be written ({error.strerror}), nor a temporary folder: set PACELINE_HOME to another folder"
        ) from None
    log.warning(
        "%s cannot be written (%s): kernels are compiled at every start; set PACELINE_HOME to another folder",
        cache,
        error.strerror,
    )
    return found


def _compile(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    unlinked, linked = folder / "native.o", folder / "native.so"
    _run([compiler, *flags, "-c", str(FOLDER / "native.c"), "-o", str(unlinked)])
    _run([compiler, "-shared", str(unlinked), "-lm", "-o", str(linked)])  # without libgomp: torch has loaded it
    return linked


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_S)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        lines = output.strip().splitlines() or ["no output"]
        said = next((line for line in lines if "error:" in line.lower()), lines[-1])  # clang counts errors at the end
        raise NativeError(f"{command[0]} failed ({said}): set CC to another compiler") from None
    return done.stdout


def _cpu() -> str:
    """What distinguishes CPUs whose machine code differs."""
    names = ("flags", "Features", "CPU implementer", "CPU part", "model name")
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = {line.split(":")[0].strip(): line for line in lines if line.split(":")[0].strip() in names}
    return platform.machine() + "".join(found.values())
