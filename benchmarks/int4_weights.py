"""Weights in groups on a GPU, of 4-bit checkpoints and of GGUF files: are the kernels correct at the shapes of
Qwen3-14B, and how fast are they by tile?

Part `int4` of `small_numbers.py`, which runs it: `python benchmarks/small_numbers.py int4`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernel_timing import BF16, L2_BYTES, LINEARS, compile_all, in_turn, randn, relative_error
from paceline.engine.linear.groupwise import MAX_GROUPWISE_ROWS, groupwise_tuning
from paceline.kernels.groupwise_linear import GroupwiseMatrix, expand_groupwise, groupwise_linear, span_of
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantized_linear import quantized_linear_reference

LAYERS = LINEARS
NUM_LAYERS = 40
ROWS = (1, 8, 16, 32, 64, 128, 256, 2048)
# rows of a tile, rows of a weight, warps, stages, split_k (1 with a gate)
TILES = {
    1: [
        (8, 64, 2, 4, 4),
        (8, 64, 2, 3, 4),
        (8, 64, 2, 3, 8),
        (8, 64, 2, 2, 8),
        (8, 64, 2, 3, 10),
        (8, 64, 2, 2, 10),
        (8, 64, 2, 2, 16),
        (8, 32, 1, 3, 8),
        (8, 128, 4, 2, 8),
        (8, 128, 4, 3, 8),
    ],
    8: [(8, 64, 2, 4, 4), (8, 64, 2, 3, 8), (8, 128, 4, 3, 8), (16, 64, 2, 4, 4)],
    16: [(16, 64, 2, 4, 4), (16, 64, 2, 3, 8), (16, 128, 4, 3, 4), (16, 128, 4, 3, 8)],
    32: [(32, 128, 4, 3, 4), (32, 64, 2, 3, 4), (32, 128, 4, 3, 8), (32, 128, 4, 3, 2)],
    64: [(64, 128, 8, 3, 4), (64, 128, 8, 3, 2), (64, 64, 4, 3, 4), (32, 128, 4, 3, 4), (32, 128, 4, 3, 1)],
    128: [(64, 128, 8, 3, 1), (64, 128, 8, 3, 2), (32, 128, 4, 3, 1)],
    256: [(64, 128, 8, 3, 1), (64, 64, 4, 3, 1), (32, 128, 4, 3, 1)],
    2048: [(64, 128, 8, 3, 1), (32, 128, 4, 3, 1)],
}
CHECKED_ROWS = (1, 8, 13, 32, 50, 200)  # a tile of groupwise_tuning each
GGUF = (32, 4, True), (32, 8, True)
Format = tuple[int, int, bool]  # group, bits, offsets
Job = tuple[LinearTuning, bool, int, Format]  # tile, gated, columns of the weight


def tile(shape: tuple[int, int, int, int, int], gated: bool) -> LinearTuning:
    block_m, width, warps, stages, split_k = shape
    return LinearTuning(block_m, width // (2 if gated else 1), 256, warps, stages, 1 if gated else split_k)


def matrix_of(rows: int, columns: int, format: Format = (128, 4, False)) -> GroupwiseMatrix:
    """Random bits, with scales that keep outputs near 1, and zeros from 0 to 16, or offsets of the middle."""
    group, bits, has_offsets = format
    chunks = -(-columns // (16 // bits * span_of(group)))
    values = torch.randint(-(1 << 15), 1 << 15, (chunks, rows, span_of(group)), dtype=torch.int16, device="cuda")
    count = (columns // group, rows)
    scales = torch.rand(count, device="cuda").add_(0.5).mul_((0.2 if bits == 4 else 0.012) * columns**-0.5).half()
    others = torch.randint(0, 17, count, device="cuda").half()
    if has_offsets:
        others = -scales * (7.5 if bits == 4 else -0.5)
    words = torch.stack((scales, others), 2).view(torch.int32).squeeze(2)
    return GroupwiseMatrix(values, words.contiguous(), group, columns, bits, has_offsets)


def linear_of(
    weight: GroupwiseMatrix, rows: int, gated: bool, tuning: LinearTuning
) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    columns = weight.shape[0] // (2 if gated else 1)
    x = randn(rows, weight.shape[1]).half()
    out = torch.full((rows, columns), torch.nan, device="cuda", dtype=torch.float16 if gated else BF16)
    workspace = LinearWorkspace(
        torch.empty(tuning.split_k * rows * columns, device="cuda"),
        torch.zeros(-(-rows // 8) * -(-columns // 16), dtype=torch.int32, device="cuda"),
    )
    return lambda: groupwise_linear(x, weight, out, tuning, gated=gated, workspace=workspace), x, out


def compile_tile(job: Job) -> str:
    """In another process; Triton's cache has it afterwards."""
    tuning, gated, columns, format = job
    try:
        linear_of(matrix_of(16 * tuning.block_n, columns, format), 3, gated, tuning)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[:90]}"
    return ""


def jobs() -> list[Job]:
    found: dict[Job, None] = {}
    for gated in (False, True):
        for columns in sorted({width for _, _, width, is_gated in LAYERS if is_gated == gated}):
            shapes = [tile(shape, gated) for candidates in TILES.values() for shape in candidates]
            for tuning in (*shapes, *(groupwise_tuning(rows, gated) for rows in CHECKED_ROWS)):
                found[(tuning, gated, columns, (128, 4, False))] = None
            for tuning in (groupwise_tuning(rows, gated) for rows in CHECKED_ROWS):
                found.update(dict.fromkeys((tuning, gated, columns, format) for format in GGUF))
    for group in (32, 64):
        for rows in (1, 50):
            found[(groupwise_tuning(rows, False), False, 5120, (group, 4, False))] = None
    return list(found)


