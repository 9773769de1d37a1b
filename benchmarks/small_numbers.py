"""Number formats with fewer than 16 bits on a GPU: are the kernels correct at real shapes, and how fast are they?

    python benchmarks/small_numbers.py [kv] [prefill] [weights] [rows] [int4]

Prints a line per case: the time in bfloat16, the time in the small format, the bytes that are read per second. Every
part that fails prints its traceback, and the others still run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.int4_weights import bench_int4
from benchmarks.kernel_attention import attention_of
from benchmarks.kernel_timing import (
    BF16,
    EPS,
    HEAD,
    KV_HEADS,
    L2_BYTES,
    LINEARS,
    PAGE,
    Q_HEADS,
    Rows,
    Scene,
    compile_all,
    in_turn,
    ints,
    randn,
    relative_error,
    scene,
    timed,
)
from benchmarks.parts import run_parts
from paceline.engine.cuda.tiles import extend_tiles, extend_units
from paceline.engine.linear.pack import scaled_mm
from paceline.kernels.decode_attention import (
    DecodeTuning,
    decode_attention,
    decode_attention_reference,
)
from paceline.kernels.decode_units import Chunks
from paceline.kernels.extend_attention import (
    ExtendTuning,
    extend_attention,
    extend_attention_reference,
    tokens_per_tile,
)
from paceline.kernels.fp8 import FP8, to_fp8_reference
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantize_rows import quantize_rows, quantize_rows_reference
from paceline.kernels.quantized_linear import (
    QuantizedMatrix,
    quantize_fp8,
    quantized_linear,
    quantized_linear_reference,
)
from paceline.kernels.rope_kv import rope_table

LAYERS = 8  # whose KV is larger than the L2 cache in every case
CASES = [
    # Those of the goals: 256 rows as in nano, 64 with long contexts, one alone; with the chunk of decode_chunks.
    (scene("256 x ~600", 256, 600, 460, layers=LAYERS), 2048),
    (scene("64 x 4096", 64, 4096, 0, layers=LAYERS), 2048),
    (scene("1 x 8192", 1, 8192, 0, layers=28), 512),
]
TUNINGS = [
    DecodeTuning(block_m=2, block_n=n, num_warps=w, num_stages=s, max_registers=r)
    for n, w, s, r in [(16, 1, 4, 255), (16, 2, 4, 168), (32, 2, 4, 168), (32, 4, 3, 128), (64, 4, 3, 168)]
]


def in_fp8(caches: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.cat([to_fp8_reference(part, scales[at % 2, :, None])[None] for at, part in enumerate(caches)])


def scales_of() -> torch.Tensor:
    # On the CPU: a process that only compiles cannot run the device's exp2, which is compiled at run time.
    return torch.exp2(torch.arange(2 * KV_HEADS).view(2, KV_HEADS) % 4 - 6.0).cuda()


def check_kv() -> None:
    """Decode attention against the reference, FP8 and bfloat16, at several lengths."""
    for value_pairs in (True, False):
        what = Scene("check", (5, 700, 1023, 1024, 1025, 1, 3000, 264), Chunks(512, 512, 1), layers=1)
        rows, scales = Rows(what), scales_of()
        rows.split(what.chunks)
        k, v = in_fp8(randn(2, rows.num_pages, PAGE, KV_HEADS, HEAD), scales)
        qkv, norm = randn(len(what.lengths), (Q_HEADS + 2 * KV_HEADS) * HEAD), randn(HEAD).abs_()
        table = rope_table(4096, HEAD, 1e6, "cuda")
        slots, positions = rows.state.row_slots, rows.state.num_computed
        common = (rows.state.page_table, table, norm, norm, EPS)
        expected = decode_attention_reference(
            qkv, k.clone(), v.clone(), common[0], slots, positions, *common[1:], scales=scales
        )
        for tuning in TUNINGS[::2]:
            out = torch.full((len(what.lengths), Q_HEADS * HEAD), torch.nan, device="cuda", dtype=BF16)
            tuning = replace(tuning, value_pairs=value_pairs)
            decode_attention(qkv, k, v, *common, rows.units, rows.workspace, out, tuning=tuning, scales=scales)
            error = relative_error(out, expected)
            print(f"  decode, FP8 KV, pairs {value_pairs}, {tuning.block_n} x {tuning.num_warps}: error {error:.5f}")
            assert error < 1e-2


def compile_kv(job: tuple[DecodeTuning, bool]) -> str:
    """In another process; Triton's cache has it afterwards."""
    tuning, is_small = job
    what = Scene("tiny", (40, 70), layers=1)
    rows = Rows(what)
    rows.split(what.chunks)
    caches, scales = randn(2, rows.num_pages, PAGE, KV_HEADS, HEAD), scales_of()
    try:
        attention_of(rows, what, tuning, in_fp8(caches, scales) if is_small else caches, scales if is_small else None)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[:90]}"
    return ""


