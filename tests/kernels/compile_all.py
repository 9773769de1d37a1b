"""Compiles every kernel for a Hopper GPU, on any machine: `python -m tests.kernels.compile_all`.

An engine with a tiny model runs on the CPU with a driver that only compiles, so that every kernel gets the arguments it
has in practice. Nothing is computed, so outputs mean nothing. The compiler refuses much that the interpreter allows.

With the name of a shape (`python -m tests.kernels.compile_all qwen3-0.6b`) it compiles that model's decode batches of
every size and prints the resources of each kernel: registers, spilled bytes, shared memory, and how many programs fit a
multiprocessor. It also shows when a loop has fewer tiles in flight than num_stages asks for; otherwise only its run
time would.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch
from triton import knobs

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.build import build_cuda
from paceline.engine.engine import Engine
from paceline.kernels._triton import Kernel, triton
from paceline.kernels.adjust import mask_logits
from paceline.kernels.linear import LinearTuning
from paceline.kernels.move_pages import collect_pages, place_pages
from paceline.kernels.pool_states import pool_states
from paceline.llm import LLM
from paceline.model.registry import shape
from paceline.model.weights import random_decoder
from paceline.request import SamplingParams
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer
from tests.kernels.test_launch import FakeDriver

Constants = tuple[tuple[str, int], ...]


def compile_only() -> dict[str, dict[Constants, Any]]:
    """From now on launches only compile. Returns what is compiled, by kernel name and then by constants."""
    found: dict[str, dict[Constants, Any]] = {}
    kind: Any = triton.JITFunction
    run = kind.run

    def running(self: Any, *args: Any, **kwargs: Any) -> None:
        compiled = run(self, *args, **{**kwargs, "warmup": True})
        constants = tuple((name, value) for name, value in kwargs.items() if isinstance(value, int))
        found.setdefault(self.fn.__name__, {})[constants] = compiled

    def launching(self: Kernel, grid: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.function[grid](*args, **constants)

    kind.run = running
    Kernel._launch = launching  # type: ignore[method-assign]
    triton.runtime.driver.set_active(FakeDriver())
    return found


_SHARED_BYTES, _REGISTERS, _WARPS = 227 * 1024, 65536, 64  # per multiprocessor


def resources(compiled: Any) -> str:
    """The resources of a program, and how many programs fit a multiprocessor."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [str(knobs.nvidia.cuobjdump.path), "-res-usage", file.name]
        report = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", report)[-1]) for what in ("REG", "STACK"))
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    fitting = min(_REGISTERS // (registers * 32 * warps), _WARPS // warps, _SHARED_BYTES // (shared + 1024))
    return f"{registers:9} {stack:7} {shared / 1024:9.1f} {warps:5} {fitting:9}"


def print_resources(name: str) -> None:
    found = compile_only()
    # Kernels depend on one layer only and, except for sampling, not on the vocabulary.
    spec = shape(name)
    spec = replace(spec, num_layers=1, windows=spec.windows[:1], layer_ropes=spec.layer_ropes[:1], vocab_size=2048)
    decoder = random_decoder(spec, dtype="bfloat16", device="cpu", max_positions=2048)
    options: dict[str, Any] = {"context_tokens": 2048, "num_pages": 256, "max_batch_tokens": 512}
    device, config = build_cuda(decoder, EngineConfig(), SchedulerConfig(**options), None)
    device.warm_up()
    with LLM.from_engine(
        Engine(Scheduler(config), device, synthetic_tokenizer(2048), vocab_size=spec.vocab_size)
    ) as llm:
        llm.generate([[5] * 900], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    print("registers spilled shared KB warps at once")
    for kernel, variants in sorted(found.items()):
        print(kernel)
        in_all = set.intersection(*map(set, variants))
        for constants, compiled in variants.items():
            own = ", ".join(f"{name} {value:d}" for name, value in constants if (name, value) not in in_all)
            print(f"{resources(compiled)}   {own}")


def main() -> None:
    found = compile_only()
    spec = shape("tiny-qwen3")
    options: dict[str, Any] = {"context_tokens": 2048, "num_pages": 512, "max_running": 8, "chunk_tokens": 64}
    decoder = random_decoder(spec, dtype="bfloat16", device="cpu", max_positions=2048)
    device, config = build_cuda(
        decoder,
        EngineConfig(),
        SchedulerConfig(**options),
        None,
        tuning=lambda rows, columns, gated: LinearTuning(16, 16, 16, 1, 3, 1 if gated else 2) if rows < 4 else None,
    )
    tokenizer = synthetic_tokenizer(spec.vocab_size)
    common = [5 + index % 500 for index in range(900)]
    prompts = [[*common, index] for index in range(6)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    full = SamplingParams(max_tokens=4, ignore_eos=True, top_k=20, top_p=0.9, repetition_penalty=1.1, logprobs=5)
    with LLM.from_engine(Engine(Scheduler(config), device, tokenizer, vocab_size=spec.vocab_size)) as llm:
        llm.generate(prompts, [greedy] * 5 + [full])
        llm.generate([common + common[:400]], greedy)
    ints = torch.zeros(4, 64, dtype=torch.int32)  # launched here: a grammar would notice that its masks do nothing
    mask_logits(torch.zeros(4, 2048, dtype=torch.bfloat16), ints[0, :1], ints[1, :4], ints)
    for move in (collect_pages, place_pages):  # launched here: no page was swapped
        move(device.kv.flatten(2), ints[0, :4], torch.zeros(4, len(device.kv), device.kv[0, 0].numel()).bfloat16())
    pool_states(torch.zeros(4, 64, dtype=torch.bfloat16), ints[:, :2].contiguous(), torch.zeros(4, 64))
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("paceline.kernels.")]
    kernels = {one.function.fn.__name__ for each in modules for one in each.values() if isinstance(one, Kernel)}
    assert kernels, "kernels run in the interpreter: unset TRITON_INTERPRET"
    missing = kernels - found.keys()
    print(f"compiled: {', '.join(sorted(found))}; not launched: {', '.join(sorted(missing)) or 'none'}")
    assert not missing, "some kernel was not launched"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print_resources(sys.argv[1])
    else:
        main()
