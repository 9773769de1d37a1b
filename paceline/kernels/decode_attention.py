"""Decode attention over the paged cache: one launch that also norms, rotates and writes the new key and value.

A program takes (unit, KV head) pairs in turn, up to a count that is read from device memory, so that one captured graph
serves every batch. The row's tail unit starts its softmax from the new token, which it takes from the QKV projection,
and writes that token's key and value. No unit reads them from the cache in this pass, so nothing waits for the write.

A unit begins with a chain of dependent loads: its record, what the record points to, the first keys. At 256 rows that
costs as much as reading a hundred tokens each. So all loads that depend on the record are issued before any of them is
waited for.

A row of several chunks leaves one float32 partial result per chunk. The program that finishes last (an atomic counter
per row and head) merges them, always in the order of the chunks: a second launch per layer would cost more than the
merge. A unit of several rows merges all rows of which it is the last at once: one row after the other took longer than
sharing saved.

With drafts (speculative decoding) a row has several new tokens. A unit computes all of them, so the row's keys and
values are read once: their query heads fill a tile that would otherwise be padded. The tail takes all new keys from the
QKV projection, with a causal mask.

With `scales` the cache holds FP8 numbers (rope_kv.py). They are converted to float16 (fp8.py), the scale of keys is a
part of the softmax scale, and the scale of values is applied to the output: a key takes no instruction more than that.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.kernels._triton import (
    UNSPECIALIZED,
    launched,
    next_power_of_2,
    pdl_launch_dependents,
    pdl_wait,
    tl,
    triton,
)
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.fp8 import to_operand, to_stored, unpack_pairs
from paceline.kernels.heads import (
    load_heads,
    scaled_scores,
    score_factors,
    scores_reference,
    sink_weight,
    softmax_reference,
    within_head,
)
from paceline.kernels.layouts import ROW_WORDS, UNIT_WORDS, RowWord, UnitWord, constants
from paceline.kernels.rms_norm import row_factor
from paceline.kernels.rope_kv import load_cos_sin, load_pairs, norm_and_rotate, rope_kv_reference

(
    _UNIT_ROW,
    _UNIT_SLOT,
    _UNIT_FIRST_QUERY,
    _UNIT_NUM_QUERIES,
    _UNIT_BEGIN,
    _UNIT_END,
    _UNIT_INDEX,
    _UNIT_IS_TAIL,
    _UNIT_POSITION,
    _UNIT_NUM_CHUNKS,
    _UNIT_FIRST_PARTIAL,
) = constants(UnitWord)
_ROW_POSITION, _ROW_NUM_CHUNKS, _ROW_FIRST_PARTIAL, _ROW_SLOT = constants(RowWord)
_UNIT_WORDS, _ROW_WORDS = tl.constexpr(UNIT_WORDS), tl.constexpr(ROW_WORDS)

_FEW_ROWS = 4


def decode_attention_reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    window: int = 0,
    stream: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, Q D] in float64. Writes the new keys and values first, then attends row by row."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q = rope_kv_reference(
        qkv, k_cache, v_cache, page_table, slots, positions, positions, cos_sin, q_norm, k_norm, eps, stream, scales
    )
    out = []
    for row, slot, position in zip(q.double(), slots.tolist(), positions.tolist(), strict=True):
        first = max(position + 1 - window, 0) if window else 0
        seen = torch.arange(first, position + 1, device=q.device)
        pages = page_table[slot, seen // page_size].long()
        k, v = (cache[pages, seen % page_size].double() for cache in (k_cache, v_cache))
        if scales is not None:
            k, v = k * scales[0, :, None], v * scales[1, :, None]
        products = torch.einsum("kgd,nkd->kgn", row.view(kv_heads, -1, head_dim), k)
        scores = scores_reference(products, head_dim**-0.5 if scale is None else scale, cap)
        out.append(torch.einsum("kgn,nkd->kgd", softmax_reference(scores, sinks), v).reshape(-1))
    return torch.stack(out)


@triton.jit
def _load_partial(partials, lse, first, num_partials, index, column, STRIDE: tl.constexpr, D: tl.constexpr):
    inside = index < num_partials
    source = first + index * STRIDE
    # .cg bypasses the L1 cache: other multiprocessors wrote this in the same launch.
    weight = tl.load(lse + source, mask=inside, other=-float("inf"), cache_modifier=".cg")
    place = source[:, None] * D + column[None, :]
    return weight, tl.load(partials + place, mask=inside[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _add_partial(top, total, acc, weight, piece):
    higher = tl.maximum(top, weight)
    keep = tl.exp2(top - higher)
    weight = tl.exp2(weight - higher)
    return higher, total * keep + weight, acc * keep[:, None] + piece * weight[:, None]


@triton.jit
def _load_two(partials, lse, first, num_partials, index, column, STRIDE: tl.constexpr, D: tl.constexpr):
    weight, piece = _load_partial(partials, lse, first, num_partials, index, column, STRIDE, D)
    next_weight, next_piece = _load_partial(partials, lse, first, num_partials, index + 1, column, STRIDE, D)
    return weight, piece, next_weight, next_piece


@triton.jit
def _add_two(top, total, acc, weight, piece, next_weight, next_piece):
    top, total, acc = _add_partial(top, total, acc, weight, piece)
    return _add_partial(top, total, acc, next_weight, next_piece)


@triton.jit
def _merge_tile(
    partials,
    lse,
    out,
    sinks,
    head,
    place,
    first,
    num_partials,
    first_column,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges some columns of all heads of a tile that have partial results, ascending: one row after the other, each
    would wait for its loads. Every thread has columns of its own, so that threads exchange nothing. STRIDE: heads of
    one chunk; AT_ONCE: 2, 4 or 8 partial results that are loaded at the same time."""
    column = first_column + tl.arange(0, COLUMNS)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, tl.max(num_partials, axis=0), AT_ONCE):
        w0, p0, w1, p1 = _load_two(partials, lse, first, num_partials, start, column, STRIDE, D)
        if AT_ONCE > 2:
            w2, p2, w3, p3 = _load_two(partials, lse, first, num_partials, start + 2, column, STRIDE, D)
        if AT_ONCE > 4:
            w4, p4, w5, p5 = _load_two(partials, lse, first, num_partials, start + 4, column, STRIDE, D)
            w6, p6, w7, p7 = _load_two(partials, lse, first, num_partials, start + 6, column, STRIDE, D)
        top, total, acc = _add_two(top, total, acc, w0, p0, w1, p1)
        if AT_ONCE > 2:
            top, total, acc = _add_two(top, total, acc, w2, p2, w3, p3)
        if AT_ONCE > 4:
            top, total, acc = _add_two(top, total, acc, w4, p4, w5, p5)
            top, total, acc = _add_two(top, total, acc, w6, p6, w7, p7)
    if SINKS:
        total += sink_weight(sinks, head, num_partials > 0, top)
    target = out + place[:, None] + column[None, :]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(num_partials > 0)[:, None])


