"""Prefill attention over the paged cache: ragged chunks of queries, each over its row's whole past.

"Extend" is SGLang's word for prefill with a cached prefix. The keys and values of the pass are already in the cache
(rope_kv.py), so a chunk of a prompt, a prefix cache hit and a whole prompt are the same case. The query heads of one KV
head are packed into one tile, so K and V are read once for all of them.

The host computes the tiles (engine/cuda/tiles.py). Where the keys of a tile are split (split-KV), each split leaves a
partial result and a second launch merges them; other tiles write their output directly. A merge by the program that
finishes last would save the launch, but send all splits of a tile through one multiprocessor.

With `scales` the cache holds FP8 numbers (rope_kv.py): they are converted to the type of the queries, the scale of keys
is a part of the softmax scale, and the scale of values is applied to the output.

Rows with few queries after the same long prefix share a tile (`extend_shared`): it reads the prefix once, without a
mask, and then the remaining keys of each row.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import UNSPECIALIZED, launched, next_power_of_2, tl, triton
from paceline.kernels.heads import (
    load_heads,
    scaled_scores,
    score_factors,
    scores_reference,
    sink_weight,
    softmax_reference,
    within_head,
)
from paceline.kernels.layouts import (
    EXTEND_UNIT_WORDS,
    SHARED_TILE_WORDS,
    ExtendUnitWord,
    SharedTileWord,
    constants,
)

_MERGE_HEADS, _MERGE_SPLITS = 8, 8  # of a tile that one program merges at once
_ROW, _FIRST_TOKEN, _SPLIT, _NUM_SPLITS, _FIRST_PARTIAL = constants(ExtendUnitWord)
_TILE_FIRST_ROW, _TILE_NUM_ROWS, _TILE_NUM_COMMON = constants(SharedTileWord)
_UNIT_WORDS, _TILE_WORDS = tl.constexpr(EXTEND_UNIT_WORDS), tl.constexpr(SHARED_TILE_WORDS)


@dataclass(frozen=True, slots=True)
class ExtendTuning:
    block_m: int = 128  # query heads per tile: block_m / G tokens
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 2
    max_registers: int = 128  # two programs fit a multiprocessor


def extend_tuning(head_dim: int) -> ExtendTuning:
    """Larger heads need as many registers and as much shared memory with smaller tiles."""
    return ExtendTuning() if head_dim <= 128 else ExtendTuning(block_m=64, block_n=32, max_registers=168)


def tokens_per_tile(tuning: ExtendTuning, group: int) -> int:
    return tuning.block_m // next_power_of_2(group)


@dataclass(frozen=True, slots=True, eq=False)
class ExtendWorkspace:
    """Partial results of one layer at a time: layers run in order and reuse it."""

    partials: torch.Tensor  # [capacity, block_m, D] float32
    lse: torch.Tensor  # [capacity, block_m] float32, base 2

    @classmethod
    def empty(cls, capacity: int, tuning: ExtendTuning, head_dim: int, device: torch.device | str) -> ExtendWorkspace:
        return cls(
            partials=torch.empty(capacity, tuning.block_m, head_dim, device=device),
            lse=torch.empty(capacity, tuning.block_m, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExtendSplits:
    """For a batch in which the keys of some tiles are split: the tiles to merge, and where partial results go."""

    merges: torch.Tensor  # [m, EXTEND_UNIT_WORDS] int32: the first split of each of these tiles
    num_splits: int  # of all these tiles together, at most
    workspace: ExtendWorkspace


def extend_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: list[int],
    starts: list[int],
    query_starts: list[int],
    window: int = 0,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, Q, D] in float64."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for row, (slot, start) in enumerate(zip(row_slots, starts, strict=True)):
        begin, end = query_starts[row], query_starts[row + 1]
        seen = torch.arange(start + end - begin, device=q.device)
        at = torch.arange(start, start + end - begin, device=q.device)
        pages = page_table[slot, seen // page_size].long()
        k, v = (cache[pages, seen % page_size].double() for cache in (k_cache, v_cache))
        if scales is not None:
            k, v = k * scales[0, :, None], v * scales[1, :, None]
        mine = q[begin:end].double().unflatten(1, (kv_heads, -1))
        products = torch.einsum("tkgd,nkd->tkgn", mine, k)
        scores = scores_reference(products, head_dim**-0.5 if scale is None else scale, cap)
        hidden = seen[None, :] > at[:, None]
        if window:
            hidden |= seen[None, :] <= at[:, None] - window
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        out[begin:end] = torch.einsum("tkgn,nkd->tkgd", softmax_reference(scores, sinks), v).flatten(1, 2)
    return out


@triton.jit
def _add_to_softmax(scores, v, top, total, acc):
    """Adds a tile of scores and values to the online softmax."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    keep = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    return higher, total * keep + tl.sum(weight, axis=1), tl.dot(weight.to(v.dtype), v, acc * keep[:, None])


