"""The CUDA executor on the CPU, in Triton's interpreter: the same tokens as the CPU executor in all circumstances."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cuda import graphs as cuda_graphs
from paceline.engine.cuda.graphs import CudaGraphs, GraphKey, buckets
from paceline.engine.cuda.inputs import PlanPacker, token_sizes
from paceline.engine.cuda.layers import CudaExperts
from paceline.engine.cuda.sharing import ShareRule
from paceline.engine.cuda.streams import HostStreams, _HostEvent
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.kernels.decode_attention import NONE_SHARED, decode_attention
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.layouts import DiffHeader
from paceline.kernels.slot_state import SlotState, apply_diff_reference
from paceline.llm import LLM
from paceline.model.decoder import Decoder, MixtureOfExperts
from paceline.request import FinishReason, Request, SamplingParams
from paceline.scheduler.invariants import check as check_invariants
from paceline.scheduler.plan import NO_CHANGES, Join, Plan, Sharing, Swap, TableChanges
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import (
    BASE,
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    RNG,
    SHARED,
    decoder,
    expected,
    on_kernels,
    prefill_keys,
    record_packed,
    retract_often,
)

pytestmark = [*INTERPRETED, IN_BOUNDS]


def test_an_upload_waits_for_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the results stream it would wait for the previous pass, and the next one would begin late."""
    waited: list[str] = []
    for name in ("engine", "copy", "results", "side", "shared"):
        monkeypatch.setattr(HostStreams, name, name)
    monkeypatch.setattr(_HostEvent, "wait", lambda self, stream: waited.append(stream))
    llm, _ = on_kernels("tiny-qwen3")
    with llm:
        llm.generate(PROMPTS, GREEDY)
    assert set(waited) == {"engine", "results"}


def test_the_state_of_a_slot_is_cleared_where_a_request_joins() -> None:
    llm, device = on_kernels("tiny-llama")
    states = torch.full((4, 1, 64), 255, dtype=torch.uint8)
    device.attention.cache.slotted.append(states)
    with llm:
        llm.generate(PROMPTS[:2], GREEDY)
        assert states.amax((1, 2)).tolist() == [0, 0, 255, 255]


def test_a_closed_engine_holds_no_kv_cache() -> None:
    llm, device = on_kernels("tiny-qwen3")
    with llm:
        llm.generate(PROMPTS[:1], GREEDY)
        assert device.kv[0].untyped_storage().nbytes() > 0
    assert device.kv[0].untyped_storage().nbytes() == 0, "somebody may keep it and make another engine"


OTHERS = ["tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-phi3", "tiny-olmo2", "tiny-olmoe", "tiny-granite"]
OTHERS += ["tiny-gpt-oss"]


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-qwen2", "tiny-smollm3", "tiny-qwen3-moe", "tiny-qwen2-moe", *OTHERS]
)
@pytest.mark.usefixtures("graphs_at_first_use")
def test_kernels_give_the_same_tokens_as_the_cpu(name: str) -> None:
    """Chunked prefill, mixed batches, decode graphs, cache hits; every option of every family."""
    params, prompts = replace(GREEDY, max_tokens=3), PROMPTS[:2] if name in OTHERS else PROMPTS
    wanted = expected(name, prompts, params)
    llm, device = on_kernels(name)
    with llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == wanted
        assert 0 < device.stats.graphs < device.stats.passes
        again = llm.generate(PROMPTS[:1], params)[0]
        assert again.token_ids == wanted[0] and again.num_cached_tokens == 20
        assert sum(map(len, device.expert_rows)) == sum(one.count for one in device.model.spec.expert_layers)


