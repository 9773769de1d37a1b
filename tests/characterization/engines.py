"""Builds an engine by the options that a user gives, also for a GPU where there is none, and with ranks in threads.

The only file of this tool that knows how `build_engine` works inside. A GPU is pretended: options are resolved for
CUDA, and tensors are on the CPU, where Triton's interpreter runs the kernels. Activations are in float32 unless a case
says otherwise, so that a mistake is larger than rounding. When the code changes, change this file and not the cases:
what they record must stay comparable.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from paceline.engine import build, parallel_executor, rank_processes
from paceline.engine.cuda import build as cuda_build
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.parallel.stages import StagePipe
from paceline.parallel.threads import ThreadGroup
from tests.engine.cuda.interpreted import small_sizes
from tests.parallel.ranks import ThreadRanks
from tests.parallel.test_cuda import LOCK, TurnExecutor, TurnGroup

DEVICES = ("reference", "cpu", "cuda")
_GIB = 1 << 30
_BUILD: Any = build  # whose parts are replaced
# The functions of this package hide some of its modules.
_assemble, _executor, _facts, _load, _rank = (
    import_module(f"paceline.engine.build.{name}") for name in ("assemble", "executor", "facts", "load", "ranks")
)
_CUDA_BUILD: Any = cuda_build
_Patch = tuple[Any, str, Any]  # where, name, value


class NotLoaded(Exception):
    """Everything is resolved, and that was all that was wanted."""


def build_on(
    device: str,
    path: Any,
    facts: dict[str, Any],
    *,
    resolve_only: bool = False,
    keep_dtype: bool = False,
    **options: Any,
) -> Engine:
    """device: cpu, cuda, or reference: the decoder of the CPU as it is loaded. facts: receives what is resolved, also
    if that is refused later. resolve_only: raises NotLoaded once all of that is known. keep_dtype: activations
    on CUDA have the type that is resolved."""
    on_gpu = device == "cuda"
    has_ranks = options.get("tp", 1) * options.get("pp", 1) > 1
    patches = [*_observers(facts, resolve_only), *(_ranks(on_gpu) if has_ranks else ())]
    if on_gpu:
        patches += _pretended(keep_dtype)
    elif device == "reference":
        patches.append((_load, "_arranged", lambda decoder: decoder))
    with ExitStack() as stack:
        for place, name, value in patches:
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(LOCK if on_gpu and has_ranks else nullcontext())
        return build.build_engine(path, device="auto" if on_gpu else "cpu", **options)


# ---------------------------------------------------------------------- what is observed


def _observers(facts: dict[str, Any], resolve_only: bool) -> Iterator[_Patch]:
    resolve, assemble = _BUILD.resolve_here, _BUILD.assemble

    def resolving(*arguments: Any, **options: Any) -> Any:
        found = resolve(*arguments, **options)
        facts["quantization"], facts["dtype"] = found.weights.quantization, found.weights.dtype
        facts["planned_bytes"] = sum(plan.loading_bytes for plan in found.plans)
        if resolve_only:
            raise NotLoaded
        return found

    def assembling(decoder: Any, *arguments: Any, **options: Any) -> Engine:
        facts["loaded_bytes"] = _num_bytes(decoder)
        engine: Engine = assemble(decoder, *arguments, **options)
        return engine

    yield build, "resolve_here", resolving
    yield build, "assemble", assembling


def _num_bytes(model: Any) -> int:
    """Of all tensors and arrays of a loaded model, each memory once; of rank 0's part, if there are ranks."""
    sizes: dict[int, int] = {}
    seen, todo = {id(model)}, [model]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor) and one.is_mkldnn:  # packed by the library
            sizes[id(one)] = one.numel() * one.element_size()
            continue
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            continue
        if isinstance(one, np.ndarray):
            base = one
            while isinstance(base.base, np.ndarray):
                base = base.base
            sizes[base.ctypes.data] = base.nbytes
            continue
        is_ours = type(one).__module__.startswith("paceline.") and not isinstance(one, ThreadGroup | StagePipe)
        if not (is_ours or isinstance(one, list | tuple | Mapping)):
            continue
        for child in gc.get_referents(one):
            if id(child) not in seen and not isinstance(child, type):
                seen.add(id(child))
                todo.append(child)
    return sum(sizes.values())