@triton.jit
def _output_offsets(
    tile, query_starts, kv_head, m, Q: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, D: tl.constexpr
):
    """Where in the output the query heads m of a tile begin, and which of them exist."""
    row = tl.load(tile + _ROW)
    first = tl.load(query_starts + row)
    token = tl.load(tile + _FIRST_TOKEN) + m // PADDED_G
    inside = (token < tl.load(query_starts + row + 1) - first) & (m % PADDED_G < G)
    return ((first + token).to(tl.int64) * Q + kv_head * G + m % PADDED_G) * D, inside


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _extend_attention_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    units,
    row_slots,
    positions,
    query_starts,
    out,
    partials,
    lse,
    scales,
    sinks,
    table_stride,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    CAP: tl.constexpr,
    P: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit = units + tl.program_id(1) * _UNIT_WORDS
    kv_head = tl.program_id(0)
    row = tl.load(unit + _ROW)
    if row < 0:
        return
    offset = tl.load(unit + _FIRST_TOKEN)
    slot = tl.load(row_slots + row).to(tl.int64)
    first = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - first
    start = tl.load(positions + first)

    m = tl.arange(0, BLOCK_M)
    token = offset + m // PADDED_G
    inside = (token < length) & (m % PADDED_G < G)
    position = start + token
    d = tl.arange(0, PADDED)
    place = ((first + token).to(tl.int64) * Q + kv_head * G + m % PADDED_G)[:, None] * D + d[None, :]
    queries = tl.load(q + place, mask=within_head(inside[:, None], D, PADDED), other=0.0)

    if SCALED:
        scale *= tl.load(scales + kv_head)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    tokens: tl.constexpr = BLOCK_M // PADDED_G
    end = start + tl.minimum(offset + tokens, length)
    begin = start * 0
    if WINDOW:
        begin = tl.maximum(start + offset + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    # Every query of the tile sees the keys up to here: no mask. A window masks at both ends, so it always masks.
    unmasked = begin if WINDOW else (start + offset + 1) // BLOCK_N * BLOCK_N
    if SPLIT:
        split = tl.load(unit + _SPLIT)
        num_splits = tl.load(unit + _NUM_SPLITS)
        blocks = tl.cdiv(end - begin, BLOCK_N)
        end = tl.minimum(begin + (split + 1) * blocks // num_splits * BLOCK_N, end)
        begin += split * blocks // num_splits * BLOCK_N
        unmasked = tl.maximum(begin, tl.minimum(unmasked, end // BLOCK_N * BLOCK_N))
    table = page_table + slot * table_stride
    for at in tl.range(begin, unmasked, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // P).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        k = load_heads(k_cache + source, D, PADDED).to(queries.dtype)
        scores = scaled_scores(tl.dot(queries, tl.trans(k)), scale, CAP)
        v = load_heads(v_cache + source, D, PADDED).to(queries.dtype)
        top, total, acc = _add_to_softmax(scores, v, top, total, acc)
    for at in tl.range(unmasked, end, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        cached = n < end
        page = tl.load(table + n // P, mask=cached, other=0).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        k = tl.load(k_cache + source, mask=within_head(cached[:, None], D, PADDED), other=0.0)
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        scores = scaled_scores(tl.dot(queries, tl.trans(k.to(queries.dtype))), scale, CAP)
        scores = tl.where(seen, scores, -float("inf"))
        v = tl.load(v_cache + source, mask=within_head(cached[:, None], D, PADDED), other=0.0)
        top, total, acc = _add_to_softmax(scores, v.to(queries.dtype), top, total, acc)
    total = tl.where(total == 0.0, 1.0, total)  # a split may have no key that a query sees
    divisor = total
    if SINKS:
        is_whole = tl.load(unit + _NUM_SPLITS) == 1
        weight = sink_weight(sinks, kv_head * G + m % PADDED_G, m % PADDED_G < G, top)
        divisor += tl.where(is_whole, weight, 0.0)
    acc = acc / divisor[:, None]
    if SCALED:
        acc = acc * tl.load(scales + K + kv_head)
    if tl.load(unit + _NUM_SPLITS) == 1:
        # Computed again: kept through the loops, these would not fit into registers.
        again, inside = _output_offsets(unit, query_starts, kv_head, m, Q, G, PADDED_G, D)
        filled = within_head(inside[:, None], D, PADDED)
        tl.store(out + again[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=filled)
    elif SPLIT:
        mine = ((tl.load(unit + _FIRST_PARTIAL) + tl.load(unit + _SPLIT)) * K + kv_head).to(tl.int64) * BLOCK_M + m
        if PADDED != D:
            tl.store(partials + mine[:, None] * D + d[None, :], acc, mask=(d < D)[None, :])
        else:
            tl.store(partials + mine[:, None] * D + d[None, :], acc)
        tl.store(lse + mine, top + tl.log2(total))


@launched
@triton.jit
def _extend_merge_kernel(
    merges,
    query_starts,
    partials,
    lse,
    out,
    sinks,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merges the splits of some query heads of a tile, SPLITS at once so that their loads overlap."""
    kv_head = tl.program_id(0)
    tile = merges + tl.program_id(2) * _UNIT_WORDS
    if tl.load(tile + _ROW) < 0:
        return
    num_splits = tl.load(tile + _NUM_SPLITS)
    first_partial = tl.load(tile + _FIRST_PARTIAL)
    m = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    place, inside = _output_offsets(tile, query_starts, kv_head, m, Q, G, PADDED_G, D)
    top = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    for at in range(0, num_splits, SPLITS):
        split = at + tl.arange(0, SPLITS)
        here = (split < num_splits)[:, None] & inside[None, :]
        source = ((first_partial + split) * K + kv_head).to(tl.int64)[:, None] * BLOCK_M + m[None, :]
        weight = tl.load(lse + source, mask=here, other=-float("inf"))
        places = here[:, :, None]
        if PADDED != D:
            places = places & (d < D)[None, None, :]
        pieces = tl.load(partials + source[:, :, None] * D + d[None, None, :], mask=places, other=0.0)
        higher = tl.maximum(top, tl.max(weight, axis=0))
        keep = tl.exp2(top - higher)
        weight = tl.exp2(weight - higher[None, :])
        acc = acc * keep[:, None] + tl.sum(pieces * weight[:, :, None], axis=0)
        total = total * keep + tl.sum(weight, axis=0)
        top = higher
    if SINKS:
        total += sink_weight(sinks, kv_head * G + m % PADDED_G, inside, top)
    acc = acc / tl.where(inside, total, 1.0)[:, None]
    filled = within_head(inside[:, None], D, PADDED)
    tl.store(out + place[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=filled)


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _extend_shared_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    tiles,
    tile_rows,
    tile_tokens,
    row_slots,
    positions,
    query_starts,
    out,
    scales,
    sinks,
    table_stride,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    CAP: tl.constexpr,
    P: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(1)
    kv_head = tl.program_id(0)
    rows = tile_rows + tl.load(tiles + tile * _TILE_WORDS + _TILE_FIRST_ROW)
    num_rows = tl.load(tiles + tile * _TILE_WORDS + _TILE_NUM_ROWS)
    common = tl.load(tiles + tile * _TILE_WORDS + _TILE_NUM_COMMON) // BLOCK_N * BLOCK_N

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED)
    tokens: tl.constexpr = BLOCK_M // PADDED_G
    token = tl.load(tile_tokens + tile * tokens + m // PADDED_G)
    inside = (token >= 0) & (m % PADDED_G < G)
    position = tl.load(positions + token, mask=inside, other=-1)
    place = (token.to(tl.int64) * Q + kv_head * G + m % PADDED_G)[:, None] * D + d[None, :]
    queries = tl.load(q + place, mask=within_head(inside[:, None], D, PADDED), other=0.0)
    if SCALED:
        scale *= tl.load(scales + kv_head)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)

    table = page_table + tl.load(row_slots + tl.load(rows)).to(tl.int64) * table_stride
    for at in tl.range(0, common, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // P).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        k = load_heads(k_cache + source, D, PADDED).to(queries.dtype)
        scores = scaled_scores(tl.dot(queries, tl.trans(k)), scale, CAP)
        v = load_heads(v_cache + source, D, PADDED).to(queries.dtype)
        top, total, acc = _add_to_softmax(scores, v, top, total, acc)
    for index in range(0, num_rows):
        row = tl.load(rows + index)
        first = tl.load(query_starts + row)
        after = tl.load(query_starts + row + 1)
        end = tl.load(positions + after - 1) + 1
        mine = (token >= first) & (token < after)
        table = page_table + tl.load(row_slots + row).to(tl.int64) * table_stride
        for at in tl.range(common, end, BLOCK_N, num_stages=STAGES):
            n = at + tl.arange(0, BLOCK_N)
            cached = n < end
            page = tl.load(table + n // P, mask=cached, other=0).to(tl.int64)
            source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
            k = tl.load(k_cache + source, mask=within_head(cached[:, None], D, PADDED), other=0.0)
            seen = mine[:, None] & (n[None, :] <= position[:, None])
            scores = scaled_scores(tl.dot(queries, tl.trans(k.to(queries.dtype))), scale, CAP)
            scores = tl.where(seen, scores, -float("inf"))
            v = tl.load(v_cache + source, mask=within_head(cached[:, None], D, PADDED), other=0.0)
            top, total, acc = _add_to_softmax(scores, v.to(queries.dtype), top, total, acc)
    if SINKS:
        total += sink_weight(sinks, kv_head * G + m % PADDED_G, m % PADDED_G < G, top)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        acc = acc * tl.load(scales + K + kv_head)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=within_head(inside[:, None], D, PADDED))


def extend_shared(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_tokens: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    tuning: ExtendTuning = ExtendTuning(),  # noqa: B008  (frozen)
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """`extend_attention` for the rows of `SharedTiles` (engine/cuda/tiles.py), in layers without a sliding window."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    factor, base_2_cap = score_factors(head_dim**-0.5 if scale is None else scale, cap)
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    _extend_shared_kernel[(kv_heads, tiles.shape[0])](
        q,
        k_cache,
        v_cache,
        page_table,
        tiles,
        tile_rows,
        tile_tokens,
        row_slots,
        positions,
        query_starts,
        out,
        q if scales is None else scales,
        q if sinks is None else sinks,
        page_table.stride(0),
        factor,
        Q=q_heads,
        K=kv_heads,
        G=group,
        PADDED_G=next_power_of_2(group),
        D=head_dim,
        PADDED=next_power_of_2(head_dim),
        CAP=base_2_cap,
        P=page_size,
        SCALED=scales is not None,
        SINKS=sinks is not None,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
    )


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    units: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    window: int = 0,
    tuning: ExtendTuning = ExtendTuning(),  # noqa: B008  (frozen)
    splits: ExtendSplits | None = None,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """out [T, Q, D] = causal attention of q [T, Q, D] over each row's cache [pages, P, K, D] up to its own position.

    Row r's queries are q[query_starts[r]:query_starts[r + 1]] in slot row_slots[r], at the consecutive positions in
    positions [T]. units [n, EXTEND_UNIT_WORDS] come from `extend_units` for `tokens_per_tile`; the outputs of other
    rows (decodes of a mixed batch) are not written, and units and merges of row -1 are padding. All index tensors are
    int32 on the device. Without `splits` every unit must be a whole tile. sinks [Q]: as in `decode_attention`.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    factor, base_2_cap = score_factors(head_dim**-0.5 if scale is None else scale, cap)
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    workspace = None if splits is None else splits.workspace
    if splits is not None:
        used, capacity = splits.num_splits * kv_heads, len(splits.workspace.lse)
        assert used <= capacity, f"{used} partial results do not fit a workspace for {capacity}"
    _extend_attention_kernel[(kv_heads, units.shape[0])](
        q,
        k_cache,
        v_cache,
        page_table,
        units,
        row_slots,
        positions,
        query_starts,
        out,
        out if workspace is None else workspace.partials,
        out if workspace is None else workspace.lse,
        q if scales is None else scales,
        q if sinks is None else sinks,
        page_table.stride(0),
        factor,
        Q=q_heads,
        K=kv_heads,
        G=group,
        PADDED_G=next_power_of_2(group),
        D=head_dim,
        PADDED=next_power_of_2(head_dim),
        CAP=base_2_cap,
        P=page_size,
        SCALED=scales is not None,
        SINKS=sinks is not None,
        WINDOW=window,
        SPLIT=splits is not None,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
    )
    if splits is not None and workspace is not None:
        _extend_merge_kernel[(kv_heads, tuning.block_m // _MERGE_HEADS, splits.merges.shape[0])](
            splits.merges,
            query_starts,
            workspace.partials,
            workspace.lse,
            out,
            out if sinks is None else sinks,
            Q=q_heads,
            K=kv_heads,
            G=group,
            PADDED_G=next_power_of_2(group),
            D=head_dim,
            PADDED=next_power_of_2(head_dim),
            SINKS=sinks is not None,
            BLOCK_M=tuning.block_m,
            HEADS=_MERGE_HEADS,
            SPLITS=_MERGE_SPLITS,
            num_warps=4,
        )
