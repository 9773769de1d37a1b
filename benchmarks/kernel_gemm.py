"""The GEMMs of a layer at decode batch sizes: `python benchmarks/kernels.py gemm`.

Prints microseconds of cuBLAS alone, cuBLAS with separate norm, SiLU and add kernels, and our fused kernel by tuning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from benchmarks.kernel_timing import (
    BF16,
    EPS,
    FFN,
    HEAD,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    RESULTS,
    compile_all,
    randn,
    timed,
)
from paceline.kernels.linear import LinearTuning, LinearWorkspace, linear, num_squares
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.silu_mul import silu_mul

Best = dict[tuple[str, int], LinearTuning]  # by name and rows


@dataclass(frozen=True)
class Gemm:
    name: str
    columns: int
    width: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


# The GEMMs of a layer. The logits use cuBLAS, which is much faster there: 78 against 99 µs at one row.
GEMMS = (
    Gemm("qkv", (Q_HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, norm=True),
    Gemm("o", HIDDEN, Q_HEADS * HEAD, residual=True),
    Gemm("gate_up", FFN, HIDDEN, norm=True, gated=True),
    Gemm("down", HIDDEN, FFN, residual=True),
)


def candidates(gemm: Gemm, rows: int) -> list[LinearTuning]:
    if rows <= 32:
        m = 16 if rows <= 16 else 32
        shapes = [(m, 16, 128, 2, 5), (m, 16, 256, 4, 4), (m, 32, 128, 4, 5), (m, 32, 256, 4, 3), (m, 64, 128, 4, 4)]
        shapes += [(m, 16, 128, 4, 6), (m, 32, 256, 8, 4)]
    else:
        shapes = [(64, 32, 128, 4, 4), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 32, 64, 4, 6), (64, 128, 64, 4, 4)]
        if rows > 64:
            shapes += [(128, 64, 64, 8, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4), (128, 32, 128, 4, 3)]
    splits = (1,) if gemm.gated else (1, 2, 4)
    return [LinearTuning(*s, split_k=k) for s in shapes for k in splits if gemm.width % (k * s[2]) == 0]


def weight_of(gemm: Gemm) -> torch.Tensor:
    return randn(gemm.columns * (2 if gemm.gated else 1), gemm.width, scale=gemm.width**-0.5)


def fused(
    gemm: Gemm,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    squares: torch.Tensor,
    tuning: LinearTuning,
    workspace: LinearWorkspace,
    pdl: bool = False,
) -> None:
    linear(
        x,
        weight,
        out,
        tuning,
        squares=squares if gemm.norm else None,
        eps=EPS,
        gated=gemm.gated,
        residual=out if gemm.residual else None,
        squares_out=squares if gemm.residual else None,
        workspace=workspace,
        pdl=pdl,
    )


def linear_workspace() -> LinearWorkspace:
    return LinearWorkspace(
        torch.empty(4 * 256 * 4096, device="cuda"), torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    )


def compile_linear(job: tuple[Gemm, int, LinearTuning]) -> str:
    gemm, rows, tuning = job
    try:
        x, out = randn(rows, gemm.width), randn(rows, gemm.columns)
        squares = torch.ones(rows, 32, device="cuda")
        fused(gemm, x, weight_of(gemm), out, squares, tuning, linear_workspace())
        torch.cuda.synchronize()
    except Exception as error:  # a tile too large for shared memory is a result, not a failure
        return f"{gemm.name} {rows} {tuning}: {type(error).__name__} {str(error)[:80]}"
    return ""


def reference_gemm(gemm: Gemm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.float().T
    if gemm.norm:
        y = y * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    if gemm.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def bench_gemm(batches: tuple[int, ...]) -> Best:
    # One binary serves all batches with the same tile size.
    jobs = {(p, t): (p, rows, t) for p in GEMMS for rows in batches for t in candidates(p, rows)}
    cannot = {(p, t) for p, _, t in compile_all(compile_linear, list(jobs.values()))}
    best: Best = {}
    lines = []
    workspace = linear_workspace()
    for gemm in GEMMS:
        weights = [weight_of(gemm) for _ in range(LAYERS)]
        norm = torch.ones(gemm.width, device="cuda", dtype=BF16)
        for rows in batches:
            line, tuning = bench_one_gemm(gemm, rows, weights, norm, workspace, cannot)
            best[gemm.name, rows] = tuning
            lines.append(line)
        del weights
    print("GEMM, µs each: cuBLAS alone, cuBLAS with norm / silu / add kernels, fused Triton")
    print("\n".join(lines), flush=True)
    return best


def bench_one_gemm(
    gemm: Gemm,
    rows: int,
    weights: list[torch.Tensor],
    norm: torch.Tensor,
    workspace: LinearWorkspace,
    cannot: set[tuple[Gemm, LinearTuning]],
) -> tuple[str, LinearTuning]:
    x = randn(rows, gemm.width)
    normed = torch.empty_like(x)
    full = torch.empty(rows, weights[0].shape[0], device="cuda", dtype=BF16)
    out = torch.empty(rows, gemm.columns, device="cuda", dtype=BF16)
    squares = torch.zeros(rows, 64, device="cuda")

    def cublas(everything: bool) -> None:
        for w in weights:
            if gemm.norm and everything:
                rms_norm(x, norm, EPS, normed)
            torch.mm(normed if gemm.norm else x, w.T, out=full)
            if gemm.gated and everything:
                silu_mul(full, out)
            if gemm.residual and everything:
                out.add_(full)

    rms_norm(x, norm, EPS, normed)
    alone = timed(lambda: cublas(False)) / LAYERS
    whole = timed(lambda: cublas(True)) / LAYERS
    expected = reference_gemm(gemm, x, weights[0])
    found: list[tuple[float, LinearTuning]] = []
    for tuning in candidates(gemm, rows):
        if (gemm, tuning) in cannot:
            continue
        mine = squares[:, : num_squares(gemm.columns, tuning) if gemm.residual else 32]
        mine.copy_(x.float().square().view(rows, 32, -1).sum(-1) if gemm.norm else torch.nan)

        def ours(weights: list[torch.Tensor] = weights, tuning: LinearTuning = tuning) -> None:
            for w in weights:
                fused(gemm, x, w, out, mine, tuning, workspace)  # noqa: B023

        out.copy_(randn(rows, gemm.columns)) if gemm.residual else out.fill_(torch.nan)
        before = out.float()
        ours(weights[:1])
        got = out.float() - before if gemm.residual else out.float()
        error = float((got - expected).norm() / expected.norm())
        if gemm.residual:
            left = mine.sum(-1)
            error += float((left - out.float().square().sum(-1)).norm() / left.norm())
        if not error < 1.5e-2:
            print("WRONG", gemm.name, rows, tuning, error)
            continue
        found.append((timed(ours) / LAYERS, tuning))
    found.sort(key=lambda pair: pair[0])
    seconds, tuning = found[0]
    floor = weights[0].numel() * 2 / 4.23e12
    RESULTS[f"gemm {gemm.name} {rows}"] = {
        "mm": alone,
        "whole": whole,
        "fused": seconds,
        "all": [(s, tuple(asdict(t).values())) for s, t in found],
    }
    others = "  ".join(f"{s * 1e6:.1f} {tuple(asdict(t).values())}" for s, t in found[:3])
    line = (
        f"{gemm.name:8} {rows:4}  mm {alone * 1e6:6.1f}  mm+around {whole * 1e6:6.1f}  fused {seconds * 1e6:6.1f}  "
        f"floor {floor * 1e6:5.1f}   {others}"
    )
    return line, tuning
