"""Compiles every kernel for a Hopper GPU, on any machine: `python -m tests.kernels.compile_all`.

An engine of a tiny model runs on the CPU with a driver that only compiles, so that every kernel sees the arguments it
will have. What comes out means nothing: nothing is computed. The interpreter takes much that the compiler refuses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda_build import build_cuda
from paceline.engine.engine import Engine
from paceline.kernels._triton import Kernel, triton
from paceline.kernels.adjust import mask_logits
from paceline.kernels.linear import LinearTuning
from paceline.kernels.move_pages import collect_pages, place_pages
from paceline.llm import LLM
from paceline.model.registry import shape
from paceline.model.weights import random_decoder
from paceline.request import SamplingParams
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer
from tests.kernels.test_launch import FakeDriver


def compile_only() -> set[str]:
    """From now on launches compile and do nothing else. Returns the names of what will have been compiled."""
    names: set[str] = set()
    kind: Any = triton.JITFunction
    run = kind.run

    def running(self: Any, *args: Any, **kwargs: Any) -> None:
        names.add(self.fn.__name__)
        run(self, *args, **{**kwargs, "warmup": True})

    def launching(self: Kernel, grid: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._function[grid](*args, **constants)

    kind.run = running
    Kernel._launch = launching  # type: ignore[method-assign]
    triton.runtime.driver.set_active(FakeDriver())
    return names


def main() -> None:
    names = compile_only()
    spec = shape("tiny-qwen3")
    options: dict[str, Any] = {"context_tokens": 2048, "num_pages": 512, "max_running": 8, "chunk_tokens": 64}
    decoder = random_decoder(spec, dtype="bfloat16", device="cpu", max_positions=2048)
    device, config = build_cuda(
        decoder, EngineConfig(), SchedulerConfig(**options), None,
        tuning=lambda rows, columns, gated: LinearTuning(16, 16, 16, 1, 3, 1 if gated else 2) if rows < 4 else None,
    )  # fmt: skip
    tokenizer = synthetic_tokenizer(spec.vocab_size)
    common = [5 + index % 500 for index in range(900)]
    prompts = [[*common, index] for index in range(6)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    full = SamplingParams(max_tokens=4, ignore_eos=True, top_k=20, top_p=0.9, repetition_penalty=1.1, logprobs=5)
    with LLM.from_engine(Engine(Scheduler(config), device, tokenizer, vocab_size=spec.vocab_size)) as llm:
        llm.generate(prompts, [greedy] * 5 + [full])
        llm.generate([common + common[:400]], greedy)
    ints = torch.zeros(4, 64, dtype=torch.int32)  # a grammar would notice that its masks do nothing
    mask_logits(torch.zeros(4, 2048, dtype=torch.bfloat16), ints[0, :1], ints[1, :4], ints)
    for move in (collect_pages, place_pages):  # nothing left the device
        move(device.kv.flatten(2), ints[0, :4], torch.zeros(4, len(device.kv), device.kv[0, 0].numel()).bfloat16())
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("paceline.kernels.")]
    kernels = {one._function.fn.__name__ for each in modules for one in each.values() if isinstance(one, Kernel)}
    assert kernels, "kernels are interpreted: leave TRITON_INTERPRET out"
    print(f"compiled: {', '.join(sorted(names))}; not launched: {', '.join(sorted(kernels - names)) or 'none'}")
    assert not kernels - names, "some kernel was not launched"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
