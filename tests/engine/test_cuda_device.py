"""The CUDA device on the CPU, in Triton's interpreter: the same tokens as the CPU executor, whatever happens."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine import cuda_graphs, cuda_inputs, cuda_model
from paceline.engine.build import assemble
from paceline.engine.cuda_build import build_cuda
from paceline.engine.cuda_device import CudaDevice
from paceline.engine.cuda_graphs import Kind, Part, PassGraphs, buckets
from paceline.engine.cuda_inputs import Packed, PlanPacker, ShareRule
from paceline.engine.cuda_streams import Graph, HostStreams, _HostEvent
from paceline.engine.engine import Engine
from paceline.engine.output import Piece
from paceline.kernels._triton import HAS_TRITON, cdiv
from paceline.kernels.decode_attention import NONE_SHARED, decode_attention
from paceline.kernels.decode_units import Chunks, DecodeUnits
from paceline.kernels.extend_tiles import SplitRule
from paceline.kernels.linear import LinearTuning
from paceline.kernels.slot_state import SlotState, apply_diff_reference
from paceline.llm import LLM, RequestOutput
from paceline.model.decoder import Decoder
from paceline.model.registry import shape
from paceline.model.weights import random_weights
from paceline.request import FinishReason, Grammar, Request, SamplingParams
from paceline.sampling.values import Masks
from paceline.scheduler import Scheduler
from paceline.scheduler.invariants import check as check_invariants
from paceline.scheduler.plan import Join, Plan, Sharing
from paceline.text.synthetic import synthetic_tokenizer
from tests.kernels.bounds import checked_bounds

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=HAS_TRITON)
def _in_bounds() -> Iterator[None]:
    with checked_bounds():
        yield


CONTEXT = 192
RNG = np.random.default_rng(5)
SHARED = RNG.integers(3, 512, 21).tolist()
PROMPTS = [[*SHARED, 7, 8, 9], RNG.integers(3, 512, 1).tolist(), [*SHARED, 9, 9], RNG.integers(3, 512, 11).tolist()]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BASE: dict[str, Any] = {
    "num_pages": 64, "page_size": 4, "max_running": 4, "context_tokens": CONTEXT, "prefix_wait_tokens": 8,
    "max_batch_tokens": 32, "max_prefill_tokens": 32, "chunk_tokens": 16,
}  # fmt: skip


def decoder(name: str) -> Decoder:
    """Two layers of a family, with norms and biases that would be missed."""
    spec = shape(name)
    spec = replace(spec, num_layers=2, windows=spec.windows[1:3], rope_layers=spec.rope_layers[-2:])
    weights = random_weights(spec, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    for key, weight in weights.items():
        if key.endswith("norm"):
            weight.mul_(1 + 0.3 * torch.randn(weight.shape[-1], generator=generator))
            if key.endswith("qk_norm"):  # one for all query heads, another for all key heads
                weight[: spec.num_heads] = weight[0] * 1.1
    return Decoder(spec, weights, max_positions=CONTEXT)


def small_tiles(rows: int, columns: int, gated: bool) -> LinearTuning | None:
    """Fused products for a tiny model: some split, and none from three rows on, so that both kinds meet in a run."""
    if rows > 2:
        return None
    return LinearTuning(16, 16, 16, 1, 1, 1 if gated or columns > 64 else 2)


def on_kernels(name: str, **options: Any) -> tuple[LLM, CudaDevice]:
    overlap, model = options.pop("overlap", "on"), options.pop("model", None) or decoder(name)
    split_rule, sizes = options.pop("split_rule", SplitRule), options.pop("prompt_sizes", ())
    rule = partial(ShareRule, chunks=(32, 16), least_of_pairs=16)
    config = SchedulerConfig(**{**BASE, **options})
    device, config = build_cuda(
        model, EngineConfig(), config, None, tuning=small_tiles, chunks=lambda rows: Chunks(16, 64, 4),
        share_rule=rule, split_rule=split_rule, prompt_sizes=sizes,
    )  # fmt: skip
    tokenizer = synthetic_tokenizer(device.model.spec.vocab_size)
    engine = Engine(Scheduler(config), device, tokenizer, vocab_size=device.model.spec.vocab_size, overlap=overlap)
    return LLM.from_engine(engine), device


def expected(name: str, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    plain = decoder(name)
    tokenizer = synthetic_tokenizer(plain.spec.vocab_size)
    engine = assemble(plain, tokenizer, EngineConfig(device="cpu", threads=1, overlap="off"), BASE)
    with LLM.from_engine(engine) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


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


@pytest.fixture
def prompts_by_graph(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options for passes with prompts that are captured when first seen, with little padding: each costs a program."""
    monkeypatch.setattr(cuda_graphs, "FREQUENT", 1)
    monkeypatch.setattr(cuda_inputs, "_MORE_TILES", 3)
    monkeypatch.setattr(cuda_inputs, "_SPLITS", ((0, 0), (9, 4)))
    return {"prompt_sizes": (8, 16, 32)}


