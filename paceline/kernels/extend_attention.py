"""Prefill attention over the paged cache: ragged chunks of queries, each seeing its row's whole past.

The keys and values of the pass are already in the cache (rope_kv.py), so a chunk, a cache hit and a whole prompt are
the same thing here. The heads that share a KV head are packed into one tile, so K and V are read once for all.

A few queries behind a long context are few tiles, and one program a tile and KV head would leave most multiprocessors
idle for as long as it takes to walk through it. Then the keys of a tile are split: each part leaves a partial result,
and whoever finishes last folds them, in order.

Rows with few queries behind the same long prefix go into one tile together (`shared_tiles`): it reads the prefix once,
without a mask, and then what each of them has of its own.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels._triton import launched, next_power_of_2, tl, triton

Words = npt.NDArray[np.int32]

_SPLIT_PROGRAMS = 264  # two for each multiprocessor of an H200
_SPLIT_KEYS = 512  # fewer a part are not worth the fold


@dataclass(frozen=True, slots=True)
class ExtendTuning:
    block_m: int = 128  # query heads per tile: block_m / G tokens
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


def tokens_per_tile(tuning: ExtendTuning, group: int) -> int:
    return tuning.block_m // next_power_of_2(group)


@dataclass(frozen=True, slots=True, eq=False)
class ExtendWorkspace:
    """For tiles whose keys are split. Layers reuse it since they run in order. Counts are zero between launches."""

    partials: torch.Tensor  # [programs, block_m, D] float32
    lse: torch.Tensor  # [programs, block_m] float32, base 2
    arrived: torch.Tensor  # [programs] int32

    @classmethod
    def empty(cls, tuning: ExtendTuning, head_dim: int, device: torch.device | str) -> ExtendWorkspace:
        return cls(
            partials=torch.empty(_SPLIT_PROGRAMS, tuning.block_m, head_dim, device=device),
            lse=torch.empty(_SPLIT_PROGRAMS, tuning.block_m, device=device),
            arrived=torch.zeros(_SPLIT_PROGRAMS, dtype=torch.int32, device=device),
        )


def extend_splits(num_tiles: int, kv_heads: int, num_keys: int) -> int:
    """Into how many parts to split the keys, at most num_keys, of each of so many tiles."""
    splits = 1
    while 2 * splits * num_tiles * kv_heads <= _SPLIT_PROGRAMS and num_keys // (2 * splits) >= _SPLIT_KEYS:
        splits *= 2
    return splits


def extend_tiles(starts: Words, lengths: Words, tokens: int, rows: Words | None = None) -> Words:
    """[tiles, 2]: (row, first token within the row's queries) of all rows or of these, the tile with most keys first so
    that none starts late."""
    counts = -(-lengths // tokens)
    if rows is not None:
        named = np.zeros(len(lengths), np.bool_)
        named[rows] = True
        counts[~named] = 0
    tile_rows = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    begins = np.arange(len(tile_rows), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (begins * tokens).astype(np.int32)
    order = np.argsort(-(starts[tile_rows] + offsets), kind="stable")
    return np.stack([tile_rows[order], offsets[order]], axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTiles:
    """Tiles of several rows each, with all their queries."""

    tiles: Words  # [n, 3]: first of its rows, number of rows, positions that all of them begin with
    rows: Words  # of the tiles, one after the other
    tokens: Words  # [n, tokens per tile]: which of the pass's tokens; -1: none


def shared_tiles(rows: Words, common: Words, query_starts: Words, tokens: int, least: int) -> SharedTiles | None:
    """Rows in depth-first order, of which rows[i] and rows[i + 1] begin with the same common[i] positions. Neighbours
    with `least` of them in common and no more than half a tile of queries each are put together. None: there are none.
    """
    lengths = np.diff(query_starts)
    groups: list[tuple[list[int], int]] = []  # rows, positions in common
    members: list[int] = []
    depth = filled = 0
    for row, before in zip(rows.tolist(), [0, *common.tolist()], strict=True):
        length = int(lengths[row])
        if members and min(depth, before) >= least and filled + length <= tokens and 2 * length <= tokens:
            members.append(row)
            depth, filled = min(depth, before), filled + length
            continue
        if len(members) > 1:
            groups.append((members, depth))
        members, depth, filled = ([row], 1 << 30, length) if 2 * length <= tokens else ([], 0, 0)
    if len(members) > 1:
        groups.append((members, depth))
    if not groups:
        return None
    counts = np.array([len(group) for group, _ in groups])
    found = np.full((len(groups), tokens), -1, np.int32)
    for index, (group, _) in enumerate(groups):
        queries = np.concatenate([np.arange(query_starts[row], query_starts[row + 1]) for row in group])
        found[index, : len(queries)] = queries
    tiles = np.stack([np.cumsum(counts) - counts, counts, [depth for _, depth in groups]], axis=1)
    return SharedTiles(tiles.astype(np.int32), np.array([row for group, _ in groups for row in group], np.int32), found)


def extend_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: list[int],
    starts: list[int],
    query_starts: list[int],
    window: int = 0,
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
        mine = q[begin:end].double().unflatten(1, (kv_heads, -1))
        scores = torch.einsum("tkgd,nkd->tkgn", mine, k) * head_dim**-0.5
        hidden = seen[None, :] > at[:, None]
        if window:
            hidden |= seen[None, :] <= at[:, None] - window
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        out[begin:end] = torch.einsum("tkgn,nkd->tkgd", scores.softmax(-1), v).flatten(1, 2)
    return out


@triton.jit
def _absorb(scores, v, top, total, acc):
    """One more tile of scores and values into the running softmax."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    keep = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    return higher, total * keep + tl.sum(weight, axis=1), tl.dot(weight.to(v.dtype), v, acc * keep[:, None])


@triton.jit
def _fold_parts(
    partials, lse, out, first_part, num_parts, place, inside, first_column, D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Half of the columns of a tile, from the parts its keys were split into, ascending."""
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, D // 2)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D // 2], tl.float32)
    for part in range(0, num_parts):
        row = (first_part + part).to(tl.int64) * BLOCK_M + m
        # .cg: written by other multiprocessors in this launch, so the first-level cache must not answer.
        weight = tl.load(lse + row, cache_modifier=".cg")
        source = row[:, None] * D + first_column + column[None, :]
        piece = tl.load(partials + source, cache_modifier=".cg")
        higher = tl.maximum(top, weight)
        keep = tl.exp2(top - higher)
        weight = tl.exp2(weight - higher)
        acc = acc * keep[:, None] + piece * weight[:, None]
        total = total * keep + weight
        top = higher
    target = out + place[:, None] + first_column + column[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@launched
@triton.jit
def _extend_attention_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    tiles,
    row_slots,
    positions,
    query_starts,
    out,
    partials,
    lse,
    arrived,
    table_stride,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(1)
    kv_head = tl.program_id(0)
    row = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)
    slot = tl.load(row_slots + row).to(tl.int64)
    first = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - first
    start = tl.load(positions + first)

    m = tl.arange(0, BLOCK_M)
    token = offset + m // PADDED_G
    inside = (token < length) & (m % PADDED_G < G)
    position = start + token
    d = tl.arange(0, D)
    query = ((first + token).to(tl.int64) * Q + kv_head * G + m % PADDED_G) * D
    place = query[:, None] + d[None, :]
    queries = tl.load(q + place, mask=inside[:, None], other=0.0)

    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    tokens: tl.constexpr = BLOCK_M // PADDED_G
    end = start + tl.minimum(offset + tokens, length)
    begin = start * 0
    if WINDOW:
        begin = tl.maximum(start + offset + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    # Keys up to here are seen by every query of the tile: no mask. A window masks at both ends, so it masks always.
    plain = begin if WINDOW else (start + offset + 1) // BLOCK_N * BLOCK_N
    if SPLIT:
        splits = tl.num_programs(2)
        size = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
        begin += tl.program_id(2) * size
        end = tl.minimum(begin + size, end)
        plain = tl.maximum(begin, tl.minimum(plain, end // BLOCK_N * BLOCK_N))
    table = page_table + slot * table_stride
    for at in tl.range(begin, plain, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // P).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(k_cache + source))) * scale
        top, total, acc = _absorb(scores, tl.load(v_cache + source), top, total, acc)
    for at in tl.range(plain, end, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        cached = n < end
        page = tl.load(table + n // P, mask=cached, other=0).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        k = tl.load(k_cache + source, mask=cached[:, None], other=0.0)
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, tl.dot(queries, tl.trans(k)) * scale, -float("inf"))
        v = tl.load(v_cache + source, mask=cached[:, None], other=0.0)
        top, total, acc = _absorb(scores, v, top, total, acc)
    total = tl.where(total == 0.0, 1.0, total)  # a part may have nothing that a query sees
    acc = acc / total[:, None]
    if not SPLIT:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside[:, None])
    else:
        whose = tile * K + kv_head
        mine = (whose * splits + tl.program_id(2)).to(tl.int64) * BLOCK_M + m
        tl.store(partials + mine[:, None] * D + d[None, :], acc)
        tl.store(lse + mine, top + tl.log2(total))
        tl.debug_barrier()  # every thread's partial before the one atomic that announces them
        if tl.atomic_add(arrived + whose, 1, sem="acq_rel") == splits - 1:
            tl.store(arrived + whose, 0)
            for first_column in tl.static_range(0, D, D // 2):  # two halves: a whole row of both would not fit
                _fold_parts(partials, lse, out, whose * splits, splits, query, inside, first_column, D, BLOCK_M)


@launched
@triton.jit
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
    table_stride,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(1)
    kv_head = tl.program_id(0)
    rows = tile_rows + tl.load(tiles + tile * 3)
    num_rows = tl.load(tiles + tile * 3 + 1)
    common = tl.load(tiles + tile * 3 + 2) // BLOCK_N * BLOCK_N

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    tokens: tl.constexpr = BLOCK_M // PADDED_G
    token = tl.load(tile_tokens + tile * tokens + m // PADDED_G)
    inside = (token >= 0) & (m % PADDED_G < G)
    position = tl.load(positions + token, mask=inside, other=-1)
    place = (token.to(tl.int64) * Q + kv_head * G + m % PADDED_G)[:, None] * D + d[None, :]
    queries = tl.load(q + place, mask=inside[:, None], other=0.0)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    table = page_table + tl.load(row_slots + tl.load(rows)).to(tl.int64) * table_stride
    for at in tl.range(0, common, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // P).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(k_cache + source))) * scale
        top, total, acc = _absorb(scores, tl.load(v_cache + source), top, total, acc)
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
            k = tl.load(k_cache + source, mask=cached[:, None], other=0.0)
            seen = mine[:, None] & (n[None, :] <= position[:, None])
            scores = tl.where(seen, tl.dot(queries, tl.trans(k)) * scale, -float("inf"))
            v = tl.load(v_cache + source, mask=cached[:, None], other=0.0)
            top, total, acc = _absorb(scores, v, top, total, acc)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside[:, None])


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
) -> None:
    """`extend_attention` for the rows of `SharedTiles`, in layers without a window."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    _extend_shared_kernel[(kv_heads, tiles.shape[0])](
        q, k_cache, v_cache, page_table, tiles, tile_rows, tile_tokens, row_slots, positions, query_starts, out,
        page_table.stride(0), head_dim**-0.5 * 1.4426950408889634, Q=q_heads, K=kv_heads, G=group,
        PADDED_G=next_power_of_2(group), D=head_dim, P=page_size, BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages, num_warps=tuning.num_warps,
    )  # fmt: skip


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    window: int = 0,
    tuning: ExtendTuning = ExtendTuning(),  # noqa: B008  (frozen)
    splits: int = 1,
    workspace: ExtendWorkspace | None = None,
) -> None:
    """out [T, Q, D] = causal attention of q [T, Q, D] over each row's cache [pages, P, K, D] up to its own position.

    Row r's queries are q[query_starts[r]:query_starts[r + 1]] in slot row_slots[r], at consecutive positions of
    which positions [T] holds each. tiles [n, 2] is `extend_tiles` for `tokens_per_tile`; rows it does not name (the
    decodes of a mixed pass) are left alone. All index tensors are int32 on the device. splits: `extend_splits`; more
    than one need a workspace.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    programs = kv_heads * tiles.shape[0] * splits
    assert splits == 1 or (workspace is not None and programs <= len(workspace.lse)), f"no room for {programs} parts"
    _extend_attention_kernel[(kv_heads, tiles.shape[0], splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        tiles,
        row_slots,
        positions,
        query_starts,
        out,
        out if workspace is None else workspace.partials,
        out if workspace is None else workspace.lse,
        out if workspace is None else workspace.arrived,
        page_table.stride(0),
        head_dim**-0.5 * 1.4426950408889634,
        Q=q_heads,
        K=kv_heads,
        G=group,
        PADDED_G=next_power_of_2(group),
        D=head_dim,
        P=page_size,
        WINDOW=window,
        SPLIT=splits > 1,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
    )
