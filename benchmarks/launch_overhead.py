"""How much host time does a kernel launch take, through Triton and by the direct launcher (kernels/_triton.py)?

    python benchmarks/launch_overhead.py [run]

Prints microseconds per launch of each kernel of a prefill batch and of a GEMM, with so little work that the device
keeps up; and whether both launchers give the same bits. With `run`: gsp with 100,000 tokens of KV, alternating between
the launchers, and the host's time for prefill and for decode batches.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paceline.kernels
from paceline.bench.workloads import gsp_offline
from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.attention import decode_chunks
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.tiles import extend_tiles, extend_units
from paceline.engine.engine import Engine
from paceline.engine.timeline import Timeline
from paceline.kernels._triton import Kernel
from paceline.kernels.decode_attention import DecodeWorkspace, decode_attention, decode_attention_tuning
from paceline.kernels.decode_units import DecodeUnits, decode_units
from paceline.kernels.extend_attention import ExtendTuning, extend_attention, tokens_per_tile
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rope_kv import rope_kv, rope_table
from paceline.kernels.silu_mul import silu_mul
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.model.weights import random_decoder
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer

DEVICE = "cuda"
SHAPE, KV_TOKENS = "qwen3-0.6b", 100_000
HIDDEN, Q_HEADS, KV_HEADS, HEAD, FFN, EPS = 1024, 16, 8, 128, 3072, 1e-6
ROWS, PROMPTS, LENGTH = 32, 4, 64  # small: the device must be faster than the host


@contextmanager
def through_triton() -> Iterator[None]:
    """Launches every kernel through Triton."""
    changed = []
    for found in pkgutil.iter_modules(paceline.kernels.__path__):
        module = importlib.import_module(f"paceline.kernels.{found.name}")
        for name, value in list(vars(module).items()):
            if isinstance(value, Kernel):
                changed.append((module, name, value))
                setattr(module, name, value._function)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def cases() -> tuple[dict[str, Callable[[], None]], list[torch.Tensor]]:
    """Launches by name, and all tensors they write."""

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE).bfloat16()

    def ints(values: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int32)).to(DEVICE)

    tokens, pages = ROWS + PROMPTS * LENGTH, 64
    x, weight, normed, residual = randn(tokens, HIDDEN), randn(HIDDEN), randn(tokens, HIDDEN), randn(tokens, HIDDEN)
    qkv, q, out = randn(tokens, (Q_HEADS + 2 * KV_HEADS) * HEAD), randn(tokens, Q_HEADS, HEAD), randn(tokens, FFN)
    attended = randn(tokens, Q_HEADS * HEAD)
    k_cache, v_cache = randn(pages * 64, 16, KV_HEADS, HEAD), randn(pages * 64, 16, KV_HEADS, HEAD)
    table = ints(np.arange(64 * pages).reshape(64, pages))
    cos_sin, norm = rope_table(1024, HEAD, 1e6, DEVICE), randn(HEAD)
    lengths = np.array([1] * ROWS + [LENGTH] * PROMPTS, np.int32)
    starts = np.full(ROWS + PROMPTS, 300, np.int32)
    query_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    slots = ints(np.repeat(np.arange(ROWS + PROMPTS), lengths))
    positions = ints(np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]))
    row_slots, computed, num_rows = ints(np.arange(ROWS + PROMPTS)), ints(starts), ints([ROWS])
    chunks, tuning = decode_chunks(ROWS), ExtendTuning()
    capacity = chunks.capacity(ROWS, 1024)
    units = DecodeUnits.empty(ROWS, capacity, capacity, torch.device(DEVICE))
    workspace = DecodeWorkspace.empty(ROWS, capacity, Q_HEADS, KV_HEADS, HEAD, torch.device(DEVICE))
    decode_units(units, row_slots[:ROWS], num_rows, computed, chunks)
    prompts = np.arange(ROWS, ROWS + PROMPTS, dtype=np.int32)
    group = Q_HEADS // KV_HEADS
    tiles = extend_tiles(starts, lengths, tokens_per_tile(tuning, group), prompts)
    prompt_units = ints(extend_units(tiles, np.ones(len(tiles), np.int32)).units)
    gate_up = randn(tokens, 2 * FFN)
    decode_tuning, _ = decode_attention_tuning(ROWS, group, 0)
    first_tokens, heads = ints(query_starts), attended.view(-1, Q_HEADS, HEAD)
    square, projected = randn(HIDDEN, HIDDEN), randn(tokens, HIDDEN)

    def gemm() -> None:
        torch.mm(normed, square, out=projected)

    launches: dict[str, Callable[[], None]] = {
        "rms_norm": lambda: rms_norm(x, weight, EPS, normed, residual=residual),
        "silu_mul": lambda: silu_mul(gate_up, out),
        "rope_kv": lambda: rope_kv(
            qkv[ROWS:],
            q[ROWS:],
            k_cache,
            v_cache,
            table,
            slots[ROWS:],
            positions[ROWS:],
            positions[ROWS:],
            cos_sin,
            norm,
            norm,
            EPS,
        ),
        "decode_attention": lambda: decode_attention(
            qkv[:ROWS],
            k_cache,
            v_cache,
            table,
            cos_sin,
            norm,
            norm,
            EPS,
            units,
            workspace,
            attended[:ROWS],
            tuning=decode_tuning,
        ),
        "extend_attention": lambda: extend_attention(
            q, k_cache, v_cache, table, prompt_units, row_slots, positions, first_tokens, heads, tuning=tuning
        ),
        "torch.mm": gemm,
    }
    return launches, [normed, residual, out, q, k_cache, v_cache, attended]


def microseconds(launch: Callable[[], None]) -> float:
    launch()
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            launch()
        times.append((time.perf_counter() - began) / 100)
    return statistics.median(times) * 1e6


def alone() -> None:
    launches, written = cases()
    for name, launch in launches.items():
        with through_triton():
            triton = microseconds(launch)
        direct = microseconds(launch)
        print(f"{name:18} through Triton {triton:6.1f} us, direct {direct:6.1f} us: {triton / direct:.2f}x")

    def bits() -> list[torch.Tensor]:
        torch.manual_seed(0)
        launches, written = cases()
        for launch in launches.values():
            launch()
        return [tensor.clone() for tensor in written]

    with through_triton():
        expected = bits()
    bits()
    same = all(torch.equal(one, other) for one, other in zip(expected, bits(), strict=True))
    print(f"{'PASS' if same else 'FAIL'} both launchers give the same bits in {len(written)} tensors")


def whole_run() -> None:
    spec = shape(SHAPE)
    config = SchedulerConfig(context_tokens=spec.context_tokens, max_wait=math.inf, num_pages=KV_TOKENS // 16)
    decoder = random_decoder(spec, dtype="bfloat16", device="cuda", max_positions=spec.context_tokens)
    device, config = build_cuda(decoder, EngineConfig(), config, None)
    device.warm_up()
    tokenizer, work = synthetic_tokenizer(spec.vocab_size), gsp_offline()
    with LLM.from_engine(Engine(Scheduler(config), device, tokenizer, vocab_size=spec.vocab_size)) as llm:
        outputs = {}
        for number in range(7):
            name = ("direct", "through Triton")[number % 2]
            timeline = Timeline()
            llm.engine.loop.trace = timeline
            began = time.perf_counter()
            if number % 2:
                with through_triton():
                    outputs[name] = llm.generate(*work.shifted(number))
            else:
                outputs[name] = llm.generate(*work.shifted(number))
            seconds = time.perf_counter() - began
            llm.engine.loop.trace = None
            print(f"run {number} {name:15} {seconds:.3f} s{' (first: compiles)' if number < 2 else ''}", end="")
            prompts = {one.step for one in timeline.passes if one.num_prompts}
            idle = {
                kind: sum(p.idle_s for p in timeline.passes if (p.step in prompts) is kind) for kind in (True, False)
            }
            device_s = sum(one.device_s for one in timeline.passes)
            print(
                f", device {device_s:.3f} s, idle before prefill {idle[True]:.3f} s, before decode {idle[False]:.3f} s"
            )
            for what in ("plan", "launch", "wait", "commit", "text"):
                spans = [(s.step in prompts, (s.ended - s.began) * 1e3) for s in timeline.spans if s.what == what]
                of = {kind: [ms for is_prompt, ms in spans if is_prompt is kind] for kind in (True, False)}
                prefill, decode = statistics.mean(of[True]), statistics.mean(of[False])
                longest = max(of[True])
                print(f"    {what:7} ms per pass: prefill {prefill:7.3f} (longest {longest:7.3f}), decode {decode:.3f}")


if __name__ == "__main__":
    alone()
    if "run" in sys.argv[1:]:
        whole_run()
