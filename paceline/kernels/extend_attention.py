"""Prefill attention over the paged cache: ragged chunks of queries, each seeing its row's whole past.

The keys and values of the pass are already in the cache (rope_kv.py), so a chunk, a cache hit and a whole prompt are
the same thing here. The heads that share a KV head are packed into one tile, so K and V are read once for all.

Which tiles there are is the host's business (extend_tiles.py). Where the keys of some are split, each part leaves a
partial result and a second launch folds them; the others write what they have. A fold by whoever finishes last would
save the launch, but pull all parts of a tile through one multiprocessor.

Rows with few queries behind the same long prefix go into one tile together (`shared_tiles`): it reads the prefix once,
without a mask, and then what each of them has of its own.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import launched, next_power_of_2, tl, triton

_FOLD_HEADS, _FOLD_PARTS = 8, 8  # of a tile that one program folds at once


@dataclass(frozen=True, slots=True)
class ExtendTuning:
    block_m: int = 128  # query heads per tile: block_m / G tokens
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 2
    max_registers: int = 128  # two programs fit a multiprocessor


def tokens_per_tile(tuning: ExtendTuning, group: int) -> int:
    return tuning.block_m // next_power_of_2(group)


@dataclass(frozen=True, slots=True, eq=False)
class ExtendWorkspace:
    """Partial results of one layer at a time; layers reuse it since they run in order."""

    partials: torch.Tensor  # [room, block_m, D] float32
    lse: torch.Tensor  # [room, block_m] float32, base 2

    @classmethod
    def empty(cls, room: int, tuning: ExtendTuning, head_dim: int, device: torch.device | str) -> ExtendWorkspace:
        return cls(
            partials=torch.empty(room, tuning.block_m, head_dim, device=device),
            lse=torch.empty(room, tuning.block_m, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExtendParts:
    """For a pass in which some tiles have their keys split: `ExtendUnits` on the device, and where partials go."""

    folds: torch.Tensor  # [m, 5]
    num_parts: int
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
def _places(tile, query_starts, kv_head, m, Q: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, D: tl.constexpr):
    """Where in the output the query heads m of a tile begin, and which of them there are."""
    row = tl.load(tile)
    first = tl.load(query_starts + row)
    token = tl.load(tile + 1) + m // PADDED_G
    inside = (token < tl.load(query_starts + row + 1) - first) & (m % PADDED_G < G)
    return ((first + token).to(tl.int64) * Q + kv_head * G + m % PADDED_G) * D, inside


@launched
@triton.jit
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
    unit = units + tl.program_id(1) * 5
    kv_head = tl.program_id(0)
    row = tl.load(unit)
    if row < 0:
        return
    offset = tl.load(unit + 1)
    slot = tl.load(row_slots + row).to(tl.int64)
    first = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - first
    start = tl.load(positions + first)

    m = tl.arange(0, BLOCK_M)
    token = offset + m // PADDED_G
    inside = (token < length) & (m % PADDED_G < G)
    position = start + token
    d = tl.arange(0, D)
    place = ((first + token).to(tl.int64) * Q + kv_head * G + m % PADDED_G)[:, None] * D + d[None, :]
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
        part = tl.load(unit + 2)
        num_parts = tl.load(unit + 3)
        blocks = tl.cdiv(end - begin, BLOCK_N)
        end = tl.minimum(begin + (part + 1) * blocks // num_parts * BLOCK_N, end)
        begin += part * blocks // num_parts * BLOCK_N
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
    if tl.load(unit + 3) == 1:
        # Worked out again: kept through the loops, these would not fit into registers.
        again, inside = _places(unit, query_starts, kv_head, m, Q, G, PADDED_G, D)
        tl.store(out + again[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])
    elif SPLIT:
        mine = ((tl.load(unit + 4) + tl.load(unit + 2)) * K + kv_head).to(tl.int64) * BLOCK_M + m
        tl.store(partials + mine[:, None] * D + d[None, :], acc)
        tl.store(lse + mine, top + tl.log2(total))


@launched
@triton.jit
def _extend_fold_kernel(
    folds,
    query_starts,
    partials,
    lse,
    out,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Some query heads of a tile, from the parts its keys were split into. PARTS at once: their loads wait together."""
    kv_head = tl.program_id(0)
    tile = folds + tl.program_id(2) * 5
    if tl.load(tile) < 0:
        return
    num_parts = tl.load(tile + 3)
    first_part = tl.load(tile + 4)
    m = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D)
    place, inside = _places(tile, query_starts, kv_head, m, Q, G, PADDED_G, D)
    top = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for at in range(0, num_parts, PARTS):
        part = at + tl.arange(0, PARTS)
        here = (part < num_parts)[:, None] & inside[None, :]
        source = ((first_part + part) * K + kv_head).to(tl.int64)[:, None] * BLOCK_M + m[None, :]
        weight = tl.load(lse + source, mask=here, other=-float("inf"))
        pieces = tl.load(partials + source[:, :, None] * D + d[None, None, :], mask=here[:, :, None], other=0.0)
        higher = tl.maximum(top, tl.max(weight, axis=0))
        keep = tl.exp2(top - higher)
        weight = tl.exp2(weight - higher[None, :])
        acc = acc * keep[:, None] + tl.sum(pieces * weight[:, :, None], axis=0)
        total = total * keep + tl.sum(weight, axis=0)
        top = higher
    acc = acc / tl.where(inside, total, 1.0)[:, None]
    tl.store(out + place[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])


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
        STAGES=tuning.num_stages, num_warps=tuning.num_warps, maxnreg=tuning.max_registers,
    )  # fmt: skip


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
    parts: ExtendParts | None = None,
) -> None:
    """out [T, Q, D] = causal attention of q [T, Q, D] over each row's cache [pages, P, K, D] up to its own position.

    Row r's queries are q[query_starts[r]:query_starts[r + 1]] in slot row_slots[r], at consecutive positions of
    which positions [T] holds each. units [n, 5] is that of `extend_units` for `tokens_per_tile`; rows it does not name
    (the decodes of a mixed pass) are left alone, units and folds of row -1 are nobody's. All index tensors are int32
    on the device. Without `parts` every unit must be a whole tile.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    workspace = None if parts is None else parts.workspace
    if parts is not None:
        used, room = parts.num_parts * kv_heads, len(parts.workspace.lse)
        assert used <= room, f"{used} partial results in room for {room}"
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
        page_table.stride(0),
        head_dim**-0.5 * 1.4426950408889634,
        Q=q_heads,
        K=kv_heads,
        G=group,
        PADDED_G=next_power_of_2(group),
        D=head_dim,
        P=page_size,
        WINDOW=window,
        SPLIT=parts is not None,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
    )
    if parts is not None and workspace is not None:
        _extend_fold_kernel[(kv_heads, tuning.block_m // _FOLD_HEADS, parts.folds.shape[0])](
            parts.folds, query_starts, workspace.partials, workspace.lse, out, Q=q_heads, K=kv_heads, G=group,
            PADDED_G=next_power_of_2(group), D=head_dim, BLOCK_M=tuning.block_m, HEADS=_FOLD_HEADS, PARTS=_FOLD_PARTS,
            num_warps=4,
        )  # fmt: skip
