"""Every kernel at real shapes in bfloat16, against its reference: `pytest -m gpu tests/gpu`."""

import random

import numpy as np
import pytest
import torch

from paceline.engine.cuda.packing import adjust_runs, pack_runs, sampling_words
from paceline.engine.cuda.tiles import SplitRule, extend_tiles, extend_units, shared_tiles
from paceline.kernels.adjust import (
    AdjustState,
    adjust_logits,
    adjust_logits_reference,
    mask_logits,
    mask_logits_reference,
    write_runs,
    write_runs_reference,
)
from paceline.kernels.decode_attention import (
    NONE_SHARED,
    OWN_UNITS,
    SHARED_UNITS,
    DecodeTuning,
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    decode_attention_tuning,
)
from paceline.kernels.decode_units import Chunks, DecodeUnits, decode_units
from paceline.kernels.extend_attention import (
    ExtendSplits,
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    extend_attention_reference,
    extend_shared,
    tokens_per_tile,
)
from paceline.kernels.layouts import LOGPROB_WORDS, LogprobWord
from paceline.kernels.linear import LinearTuning, LinearWorkspace, linear, linear_reference, num_squares
from paceline.kernels.logprobs import LogprobWorkspace, chosen_logprobs, top_logprobs, top_logprobs_reference
from paceline.kernels.pool_states import pool_states, pool_states_reference
from paceline.kernels.rms_norm import rms_norm, rms_norm_reference
from paceline.kernels.rope_kv import rope_kv, rope_kv_reference, rope_table
from paceline.kernels.sampling import SampleWorkspace, sample, sample_reference
from paceline.kernels.silu_mul import silu_mul, silu_mul_reference
from paceline.kernels.slot_state import SlotState
from paceline.request import Request, SamplingParams
from paceline.sampling.adjust import logit_adjustments, token_counts
from paceline.scheduler.plan import Join
from paceline.scheduler.tracked_request import TrackedRequest
from tests.kernels.cases import poison_unwritten, poisoned, random_cache, relative_error
from tests.kernels.trees import Sharing, random_sharing

BF16 = torch.bfloat16
EPS = 1e-6


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, np.int32)).cuda()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