# ---------------------------------------------------------------------- a GPU


def _pretended(keep_dtype: bool) -> Iterator[_Patch]:
    load, make = _load.load_decoder, _CUDA_BUILD.build_cuda

    def loading(path: Any, **options: Any) -> Any:
        dtype = options["dtype"] if keep_dtype else "float32"
        return load(path, **{**options, "dtype": dtype, "device": "cpu"})

    def making(*arguments: Any, **options: Any) -> Any:
        return make(*arguments, **options, prefill_sizes=(16,), **small_sizes())

    yield torch.cuda, "get_device_capability", lambda *_: (9, 0)
    yield torch.cuda, "mem_get_info", lambda *_: (64 * _GIB, 80 * _GIB)
    yield torch.cuda, "device_count", lambda: 8
    yield torch.cuda, "get_device_name", lambda *_: "interpreter"
    yield torch.cuda, "set_device", lambda *_: None
    for place in (build, _facts):
        yield place, "choose_device", lambda _: "cuda"
    yield _load, "load_decoder", loading
    yield _load, "_arranged", lambda decoder: decoder
    for place in (_executor, _assemble):
        yield place, "device_of", lambda _: "cuda"
    for place in (build, _executor, _rank):
        yield place, "prepare_kernels", lambda *_, **__: SimpleNamespace(finish=lambda: None)
    yield cuda_build, "build_cuda", making


# ---------------------------------------------------------------------- ranks


class _Ranks:
    """The ranks from 1 on, as threads that call `build_rank` as a process of a rank does."""

    def __init__(self, size: int, on_gpu: bool) -> None:
        self.size, self.on_gpu = size, on_gpu
        self.groups = (TurnGroup if on_gpu else ThreadGroup).of_size(size)
        self._executors: list[Executor | BaseException] = []
        self._threads: list[threading.Thread] = []
        self._running: ThreadRanks | None = None

    def connect(self, setup: Any) -> None:
        self._executors = [RuntimeError("not built")] * (self.size - 1)
        for rank in range(1, self.size):
            self._threads.append(threading.Thread(target=self._build, args=(setup, rank), daemon=True))
            self._threads[-1].start()

    def _build(self, setup: Any, rank: int) -> None:
        try:
            with LOCK if self.on_gpu else nullcontext():
                found = _rank.build_rank(setup, rank, self.size, lambda num_pages: num_pages)
            self._executors[rank - 1] = TurnExecutor(found) if self.on_gpu else found  # type: ignore[arg-type]
        except BaseException as error:
            self._executors[rank - 1] = error

    def wait_ready(self) -> None:
        if self.on_gpu:
            LOCK.release()
        for thread in self._threads:
            thread.join()
        if self.on_gpu:
            LOCK.acquire()
        for one in self._executors:
            if isinstance(one, BaseException):
                raise one
        self._running = ThreadRanks(self._executors)  # type: ignore[arg-type]

    def agree(self, num_pages: int) -> int:
        return num_pages

    def explained(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def __getattr__(self, name: str) -> Any:
        assert self._running is not None, f"{name} is used before the ranks run"
        return getattr(self._running, name)


def _ranks(on_gpu: bool) -> Iterator[_Patch]:
    made: list[_Ranks] = []
    parallel = parallel_executor.ParallelExecutor

    def starting(size: int) -> _Ranks:
        made.append(_Ranks(size, on_gpu))
        return made[-1]

    def links(config: Any, backend: str, rank: int, store: Any, device: str) -> Any:
        group = made[-1].groups[rank]
        return (None, StagePipe(group)) if config.pp > 1 else (group, None)

    def in_turns(executor: Any, ranks: Any) -> Any:
        return parallel(TurnExecutor(executor), ranks)

    yield rank_processes, "RankProcesses", starting
    for place in (build, _rank):
        yield place, "links", links
    yield _rank, "listen", lambda: (None, 0)
    yield _rank, "connect", lambda _: None
    if on_gpu:
        yield parallel_executor, "ParallelExecutor", in_turns
