"""Compares the list of kernel variants with what random requests launch, and compiles for many rows, in one process
that imports torch once: `python -m tests.kernels.random_launches`.

Runs without the interpreter and without a GPU: launches are recorded and nothing is computed, so outputs mean nothing.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.variants import DryGroup, _without_gemms, kernel_variants
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor, Pending
from paceline.engine.linear import groupwise
from paceline.engine.linear.pack import keep_expanded, keep_quantized, quantize_decoder
from paceline.engine.precision import KernelFormat, Precision
from paceline.kernels.binaries import compile_for, compile_variant
from paceline.kernels.layouts import DraftWord
from paceline.kernels.variants import KernelVariant, recorded_launches
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.layers import Dense
from paceline.model.layout import WHOLE_MODEL, Shard
from paceline.model.quantized import quantize
from paceline.model.shapes import shape, vary
from paceline.model.weights import random_decoder, random_weights
from paceline.parallel.stages import StagePipe
from paceline.parallel.threads import ThreadGroup
from paceline.request import SamplingParams
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan
from paceline.text.synthetic import synthetic_tokenizer
from tests.kernels.disassembly import disassembled, undefined_reads
from tests.oracle.adapters import adapted_shapes, write_adapter

CASES: list[tuple[str, dict[str, Any]]] = [
    ("tiny-qwen3", {"context_tokens": 2048, "num_pages": 512, "max_running": 8, "chunk_tokens": 64, "draft_tokens": 7}),
    # Nothing is a multiple of 16, and the KV cache is smaller than the context, with host memory behind it.
    (
        "tiny-qwen2",
        {
            "context_tokens": 1999,
            "num_pages": 90,
            "max_running": 37,
            "num_host_pages": 64,
            "max_swap_pages": 8,
            "kv": "fp8_e4m3",
        },
    ),
    ("wide", {"context_tokens": 600, "num_pages": 200, "max_running": 20, "draft_tokens": 4}),
    # A draft model with other heads, and with a sliding window.
    ("wide", {"context_tokens": 600, "num_pages": 200, "max_running": 9, "draft_tokens": 4, "draft": "tiny-mistral"}),
    ("tiny-smollm3", {"context_tokens": 1024, "num_pages": 300, "max_running": 1, "page_size": 32}),
    # One rank of tensor parallelism, with another number of query heads than the first.
    ("tiny-qwen2", {"context_tokens": 600, "num_pages": 200, "max_running": 9, "draft_tokens": 4, "rank": Shard(1, 4)}),
    ("tiny-gemma2", {"context_tokens": 600, "num_pages": 200, "max_running": 9, "draft_tokens": 4}),
    ("tiny-phi3", {"context_tokens": 600, "num_pages": 200, "max_running": 9, "kv": "fp8_e4m3"}),
    ("tiny-olmo2", {"context_tokens": 600, "num_pages": 200, "max_running": 3, "rank": Shard(1, 2)}),
    # A rank with the whole of a draft model.
    (
        "tiny-qwen3",
        {
            "context_tokens": 600,
            "num_pages": 200,
            "max_running": 2,
            "draft_tokens": 2,
            "draft": "tiny-mistral",
            "rank": Shard(1, 2),
        },
    ),
    # Experts, with and without a shared one, some layers without, and a rank of them.
    ("tiny-qwen3-moe", {"context_tokens": 2048, "num_pages": 512, "max_running": 20, "draft_tokens": 4}),
    ("tiny-qwen2-moe", {"context_tokens": 600, "num_pages": 200, "max_running": 9, "rank": Shard(1, 2)}),
    ("tiny-gpt-oss", {"context_tokens": 600, "num_pages": 200, "max_running": 20, "draft_tokens": 4}),
    # Experts in FP8: rounded at load, and as a rank has those of a checkpoint with blocks.
    ("tiny-qwen3-moe", {"context_tokens": 600, "num_pages": 200, "max_running": 20, "quantization": "fp8"}),
    (
        "tiny-mixtral",
        {
            "context_tokens": 600,
            "num_pages": 200,
            "max_running": 3,
            "quantization": "fp8",
            "formats": (KernelFormat(128),),
            "rank": Shard(1, 2),
        },
    ),
    ("groups of 32", {"context_tokens": 600, "num_pages": 200, "max_running": 20, "quantization": "mxfp4"}),
    ("tiny-qwen3", {"context_tokens": 4096, "num_pages": 2000, "max_running": 130, "shared_reads": False}),
    ("wide", {"context_tokens": 600, "num_pages": 200, "max_running": 80, "draft_tokens": 4, "quantization": "fp8"}),
    ("wide", {"context_tokens": 900, "num_pages": 200, "max_running": 80, "draft_tokens": 4, "quantization": "int4"}),
    # A GGUF file with matrices of 4 and of 8 bits.
    (
        "wide",
        {
            "context_tokens": 600,
            "num_pages": 200,
            "max_running": 80,
            "draft_tokens": 4,
            "quantization": "gguf",
            "formats": (KernelFormat(bits=((4, 8), (4,), (4,), (4, 8))),),
        },
    ),
    # Weights that are in memory in 16 bits, too, so that fewer rows are converted in registers.
    (
        "wide",
        {
            "context_tokens": 900,
            "num_pages": 200,
            "max_running": 80,
            "draft_tokens": 4,
            "quantization": "q4",
            "in_memory": True,
        },
    ),
    # LoRA adapters, of which some requests use one.
    ("tiny-llama", {"context_tokens": 600, "num_pages": 200, "max_running": 37, "draft_tokens": 4, "lora": (3, 8)}),
    (
        "tiny-qwen3-moe",
        {"context_tokens": 600, "num_pages": 200, "max_running": 9, "lora": (3, 40), "rank": Shard(1, 2)},
    ),
]
STAGES: list[tuple[str, dict[str, Any]]] = [
    ("wide", {"context_tokens": 600, "num_pages": 200, "max_running": 9}),
    ("tiny-gemma2", {"context_tokens": 600, "num_pages": 200, "max_running": 5}),
]  # with pipeline parallelism
NOT_SCHEDULERS = ("draft", "rank", "kv", "quantization", "formats", "lora", "in_memory")  # options
# Large enough for the fused GEMM.
_GPT_OSS = shape("tiny-gpt-oss")
SPECS = {
    "wide": vary(shape("tiny-qwen3"), hidden_size=512, num_heads=16, head_dim=32, ffn=Dense(size=512)),
    "groups of 32": vary(_GPT_OSS, ffn=replace(_GPT_OSS.expert_layers[0], size=96)),
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    {"logprobs": 5},
    {"logprobs": 0, "top_p": 0.5, "presence_penalty": 1.0, "prompt_logprobs": 3},
    {"logprob_token_ids": (4, 5), "min_tokens": 1},
]


def random_requests(llm: LLM, rng: random.Random, most: int) -> None:
    adapters = ["", *(one.name for one in llm.engine.adapters.loaded)]
    common = [rng.randrange(3, 500) for _ in range(most)]
    for _ in range(4):
        count = rng.choice([1, 2, 5, 30])
        prompts = [
            [
                *common[: rng.choice([0, 16, 300, most // 2])],
                *(rng.randrange(3, 500) for _ in range(rng.randint(1, 70))),
            ]
            for _ in range(count)
        ]
        wanted = [
            SamplingParams(max_tokens=rng.randint(1, 5), ignore_eos=True, **rng.choice(PARAMS)) for _ in range(count)
        ]
        llm.generate(
            [prompt[: most - 8] for prompt in prompts], wanted, lora=[rng.choice(adapters) for _ in range(count)]
        )
        pooling, adapter = rng.choice(["mean", "last"]), rng.choice(adapters)
        llm.embed([prompt[: most - 8] for prompt in prompts[:3]], pooling=pooling, lora=adapter)


def one_of_each_kernel(*args: Any) -> list[KernelVariant]:
    """A part of `kernel_variants`: of each kernel the variant with most of its options on. Compiling the others takes
    longer than all other tests of kernels."""

    def num_options(variant: KernelVariant) -> int:
        return sum(value is True for _, value in variant.constants)

    return list({variant.name: variant for variant in sorted(kernel_variants(*args), key=num_options)}.values())


def compile_for_rows(max_running: int) -> None:
    """Compiles for a Hopper GPU what so many running requests need and 256 do not. Prints the names."""
    few, many = (
        kernel_variants([shape("tiny-qwen3")], Precision("bfloat16"), SchedulerConfig(num_pages=64, max_running=rows))
        for rows in (256, max_running)
    )
    compile_for(90)
    new = [variant for variant in many if variant not in few]
    for variant in new:
        compile_variant(variant)
    print(*sorted({variant.name for variant in new}))


def check_draft_attention() -> None:
    """Compiles attention of 64 query heads with an FP8 cache, and prints what it reads that nothing has written."""
    config = SchedulerConfig(num_pages=64, max_running=1, draft_tokens=7)
    (tile,) = {
        variant
        for variant in kernel_variants([shape("qwen3-14b").with_layers([0])], Precision("bfloat16", "fp8_e4m3"), config)
        if variant.name == "_decode_attention_kernel" and {("NEW", 8), ("PDL", False)} <= set(variant.constants)
    }
    found = undefined_reads(disassembled(compile_variant(tile)))
    print(f"draft attention reads {', '.join(found) or 'nothing undefined'}")


def unlisted(name: str, options: dict[str, Any], seed: int) -> tuple[list[KernelVariant], set[str]]:
    """Variants that random requests need and that are not in the list; and the names of all kernels in the list."""
    names = [name, options["draft"]] if "draft" in options else [name]
    specs = [SPECS[one] if one in SPECS else shape(one) for one in names]
    shard: Shard = options.get("rank", WHOLE_MODEL)
    group = DryGroup(shard) if shard.size > 1 else None
    scheduler = SchedulerConfig(**{name: value for name, value in options.items() if name not in NOT_SCHEDULERS})
    lora: tuple[int, int] = options.get("lora", (0, 0))
    quantization, formats = options.get("quantization", "none"), options.get("formats", ())
    precision = Precision("float32", options.get("kv", "auto"), quantization, lora, formats)
    engine = EngineConfig(
        kv_dtype=precision.kv_dtype,
        quantization=precision.quantization,
        max_loras=max(lora[0], 1),
        max_lora_rank=lora[1],
    )
    other = replace(scheduler, num_pages=2 * scheduler.num_pages + 1, policy="lpm", max_wait=3.0)
    variants = kernel_variants(specs, precision, scheduler, shard)
    if seed < 2:  # listing takes most of the time here
        assert variants == kernel_variants(specs, precision, other, shard), "see VARIANT_OPTIONS"
    listed = {_on_any_device(variant) for variant in variants}
    common: dict[str, Any] = {"dtype": "float32", "max_positions": scheduler.context_tokens}
    decoder = random_decoder(specs[0], group=group, **common)
    if quantization == "gguf":
        keep_mixed_bits(decoder)
    elif formats:  # else `build_cuda` rounds
        quantize_decoder(decoder, quantization, formats[0])
    if options.get("in_memory"):
        quantize_decoder(decoder, quantization)
        keep_expanded(decoder, free=1 << 40)
    draft = random_decoder(specs[1], **common) if len(specs) > 1 else None
    device, config = build_cuda(decoder, engine, scheduler, None, draft=draft)
    if device.drafts is not None:
        device.drafts.results[:, :, : DraftWord.TOKENS] = 1  # nothing is computed: each row gets one token
    vocab_size = specs[0].vocab_size
    tokenizer = synthetic_tokenizer(vocab_size)
    with (
        recorded_launches() as launched,
        _without_gemms(),
        LLM.from_engine(Engine(Scheduler(config), device, tokenizer, vocab_size=vocab_size, spec=specs[0])) as llm,
    ):
        if lora[0]:
            with tempfile.TemporaryDirectory() as folder:
                write_adapter(Path(folder), adapted_shapes(specs[0]), rank=lora[1])
                llm.load_lora_adapter("x", folder)
        random_requests(llm, random.Random(seed), min(config.context_tokens, config.num_pages * config.page_size // 2))
    assert len({variant.name for variant in launched}) > 15, "too few kernels were launched"
    missing = sorted({_on_any_device(variant) for variant in launched} - listed, key=repr)
    return missing, {variant.name for variant in listed}


def keep_mixed_bits(decoder: Decoder) -> None:
    """As a GGUF file has them: in 8 bits `down` of even layers and qkv of odd ones, all else in 4."""
    for index, name, linear in decoder.linears():
        bits = 8 if name == ("qkv" if index % 2 else "down") else 4
        linear.weight = keep_quantized(quantize(linear.tensor, bits))


class AllStages(Executor):
    """The stages of a pipeline, one after the other; nothing is sent. Records what each of them launches."""

    def __init__(self, stages: list[CudaExecutor]) -> None:
        self.capabilities = stages[-1].capabilities
        self._stages = stages
        self.launched: list[set[KernelVariant]] = [set() for _ in stages]

    def launch(self, plan: Plan) -> Pending:
        for stage, launched in zip(self._stages, self.launched, strict=True):
            with recorded_launches() as found:
                pending = stage.launch(plan)
            launched |= {_on_any_device(variant) for variant in found}
        return pending


def unlisted_on_stages(name: str, options: dict[str, Any], seed: int) -> list[KernelVariant]:
    """As `unlisted`, for a first stage, one in the middle and the last."""
    spec, config = SPECS[name] if name in SPECS else shape(name), SchedulerConfig(**options)
    shards = [Shard(stage=stage, num_stages=3) for stage in range(3)]
    listed, stages = [], []
    for shard in shards:
        variants = kernel_variants([spec], Precision("float32", "auto", "none", (0, 0)), config, shard)
        listed.append({_on_any_device(variant) for variant in variants})
        weights = random_weights(spec, dtype="float32", shard=shard)
        pipe = StagePipe(ThreadGroup.of_size(3)[shard.stage])
        decoder = Decoder(spec, weights, max_positions=config.context_tokens, stages=pipe)
        stages.append(build_cuda(decoder, EngineConfig(), config, None)[0])
    executor = AllStages(stages)
    engine = Engine(Scheduler(config), executor, synthetic_tokenizer(spec.vocab_size), vocab_size=spec.vocab_size)
    with _without_gemms(), LLM.from_engine(engine) as llm:
        random_requests(llm, random.Random(seed), config.context_tokens)
    names = [{variant.name for variant in found} for found in executor.launched]
    assert "_sample_kernel" in names[2] and "_sample_kernel" not in names[0] | names[1], "the last stage samples"
    missing = zip(executor.launched, listed, strict=True)
    return sorted({variant for found, known in missing for variant in found - known}, key=repr)


def _on_any_device(variant: KernelVariant) -> KernelVariant:
    """Without the constants that differ on a CPU."""
    constants = {name: value for name, value in variant.constants if name not in ("APPROX", "PDL")}
    return replace(variant, constants=tuple(constants.items()))


def unlisted_in_memory(quantization: str) -> set[KernelVariant]:
    """As `unlisted`, for a device whose weights are in memory in 16 bits, too: those that only a GPU launches."""

    def variants() -> set[KernelVariant]:
        config = SchedulerConfig(num_pages=512, max_running=256)
        return set(kernel_variants([SPECS["wide"]], Precision("bfloat16", quantization=quantization), config))

    listed, each_pass = variants(), groupwise._MAX_ROWS_EACH_PASS
    groupwise._MAX_ROWS_EACH_PASS = groupwise._MAX_ROWS_IN_MEMORY
    try:
        return variants() - listed
    finally:
        groupwise._MAX_ROWS_EACH_PASS = each_pass


def main() -> None:
    found, names = [], set()
    for seed, (name, options) in enumerate(CASES):
        missing, listed = unlisted(name, options, seed)
        assert name != "wide" or "quantization" in options or "_linear_kernel" in listed, "it uses no fused GEMM"
        found += [f"{name} {options}: {variant}" for variant in missing]
        names |= listed
    found += [
        f"{name} in stages {options}: {variant}"
        for seed, (name, options) in enumerate(STAGES)
        for variant in unlisted_on_stages(name, options, seed)
    ]
    found += [f"{name} in memory: {variant}" for name in ("int4", "q4") for variant in unlisted_in_memory(name)]
    print("\n".join(found) or "all listed")
    print(*names)
    compile_for_rows(1024)
    check_draft_attention()
    sys.exit(bool(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