@pytest.mark.parametrize(
    ("pdl", "rows", "short_contexts"), [(True, 64, False), (False, 160, False), (False, 256, False), (False, 96, True)]
)
@pytest.mark.parametrize(
    ("lengths", "page_size", "q_heads", "kv_heads", "head_dim", "window"),
    [
        ([264] * 64, 16, 16, 8, 128, 0),
        ([264], 16, 16, 8, 128, 0),
        ([5, 700, 1023, 1024, 1025, 0, 3000], 1, 40, 8, 128, 0),
        ([511, 512, 513, 1536], 64, 9, 3, 64, 0),
        ([30000], 16, 16, 8, 128, 0),
        ([700, 5, 2000], 16, 16, 2, 128, 500),
    ],
)
def test_decode_attention_at_size(
    lengths: list[int],
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    pdl: bool,
    rows: int,
    short_contexts: bool,
) -> None:
    tunings = decode_attention_tuning(rows, q_heads // kv_heads, 0, short_contexts)
    check_decode(lengths, page_size, q_heads, kv_heads, head_dim, window, pdl, tunings)


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("seed", range(2))
def test_decode_attention_with_shared_segments(seed: int, block_m: int) -> None:
    rng = random.Random(seed)
    group = rng.choice([1, 2, 5])
    sharing = random_sharing(rng, 96, max_length=2600, chunk=512, align=64, rows_per_unit=block_m // group)
    tunings = decode_attention_tuning(96, group, block_m)
    check_decode(sharing.lengths, 16, 4 * group, 4, 128, 0, False, tunings, sharing)


@pytest.mark.parametrize(("rows", "window"), [(1, 0), (8, 128), (96, 0), (256, 128)])
def test_decode_attention_with_sinks(rows: int, window: int) -> None:
    """The heads of gpt-oss; shared segments where many rows have no window."""
    rng = random.Random(rows)
    if rows == 96:
        sharing = random_sharing(rng, rows, max_length=2600, chunk=512, align=64, rows_per_unit=4)
        tunings = decode_attention_tuning(rows, 8, 32)
        check_decode(sharing.lengths, 16, 64, 8, 64, window, False, tunings, sharing, with_sinks=True)
        return
    lengths = [rng.randrange(3000) for _ in range(rows)]
    check_decode(lengths, 16, 64, 8, 64, window, False, decode_attention_tuning(rows, 8, 0), with_sinks=True)


def check_decode(
    lengths: list[int],
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    pdl: bool,
    tunings: tuple[DecodeTuning, DecodeTuning],
    shared: Sharing | None = None,
    with_sinks: bool = False,
) -> None:
    sinks = torch.linspace(-8.0, 4.0, q_heads, device="cuda").to(BF16) if with_sinks else None
    rows, longest = len(lengths), max(lengths) + 64
    shared_pages = None if shared is None else shared.shared_pages(page_size)
    cache = random_cache(rows, longest, page_size, kv_heads, head_dim, BF16, "cuda", shared_pages)
    poison_unwritten(cache, lengths)
    chunks = Chunks(512, 512, 1) if shared else Chunks()
    capacity = chunks.capacity(rows, longest) + (0 if shared is None else sum(count for _, count in shared.rows))
    buffers = DecodeUnits.empty(rows, capacity, capacity, "cuda")
    if shared is not None:
        shared.write(buffers)
    workspace = DecodeWorkspace.empty(rows, capacity, q_heads, kv_heads, head_dim, "cuda")
    table = rope_table(longest, head_dim, 1e6, "cuda")
    norms = (torch.rand(head_dim, device="cuda").to(BF16) + 0.5, torch.rand(head_dim, device="cuda").to(BF16) + 0.5)
    slots, positions = torch.arange(rows, device="cuda").int(), ints(lengths)
    for _ in range(3):
        qkv = randn(rows, (q_heads + 2 * kv_heads) * head_dim)
        k, v = cache.k.clone(), cache.v.clone()
        expected = decode_attention_reference(
            qkv, k, v, cache.page_table, slots, positions, table, *norms, EPS, window, sinks=sinks
        )
        out = poisoned(rows, q_heads * head_dim, dtype=BF16, device="cuda")
        decode_units(buffers, slots, ints([rows]), positions, chunks, window)
        inputs = (qkv, cache.k, cache.v, cache.page_table, table, *norms, EPS, buffers, workspace, out, window)
        if shared is None:
            decode_attention(*inputs, tunings[0], pdl, NONE_SHARED, sinks=sinks)
        else:
            decode_attention(*inputs, tunings[1], pdl, SHARED_UNITS, sinks=sinks)
            decode_attention(*inputs, tunings[0], pdl, OWN_UNITS, sinks=sinks)
        by_row = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(by_row.max()) < 1.5e-2, f"row {int(by_row.argmax())} is off by {float(by_row.max())}"
        assert relative_error(cache.k.nan_to_num(), k.nan_to_num()) < 1e-3
        assert torch.equal(cache.v.nan_to_num(), v.nan_to_num())
        assert not workspace.arrived.any()


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("split_k", [1, 4])
def test_linear_at_size(rows: int, split_k: int) -> None:
    tuning = LinearTuning(16 if rows <= 16 else 64, 32, 128, 4, 4, split_k)
    workspace = LinearWorkspace(torch.empty(4 * rows * 4096, device="cuda"), ints(np.zeros(4096)))
    x, weight = randn(rows, 1024), randn(4096, 1024) / 32
    squares = x.float().square().sum(-1, keepdim=True)
    out = poisoned(rows, 4096, dtype=BF16, device="cuda")
    linear(x, weight, out, tuning, squares=squares, eps=EPS, workspace=workspace)
    assert relative_error(out, linear_reference(x, weight, eps=EPS)) < 1e-2
    x, weight, stream = randn(rows, 2048), randn(1024, 2048) / 45, randn(rows, 1024)
    expected = linear_reference(x, weight, residual=stream)
    left = poisoned(rows, num_squares(1024, tuning), dtype=torch.float32, device="cuda")
    linear(x, weight, stream, tuning, residual=stream, squares_out=left, workspace=workspace)
    assert relative_error(stream, expected) < 1e-2
    assert relative_error(left.sum(-1), stream.double().square().sum(-1)) < 1e-4
    if split_k == 1:
        x, weight = randn(rows, 1024), randn(6144, 1024) / 32
        squares = x.float().square().sum(-1, keepdim=True)
        out = poisoned(rows, 3072, dtype=BF16, device="cuda")
        linear(x, weight, out, tuning, squares=squares, eps=EPS, gated=True)
        assert relative_error(out, linear_reference(x, weight, eps=EPS, gated=True)) < 1e-2


def test_elementwise_at_size() -> None:
    x, weight, stream = randn(300, 1024), randn(1024), randn(300, 1024)
    expected, total = rms_norm_reference(x, weight, EPS, stream)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, EPS, out, stream)
    assert relative_error(out, expected) < 5e-3
    assert torch.equal(stream, total)
    gate_up = randn(300, 6144)
    act = poisoned(300, 3072, dtype=BF16, device="cuda")
    silu_mul(gate_up, act)
    assert relative_error(act, silu_mul_reference(gate_up)) < 5e-3


def test_pooled_states_at_size() -> None:
    states = randn(8192, 1024)
    ranges = ints([[0, 2048], [2048, 2049], *([at, at + 200] for at in range(2049, 7900, 200))])
    out = poisoned(len(ranges), 1024, dtype=torch.float32, device="cuda")
    pool_states(states, ranges, out)
    assert relative_error(out, pool_states_reference(states, ranges)) < 1e-5


@pytest.mark.parametrize("window", [0, 700])
def test_extend_at_size(window: int) -> None:
    starts, lengths = [0, 1000, 17, 4000], [900, 65, 1, 300]
    cache = random_cache(4, 4400, 16, 8, 128, BF16, "cuda")
    query_starts = [0, *np.cumsum(lengths).tolist()]
    positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
    slots = torch.arange(4, device="cuda").int().repeat_interleave(torch.tensor(lengths, device="cuda"))
    qkv, table, norm = randn(sum(lengths), 4096), rope_table(4400, 128, 1e6, "cuda"), randn(128).abs()
    q = poisoned(sum(lengths), 16, 128, dtype=BF16, device="cuda")
    k, v = cache.k.clone(), cache.v.clone()
    turns = positions.flip(0).contiguous()
    expected_q = rope_kv_reference(qkv, k, v, cache.page_table, slots, positions, turns, table, norm, norm, EPS)
    rope_kv(qkv, q, cache.k, cache.v, cache.page_table, slots, positions, turns, table, norm, norm, EPS)
    assert relative_error(q, expected_q) < 1e-3
    assert relative_error(cache.k, k) < 1e-3
    tuning = ExtendTuning()
    tiles = extend_tiles(np.array(starts, np.int32), np.array(lengths, np.int32), tokens_per_tile(tuning, 2))
    units = ints(extend_units(tiles, np.ones(len(tiles), np.int32)).units)
    out = torch.full_like(q, torch.nan)
    extend_attention(
        q, cache.k, cache.v, cache.page_table, units, ints(range(4)), positions, ints(query_starts), out, window, tuning
    )
    expected = extend_attention_reference(
        q, cache.k, cache.v, cache.page_table, list(range(4)), starts, query_starts, window
    )
    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize(
    ("starts", "lengths", "q_heads", "window", "num_split"),
    [
        ([30_000, 9_000], [100, 1], 16, 0, 3),
        ([24_000, 0, 0], [64, 576, 576], 16, 0, 1),
        ([24_000], [138], 16, 0, 3),
        ([16_000, 0, 0, 0], [1024, 512, 512, 3], 16, 0, 16),
        ([20_000, 700], [40, 300], 40, 0, 3),
        ([24_000, 0], [64, 576], 16, 5000, 1),
    ],
)
def test_a_few_queries_after_a_long_context_at_size(
    starts: list[int], lengths: list[int], q_heads: int, window: int, num_split: int
) -> None:
    """Next to other prompts, which are not split; every run has the same bits."""
    rows, longest = len(starts), max(starts) + 1088
    cache = random_cache(rows, longest, 16, 8, 128, BF16, "cuda")
    query_starts = [0, *np.cumsum(lengths).tolist()]
    positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
    q, tuning, rule = randn(sum(lengths), q_heads, 128), ExtendTuning(), SplitRule(8, window)
    per_tile = tokens_per_tile(tuning, q_heads // 8)
    tiles = extend_tiles(np.array(starts, np.int32), np.array(lengths, np.int32), per_tile)
    units = extend_units(tiles, rule.splits(tiles[:, 2]))
    assert len(units.merges) == num_split
    workspace = ExtendWorkspace.empty(rule.max_partials, tuning, 128, "cuda")
    splits = ExtendSplits(ints(units.merges), units.num_splits, workspace)
    slots = list(range(rows))
    expected = extend_attention_reference(q, cache.k, cache.v, cache.page_table, slots, starts, query_starts, window)
    outs = []
    for _ in range(3):
        outs.append(torch.full_like(q, torch.nan))
        extend_attention(
            q,
            cache.k,
            cache.v,
            cache.page_table,
            ints(units.units),
            ints(slots),
            positions,
            ints(query_starts),
            outs[-1],
            window,
            tuning,
            splits,
        )
        assert relative_error(outs[-1], expected) < 1e-2
        assert torch.equal(outs[-1], outs[0])


def test_prompts_that_share_tiles_at_size() -> None:
    """Sixteen rows share 2,048 positions, most with few queries."""
    rng = np.random.default_rng(0)
    starts = (2048 + 16 * rng.integers(0, 20, 16)).tolist()
    lengths = [*rng.integers(1, 12, 14).tolist(), 40, 200]
    cache = random_cache(16, 2700, 16, 8, 128, BF16, "cuda", [(row, 0, 128) for row in range(1, 16)])
    query_starts = np.array([0, *np.cumsum(lengths)], np.int32)
    positions = ints(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
    q = randn(sum(lengths), 16, 128)
    tuning = ExtendTuning()
    tokens = tokens_per_tile(tuning, 2)
    found = shared_tiles(np.arange(16, dtype=np.int32), np.full(15, 2048, np.int32), query_starts, tokens, 256)
    assert found is not None and len(found.rows) == 14
    rest = np.setdiff1d(np.arange(16, dtype=np.int32), found.rows)
    tiles = extend_tiles(np.array(starts, np.int32), np.array(lengths, np.int32), tokens, rest)
    units = ints(extend_units(tiles, np.ones(len(tiles), np.int32)).units)
    out = torch.full_like(q, torch.nan)
    columns = (ints(range(16)), positions, ints(query_starts))
    parts = (ints(part) for part in (found.tiles, found.rows, found.tokens))
    extend_shared(q, cache.k, cache.v, cache.page_table, *parts, *columns, out, tuning)
    extend_attention(q, cache.k, cache.v, cache.page_table, units, *columns, out, tuning=tuning)
    expected = extend_attention_reference(
        q, cache.k, cache.v, cache.page_table, list(range(16)), starts, query_starts.tolist()
    )
    assert relative_error(out, expected) < 1e-2


def test_sampling_at_size() -> None:
    params = [(0.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (1.0, 0, 0.9, 0.0), (1.2, 50, 1.0, 0.1)] * 8
    rows = len(params)
    state = SlotState.empty(rows, 64, 16, rows, "cuda")
    for row, p in enumerate(params):
        state.sampling[row] = torch.from_numpy(sampling_words(*p, 1000 + row)).cuda()
    logits = torch.randn(rows, 151_936, device="cuda") * 4
    results = ints(np.full((2, rows), -1))
    slots, positions = torch.arange(rows, device="cuda").int(), ints([7] * rows)
    sample(logits, slots, positions, ints([rows]), state, results, ints([2]), SampleWorkspace.empty(rows, "cuda"))
    expected = [sample_reference(logits[row].cpu(), *p, 1000 + row, 8) for row, p in enumerate(params)]
    assert results[0].tolist() == expected


@pytest.mark.parametrize("vocab", [151_936, 49_151])
@pytest.mark.parametrize("rows", [1, 7, 64, 256])
def test_logprobs_at_size(rows: int, vocab: int) -> None:
    """Bfloat16 logits have many equals; some rows have little else, or few finite logits. Every third row has no
    logprobs."""
    requests = [None if row % 3 == 2 else (20, 5, 0, 1)[row % 4] for row in range(rows)]
    ids = (0, vocab - 1, vocab // 2)
    sampling = torch.stack(
        [torch.from_numpy(sampling_words(0, 0, 1, 0, 0, num_top, ids)) for num_top in requests]
    ).cuda()
    logits = (torch.randn(rows, vocab, device="cuda") * 3).to(BF16)
    logits[::5] = (logits[::5] / 3).round()
    logits[3::7, 5:] = -torch.inf
    slots, results = torch.arange(rows, device="cuda").int(), ints([[17] * rows, [4] * rows])
    ring, workspace = ints(np.full((2, rows, LOGPROB_WORDS), -77)), LogprobWorkspace.empty(rows, "cuda")
    for _ in range(2):  # the second time must give the same
        top_logprobs(logits, slots, ints([rows]), sampling, ring, ints([1]), workspace)
        chosen_logprobs(logits, slots, ints([rows]), sampling, results, ring, ints([1]), workspace)
    assert not workspace.arrived.any() and (ring[0] == -77).all()
    for row in range(0, rows, max(1, rows // 40)):
        words, num_top = ring[1, row].cpu(), requests[row]
        if num_top is None:
            assert (words == -77).all()
            continue
        top, logprobs, requested = top_logprobs_reference(logits[row].float().cpu(), num_top, list(ids))
        assert words[LogprobWord.TOP_IDS :][:num_top].tolist() == top
        floats = words.view(torch.float32)
        fields = {LogprobWord.CHOSEN: 1, LogprobWord.TOP_LOGPROBS: num_top, LogprobWord.REQUESTED: len(ids)}
        found = torch.cat([floats[first:][:count] for first, count in fields.items()])
        expected = torch.cat([logprobs[[4]], logprobs[top], requested])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_adjusting_and_masking_at_size() -> None:
    rows, vocab, length = 40, 151_936, 4096
    state = SlotState.empty(rows, length, 16, rows, "cuda")
    pool = np.random.default_rng(3).integers(0, vocab, (rows, length)).astype(np.int32)
    state.token_pool.copy_(torch.from_numpy(pool))
    lists, reference = AdjustState.empty(rows, length, "cuda"), AdjustState.empty(rows, length, "cpu")
    runs = []
    for row in range(rows):
        params = SamplingParams(
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.2,
            min_tokens=99_999,
            logit_bias=dict.fromkeys(range(row * 20), 1.5),
        )
        words = ((5,), (int(pool[row, 99]), 6))
        request = Request(str(row), pool[row, : 50 * row + 1], params, bad_word_ids=words, eos_token_ids=(1, 2))
        by = logit_adjustments(Join.of(TrackedRequest(request), row), vocab)
        assert by is not None
        tokens = pool[row, : 60 * row + 2]
        runs += adjust_runs(
            row,
            length,
            (by.repetition, by.frequency, by.presence),
            (by.bias_ids, by.bias),
            (by.banned_ids, by.banned_until, by.banned_prefixes),
            token_counts(tokens, by.num_prompt_tokens),
            len(tokens),
        )
    packed = pack_runs(runs)
    write_runs(torch.from_numpy(packed).cuda(), lists.words)
    write_runs_reference(packed, reference)
    assert torch.equal(lists.words.cpu(), reference.words)
    slots = torch.arange(rows, device="cuda").int()
    for step in range(3):  # the first pass feeds a token that is counted already
        positions = ints([60 * row + 1 + step for row in range(rows)])
        logits = torch.randn(rows, vocab, device="cuda") * 4
        expected = logits.cpu()
        adjust_logits(logits, slots, positions, ints([rows]), state.token_pool, lists)
        adjust_logits_reference(expected, slots.cpu(), positions.cpu(), rows, torch.from_numpy(pool), reference)
        torch.testing.assert_close(logits.cpu(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(lists.words.cpu(), reference.words)
    bits = ints(np.random.default_rng(4).integers(-(2**31), 2**31, (7, vocab // 32)))
    masked, chosen = logits.cpu(), ints([3, 9, 0, 38, 11, 12, 13])
    mask_logits_reference(masked, chosen.cpu(), bits.cpu())
    mask_logits(logits, ints([len(chosen)]), chosen, bits)
    assert torch.equal(logits.cpu(), masked)


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_small_top_k_at_every_number_of_programs(rows: int) -> None:
    """Bfloat16 logits have many equals, and some rows so many that they cannot be collected."""
    params = [(0.7, 50, 0.9, 0.0), (1.0, 1, 1.0, 0.0), (1.1, 128, 0.99, 0.01), (0.6, 129, 0.95, 0.0)]
    state = SlotState.empty(rows, 64, 16, rows, "cuda")
    for row in range(rows):
        state.sampling[row] = torch.from_numpy(sampling_words(*params[row % 4], row)).cuda()
    logits = (torch.randn(rows, 151_936, device="cuda") * 3).to(BF16)
    logits[::5] = (logits[::5] / 3).round()
    results, workspace = ints(np.full((1, rows), -1)), SampleWorkspace.empty(rows, "cuda")
    slots, positions = torch.arange(rows, device="cuda").int(), ints([7] * rows)
    sample(logits, slots, positions, ints([rows]), state, results, ints([0]), workspace)
    some = range(0, rows, max(1, rows // 40))
    assert [int(results[0, row]) for row in some] == [
        sample_reference(logits[row].float().cpu(), *params[row % 4], row, 8) for row in some
    ]
    assert not workspace.arrived.any()
