"""Decode and prefill attention by tuning: `python benchmarks/kernels.py attention extend splits`.

Prints microseconds per layer. Prefill is compared with torch's attention on contiguous keys, and with keys split by
several rules.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.kernel_timing import (
    BF16,
    EPS,
    HEAD,
    KV_HEADS,
    PAGE,
    Q_HEADS,
    RESULTS,
    Rows,
    Scene,
    compile_all,
    ints,
    randn,
    scene,
    timed,
)
from paceline.engine.cuda.tiles import ExtendUnits, SplitRule, Words, extend_tiles, extend_units
from paceline.kernels.decode_attention import DecodeTuning, decode_attention
from paceline.kernels.decode_units import Chunks
from paceline.kernels.extend_attention import (
    ExtendSplits,
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    tokens_per_tile,
)
from paceline.kernels.rope_kv import rope_table

ATTENTION = [
    DecodeTuning(block_m=2, block_n=n, num_warps=w, num_stages=s, max_registers=r)
    for n, w, s, r in [
        (32, 4, 3, 128),
        (32, 2, 3, 168),
        (16, 1, 4, 255),
        (32, 2, 2, 128),
        (32, 4, 3, 96),
        (16, 2, 3, 128),
        (16, 2, 4, 168),
        (32, 1, 3, 255),
        (64, 4, 2, 128),
        (64, 4, 2, 168),
        (64, 2, 3, 255),
    ]
]
SHARED = [
    DecodeTuning(block_m=m, block_n=n, num_warps=w, num_stages=s, max_registers=r)
    for m, n, w, s, r in [(16, 64, 4, 2, 168), (16, 64, 4, 3, 168), (16, 32, 2, 3, 168), (32, 64, 4, 2, 168)]
]


def attention_of(
    rows: Rows, what: Scene, tuning: DecodeTuning, caches: torch.Tensor, scales: torch.Tensor | None = None
) -> Callable[[], None]:
    batch = len(what.lengths)
    qkv = [randn(batch, (Q_HEADS + 2 * KV_HEADS) * HEAD) for _ in range(2)]
    out = torch.empty(batch, Q_HEADS * HEAD, device="cuda", dtype=BF16)
    table = rope_table(rows.state.token_pool.shape[1], HEAD, 1e6, "cuda")
    norm = randn(HEAD).abs_()

    def work() -> None:
        for layer in range(what.layers):
            k, v = caches[2 * layer], caches[2 * layer + 1]
            decode_attention(
                qkv[layer % 2],
                k,
                v,
                rows.state.page_table,
                table,
                norm,
                norm,
                EPS,
                rows.units,
                rows.workspace,
                out,
                tuning=tuning,
                scales=scales,
            )

    return work


def compile_attention(tuning: DecodeTuning) -> str:
    what = Scene("tiny", (40, 70), layers=1)
    rows = Rows(what)
    rows.split(what.chunks)
    try:
        attention_of(rows, what, tuning, randn(2, rows.num_pages, PAGE, KV_HEADS, HEAD))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tuning}: {str(error)[:80]}"
    return ""


def bench_attention() -> None:
    failed = compile_all(compile_attention, ATTENTION + SHARED)
    good, good_shared = ([t for t in tunings if t not in failed] for tunings in (ATTENTION, SHARED))
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
        rows.split(what.chunks)
        caches = randn(2 * what.layers, rows.num_pages, PAGE, KV_HEADS, HEAD)
        found = []
        for tuning in good:
            seconds = timed(attention_of(rows, what, tuning, caches)) / what.layers
            found.append((seconds, tuning))
        found.sort(key=lambda pair: pair[0])
        lines.append(report_attention(what.name, rows, found))
        del caches
    shared = Scene("16x16 prefix 2048", tuple([2048 + 200] * 256), Chunks(512, 512, 1), 16, 2048)
    for share in (False, True):
        found = []
        for tuning in good_shared if share else good:
            rows = Rows(shared, rows_per_unit=tuning.block_m // 2, share=share)
            rows.split(shared.chunks)
            caches = randn(2 * shared.layers, rows.num_pages, PAGE, KV_HEADS, HEAD)
            seconds = timed(attention_of(rows, shared, tuning, caches)) / shared.layers
            found.append((seconds, tuning))
            del caches
        found.sort(key=lambda pair: pair[0])
        lines.append(report_attention(f"{shared.name} {'shared reads' if share else 'separate reads'}", rows, found))
    print("Decode attention: µs per layer, KV bytes per second; the three best and the worst")
    print("\n".join(lines), flush=True)


def report_attention(name: str, rows: Rows, found: list[tuple[float, DecodeTuning]]) -> str:
    RESULTS[f"attention {name}"] = [(s, asdict(t)) for s, t in found]
    best = found[0][0]
    texts = []
    for seconds, t in found[:3]:
        tile = f"m{t.block_m} n{t.block_n} w{t.num_warps} s{t.num_stages} r{t.max_registers}"
        texts.append(f"{seconds * 1e6:.1f} ({tile})")
    rate = rows.kv_bytes / best / 1e12
    return f"{name:32} {best * 1e6:8.1f} µs {rate:6.2f} TB/s   {'  '.join(texts)}  worst {found[-1][0] * 1e6:.1f}"


# ---- prefill --------------------------------------------------------------------------------------------------------


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
    tiles = extend_tiles(np.array(starts), np.array(lengths), tokens_per_tile(tuning, Q_HEADS // KV_HEADS))
    units = ints(extend_units(tiles, np.ones(len(tiles), np.int32)).units)
    positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
    query_starts = ints([0, *np.cumsum(lengths).tolist()])

    def work() -> None:
        extend_attention(
            q, k, v, rows.state.page_table, units, rows.state.row_slots, positions, query_starts, out, tuning=tuning
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
    failed = compile_all(compile_extend, EXTEND)
    cases = {"1 x 8192": ([0], [8192]), "16 x 1024": ([0] * 16, [1024] * 16), "1 x 2048 after 30720": ([30720], [2048])}
    lines = []
    for name, (starts, lengths) in cases.items():
        flops = sum(4 * Q_HEADS * HEAD * (n * s + n * n / 2) for s, n in zip(starts, lengths, strict=True))
        found = []
        for i, tuning in enumerate(EXTEND):
            if tuning not in failed:
                found.append((timed(bench_extend_case(starts, lengths, tuning, check=i == 0)), tuning))
        found.sort(key=lambda pair: pair[0])
        sdpa = float("nan")
        if not starts[0]:
            q, k, v = (randn(len(starts), h, lengths[0], HEAD) for h in (Q_HEADS, KV_HEADS, KV_HEADS))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                sdpa = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))  # noqa: B023
        seconds, tuning = found[0]
        RESULTS[f"extend {name}"] = {"sdpa": sdpa, "all": [(s, asdict(t)) for s, t in found]}
        best3 = "  ".join(f"{s * 1e6:.0f} {tuple(asdict(t).values())}" for s, t in found[:3])
        lines.append(
            f"{name:22} {seconds * 1e6:8.0f} µs {flops / seconds / 1e12:5.0f} TFLOP/s   "
            f"sdpa flash {sdpa * 1e6:8.0f} µs   {best3}"
        )
    print("Prefill attention, per layer")
    print("\n".join(lines), flush=True)


# ---- prefill with split keys ----------------------------------------------------------------------------------------

Split = Callable[[Words], Words]  # keys of tiles -> splits of each


def uniform_splits(keys: Words) -> Words:
    """The same number of splits for all tiles, doubled as long as the programs fit: the rule before `SplitRule`."""
    splits = 1
    while 2 * splits * len(keys) * KV_HEADS <= 264 and int(keys.max()) // (2 * splits) >= 512:
        splits *= 2
    return np.full(len(keys), splits, np.int32)


RULE = partial(SplitRule, KV_HEADS)
SPLITS: dict[str, Split] = {
    "none": lambda keys: np.ones(len(keys), np.int32),
    "uniform": uniform_splits,
    "by tile": RULE().splits,
    "load 1": RULE(loads=(1.0,)).splits,
    "load 1/2": RULE(loads=(0.5,)).splits,
    "load 1/4": RULE(loads=(0.25,)).splits,
    "256 keys": RULE(min_keys=256).splits,
    "1024 keys": RULE(min_keys=1024).splits,
    "2048 keys": RULE(min_keys=2048).splits,
}
SPLIT_CASES = {
    "64 after 24000, 2 x 576": ([24_000, 0, 0], [64, 576, 576]),
    "256 after 24000, 2 x 576": ([24_000, 0, 0], [256, 576, 576]),
    "138 after 24000": ([24_000], [138]),
    "1024 after 16000, 2 x 512": ([16_000, 0, 0], [1024, 512, 512]),
    "16 x 1024": ([0] * 16, [1024] * 16),
    "1 x 8192": ([0], [8192]),
    "2048 after 30720": ([30_720], [2048]),
    "3 x 1024 after 30000": ([30_000] * 3, [1024] * 3),
}


class SplitCase:
    """Prefill rows, and the keys of some layers in turn, so that no layer finds its keys in the L2 cache."""

    def __init__(self, starts: list[int], lengths: list[int], layers: int = 4) -> None:
        self.tuning = ExtendTuning()
        self.starts, self.lengths = np.array(starts, np.int32), np.array(lengths, np.int32)
        self.rows = Rows(Scene("splits", tuple((self.starts + self.lengths).tolist())))
        self.caches = [randn(2, self.rows.num_pages, PAGE, KV_HEADS, HEAD) for _ in range(layers)]
        self.q = randn(sum(lengths), Q_HEADS, HEAD)
        self.positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
        self.query_starts = ints([0, *np.cumsum(lengths).tolist()])

    def units(self, split: Split) -> ExtendUnits:
        tiles = extend_tiles(self.starts, self.lengths, tokens_per_tile(self.tuning, Q_HEADS // KV_HEADS))
        return extend_units(tiles, split(tiles[:, 2]))

    def run(self, made: ExtendUnits) -> tuple[float, torch.Tensor]:
        """Seconds per layer, and the output of the last one."""
        units, state, out = ints(made.units), self.rows.state, torch.full_like(self.q, torch.nan)
        workspace = ExtendWorkspace.empty(made.num_splits * KV_HEADS, self.tuning, HEAD, "cuda")
        splits = ExtendSplits(ints(made.merges), made.num_splits, workspace) if made.num_splits else None

        def work() -> None:
            for k, v in self.caches:
                extend_attention(
                    self.q,
                    k,
                    v,
                    state.page_table,
                    units,
                    state.row_slots,
                    self.positions,
                    self.query_starts,
                    out,
                    tuning=self.tuning,
                    splits=splits,
                )

        return timed(work) / len(self.caches), out

    def host_seconds(self, split: Split) -> float:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            self.units(split)
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def bench_splits() -> None:
    lines = [f"{'':26}" + "".join(f"{name:>17}" for name in (*SPLITS, "host, by tile"))]
    for name, (starts, lengths) in SPLIT_CASES.items():
        case = SplitCase(starts, lengths)
        _, reference = case.run(case.units(SPLITS["none"]))
        line, found = f"{name:26}", {}
        for rule, split in SPLITS.items():
            made = case.units(split)
            found[rule], out = case.run(made)
            error = float((out.float() - reference.float()).norm() / reference.float().norm())
            assert error < 1e-2, f"{name}: keys split by {rule!r} differ from whole ones by {error}"
            line += f"{found[rule] * 1e6:10.1f} ({len(made.units):4})"
        found["host"] = case.host_seconds(SPLITS["by tile"])
        lines.append(f"{line}{found['host'] * 1e6:17.0f}")
        RESULTS[f"splits {name}"] = found
        del case
    print("Prefill attention with keys split by different rules: µs per layer (units per KV head)")
    print("\n".join(lines), flush=True)
