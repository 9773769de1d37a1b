"""Passes with prompts on a GPU, in the interpreter: by graph or kernel by kernel, the tokens of the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.cuda import graphs as cuda_graphs
from paceline.engine.cuda import inputs as cuda_inputs
from paceline.engine.cuda import model as cuda_model
from paceline.engine.cuda.graphs import GraphKey
from paceline.kernels.extend_tiles import SplitRule
from tests.engine.cuda.interpreted import (
    GREEDY,
    IN_BOUNDS,
    INTERPRETED,
    PROMPTS,
    RNG,
    expected,
    on_kernels,
    rooms_of,
    watch_packed,
)

pytestmark = [*INTERPRETED, IN_BOUNDS]


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
        assert not device.run_background_work() and not rooms_of(device), "nothing is compiled yet"
        wanted = llm.generate([PROMPTS[3], PROMPTS[1]], once)
        assert [device.run_background_work(), device.run_background_work(), device.run_background_work()] == [
            True,
            True,
            False,
        ]
        assert [kind.room.tokens for kind in rooms_of(device) if kind.room] == [8, 16]
        device.reset_stats()
        found = llm.generate([PROMPTS[3], PROMPTS[1]], once)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        assert device.stats.graphs == device.stats.passes == 1


def test_capturing_a_graph_of_prompts_leaves_no_trace(prompts_by_graph: dict[str, Any]) -> None:
    llm, device = on_kernels("tiny-qwen3", **prompts_by_graph)
    capture, seen = device.graphs._run_empty, []

    def capturing(size: int, kind: GraphKey) -> None:
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