def rooms_of(device: CudaDevice) -> list[Kind]:
    """Of the graphs with prompts that were captured."""
    return [kind for _, kind in device.graphs._graphs if kind.room is not None]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2", "tiny-smollm3"])
def test_prompts_by_graph_say_the_same(name: str, prompts_by_graph: dict[str, Any]) -> None:
    """Chunks, prompts alone and beside decodes, hits of which little is left: all that samples is replayed."""
    wanted = expected(name, PROMPTS, GREEDY)
    llm, device = on_kernels(name, overlap="off", **prompts_by_graph)
    packed = watch_packed(device)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
    # Prompts that share tiles have no graph.
    assert device.stats.graphs == sum(one.num_sampled > 0 and not one.shared_tiles.count for one in packed)
    assert len({kind.room.tokens for kind in rooms_of(device) if kind.room}) > 1
    mixed = [one for one in packed if one.room and one.num_decodes]
    assert mixed and any(one.num_tokens < one.room.tokens for one in mixed if one.room)


def test_a_graph_of_prompts_is_captured_when_it_has_been_missed() -> None:
    llm, device = on_kernels("tiny-qwen3", prompt_sizes=(16,), prefix_cache=False)
    with llm:
        for number in range(cuda_graphs.FREQUENT + 1):
            device.reset_stats()
            llm.generate([PROMPTS[3]], replace(GREEDY, max_tokens=1))
            assert device.stats.graphs == (number >= cuda_graphs.FREQUENT - 1)
            assert len(rooms_of(device)) == device.stats.graphs


