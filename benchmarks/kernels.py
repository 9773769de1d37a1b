"""How fast is each kernel on a GPU, and is it correct?

    python benchmarks/kernels.py [gemm|attention|power|extend|splits|sampling|step ...]

Prints microseconds by kernel, batch and tuning, compared with a simple alternative in the same run, and writes
kernels.json (and best.json: the fastest GEMM tunings). Inputs rotate over 28 layers, so that nothing is read from the
L2 cache that a real step would read from memory. Launches are timed inside a CUDA graph, as they run in the engine.
`gemm`, `attention`, `extend`, `splits` and `power` are in kernel_*.py; the rest is here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_attention import bench_attention, bench_extend, bench_splits
from benchmarks.kernel_gemm import GEMMS, Best, bench_gemm, fused, linear_workspace, weight_of
from benchmarks.kernel_power import bench_power
from benchmarks.kernel_timing import (
    BF16,
    EPS,
    FFN,
    HEAD,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PAGE,
    Q_HEADS,
    RESULTS,
    VOCAB,
    Rows,
    Scene,
    graph_of,
    ints,
    randn,
    scene,
    time_graph,
    timed,
)
from paceline.engine.cuda.packing import sampling_words
from paceline.kernels.decode_attention import DecodeTuning, decode_attention
from paceline.kernels.decode_units import Chunks
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.layouts import LOGPROB_WORDS
from paceline.kernels.linear import LinearTuning, decode_tuning, num_squares
from paceline.kernels.logprobs import LogprobWorkspace, chosen_logprobs, top_logprobs
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rope_kv import rope_table
from paceline.kernels.sampling import SampleWorkspace, sample
from paceline.kernels.silu_mul import silu_mul

BATCHES = (1, 8, 32, 64, 128, 256)


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

            def work(filters: bool = filters) -> None:
                for line in logits:  # noqa: B023
                    state = rows.state  # noqa: B023
                    sample(line, slots, positions, state.num_rows, state, results, step, workspace, filters=filters)  # noqa: B023

            seconds = timed(work) / len(logits)
            lines.append(f"{name:22} b{batch:<4} {seconds * 1e6:8.1f} µs")
            RESULTS[f"sampling {name} {batch}"] = seconds
        ring = torch.zeros(4, batch, LOGPROB_WORDS, dtype=torch.int32, device="cuda")
        logprob_workspace = LogprobWorkspace.empty(batch, "cuda")
        for count in (0, 5, 20):
            for row in range(batch):
                rows.state.sampling[row] = torch.from_numpy(sampling_words(0.0, 0, 1.0, 0.0, row, count)).cuda()

            def logprobs() -> None:
                for line in logits:  # noqa: B023
                    common = (rows.state.num_rows, rows.state.sampling)  # noqa: B023
                    top_logprobs(line, slots, *common, ring, step, logprob_workspace)  # noqa: B023
                    chosen_logprobs(line, slots, *common, results, ring, step, logprob_workspace)  # noqa: B023

            seconds = timed(logprobs) / len(logits)
            lines.append(f"{f'logprobs {count}':22} b{batch:<4} {seconds * 1e6:8.1f} µs")
            RESULTS[f"logprobs {count} {batch}"] = seconds
        argmax = timed(lambda: [line.argmax(-1) for line in logits]) / len(logits)  # noqa: B023
        lines.append(f"{'torch argmax':22} b{batch:<4} {argmax * 1e6:8.1f} µs")
    print("Sampling and logprobs, vocabulary 151,936")
    print("\n".join(lines), flush=True)


# ---- a whole decode step --------------------------------------------------------------------------------------------


class Decoder:
    """The Qwen3-0.6B shape with random weights: every kernel of a decode step, in one graph."""

    def __init__(self) -> None:
        self.embeddings = randn(VOCAB, HIDDEN, scale=0.02)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=BF16)
        self.head_norm = torch.ones(HEAD, device="cuda", dtype=BF16)
        self.layers = [{p.name: weight_of(p) for p in GEMMS} for _ in range(LAYERS)]
        self.workspace = linear_workspace()
        self.table = rope_table(4096, HEAD, 1e6, "cuda")

    def step(
        self, what: Scene, mode: str, best: Best, tuning: DecodeTuning, pdl: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, Rows]:
        """mode: cublas for every GEMM, or fused where `best` has a tuning."""
        torch.manual_seed(len(what.lengths))
        rows = Rows(what)
        batch = len(what.lengths)
        caches = randn(2 * LAYERS, rows.num_pages, PAGE, KV_HEADS, HEAD)
        state = rows.state

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="cuda", dtype=BF16)

        x, normed, delta = empty(batch, HIDDEN), empty(batch, HIDDEN), empty(batch, HIDDEN)
        qkv, attended = empty(batch, (Q_HEADS + 2 * KV_HEADS) * HEAD), empty(batch, Q_HEADS * HEAD)
        gate_up, act = empty(batch, 2 * FFN), empty(batch, FFN)
        squares = torch.zeros(batch, 64, device="cuda")
        logits = empty(batch, VOCAB)
        slots, positions = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(2))
        results = torch.zeros(4, batch, dtype=torch.int32, device="cuda")
        step = torch.zeros(1, dtype=torch.int32, device="cuda")
        samples = SampleWorkspace.empty(batch, "cuda")
        gemms = {p.name: p for p in GEMMS}
        chosen = {} if mode == "cublas" else {p.name: best.get((p.name, bucket(batch))) for p in GEMMS}
        added = True  # whether delta is part of the residual stream already
        square_columns = 1  # columns of squares that hold the sums of squares of the stream; 0: none

        def norm_into(target: torch.Tensor) -> None:
            nonlocal added
            if added:
                rms_norm(x, self.norm, EPS, target, pdl=pdl)
            else:
                rms_norm(delta, self.norm, EPS, target, residual=x, pdl=pdl)
            added = True

        def norm_linear(name: str, weight: torch.Tensor, out: torch.Tensor) -> None:
            choice = chosen.get(name)
            if choice and square_columns and added:
                fused(gemms[name], x, weight, out, squares[:, :square_columns], choice, self.workspace, pdl)
                return
            norm_into(normed)
            if gemms[name].gated:
                torch.mm(normed, weight.T, out=gate_up)
                silu_mul(gate_up, out, pdl=pdl)
            else:
                torch.mm(normed, weight.T, out=out)

        def add_linear(name: str, source: torch.Tensor, weight: torch.Tensor) -> None:
            nonlocal added, square_columns
            choice = chosen.get(name)
            if choice:
                square_columns = num_squares(HIDDEN, choice)
                fused(gemms[name], source, weight, x, squares[:, :square_columns], choice, self.workspace, pdl)
                return
            torch.mm(source, weight.T, out=delta)
            added, square_columns = False, 0

        def work() -> None:
            nonlocal added, square_columns
            added, square_columns = True, 1
            rows.split(what.chunks, step)
            gather_tokens(state, self.embeddings, x, slots, positions, squares=squares[:, :1])
            for layer, weights in enumerate(self.layers):
                norm_linear("qkv", weights["qkv"], qkv)
                decode_attention(
                    qkv,
                    caches[2 * layer],
                    caches[2 * layer + 1],
                    state.page_table,
                    self.table,
                    self.head_norm,
                    self.head_norm,
                    EPS,
                    rows.units,
                    rows.workspace,
                    attended,
                    tuning=tuning,
                    pdl=pdl,
                )
                add_linear("o", attended, weights["o"])
                norm_linear("gate_up", weights["gate_up"], act)
                add_linear("down", act, weights["down"])
            norm_into(normed)
            torch.mm(normed, self.embeddings.T, out=logits)
            sample(logits, slots, positions, state.num_rows, state, results, step, samples, filters=False)

        graph = graph_of(work)
        state.num_computed.copy_(ints(list(what.lengths)))  # the warm-up decoded a token or two
        graph.replay()
        torch.cuda.synchronize()
        assert (state.num_computed.cpu() - torch.tensor(what.lengths) == 1).all(), "the step did not advance its rows"
        # A graph holds addresses, not tensors: its tensors must outlive it.
        activations = (x, normed, delta, qkv, attended, gate_up, act, squares)
        rows.keep = (caches, *activations, slots, positions, results, step, samples)
        return graph, logits, rows


def bucket(rows: int) -> int:
    return next(b for b in BATCHES if rows <= b)


def shipped(batch: int) -> Best:
    tunings = {p.name: decode_tuning(batch, p.columns, p.gated) for p in GEMMS}
    return {(name, bucket(batch)): tuning for name, tuning in tunings.items() if tuning}


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
        for mode, pdl in [("cublas", False), ("fused", False), ("fused", True)]:
            graph, logits, rows = decoder.step(what, mode, best or shipped(batch), tuning, pdl)
            outputs[mode, pdl] = logits.float()
            seconds = time_graph(graph, inner=1)
            texts.append(f"{mode}{' PDL' * pdl} {seconds * 1e3:6.3f}")
            RESULTS[f"step {name} {batch} {mode}{' PDL' * pdl}"] = seconds
            kv = rows.kv_bytes * LAYERS
            del graph, rows
        reference = outputs["cublas", False]
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
    parser.add_argument(
        "parts", nargs="*", default=["gemm", "attention", "power", "extend", "splits", "sampling", "step"]
    )
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
            except Exception:  # continue with the other parts
                traceback.print_exc()
            print(f"[{name}: {time.time() - begin:.0f} s]", flush=True)
            (out / "kernels.json").write_text(json.dumps(RESULTS))

    def gemm() -> None:
        best.update(bench_gemm(BATCHES))
        (out / "best.json").write_text(json.dumps([[n, r, list(asdict(t).values())] for (n, r), t in best.items()]))

    part("gemm", gemm)
    part("attention", bench_attention)
    part("power", bench_power)
    part("step", lambda: bench_step(best))
    part("extend", bench_extend)
    part("splits", bench_splits)
    part("sampling", bench_sampling)


if __name__ == "__main__":
    main()
