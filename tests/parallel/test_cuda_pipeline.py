"""Pipeline parallelism on the CUDA executor, in Triton's interpreter: the tokens are those of one stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checks.weights import write_folder
from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.engine.build.assemble import _pipeline
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.stages import FirstCudaStage, LaterCudaStage
from paceline.engine.engine import Engine, ModelInfo
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.shapes import shape
from paceline.model.weights import random_weights, shard_weights
from paceline.parallel.stages import StagePipe
from paceline.parallel.threads import ThreadGroup
from paceline.request import Grammar, SamplingParams
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import (
    BASE,
    CONTEXT,
    GREEDY,
    INTERPRETED,
    PROMPTS,
    decoder,
    expected,
    on_kernels,
    retract_often,
    small_sizes,
)
from tests.engine.cuda.test_lora import expected as expected_with_adapters
from tests.engine.cuda.test_lora import run as run_with_adapters
from tests.engine.cuda.test_lora import write_adapters
from tests.fused import fused_tensors
from tests.helpers import request
from tests.parallel.ranks import ThreadRanks

pytestmark = INTERPRETED

SHORT = replace(GREEDY, max_tokens=3)
LOCK = threading.RLock()  # the interpreter runs one kernel at a time in a process


def locked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return function(*args, **kwargs)

    return call


def stages_of(
    whole: Decoder, num_stages: int, config: SchedulerConfig, *, over_host: bool = False, **options: Any
) -> tuple[list[CudaExecutor], list[StagePipe]]:
    """over_host: hidden states go through host memory, as with gloo; otherwise from device to device."""
    executors, pipes = [], []
    weights, devices = fused_tensors(whole), ThreadGroup.of_size(num_stages)
    for group, device in zip(ThreadGroup.of_size(num_stages), devices, strict=True):
        pipe = StagePipe(group, None if over_host else device)
        part = shard_weights(whole.whole_spec, weights, pipe.shard)
        executor, _ = build_cuda(
            Decoder(whole.whole_spec, part, max_positions=CONTEXT, stages=pipe),
            EngineConfig(**options),
            config,
            None,
            prefill_sizes=(16,),
            **small_sizes(),
        )
        for name in ("_start", "_finish", "run_background_work"):
            setattr(executor, name, locked(getattr(executor, name)))
        executors.append(executor)
        pipes.append(pipe)
    return executors, pipes


def on_stages(
    whole: Decoder, num_stages: int = 2, overlap: str = "on", engine: dict[str, Any] | None = None, **options: Any
) -> tuple[LLM, list[CudaExecutor]]:
    """engine: options of EngineConfig, and `over_host`."""
    config = SchedulerConfig(**{**BASE, **options}, num_stages=num_stages)
    executors, pipes = stages_of(whole, num_stages, config, **(engine or {}))
    others = [LaterCudaStage(executor, pipe) for executor, pipe in zip(executors[1:], pipes[1:], strict=True)]
    executor = _pipeline(executors[0], ThreadRanks(others), pipes[0], config.max_running)
    spec = whole.whole_spec
    made = Engine(
        Scheduler(config),
        executor,
        synthetic_tokenizer(spec.vocab_size),
        vocab_size=spec.vocab_size,
        spec=spec,
        info=ModelInfo(dtype="float32"),
        overlap=overlap,
    )
    return LLM.from_engine(made), executors


def three_layers(name: str) -> Decoder:
    spec = shape(name).with_layers([0, 1, 2])
    return Decoder(spec, random_weights(spec, seed=3, dtype="float32"), max_positions=CONTEXT)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2-moe", "tiny-olmo2"])
def test_stages_give_the_tokens_of_the_cpu(name: str) -> None:
    """With chunks of prompts, and prefix hits the second time."""
    llm, executors = on_stages(decoder(name))
    prompts = PROMPTS[:3]
    with llm:
        found = [output.token_ids for output in llm.generate(prompts, SHORT)]
        again = llm.generate(prompts, SHORT)
    assert found == expected(name, prompts, SHORT)
    assert [output.token_ids for output in again] == found
    assert sum(output.num_cached_tokens for output in again) > 30
    assert all(executor.stats.graphs > 0 for executor in executors)
    assert [len(executor.model.layers) for executor in executors] == [1, 1]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_sampling_logprobs_masks_and_retraction_give_the_tokens_of_one_stage(overlap: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=5, grammar=Grammar("regex", "[0-9]{9}")),
        SamplingParams(seed=3, top_k=9, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=4, ignore_eos=True),
    ]
    found = []
    for num_stages in (1, 3):
        model = three_layers("tiny-llama")
        if num_stages == 1:
            llm, _ = on_kernels("tiny-llama", model=model)
        else:
            llm, _ = on_stages(model, num_stages, overlap, {"over_host": overlap == "off"})
            retract_often(llm)
        with llm:
            outputs = llm.generate(PROMPTS, params)
            counters = llm.engine.scheduler.counters
            assert (counters.retractions > 0) == (num_stages > 1)
        logprobs = [one.logprob for one in (outputs[3].logprobs or []) + (outputs[3].prompt_logprobs or [])[1:] if one]
        found.append(([output.token_ids for output in outputs], np.array(logprobs)))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == 4 + len(PROMPTS[3]) - 1 and np.allclose(found[0][1], found[1][1], atol=1e-4)


def test_slots_are_used_again_and_late_stops_and_embeddings_are_those_of_one_stage() -> None:
    """More requests than slots, some of which stop when another pass of theirs is in flight."""
    prompts = [[3 + number, 7] for number in range(6)]
    params = [
        SamplingParams(
            temperature=0.9, seed=n, max_tokens=1 + n, stop_token_ids=tuple(range(0, 512, 5)), ignore_eos=True
        )
        for n in range(6)
    ]
    found, vectors = [], []
    for num_stages in (1, 2):
        model = decoder("tiny-qwen3")
        llm, _ = on_kernels("x", model=model, max_running=2) if num_stages == 1 else on_stages(model, max_running=2)
        with llm:
            found.append([(one.token_ids, one.finish_reason) for one in llm.generate(prompts, params)])
            vectors.append(llm.embed([PROMPTS[0]])[0])
    assert found[0] == found[1]
    assert {reason for _, reason in found[0]} == {"stop", "length"}
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-5


def test_stages_with_adapters_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    folders = write_adapters(tmp_path, decoder("tiny-qwen3").spec)
    llm, _ = on_stages(decoder("tiny-qwen3"), engine={"max_lora_rank": 16})
    with llm:
        assert run_with_adapters(llm, folders) == expected_with_adapters("tiny-qwen3", folders)


def test_stages_replace_their_weights(tmp_path: Path) -> None:
    other = decoder("tiny-smollm")
    for layer in other.layers:
        layer.out.weight.mul_(-1)
    other.embedding.copy_(other.embedding.roll(3, 0))  # which is the head, too
    write_folder(tmp_path, other.spec, fused_tensors(other))
    llm, _ = on_stages(decoder("tiny-smollm"))
    with llm:
        before = [output.token_ids for output in llm.generate(PROMPTS[1:3], SHORT)]
        llm.update_weights(tmp_path)
        found = [output.token_ids for output in llm.generate(PROMPTS[1:3], SHORT)]
    llm, _ = on_kernels("tiny-smollm", model=other)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS[1:3], SHORT)] == found != before


def test_stages_have_the_scales_of_an_fp8_cache_of_one_stage() -> None:
    config = SchedulerConfig(**BASE, num_stages=2)
    executors, _ = stages_of(decoder("tiny-qwen3"), 2, config, kv_dtype="fp8_e4m3")
    _, whole = on_kernels("tiny-qwen3", fp8_kv=True)
    for executor in (*executors, whole):
        executor.warm_up()
    scales = [one.attention.scales for one in (*executors, whole)]
    assert scales[0] is not None and scales[1] is not None and scales[2] is not None
    assert torch.equal(torch.cat(scales[:2]), scales[2]) and not (scales[2] == 1).all()


@pytest.mark.parametrize("quantization", ["fp8", "q8"])
def test_quantized_weights_of_stages_give_the_tokens_of_one_stage(quantization: str) -> None:
    found = []
    for num_stages in (1, 2):
        model = decoder("tiny-qwen3")
        if num_stages == 1:
            llm, _ = on_kernels("tiny-qwen3", model=model, quantization=quantization)
        else:
            llm, _ = on_stages(model, engine={"quantization": quantization})
        with llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS[1:3], SHORT)])
    assert found[0] == found[1]


def test_if_no_tokens_arrive_any_more_all_passes_end_with_the_reason() -> None:
    config = SchedulerConfig(**BASE, num_stages=2)
    executors, pipes = stages_of(decoder("tiny-qwen3"), 2, config)
    stage, core = FirstCudaStage(executors[0], pipes[0], config.max_running), Scheduler(config)
    core.add(request([1, 2, 3], 3), 0.0)
    pendings = []
    for token in (40, 41):
        plan = core.plan(0.0)
        assert plan is not None
        pendings.append(stage.launch(plan))
        core.commit(plan, np.array([token], np.int32), 0.0, 0.0)
    pendings[0].wait()
    stage.check()
    stage.late_tokens.fail(RuntimeError("connection closed by peer"))  # the second pass waits for its token
    for call in (pendings[1].wait, stage.launch(plan).wait, stage.check):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            call()
    stage.close()
    assert executors[0].stats.passes == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collectives": "symmetric"}, "pp is 2 and collectives is 'symmetric', which only tp uses"),
        ({"collectives": "symmetric", "pp": 1}, "collectives is 'symmetric' and tp is 1: give tp or pp, too"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"pp": 2, **options})