def test_idle_time_goes_into_graphs_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a pass with prompts has run; then such a pass finds its graph, however rare it is."""
    monkeypatch.setattr(cuda_inputs, "_MORE_TILES", 3)
    llm, device = on_kernels("tiny-qwen3", prompt_sizes=(8, 16), prefix_cache=False)
    once = replace(GREEDY, max_tokens=1)
    with llm:
        assert not device.chore() and not rooms_of(device), "nothing is compiled yet"
        wanted = llm.generate([PROMPTS[3], PROMPTS[1]], once)
        assert [device.chore(), device.chore(), device.chore()] == [True, True, False]
        assert [kind.room.tokens for kind in rooms_of(device) if kind.room] == [8, 16]
        device.reset_stats()
        found = llm.generate([PROMPTS[3], PROMPTS[1]], once)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        assert device.stats.graphs == device.stats.passes == 1


def test_the_graph_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    captured: list[int] = []
    graphs = PassGraphs(HostStreams(), 8, lambda size, kind: None, lambda size, kind: captured.append(size))
    for size in (1, 2, 1, 4, 1, 2):
        graphs.graph(size, Kind())
    assert captured == [1, 2, 4, 2] and [size for size, _ in graphs._graphs] == [1, 2]


def test_capturing_a_graph_of_prompts_leaves_no_trace(prompts_by_graph: dict[str, Any]) -> None:
    llm, device = on_kernels("tiny-qwen3", **prompts_by_graph)
    capture, seen = device.graphs._run_empty, []

    def capturing(size: int, kind: Kind) -> None:
        state = device.state
        watched = [device.kv, state.token_pool, state.num_computed, state.num_rows, device._sampling.step]
        before = [tensor.clone() for tensor in watched]
        capture(size, kind)
        if kind.room is not None:
            seen.append(kind)
            assert all(map(torch.equal, watched, before)) and not device._attention.arrived.any()

    device.graphs._run_empty = capturing
    with llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected("tiny-qwen3", PROMPTS, GREEDY)
    assert seen


def test_what_does_not_fit_a_room_is_launched_kernel_by_kernel(
    prompts_by_graph: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_inputs, "_SPLITS", ((0, 0),))
    llm, device = on_kernels("tiny-qwen3", max_running=6, overlap="off", **prompts_by_graph)
    packed = watch_packed(device)
    prompts = [RNG.integers(3, 512, 2).tolist() for _ in range(6)]  # a tile each, and there is room for four
    with llm:
        found = [one.token_ids for one in llm.generate(prompts, replace(GREEDY, max_tokens=1))]
    assert found == expected("tiny-qwen3", prompts, replace(GREEDY, max_tokens=1))
    assert [(one.num_tokens, one.room) for one in packed] == [(12, None)]


def test_a_room_may_have_fewer_tokens_than_there_are_rows(prompts_by_graph: dict[str, Any]) -> None:
    once = replace(GREEDY, max_tokens=2)
    llm, device = on_kernels("tiny-qwen3", max_running=6, overlap="off", **{**prompts_by_graph, "prompt_sizes": (4,)})
    with llm:
        assert [llm.generate([[7, 8, 9]], once)[0].token_ids] == expected("tiny-qwen3", [[7, 8, 9]], once)
    assert [kind.room.tokens for kind in rooms_of(device) if kind.room] == [4]


def test_the_last_layer_does_no_more_than_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is not its prompt's last yields keys and values; what comes behind them nobody would read."""
    rows: list[int] = []
    outward = cuda_model._Forward._outward

    def watched(self: Any, product: Any, source: torch.Tensor) -> None:
        if product is self.model.layers[-1].down:
            rows.append(len(source))
        outward(self, product, source)

    monkeypatch.setattr(cuda_model._Forward, "_outward", watched)
    prompt = RNG.integers(3, 512, 40).tolist()
    llm, _ = on_kernels("tiny-qwen3", overlap="off", chunk_tokens=16)
    once = replace(GREEDY, max_tokens=1)
    with llm:
        found = llm.generate([prompt], once)[0].token_ids
        assert rows == [1]
        told = llm.generate([prompt], replace(once, prompt_logprobs=0))[0]
        assert rows == [1, 16, 16, 8] and told.token_ids == found and len(told.prompt_logprobs or ()) == 40
    assert [found] == expected("tiny-qwen3", [prompt], once)


def watch_packed(device: CudaDevice) -> list[Packed]:
    """Will hold what was packed for each pass."""
    found: list[Packed] = []
    pack = device._packer.pack

    def packing(plan: Plan) -> Packed:
        found.append(pack(plan))
        return found[-1]

    device._packer.pack = packing  # type: ignore[method-assign]
    return found


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


