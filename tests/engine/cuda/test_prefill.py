"""Prefill and mixed batches of the CUDA executor, in the interpreter: as CUDA graphs and kernel by kernel, with the
tokens of the CPU executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda import attention as cuda_attention
from paceline.engine.cuda import graphs as cuda_graphs
from paceline.engine.cuda import inputs as cuda_inputs
from paceline.engine.cuda.graphs import GraphKey
from paceline.engine.cuda.inputs import output_rows, output_sizes
from paceline.engine.cuda.layers import CudaMlp
from paceline.engine.cuda.streams import HostStreams
from paceline.engine.cuda.tiles import SplitRule
from paceline.engine.linear.dense import DenseLinear
from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.kernels.decode_attention import NONE_SHARED, OWN_UNITS, SHARED_UNITS
from paceline.kernels.layouts import EXTEND_UNIT_WORDS
from tests.engine.cuda.interpreted import (
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    RNG,
    expected,
    on_kernels,
    prefill_keys,
    record_packed,
)

pytestmark = [*INTERPRETED, IN_BOUNDS]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2"])
def test_prefill_graphs_give_the_same_tokens(name: str, prefill_graphs: dict[str, Any]) -> None:
    """Chunked prefill, mixed batches, cache hits with few tokens left: every batch that samples runs as a graph."""
    wanted = expected(name, PROMPTS, GREEDY)
    llm, device = on_kernels(name, overlap="off", max_prefill_tokens=16, **prefill_graphs)
    packed = record_packed(device)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
    # Batches with shared tiles have no graph.
    assert device.stats.graphs == sum(one.num_sampled > 0 and not one.shared_tiles.count for one in packed)
    assert len({key.prefill.tokens for key in prefill_keys(device) if key.prefill}) > 1
    mixed = [one for one in packed if one.bucket and one.num_decodes]
    assert mixed and any(one.num_tokens < one.bucket.tokens for one in mixed if one.bucket)


def test_a_prefill_graph_is_captured_after_a_few_uses() -> None:
    llm, device = on_kernels("tiny-qwen3", prefill_sizes=(16,), prefix_cache=False)
    with llm:
        for number in range(cuda_graphs.CAPTURE_AFTER + 1):
            device.reset_stats()
            llm.generate([PROMPTS[3]], replace(GREEDY, max_tokens=1))
            assert device.stats.graphs == (number >= cuda_graphs.CAPTURE_AFTER)
            assert len(prefill_keys(device)) == (number >= cuda_graphs.CAPTURE_AFTER)


def test_background_work_captures_prefill_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on every prefill batch has its graph, however rare it is."""
    monkeypatch.setattr(cuda_inputs, "_EXTRA_TILES", 3)
    llm, device = on_kernels("tiny-qwen3", prefill_sizes=(8, 16), prefix_cache=False)
    once = replace(GREEDY, max_tokens=1)
    # The engine's own thread does this work when it is idle. Here the test does it, so that the two cannot race.
    run_background_work = device.run_background_work
    monkeypatch.setattr(device, "run_background_work", lambda: False)
    with llm:
        wanted = llm.generate([PROMPTS[3], PROMPTS[1]], once)
        assert not prefill_keys(device), "a graph is captured when it is missed again"
        while llm.engine.call(lambda _: run_background_work()).result():
            pass
        assert sorted(key.prefill.tokens for key in prefill_keys(device) if key.prefill) == [8, 16]
        device.reset_stats()
        found = llm.generate([PROMPTS[3], PROMPTS[1]], once)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        assert device.stats.graphs == device.stats.passes == 1


def test_a_batch_that_fits_no_bucket_is_launched_kernel_by_kernel(
    prefill_graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_inputs, "_SPLIT_CAPACITIES", ((0, 0),))
    llm, device = on_kernels("tiny-qwen3", max_running=6, overlap="off", **prefill_graphs)
    packed = record_packed(device)
    prompts = [RNG.integers(3, 512, 2).tolist() for _ in range(6)]  # a tile each; the bucket has four
    with llm:
        found = [one.token_ids for one in llm.generate(prompts, replace(GREEDY, max_tokens=1))]
    assert found == expected("tiny-qwen3", prompts, replace(GREEDY, max_tokens=1))
    assert [(one.num_tokens, one.bucket) for one in packed] == [(12, None)]


def test_a_bucket_may_have_fewer_tokens_than_the_executor_has_rows(prefill_graphs: dict[str, Any]) -> None:
    once = replace(GREEDY, max_tokens=2)
    llm, device = on_kernels("tiny-qwen3", max_running=6, overlap="off", **{**prefill_graphs, "prefill_sizes": (4,)})
    with llm:
        assert [llm.generate([[7, 8, 9]], once)[0].token_ids] == expected("tiny-qwen3", [[7, 8, 9]], once)
    assert [key.prefill.tokens for key in prefill_keys(device) if key.prefill] == [4]


