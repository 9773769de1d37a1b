"""Attention by groups of rows against a reference that computes one row at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.cpu.attention import CpuAttention, _split
from paceline.engine.cpu.inputs import Inputs
from paceline.engine.cpu.kv_cache import KVCache
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelSpec

HEADS, KV_HEADS, SIZE = 4, 2, 8
NO_INDICES = np.empty(0, np.int64)


def make_spec(window: int | None = None, scale: float | None = None, cap: float | None = None) -> ModelSpec:
    return vary(
        shape("tiny-llama"),
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        window=window,
        scale=scale,
        score_cap=cap,
    )


def make_inputs(starts: list[int], lengths: list[int], page_rows: npt.NDArray[np.int32], page_size: int) -> Inputs:
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    rows = np.repeat(np.arange(len(starts)), lengths)
    return Inputs(
        tokens=positions,
        positions=positions,
        rope_positions=positions,
        kv_indices=page_rows[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size,
        slots=np.arange(len(starts)),
        starts=np.array(starts),
        lengths=np.array(lengths),
        offsets=np.cumsum(lengths) - lengths,
        prompts=np.array(lengths),
        page_rows=page_rows,
        sampled=NO_INDICES,
        sampled_slots=NO_INDICES,
        sampled_positions=NO_INDICES,
    )


def reference(
    spec: ModelSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the last len(q) positions of one row, over all its keys."""
    group = HEADS // KV_HEADS
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    mixer = spec.layers[0].mixer
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (mixer.scale or SIZE**-0.5)
    if mixer.score_cap is not None:
        scores = mixer.score_cap * torch.tanh(scores / mixer.score_cap)
    at = torch.arange(len(keys))
    query, key = at[-len(q) :, None], at[None, :]
    hidden = key > query
    if mixer.window is not None:
        hidden |= key <= query - mixer.window
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("hqk,khd->qhd", weights / total, values).reshape(len(q), -1)


def check(
    starts: list[int], lengths: list[int], shared: list[int], page_size: int, spec: ModelSpec, sinks: bool = False
) -> None:
    """Row i begins with the first `shared[i]` pages of a common prefix; its other pages are its own, in any order."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    num_pages = [-(-(start + length) // page_size) for start, length in zip(starts, lengths, strict=True)]
    shared = [min(s, start // page_size) for s, start in zip(shared, starts, strict=True)]
    order = rng.permutation(sum(num_pages) + max(shared)).astype(np.int32)
    common, own = order[: max(shared)], iter(order[max(shared) :].tolist())
    page_rows = rng.integers(0, len(order), (len(starts), max(num_pages))).astype(np.int32)  # stale past the row's end
    for row, count in enumerate(num_pages):
        page_rows[row, :count] = [*common[: shared[row]], *(next(own) for _ in range(count - shared[row]))]
    cache = KVCache(spec, len(order), page_size, torch.float32)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    inputs = make_inputs(starts, lengths, page_rows, page_size)
    total = sum(lengths)
    q, k, v = torch.randn(total, HEADS, SIZE), torch.randn(total, KV_HEADS, SIZE), torch.randn(total, KV_HEADS, SIZE)
    sink_scores = torch.linspace(-2, 3, HEADS) if sinks else None
    found = CpuAttention(cache, spec).begin(inputs)(0, q, k, v, sink_scores)
    for row, (start, length, offset) in enumerate(zip(starts, lengths, inputs.offsets.tolist(), strict=True)):
        at = np.arange(start + length)
        indices = torch.from_numpy(page_rows[row, at // page_size].astype(np.int64) * page_size + at % page_size)
        keys, values = cache.keys[0][indices], cache.values[0][indices]
        expected = reference(spec, q[offset : offset + length], keys, values, sink_scores)
        torch.testing.assert_close(found[offset : offset + length], expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 5, 40]), st.integers(0, 60)), min_size=1, max_size=9
    ),
    page_size=st.sampled_from([1, 3, 16, 64]),
    window=st.sampled_from([None, None, 1, 6, 90]),
    scale=st.sampled_from([None, None, 0.05, 1.0]),
    cap=st.sampled_from([None, None, 0.5]),
    sinks=st.booleans(),
)
def test_any_mix_of_rows_equals_the_reference(
    rows: list[tuple[int, int, int]],
    page_size: int,
    window: int | None,
    scale: float | None,
    cap: float | None,
    sinks: bool,
) -> None:
    starts, lengths, shared = map(list, zip(*rows, strict=True))
    check(starts, lengths, shared, page_size, make_spec(window, scale, cap), sinks and cap is None)


def test_a_row_that_ends_with_the_shared_part_equals_the_reference() -> None:
    """It has no own part, although other rows of its group have one."""
    check([64, 80, 96, 64], [4, 4, 4, 4], [4, 4, 4, 4], 16, make_spec())


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    starts = [3, 2000, 5, 1900, 7, 1]
    check(starts, [1] * 6, [0] * 6, 16, make_spec())
    inputs = make_inputs(starts, [1] * 6, np.arange(6 * 126, dtype=np.int32).reshape(6, 126), 16)
    groups = sorted(sorted(rows.tolist()) for rows, _ in _split(inputs, 16))
    assert groups == [[0, 2, 4, 5], [1, 3]]


@pytest.mark.parametrize("num_rows", [3, 8])
def test_a_common_prefix_is_read_once(num_rows: int) -> None:
    pages = np.arange(num_rows * 10, dtype=np.int32).reshape(num_rows, 10)
    pages[:, :6] = pages[0, :6]
    inputs = make_inputs([150] * num_rows, [1] * num_rows, pages, 16)
    assert [(len(rows), shared) for rows, shared in _split(inputs, 16)] == [(num_rows, 6)]
    without_sharing = _split(replace(inputs, shares=False), 16)
    assert [(len(rows), shared) for rows, shared in without_sharing] == [(num_rows, 0)]