def test_keys_in_parts_change_no_token() -> None:
    """A few tokens behind a long hit, beside another prompt, in a layer without and one with a window, of which some
    parts see nothing."""
    params = replace(GREEDY, max_tokens=2)
    rng = np.random.default_rng(3)
    long, short = rng.integers(3, 512, 70).tolist(), rng.integers(3, 512, 11).tolist()
    prompts = [[*long, 5, 6, 7], short]
    rule = partial(SplitRule, num_programs=8, least_keys=16, part_keys=2)
    llm, device = on_kernels("tiny-qwen2", split_rule=rule)
    packed = watch_packed(device)
    with llm:
        llm.generate(long, replace(GREEDY, max_tokens=1))
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected("tiny-qwen2", prompts, params)
    tiles = [(one.units.count // 5, one.num_parts) for one in packed if one.num_parts]
    assert any(units > parts for units, parts in tiles), "no whole tile beside parts"


def test_keys_in_parts_by_graph_change_no_token(prompts_by_graph: dict[str, Any]) -> None:
    """One graph for passes with and without parts of tiles; the second leaves what the first has in the workspace."""
    params = replace(GREEDY, max_tokens=2)
    rng = np.random.default_rng(3)
    long, short = rng.integers(3, 512, 70).tolist(), rng.integers(3, 512, 11).tolist()
    rule = partial(SplitRule, num_programs=8, least_keys=16, part_keys=2)
    llm, device = on_kernels("tiny-qwen2", split_rule=rule, **prompts_by_graph)
    packed = watch_packed(device)
    with llm:
        llm.generate(long, replace(GREEDY, max_tokens=1))
        for prompts in ([[*long, 5, 6, 7], short], [[*long, 9], [*long, 8, 7], short[:9]]):
            assert [one.token_ids for one in llm.generate(prompts, params)] == expected("tiny-qwen2", prompts, params)
    assert any(one.num_parts and one.room for one in packed)
    assert any(kind.room and kind.room.folds for kind in rooms_of(device))


def test_where_nothing_is_shared_nothing_more_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [RNG.integers(3, 512, 20).tolist() for _ in range(2)]
    parts: list[list[int]] = []
    for shared in (True, False):
        llm, _ = on_kernels("tiny-qwen3", shared_reads=shared)
        launched: list[int] = []

        def launching(*args: Any, launched: list[int] = launched, **options: Any) -> None:
            launched.append(options["part"])
            decode_attention(*args, **options)

        monkeypatch.setattr("paceline.engine.cuda_device.decode_attention", launching)
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
        wants_all_at_once = True

        def __init__(self) -> None:
            self.pieces: list[Piece] = []
            self.ended = threading.Event()

        def put(self, piece: Piece) -> None:
            self.pieces.append(piece)
            if piece.finish_reason is not None:
                self.ended.set()

        def refuse(self, error: Exception) -> None:
            raise AssertionError(error)

    with llm:
        for params in (GREEDY, filtered):
            heard = [Heard() for _ in bad]
            for prompt, sink in zip(bad, heard, strict=True):
                llm.engine.submit(prompt, params, sink=sink)
            assert [output.token_ids for output in llm.generate(good, GREEDY)] == plain
            for sink in heard:
                assert sink.ended.wait(20)
                assert sink.pieces[-1].finish_reason is FinishReason.ERROR
                assert "logits are no numbers" in str(sink.pieces[-1].error)


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


def retract_often(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    plan, steps = scheduler.plan, iter(range(10**6))

    def planning(now: float) -> Any:
        running = [*scheduler.admission.decoding, *scheduler.admission.prefilling]
        if next(steps) % 2 and running and running[0].retractions < 2:
            scheduler._retract(running[0], now, "a test")
        return plan(now) or plan(now)

    scheduler.plan = planning  # type: ignore[method-assign]


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


def test_sampling_obeys_seeds_filters_and_the_least_length() -> None:
    ends = expected("tiny-qwen3", PROMPTS[3:], GREEDY)[0][0]
    params = [
        SamplingParams(max_tokens=3, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=2, top_k=1, ignore_eos=True),  # that is greedy
        SamplingParams(max_tokens=3, seed=-3, top_p=0.5, temperature=0.7, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=0, min_tokens=3, stop_token_ids=(ends,), ignore_eos=True),
    ]
    llm, _ = on_kernels("tiny-qwen3", max_running=4)
    with llm:
        together = [output.token_ids for output in llm.generate(PROMPTS, params)]
        alone = llm.generate(PROMPTS[2], params[2])[0].token_ids
    assert together[2] == alone
    assert together[1] == expected("tiny-qwen3", PROMPTS[1:2], GREEDY)[0][:3]
    assert ends not in together[3][:2] and len(together[3]) >= 3


EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, repetition_penalty=1.7, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={9: 4.0, 11: 4.5}, frequency_penalty=1.5,
                   bad_words=("a", "b c"), logprobs=0, logprob_token_ids=(5, 6, 7)),
    SamplingParams(temperature=0, max_tokens=5, grammar=Grammar.regex("[a-d]{2}( [x-z]+)?"), repetition_penalty=1.3),
]  # fmt: skip


def compared(outputs: list[RequestOutput]) -> list[Any]:
    def rounded(told: Any) -> Any:
        return told and [one and (one.token_id, round(one.logprob, 3), [(t, round(v, 3)) for t, v in one.top])
                         for one in told]  # fmt: skip

    return [(one.token_ids, one.finish_reason, rounded(one.logprobs), rounded(one.prompt_logprobs)) for one in outputs]


def on_the_cpu(params: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    plain = decoder("tiny-qwen3")
    config = EngineConfig(device="cpu", threads=1, overlap="off")
    with LLM.from_engine(assemble(plain, synthetic_tokenizer(plain.spec.vocab_size), config, BASE)) as llm:
        return llm.generate(prompts, params)


@pytest.mark.parametrize("by_graph", [False, True])
def test_penalties_biases_logprobs_and_grammars_are_those_of_the_cpu(
    by_graph: bool, prompts_by_graph: dict[str, Any]
) -> None:
    llm, device = on_kernels("tiny-qwen3", **(prompts_by_graph if by_graph else {}))
    with llm:
        assert compared(llm.generate(PROMPTS, EVERYTHING)) == compared(on_the_cpu(EVERYTHING))
        assert device.stats.graphs > 2
        # Another owner of such a slot, who asks nothing.
        few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        assert llm.generate(PROMPTS[3:], few)[0].token_ids == expected("tiny-qwen3", PROMPTS[3:], few)[0]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_passes_with_masks_choose_by_a_graph_of_their_own(overlap: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=6, grammar=Grammar.regex("([a-d]{2} )+")),
        SamplingParams(temperature=0.7, top_k=1, max_tokens=4, seed=1, grammar=Grammar.regex("[0-9]{9}")),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, frequency_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=3, grammar=Grammar.choice(["yes", "no"])),
    ]
    llm, device = on_kernels("tiny-qwen3", overlap=overlap)
    chosen: list[Kind] = []
    graph = device.graphs.graph

    def noting(size: int, kind: Kind) -> Graph:
        chosen.append(kind)
        return graph(size, kind)

    device.graphs.graph = noting  # type: ignore[method-assign]
    with llm:
        assert compared(llm.generate(PROMPTS, params)) == compared(on_the_cpu(params))
    behind = {(kind.filters, kind.adjusts) for kind in chosen if kind.part is Part.TOKENS}
    assert {(True, True), (False, False)} <= behind, "the masks of few rows and of many, with filters and without"


