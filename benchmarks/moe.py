"""The kernels of a mixture of experts on a GPU: are they correct, and how near to the memory's speed?

    python benchmarks/moe.py [check|time|step|tune ...]      # default: all four, in about two minutes
    python benchmarks/moe.py check time --formats fp8 fp8-blocks mxfp4      # experts in fewer bits

check   the output of a layer against its float64 reference, and twice the same bits
time    a layer with the tiles of `expert_tuning`, by kernel
step    decode batches of eight layers in the engine, by how qkv and the output projection are computed
tune    gate_up and down by tile, the fastest first

The layer is that of Qwen3-30B-A3B, or of `--shape gpt-oss-20b`, without biases. Launches rotate over four layers, so
that nothing is read from the L2 cache that a real step would read from memory, and are timed inside a CUDA graph, as
they run in the engine.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_timing import BF16, compile_variants, graph_of, randn, time_graph
from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.model import GemmTuning
from paceline.engine.cuda.precompile import precompile
from paceline.engine.engine import Engine
from paceline.engine.precision import Precision
from paceline.kernels.expert_tuning import (
    ExpertTile,
    ExpertTuning,
    expert_tuning,
    fp8_expert_tuning,
    mxfp4_expert_tuning,
)
from paceline.kernels.expert_weights import ExpertMatrices, quantize_fp8_experts, quantize_mxfp4
from paceline.kernels.experts import (
    ExpertWorkspace,
    add_down,
    add_gate_up,
    experts_reference,
)
from paceline.kernels.linear import LinearTuning, decode_tuning
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.route_experts import LISTED_ROWS, RoutedRows, RouterOptions, route, route_reference
from paceline.kernels.variants import KernelVariant, recorded_launches
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.model.weights import random_decoder
from paceline.request import SamplingParams
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer


@dataclass
class Sizes:
    """Of a layer; `--shape` replaces them."""

    hidden: int = 2048
    ffn: int = 768
    experts: int = 128
    chosen: int = 8

    @property
    def options(self) -> RouterOptions:
        return RouterOptions(self.experts, self.chosen)


SIZES, EPS = Sizes(), 1e-6
LAYERS, DEVICE, DTYPE, PDL = 4, "cuda", "bfloat16", True
ROWS = (1, 8, 16, 64, 256, 2048, 8192)
FORMATS: dict[str, Callable[[Tensor], ExpertMatrices]] = {
    "bf16": lambda weight: weight,
    "fp8": quantize_fp8_experts,
    # Of gate and up, each has whole blocks.
    "fp8-blocks": lambda weight: quantize_fp8_experts(weight, (math.gcd(128, weight.shape[1] // 2), 128)),
    "mxfp4": quantize_mxfp4,
}


class Layer(NamedTuple):
    router: Tensor
    gate_up: ExpertMatrices
    down: ExpertMatrices
    x: Tensor
    inputs: Tensor | None  # float16, of quantized experts
    norm: Tensor
    routed: RoutedRows
    load: Tensor

    @property
    def expert_bytes(self) -> float:
        matrices: tuple[Any, ...] = (self.gate_up, self.down)
        return sum(one.nbytes if isinstance(one, Tensor) else one.num_bytes for one in matrices) / SIZES.experts


def make_layers(rows: int, kind: str, device: str = "") -> list[Layer]:
    """Layers of random weights, the same for every number of rows, and random rows."""
    device = device or DEVICE

    def random(*shape: int, scale: float) -> Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=BF16, device="meta")
        return randn(*shape, scale=scale)

    if (kind, device) not in _WEIGHTS:
        make = FORMATS[kind]
        _WEIGHTS.clear()  # those of another format
        _WEIGHTS[kind, device] = [
            (
                random(SIZES.experts, SIZES.hidden, scale=4 * SIZES.hidden**-0.5),
                make(random(SIZES.experts, 2 * SIZES.ffn, SIZES.hidden, scale=SIZES.hidden**-0.5)),
                make(random(SIZES.experts, SIZES.hidden, SIZES.ffn, scale=4 * SIZES.ffn**-0.5)),
            )
            for _ in range(LAYERS)
        ]
    return [_layer(one, random(rows, SIZES.hidden, scale=1), rows, device) for one in _WEIGHTS[kind, device]]


_WEIGHTS: dict[tuple[str, str], list[tuple[Tensor, ExpertMatrices, ExpertMatrices]]] = {}


def _layer(weights: tuple[Tensor, ExpertMatrices, ExpertMatrices], x: Tensor, rows: int, device: str) -> Layer:
    load = torch.zeros(SIZES.experts, dtype=torch.int64, device=device)
    inputs = None if isinstance(weights[1], Tensor) else torch.empty_like(x, dtype=torch.float16)
    norm = torch.ones(SIZES.hidden, dtype=BF16, device=device)
    return Layer(*weights, x, inputs, norm, RoutedRows.empty(rows, SIZES.options, device), load)


def workspace_for(rows: int, kind: str, device: str = "") -> ExpertWorkspace:
    like = torch.empty(0, dtype=BF16, device=device or DEVICE)
    operands = None if kind == "bf16" else torch.float16
    return ExpertWorkspace.empty(rows, SIZES.chosen, SIZES.experts, SIZES.ffn, SIZES.hidden, like, operands)


def tuning_for(rows: int, kind: str) -> ExpertTuning:
    tuned = {"bf16": expert_tuning, "mxfp4": mxfp4_expert_tuning}.get(kind, fp8_expert_tuning)
    return tuned(rows, SIZES.chosen, SIZES.experts)


def do_route(layer: Layer, tuning: ExpertTuning, pdl: bool = True) -> None:
    pdl = pdl and PDL
    route(layer.x, layer.router, SIZES.options, layer.routed, layer.load, block_m=tuning.block_m, eps=EPS, pdl=pdl)


def do_gate_up(layer: Layer, tuning: ExpertTuning, workspace: ExpertWorkspace, pdl: bool = True) -> None:
    """With the norm of the inputs of quantized experts, which is a launch of its own."""
    pdl = pdl and PDL
    if layer.inputs is None:
        add_gate_up(layer.x, layer.gate_up, layer.routed, workspace, tuning, normed=True, pdl=pdl)
    else:
        rms_norm(layer.x, layer.norm, EPS, layer.inputs, pdl=pdl)
        add_gate_up(layer.inputs, layer.gate_up, layer.routed, workspace, tuning, pdl=pdl)


def do_down(layer: Layer, tuning: ExpertTuning, workspace: ExpertWorkspace, out: Tensor, pdl: bool = True) -> None:
    add_down(layer.down, layer.routed, workspace, out, tuning, residual=layer.x, pdl=pdl and PDL)


def do_layer(layer: Layer, tuning: ExpertTuning, workspace: ExpertWorkspace, out: Tensor, pdl: bool = True) -> None:
    do_route(layer, tuning, pdl)
    do_gate_up(layer, tuning, workspace, pdl)
    do_down(layer, tuning, workspace, out, pdl)


# ---------------------------------------------------------------------- candidates


def candidates(rows: int) -> list[ExpertTuning]:
    """Every tile of gate_up and of down once. They are timed one by one, so they need not be combined."""
    gate_up: list[tuple[int, ...]]
    down: list[tuple[int, ...]]
    if rows <= LISTED_ROWS:
        gate_up = [(16, 128, 4, 6), (16, 256, 2, 4), (16, 256, 4, 3), (16, 256, 4, 4), (16, 256, 4, 5), (16, 512, 4, 3)]
        gate_up += [(32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3)]
        down = [(16, 128, 4, 10), (16, 256, 4, 7), (32, 128, 4, 6), (32, 128, 4, 10), (32, 256, 4, 5), (32, 256, 4, 7)]
        down += [(64, 128, 4, 8), (32, 128, 2, 10)]
        block_ms, splits = (LISTED_ROWS,), (2, 4, 8)
        if rows == 1:  # without tl.dot
            gate_up = [(2, 2048, 4, 1), (4, 2048, 4, 1), (4, 2048, 8, 1), (8, 2048, 8, 1), (2, 2048, 2, 1)]
            down = [(8, 1024, 4, 1), (4, 1024, 4, 1), (4, 1024, 2, 1), (8, 1024, 8, 1), (16, 1024, 8, 1)]
            block_ms = (1,)
    elif rows <= 512:
        gate_up = [(16, 256, 4, 4), (32, 64, 4, 6), (32, 128, 4, 3), (32, 128, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3)]
        gate_up += [(64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)]
        down = [(32, 256, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4)]
        down += [(128, 128, 4, 3), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4)]
        block_ms, splits = (16, 32, 64), (1,)
    else:
        gate_up = [(64, 64, 4, 4), (64, 64, 8, 4), (128, 32, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)]
        down = [(128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (256, 32, 8, 4), (256, 64, 8, 3)]
        down += [(256, 64, 8, 4)]
        block_ms, splits = (64, 128), (1,)
    count = max(len(gate_up), len(down))
    return [
        ExpertTuning(block_m, ExpertTile(*gate_up[at % len(gate_up)]), ExpertTile(*down[at % len(down)]), split=split)
        for block_m in block_ms
        for split in splits
        for at in range(count)
    ]


def compile_ahead(rows_list: list[int], kinds: list[str], folder: Path, what: list[str]) -> None:
    """Compiles all variants in parallel, since launching would compile them one by one."""
    found: set[KernelVariant] = set()
    began = time.perf_counter()
    for kind in kinds:
        for rows in rows_list:
            layer, workspace = make_layers(rows, kind, "meta")[0], workspace_for(rows, kind, "meta")
            default = tuning_for(rows, kind)
            with recorded_launches() as launches:
                for tuning in {*(candidates(rows) if "tune" in what else ()), default}:
                    do_layer(layer, tuning, workspace, layer.x)
                do_layer(layer, default, workspace, layer.x, pdl=False)
            found |= launches
    arch, failed = compile_variants(found, folder)
    if "step" in what:
        spec = shape("qwen3-30b-a3b").with_layers(range(2))
        scheduler = SchedulerConfig(num_pages=2048, context_tokens=4096, max_running=16, max_batch_tokens=4096)
        precompile([spec], Precision("bfloat16"), scheduler, folder, arch)
    print(f"compiled {len(found)} variants in {time.perf_counter() - began:.0f} s, {failed} failed", flush=True)


# ---------------------------------------------------------------------- check


def check(rows_list: list[int], kind: str) -> None:
    print(f"\ncheck     rows  other experts  error of a row: mean, worst   same bits again   ({kind})")
    for rows in rows_list:
        layer, workspace = make_layers(rows, kind)[0], workspace_for(rows, kind)
        tuning = tuning_for(rows, kind)
        out, again = torch.empty_like(layer.x), torch.empty_like(layer.x)
        for target in (out, again):
            do_layer(layer, tuning, workspace, target)
        ids, _ = route_reference(layer.x, layer.router, SIZES.options, EPS)
        weights, found = layer.routed.matrix.topk(SIZES.chosen)
        others = int((found.sort(-1)[0] != ids.sort(-1)[0]).any(-1).sum())  # near-ties
        part = slice(0, min(rows, 512))  # the reference is slow
        weights = weights[part].double()
        expected = experts_reference(layer.x[part], found[part], weights, layer.gate_up, layer.down, EPS, layer.x[part])
        delta = expected - layer.x[part].double()
        errors = (out[part].double() - expected).norm(dim=-1) / delta.norm(dim=-1)
        count = int(layer.load.sum())
        print(
            f"      {rows:8}  {others:13}  {errors.mean():.2e}  {errors.max():.2e}               "
            f"{torch.equal(out, again)}   counted {count == 2 * rows * SIZES.chosen}",
            flush=True,
        )


# ---------------------------------------------------------------------- time


def per_layer(work: Callable[[Layer], None], layers: list[Layer]) -> float:
    """Microseconds of one layer."""

    def all_layers() -> None:
        for layer in layers:
            work(layer)

    graph = graph_of(all_layers)
    return time_graph(graph) / len(layers) * 1e6


def used_experts(layers: list[Layer]) -> float:
    return sum(int((layer.routed.matrix > 0).any(0).sum()) for layer in layers) / len(layers)


def rates(rows: int, experts: float, us: float, expert_bytes: float, share: float = 1.0) -> str:
    """share: of the weights of an expert."""
    bytes_read = experts * expert_bytes * share
    flops = 2 * rows * SIZES.chosen * 3 * SIZES.ffn * SIZES.hidden * share
    return f"{bytes_read / us / 1e6:5.2f} TB/s {flops / us / 1e6:6.1f} TFLOP/s"


def time_layers(rows_list: list[int], kind: str) -> None:
    parts_named = "without PDL, route+sort, gate_up, down, µs"
    print(f"\ntime      rows  experts   layer µs                            {parts_named}   ({kind})")
    for rows in rows_list:
        layers, workspace = make_layers(rows, kind), workspace_for(rows, kind)
        tuning = tuning_for(rows, kind)
        out = torch.empty_like(layers[0].x)
        total = per_layer(lambda layer, t=tuning, w=workspace, o=out: do_layer(layer, t, w, o), layers)
        parts = [
            per_layer(lambda layer, t=tuning, w=workspace, o=out: do_layer(layer, t, w, o, pdl=False), layers),
            per_layer(lambda layer, tuning=tuning: do_route(layer, tuning), layers),
            per_layer(lambda layer, t=tuning, w=workspace: do_gate_up(layer, t, w), layers),
            per_layer(lambda layer, t=tuning, w=workspace, o=out: do_down(layer, t, w, o), layers),
        ]
        count = used_experts(layers)
        print(
            f"      {rows:8}  {count:7.1f}   {total:8.1f} {rates(rows, count, total, layers[0].expert_bytes)}   "
            + "   ".join(f"{part:8.1f}" for part in parts),
            flush=True,
        )


# ---------------------------------------------------------------------- step


def step(_: list[int], kind: str) -> None:
    """The device time of decode batches, per layer: the head and the sampling of a model without layers are subtracted
    by comparing eight layers with two."""
    if kind != "bf16" or shape("qwen3-30b-a3b").hidden_size != SIZES.hidden:
        print(f"\nstep      is for bf16 and Qwen3-30B-A3B only, not for {kind}")
        return
    print("\nstep      µs per layer, by rows of a decode batch with contexts of about 150 tokens")
    choices: dict[str, GemmTuning] = {
        "fused qkv and out": decode_tuning,
        "cuBLAS": lambda rows, columns, gated: None,
        "fused, qkv split 4, out split 4": lambda rows, columns, gated: _split(rows, columns, gated, 4, 4),
        "fused, qkv split 1, out split 2": lambda rows, columns, gated: _split(rows, columns, gated, 1, 2),
    }
    for name, tuning in choices.items():
        try:
            times = {count: _decode_times(count, tuning) for count in (8, 2)}
            layers = {rows: (times[8][rows] - times[2][rows]) / 6 * 1e6 for rows in times[8]}
            print(f"   {name:34}", {rows: round(us, 1) for rows, us in layers.items()}, flush=True)
        except Exception:
            traceback.print_exc()


def _split(rows: int, columns: int, gated: bool, qkv: int, out: int) -> LinearTuning | None:
    if rows > LISTED_ROWS or gated:
        return None
    return LinearTuning(16, 32, 128, 4, 5, qkv if columns > SIZES.hidden else out)


def _decode_times(num_layers: int, tuning: GemmTuning) -> dict[int, float]:
    """Seconds of a decode batch, by rows."""
    spec = shape("qwen3-30b-a3b").with_layers(range(num_layers))
    scheduler = SchedulerConfig(num_pages=2048, context_tokens=4096, max_running=16, max_batch_tokens=4096)
    decoder = random_decoder(spec, dtype=DTYPE, device=DEVICE, max_positions=4096)
    device, scheduler = build_cuda(decoder, EngineConfig(), scheduler, None, tuning=tuning)
    device.load_libraries()
    device.warm_up()
    engine = Engine(Scheduler(scheduler), device, synthetic_tokenizer(spec.vocab_size), vocab_size=spec.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = {}
    with LLM.from_engine(engine) as llm:
        for rows in (1, 8, 16):
            prompts = [[(7 * row + at) % 1000 + 3 for at in range(120)] for row in range(rows)]
            for _ in range(3):  # the first times graphs are captured
                device.reset_stats()
                llm.generate(prompts, params)
            bucket = device.stats.by_bucket[rows]
            found[rows] = bucket.device_s / bucket.passes
    torch.cuda.empty_cache()
    return found


# ---------------------------------------------------------------------- tune


def tune(rows_list: list[int], kind: str) -> None:
    for rows in rows_list:
        layers, workspace = make_layers(rows, kind), workspace_for(rows, kind)
        out = torch.empty_like(layers[0].x)
        times: dict[str, dict[tuple[object, ...], float]] = {"gate_up": {}, "down": {}}
        default = tuning_for(rows, kind)
        routed_for = None
        for tuning in sorted({*candidates(rows), default}, key=lambda one: (one.block_m, repr(one))):
            if routed_for != tuning.block_m:
                for layer in layers:
                    do_route(layer, tuning)
                routed_for = tuning.block_m
            for name, key, work in (
                ("gate_up", (tuning.block_m, *_numbers(tuning.gate_up)), do_gate_up),
                ("down", (tuning.block_m, *_numbers(tuning.down), tuning.split), do_down),
            ):
                if key in times[name]:
                    continue
                more = (out,) if name == "down" else ()
                try:
                    times[name][key] = per_layer(
                        lambda layer, work=work, t=tuning, w=workspace, more=more: work(layer, t, w, *more), layers
                    )
                except Exception as error:
                    print("cannot run", rows, name, key, repr(error)[:120], flush=True)
                    times[name][key] = float("inf")
        count = used_experts(layers)
        for name, share, now in (
            ("gate_up", 2 / 3, (default.block_m, *_numbers(default.gate_up))),
            ("down", 1 / 3, (default.block_m, *_numbers(default.down), default.split)),
        ):
            ranked = sorted(times[name].items(), key=lambda item: item[1])
            named = "block_m, block_n, block_k, warps, stages" + ", split" * (name == "down")
            print(f"\ntune {kind}, {rows} rows, {name}: {named}")
            for key, us in [*ranked[:6], *(item for item in ranked[6:] if item[0] == now)]:
                mark = "  <- today" if key == now else ""
                print(f"   {us:8.1f} µs  {rates(rows, count, us, layers[0].expert_bytes, share)}  {key}{mark}")
            best_by_m = {key[0]: us for key, us in reversed(ranked)}
            print("   best by block_m:", {m: round(us, 1) for m, us in sorted(best_by_m.items(), key=repr)}, flush=True)


def _numbers(tile: ExpertTile) -> tuple[int, ...]:
    return tile.block_n, tile.block_k, tile.num_warps, tile.num_stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["check", "time", "step", "tune"])
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--formats", nargs="*", default=["bf16"], choices=list(FORMATS))
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=["qwen3-30b-a3b", "gpt-oss-20b"])
    given = parser.parse_args()
    spec = shape(given.shape)
    experts = spec.expert_layers[0]
    SIZES.hidden, SIZES.ffn = spec.hidden_size, experts.size
    SIZES.experts, SIZES.chosen = experts.count, experts.per_token
    torch.manual_seed(0)
    jobs: dict[str, Callable[[list[int], str], None]] = {
        "check": check,
        "time": time_layers,
        "step": step,
        "tune": tune,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            compile_ahead(given.rows, given.formats, Path(folder), given.what)
        except Exception:
            traceback.print_exc()
        for kind in given.formats:
            for name in given.what:
                try:
                    with torch.inference_mode(mode=name != "step"):
                        jobs[name](given.rows, kind)
                except Exception:
                    traceback.print_exc()


if __name__ == "__main__":
    main()
