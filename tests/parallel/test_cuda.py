"""Tensor parallelism on the CUDA executor, in Triton's interpreter: the tokens are those of one CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checks.weights import write_folder
from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.engine import Engine, EngineHooks, ModelInfo
from paceline.engine.executor import Completion, DelayedPending, Executor, Pending
from paceline.engine.linear import groupwise
from paceline.engine.parallel_executor import ParallelExecutor
from paceline.engine.weight_source import WeightSource
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.layout import Shard
from paceline.model.lora import LoraFile, LoraWeights
from paceline.model.weights import load_decoder, shard_weights
from paceline.parallel.threads import ThreadGroup
from paceline.request import Grammar, SamplingParams
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Column, Plan
from paceline.shared_pages import SharedPages
from paceline.text.synthetic import synthetic_tokenizer
from tests.cluster.disaggregated import Pair
from tests.engine.cuda.interpreted import BASE, CONTEXT, GREEDY, INTERPRETED, PROMPTS, decoder, expected, small_sizes
from tests.engine.cuda.test_int4 import dequantized, on_cpu
from tests.engine.cuda.test_lora import expected as expected_with_adapters
from tests.engine.cuda.test_lora import run as run_with_adapters
from tests.engine.cuda.test_lora import write_adapters
from tests.fused import fused_tensors
from tests.parallel.ranks import ThreadRanks
from tests.resolving import keep_stored, plan_of
from tests.tiny_gguf import save_gguf
from tests.tiny_int4 import AWQ, save_int4

pytestmark = INTERPRETED

# The interpreter runs one kernel at a time in a process: a rank holds this lock except while it waits for others.
LOCK = threading.RLock()


class TurnGroup(ThreadGroup):
    def _together(self, tensor: Tensor, function: Callable[[list[Tensor]], Tensor]) -> Tensor:
        copy = tensor.clone()  # the other rank may read it when this one has gone on
        LOCK.release()
        try:
            return super()._together(copy, function)
        finally:
            LOCK.acquire()


class TurnPending:
    def __init__(self, pending: Any) -> None:
        self._pending: DelayedPending = pending

    def drafts(self) -> Drafts:
        return self._pending.drafts()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return self._pending.mask_buffer(num_masks, num_words)

    def sample(self, masks: Masks) -> None:
        with LOCK:
            self._pending.sample(masks)

    def wait(self) -> Any:
        return self._pending.wait()


class TurnExecutor(Executor):
    """Holds the lock while it launches, which here is while it computes."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self.capabilities = executor.capabilities

    @property
    def may_capture(self) -> bool:
        return self._executor.may_capture

    def let_capture(self, may_capture: bool) -> None:
        self._executor.let_capture(may_capture)

    def launch(self, plan: Plan) -> Pending:
        with LOCK:
            return self._executor.launch(plan)

    def prepare(self, plan: Plan) -> None:
        with LOCK:
            self._executor.prepare(plan)

    def launch_delayed(self, plan: Plan) -> TurnPending:
        with LOCK:
            return TurnPending(self._executor.launch_delayed(plan))

    def run_background_work(self) -> bool:
        with LOCK:
            return self._executor.run_background_work()

    def arrange_adapter(self, file: LoraFile) -> LoraWeights:
        return self._executor.arrange_adapter(file)

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        self._executor.add_adapter(adapter, file, weights)

    @property
    def host_pages(self) -> SharedPages | None:
        return self._executor.host_pages

    def map_pages(self, target: SharedPages) -> None:
        self._executor.map_pages(target)

    def unmap_pages(self, target: SharedPages) -> None:
        self._executor.unmap_pages(target)

    def export_pages(self, pages: Column, target: SharedPages, targets: Column) -> Completion:
        with LOCK:
            return self._executor.export_pages(pages, target, targets)

    def after_launched(self) -> Completion:
        return self._executor.after_launched()

    def read_weights(self, source: WeightSource) -> Decoder:
        return self._executor.read_weights(source)

    def load_weights(self, decoder: Decoder) -> None:
        with LOCK:
            self._executor.load_weights(decoder)


def on_ranks(name: str, size: int, **options: Any) -> tuple[LLM, list[CudaExecutor]]:
    engine, executors = engine_of(name, size, **options)
    return LLM.from_engine(engine), executors


