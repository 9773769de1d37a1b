"""Checks and times the kernels on a GPU: `python bench/kernels.py [gemm] [attention] [extend] [sampling] [step]`.

Every part is compared with a plain alternative in the same run. Inputs rotate over 28 layers, so that nothing is timed
out of the L2 that a real step would read from memory. Launches are timed inside a CUDA graph, as they will run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.kernels.decode_attention import DecodeTuning, DecodeWorkspace, decode_attention
from paceline.kernels.decode_units import Chunks, DecodeUnits, decode_units
from paceline.kernels.extend_attention import ExtendTuning, extend_attention, extend_tiles, tokens_per_tile
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.linear import LinearTuning, LinearWorkspace, decode_tuning, linear, num_squares
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rope_kv import rope_table
from paceline.kernels.sampling import SampleWorkspace, sample
from paceline.kernels.silu_mul import silu_mul
from paceline.kernels.slot_state import SlotState, sampling_words

HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD, FFN, VOCAB, EPS = 1024, 28, 16, 8, 128, 3072, 151_936, 1e-6
PAGE = 16
BF16 = torch.bfloat16
BATCHES = (1, 8, 32, 64, 128, 256)
RESULTS: dict[str, object] = {}


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, repeats: int = 9, inner: int = 3) -> float:
    """Median seconds of one replay."""
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner / 1e3)
    return statistics.median(times)


def timed(work: Callable[[], None]) -> float:
    return time_graph(graph_of(work))


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).mul_(scale)


def ints(values: list[int] | np.ndarray) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, np.int32)).cuda()


# ---- matrix products ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    name: str
    columns: int
    width: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    copies: int = LAYERS


PRODUCTS = (
    Product("qkv", (Q_HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, norm=True),
    Product("o", HIDDEN, Q_HEADS * HEAD, residual=True),
    Product("gate_up", FFN, HIDDEN, norm=True, gated=True),
    Product("down", HIDDEN, FFN, residual=True),
    Product("logits", VOCAB, HIDDEN, norm=True, copies=2),
)


def candidates(product: Product, rows: int) -> list[LinearTuning]:
    if rows <= 32:
        m = 16 if rows <= 16 else 32
        shapes = [(m, 16, 128, 2, 5), (m, 16, 256, 4, 4), (m, 32, 128, 4, 5), (m, 32, 256, 4, 3), (m, 64, 128, 4, 4)]
        shapes += [(m, 16, 128, 4, 6), (m, 32, 256, 8, 4)]
    else:
        shapes = [(64, 32, 128, 4, 4), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 32, 64, 4, 6), (64, 128, 64, 4, 4)]
        if rows > 64:
            shapes += [(128, 64, 64, 8, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4), (128, 32, 128, 4, 3)]
    splits = (1,) if product.gated else (1, 2, 4)
    return [LinearTuning(*s, split_k=k) for s in shapes for k in splits if product.width % (k * s[2]) == 0]


def weight_of(product: Product) -> torch.Tensor:
    return randn(product.columns * (2 if product.gated else 1), product.width, scale=product.width**-0.5)


def fused(
    product: Product,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    squares: torch.Tensor,
    tuning: LinearTuning,
    workspace: LinearWorkspace,
    pdl: int,
) -> None:
    linear(
        x,
        weight,
        out,
        tuning,
        squares=squares if product.norm else None,
        eps=EPS,
        gated=product.gated,
        residual=out if product.residual else None,
        squares_out=squares if product.residual else None,
        workspace=workspace,
        pdl=pdl,
    )


def linear_workspace() -> LinearWorkspace:
    return LinearWorkspace(
        torch.empty(4 * 256 * 4096, device="cuda"), torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    )


def compile_linear(job: tuple[Product, int, LinearTuning, int]) -> str:
    product, rows, tuning, pdl = job
    try:
        x, out = randn(rows, product.width), randn(rows, product.columns)
        squares = torch.ones(rows, 32, device="cuda")
        fused(product, x, weight_of(product), out, squares, tuning, linear_workspace(), pdl)
        torch.cuda.synchronize()
    except Exception as error:  # a tile too large for shared memory is an answer, not a failure
        return f"{product.name} {rows} {tuning}: {type(error).__name__} {str(error)[:80]}"
    return ""


def compile_all(function: Callable[..., str], jobs: list) -> set[int]:  # type: ignore[type-arg]
    """Compiles in parallel, since the timed process would do it one by one. Returns the jobs that cannot run."""
    begin = time.time()
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        answers = list(pool.map(function, jobs, chunksize=4))
    failed = {i for i, answer in enumerate(answers) if answer}
    print(f"compiled {len(jobs)} variants in {time.time() - begin:.0f} s, {len(failed)} cannot run", flush=True)
    for i in sorted(failed)[:3]:
        print("  ", answers[i])
    return failed


Best = dict[tuple[str, int], LinearTuning | None]


def reference_product(product: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.float().T
    if product.norm:
        y = y * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    if product.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def bench_gemm(batches: tuple[int, ...]) -> Best:
    products = [p for p in PRODUCTS if p.name != "logits"]  # cuBLAS wins there by far: 78 against 99 µs at one row
    jobs = [(p, rows, t, 0) for p in products for rows in batches for t in candidates(p, rows)]
    distinct = {(p, t): i for i, (p, _, t, _) in enumerate(jobs)}  # one binary serves all batches of a tile size
    broken = compile_all(compile_linear, [jobs[i] for i in distinct.values()])
    cannot = {key for number, key in enumerate(distinct) if number in broken}
    best: Best = {}
    lines = []
    workspace = linear_workspace()
    for product in products:
        weights = [weight_of(product) for _ in range(product.copies)]
        norm = torch.ones(product.width, device="cuda", dtype=BF16)
        for rows in batches:
            line, tuning = bench_product(product, rows, weights, norm, workspace, cannot)
            best[product.name, rows] = tuning
            lines.append(line)
        del weights
    print("GEMM, µs per product: cuBLAS alone, cuBLAS with norm / silu / add kernels, fused Triton")
    print("\n".join(lines), flush=True)
    return best


def bench_product(
    product: Product,
    rows: int,
    weights: list[torch.Tensor],
    norm: torch.Tensor,
    workspace: LinearWorkspace,
    cannot: set[tuple[Product, LinearTuning]],
) -> tuple[str, LinearTuning]:
    x = randn(rows, product.width)
    normed = torch.empty_like(x)
    full = torch.empty(rows, weights[0].shape[0], device="cuda", dtype=BF16)
    out = torch.empty(rows, product.columns, device="cuda", dtype=BF16)
    squares = torch.zeros(rows, 64, device="cuda")

    def cublas(everything: bool) -> None:
        for w in weights:
            if product.norm and everything:
                rms_norm(x, norm, EPS, normed)
            torch.mm(normed if product.norm else x, w.T, out=full)
            if product.gated and everything:
                silu_mul(full, out)
            if product.residual and everything:
                out.add_(full)

    rms_norm(x, norm, EPS, normed)
    alone = timed(lambda: cublas(False)) / product.copies
    whole = timed(lambda: cublas(True)) / product.copies
    expected = reference_product(product, x, weights[0])
    found: list[tuple[float, LinearTuning]] = []
    for tuning in candidates(product, rows):
        if (product, tuning) in cannot:
            continue
        mine = squares[:, : num_squares(product.columns, tuning) if product.residual else 32]
        mine.copy_(x.float().square().view(rows, 32, -1).sum(-1) if product.norm else torch.nan)

        def ours(weights: list[torch.Tensor] = weights, tuning: LinearTuning = tuning, pdl: int = 0) -> None:
            for w in weights:
                fused(product, x, w, out, mine, tuning, workspace, pdl)  # noqa: B023

        out.copy_(randn(rows, product.columns)) if product.residual else out.fill_(torch.nan)
        before = out.float()
        ours(weights[:1])
        got = out.float() - before if product.residual else out.float()
        error = float((got - expected).norm() / expected.norm())
        if product.residual:
            left = mine.sum(-1)
            error += float((left - out.float().square().sum(-1)).norm() / left.norm())
        if not error < 1.5e-2:
            print("WRONG", product.name, rows, tuning, error)
            continue
        found.append((timed(ours) / product.copies, tuning))
    found.sort(key=lambda pair: pair[0])
    seconds, tuning = found[0]
    floor = weights[0].numel() * 2 / 4.23e12
    RESULTS[f"gemm {product.name} {rows}"] = {
        "mm": alone, "whole": whole, "fused": seconds, "all": [(s, tuple(asdict(t).values())) for s, t in found],
    }  # fmt: skip
    others = "  ".join(f"{s * 1e6:.1f} {tuple(asdict(t).values())}" for s, t in found[:3])
    line = (
        f"{product.name:8} {rows:4}  mm {alone * 1e6:6.1f}  mm+around {whole * 1e6:6.1f}  fused {seconds * 1e6:6.1f}  "
        f"floor {floor * 1e6:5.1f}   {others}"
    )
    return line, tuning


# ---- decode attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    name: str
    lengths: tuple[int, ...]  # positions being decoded
    chunks: Chunks = Chunks()  # noqa: RUF009  (frozen)
    group: int = 1  # rows in a row that share
    prefix: int = 0
    layers: int = LAYERS


def scene(name: str, batch: int, mean: int, spread: int = 0, **kwargs: object) -> Scene:
    rng = np.random.default_rng(batch)
    lengths = rng.integers(mean - spread, mean + spread + 1, batch)
    return Scene(name, tuple(lengths.tolist()), **kwargs)  # type: ignore[arg-type]


class Rows:
    """Device state for the rows of a scene, with pages in random order."""

    def __init__(self, what: Scene, rows_per_unit: int = 8, share: bool = True) -> None:
        batch = len(what.lengths)
        longest = max(what.lengths) + 64
        per_slot = -(-longest // PAGE)
        self.state = SlotState.empty(batch, per_slot * PAGE, PAGE, batch, "cuda")
        counts = [-(-(n + 64) // PAGE) for n in what.lengths]
        self.num_pages = sum(counts)
        order = torch.randperm(self.num_pages, device="cuda").int()
        begin = 0
        for row, count in enumerate(counts):
            self.state.page_table[row, :count] = order[begin : begin + count]
            begin += count
        self.state.num_computed.copy_(ints(list(what.lengths)))
        self.state.token_pool.random_(0, VOCAB)
        self.state.row_slots.copy_(torch.arange(batch))
        self.state.num_rows.fill_(batch)
        for row in range(batch):
            self.state.sampling[row] = torch.from_numpy(sampling_words(0.6, 0, 1.0, 0.0, row)).cuda()
        self.capacity = what.chunks.capacity(batch, per_slot * PAGE)
        self.units = DecodeUnits.empty(batch, self.capacity, self.capacity, "cuda")
        self.workspace = DecodeWorkspace.empty(batch, self.capacity, Q_HEADS, KV_HEADS, HEAD, "cuda")
        self.keep: tuple[object, ...] = ()
        self.kv_bytes = sum(what.lengths) * KV_HEADS * HEAD * 2 * 2
        if what.prefix:
            self._share(what, rows_per_unit, share)

    def _share(self, what: Scene, rows_per_unit: int, share: bool) -> None:
        batch, chunks = len(what.lengths), what.prefix // what.chunks.max_tokens
        units, query_rows = [], []
        for first in range(0, batch, what.group):
            self.state.page_table[first : first + what.group, : what.prefix // PAGE] = self.state.page_table[
                first, : what.prefix // PAGE
            ]
            for chunk in range(chunks):
                for begin in range(first, first + what.group, rows_per_unit):
                    members = list(range(begin, min(begin + rows_per_unit, first + what.group)))
                    units.append((begin, chunk, len(query_rows), len(members)))
                    query_rows += members
        if share:
            self.units.shared_units[: len(units)] = ints(np.array(units))
            self.units.num_shared.fill_(len(units))
            self.units.shared_chunk.fill_(what.chunks.max_tokens)
            self.units.shared_chunks.fill_(chunks)
            self.units.query_rows[: len(query_rows)] = ints(query_rows)

    def cut(self, chunks: Chunks, step: torch.Tensor | None = None) -> None:
        decode_units(self.units, self.state.row_slots, self.state.num_rows, self.state.num_computed, chunks, step=step)


ATTENTION = [
    DecodeTuning(block_m=2, block_n=n, num_warps=w, num_stages=s, max_registers=r)
    for n, w, s, r in [
        (64, 4, 3, 128),
        (64, 4, 3, 96),
        (64, 4, 3, 168),
        (32, 2, 4, 128),
        (32, 2, 4, 96),
        (32, 2, 5, 168),
        (32, 4, 4, 80),
        (32, 1, 4, 168),
        (32, 1, 4, 255),
        (16, 1, 6, 168),
    ]
]
SHARED = [
    DecodeTuning(block_m=m, block_n=n, num_warps=w, num_stages=s, max_registers=r)
    for m, n, w, s, r in [(16, 32, 2, 5, 168), (16, 64, 4, 5, 168), (16, 32, 2, 6, 128), (32, 32, 2, 4, 255)]
]


def attention_of(rows: Rows, what: Scene, tuning: DecodeTuning, caches: torch.Tensor, pdl: int) -> Callable[[], None]:
    batch = len(what.lengths)
    qkv = [randn(batch, (Q_HEADS + 2 * KV_HEADS) * HEAD) for _ in range(2)]
    out = torch.empty(batch, Q_HEADS * HEAD, device="cuda", dtype=BF16)
    table = rope_table(rows.state.token_pool.shape[1], HEAD, 1e6, "cuda")
    norm = randn(HEAD).abs_()

    def work() -> None:
        for layer in range(what.layers):
            k, v = caches[2 * layer], caches[2 * layer + 1]
            decode_attention(
                qkv[layer % 2], k, v, rows.state.page_table, table, norm, norm, EPS,
                rows.units, rows.workspace, out, tuning=tuning, pdl=pdl,
            )  # fmt: skip

    return work


def compile_attention(job: tuple[DecodeTuning, int]) -> str:
    tuning, pdl = job
    what = Scene("tiny", (40, 70), layers=1)
    rows = Rows(what)
    rows.cut(what.chunks)
    try:
        attention_of(rows, what, tuning, randn(2, rows.num_pages, PAGE, KV_HEADS, HEAD), pdl)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tuning}: {str(error)[:80]}"
    return ""


def bench_attention() -> None:
    jobs = [(t, pdl) for t in ATTENTION + SHARED for pdl in (0, 1, 2)]
    failed = compile_all(compile_attention, jobs)
    good = [t for i, t in enumerate(ATTENTION) if 3 * i not in failed]
    good_shared = [t for i, t in enumerate(SHARED, len(ATTENTION)) if 3 * i not in failed]
    scenes = [
        scene(f"{name} S{size}", batch, mean, spread, chunks=Chunks(size, size, 1))
        for name, batch, mean, spread, sizes in [
            ("b256 ~840", 256, 840, 700, (512, 1024, 2048)),
            ("b256 ~272", 256, 272, 128, (512,)),
            ("b128 ~272", 128, 272, 128, (512,)),
            ("b64 ~272", 64, 272, 128, (256, 512)),
            ("b16 ~272", 16, 272, 128, (64, 128, 512)),
            ("b1 264", 1, 264, 0, (64, 128, 512)),
            ("b1 2048", 1, 2048, 0, (128, 256)),
            ("b1 8192", 1, 8192, 0, (256, 512)),
            ("b1 32768", 1, 32768, 0, (512, 1024)),
            ("b8 8192", 8, 8192, 0, (512, 1024)),
        ]
        for size in sizes
    ]
    lines = []
    for what in scenes:
        rows = Rows(what)
        rows.cut(what.chunks)
        caches = randn(2 * what.layers, rows.num_pages, PAGE, KV_HEADS, HEAD)
        found = []
        for tuning in good:
            for per_sm in (4, 16):
                tuning = replace(tuning, num_programs=132 * per_sm)
                seconds = timed(attention_of(rows, what, tuning, caches, 0)) / what.layers
                found.append((seconds, tuning))
        found.sort(key=lambda pair: pair[0])
        lines.append(report_attention(what.name, rows, found))
        del caches
    shared = Scene("16x16 prefix 2048", tuple([2048 + 200] * 256), Chunks(512, 512, 1), 16, 2048)
    for share in (False, True):
        found = []
        for tuning in good_shared if share else good:
            rows = Rows(shared, rows_per_unit=tuning.block_m // 2, share=share)
            rows.cut(shared.chunks)
            caches = randn(2 * shared.layers, rows.num_pages, PAGE, KV_HEADS, HEAD)
            for per_sm in (4, 16):
                tuning = replace(tuning, num_programs=132 * per_sm)
                seconds = timed(attention_of(rows, shared, tuning, caches, 0)) / shared.layers
                found.append((seconds, tuning))
            del caches
        found.sort(key=lambda pair: pair[0])
        lines.append(report_attention(f"{shared.name} {'read once' if share else 'read by each'}", rows, found))
    print("Decode attention: µs per layer, KV addressed per second; three best and the default")
    print("\n".join(lines), flush=True)


def report_attention(name: str, rows: Rows, found: list[tuple[float, DecodeTuning]]) -> str:
    RESULTS[f"attention {name}"] = [(s, asdict(t)) for s, t in found]
    best = found[0][0]
    texts = []
    for seconds, t in found[:3]:
        tile = f"m{t.block_m} n{t.block_n} w{t.num_warps} s{t.num_stages} r{t.max_registers}"
        texts.append(f"{seconds * 1e6:.1f} ({tile} p{t.num_programs // 132})")
    rate = rows.kv_bytes / best / 1e12
    return f"{name:32} {best * 1e6:8.1f} µs {rate:6.2f} TB/s   {'  '.join(texts)}  worst {found[-1][0] * 1e6:.1f}"


# ---- prefill attention ----------------------------------------------------------------------------------------------


def compile_extend(tuning: ExtendTuning) -> str:
    try:
        bench_extend_case([0], [100], tuning, check=False)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tuning}: {str(error)[:80]}"
    return ""


def bench_extend_case(starts: list[int], lengths: list[int], tuning: ExtendTuning, check: bool) -> Callable[[], None]:
    what = Scene("extend", tuple(s + n for s, n in zip(starts, lengths, strict=True)))
    rows = Rows(what)
    k, v = randn(2, rows.num_pages, PAGE, KV_HEADS, HEAD)
    tokens = sum(lengths)
    q = randn(tokens, Q_HEADS, HEAD)
    out = torch.full_like(q, torch.nan)
    tiles = ints(extend_tiles(np.array(starts), np.array(lengths), tokens_per_tile(tuning, Q_HEADS // KV_HEADS)))
    positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
    query_starts = ints([0, *np.cumsum(lengths).tolist()])

    def work() -> None:
        extend_attention(
            q, k, v, rows.state.page_table, tiles, rows.state.row_slots, positions, query_starts, out, tuning=tuning
        )

    if check:
        work()
        for row in (0, len(starts) - 1):
            a, b = int(query_starts[row]), int(query_starts[row + 1])
            seen = torch.arange(starts[row] + lengths[row], device="cuda")
            pages = rows.state.page_table[row, seen // PAGE].long()
            keys, values = (c[pages, seen % PAGE].transpose(0, 1)[None].float() for c in (k, v))
            mask = seen[None, :] <= (starts[row] + torch.arange(lengths[row], device="cuda"))[:, None]
            expected = F.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None].float(), keys, values, attn_mask=mask, enable_gqa=True
            )[0].transpose(0, 1)
            error = float((out[a:b].float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"extend attention is off by {error}"
    return work


EXTEND = [
    ExtendTuning(*shape)
    for shape in [
        (128, 64, 8, 3),
        (128, 64, 4, 3),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 4),
        (64, 128, 4, 3),
        (256, 64, 8, 3),
    ]
]


def bench_extend() -> None:
    failed = compile_all(compile_extend, list(EXTEND))
    cases = {"1 x 8192": ([0], [8192]), "16 x 1024": ([0] * 16, [1024] * 16), "1 x 2048 after 30720": ([30720], [2048])}
    lines = []
    for name, (starts, lengths) in cases.items():
        flops = sum(4 * Q_HEADS * HEAD * (n * s + n * n / 2) for s, n in zip(starts, lengths, strict=True))
        found = []
        for i, tuning in enumerate(EXTEND):
            if i not in failed:
                found.append((timed(bench_extend_case(starts, lengths, tuning, check=i == 0)), tuning))
        found.sort(key=lambda pair: pair[0])
        plain = float("nan")
        if not starts[0]:
            q, k, v = (randn(len(starts), h, lengths[0], HEAD) for h in (Q_HEADS, KV_HEADS, KV_HEADS))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                plain = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))  # noqa: B023
        seconds, tuning = found[0]
        RESULTS[f"extend {name}"] = {"sdpa": plain, "all": [(s, asdict(t)) for s, t in found]}
        best3 = "  ".join(f"{s * 1e6:.0f} {tuple(asdict(t).values())}" for s, t in found[:3])
        lines.append(
            f"{name:22} {seconds * 1e6:8.0f} µs {flops / seconds / 1e12:5.0f} TFLOP/s   "
            f"sdpa flash {plain * 1e6:8.0f} µs   {best3}"
        )
    print("Prefill attention, per layer")
    print("\n".join(lines), flush=True)


# ---- sampling -------------------------------------------------------------------------------------------------------


def bench_sampling() -> None:
    lines = []
    kinds = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.6, 0, 1.0, 0.0),
        "top-p 0.95": (0.6, 0, 0.95, 0.0),
        "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
    }
    for batch in (1, 16, 256):
        what = scene("sampling", batch, 20)
        rows = Rows(what)
        logits = [randn(batch, VOCAB, scale=4.0) for _ in range(4)]
        results = torch.zeros(4, batch, dtype=torch.int32, device="cuda")
        step = torch.zeros(1, dtype=torch.int32, device="cuda")
        workspace = SampleWorkspace.empty(batch, "cuda")
        slots, positions = rows.state.row_slots, rows.state.num_computed.clone()
        for name, params in kinds.items():
            for row in range(batch):
                rows.state.sampling[row] = torch.from_numpy(sampling_words(*params, row)).cuda()
            filters = "top" in name
            for block in (1024,):

                def work(filters: bool = filters, block: int = block) -> None:
                    for line in logits:  # noqa: B023
                        sample(line, slots, positions, rows.state.num_rows, rows.state, results, step, workspace, filters=filters, block=block)  # noqa: B023, E501  # fmt: skip

                seconds = timed(work) / len(logits)
                lines.append(f"{name:22} b{batch:<4} block {block:5} {seconds * 1e6:8.1f} µs")
                RESULTS[f"sampling {name} {batch} {block}"] = seconds
        plain = timed(lambda: [line.argmax(-1) for line in logits]) / len(logits)  # noqa: B023
        lines.append(f"{'torch argmax':22} b{batch:<4}             {plain * 1e6:8.1f} µs")
    print("Sampling, vocabulary 151,936")
    print("\n".join(lines), flush=True)


# ---- a whole decode step --------------------------------------------------------------------------------------------


class Decoder:
    """The Qwen3-0.6B shape with random weights: every kernel of a decode step, in one graph."""

    def __init__(self) -> None:
        self.embeddings = randn(VOCAB, HIDDEN, scale=0.02)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=BF16)
        self.head_norm = torch.ones(HEAD, device="cuda", dtype=BF16)
        self.layers = [{p.name: weight_of(p) for p in PRODUCTS[:4]} for _ in range(LAYERS)]
        self.workspace = linear_workspace()
        self.table = rope_table(4096, HEAD, 1e6, "cuda")

    def step(
        self, what: Scene, mode: str, best: Best, tuning: DecodeTuning, pdl: int = 0
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, Rows]:
        """mode: cublas for every product, or fused where `best` names a tuning."""
        torch.manual_seed(len(what.lengths))
        rows = Rows(what)
        batch = len(what.lengths)
        caches = randn(2 * LAYERS, rows.num_pages, PAGE, KV_HEADS, HEAD)
        state = rows.state

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="cuda", dtype=BF16)

        x, normed, delta = empty(batch, HIDDEN), empty(batch, HIDDEN), empty(batch, HIDDEN)
        qkv, attended = empty(batch, (Q_HEADS + 2 * KV_HEADS) * HEAD), empty(batch, Q_HEADS * HEAD)
        both, act = empty(batch, 2 * FFN), empty(batch, FFN)
        squares = torch.zeros(batch, 64, device="cuda")
        logits = empty(batch, VOCAB)
        slots, positions = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(2))
        results = torch.zeros(4, batch, dtype=torch.int32, device="cuda")
        step = torch.zeros(1, dtype=torch.int32, device="cuda")
        samples = SampleWorkspace.empty(batch, "cuda")
        products = {p.name: p for p in PRODUCTS}
        chosen = {} if mode == "cublas" else {p.name: best.get((p.name, bucket(batch))) for p in PRODUCTS}
        added = True  # whether delta is part of the stream already
        known = 1  # columns of squares that hold the stream's sums of squares; 0: nobody left them

        def norm_into(target: torch.Tensor) -> None:
            nonlocal added
            if added:
                rms_norm(x, self.norm, EPS, target, pdl=pdl)
            else:
                rms_norm(delta, self.norm, EPS, target, residual=x, pdl=pdl)
            added = True

        def inward(name: str, weight: torch.Tensor, out: torch.Tensor) -> None:
            """A product of the normed stream."""
            choice = chosen.get(name)
            if choice and known and added:
                fused(products[name], x, weight, out, squares[:, :known], choice, self.workspace, pdl)
                return
            norm_into(normed)
            if products[name].gated:
                torch.mm(normed, weight.T, out=both)
                silu_mul(both, out, pdl=pdl)
            else:
                torch.mm(normed, weight.T, out=out)

        def outward(name: str, source: torch.Tensor, weight: torch.Tensor) -> None:
            """A product that is added to the stream."""
            nonlocal added, known
            choice = chosen.get(name)
            if choice:
                known = num_squares(HIDDEN, choice)
                fused(products[name], source, weight, x, squares[:, :known], choice, self.workspace, pdl)
                return
            torch.mm(source, weight.T, out=delta)
            added, known = False, 0

        def work() -> None:
            nonlocal added, known
            added, known = True, 1
            rows.cut(what.chunks, step)
            gather_tokens(state, self.embeddings, x, slots, positions, squares=squares[:, :1])
            for layer, weights in enumerate(self.layers):
                inward("qkv", weights["qkv"], qkv)
                decode_attention(
                    qkv, caches[2 * layer], caches[2 * layer + 1], state.page_table, self.table, self.head_norm,
                    self.head_norm, EPS, rows.units, rows.workspace, attended, tuning=tuning, pdl=pdl,
                )  # fmt: skip
                outward("o", attended, weights["o"])
                inward("gate_up", weights["gate_up"], act)
                outward("down", act, weights["down"])
            norm_into(normed)
            torch.mm(normed, self.embeddings.T, out=logits)
            sample(logits, slots, positions, state.num_rows, state, results, step, samples, filters=False)

        graph = graph_of(work)
        state.num_computed.copy_(ints(list(what.lengths)))  # warm-up decoded a token or two; start afresh
        graph.replay()
        torch.cuda.synchronize()
        assert (state.num_computed.cpu() - torch.tensor(what.lengths) == 1).all(), "the step did not advance its rows"
        # A graph holds addresses, not tensors: what it writes must outlive it.
        rows.keep = (
            caches,
            x,
            normed,
            delta,
            qkv,
            attended,
            both,
            act,
            squares,
            slots,
            positions,
            results,
            step,
            samples,
        )
        return graph, logits, rows


def bucket(rows: int) -> int:
    return next(b for b in (1, 8, 32, 64, 128, 256) if rows <= b)


def attention_choice(batch: int, mean: int) -> tuple[DecodeTuning, Chunks]:
    """The fastest tuning and chunk measured for a batch like this one."""
    name = "b256 ~840" if mean == 840 else "b1 264" if batch == 1 else f"b{max(batch, 16)} ~272"
    found = {key: value for key, value in RESULTS.items() if key.startswith(f"attention {name} S")}
    if not found:
        return DecodeTuning(), Chunks()
    key = min(found, key=lambda key: found[key][0][0])  # type: ignore[index]
    size = int(key.rpartition("S")[2])
    return DecodeTuning(**found[key][0][1]), Chunks(size, size, 1)  # type: ignore[index]


def bench_step(best: Best) -> None:
    decoder = Decoder()
    must = {1: 1.2, 4: 1.2, 16: 1.3, 64: 1.7, 128: 2.3, 256: 3.4}
    lines = []
    for name, batch, mean, spread in [
        *[("sweep", b, 264, 136) for b in (1, 4, 16, 64, 128, 256)],
        ("nano", 256, 840, 700),
    ]:
        tuning, chunks = attention_choice(batch, mean)
        what = scene(name, batch, mean, 0 if name == "sweep" else spread, chunks=chunks)
        texts = []
        outputs = {}
        variants = [("cublas", 0), ("cublas", 2), ("fused", 0), ("fused", 2)]
        for variant in variants:
            mode, pdl = variant
            chosen = best or {(p.name, bucket(batch)): decode_tuning(batch, p.columns, p.gated) for p in PRODUCTS}
            graph, logits, rows = decoder.step(what, mode, chosen, tuning, pdl)
            outputs[variant] = logits.float()
            seconds = time_graph(graph, inner=1)
            texts.append(f"{mode}{pdl or ''} {seconds * 1e3:6.3f}")
            RESULTS[f"step {name} {batch} {mode} {pdl}"] = seconds
            kv = rows.kv_bytes * LAYERS
            del graph, rows
        reference = outputs[variants[0]]
        error = max(float((o - reference).norm() / reference.norm()) for o in outputs.values())
        floor = (kv + 2 * (LAYERS * 15.73e6 + VOCAB * HIDDEN)) / 4.23e12
        lines.append(
            f"{name:6} b{batch:<4} must {must[batch] if name == 'sweep' else 0:4}  floor {floor * 1e3:6.3f}  "
            f"ms: {'  '.join(texts)}   apart {error:.1e}"
        )
        print(lines[-1], flush=True)
    print("Whole decode step, one graph, ms")
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["gemm", "attention", "extend", "sampling", "step"])
    parser.add_argument("--best", type=Path, help="tunings found by an earlier run")
    args = parser.parse_args()
    torch.manual_seed(0)
    out = Path(os.environ.get("OUT", "."))
    best: Best = {}
    if args.best:
        for name, rows, values in json.loads(args.best.read_text()):
            best[name, rows] = LinearTuning(*values)

    def part(name: str, work: Callable[[], None]) -> None:
        if name in args.parts:
            begin = time.time()
            try:
                work()
            except Exception:  # the other parts still have something to say
                traceback.print_exc()
            print(f"[{name}: {time.time() - begin:.0f} s]", flush=True)
            (out / "kernels.json").write_text(json.dumps(RESULTS))

    def gemm() -> None:
        best.update(bench_gemm(BATCHES))
        (out / "best.json").write_text(json.dumps([[n, r, list(asdict(t).values())] for (n, r), t in best.items()]))

    part("gemm", gemm)
    part("attention", bench_attention)
    part("step", lambda: bench_step(best))
    part("extend", bench_extend)
    part("sampling", bench_sampling)


if __name__ == "__main__":
    main()
