"""Records everything that the GPU executor launches, in order, and compares two records. Needs Triton and no GPU.

    python -m tests.characterization.launches record FILE [--only TEXT]
    python -m tests.characterization.launches compare FILE [--only TEXT]

A refactoring that launches the same kernels with the same numbers on the same buffers takes the same time on a GPU. A
buffer is named by when it was first used, so that what allocates it may change.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import SchedulerConfig
from paceline.engine.cuda import variants
from paceline.engine.precision import KernelFormat, Precision
from paceline.kernels._triton import Kernel
from paceline.model.layout import WHOLE_MODEL, Shard
from paceline.model.shapes import shape

_SCHEDULER = {"num_pages": 64, "page_size": 16, "context_tokens": 512, "max_running": 48, "max_batch_tokens": 512}
_VIEWS = ("view", "slice", "select", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "unsqueeze",
          "empty", "zeros", "ones", "new_empty", "new_zeros", "empty_like", "zeros_like", "chunk", "split", "unbind",
          "_to_copy", "permute", "as_strided", "squeeze")  # fmt: skip
_INT4, _GGUF = KernelFormat(group=128), KernelFormat(bits=((4, 8),) * 4)
Case = tuple[Sequence[str], dict[str, Any], dict[str, Any], Shard]
CASES: dict[str, Case] = {
    "0.6b": (["qwen3-0.6b"], {}, {}, WHOLE_MODEL),
    "0.6b/lora": (["qwen3-0.6b"], {"lora": (4, 16)}, {}, WHOLE_MODEL),
    "14b/drafts": (["qwen3-14b", "qwen3-0.6b"], {}, {"draft_tokens": 3, "max_running": 8}, WHOLE_MODEL),
    "0.6b/float16": (["qwen3-0.6b"], {"dtype": "float16"}, {}, WHOLE_MODEL),
    "0.6b/tp": (["qwen3-0.6b"], {}, {}, Shard(0, 2)),
    "0.6b/first stage": (["qwen3-0.6b"], {}, {}, Shard(stage=0, num_stages=2)),
    "0.6b/last stage": (["qwen3-0.6b"], {}, {}, Shard(stage=1, num_stages=2)),
    "14b": (["qwen3-14b"], {}, {}, WHOLE_MODEL),
    "14b/fp8": (["qwen3-14b"], {"quantization": "fp8"}, {}, WHOLE_MODEL),
    "14b/fp8, long": (["qwen3-14b"], {"quantization": "fp8"}, {"max_batch_tokens": 2048}, WHOLE_MODEL),
    "14b/fp8, tp": (["qwen3-14b"], {"quantization": "fp8"}, {}, Shard(1, 2)),
    "14b/int4": (["qwen3-14b"], {"quantization": "int4", "formats": (_INT4,)}, {}, WHOLE_MODEL),
    "14b/int4, tp": (["qwen3-14b"], {"quantization": "int4", "formats": (_INT4,)}, {}, Shard(1, 2)),
    "0.6b/gguf": (["qwen3-0.6b"], {"quantization": "gguf", "formats": (_GGUF,)}, {}, WHOLE_MODEL),
    "biases/fp8": (["tiny-qwen2"], {"quantization": "fp8"}, {}, WHOLE_MODEL),
    "30b-a3b": (["qwen3-30b-a3b"], {}, {}, WHOLE_MODEL),
    "30b-a3b/fp8": (["qwen3-30b-a3b"], {"quantization": "fp8"}, {}, WHOLE_MODEL),
    "30b-a3b/tp": (["qwen3-30b-a3b"], {}, {}, Shard(1, 2)),
    "gpt-oss-20b/mxfp4": (["gpt-oss-20b"], {"quantization": "mxfp4"}, {}, WHOLE_MODEL),
    "gpt-oss/lora": (["tiny-gpt-oss"], {"lora": (2, 8)}, {}, WHOLE_MODEL),
    "gemma3-4b": (["gemma3-4b"], {}, {}, WHOLE_MODEL),
    "gemma3/lora": (["tiny-gemma3"], {"lora": (2, 8)}, {}, WHOLE_MODEL),
    "gemma3/tp": (["tiny-gemma3"], {}, {}, Shard(1, 2)),
    **{name: ([f"tiny-{name}"], {}, {}, WHOLE_MODEL)
       for name in ("qwen2", "qwen3-moe", "qwen2-moe", "olmoe", "olmo2", "gemma2", "granite", "mixtral")},
    "olmo2/tp": (["tiny-olmo2"], {}, {}, Shard(1, 2)),
    "qwen2-moe/tp": (["tiny-qwen2-moe"], {}, {}, Shard(1, 2)),
}  # fmt: skip


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._names: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other storage gets its address

    def forget(self) -> None:
        self.lines.clear()
        self._names.clear()

    def tensor(self, value: torch.Tensor) -> str:
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._names:
            self._names[key] = len(self._names)
            self._kept.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return f"#{self._names[key]}+{value.storage_offset()}{tuple(value.shape)}{value.stride()}{dtype}"

    def argument(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.argument, value))}]"
        return repr(value)

    def add(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> None:
        found = [self.argument(one) for one in args]
        found += [f"{key}={self.argument(one)}" for key, one in sorted(options.items())]
        self.lines.append(f"{name}({', '.join(found)})")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        if name not in _VIEWS:
            self.add(function.__name__, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def trace(case: Case) -> list[str]:
    names, precision, scheduler, shard = case
    recorder = _Recorder()

    def launch(self: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        recorder.add(f"{self.function.fn.__name__}[{grid}]", args, constants)

    @contextmanager
    def recorded_gemms() -> Iterator[None]:
        before = torch.mm, torch.addmm

        def gemm(name: str) -> Any:
            def run(*args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
                recorder.add(name, args, {**options, "out": out})
                return out

            return run

        def scaled_mm(*args: Any) -> None:
            recorder.add("scaled_mm", args, {})

        torch.mm, torch.addmm = gemm("mm"), gemm("addmm")  # type: ignore[assignment]
        with ExitStack() as stack:
            stack.callback(setattr, torch, "mm", before[0])
            stack.callback(setattr, torch, "addmm", before[1])
            for module in [one for name, one in sys.modules.items() if name.startswith("paceline.engine")]:
                if found := getattr(module, "scaled_mm", None):
                    stack.callback(setattr, module, "scaled_mm", found)
                    setattr(module, "scaled_mm", scaled_mm)  # noqa: B010
            stack.enter_context(recorder)
            yield

    kernel_launch, without_gemms = Kernel._launch, variants._without_gemms
    list_all, specs = variants.launch_all, [shape(name) for name in names]

    def launch_all(executor: Any) -> None:
        recorder.forget()  # what building has computed
        Kernel._launch = launch  # type: ignore[method-assign]
        list_all(executor)

    variants.launch_all, variants._without_gemms = launch_all, recorded_gemms
    try:
        options = SchedulerConfig(**{**_SCHEDULER, **scheduler})
        variants.kernel_variants(specs, Precision(**{"dtype": "bfloat16", **precision}), options, shard)
    finally:
        Kernel._launch = kernel_launch  # type: ignore[method-assign]
        variants.launch_all, variants._without_gemms = list_all, without_gemms
    return recorder.lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Records or compares what the GPU executor launches.")
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if given.only in name}
    if given.command == "record":
        with gzip.open(given.file, "wt") as file:
            json.dump({name: trace(case) for name, case in chosen.items()}, file)
        return 0
    with gzip.open(given.file, "rt") as file:
        known = json.load(file)
    num_different = 0
    for name, case in chosen.items():
        before, now = known[name], trace(case)
        num_different += before != now
        print(f"{name}: {len(now)} launches, {'the same' if before == now else 'DIFFERENT'}", flush=True)
        if before != now:
            for line in list(difflib.unified_diff(before, now, "before", "now", n=1, lineterm=""))[:24]:
                print("   ", line[:400])
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