def test_sinks_and_biases_of_experts_are_replaced_in_place() -> None:
    other = decoder("tiny-gpt-oss")
    for layer in other.layers:
        assert isinstance(layer.mlp, MixtureOfExperts) and layer.sinks is not None
        for one in (layer.sinks, layer.mlp.router_bias, layer.mlp.expert_gate_up_bias, layer.mlp.expert_down_bias):
            assert one is not None
            one.copy_(one.flip(0))
    llm, device = on_kernels("tiny-gpt-oss")
    with llm:
        device.load_weights(other)
        for mine, theirs in zip(device.model.layers, other.layers, strict=True):
            assert isinstance(mine.block, CudaExperts) and isinstance(theirs.mlp, MixtureOfExperts)
            routed = mine.block.routed
            assert torch.equal(mine.sinks, theirs.sinks)
            assert torch.equal(routed.router_bias, theirs.mlp.router_bias)
            assert torch.equal(routed.gate_up_bias, theirs.mlp.expert_gate_up_bias)
            assert torch.equal(routed.down_bias, theirs.mlp.expert_down_bias)


def test_weights_of_experts_are_replaced_in_place() -> None:
    def other() -> Decoder:
        changed = decoder("tiny-qwen2-moe")
        for layer in changed.layers:
            assert isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.shared is not None
            for weight in (
                layer.mlp.router,
                layer.mlp.expert_gate_up,
                layer.mlp.expert_down,
                layer.mlp.shared.down.weight,
            ):
                weight.copy_(weight.flip(0))
            layer.mlp.shared.gate_up.weight.neg_()
            layer.mlp.shared_gate.neg_()
        return changed

    found, prompts, params = [], [PROMPTS[1], PROMPTS[3]], replace(GREEDY, max_tokens=3)
    for model, weights in ((other(), None), (decoder("tiny-qwen2-moe"), other())):
        llm, device = on_kernels("tiny-qwen2-moe", model=model)
        with llm:
            if weights is not None:
                device.load_weights(weights)
            found.append([output.token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1] != expected("tiny-qwen2-moe", prompts, params)


def test_padding_uses_no_expert() -> None:
    llm, device = on_kernels("tiny-mixtral", prefix_cache=False)
    prompts = [prompt[:9] for prompt in PROMPTS[:3]]
    with llm:
        llm.generate(prompts, replace(GREEDY, max_tokens=3))
        # Three rows run in a bucket of four. The last layer computes only tokens that are sampled from.
        spec, (first, last) = device.model.spec, device.expert_rows
        assert sum(first) == spec.expert_layers[0].per_token * (sum(map(len, prompts)) + 3 * 2)
        assert sum(last) == spec.expert_layers[0].per_token * 3 * 3


def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    graphs, missing = CudaGraphs(HostStreams(), 8, lambda size, key: None), []
    for size in (1, 2, 1, 4, 1, 2):
        if graphs.find(size, GraphKey(), may_capture=False) is None:
            missing.append(size)
            graphs.capture(size, GraphKey())
    assert missing == [1, 2, 4, 2] and [size for size, _ in graphs._graphs] == [1, 2]


def test_no_graph_is_captured_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, the driver may wait for running passes before it instantiates a graph."""
    monkeypatch.setattr(_HostEvent, "query", lambda self: False)
    llm, device = on_kernels("tiny-qwen3")
    device.run_background_work = lambda: False  # type: ignore[method-assign]
    with llm:
        before = len(device.graphs._graphs)
        found = llm.generate(PROMPTS[:1], GREEDY)[0].token_ids
        assert found == expected("tiny-qwen3", PROMPTS[:1], GREEDY)[0]
        assert len(device.graphs._graphs) == before
        monkeypatch.undo()
        llm.generate(PROMPTS[:1], GREEDY)
        assert len(device.graphs._graphs) > before


def test_a_pass_without_a_graph_is_launched_and_captured_after_it_was_missed_a_few_times() -> None:
    params = replace(GREEDY, max_tokens=cuda_graphs.CAPTURE_AFTER + 3)
    llm, device = on_kernels("tiny-qwen3")
    events: list[str] = []
    run_pass, capture = device.run_pass, device.graphs.capture

    def launching(rows: int, key: GraphKey) -> None:
        if key.prefill is None:
            events.append("launch")
        run_pass(rows, key)

    def capturing(size: int, key: GraphKey) -> None:
        events.append("capture")
        capture(size, key)

    device.run_pass, device.graphs.capture = launching, capturing  # type: ignore[method-assign]
    device.run_background_work = lambda: False  # type: ignore[method-assign]
    with llm:
        found = llm.generate(PROMPTS[:1], params)[0].token_ids
    assert found == expected("tiny-qwen3", PROMPTS[:1], params)[0]
    assert events[:2] == ["launch"] * cuda_graphs.CAPTURE_AFTER + ["capture"] and events.count("capture") == 1
    assert device.stats.graphs == 2, "the last decodes ran as a graph"


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2"])
def test_shared_reads_change_no_token(name: str) -> None:
    """Rows with two shared prefixes of 33 and 40 tokens, one row with half of a prefix, in units of up to 16 tokens.
    Qwen2 has a layer with a sliding window, which shares nothing, and one without."""
    rng = np.random.default_rng(7)
    long, other = rng.integers(3, 512, 40).tolist(), rng.integers(3, 512, 33).tolist()
    prompts = [[*long, 7], [*other, 4, 5], [*long, 9, 9], [*long[:20], 5], [*other, 6], [*long, *range(20, 30)]]
    params = [replace(GREEDY, max_tokens=count) for count in (3, 2, 3, 3, 2, 3)]
    options = {"num_pages": 96, "max_running": 6, "max_batch_tokens": 64, "max_prefill_tokens": 64}
    found = []
    for shared in (True, False) if name == "tiny-qwen3" else (True,):
        llm, device = on_kernels(name, shared_reads=shared, **options)
        packed = record_packed(device)
        with llm:
            llm.generate([long, other], replace(GREEDY, max_tokens=1))
            found.append([output.token_ids for output in llm.generate(prompts, params)])
        assert (device.stats.saved_tokens > 0) == shared
        assert any(one.shared_tiles.count for one in packed) == (shared and name == "tiny-qwen3")
        assert any(key.shared_block_m for _, key in device.graphs._graphs) == shared
    wanted = [expected(name, [p], q)[0] for p, q in zip(prompts, params, strict=True)]
    assert all(one == wanted for one in found)


def test_rows_that_diverge_at_several_depths_read_each_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of 24, 44 and 64 tokens within each other. One row ends its prompt with the deepest, and decodes the
    position right behind the shared units."""
    long = np.random.default_rng(8).integers(3, 512, 64).tolist()
    prompts = [[*long[:24], 5], [*long[:44], 6], [*long[:44], 7, 7], [*long, 8], [*long, 9, 9], long]
    params = replace(GREEDY, max_tokens=3)
    choose, seen = ShareRule.choose, set()

    def choosing(rule: ShareRule, plan: Plan, num_decodes: int) -> Any:
        shared, block_m = choose(rule, plan, num_decodes)
        if shared is not None:
            starts = plan.starts[:num_decodes].tolist()
            seen.update((*words, start) for words, start in zip(shared.rows.tolist(), starts, strict=True))
        return shared, block_m

    monkeypatch.setattr(ShareRule, "choose", choosing)
    llm, _ = on_kernels("tiny-qwen3", num_pages=128, max_running=6, max_batch_tokens=64, max_prefill_tokens=64)
    with llm:
        llm.generate(long, replace(GREEDY, max_tokens=1))
        found = [output.token_ids for output in llm.generate(prompts, params)]
    assert found == [expected("tiny-qwen3", [prompt], params)[0] for prompt in prompts]
    assert {24, 44} <= {tokens for tokens, _, _ in seen} and max(segments for _, segments, _ in seen) >= 3, seen
    assert any(0 < tokens == start for tokens, _, start in seen), seen


def test_without_shared_prefixes_shared_reads_add_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [RNG.integers(3, 512, 20).tolist() for _ in range(2)]
    parts: list[list[int]] = []
    for shared in (True, False):
        llm, _ = on_kernels("tiny-qwen3", shared_reads=shared)
        launched: list[int] = []

        def launching(*args: Any, launched: list[int] = launched, **options: Any) -> None:
            launched.append(options["part"])
            decode_attention(*args, **options)

        monkeypatch.setattr("paceline.engine.cuda.attention.decode_attention", launching)
        with llm:
            llm.generate(prompts, replace(GREEDY, max_tokens=2))
        parts.append(launched)
    assert parts[0] == parts[1] and set(parts[0]) == {NONE_SHARED}


def on_either(on_cpu: bool, model: Decoder, **options: Any) -> LLM:
    """On the CPU executor, or on the CUDA executor in the interpreter."""
    if not on_cpu:
        return on_kernels("tiny-qwen3", model=model, **options)[0]
    tokenizer = synthetic_tokenizer(model.spec.vocab_size)
    return LLM.from_engine(assemble(model, tokenizer, EngineConfig(device="cpu", threads=1), {**BASE, **options}))


# The interpreter reduces with numpy, which warns of NaN.
NAN_IS_FINE = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EXECUTORS = pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "kernels"])


