"""What LoRA adapters cost on a GPU, and whether their kernels are right.

    python benchmarks/lora.py [check|kernels|tune|engine ...]          # default: all four

check     the kernels against their float64 reference at the shapes of a model, twice the same bits; and greedy tokens
          of a tiny model with three adapters in one batch, on the GPU and on the CPU, in float32
kernels   time of each matrix of a layer in a CUDA graph, by rows, beside the GEMM that it is added to
tune      shrink and expand by tile, the fastest first, and both after the GEMM
engine    throughput of a decode-heavy load with many adapters, compared with the base model: same weights, same
          prompts, one process; on a CPU, too: `engine --shape smollm2-135m --requests 16 --adapters 4 --output 16`

A part that fails prints its traceback, and the others run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_timing import compile_variants, graph_of, time_graph
from paceline.checks.weights import write_folder
from paceline.engine.cuda.lora import matrix_sizes
from paceline.kernels.layouts import SAMPLING_WORDS, SamplingWord
from paceline.kernels.lora import (
    AdapterMatrix,
    AdapterRows,
    LoraTuning,
    add_lora,
    group_rows,
    lora_expand,
    lora_rank,
    lora_reference,
    lora_shrink,
    lora_tuning,
)
from paceline.kernels.variants import KernelVariant, recorded_launches
from paceline.llm import LLM
from paceline.model.layout import stored_parts
from paceline.model.shapes import shape
from paceline.model.weights import random_weights
from paceline.request import SamplingParams
from paceline.text.synthetic import synthetic_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU: set TRITON_INTERPRET=1
PDL = DEVICE == "cuda"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def write_adapter(
    folder: Path, shape_name: str, rank: int, targets: Sequence[str], seed: int, gain: float = 0.02
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in stored_parts(shape(shape_name)).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and "expert" not in module:
            rows, columns = part.shape
            a = torch.randn(rank, columns, generator=generator, dtype=torch.float32) * columns**-0.5
            b = torch.randn(rows, rank, generator=generator, dtype=torch.float32) * gain
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.bfloat16()
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def measure(llm: LLM, given: argparse.Namespace, names: list[str]) -> float:
    """Output tokens per second, the best of some runs after one that warms up. Every run has other prompts."""
    rng = np.random.default_rng()
    params = SamplingParams(temperature=0, max_tokens=given.output, ignore_eos=True)
    best = 0.0
    for number in range(given.repeats + 1):
        prompts = rng.integers(3, min(1000, shape(given.shape).vocab_size), (given.requests, given.prompt)).tolist()
        began = time.perf_counter()
        llm.generate(prompts, params, progress=False, lora=names)
        if number:
            best = max(best, given.requests * given.output / (time.perf_counter() - began))
    return best


def random_matrix(given: argparse.Namespace, widths: tuple[int, ...], columns: int) -> AdapterMatrix:
    rank, slots = lora_rank(given.rank), given.adapters
    a = torch.randn(slots, len(widths) * rank, columns, device=DEVICE) * columns**-0.5
    b = torch.randn(slots, rank, sum(widths), device=DEVICE) * 0.1
    ranks = torch.full((slots, len(widths)), given.rank, dtype=torch.int32, device=DEVICE)
    return AdapterMatrix(a.to(DTYPE), b.to(DTYPE), ranks, widths)


def group(given: argparse.Namespace, rows: int, kind: str) -> tuple[AdapterRows, torch.Tensor]:
    """Rows whose adapters are all different, as far as there are so many; all the same; or none."""
    ids = torch.arange(rows, device=DEVICE) % given.adapters
    ids = {"many": ids, "one": torch.zeros_like(ids), "none": torch.full_like(ids, -1)}[kind]
    sampling = torch.zeros(rows, SAMPLING_WORDS, dtype=torch.int32, device=DEVICE)
    sampling[:, SamplingWord.ADAPTER] = (ids + 1).int()
    buffers = AdapterRows.empty(rows, given.adapters, 3 * lora_rank(given.rank), DEVICE)
    group_rows(torch.arange(rows, dtype=torch.int32, device=DEVICE), sampling, buffers)
    return buffers, ids


def check(given: argparse.Namespace) -> None:
    spec = shape(given.shape)
    for rows in (1, 100, 600):
        for kind in ("many", "none"):
            buffers, ids = group(given, rows, kind)
            for name, (widths, columns) in matrix_sizes(spec.layers[0], spec.hidden_size).items():
                matrix = random_matrix(given, widths, columns)
                x = torch.randn(rows, columns, device=DEVICE).to(DTYPE)
                before = torch.randn(rows, sum(widths), device=DEVICE).to(DTYPE)
                found, again = before.clone(), before.clone()
                add_lora(x, found, matrix, buffers, pdl=PDL)
                add_lora(x, again, matrix, buffers, pdl=PDL)
                wanted = lora_reference(x, before, ids, matrix)
                error = float((found.double() - wanted).abs().max() / wanted.abs().max())
                same = torch.equal(found, again)
                print(f"check {name:8} {rows:4} rows, {kind}: error {error:.2e}, same bits twice: {same}")
                assert error < 1e-2 and same
    tokens = {device: engine_tokens(device) for device in (DEVICE, "cpu")}
    is_same = tokens[DEVICE] == tokens["cpu"]
    print(f"check engine: same tokens on {DEVICE} and cpu: {is_same}{'' if is_same else f': {tokens}'}")


def engine_tokens(device: str) -> list[list[int]]:
    """Of a tiny model in float32, with three adapters and the base model in one batch."""
    name = "tiny-qwen3"
    spec = shape(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder(folder / "model", spec, random_weights(spec, seed=1, dtype="float32"))
        (folder / "model" / "tokenizer.json").write_text(synthetic_tokenizer(spec.vocab_size).to_json())
        lora = {}
        for number, rank in enumerate((4, 16, 40)):
            write_adapter(folder / str(number), name, rank, TARGETS["all"], seed=number, gain=0.3)
            lora[str(number)] = str(folder / str(number))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        prompts = [[5 + number] * (3 + 9 * number) for number in range(8)]
        options: dict[str, Any] = {"device": device, "dtype": "float32", "kv_tokens": 4096, "max_loras": 2}
        with LLM(str(folder / "model"), **options, lora=lora) as llm:
            outputs = llm.generate(prompts, params, progress=False, lora=["", "0", "1", "2"] * 2)
            return [output.token_ids for output in outputs]


def kernels(given: argparse.Namespace) -> None:
    spec = shape(given.shape)
    print("| matrix | rows | adapters | GEMM, us | LoRA, us |")
    print("|---|---|---|---|---|")
    for rows in (16, 64, given.requests, 2048):
        for kind in ("none", "one", "many"):
            buffers, _ = group(given, rows, kind)
            for name, (widths, columns) in matrix_sizes(spec.layers[0], spec.hidden_size).items():
                # Rotates over several layers, so that the L2 cache does not hold their adapters.
                matrices = [random_matrix(given, widths, columns) for _ in range(4)]
                weight = torch.randn(sum(widths), columns, device=DEVICE).to(DTYPE)
                x = torch.randn(rows, columns, device=DEVICE).to(DTYPE)
                out = torch.zeros(rows, sum(widths), device=DEVICE).to(DTYPE)

                def gemm(x: Any = x, weight: Any = weight, out: Any = out) -> None:
                    torch.mm(x, weight.T, out=out)

                def adapters(x: Any = x, out: Any = out, matrices: Any = matrices, buffers: Any = buffers) -> None:
                    for matrix in matrices:
                        add_lora(x, out, matrix, buffers, pdl=PDL)

                times = time_graph(graph_of(gemm)) * 1e6, time_graph(graph_of(adapters)) * 1e6 / len(matrices)
                print(f"| {name} | {rows} | {kind} | {times[0]:.1f} | {times[1]:.1f} |", flush=True)


EXPAND = ("span", "block_n", "expand_warps")  # fields of LoraTuning


def candidates(matrix: AdapterMatrix, rows: int) -> tuple[list[LoraTuning], list[LoraTuning]]:
    """For shrink, and for expand."""
    own = lora_tuning(rows, matrix)
    parts = [1, 2, 4, 8] if rows <= 512 else [1]
    shrink = [
        own._replace(parts=part, block_k=block, shrink_warps=warps, shrink_stages=stages)
        for part in parts
        for block, warps, stages in ((64, 2, 6), (128, 2, 4), (128, 4, 4), (256, 4, 3), (256, 2, 3), (512, 4, 2))
        if matrix.a.shape[2] >= part * block
    ]
    expand = [
        own._replace(span=span, block_n=block, expand_warps=warps)
        for span, block, warps in (
            (128, 128, 2),
            (128, 128, 4),
            (256, 128, 4),
            (256, 256, 4),
            (512, 128, 4),
            (512, 256, 4),
            (512, 512, 4),
            (1024, 128, 4),
            (1024, 256, 4),
        )
    ]
    return shrink, expand


def tune(given: argparse.Namespace) -> None:
    spec = shape(given.shape)
    cases = [
        (name, rows, widths, columns)
        for rows in (32, given.requests, 4096)
        for name, (widths, columns) in matrix_sizes(spec.layers[0], spec.hidden_size).items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        compile_candidates(given, cases, Path(folder))
        for case in cases:
            tune_case(given, *case)


def tune_case(given: argparse.Namespace, name: str, rows: int, widths: tuple[int, ...], columns: int) -> None:
    buffers, _ = group(given, rows, "many")
    matrices = [random_matrix(given, widths, columns) for _ in range(4)]
    weight = torch.randn(sum(widths), columns, device=DEVICE).to(DTYPE)
    x = torch.randn(rows, columns, device=DEVICE).to(DTYPE)
    out = torch.zeros(rows, sum(widths), device=DEVICE).to(DTYPE)

    def timed(work: Callable[[AdapterMatrix], None]) -> float:
        def run() -> None:
            for matrix in matrices:
                work(matrix)

        return time_graph(graph_of(run)) * 1e6 / len(matrices)

    def gemm(_: AdapterMatrix) -> None:
        torch.mm(x, weight.T, out=out)

    def after(matrix: AdapterMatrix, pdl: bool = False) -> None:
        gemm(matrix)
        add_lora(x, out, matrix, buffers, best, pdl=pdl)

    shrinks, expands = candidates(matrices[0], rows)
    times = {tile: timed(lambda matrix, tile=tile: lora_shrink(x, matrix, buffers, tile, PDL)) for tile in shrinks}  # type: ignore[misc]
    read = [given.adapters * given.rank * size * 2 for size in (len(widths) * columns, sum(widths))]
    print(f"{name} {rows} rows; at 4 TB/s: {read[0] / 4e6:.1f} + {read[1] / 4e6:.1f} us")
    for tile in sorted(shrinks, key=times.__getitem__)[:4]:
        print(f"  shrink {times[tile]:6.1f}  parts {tile.parts} k {tile.block_k} ", end="")
        print(f"w {tile.shrink_warps} s {tile.shrink_stages}")
    best = min(shrinks, key=times.__getitem__)
    expands = [best._replace(**dict(zip(EXPAND, tile[4:], strict=True))) for tile in expands]
    times = {tile: timed(lambda matrix, tile=tile: lora_expand(out, matrix, buffers, tile, PDL)) for tile in expands}  # type: ignore[misc]
    for tile in sorted(expands, key=times.__getitem__)[:4]:
        print(f"  expand {times[tile]:6.1f}  span {tile.span} n {tile.block_n} w {tile.expand_warps}")
    best = min(expands, key=times.__getitem__)
    both = timed(after), timed(lambda matrix: after(matrix, pdl=True))
    print(f"  GEMM {timed(gemm):.1f}, after it {both[0]:.1f}, with PDL {both[1]:.1f}", flush=True)


def compile_candidates(
    given: argparse.Namespace, cases: list[tuple[str, int, tuple[int, ...], int]], folder: Path
) -> None:
    """In parallel, since launching would compile them one by one."""
    began = time.perf_counter()
    found: set[KernelVariant] = set()
    for _, rows, widths, columns in cases:
        rank, slots = lora_rank(given.rank), given.adapters
        buffers = AdapterRows.empty(rows, slots, 3 * rank, "meta")
        matrix = AdapterMatrix(
            torch.empty(slots, len(widths) * rank, columns, dtype=DTYPE, device="meta"),
            torch.empty(slots, rank, sum(widths), dtype=DTYPE, device="meta"),
            torch.empty(slots, len(widths), dtype=torch.int32, device="meta"),
            widths,
        )
        x = torch.empty(rows, columns, dtype=DTYPE, device="meta")
        out = torch.empty(rows, sum(widths), dtype=DTYPE, device="meta")
        shrinks, expands = candidates(matrix, rows)
        with recorded_launches() as launches:
            for tile in shrinks:
                lora_shrink(x, matrix, buffers, tile, PDL)
            for tile in expands:
                for parts in {tile.parts for tile in shrinks}:
                    lora_expand(out, matrix, buffers, tile._replace(parts=parts), PDL)
        found |= launches
    compile_variants(found, folder)
    print(f"compiled {len(found)} variants in {time.perf_counter() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["check", "kernels", "tune", "engine"])
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    status = 0
    for part in given.parts:
        try:
            {"check": check, "kernels": kernels, "tune": tune, "engine": engine}[part](given)
        except Exception:  # the other parts still run
            traceback.print_exc()
            print(f"{part}: failed")
            status = 1
    return status


def engine(given: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{given.shape}, {given.requests} requests, {given.prompt} + {given.output} tokens, {device}")
    print("| adapters | output | of the base model |")
    print("|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for kind, targets in TARGETS.items():
            folders: dict[str, str] = {}
            for number in range(given.adapters):  # four different ones are enough: each name has its own slot
                folder = Path(temporary) / f"{kind}-{number % 4}"
                if not folder.exists():
                    write_adapter(folder, given.shape, given.rank, targets, seed=number)
                folders[f"a{number}"] = str(folder)
            names = [f"a{number % given.adapters}" for number in range(given.requests)]
            options: dict[str, Any] = {"load": "random", "shape": given.shape, "max_running": given.requests}
            with LLM(**options, lora=folders, max_loras=given.adapters) as llm:
                base = None
                for label, own in (
                    ("base model", [""] * given.requests),
                    ("one adapter", ["a0"] * given.requests),
                    (f"{given.adapters} adapters", names),
                ):
                    found = measure(llm, given, own)
                    base = base or found
                    ratio = f"{found:,.0f} tokens/s | {found / base:.3f}"
                    print(f"| {kind}, rank {given.rank}: {label} | {ratio} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
