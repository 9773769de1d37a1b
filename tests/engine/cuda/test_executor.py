"""The CUDA device on the CPU, in Triton's interpreter: the same tokens as the CPU executor, whatever happens."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.build import assemble
from paceline.engine.cuda import graphs as cuda_graphs
from paceline.engine.cuda.graphs import CudaGraphs, GraphKey, buckets
from paceline.engine.cuda.inputs import PlanPacker, ShareRule
from paceline.engine.cuda.streams import HostStreams, _HostEvent
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.kernels.decode_attention import NONE_SHARED, decode_attention
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.slot_state import SlotState, apply_diff_reference
from paceline.llm import LLM
from paceline.request import FinishReason, Request, SamplingParams
from paceline.scheduler.invariants import check as check_invariants
from paceline.scheduler.plan import Join, Plan, Sharing
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import (
    BASE,
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    RNG,
    decoder,
    expected,
    on_kernels,
    retract_often,
    rooms_of,
    watch_packed,
)

pytestmark = [*INTERPRETED, IN_BOUNDS]


def test_an_upload_waits_for_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the results of the pass before it would wait for that pass, and the next one would begin late."""
    waited: list[str] = []
    for name in ("engine", "copy", "results", "side"):
        monkeypatch.setattr(HostStreams, name, name)
    monkeypatch.setattr(_HostEvent, "wait", lambda self, stream: waited.append(stream))
    llm, _ = on_kernels("tiny-qwen3")
    with llm:
        llm.generate(PROMPTS, GREEDY)
    assert set(waited) == {"engine", "results"}


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2", "tiny-smollm3"])
def test_kernels_and_the_cpu_say_the_same(name: str) -> None:
    """Chunked prompts, mixed passes, decodes by graph, then hits: biases, windows, layers without rotation."""
    wanted = expected(name, PROMPTS, GREEDY)
    llm, device = on_kernels(name)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        assert 0 < device.stats.graphs < device.stats.passes
        again = llm.generate(PROMPTS[:1], GREEDY)[0]
        assert again.token_ids == wanted[0] and again.num_cached_tokens == 20


def test_the_graph_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    captured: list[int] = []
    graphs = CudaGraphs(HostStreams(), 8, lambda size, kind: None, lambda size, kind: captured.append(size))
    for size in (1, 2, 1, 4, 1, 2):
        graphs.graph(size, GraphKey())
    assert captured == [1, 2, 4, 2] and [size for size, _ in graphs._graphs] == [1, 2]


def test_shared_reads_change_no_token() -> None:
    """Rows below two prefixes of 40 tokens, one of them below another, in units of up to 16 tokens."""
    rng = np.random.default_rng(7)
    long, other = rng.integers(3, 512, 40).tolist(), rng.integers(3, 512, 33).tolist()
    prompts = [[*long, 7], [*other, 4, 5], [*long, 9, 9], [*long[:20], 5], [*other, 6], [*long, *range(20, 30)]]
    params = [replace(GREEDY, max_tokens=count) for count in (4, 2, 3, 4, 3, 4)]
    options = {"num_pages": 96, "max_running": 6, "max_batch_tokens": 64, "max_prefill_tokens": 64}
    found = []
    for shared in (True, False):
        llm, device = on_kernels("tiny-qwen3", shared_reads=shared, **options)
        packed = watch_packed(device)
        with llm:
            llm.generate([long, other], replace(GREEDY, max_tokens=1))
            found.append([output.token_ids for output in llm.generate(prompts, params)])
        assert (device.stats.saved_tokens > 0) == shared
        assert any(one.shared_tiles.count for one in packed) == shared
        assert any(kind.tile for _, kind in device.graphs._graphs) == shared
    assert found[0] == found[1] == [expected("tiny-qwen3", [p], q)[0] for p, q in zip(prompts, params, strict=True)]