@NAN_IS_FINE
@EXECUTORS
def test_a_request_with_nan_logits_ends_and_does_not_affect_others(on_cpu: bool) -> None:
    """The embedding of token 7 is NaN. A request with it leaves NaN in pages that other requests get afterwards."""
    model = decoder("tiny-qwen3")
    model.embedding = model.embedding.clone()
    model.embedding[7] = torch.nan
    good = [prompt for prompt in PROMPTS if 7 not in prompt]
    bad = [[5, 6, 7], [*range(10, 25), 7, 3]]
    llm = on_either(on_cpu, model, num_pages=24)  # so few that pages of bad requests are reused by good ones
    few = replace(GREEDY, max_tokens=3)
    wanted = expected("tiny-qwen3", good, few)
    assert 7 not in [token for tokens in wanted for token in tokens], "otherwise they would end too"
    filtered = SamplingParams(top_k=5, top_p=0.9, logprobs=2, max_tokens=4, ignore_eos=True)

    class Sink:
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
            sinks = [Sink() for _ in bad]
            for prompt, sink in zip(bad, sinks, strict=True):
                llm.engine.submit(Job(llm.engine.encode(prompt), params, stream=False), sink)
            assert [output.token_ids for output in llm.generate(good, few)] == wanted
            for sink in sinks:
                assert sink.ended.wait(20)
                assert sink.pieces[-1].finish_reason is FinishReason.ERROR
                assert "logits contain NaN" in str(sink.pieces[-1].error)