def bench_kv() -> None:
    compile_all(
        compile_kv,
        [
            (replace(tuning, value_pairs=pairs), is_small)
            for tuning in TUNINGS
            for pairs, is_small in ((False, False), (True, True), (False, True))
        ],
    )
    check_kv()
    print(f"{'decode attention':16} chunk  bf16 µs (TB/s)   fp8 µs (TB/s)  ratio   best tunings of each: keys x warps")
    for what, size in CASES:
        found: dict[str, list[tuple[float, str]]] = {}
        rows = Rows(replace(what, chunks=Chunks(size, size, 1)))
        rows.split(Chunks(size, size, 1))
        caches, scales = randn(2 * what.layers, rows.num_pages, PAGE, KV_HEADS, HEAD), scales_of()
        small = in_fp8(caches, scales)
        for tuning in TUNINGS:
            for kind in ("bf16", "fp8", "fp8 bytes"):
                one = replace(tuning, value_pairs=kind == "fp8")
                on, with_scales = (caches, None) if kind == "bf16" else (small, scales)
                try:
                    seconds = timed(attention_of(rows, what, one, on, with_scales)) / what.layers
                except Exception as error:
                    print(f"  {kind} {one}: {str(error)[:90]}")
                    continue
                text = f"{one.block_n}x{one.num_warps} s{one.num_stages}"
                found.setdefault(kind, []).append((seconds, text))
        best = {kind: sorted(times) for kind, times in found.items()}
        wide, narrow = best["bf16"][0][0], best["fp8"][0][0]
        print(
            f"{what.name:16} {size:5} {wide * 1e6:7.1f} ({rows.kv_bytes / wide / 1e12:.2f}) {narrow * 1e6:8.1f} "
            f"({rows.kv_bytes / 2 / narrow / 1e12:.2f}) {wide / narrow:6.2f}   "
            + " | ".join(
                f"{kind}: " + ", ".join(f"{s * 1e6:.1f} {text}" for s, text in times[:3])
                for kind, times in best.items()
            ),
            flush=True,
        )
        del caches, small