def check() -> None:
    """Every tile that the engine uses against float64, twice: sums have a fixed order. Then expanded weights."""
    for name, columns, width, gated in LAYERS:
        for format in ((128, 4, False), *GGUF):
            weight = matrix_of(columns, width, format)
            for rows in CHECKED_ROWS:
                _compare(f"{name}, {format}, {rows} rows", weight, rows, gated)
            wide = torch.full((columns, width), torch.nan, device="cuda", dtype=BF16)
            expand_groupwise(weight, wide)
            assert torch.equal(wide, weight.dequantize().to(BF16)), f"{name}, {format}: expanded weights differ"
            del weight, wide
    for group in (32, 64):
        weight = matrix_of(7168, 5120, (group, 4, False))
        for rows in (1, 50):
            _compare(f"groups of {group}, {rows} rows", weight, rows, False)


def _compare(what: str, weight: GroupwiseMatrix, rows: int, gated: bool) -> None:
    work, x, out = linear_of(weight, rows, gated, groupwise_tuning(rows, gated))
    work()
    first = out.clone()
    out.fill_(torch.nan)
    work()
    error = relative_error(out, quantized_linear_reference(x, weight, gated=gated))
    print(f"  {what}: error {error:.5f}", flush=True)
    assert error < 1e-2, f"{what} is off by {error}"
    assert torch.equal(first, out), f"{what} differs between two runs"


def bench_int4() -> None:
    failed = compile_all(compile_tile, jobs())
    check()
    print(
        "linear layers, µs (TB/s of weights): cuBLAS bf16 | expand + cuBLAS | own: best three tiles (m x n, warps ...)"
    )
    best: dict[int, float] = dict.fromkeys(ROWS, 0.0)
    for name, columns, width, gated in LAYERS:
        copies = max(2, -(-L2_BYTES // (columns * width // 2)))
        wide = [randn(columns, width) for _ in range(copies)]
        small = [matrix_of(columns, width) for _ in range(copies)]
        first = wide[0]
        expanding = in_turn([lambda w=w, out=first: expand_groupwise(w, out) for w in small])  # type: ignore[misc]
        for rows in ROWS:
            x, out = randn(rows, width), torch.empty(rows, columns, device="cuda", dtype=BF16)
            seconds = in_turn([lambda w=w: torch.mm(x, w.T, out=out) for w in wide])  # type: ignore[misc]  # noqa: B023
            line = f"{name:12} {rows:5}  {seconds * 1e6:7.1f} ({columns * width * 2 / seconds / 1e12:.2f})"
            line += f" | {expanding * 1e6:.1f} + {seconds * 1e6:.1f}"
            found = []
            for tuning in dict.fromkeys(tile(shape, gated) for shape in TILES[rows]):
                if (tuning, gated, width, (128, 4, False)) in failed:
                    continue
                try:
                    found.append((in_turn([linear_of(w, rows, gated, tuning)[0] for w in small]), tuning))
                except Exception as error:
                    line += f" {str(error)[:40]}"
            found.sort(key=lambda pair: pair[0])
            if found:
                best[rows] += min(found[0][0], expanding + seconds)
                line += f" | own ({small[0].num_bytes / found[0][0] / 1e12:.2f}): " + ", ".join(
                    f"{s * 1e6:.1f} {t.block_m}x{t.block_n} w{t.num_warps} s{t.num_stages} k{t.split_k}"
                    for s, t in found[:3]
                )
            print(line, flush=True)
        del wide, small, first
    print(f"{NUM_LAYERS} layers, the best of each (own kernels are used up to {MAX_GROUPWISE_ROWS} rows):")
    for rows, seconds in best.items():
        print(f"  {rows} rows: {seconds * NUM_LAYERS * 1e3:.2f} ms")
    _bench_gguf()


def _bench_gguf() -> None:
    """The linear layers of a GGUF file, with the tiles that the engine uses, and what expanding takes."""
    print("GGUF files, a layer, µs: rows, bf16 | 4 bits | 8 bits; then expanding a layer")
    seconds: dict[tuple[int, int], float] = {}
    for _, columns, width, gated in LINEARS:
        for bits in (16, 4, 8):
            copies = max(2, -(-L2_BYTES // (columns * width // 2)))
            matrices = [
                randn(columns, width) if bits == 16 else matrix_of(columns, width, (32, bits, True))
                for _ in range(copies)
            ]
            for rows in ROWS[:-1]:
                x, out = randn(rows, width), torch.empty(rows, columns, device="cuda", dtype=BF16)
                if bits == 16:
                    work = [lambda w=w: torch.mm(x, w.T, out=out) for w in matrices]  # type: ignore[misc]  # noqa: B023
                else:
                    tuning = groupwise_tuning(rows, gated)
                    work = [linear_of(w, rows, gated, tuning)[0] for w in matrices]
                seconds[rows, bits] = seconds.get((rows, bits), 0.0) + in_turn(work)
            if bits != 16:
                out = torch.empty(columns, width, device="cuda", dtype=BF16)
                expanding = in_turn([lambda w=w: expand_groupwise(w, out) for w in matrices])  # type: ignore[misc]  # noqa: B023
                seconds[0, bits] = seconds.get((0, bits), 0.0) + expanding
            del matrices
    for rows in ROWS[:-1]:
        print(f"  {rows:5} " + " | ".join(f"{seconds[rows, bits] * 1e6:7.1f}" for bits in (16, 4, 8)))
    print("  expand        " + " | ".join(f"{seconds[0, bits] * 1e6:7.1f}" for bits in (4, 8)))