def test_the_last_layer_computes_only_the_output_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk that is not its prompt's last, only keys and values are needed, and no hidden states. Output tokens
    are padded to the four rows of this executor, and tokens to the 32 of its largest batch."""
    rows: list[int] = []
    add = DenseLinear.add
    prompt = RNG.integers(3, 512, 40).tolist()
    llm, device = on_kernels("tiny-qwen3", overlap="off", chunk_tokens=16)
    block = device.model.layers[-1].block
    assert isinstance(block, CudaMlp)

    def watched(self: DenseLinear, source: Projected, stream: ResidualStream) -> None:
        if self is block.down:
            rows.append(len(stream))
        add(self, source, stream)

    monkeypatch.setattr(DenseLinear, "add", watched)
    once = replace(GREEDY, max_tokens=1)
    with llm:
        found = llm.generate([prompt], once)[0].token_ids
        assert rows == [4]
        output = llm.generate([prompt], replace(once, prompt_logprobs=0))[0]
        assert rows == [4, 32, 32, 32] and output.token_ids == found and len(output.prompt_logprobs or ()) == 40
    assert [found] == expected("tiny-qwen3", [prompt], once)


def test_output_tokens_are_padded_to_few_numbers_of_rows() -> None:
    assert output_sizes(256) == [16, 32, 64, 128, 256] and output_sizes(100) == [16, 32, 64, 100]
    assert output_sizes(8) == [8] and output_rows(17, 100) == 32 and output_rows(65, 100) == 100


def test_split_keys_change_no_token() -> None:
    """A few tokens after a long cache hit, next to another prompt, in a layer without and one with a sliding window, of
    which some splits see no key."""
    params = replace(GREEDY, max_tokens=2)
    rng = np.random.default_rng(3)
    long, short = rng.integers(3, 512, 70).tolist(), rng.integers(3, 512, 11).tolist()
    prompts = [[*long, 5, 6, 7], short]
    rule = partial(SplitRule, num_programs=8, min_keys=16, merge_keys=2)
    llm, device = on_kernels("tiny-qwen2", split_rule=rule)
    packed = record_packed(device)
    with llm:
        llm.generate(long, replace(GREEDY, max_tokens=1))
        assert [one.token_ids for one in llm.generate(prompts, params)] == expected("tiny-qwen2", prompts, params)
    tiles = [(one.extend_units.count // EXTEND_UNIT_WORDS, one.num_splits) for one in packed if one.num_splits]
    assert any(units > splits for units, splits in tiles), "no batch has both whole and split tiles"


def test_split_keys_in_prefill_graphs_change_no_token(prefill_graphs: dict[str, Any]) -> None:
    """One graph for batches with and without splits; the second finds the workspace as the first has left it."""
    params = replace(GREEDY, max_tokens=2)
    rng = np.random.default_rng(3)
    long, short = rng.integers(3, 512, 70).tolist(), rng.integers(3, 512, 11).tolist()
    rule = partial(SplitRule, num_programs=8, min_keys=16, merge_keys=2)
    llm, device = on_kernels("tiny-qwen2", split_rule=rule, **prefill_graphs)
    packed = record_packed(device)
    with llm:
        llm.generate(long, replace(GREEDY, max_tokens=1))
        for prompts in ([[*long, 5, 6, 7], short], [[*long, 9], [*long, 8, 7], short[:9]]):
            assert [one.token_ids for one in llm.generate(prompts, params)] == expected("tiny-qwen2", prompts, params)
    assert any(one.num_splits and one.bucket for one in packed)
    assert any(key.prefill and key.prefill.merges for key in prefill_keys(device))


class RecordingStreams(HostStreams):
    """Streams that record which launches have certainly ended before each launch."""

    engine, side, shared = "engine", "side", "shared"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.now = self.engine
        self.before: dict[Any, set[str]] = defaultdict(set)  # by stream
        self.launches: dict[str, set[str]] = {}  # name -> names of the launches before it

    def follow(self, later: Any, earlier: Any) -> None:
        self.before[later] |= self.before[earlier]

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        outer, self.now = self.now, stream
        yield
        self.now = outer

    def launch(self, name: str) -> None:
        self.launches[name] = set(self.before[self.now])
        self.before[self.now].add(name)


@pytest.mark.parametrize("shared_block_m", [0, 16])
def test_units_of_one_row_shared_units_and_prefill_run_side_by_side_in_a_graph(
    shared_block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a layer nothing waits for the others; the next layer waits for all of them."""
    llm, device = on_kernels("tiny-qwen3", prefill_sizes=(16,))
    streams = RecordingStreams()
    parts = {NONE_SHARED: "own", OWN_UNITS: "own", SHARED_UNITS: "shared"}
    layers: list[torch.Tensor] = [keys for keys, _ in device.attention.caches.values()]

    def layer_of(cache: torch.Tensor) -> int:
        return [one.data_ptr() for one in layers].index(cache.data_ptr())

    def decoding(qkv: Any, cache: torch.Tensor, *args: Any, part: int, **options: Any) -> None:
        streams.launch(f"{parts[part]} {layer_of(cache)}")

    monkeypatch.setattr(cuda_attention, "decode_attention", decoding)
    monkeypatch.setattr(
        cuda_attention, "extend_attention", lambda q, cache, *_, **__: streams.launch(f"prefill {layer_of(cache)}")
    )
    monkeypatch.setattr(device.attention, "_streams", streams)
    with llm:
        device.run_pass(4, GraphKey(prefill=device.prefill.buckets[0], shared_block_m=shared_block_m))
    kinds = {"own", "shared", "prefill"} if shared_block_m else {"own", "prefill"}
    first, second = ({f"{kind} {layer}" for kind in kinds} for layer in (0, 1))
    assert [streams.launches[name] for name in first] == [set()] * len(kinds)
    assert [streams.launches[name] for name in second] == [first] * len(kinds)
    assert streams.before["engine"] == first | second
