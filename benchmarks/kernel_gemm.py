"""Products of a layer at decode sizes: cuBLAS, cuBLAS with the kernels around it, and both in one kernel of ours."""

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

Best = dict[tuple[str, int], LinearTuning]  # by name of the product and rows


@dataclass(frozen=True)
class Product:
    name: str
    columns: int
    width: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


# Those of a layer. The logits are left to cuBLAS, which wins there by far: 78 against 99 µs at one row.
PRODUCTS = (
    Product("qkv", (Q_HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, norm=True),
    Product("o", HIDDEN, Q_HEADS * HEAD, residual=True),
    Product("gate_up", FFN, HIDDEN, norm=True, gated=True),
    Product("down", HIDDEN, FFN, residual=True),
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
    pdl: bool = False,
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


def compile_linear(job: tuple[Product, int, LinearTuning]) -> str:
    product, rows, tuning = job
    try:
        x, out = randn(rows, product.width), randn(rows, product.columns)
        squares = torch.ones(rows, 32, device="cuda")
        fused(product, x, weight_of(product), out, squares, tuning, linear_workspace())
        torch.cuda.synchronize()
    except Exception as error:  # a tile too large for shared memory is an answer, not a failure
        return f"{product.name} {rows} {tuning}: {type(error).__name__} {str(error)[:80]}"
    return ""


def reference_product(product: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float() @ weight.float().T
    if product.norm:
        y = y * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    if product.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def bench_gemm(batches: tuple[int, ...]) -> Best:
    # One binary serves all batches of a tile size.
    jobs = {(p, t): (p, rows, t) for p in PRODUCTS for rows in batches for t in candidates(p, rows)}
    cannot = {(p, t) for p, _, t in compile_all(compile_linear, list(jobs.values()))}
    best: Best = {}
    lines = []
    workspace = linear_workspace()
    for product in PRODUCTS:
        weights = [weight_of(product) for _ in range(LAYERS)]
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
    alone = timed(lambda: cublas(False)) / LAYERS
    whole = timed(lambda: cublas(True)) / LAYERS
    expected = reference_product(product, x, weights[0])
    found: list[tuple[float, LinearTuning]] = []
    for tuning in candidates(product, rows):
        if (product, tuning) in cannot:
            continue
        mine = squares[:, : num_squares(product.columns, tuning) if product.residual else 32]
        mine.copy_(x.float().square().view(rows, 32, -1).sum(-1) if product.norm else torch.nan)

        def ours(weights: list[torch.Tensor] = weights, tuning: LinearTuning = tuning) -> None:
            for w in weights:
                fused(product, x, w, out, mine, tuning, workspace)  # noqa: B023

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
        found.append((timed(ours) / LAYERS, tuning))
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