def test_where_nothing_is_shared_nothing_more_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [RNG.integers(3, 512, 20).tolist() for _ in range(2)]
    parts: list[list[int]] = []
    for shared in (True, False):
        llm, _ = on_kernels("tiny-qwen3", shared_reads=shared)
        launched: list[int] = []

        def launching(*args: Any, launched: list[int] = launched, **options: Any) -> None:
            launched.append(options["part"])
            decode_attention(*args, **options)

        monkeypatch.setattr("paceline.engine.cuda.executor.decode_attention", launching)
        with llm:
            llm.generate(prompts, replace(GREEDY, max_tokens=2))
        parts.append(launched)
    assert parts[0] == parts[1] and set(parts[0]) == {NONE_SHARED}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter reduces with numpy, which warns of NaN
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_request_whose_logits_are_no_numbers_ends_and_harms_no_other(on_cpu: bool) -> None:
    """Token 7 has no embedding. Whoever says it leaves NaN in memory that others get after it."""
    model = decoder("tiny-qwen3")
    model.embedding = model.embedding.clone()
    model.embedding[7] = torch.nan
    good = [prompt for prompt in PROMPTS if 7 not in prompt]
    bad = [[5, 6, 7], [*range(10, 25), 7, 3]]
    options = {"num_pages": 24}  # so few that good ones get the bad ones' pages
    if on_cpu:
        tokenizer = synthetic_tokenizer(model.spec.vocab_size)
        config = EngineConfig(device="cpu", threads=1)
        llm = LLM.from_engine(assemble(model, tokenizer, config, {**BASE, **options}))
    else:
        llm, _ = on_kernels("tiny-qwen3", model=model, **options)
    plain = expected("tiny-qwen3", good, GREEDY)
    assert 7 not in [token for tokens in plain for token in tokens], "else they would end, too"
    filtered = SamplingParams(top_k=5, top_p=0.9, logprobs=2, max_tokens=4, ignore_eos=True)

    class Heard:
        def __init__(self) -> None:
            self.pieces: list[OutputDelta] = []
            self.ended = threading.Event()

        def put(self, piece: OutputDelta) -> None:
            self.pieces.append(piece)
            if piece.finish_reason is not None:
                self.ended.set()

        def refuse(self, error: Exception) -> None:
            raise AssertionError(error)

    with llm:
        for params in (GREEDY, filtered):
            heard = [Heard() for _ in bad]
            for prompt, sink in zip(bad, heard, strict=True):
                llm.engine.submit(Job(llm.engine.encode(prompt), params, stream=False), sink)
            assert [output.token_ids for output in llm.generate(good, GREEDY)] == plain
            for sink in heard:
                assert sink.ended.wait(20)
                assert sink.pieces[-1].finish_reason is FinishReason.ERROR
                assert "logits contain NaN" in str(sink.pieces[-1].error)


def test_a_graph_captured_between_passes_that_share_leaves_no_trace() -> None:
    """The one row with a filter ends early, so another kind of graph is captured while shared units lie there."""
    shared = RNG.integers(3, 512, 40).tolist()
    prompts = [[*shared, 7], [*shared, 9, 9], [*shared, 5]]
    params = [replace(GREEDY, max_tokens=6), SamplingParams(max_tokens=3, seed=2, top_k=1, ignore_eos=True)]
    llm, device = on_kernels("tiny-qwen3")
    capture, found = device.graphs._run_empty, []

    def capturing(size: int, kind: Any) -> None:
        num_shared = int(device._units[0].num_shared)
        capture(size, kind)
        assert int(device._units[0].num_shared) == num_shared
        assert not device._attention.arrived.any()
        found.append(num_shared)

    device.graphs._run_empty = capturing
    with llm:
        llm.generate(shared, replace(GREEDY, max_tokens=1))
        outputs = llm.generate(prompts, [params[0], params[1], params[0]])
    assert any(found)
    assert outputs[2].token_ids == expected("tiny-qwen3", prompts[2:], params[0])[0]


def test_serial_small_chunks_and_pages_change_nothing() -> None:
    llm, _ = on_kernels("tiny-qwen3", overlap="off", chunk_tokens=5, page_size=1, num_pages=256)
    with llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert found == expected("tiny-qwen3", PROMPTS, GREEDY)


def test_retracted_requests_say_the_same() -> None:
    llm, _ = on_kernels("tiny-qwen3")
    retract_often(llm)
    with llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert llm.engine.scheduler.counters.retractions > 2
    assert found == expected("tiny-qwen3", PROMPTS, GREEDY)