def bench_prefill() -> None:
    print("prefill attention, µs per layer      bf16      fp8   ratio")
    tunings = [
        ExtendTuning(),
        ExtendTuning(128, 64, 8, 3),
        ExtendTuning(128, 64, 4, 2, 255),
        ExtendTuning(64, 64, 4, 3),
    ]
    for name, starts, lengths in (
        ("16 x 1024", [0] * 16, [1024] * 16),
        ("1 x 8192", [0], [8192]),
        ("512 after 16384", [16384], [512]),
    ):
        rows = Rows(Scene("extend", tuple(s + n for s, n in zip(starts, lengths, strict=True))))
        scales = scales_of()
        wide = randn(2, rows.num_pages, PAGE, KV_HEADS, HEAD)
        small = in_fp8(wide, scales)
        positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
        query_starts = ints([0, *np.cumsum(lengths).tolist()])
        for tuning in tunings:
            tiles = extend_tiles(np.array(starts), np.array(lengths), tokens_per_tile(tuning, Q_HEADS // KV_HEADS))
            units = ints(extend_units(tiles, np.ones(len(tiles), np.int32)).units)
            times = []
            for kv, kind, with_scales in ((wide, BF16, None), (small, torch.float16, scales)):
                q = randn(sum(lengths), Q_HEADS, HEAD).to(kind)
                out = torch.full_like(q, torch.nan, dtype=BF16)
                common = (rows.state.page_table, units, rows.state.row_slots, positions, query_starts, out)

                def work(kv=kv, q=q, common=common, tuning=tuning, with_scales=with_scales) -> None:  # type: ignore[no-untyped-def]
                    extend_attention(q, *kv, *common, tuning=tuning, scales=with_scales)

                try:
                    times.append(timed(work))
                except Exception as error:
                    print(f"  {tuning}: {str(error)[:90]}")
                    times.append(float("nan"))
                    continue
                if len(starts) == 1 and lengths[0] <= 512 and with_scales is not None:
                    expected = extend_attention_reference(
                        q, *kv, rows.state.page_table, [0], starts, [0, *lengths], scales=scales
                    )
                    error = relative_error(out, expected)
                    assert error < 1e-2, f"prefill attention is off by {error}"
            print(
                f"  {name:18} {tuning.block_m}x{tuning.block_n}x{tuning.num_warps} s{tuning.num_stages} "
                f"{times[0] * 1e6:10.1f} {times[1] * 1e6:8.1f} {times[0] / times[1]:6.2f}",
                flush=True,
            )


# ---- weights --------------------------------------------------------------------------------------------------------

ROWS = (1, 16, 32, 64, 128, 256, 2048)
MAX_CHECKED_ROWS = 256
LIBRARY_ROWS = (24, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 208, 224, 256, 384, 512, 1024, 2048, 4096, 8192)
MAX_OWN_ROWS = 16
OWN = [LinearTuning(*shape) for shape in [(16, 32, 128, 4, 5), (16, 64, 128, 4, 4), (16, 64, 128, 4, 4, 4)]]


def matrix_of(rows: int, columns: int) -> QuantizedMatrix:
    return quantize_fp8(randn(rows, columns, scale=columns**-0.5))


def small_linear(
    weight: QuantizedMatrix, rows: int, gated: bool, tuning: LinearTuning
) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """A GEMM of our own, its inputs and its output."""
    columns = weight.shape[0] // (2 if gated else 1)
    x = randn(rows, weight.shape[1]).half()
    out = torch.full((rows, columns), torch.nan, device="cuda", dtype=torch.float16 if gated else BF16)
    workspace = LinearWorkspace(
        torch.empty(tuning.split_k * rows * columns, device="cuda"),
        torch.zeros(-(-rows // 16) * -(-columns // 16), dtype=torch.int32, device="cuda"),
    )
    return lambda: quantized_linear(x, weight, out, tuning, gated=gated, workspace=workspace), x, out


def compile_small(job: tuple[LinearTuning, bool, int]) -> str:
    tuning, gated, columns = job
    try:
        small_linear(matrix_of(2 * tuning.block_n, columns), 3, gated, tuning)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[:90]}"
    return ""


def check_weights() -> None:
    for rows, gated, tuning in ((3, False, OWN[2]), (9, True, OWN[1])):
        weight = matrix_of(1536, 5120)
        work, x, out = small_linear(weight, rows, gated, tuning)
        work()
        error = relative_error(out, quantized_linear_reference(x, weight, gated=gated))
        print(f"  {rows} rows, gated {gated}: error {error:.5f}")
        assert error < 1e-2
    weight = matrix_of(5120, 17408)
    columns, width = weight.shape
    x = randn(256, 2 * width)
    rounded, scales = torch.empty(256, width, dtype=FP8, device="cuda"), torch.empty(256, device="cuda")
    quantize_rows(x, rounded, scales, gated=True)
    wanted, wanted_scales = quantize_rows_reference(x, gated=True)
    print(f"  rows in FP8: error {relative_error(rounded.float(), wanted.float()):.5f}")
    assert relative_error(scales, wanted_scales) < 1e-2
    out = torch.full((256, columns), torch.nan, device="cuda", dtype=BF16)
    scaled_mm(rounded, weight.values, out, scales[:, None], weight.factors[None, :])
    error = relative_error(out, (rounded.double() * scales.double()[:, None]) @ weight.dequantize(torch.float64).T)
    print(f"  scaled_mm: error {error:.5f}")
    assert error < 1e-2


def tunings_of(rows: int, gated: bool) -> list[LinearTuning]:
    return [one for one in OWN if rows <= MAX_OWN_ROWS and not (gated and one.split_k > 1)]


def bench_weights() -> None:
    jobs = {
        (tuning, gated, width): None
        for _, _, width, gated in LINEARS
        for rows in ROWS
        for tuning in tunings_of(rows, gated)
    }
    failed = compile_all(compile_small, list(jobs))
    check_weights()
    print("linear layers, µs (TB/s of weights): cuBLAS bf16 | rounding of activations | own: best three tiles")
    for name, columns, width, gated in LINEARS:
        copies = max(2, -(-L2_BYTES // (columns * width // 2)))
        wide = [randn(columns, width) for _ in range(copies)]
        small = [matrix_of(columns, width) for _ in range(copies)]
        for rows in ROWS:
            x, out = randn(rows, width), torch.empty(rows, columns, device="cuda", dtype=BF16)
            seconds = in_turn([lambda w=w: torch.mm(x, w.T, out=out) for w in wide])  # type: ignore[misc]  # noqa: B023
            line = f"{name:12} {rows:5}  {seconds * 1e6:7.1f} ({columns * width * 2 / seconds / 1e12:.2f})"
            rounded, scales = torch.empty(rows, width, dtype=FP8, device="cuda"), torch.empty(rows, device="cuda")
            seconds = in_turn([partial(quantize_rows, x, rounded, scales)] * 4)
            line += f" | {seconds * 1e6:.1f}"
            found = []
            for tuning in tunings_of(rows, gated):
                if (tuning, gated, width) in failed:
                    continue
                try:
                    works = [small_linear(w, rows, gated, tuning)[0] for w in small]
                    found.append((in_turn(works), tuning))
                except Exception as error:
                    line += f" {str(error)[:40]}"
            found.sort(key=lambda pair: pair[0])
            if found:
                line += f" | own ({small[0].num_bytes / found[0][0] / 1e12:.2f}): " + ", ".join(
                    f"{s * 1e6:.1f} {t.block_m}x{t.block_n}x{t.block_k} w{t.num_warps} s{t.num_stages} k{t.split_k}"
                    for s, t in found[:3]
                )
            print(line, flush=True)
        del wide, small


def bench_rows() -> None:
    """The library's FP8 GEMM by number of rows, all four matrices of a layer: with scales of rows and columns or with
    one scale, with sums in float32 or fast sums; and the error of its output, without that of rounding its inputs."""
    print("library, µs per layer (error):  rows   scales of rows and columns, fast   one scale, fast")
    one = torch.ones((), device="cuda")
    small = {
        name: [matrix_of(columns, width) for _ in range(max(2, -(-L2_BYTES // (columns * width // 2))))]
        for name, columns, width, _ in LINEARS
    }
    for rows in LIBRARY_ROWS:
        line = f"{rows:37}  "
        for single, fast in ((False, False), (False, True), (True, False), (True, True)):
            seconds, error = 0.0, 0.0
            for name, columns, width, _ in LINEARS:
                x, scales = torch.empty(rows, width, dtype=FP8, device="cuda"), torch.ones(rows, device="cuda")
                quantize_rows(randn(rows, width), x, scales)
                out = torch.empty(rows, columns, device="cuda", dtype=BF16)
                works = [
                    partial(
                        torch._scaled_mm,
                        x,
                        w.values.T,
                        scale_a=one if single else scales[:, None],
                        scale_b=one if single else w.factors[None],
                        out_dtype=BF16,
                        use_fast_accum=fast,
                        out=out,
                    )
                    for w in small[name]
                ]
                seconds += in_turn(works)
                if rows <= MAX_CHECKED_ROWS:
                    last = small[name][-1]
                    exact = x.double() @ last.values.double().T
                    error = max(error, relative_error(out, exact if single else exact * scales[:, None] * last.factors))
            line += f"{seconds * 1e6:9.1f} ({error:.5f})"
        print(line, flush=True)


PARTS: dict[str, Callable[[], None]] = {
    "kv": bench_kv,
    "prefill": bench_prefill,
    "weights": bench_weights,
    "rows": bench_rows,
    "int4": bench_int4,
}


def main() -> None:
    torch.manual_seed(0)
    sys.exit(run_parts({name: PARTS[name] for name in sys.argv[1:] or PARTS}))


if __name__ == "__main__":
    main()