@NAN_IS_FINE
@EXECUTORS
def test_one_faulty_pass_fails_no_later_request(on_cpu: bool) -> None:
    """While the first two requests run, the embedding of a token of the shared prefix is NaN. The first has logits; the
    second is computed only, and later requests read its KV before any token was sampled from it."""
    model = decoder("tiny-qwen3")
    model.embedding = model.embedding.clone()
    shared, other = [7, *SHARED], [8, *SHARED]
    later = [[*begin, last] for begin in (shared, other) for last in (20, 30)]
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=0, prompt_logprobs_start=len(shared))
    llm, kept = on_either(on_cpu, model), model.embedding[7:9].clone()
    with llm:
        counters = llm.engine.scheduler.counters
        model.embedding[7:9] = torch.nan
        with pytest.raises(EngineFailed, match="logits contain NaN"):
            llm.generate([*shared, 20], GREEDY)
        llm.generate([*other, 20], replace(GREEDY, max_tokens=0))
        model.embedding[7:9] = kept
        assert counters.nan_dropped_pages == 5
        outputs = llm.generate(later, params)
        assert counters.nan_dropped_pages > 5 and counters.nan_recomputations >= 1
    assert [output.token_ids for output in outputs] == expected("tiny-qwen3", later, params)
    found = [one.logprob for output in outputs for one in output.prompt_logprobs or () if one is not None]
    assert len(found) == len(later) and np.isfinite(found).all()


def test_serial_loop_small_chunks_and_pages_change_no_token() -> None:
    llm, _ = on_kernels("tiny-qwen3", overlap="off", chunk_tokens=5, page_size=1, num_pages=256)
    with llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert found == expected("tiny-qwen3", PROMPTS, GREEDY)