def test_masks_are_not_written_while_the_pass_before_reads_its_own() -> None:
    llm, device = on_kernels("tiny-qwen3")
    with llm:
        request = Request("a", np.arange(3, 8), SamplingParams(max_tokens=9))
        scheduler = Scheduler(SchedulerConfig(**BASE))
        scheduler.add(request, 0.0)

        def launch() -> Any:
            plan = scheduler.plan(0.0)
            assert plan is not None
            return device.launch_delayed(plan)

        words = cdiv(device.model.spec.vocab_size, 32)
        first = launch()
        bits = first.mask_room(1, words)
        bits[:] = -1
        first.sample(Masks(np.array([0]), bits))
        second = launch()
        with pytest.raises(AssertionError, match="may still read"):
            second.mask_room(1, words)
        first.wait()
        assert second.mask_room(1, words).shape == (1, words)
        with pytest.raises(AssertionError, match="written into the room"):
            second.sample(Masks(np.array([0]), np.zeros((1, words), np.int32)))


def test_a_plan_is_sent_while_the_pass_before_waits_for_its_masks() -> None:
    def tokens(*, ahead: bool) -> list[int]:
        llm, device = on_kernels("tiny-qwen3")
        with llm:
            request = Request("a", np.arange(3, 8), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
            scheduler = Scheduler(SchedulerConfig(**BASE))
            scheduler.add(request, 0.0)
            words = cdiv(device.model.spec.vocab_size, 32)
            found: list[int] = []
            before: tuple[Plan, Any] | None = None

            def take(plan: Plan, pending: Any) -> None:
                result = pending.wait()
                scheduler.commit(plan, result.tokens, 0.0)
                found.extend(result.tokens.tolist())

            plan = scheduler.plan(0.0)
            while plan is not None:
                pending = device.launch_delayed(plan)
                if before is not None:
                    take(*before)
                bits = pending.mask_room(1, words)
                bits[:] = 1 << (3 * len(found))  # few tokens, others each time
                following = scheduler.plan(0.0)
                if following is not None and ahead:
                    device.prepare(following)
                pending.sample(Masks(np.array([0]), bits))
                plan, before = following, (plan, pending)
            assert before is not None
            take(*before)
            return found

    found = tokens(ahead=True)
    assert found == tokens(ahead=False) and len(set(found)) == 5


def test_a_plan_that_was_prepared_is_the_next_to_be_launched() -> None:
    llm, device = on_kernels("tiny-qwen3")
    with llm:
        scheduler = Scheduler(SchedulerConfig(**BASE))
        scheduler.add(Request("a", np.arange(3, 8), SamplingParams(max_tokens=9)), 0.0)
        first, second = scheduler.plan(0.0), scheduler.plan(0.0)
        assert first is not None and second is not None
        device.prepare(first)
        with pytest.raises(AssertionError, match="another plan was prepared"):
            device.launch(second)
        with pytest.raises(AssertionError, match="prepared and not launched"):
            device.prepare(second)


def ids_told(output: RequestOutput) -> list[list[int]]:
    return [[one.token_id, *(token for token, _ in one.top)] for one in output.logprobs or ()]


def chances_told(output: RequestOutput) -> list[float]:
    return [value for one in output.logprobs or () for value in (one.logprob, *(value for _, value in one.top))]


LIKELY = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=20),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=1, seed=1, max_tokens=6, ignore_eos=True, logprobs=1, logit_bias={9: 20.0}),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0),
]


