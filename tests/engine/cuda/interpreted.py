"""The CUDA executor on the CPU, in Triton's interpreter: what its tests share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cuda.attention import AttentionChoices
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.graphs import Graph, GraphKey
from paceline.engine.cuda.inputs import PackedBatch
from paceline.engine.cuda.sharing import ShareRule
from paceline.engine.cuda.tiles import SplitRule
from paceline.engine.engine import Engine
from paceline.kernels._triton import HAS_TRITON
from paceline.kernels.decode_units import Chunks
from paceline.kernels.linear import LinearTuning
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.shapes import shape, vary
from paceline.model.weights import random_weights
from paceline.request import SamplingParams
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan
from paceline.text.synthetic import synthetic_tokenizer

INTERPRETED = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
IN_BOUNDS = pytest.mark.usefixtures("in_bounds")  # every address is checked

CONTEXT = 192
RNG = np.random.default_rng(5)
SHARED = RNG.integers(3, 512, 21).tolist()
PROMPTS = [[*SHARED, 7, 8, 9], RNG.integers(3, 512, 1).tolist(), [*SHARED, 9, 9], RNG.integers(3, 512, 11).tolist()]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BASE: dict[str, Any] = {
    "num_pages": 64,
    "page_size": 4,
    "max_running": 4,
    "context_tokens": CONTEXT,
    "prefix_wait_tokens": 8,
    "max_batch_tokens": 32,
    "max_prefill_tokens": 32,
    "chunk_tokens": 16,
    "itl_target": math.inf,  # batches must not depend on how long the interpreter takes
}


def decoder(name: str, **changes: Any) -> Decoder:
    """Two layers of a family, with norms and biases that change the result. changes: of its spec."""
    spec = vary(shape(name), **changes)
    ropes = [layer.mixer.rope for layer in spec.layers[-2:]]
    spec = vary(spec.with_layers([1, 2]), ropes=ropes)
    weights, mixer = random_weights(spec, dtype="float32"), spec.layers[0].mixer
    generator = torch.Generator().manual_seed(1)
    for key, weight in weights.items():
        if key.endswith("norm"):
            weight.mul_(1 + 0.3 * torch.randn(weight.shape[-1], generator=generator))
            if (
                key.endswith("qk_norm") and mixer.qk_norm == "heads"
            ):  # one for all query heads, another for all key heads
                weight[: mixer.num_heads] = weight[0] * 1.1
    return Decoder(spec, weights, max_positions=CONTEXT)


def small_tiles(rows: int, columns: int, gated: bool) -> LinearTuning | None:
    """Fused GEMMs for a tiny model: one row by sums, two by dot products, some with split-K; cuBLAS from three rows on,
    so that a run uses all kinds. Few programs: each costs milliseconds."""
    if rows == 1:
        return LinearTuning(1, 64, 64, 1, 1)
    return LinearTuning(16, 32, 32, 1, 1, 1 if gated or columns > 64 else 2) if rows == 2 else None


def small_sizes(split_rule: Callable[..., SplitRule] = SplitRule) -> dict[str, Any]:
    """Options of `build_cuda` with which tiny models have several tiles, chunks and shared units."""
    return {
        "tuning": small_tiles,
        "attention": AttentionChoices(chunks=lambda rows: Chunks(16, 64, 4), split_rule=split_rule),
        "share_rule": partial(ShareRule, chunks=(32, 16), align=4, min_pair_tokens=16),
    }


def on_kernels(name: str, **options: Any) -> tuple[LLM, CudaExecutor]:
    overlap, model = options.pop("overlap", "on"), options.pop("model", None) or decoder(name)
    split_rule, sizes = options.pop("split_rule", SplitRule), options.pop("prefill_sizes", ())
    draft, fp8_kv = options.pop("draft", None), options.pop("fp8_kv", False)
    quantization = options.pop("quantization", "none")
    lora: dict[str, int] = options.pop("lora", {})  # max_loras and max_lora_rank
    if lora:
        options["adapter_slots"] = lora["max_loras"]
    config = SchedulerConfig(**{**BASE, **options})
    device, config = build_cuda(
        model,
        EngineConfig(kv_dtype="fp8_e4m3" if fp8_kv else "auto", quantization=quantization, **lora),
        config,
        None,
        prefill_sizes=sizes,
        draft=draft,
        **small_sizes(split_rule),
    )
    spec = device.model.spec
    tokenizer = synthetic_tokenizer(spec.vocab_size)
    engine = Engine(Scheduler(config), device, tokenizer, vocab_size=spec.vocab_size, spec=spec, overlap=overlap)
    return LLM.from_engine(engine), device


def expected(name: str, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The output of the CPU executor."""
    reference = decoder(name)
    tokenizer = synthetic_tokenizer(reference.spec.vocab_size)
    engine = assemble(reference, tokenizer, EngineConfig(device="cpu", threads=1, overlap="off"), BASE)
    with LLM.from_engine(engine) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


def record_packed(device: CudaExecutor) -> list[PackedBatch]:
    """A list that receives the packed batch of every pass."""
    found: list[PackedBatch] = []
    pack = device._packer.pack

    def packing(plan: Plan) -> PackedBatch:
        found.append(pack(plan))
        return found[-1]

    device._packer.pack = packing  # type: ignore[method-assign]
    return found


def record_graphs(device: CudaExecutor) -> list[GraphKey]:
    """A list that receives the key of every graph that is looked for."""
    found: list[GraphKey] = []
    find = device.graphs.find

    def choosing(size: int, key: GraphKey, *, may_capture: bool) -> Graph | None:
        found.append(key)
        return find(size, key, may_capture=may_capture)

    device.graphs.find = choosing  # type: ignore[method-assign]
    return found


def prefill_keys(device: CudaExecutor) -> list[GraphKey]:
    """The keys of the prefill graphs that were captured."""
    return [key for _, key in device.graphs._graphs if key.prefill is not None]


def retract_often(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    plan, steps = scheduler.plan, iter(range(10**6))

    def planning(now: float) -> Any:
        running = scheduler.running.requests
        if next(steps) % 2 and running and running[0].retractions < 2:
            scheduler.retract(running[0].id, now, "a test")
        return plan(now) or plan(now)

    scheduler.plan = planning  # type: ignore[method-assign]