def test_retracted_requests_give_the_same_tokens() -> None:
    params = replace(GREEDY, max_tokens=6)
    llm, _ = on_kernels("tiny-qwen3")
    retract_often(llm)
    with llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, params)]
        assert llm.engine.scheduler.counters.retractions > 2
    assert found == expected("tiny-qwen3", PROMPTS, params)


@pytest.mark.parametrize("by_graph", [False, True])
def test_a_disturbed_run_stays_in_bounds(by_graph: bool, prefill_graphs: dict[str, Any]) -> None:
    """Retractions and aborts while passes are in flight, too few pages, and rows with filters that join and leave."""
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
    llm, device = on_kernels("tiny-qwen3", num_pages=44, max_running=4, **(prefill_graphs if by_graph else {}))
    scheduler = llm.engine.scheduler
    plan, steps = scheduler.plan, iter(range(10**6))

    def planning(now: float) -> Plan | None:
        running = scheduler.running.requests
        step = next(steps)
        if running and step % 3 == 2 and (victim := rng.choice(running)).retractions < 2:
            scheduler.retract(victim.id, now, "a test")
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
    assert any(key.shared_block_m for key in prefill_keys(device)) == by_graph
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        if one.temperature == 0:
            assert output.token_ids == expected("tiny-qwen3", [prompt], one)[0][: len(output.token_ids)]


def test_buckets_cover_every_batch_size() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(256)[-4:] == [160, 192, 224, 256]


def plan_of(slots: list[int], starts: list[int], lengths: list[int], **fields: Any) -> Plan:
    def column(values: Any) -> Any:
        return np.array(values, np.int32)

    given = {"joins": (), "page_changes": (NO_CHANGES,), **fields}
    return Plan(
        step=0,
        slots=column(slots),
        starts=column(starts),
        lengths=column(lengths),
        max_lengths=column([start + length + 30 for start, length in zip(starts, lengths, strict=True)]),
        samples=np.ones(len(slots), np.bool_),
        num_tokens=sum(lengths),
        num_context_tokens=0,
        **{"num_decodes": len(slots), **given},
    )


def test_a_steady_decode_batch_uploads_nothing() -> None:
    packer = PlanPacker(4, 100, 8, max_tokens=100)
    join = Join.of(TrackedRequest(Request("a", np.arange(5))), 2)
    first = packer.pack(plan_of([2], [0], [5], joins=(join,)))
    counts = dict(zip(DiffHeader, first.parts[0].tolist(), strict=False))
    assert not first.is_decode
    assert {field.name for field in DiffHeader if counts[field]} == {"NUM_JOINS", "NUM_RUNS", "NUM_TOKENS", "NUM_ROWS"}
    assert counts[DiffHeader.NUM_TOKENS] == 5 and counts[DiffHeader.NUM_ROWS] == 1
    second = packer.pack(plan_of([2], [5], [1]))
    assert second.is_decode and not second.parts[0].any()
    third = packer.pack(plan_of([2], [6], [1]))
    assert third.is_decode and third.num_words == 0, "there is not even an empty diff"
    assert packer.pack(plan_of([2], [7], [1])) is third


@pytest.mark.parametrize(("max_tokens", "padded"), [(200, 128), (100, 100)])
def test_tokens_of_a_prefill_batch_without_a_bucket_are_padded(max_tokens: int, padded: int) -> None:
    """To a number for which the kernels of libraries are loaded at start. Padding belongs to no row."""
    packed = PlanPacker(4, 100, 8, max_tokens=max_tokens).pack(plan_of([2, 0], [0, 0], [60, 10], num_decodes=0))
    assert packed.num_tokens == 70 and packed.token_rows.count == padded and padded in token_sizes(max_tokens)
    assert packed.parts[1].tolist() == [0] * 60 + [1] * 10 + [-1] * (padded - 70)


WORD = np.array([1], np.int32)