@pytest.mark.parametrize("case", ["as it is", "with masks", "nobody adjusts"])
def test_logprobs_come_out_of_the_graphs(case: str) -> None:
    """Rows that ask for 20, 1 and no alternatives beside one that asks nothing; 5 join when that one has ended."""
    params = [*LIKELY, replace(LIKELY[0], logprobs=5, max_tokens=4, logprob_token_ids=(3, 500))]
    if case == "with masks":
        params[3] = replace(params[3], ignore_eos=False, grammar=Grammar.regex("[a-d]{9}"), logprobs=5)
    if case == "nobody adjusts":
        params[2] = replace(params[2], logit_bias=())
    prompts = [*PROMPTS, PROMPTS[1]]
    llm, device = on_kernels("tiny-qwen3")
    ran: list[Kind] = []
    graph = device.graphs.graph

    def noting(size: int, kind: Kind) -> Graph:
        ran.append(kind)
        return graph(size, kind)

    device.graphs.graph = noting  # type: ignore[method-assign]
    with llm:
        outputs = llm.generate(prompts, params)
        for ours, cpus in zip(outputs, on_the_cpu(params, prompts), strict=True):
            assert (ours.token_ids, ours.finish_reason) == (cpus.token_ids, cpus.finish_reason)
            assert ids_told(ours) == ids_told(cpus)
            np.testing.assert_allclose(chances_told(ours), chances_told(cpus), atol=1e-3)
        told = [kind for kind in ran if kind.logprobs]
        # Whoever comes next asks nothing, and pays nothing.
        del ran[:]
        llm.generate(PROMPTS[:2], GREEDY)
        assert ran and not any(kind.logprobs for kind in ran)
    part = Part.TOKENS if case == "with masks" else Part.ALL
    assert {(case != "nobody adjusts", part)} <= {(kind.adjusts, kind.part) for kind in told}
    biased = outputs[2].logprobs
    assert biased is not None and outputs[1].logprobs is None
    if case == "nobody adjusts":
        assert biased[0].token_id == biased[0].top[0][0] and biased[0].logprob == biased[0].top[0][1]
    else:
        assert biased[-1].token_id == 9 != biased[-1].top[0][0], "what the model thinks of it, not the bias"