def engine_of(
    name: str, size: int, role: str = "both", hooks: EngineHooks | None = None, **options: Any
) -> tuple[Engine, list[CudaExecutor]]:
    """drafts: the draft model of each rank. load: the decoder of a rank; otherwise it has its part of a random one."""
    load: Callable[[TurnGroup | None], Decoder] | None = options.pop("load", None)
    whole, quantization = decoder(name) if load is None else load(None), options.pop("quantization", "none")
    max_lora_rank, drafts = options.pop("max_lora_rank", 0), options.pop("drafts", [None] * size)
    config = SchedulerConfig(**{**BASE, **options})
    executors = []
    for group, draft in zip(TurnGroup.of_size(size), drafts, strict=True):
        part = _part(whole, group) if load is None else load(group)
        executors.append(
            build_cuda(
                part,
                EngineConfig(max_lora_rank=max_lora_rank, role=role, quantization=quantization),
                config,
                None,
                prefill_sizes=(16,),
                draft=draft,
                **small_sizes(),
            )[0]
        )
    executor: Executor = TurnExecutor(executors[0])
    if size > 1:
        executor = ParallelExecutor(executor, ThreadRanks([TurnExecutor(one) for one in executors[1:]]))
    vocab_size = whole.spec.vocab_size
    tokenizer = synthetic_tokenizer(vocab_size)
    spec = whole.whole_spec
    rank_bytes = tuple(Shard(rank, size).spec(spec).kv_bytes_per_token(4) for rank in range(size))
    info = ModelInfo(dtype="float32", kv_rank_bytes=rank_bytes)
    scheduler = Scheduler(config)
    return Engine(scheduler, executor, tokenizer, vocab_size=vocab_size, spec=spec, info=info, hooks=hooks), executors


def _part(whole: Decoder, group: TurnGroup) -> Decoder:
    weights = shard_weights(whole.whole_spec, fused_tensors(whole), group.shard)
    return Decoder(whole.whole_spec, weights, max_positions=CONTEXT, group=group)