@pytest.mark.parametrize(
    "changed",
    [
        {"joins": (Join.of(TrackedRequest(Request("b", np.arange(3))), 0),)},
        {"page_changes": (TableChanges(WORD, WORD, WORD),)},
        {"swap": Swap(WORD, WORD, WORD, WORD)},
        {"sharing": Sharing(9, np.array([0, 1], np.int32), np.array([0], np.int32))},
        {"slots": [2, 1]},
        {"slots": [2], "starts": [7]},
        {"starts": [7, 6]},
    ],
)
def test_whatever_changes_is_uploaded(changed: dict[str, Any]) -> None:
    """And the batch after it repeats again."""
    rule = ShareRule(group=2, max_units=64, chunks=(16,), align=8, min_saving=0, min_pair_tokens=16)
    packer = PlanPacker(4, 100, 8, rule, max_tokens=100)
    for start in (5, 6, 7):
        packed = packer.pack(plan_of([1, 2], [start, start], [1, 1]))
    assert packed.num_words == 0
    rows, fields = {"slots": [1, 2], "starts": [8, 8]}, dict(changed)
    for name in rows:
        rows[name] = fields.pop(name, rows[name])
    plan = plan_of(rows["slots"], rows["starts"], [1] * len(rows["slots"]), **fields)
    packed = packer.pack(plan)
    assert packed.num_words > 0
    state = SlotState.empty(4, 8, 2, 4, "cpu")
    state.num_computed[:] = 8  # where sampling has left the rows
    apply_diff_reference(packed.parts[0], state, DecodeUnits.empty(4, 64, 64, "cpu"))
    assert state.num_computed[rows["slots"]].tolist() == rows["starts"]
    then = [start + 1 for start in rows["starts"]]
    assert packer.pack(plan_of(rows["slots"], then, [1] * len(then), sharing=plan.sharing)).num_words == 0


def test_the_later_of_two_writes_to_one_page_entry_wins() -> None:
    packer = PlanPacker(4, 100, 8, max_tokens=100)
    state = SlotState.empty(4, 8, 2, 4, "cpu")
    changes = TableChanges(*(np.array(values, np.int32) for values in ([1, 0, 1], [2, 2, 2], [7, 8, 9])))
    apply_diff_reference(packer.pack(plan_of([1], [0], [1], page_changes=(changes,))).parts[0], state)
    assert state.page_table[:2, 2].tolist() == [8, 9]


def test_two_rows_share_only_prefixes_too_long_for_the_l2_cache() -> None:
    rule = ShareRule(group=2, max_units=64, chunks=(16,), align=16, min_saving=0, min_pair_tokens=64)
    for count, common, is_shared in ((2, 48, False), (2, 64, True), (3, 48, True)):
        sharing = Sharing(1, np.arange(count, dtype=np.int32), np.full(count - 1, common, np.int32))
        plan = plan_of([0, 1, 2], [90] * 3, [1] * 3, num_decodes=3, sharing=sharing)
        assert (rule.choose(plan, 3)[0] is not None) == is_shared


def test_a_prompt_of_one_token_among_decodes_does_not_inherit_shared_segments() -> None:
    """It runs as a decode row, so the device must know that none of its positions are in shared units."""
    rule = ShareRule(group=2, max_units=64, chunks=(16,), align=8, min_saving=0, min_pair_tokens=16)
    packer = PlanPacker(4, 100, 8, rule, max_tokens=100)
    state, units = SlotState.empty(4, 64, 2, 4, "cpu"), DecodeUnits.empty(4, 64, 64, "cpu")
    for starts, num_decodes, shared in (([40, 40, 40], 3, [0, 1, 2]), ([41, 41, 5], 2, [0, 1])):
        rows = np.array(shared, np.int32)
        sharing = Sharing(len(rows), rows, np.full(len(rows) - 1, 35, np.int32))
        plan = plan_of([0, 1, 2], starts, [1, 1, 1], num_decodes=num_decodes, sharing=sharing)
        packed = packer.pack(plan)
        assert packed.is_decode
        apply_diff_reference(packed.parts[0], state, units)
        assert units.shared_rows[:3].tolist() == [[32, 2] if row in shared else [0, 0] for row in range(3)]
        assert packed.num_saved_tokens == 32 * (len(shared) - 1)