@pytest.mark.parametrize("by_graph", [False, True])
def test_a_disturbed_run_stays_in_bounds(by_graph: bool, prompts_by_graph: dict[str, Any]) -> None:
    """Retractions and aborts while passes are in flight, too few pages, and rows with filters that come and go."""
    rng = random.Random(3)
    long = [rng.randrange(3, 512) for _ in range(50)]
    prompts, params = [], []
    for _ in range(8):
        prefix = long[: rng.choice((0, 20, 50, 50))]
        prompts.append([*prefix, *(rng.randrange(3, 512) for _ in range(rng.randint(1, 20)))])
        options: dict[str, Any] = {"max_tokens": rng.randint(2, 6), "ignore_eos": True}
        options |= rng.choice(({"temperature": 0}, {"top_k": rng.choice((1, 40))}, {"top_p": 0.9}, {"seed": 5}))
        if rng.random() < 0.5:
            options |= {"stop_token_ids": tuple(range(0, 512, 9)), "min_tokens": min(2, options["max_tokens"])}
        params.append(SamplingParams(**options))
    llm, device = on_kernels("tiny-qwen3", num_pages=44, max_running=4, **(prompts_by_graph if by_graph else {}))
    scheduler = llm.engine.scheduler
    plan, steps = scheduler.plan, iter(range(10**6))

    def planning(now: float) -> Plan | None:
        running = [*scheduler.admission.decoding, *scheduler.admission.prefilling]
        step = next(steps)
        if running and step % 3 == 2 and (victim := rng.choice(running)).retractions < 2:
            scheduler._retract(victim, now, "a test")
        elif running and step in (4, 7):
            scheduler.abort(rng.choice(running).id, now)
        found = plan(now) or plan(now)
        check_invariants(scheduler)
        return found

    scheduler.plan = planning  # type: ignore[method-assign]
    with llm:
        outputs = llm.generate(prompts, params)
        assert scheduler.counters.retractions > 2 and device.stats.saved_tokens > 0
    assert FinishReason.ABORT in {output.finish_reason for output in outputs}
    assert any(kind.tile for kind in rooms_of(device)) == by_graph
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        if one.temperature == 0:
            assert output.token_ids == expected("tiny-qwen3", [prompt], one)[0][: len(output.token_ids)]


def test_buckets_reach_every_batch() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(256)[-4:] == [160, 192, 224, 256]


def plan_of(slots: list[int], starts: list[int], lengths: list[int], **fields: Any) -> Plan:
    def column(values: Any) -> Any:
        return np.array(values, np.int32)

    none = column([])
    given = {"joins": (), "page_slots": none, "page_indices": none, "page_ids": none, **fields}
    return Plan(
        step=0, slots=column(slots), starts=column(starts), lengths=column(lengths),
        max_lengths=column([start + length + 30 for start, length in zip(starts, lengths, strict=True)]),
        samples=np.ones(len(slots), np.bool_), num_tokens=sum(lengths), num_context_tokens=0,
        **{"num_decodes": len(slots), **given},
    )  # fmt: skip


def test_a_steady_decode_sends_nothing() -> None:
    packer = PlanPacker(4, 100, 8)
    join = Join.of(Request("a", np.arange(5)), 2)
    first = packer.pack(plan_of([2], [0], [5], joins=(join,)))
    assert not first.is_decode and first.parts[0][:6].tolist() == [0, 0, 1, 1, 5, 1]
    second = packer.pack(plan_of([2], [5], [1]))
    assert second.is_decode and not second.parts[0].any()


def test_of_two_writes_to_one_page_entry_the_later_counts() -> None:
    packer = PlanPacker(4, 100, 8)
    state = SlotState.empty(4, 8, 2, 4, "cpu")
    pages = {name: np.array(values, np.int32) for name, values in
             {"page_slots": [1, 0, 1], "page_indices": [2, 2, 2], "page_ids": [7, 8, 9]}.items()}  # fmt: skip
    apply_diff_reference(packer.pack(plan_of([1], [0], [1], **pages)).parts[0], state)
    assert state.page_table[:2, 2].tolist() == [8, 9]


def test_two_rows_share_only_what_the_cache_does_not_keep_for_them() -> None:
    rule = ShareRule(group=2, max_units=64, chunks=(16,), least_saving=0, least_of_pairs=64)
    for count, common, is_shared in ((2, 48, False), (2, 64, True), (3, 48, True)):
        sharing = Sharing(1, np.arange(count, dtype=np.int32), np.full(count - 1, common, np.int32))
        plan = plan_of([0, 1, 2], [90] * 3, [1] * 3, num_decodes=3, sharing=sharing)
        assert (rule.choose(plan, 3)[0] is not None) == is_shared


def test_a_prompt_of_one_token_among_decodes_shares_nothing_of_who_was_there_before() -> None:
    """A graph runs it as a row like the others, so the device must know that none of its chunks are in shared units."""
    packer = PlanPacker(4, 100, 8, ShareRule(group=2, max_units=64, chunks=(16,), least_saving=0, least_of_pairs=16))
    state, units = SlotState.empty(4, 64, 2, 4, "cpu"), DecodeUnits.empty(4, 64, 64, "cpu")
    for starts, num_decodes, shared in (([40, 40, 40], 3, [0, 1, 2]), ([41, 41, 5], 2, [0, 1])):
        rows = np.array(shared, np.int32)
        sharing = Sharing(len(rows), rows, np.full(len(rows) - 1, 35, np.int32))
        plan = plan_of([0, 1, 2], starts, [1, 1, 1], num_decodes=num_decodes, sharing=sharing)
        packed = packer.pack(plan)
        assert packed.is_decode
        apply_diff_reference(packed.parts[0], state, units)
        assert units.shared_chunks[:3].tolist() == [2 if row in shared else 0 for row in range(3)]