@triton.jit
def _pages(table, start, end, P: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr):
    """The page of each key of a tile, or the one page that holds the whole tile (PAGED)."""
    n = tl.arange(0, BLOCK_N)
    if PAGED:
        page = tl.load(table + start // P, mask=start < end, other=0)
    elif WINDOW or BLOCK_N % P != 0:
        page = tl.load(table + (start + n) // P, mask=start + n < end, other=0)
    else:
        page = tl.load(table + start // P + n // P, mask=start + n < end, other=0)
    return page


@triton.jit
def _place(
    page, start, STRIDE: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr
):
    """Offset of a tile's keys from the same place in page 0: one number if the tile is within one page (PAGED)."""
    place = page.to(tl.int64) * (P * STRIDE)
    if PAGED:
        if P > BLOCK_N:
            place += start % P * STRIDE
    else:
        if WINDOW or BLOCK_N % P != 0:
            # The tile may begin anywhere in a page.
            n = tl.arange(0, BLOCK_N)
            place += ((start + n) % P - n % P) * STRIDE
        place = place[:, None]
    return place


@triton.jit
def _tiles(
    k_cache, v_cache, v_pairs, kv_head,
    K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Where the keys of a tile and its values, or pairs of them, are in page 0."""
    n, d = tl.arange(0, BLOCK_N)[:, None] % P, tl.arange(0, PADDED)[None, :]
    key = n * (K * D) + kv_head * D + d
    values = v_cache + key
    if PAIRS:
        values = v_pairs + n * (K * D // 2) + kv_head * (D // 2) + tl.arange(0, PADDED // 2)[None, :]
    return k_cache + key, values


@triton.jit
def _load_keys(
    keys, page, start, inside,
    K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile of keys, or zeros where a position is not inside."""
    place = _place(page, start, K * D, P, BLOCK_N, PAGED, WINDOW)
    return tl.load(keys + place, mask=within_head(inside, D, PADDED), other=0.0)


@triton.jit
def _load_values(
    values, page, start, inside,
    K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile of values, or of pairs of them; zeros where a position is not inside."""
    if PAIRS:
        place = _place(page, start, K * D // 2, P, BLOCK_N, PAGED, WINDOW)
        found = tl.load(values + place, mask=within_head(inside, D // 2, PADDED // 2), other=0)
    else:
        place = _place(page, start, K * D, P, BLOCK_N, PAGED, WINDOW)
        found = tl.load(values + place, mask=within_head(inside, D, PADDED), other=0.0)
    return found


@triton.jit
def _masked_scores(q, k, start, end, position, scale, CAP: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The scores of a tile, -inf where a query does not see a key."""
    n = start + tl.arange(0, BLOCK_N)
    seen = (n < end)[None, :]
    if WINDOW:
        seen = seen & (n[None, :] > position[:, None] - WINDOW)
    scores = scaled_scores(tl.dot(q, tl.trans(k.to(q.dtype))), scale, CAP)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _update_softmax(scores, v, top, totals, acc, odd, LAZY: tl.constexpr, PAIRS: tl.constexpr):
    """Adds a tile of scores and values to the online softmax."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    keep = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    if LAZY:
        # After a few tiles the maximum rarely changes, and rescaling by one would be a fifth of all instructions.
        if tl.max((higher > top).to(tl.int32), axis=0) > 0:
            acc = acc * keep[:, None]
            if PAIRS:
                odd = odd * keep[:, None]
    else:
        acc = acc * keep[:, None]
        if PAIRS:
            odd = odd * keep[:, None]
    totals = totals * keep[:, None] + weight
    if PAIRS:
        even_v, odd_v = unpack_pairs(v)
        weight = weight.to(tl.float16)
        acc = tl.dot(weight, even_v, acc)
        odd = tl.dot(weight, odd_v, odd)
    else:
        acc = tl.dot(weight.to(v.dtype), v, acc)
    return higher, totals, acc, odd


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _decode_attention_kernel(
    qkv,
    k_cache,
    v_cache,
    v_pairs,
    page_table,
    cos_sin,
    q_norm,
    k_norm,
    stream,
    units,
    num_units,
    num_shared,
    rows,
    query_rows,
    query_starts,
    num_fed,
    partials,
    lse,
    arrived,
    out,
    scales,
    sinks,
    qkv_stride,
    table_stride,
    eps,
    scale,
    NEW: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    CAP: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PART: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # PART: which units this launch takes (ALL_UNITS, SHARED_UNITS, OWN_UNITS, NONE_SHARED below).
    # NEW: most new tokens of a row, which are num_fed of it. More than one only where no row shares.
    d = tl.arange(0, PADDED)
    m = tl.arange(0, BLOCK_M)
    num_work = tl.load(num_units) * K
    if PART == 1:
        num_work = tl.load(num_shared) * K
    if PART == 2:
        units += tl.load(num_shared) * _UNIT_WORDS
        num_work -= tl.load(num_shared) * K
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        unit = units + work // K * _UNIT_WORDS
        row = tl.load(unit + _UNIT_ROW)
        slot = tl.load(unit + _UNIT_SLOT).to(tl.int64)
        first_query = tl.load(unit + _UNIT_FIRST_QUERY)
        num_queries = tl.load(unit + _UNIT_NUM_QUERIES)
        begin = tl.load(unit + _UNIT_BEGIN)
        end = tl.load(unit + _UNIT_END)
        index = tl.load(unit + _UNIT_INDEX)
        is_tail = tl.load(unit + _UNIT_IS_TAIL) != 0
        row_position = tl.load(unit + _UNIT_POSITION)
        num_chunks = tl.load(unit + _UNIT_NUM_CHUNKS)
        own_partial = tl.load(unit + _UNIT_FIRST_PARTIAL)
        kv_head = work % K
        head = kv_head * G + m % G
        table = page_table + slot * table_stride
        key_scale, value_scale, score_scale = 1.0, 1.0, scale
        if SCALED:
            key_scale = tl.load(scales + kv_head)
            value_scale = tl.load(scales + K + kv_head)
            score_scale = scale * key_scale

        tile_rows = row + tl.zeros([BLOCK_M], tl.int32)
        position = row_position + tl.zeros([BLOCK_M], tl.int32)
        first_partial = own_partial + tl.zeros([BLOCK_M], tl.int32)
        inside = m < G
        first_token = row
        fed = 1
        if NEW > 1:
            first_token = tl.load(query_starts + row)
            fed = tl.load(num_fed + row)
            inside = m // G < fed
            tile_rows = first_token + m // G
            position = row_position + m // G
        if PART < 2:
            inside = m // G < num_queries
            if num_queries > 1:
                tile_rows = tl.load(query_rows + first_query + m // G, mask=inside, other=0)
                position = tl.load(rows + tile_rows * _ROW_WORDS + _ROW_POSITION, mask=inside, other=0)
                first_partial = tl.load(rows + tile_rows * _ROW_WORDS + _ROW_FIRST_PARTIAL, mask=inside, other=0)
        page = _pages(table, begin, end, P, BLOCK_N, PAGED, WINDOW)
        if PREFETCH:
            keys, values = _tiles(k_cache, v_cache, v_pairs, kv_head, K, D, PADDED, P, BLOCK_N, PAIRS)
            # What earlier passes have written to the cache can be loaded while the previous kernel runs.
            inside_first = (begin + tl.arange(0, BLOCK_N) < end)[:, None]
            first_k = _load_keys(keys, page, begin, inside_first, K, D, PADDED, P, BLOCK_N, PAGED, WINDOW)
            first_v = _load_values(values, page, begin, inside_first, K, D, PADDED, P, BLOCK_N, PAGED, WINDOW, PAIRS)
            page = _pages(table, begin + BLOCK_N, end, P, BLOCK_N, PAGED, WINDOW)
        if PDL:
            # Everything up to here is known before the first layer of the pass.
            pdl_wait()
        mine, other = load_pairs(qkv, (tile_rows * qkv_stride + head * D)[:, None], inside[:, None], D, PADDED)
        own_cos, own_sin = load_cos_sin(cos_sin + row_position * D, True, D, PADDED)
        cos, sin = own_cos, own_sin
        if PART < 2 or NEW > 1:
            cos, sin = load_cos_sin(cos_sin + (position * D)[:, None], inside[:, None], D, PADDED)
        if NEW > 1:
            new = tl.arange(0, BLOCK_NEW)
            is_new = (new < fed) & is_tail
            source = (first_token + new) * qkv_stride + (Q + kv_head) * D
            new_mine, new_other = load_pairs(qkv, source[:, None], is_new[:, None], D, PADDED)
            new_inside = within_head(is_new[:, None], D, PADDED)
            new_v = tl.load(qkv + source[:, None] + K * D + d[None, :], mask=new_inside, other=0.0)
            own_cos, own_sin = load_cos_sin(cos_sin + ((row_position + new) * D)[:, None], is_new[:, None], D, PADDED)
            new_page = tl.load(table + (row_position + new) // P, mask=is_new, other=0).to(tl.int64)
        elif PART != 1:
            # The tail's new token. Every unit issues the load and only the tail uses it: a branch would wait for memory
            # once more. `end` is the position being decoded: the cache holds begin..end, this token makes it end + 1.
            source = qkv + row * qkv_stride + (Q + kv_head) * D
            tail = tl.full([1, 1], 1, tl.int1) & is_tail
            new_mine, new_other = load_pairs(source, tl.zeros([1, 1], tl.int32), tail, D, PADDED)
            new_inside = within_head(tail, D, PADDED)
            new_v = tl.load(source + K * D + d[None, :], mask=new_inside, other=0.0)
            tail_page = tl.load(table + end // P, mask=is_tail, other=0).to(tl.int64)
        q_weight, q_other_weight = load_pairs(q_norm, 0, HAS_NORM, D, PADDED)
        k_weight, k_other_weight = load_pairs(k_norm, 0, HAS_NORM, D, PADDED)
        factor = 1.0
        if H:
            factor = row_factor(stream, row, eps, H)
        q = norm_and_rotate(mine, other, q_weight, q_other_weight, cos, sin, eps, factor, D, PADDED, HAS_NORM)
        if SCALED and qkv.dtype.element_ty != tl.float32:
            q = to_operand(q, tl.float16)
        else:
            q = q.to(qkv.dtype.element_ty)

        # Summed over the keys' axis only at the end, which saves one exchange between warps per tile.
        totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
        top = tl.full([BLOCK_M], -1.0e30, tl.float32)
        if NEW > 1:
            new_k = norm_and_rotate(
                new_mine, new_other, k_weight, k_other_weight, own_cos, own_sin, eps, factor, D, PADDED, HAS_NORM
            )
            new_k = to_stored(new_k, key_scale, k_cache.dtype.element_ty, SCALED)
            new_v = to_stored(new_v.to(tl.float32), value_scale, v_cache.dtype.element_ty, SCALED)
            new_place = ((new_page * P + (row_position + new) % P) * K + kv_head) * D
            tl.store(k_cache + new_place[:, None] + d[None, :], new_k, mask=new_inside)
            tl.store(v_cache + new_place[:, None] + d[None, :], new_v, mask=new_inside)
            before = m[:, None] // G - new[None, :]
            visible = (before >= 0) & is_new[None, :]
            if WINDOW:
                visible = visible & (before < WINDOW)
            new_scores = scaled_scores(tl.dot(q, tl.trans(new_k.to(q.dtype))), score_scale, CAP)
            new_scores = tl.where(visible, new_scores, -float("inf"))
            top = tl.maximum(top, tl.max(new_scores, axis=1))
            new_weight = tl.exp2(new_scores - top[:, None])
            totals += tl.where((tl.arange(0, BLOCK_N) == 0)[None, :], tl.sum(new_weight, axis=1)[:, None], 0.0)
            acc = tl.dot(new_weight.to(q.dtype), new_v.to(q.dtype), acc)
        elif PART != 1:
            new_k = norm_and_rotate(
                new_mine, new_other, k_weight, k_other_weight, own_cos, own_sin, eps, factor, D, PADDED, HAS_NORM
            )
            new_k = to_stored(new_k, key_scale, k_cache.dtype.element_ty, SCALED)
            new_v = to_stored(new_v.to(tl.float32) * factor, value_scale, v_cache.dtype.element_ty, SCALED)
            tail_place = ((tail_page * P + end % P) * K + kv_head) * D + d[None, :]
            tl.store(k_cache + tail_place, new_k, mask=new_inside)
            tl.store(v_cache + tail_place, new_v, mask=new_inside)
            new_score = scaled_scores(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1), score_scale, CAP)
            top = tl.where(is_tail, new_score, -1.0e30)
            totals += tl.where((tl.arange(0, BLOCK_N) == 0) & is_tail, 1.0, 0.0)[None, :]
            acc += new_v.to(tl.float32)

        # The next tile's pages are loaded one tile ahead: where the address of a tile depends on a load in the same
        # iteration, Triton's pipeliner keeps fewer tiles of keys in flight.
        if not PREFETCH:
            keys, values = _tiles(k_cache, v_cache, v_pairs, kv_head, K, D, PADDED, P, BLOCK_N, PAIRS)
        odd = tl.zeros([1, 1], tl.float32)
        if PAIRS:
            acc, odd = tl.split(tl.reshape(acc, [BLOCK_M, PADDED // 2, 2]))
        masked = begin
        if PREFETCH:
            scores = _masked_scores(q, first_k, begin, end, position, score_scale, CAP, BLOCK_N, WINDOW)
            v = first_v if PAIRS else first_v.to(q.dtype)
            top, totals, acc, odd = _update_softmax(scores, v, top, totals, acc, odd, LAZY=False, PAIRS=PAIRS)
            masked = begin + BLOCK_N
        if PAGED:
            masked = begin + (end - begin) // BLOCK_N * BLOCK_N
            for start in tl.range(begin, masked, BLOCK_N, num_stages=STAGES):
                place = _place(page, start, K * D, P, BLOCK_N, PAGED, WINDOW)
                k = load_heads(keys + place, D, PADDED)
                scores = scaled_scores(tl.dot(q, tl.trans(k.to(q.dtype))), score_scale, CAP)
                if PAIRS:
                    place = _place(page, start, K * D // 2, P, BLOCK_N, PAGED, WINDOW)
                    v = load_heads(values + place, D // 2, PADDED // 2)
                else:
                    v = load_heads(values + place, D, PADDED).to(q.dtype)
                top, totals, acc, odd = _update_softmax(scores, v, top, totals, acc, odd, LAZY=True, PAIRS=PAIRS)
                page = _pages(table, start + BLOCK_N, end, P, BLOCK_N, PAGED, WINDOW)
        for start in tl.range(masked, end, BLOCK_N, num_stages=1 if PAGED else STAGES):
            cached = (start + tl.arange(0, BLOCK_N) < end)[:, None]
            k = _load_keys(keys, page, start, cached, K, D, PADDED, P, BLOCK_N, PAGED, WINDOW)
            scores = _masked_scores(q, k, start, end, position, score_scale, CAP, BLOCK_N, WINDOW)
            v = _load_values(values, page, start, cached, K, D, PADDED, P, BLOCK_N, PAGED, WINDOW, PAIRS)
            if not PAIRS:
                v = v.to(q.dtype)
            top, totals, acc, odd = _update_softmax(scores, v, top, totals, acc, odd, LAZY=False, PAIRS=PAIRS)
            page = _pages(table, start + BLOCK_N, end, P, BLOCK_N, PAGED, WINDOW)

        if PDL:
            pdl_launch_dependents()
        if PAIRS:
            acc = tl.reshape(tl.join(acc, odd), [BLOCK_M, PADDED])
        total = tl.sum(totals, axis=1)
        if NEW > 1:
            # A later token may see nothing of a chunk that its window has left behind.
            total = tl.where(total > 0.0, total, 1.0)
        divisor = total
        if SINKS:
            divisor += tl.where(num_chunks == 1, sink_weight(sinks, head, inside, top), 0.0)
        acc = acc * (value_scale / divisor)[:, None] if SCALED else acc / divisor[:, None]
        if num_chunks == 1:
            target = out + (tile_rows * Q + head)[:, None] * D + d[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), mask=within_head(inside[:, None], D, PADDED))
        else:
            partial = (first_partial + index).to(tl.int64)
            if NEW > 1:
                partial = partial * NEW + m // G
            partial = partial * Q + head
            filled = within_head(inside[:, None], D, PADDED)
            tl.store(partials + partial[:, None] * D + d[None, :], acc, mask=filled)
            tl.store(lse + partial, top + tl.log2(total), mask=inside)
            tl.debug_barrier()  # every thread's partial result before the one atomic that counts it
            # Whoever finishes a row merges it. Units of one row and shared units do it by the same code, so that the
            # result has the same bits.
            parts = tl.zeros([BLOCK_M], tl.int32)
            if PART >= 2 or num_queries == 1:
                count = arrived + row * K + kv_head
                if tl.atomic_add(count, 1, sem="acq_rel") == num_chunks - 1:
                    tl.store(count, 0)
                    parts = tl.where(inside, num_chunks, 0)
            else:
                # All rows are counted with one atomic: one after the other, each would wait for memory.
                query = tl.arange(0, BLOCK_M)
                owners = tl.load(query_rows + first_query + query, mask=query < num_queries, other=0)
                counts = arrived + owners * K + kv_head
                before = tl.atomic_add(counts, 1, mask=query < num_queries, sem="acq_rel")
                chunks = tl.load(rows + owners * _ROW_WORDS + _ROW_NUM_CHUNKS, mask=query < num_queries, other=0)
                is_last = (query < num_queries) & (before == chunks - 1)
                tl.store(counts, 0, mask=is_last)
                parts = tl.where(inside, tl.gather(tl.where(is_last, chunks, 0), m // G, 0), 0)
            if tl.max(parts, axis=0) > 0:
                place, part = (tile_rows * Q + head).to(tl.int64) * D, first_partial.to(tl.int64) * Q + head
                if NEW > 1:
                    part = (first_partial.to(tl.int64) * NEW + m // G) * Q + head
                for column in tl.static_range(0, D, MERGE_COLUMNS):
                    _merge_tile(
                        partials, lse, out, sinks, head, place, part, parts, column,
                        NEW * Q, D, SINKS, BLOCK_M, MERGE_COLUMNS, MERGE,
                    )  # fmt: skip
    if PDL:
        # Programs without work wait too: the next launch relies on this one to have waited for the previous one.
        pdl_wait()


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWorkspace:
    """Partial results of one layer at a time: layers run in order and reuse it. Counts are zero between launches."""

    partials: torch.Tensor  # [capacity, Q, D] float32
    lse: torch.Tensor  # [capacity, Q] float32, base 2
    arrived: torch.Tensor  # [R, K] int32

    @classmethod
    def empty(
        cls, rows: int, capacity: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        return cls(
            partials=torch.empty(capacity, q_heads, head_dim, device=device),
            lse=torch.empty(capacity, q_heads, device=device),
            arrived=torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """The new tokens of rows that have drafts: row r has num_fed[r], from query_starts[r] on, and at most `most`."""

    query_starts: torch.Tensor  # [R + 1] int32
    num_fed: torch.Tensor  # [R] int32
    most: int


# The units that one launch takes: all, only the shared ones, only the others; or all, where no unit is shared.
ALL_UNITS, SHARED_UNITS, OWN_UNITS, NONE_SHARED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    num_programs: int = 132 * 16
    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 3  # one more than the tiles of keys in use or in flight
    max_registers: int = 128  # per thread: a few spills cost less than a program fewer per multiprocessor
    value_pairs: bool = True  # an FP8 cache: values are loaded as pairs
    block_m: int = 16  # query heads per unit: a shared unit holds at most block_m // G rows
    prefetch: bool = False  # with PDL: the first tile is loaded before the previous kernel has ended


def decode_attention_tuning(
    rows: int, group: int, shared_block_m: int, short_contexts: bool = False
) -> tuple[DecodeTuning, DecodeTuning]:
    """The tuning for units of one row, and for units of `shared_block_m` query heads that several rows share; 0: no
    unit is shared. The fastest on an H200 at 1 to 256 rows with 2, 4 and 5 query heads per KV head
    (docs/log/decode-attention.md).

    `short_contexts`: many rows have a few hundred tokens each, so many small programs are faster. Units of one row have
    tiles of just the heads of one KV head: a tile of 16 spends a third of its instructions on empty rows. Large batches
    use tiles of 16 keys within one page: the GPU runs at its power limit, and power that attention saves lets the GEMMs
    run at a higher clock. A few rows are a matter of latency: a chunk is one tile, loaded before the wait of PDL unless
    many heads leave too few registers.
    """
    heads = next_power_of_2(group)
    if shared_block_m:
        # The two launches run side by side. The loop over keys of 64 heads does not fit fewer registers.
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=2)
        registers = 255 if shared_block_m == 64 else 168
        return own, DecodeTuning(block_m=shared_block_m, block_n=64, num_stages=2, max_registers=registers)
    if (rows > 192 and heads <= 8) or (short_contexts and heads <= 4):
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=1, num_stages=4, max_registers=255)
    elif rows > 128 and heads <= 4:
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=2, num_stages=4, max_registers=168)
    elif rows <= _FEW_ROWS:
        num_warps, prefetch = (4, True) if heads <= 4 else (8, False)
        own = DecodeTuning(
            block_n=64, num_warps=num_warps, num_stages=2, max_registers=255, block_m=heads, prefetch=prefetch
        )
    else:
        own = DecodeTuning(block_m=heads)
    return own, own


def fp8_attention_tuning(
    rows: int, group: int, shared_block_m: int, short_contexts: bool = False
) -> tuple[DecodeTuning, DecodeTuning]:
    """As `decode_attention_tuning`, for an FP8 cache: a tile of as many keys has half the bytes, so many rows use
    programs of one warp earlier, and few rows larger tiles (docs/log/decode-attention.md)."""
    heads = next_power_of_2(group)
    if not shared_block_m and heads <= 8 and rows >= (64 if heads <= 4 else 96):
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=1, num_stages=4, max_registers=255)
        return own, own
    if not shared_block_m and rows <= 4:
        own = DecodeTuning(block_m=heads, block_n=64, max_registers=168)
        return own, own
    return decode_attention_tuning(rows, group, shared_block_m, short_contexts)


def draft_attention_tuning(rows: int, group: int, most: int, *, fp8: bool) -> DecodeTuning:
    """The tuning for units of one row with up to `most` new tokens. Eight warps: the registers of four do not hold the
    new keys and a larger tile (docs/log/speculation.md). fp8: the cache is FP8. With two stages, ptxas 12.8 compiles
    tiles of 64 heads and an FP8 cache to a kernel that reads uniform registers before they are written."""
    heads = max(16, next_power_of_2(group * most))
    if heads == 16:
        return DecodeTuning(num_warps=8, max_registers=255 if rows <= 4 else 128)
    num_stages = 3 if fp8 and heads == 64 else 2
    return DecodeTuning(block_m=heads, block_n=64, num_warps=8, num_stages=num_stages, max_registers=255)


def tuning_for(tuning: DecodeTuning, head_dim: int) -> DecodeTuning:
    """A tuning for heads of up to 128 elements, changed for larger ones: a tile of as many keys would need twice the
    registers and shared memory."""
    if head_dim <= 128:
        return tuning
    return replace(
        tuning,
        block_n=min(tuning.block_n, 32),
        num_warps=8 if tuning.block_m > 16 else 4,
        num_stages=2 if tuning.block_m > 16 else min(tuning.num_stages, 3),
        max_registers=255 if tuning.block_m > 16 else 168,
        prefetch=False,
    )


def _merge_columns(head_dim: int, block_m: int) -> int:
    """Columns that are merged at once: a power of two that divides head_dim."""
    columns = min(head_dim & -head_dim, 128)
    return columns if block_m <= 32 else columns // 2


def _merged_at_once(tuning: DecodeTuning, columns: int) -> int:
    """Partial results that are loaded at the same time: 2, 4 or 8, as many as fit the registers."""
    numbers = 32 if tuning.max_registers > 168 else 8  # of a thread
    return min(max(numbers * 32 * tuning.num_warps // (tuning.block_m * columns), 2), 8)


def tiles_fit(chunk: int, page_size: int, tuning: DecodeTuning) -> bool:
    """Whether every tile of a chunk is within one page, or begins with one, where the kernel relies on it."""
    smaller, larger = sorted((page_size, tuning.block_n))
    return larger % smaller != 0 or chunk % smaller == 0


def decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    units: DecodeUnits,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    window: int = 0,
    tuning: DecodeTuning = DecodeTuning(),  # noqa: B008  (frozen)
    pdl: bool = False,
    part: int = ALL_UNITS,
    stream: torch.Tensor | None = None,
    new_tokens: NewTokens | None = None,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """out [R, Q D] = attention of the new tokens in qkv [R, (Q + 2K) D]; writes their keys and values to the caches.

    Caches [pages, P, K, D]; page_table [S, pages per slot] int32; cos_sin [positions, D] float32; q_norm and k_norm
    [D] together or not at all. `units` was filled by `decode_units` with the same window in this pass, in chunks that
    `tiles_fit`. Rows from num_rows on are not written. `part`: the units this launch takes; a second launch may take
    the others at the same time or in any order. With `stream` [R, H], qkv was computed from the hidden states before
    RMSNorm, and the norm's factor is applied here; shared units need a qkv of normed hidden states. With `new_tokens`
    rows have several new tokens, which are rows of qkv and out; `workspace` then has that many times the partial
    results. With `scales` [2, K] float32, of keys and of values, the caches hold FP8 numbers.
    scale: factor of the scores, by default D ** -0.5; cap: their soft cap; sinks [Q]: scores that only the denominator
    of the softmax has.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    factor, base_2_cap = score_factors(head_dim**-0.5 if scale is None else scale, cap)
    q_heads = out.shape[1] // head_dim
    group = q_heads // kv_heads
    new = 1 if new_tokens is None else new_tokens.most
    paged = not window and page_size % tuning.block_n == 0
    merge_columns = _merge_columns(head_dim, tuning.block_m)
    pairs = scales is not None and qkv.dtype is not torch.float32 and tuning.value_pairs
    assert group * new <= tuning.block_m, f"{group * new} query heads per KV head do not fit tiles of {tuning.block_m}"
    assert new == 1 or (part == NONE_SHARED and stream is None), "rows with several new tokens share nothing"
    _decode_attention_kernel[(tuning.num_programs,)](
        qkv,
        k_cache,
        v_cache,
        v_cache.view(torch.uint16) if pairs else page_table,
        page_table,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        qkv if stream is None else stream,
        units.units,
        units.num_units,
        units.num_shared,
        units.rows,
        units.query_rows,
        units.num_units if new_tokens is None else new_tokens.query_starts,
        units.num_units if new_tokens is None else new_tokens.num_fed,
        workspace.partials,
        workspace.lse,
        workspace.arrived,
        out,
        cos_sin if scales is None else scales,
        qkv if sinks is None else sinks,
        qkv.stride(0),
        page_table.stride(0),
        eps,
        factor,
        NEW=new,
        Q=q_heads,
        K=kv_heads,
        G=group,
        D=head_dim,
        PADDED=next_power_of_2(head_dim),
        CAP=base_2_cap,
        P=page_size,
        H=0 if stream is None else stream.shape[1],
        HAS_NORM=q_norm is not None,
        SCALED=scales is not None,
        SINKS=sinks is not None,
        WINDOW=window,
        PAGED=paged,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_NEW=16,
        MERGE=_merged_at_once(tuning, merge_columns),
        MERGE_COLUMNS=merge_columns,
        STAGES=tuning.num_stages,
        PDL=pdl,
        PREFETCH=tuning.prefetch and not paged,
        PART=part,
        PAIRS=pairs,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
        launch_pdl=pdl,
    )