@pytest.mark.parametrize("max_rows", [2, 224])
@pytest.mark.parametrize("quantization", ["gguf", "int4"])
def test_ranks_divide_weights_in_groups(
    tmp_path: Path, quantization: str, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GGUF file and of a 4-bit checkpoint, converted in registers and expanded. Ranks have different numbers."""
    monkeypatch.setattr(groupwise, "MAX_GROUPWISE_ROWS", max_rows)
    path = tmp_path / "model.gguf"
    if quantization == "gguf":
        save_gguf(path)
    else:
        save_int4(path, AWQ, {"head_dim": 32})
    assert plan_of(path, "cuda", quantization=quantization, tp=2).is_stored
    keep = keep_stored(path, quantization)

    def load(group: TurnGroup | None) -> Decoder:
        return load_decoder(path, dtype="float32", max_positions=CONTEXT, group=group, keep=keep)

    expected = on_cpu(dequantized(load(None)))
    llm, executors = on_ranks("", 2, load=load, quantization=quantization)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    assert all(one.model.is_packed and not one.model.uses_pdl(1) for one in executors)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tiny-qwen3", 2),
        ("tiny-qwen2", 2),
        ("tiny-smollm", 4),
        ("tiny-qwen2-moe", 2),
        ("tiny-olmo2", 4),
        ("tiny-gemma2", 2),
        ("tiny-gpt-oss", 2),
    ],
)
def test_ranks_give_the_tokens_of_the_cpu(name: str, size: int) -> None:
    llm, executors = on_ranks(name, size)
    prompts, params = PROMPTS[:3], replace(GREEDY, max_tokens=3)
    with llm:
        found = [output.token_ids for output in llm.generate(prompts, params)]
    assert found == expected(name, prompts, params)
    tokens = [executor.state.token_pool for executor in executors]
    assert all(torch.equal(one, tokens[0]) for one in tokens), "all ranks have the same tokens"
    assert all(executor.stats.graphs > 0 for executor in executors)


def test_ranks_capture_the_same_graphs_and_none_while_the_device_of_rank_0_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the other rank sees: here its device is busy when that of rank 0 is idle."""
    busy: set[int] = {0}  # ranks
    llm, executors = on_ranks("tiny-qwen3", 2)
    for device in executors:
        device.run_background_work = lambda: False  # type: ignore[method-assign]
    monkeypatch.setattr(CudaExecutor, "may_capture", property(lambda device: executors.index(device) not in busy))

    def graphs() -> list[list[Any]]:
        return [list(device.graphs._graphs) for device in executors]

    prompts, params = PROMPTS[:1], replace(GREEDY, max_tokens=6)
    with llm:
        before = graphs()
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected("tiny-qwen3", prompts, params)
        assert graphs() == before, "rank 0 is busy"
        busy = {1}
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected("tiny-qwen3", prompts, params)
        found = graphs()
    assert found[0] == found[1] and len(found[0]) > len(before[0])


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_pages_of_all_ranks_travel_to_another_engine(tmp_path: Path, transport: str) -> None:
    """Prefill/decode disaggregation; each rank copies its part."""

    def make(**options: Any) -> Engine:
        return engine_of("tiny-qwen3", 2, **options)[0]

    prompts, params = [PROMPTS[0], [*range(3, 30)]], replace(GREEDY, max_tokens=3)
    with Pair(tmp_path, transport, make=make, options={"max_swap_pages": 2}) as pair:
        answers = [pair.submit(prompt, 3) for prompt in prompts]
        for answer in answers:
            answer.result(200)
        assert [answer.token_ids for answer in answers] == expected("tiny-qwen3", prompts, params)
        counters = pair.decode.scheduler.counters
        assert counters.received_pages > 6 and counters.fetched_tokens > 0, "what arrived was used"
        assert pair.remote.num_completed == len(prompts) and not pair.remote.failures
        pair.check()


def test_ranks_with_adapters_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    folders = write_adapters(tmp_path, decoder("tiny-qwen3").spec)
    llm, executors = on_ranks("tiny-qwen3", 2, max_lora_rank=16)
    with llm:
        assert run_with_adapters(llm, folders) == expected_with_adapters("tiny-qwen3", folders)
    tokens = [executor.state.token_pool for executor in executors]
    assert torch.equal(tokens[0], tokens[1]), "all ranks have the same tokens"


def test_ranks_replace_their_weights(tmp_path: Path) -> None:
    other = decoder("tiny-qwen3")
    for layer in other.layers:
        layer.out.weight.mul_(-1)
    write_folder(tmp_path, other.spec, fused_tensors(other))
    prompts, params = PROMPTS[:2], replace(GREEDY, max_tokens=3)
    found = []
    for size in (1, 2):
        llm, executors = on_ranks("tiny-qwen3", size)
        with llm:
            before = [output.token_ids for output in llm.generate(prompts, params)]
            llm.update_weights(tmp_path)
            found.append([output.token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1] != before == expected("tiny-qwen3", prompts, params)
    assert torch.equal(executors[0].state.token_pool, executors[1].state.token_pool), "all ranks have the same tokens"


def test_masks_filters_and_drafts_give_the_tokens_of_one_rank() -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=5, grammar=Grammar("regex", "[0-9]{9}")),
        SamplingParams(seed=3, top_k=9, max_tokens=4, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.2, max_tokens=4, ignore_eos=True),
    ]
    found = []
    for size in (1, 2):
        llm, _ = on_ranks("tiny-llama", size, draft_tokens=2)
        with llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("is_same", [True, False])
def test_every_rank_has_the_whole_draft_model(is_same: bool) -> None:
    """If it is the target model, all drafts are accepted. If ranks disagree, they still verify the same drafts."""
    drafts = [decoder("tiny-qwen3"), decoder("tiny-qwen3")]
    for layer in drafts[1].layers:
        layer.out.weight.mul_(1 if is_same else -1)
    llm, executors = on_ranks("tiny-qwen3", 2, drafts=drafts, draft_tokens=2)
    prompts, params = PROMPTS[:3], replace(GREEDY, max_tokens=5)
    with llm:
        found = [output.token_ids for output in llm.generate(prompts, params)]
        counters = llm.engine.scheduler.counters
    assert found == expected("tiny-qwen3", prompts, params)
    assert counters.drafted_tokens >= 6 and (counters.accepted_tokens == counters.drafted_tokens) is is_same
    assert torch.equal(executors[0].state.token_pool, executors[1].state.token_pool), "all ranks have the same tokens"


def test_one_rank_in_a_group_computes_what_a_model_without_a_group_does() -> None:
    llm, _ = on_ranks("tiny-qwen3", 1)
    with llm:
        found = [output.token_ids for output in llm.generate(PROMPTS[:2], GREEDY)]
    assert found == expected("tiny-qwen3", PROMPTS[:2], GREEDY)
    assert Shard(0, 1).spec(decoder("tiny-qwen3").spec) == decoder("tiny-qwen3").spec