def test_retracted_requests_keep_their_penalties_and_grammars() -> None:
    llm, _ = on_kernels("tiny-qwen3", overlap="off")
    retract_often(llm)
    with llm:
        assert compared(llm.generate(PROMPTS, EVERYTHING)) == compared(on_the_cpu(EVERYTHING))
        assert llm.engine.scheduler.counters.retractions > 2


def test_buckets_reach_every_batch() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(256)[-4:] == [160, 192, 224, 256]


def plan_of(slots: list[int], starts: list[int], lengths: list[int], **fields: Any) -> Plan:
    def column(values: Any) -> Any:
        return np.array(values, np.int32)

    none = column([])
    given = {"joins": (), "page_slots": none, "page_indices": none, "page_ids": none, "requests": (), **fields}
    return Plan(
        step=0, slots=column(slots), starts=column(starts), lengths=column(lengths),
        samples=np.ones(len(slots), np.bool_), num_tokens=sum(lengths), num_context_tokens=0,
        **{"num_decodes": len(slots), **given},
    )  # fmt: skip


def test_a_steady_decode_sends_nothing() -> None:
    packer = PlanPacker(4, 100, 8)
    join = Join(2, Request("a", np.arange(5)), np.arange(5, dtype=np.int32))
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
    requests = tuple(Request(str(row), np.arange(90), SamplingParams(max_tokens=30)) for row in range(3))
    for request in requests:
        request.max_tokens = 30
    for count, common, is_shared in ((2, 48, False), (2, 64, True), (3, 48, True)):
        sharing = Sharing(np.arange(count, dtype=np.int32), np.full(count - 1, common, np.int32))
        plan = plan_of([0, 1, 2], [90] * 3, [1] * 3, num_decodes=3, requests=requests, sharing=sharing)
        assert (rule.choose(plan, 3)[0] is not None) == is_shared


def test_a_prompt_of_one_token_among_decodes_shares_nothing_of_who_was_there_before() -> None:
    """A graph runs it as a row like the others, so the device must know that none of its chunks are in shared units."""
    packer = PlanPacker(4, 100, 8, ShareRule(group=2, max_units=64, chunks=(16,), least_saving=0, least_of_pairs=16))
    state, units = SlotState.empty(4, 64, 2, 4, "cpu"), DecodeUnits.empty(4, 64, 64, "cpu")
    requests = tuple(Request(str(row), np.arange(20), SamplingParams(max_tokens=30)) for row in range(3))
    for request in requests:
        request.max_tokens = 30
    for starts, num_decodes, shared in (([40, 40, 40], 3, [0, 1, 2]), ([41, 41, 5], 2, [0, 1])):
        rows = np.array(shared, np.int32)
        sharing = Sharing(rows, np.full(len(rows) - 1, 35, np.int32))
        plan = plan_of([0, 1, 2], starts, [1, 1, 1], num_decodes=num_decodes, requests=requests, sharing=sharing)
        packed = packer.pack(plan)
        assert packed.is_decode
        apply_diff_reference(packed.parts[0], state, units)
        assert units.shared_chunks[:3].tolist() == [2 if row in shared else 0 for row in range(3)]
