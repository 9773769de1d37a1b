"""Kernels and checks of model families on a GPU: `python -m benchmarks.families`, or with some of its parts.

    decode    decode attention by head size (96, 128, 256) and tuning: error, microseconds per layer, share of 4.8 TB/s
    extend    prefill attention by head size and tuning: error, microseconds, TFLOP/s
    norms     the launch after a block with norms on both sides, GELU, the cap of logits: error and GB/s
    check     greedy tokens of every new family within tolerance of float32, through the whole engine

A part that fails prints its traceback, and the others still run. Whole runs: `paceline bench offline nano sweep --shape
gemma3-4b`, and llama3.1-8b, phi3-mini.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.kernel_timing import BF16, ints, randn, timed
from benchmarks.parts import run_parts
from paceline.checks import CheckSetup, check_tokens
from paceline.engine.cuda.tiles import extend_tiles, extend_units
from paceline.kernels.decode_attention import (
    NONE_SHARED,
    DecodeTuning,
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    decode_attention_tuning,
    tuning_for,
)
from paceline.kernels.decode_units import Chunks, DecodeUnits, decode_units
from paceline.kernels.extend_attention import (
    ExtendTuning,
    extend_attention,
    extend_attention_reference,
    extend_tuning,
    tokens_per_tile,
)
from paceline.kernels.rms_norm import post_norm, post_norm_reference
from paceline.kernels.rope_kv import rope_table
from paceline.kernels.silu_mul import silu_mul, silu_mul_reference
from paceline.kernels.soft_cap import soft_cap, soft_cap_reference

PAGE, EPS, BANDWIDTH = 16, 1e-6, 4.8e12
CHECKED = (
    ("tiny-gemma2", None),
    ("tiny-olmo2", None),
    ("tiny-granite", None),
    ("tiny-phi3", None),
    ("gemma3-4b", 7),
    ("phi3-mini", 3),
    ("tiny-gpt-oss", None),
    ("gpt-oss-20b", 2),
)  # shape, layers


@dataclass(frozen=True)
class Heads:
    name: str
    queries: int
    keys: int
    size: int
    window: int = 0
    has_norm: bool = False
    cap: float | None = None


HEADS = (
    Heads("llama3.1-8b", 32, 8, 128),
    Heads("phi3-mini", 32, 32, 96),
    Heads("gemma3-4b global", 8, 4, 256, has_norm=True),
    Heads("gemma3-4b local", 8, 4, 256, window=1024, has_norm=True),
    Heads("gemma2-9b global", 16, 8, 256, cap=50.0),
)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def cache_of(heads: Heads, rows: int, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and a page table with pages in random order."""
    per_row = -(-longest // PAGE)
    pages = torch.randperm(rows * per_row, device="cuda").int().view(rows, per_row)
    return *(randn(rows * per_row, PAGE, heads.keys, heads.size) for _ in range(2)), pages  # type: ignore[return-value]


def bench_decode() -> None:
    print("decode attention: heads, rows x context, tuning, error, us, share of the bandwidth")
    for heads in HEADS:
        for rows, context in ((1, 4000), (64, 1000), (256, 840)):
            k, v, pages = cache_of(heads, rows, context + 64)
            table, norm = rope_table(context + 64, heads.size, 1e6, "cuda"), randn(heads.size).abs_()
            norms = (norm, norm) if heads.has_norm else (None, None)
            qkv = randn(rows, (heads.queries + 2 * heads.keys) * heads.size)
            out = torch.empty(rows, heads.queries * heads.size, device="cuda", dtype=BF16)
            slots, chunks = torch.arange(rows, device="cuda").int(), Chunks() if rows < 128 else Chunks(max_tokens=2048)
            lengths = ints(np.random.default_rng(rows).integers(context // 2, context, rows))
            capacity = chunks.capacity(rows, context + 64)
            units = DecodeUnits.empty(rows, capacity, 0, "cuda")
            workspace = DecodeWorkspace.empty(rows, capacity, heads.queries, heads.keys, heads.size, "cuda")
            decode_units(units, slots, ints([rows]), lengths, chunks, heads.window)
            few = slice(0, min(rows, 4))
            expected = decode_attention_reference(
                qkv[few],
                k.clone(),
                v.clone(),
                pages,
                slots[few],
                lengths[few],
                table,
                *norms,
                EPS,
                heads.window,
                cap=heads.cap,
            )
            shipped = tuning_for(decode_attention_tuning(rows, heads.queries // heads.keys, 0)[0], heads.size)
            for name, tuning in decode_variants(shipped, heads.size):
                work = partial(
                    decode_attention,
                    *(qkv, k, v, pages, table, *norms, EPS, units, workspace, out, heads.window, tuning),
                    part=NONE_SHARED,
                    cap=heads.cap,
                )
                try:
                    seconds = timed(work)
                except Exception as problem:  # one tuning may not fit
                    print(f"  {heads.name}, {rows} x {context}, {name}: {str(problem)[:90]}")
                    continue
                seen = lengths.clamp(max=heads.window) if heads.window else lengths
                share = float(seen.sum()) * heads.keys * heads.size * 4 / seconds / BANDWIDTH
                print(
                    f"  {heads.name:18} {rows:4} x {context:5} {name:28} {error_of(out[few], expected):.4f} "
                    f"{seconds * 1e6:8.1f} {share:6.1%}",
                    flush=True,
                )


def decode_variants(shipped: DecodeTuning, head_dim: int) -> list[tuple[str, DecodeTuning]]:
    found = [("shipped", shipped)]
    if head_dim != 128:
        for block_n, warps, stages, registers in ((16, 2, 3, 255), (16, 4, 4, 128), (32, 4, 2, 168), (32, 8, 3, 128)):
            name = f"n{block_n} w{warps} s{stages} r{registers}"
            found.append(
                (name, replace(shipped, block_n=block_n, num_warps=warps, num_stages=stages, max_registers=registers))
            )
    return found


def bench_extend() -> None:
    print("prefill attention, one prompt of 4,096 tokens after 1,000: heads, tuning, error, us, TFLOP/s")
    start, length = 1000, 4096
    for heads in HEADS:
        k, v, pages = cache_of(heads, 1, start + length)
        q = randn(length, heads.queries, heads.size)
        positions, checked = ints(np.arange(start, start + length)), [0, 64]
        expected = extend_attention_reference(
            q[: checked[1]], k, v, pages, [0], [start], checked, heads.window, cap=heads.cap
        )
        variants = [("shipped", extend_tuning(heads.size))]
        if heads.size > 128:
            variants += [
                (f"m{m} n{n} w{w} s{s} r{r}", ExtendTuning(m, n, w, s, r))
                for m, n, w, s, r in (
                    (64, 32, 8, 2, 128),
                    (64, 64, 8, 2, 168),
                    (128, 32, 8, 2, 255),
                    (128, 64, 8, 1, 255),
                    (64, 32, 4, 2, 255),
                )
            ]
        for name, tuning in variants:
            tokens = tokens_per_tile(tuning, heads.queries // heads.keys)
            tiles = extend_tiles(np.array([start], np.int32), np.array([length], np.int32), tokens)
            units = ints(extend_units(tiles, np.ones(len(tiles), np.int32)).units)
            out = torch.empty_like(q)

            columns = (units, ints([0]), positions, ints([0, length]), out, heads.window, tuning)
            try:
                seconds = timed(partial(extend_attention, q, k, v, pages, *columns, cap=heads.cap))
            except Exception as problem:
                print(f"  {heads.name}, {name}: {str(problem)[:90]}")
                continue
            keys = np.arange(start + 1, start + length + 1)
            seen = float((np.minimum(keys, heads.window) if heads.window else keys).sum())
            flops = 4 * seen * heads.queries * heads.size
            print(
                f"  {heads.name:18} {name:24} {error_of(out[: checked[1]], expected):.4f} {seconds * 1e6:8.1f} "
                f"{flops / seconds / 1e12:6.0f}",
                flush=True,
            )


def bench_norms() -> None:
    print("kernel, rows, error, us, GB/s")
    for rows in (1, 64, 256, 4096):
        x, stream, weight, out = randn(rows, 2560), randn(rows, 2560), randn(2560).abs_(), randn(rows, 2560)
        expected = post_norm_reference(x, weight, EPS, stream)[0]
        post_norm(x, weight, EPS, stream, out)
        report(
            "post_norm", rows, error_of(out, expected), 8 * x.numel(), partial(post_norm, x, weight, EPS, stream, out)
        )
        gate_up, act = randn(rows, 2 * 10_240), randn(rows, 10_240)
        silu_mul(gate_up, act, gelu=True)
        error = error_of(act, silu_mul_reference(gate_up, gelu=True))
        report("gelu_mul", rows, error, 6 * act.numel(), partial(silu_mul, gate_up, act, gelu=True))
    for rows in (1, 256):
        logits = randn(rows, 256_000, scale=20.0)
        wanted = soft_cap_reference(logits, 30.0)
        soft_cap(logits, 30.0)
        report("soft_cap", rows, error_of(logits, wanted), 4 * logits.numel(), partial(soft_cap, logits, 30.0))


def report(name: str, rows: int, error: float, num_bytes: int, work: Callable[[], None]) -> None:
    seconds = timed(work)
    print(f"  {name:10} {rows:5} {error:.4f} {seconds * 1e6:8.1f} {num_bytes / seconds / 1e9:7.0f}", flush=True)


def run_checks() -> None:
    failed = []
    for shape, layers in CHECKED:
        began = time.perf_counter()
        try:
            context = {} if layers is None else {"context_tokens": 4096}
            setup = CheckSetup(shape, torch.device("cuda"), "bfloat16", context, num_layers=layers)
            passed, text = check_tokens(setup)
            print(f"  {'PASS' if passed else 'FAIL'} {shape}: {text} [{time.perf_counter() - began:.0f} s]", flush=True)
        except Exception:  # the others are checked all the same
            passed = False
            print(f"  FAIL {shape}")
            traceback.print_exc()
        failed += [] if passed else [shape]
    assert not failed, f"greedy tokens of {', '.join(failed)} are not within tolerance"


PARTS: dict[str, Callable[[], None]] = {
    "decode": bench_decode,
    "extend": bench_extend,
    "norms": bench_norms,
    "check": run_checks,
}


def main(*names: str) -> int:
    torch.manual_seed(0)
    return run_parts({name: PARTS[name] for name in names or PARTS})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
