"""Starts an engine: everything that needs no torch comes before the import of torch.

Importing torch loads gigabytes of shared libraries, and the first CUDA call creates the context. Both take a second or
more, in foreign code that needs no GIL. On a GPU they run here on threads of their own, while this thread makes the
tokenizer and llguidance's copy of it, which hold the GIL all the time. Without a GPU, or if torch is imported already,
there is nothing to gain. If no kernels are compiled yet, the processes that will compile them start at once too: they
import torch beside this one.

`ctypes.CDLL` holds the GIL, also while it waits for another thread that loads a library. So the threads call `dlopen`
as a foreign function, and get the driver, which is loaded before they start.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig, split_options
from paceline.engine.cuda.compile_workers import CompileWorkers
from paceline.engine.loaded_text import load_text
from paceline.model.fetch import kernel_cache

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_LIBCUDA, _TORCH_CUDA = "libcuda.so.1", "libtorch_cuda.so"
_ARGUMENTS = ("load", "shape", "seed")  # of `build_engine`, beside the options
_INTERNAL = ("progress", "trace", "hooks", "detokenize", "role")


def start_engine(model: str | Path | None = None, **options: Any) -> Engine:
    """`build_engine`, with the same arguments."""
    libraries = None if "torch" in sys.modules else _torch_libraries()
    driver = None if libraries is None else _load_driver(options)
    must_compile = driver is not None and not _has_kernels(options.get("kernel_folder"))
    with closing(CompileWorkers()) if must_compile else nullcontext() as workers:
        text = None
        if libraries is not None and driver is not None:
            Thread(
                target=_load_torch_libraries, args=(libraries,), name="paceline-torch-libraries", daemon=True
            ).start()
            Thread(target=_create_context, args=(driver,), name="paceline-cuda-context", daemon=True).start()
            text = load_text(model, options)
        from paceline.engine.build import build_engine  # imports torch

        return build_engine(model, text=text, workers=workers, **options)


def _has_kernels(folder: str | None) -> bool:
    """Whether kernels of some model are compiled, in the cache or in the folder of `kernel_folder`."""
    return any(any(found.glob("*.list")) for found in (kernel_cache(), *([] if folder is None else [Path(folder)])))


def _load_driver(options: Mapping[str, object]) -> ctypes.CDLL | None:
    """That of the GPU which the engine is going to use, as far as one can tell without torch."""
    given = {name: value for name, value in options.items() if name not in (*_ARGUMENTS, *_INTERNAL)}
    config = EngineConfig(**split_options(given, ("model", *_ARGUMENTS))[0])
    if config.executor == "virtual" or config.device == "cpu":
        return None
    try:
        return ctypes.CDLL(_LIBCUDA)
    except OSError:
        return None


def _torch_libraries() -> Path | None:
    """The folder of torch's libraries; None if it is not installed, or without CUDA."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "lib"
    return folder if (folder / _TORCH_CUDA).is_file() else None


def _load_torch_libraries(folder: Path) -> None:
    """Those that know nothing of Python, and the CUDA runtime's part of the context. Importing torch finds them loaded;
    what cannot be loaded, it reports."""
    with suppress(OSError):
        _load_library(folder / "libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL)  # as torch does it
        libraries = _load_library(folder / _TORCH_CUDA, os.RTLD_NOW)
        # Initializes the CUDA runtime: functions are also looked up in the libraries that this one depends on.
        libraries.cudaFree(None)


def _load_library(path: Path, mode: int) -> ctypes.CDLL:
    """`ctypes.CDLL` without the GIL."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # None if it cannot be loaded: then this tries again, and raises OSError.
    return ctypes.CDLL(str(path), handle=dlopen(os.fsencode(path), mode))


def _create_context(cuda: ctypes.CDLL) -> None:
    """The primary context of the first GPU, which torch uses too. Errors are left to torch, which reports them."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its first CUDA call
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
