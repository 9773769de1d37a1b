"""Decode attention over the paged cache: one launch that also norms, rotates and writes the new key and value.

A program takes (unit, KV head) pairs in turn, up to a count that lies on the device, so that one captured graph
serves every batch. The row's tail unit starts its softmax from the new token, taken from the qkv product, and writes
that token's key and value: nobody reads them from the cache in this pass, so nothing has to wait for the write.

A unit begins with a chain of loads: its record, what that leads to, the first keys. At 256 rows that costs as much as
reading a hundred tokens each, so everything the record leads to is asked for before anything is waited for.

A row of several chunks leaves one float32 partial per chunk. Whoever finishes last (an atomic count per row and head)
folds them, in the order of the chunks whoever that is: a second launch per layer would cost more than the fold. A unit
of several rows folds all of which it is the last at once: one row after the other took longer than what they share.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import launched, next_power_of_2, tl, triton
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.rms_norm import row_factor
from paceline.kernels.rope_kv import load_pairs, load_turn, rope_kv_reference, turn


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
) -> torch.Tensor:
    """[R, Q D] in float64. Writes the new keys and values first, then attends row by row."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q = rope_kv_reference(qkv, k_cache, v_cache, page_table, slots, positions, cos_sin, q_norm, k_norm, eps, stream)
    out = []
    for row, slot, position in zip(q.double(), slots.tolist(), positions.tolist(), strict=True):
        first = max(position + 1 - window, 0) if window else 0
        seen = torch.arange(first, position + 1, device=q.device)
        pages = page_table[slot, seen // page_size].long()
        k, v = (cache[pages, seen % page_size].double() for cache in (k_cache, v_cache))
        scores = torch.einsum("kgd,nkd->kgn", row.view(kv_heads, -1, head_dim), k) * head_dim**-0.5
        out.append(torch.einsum("kgn,nkd->kgd", scores.softmax(-1), v).reshape(-1))
    return torch.stack(out)


@triton.jit
def _fold(
    partials,
    lse,
    out,
    row,
    first_partial,
    num_chunks,
    kv_head,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] for the heads of one KV head from their partials, BLOCK chunks at a time, ascending."""
    column = tl.arange(0, COLUMNS)
    inside_column = column < G * D
    head = kv_head * G + column // D
    block = tl.arange(0, BLOCK)
    top = tl.full([COLUMNS], -1.0e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    value = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, num_chunks, BLOCK):
        inside = (start + block < num_chunks)[:, None] & inside_column[None, :]
        place = ((first_partial + start + block).to(tl.int64) * Q)[:, None] + head[None, :]
        # .cg: written by other multiprocessors in this launch, so the first-level cache must not answer. The weight
        # of a head is loaded once per element: cheaper than moving it between threads.
        weight = tl.load(lse + place, mask=inside, other=-float("inf"), cache_modifier=".cg")
        piece = tl.load(partials + place * D + (column % D)[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(weight, axis=0))
        weight = tl.exp2(weight - higher[None, :])
        keep = tl.exp2(top - higher)
        value = value * keep + tl.sum(piece * weight, axis=0)
        total = total * keep + tl.sum(weight, axis=0)
        top = higher
    target = out + (row * Q + kv_head * G) * D + column
    tl.store(target, (value / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty), mask=inside_column)


@triton.jit
def _load_part(partials, lse, first_part, num_parts, index, column, Q: tl.constexpr, D: tl.constexpr):
    inside = index < num_parts
    source = first_part + index * Q
    # .cg: written by other multiprocessors in this launch, so the first-level cache must not answer.
    weight = tl.load(lse + source, mask=inside, other=-float("inf"), cache_modifier=".cg")
    place = source[:, None] * D + column[None, :]
    return weight, tl.load(partials + place, mask=inside[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _add_part(top, total, acc, weight, piece):
    higher = tl.maximum(top, weight)
    keep = tl.exp2(top - higher)
    weight = tl.exp2(weight - higher)
    return higher, total * keep + weight, acc * keep[:, None] + piece * weight[:, None]


@triton.jit
def _fold_tile(
    partials, lse, out, place, first_part, num_parts, first_column, Q: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of all the heads of a tile that have parts to fold, ascending. One row after the other, each would
    wait for its loads."""
    column = first_column + tl.arange(0, COLUMNS)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, tl.max(num_parts, axis=0), 2):
        # Two at a time, so that their loads are under way together.
        weight, piece = _load_part(partials, lse, first_part, num_parts, start, column, Q, D)
        next_weight, next_piece = _load_part(partials, lse, first_part, num_parts, start + 1, column, Q, D)
        top, total, acc = _add_part(top, total, acc, weight, piece)
        top, total, acc = _add_part(top, total, acc, next_weight, next_piece)
    target = out + place[:, None] + column[None, :]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(num_parts > 0)[:, None])


@triton.jit
def _pages(table, start, end, P: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr):
    """The pages of a tile of keys, or the one it lies in."""
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
    """How far from its place in the first page a tile's keys are: one number if it lies in one page."""
    place = page.to(tl.int64) * (P * STRIDE)
    if PAGED:
        if P > BLOCK_N:
            place += start % P * STRIDE
    else:
        if WINDOW or BLOCK_N % P != 0:
            # Its first key need not be a page's first.
            n = tl.arange(0, BLOCK_N)
            place += ((start + n) % P - n % P) * STRIDE
        place = place[:, None]
    return place


@triton.jit
def _absorb(scores, v, top, totals, acc, LAZY: tl.constexpr):
    """One more tile of scores and values into the running softmax."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    keep = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    if LAZY:
        # Soon no tile has a higher score, and to scale by one would be a fifth of all that is done.
        if tl.max((higher > top).to(tl.int32), axis=0) > 0:
            acc = acc * keep[:, None]
    else:
        acc = acc * keep[:, None]
    return higher, totals * keep[:, None] + weight, tl.dot(weight.to(v.dtype), v, acc)


@launched
@triton.jit
def _decode_attention_kernel(
    qkv,
    k_cache,
    v_cache,
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
    partials,
    lse,
    arrived,
    out,
    qkv_stride,
    table_stride,
    eps,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    HAS_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
    FOLD_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PART: tl.constexpr,
):
    # PART 0: all units, 1: those that rows share, 2: the others, 3: all, and none is shared.
    d = tl.arange(0, D)
    m = tl.arange(0, BLOCK_M)
    num_work = tl.load(num_units) * K
    if PART == 1:
        num_work = tl.load(num_shared) * K
    if PART == 2:
        units += tl.load(num_shared) * 16
        num_work -= tl.load(num_shared) * K
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        unit = units + work // K * 16
        row = tl.load(unit)
        slot = tl.load(unit + 1).to(tl.int64)
        first_query = tl.load(unit + 2)
        num_queries = tl.load(unit + 3)
        begin = tl.load(unit + 4)
        end = tl.load(unit + 5)
        index = tl.load(unit + 6)
        is_tail = tl.load(unit + 7) != 0
        row_position = tl.load(unit + 8)
        num_chunks = tl.load(unit + 9)
        own_partial = tl.load(unit + 10)
        kv_head = work % K
        head = kv_head * G + m % G
        table = page_table + slot * table_stride

        tile_rows = row + tl.zeros([BLOCK_M], tl.int32)
        position = row_position + tl.zeros([BLOCK_M], tl.int32)
        first_partial = own_partial + tl.zeros([BLOCK_M], tl.int32)
        inside = m < G
        if PART < 2:
            inside = m // G < num_queries
            if num_queries > 1:
                tile_rows = tl.load(query_rows + first_query + m // G, mask=inside, other=0)
                position = tl.load(rows + tile_rows * 4, mask=inside, other=0)
                first_partial = tl.load(rows + tile_rows * 4 + 2, mask=inside, other=0)
        page = _pages(table, begin, end, P, BLOCK_N, PAGED, WINDOW)
        if PDL:
            # Up to here all was known before the pass's first layer.
            tl.extra.cuda.gdc_wait()
        mine, other = load_pairs(qkv, (tile_rows * qkv_stride + head * D)[:, None], inside[:, None], D)
        own_cos, own_sin = load_turn(cos_sin + row_position * D, True, D)
        cos, sin = own_cos, own_sin
        if PART < 2:
            cos, sin = load_turn(cos_sin + (position * D)[:, None], inside[:, None], D)
        if PART != 1:
            # The tail's new token. Loaded in every unit and used in one: a branch would wait for memory once more.
            # end is the position being decoded: the cache holds begin..end, this token makes it end + 1.
            source = qkv + row * qkv_stride + (Q + kv_head) * D
            tail = tl.full([1, 1], 1, tl.int1) & is_tail
            new_mine, new_other = load_pairs(source, tl.zeros([1, 1], tl.int32), tail, D)
            new_v = tl.load(source + K * D + d[None, :], mask=tail, other=0.0)
            tail_page = tl.load(table + end // P, mask=is_tail, other=0).to(tl.int64)
        q_weight, q_other_weight = load_pairs(q_norm, 0, HAS_NORM, D)
        k_weight, k_other_weight = load_pairs(k_norm, 0, HAS_NORM, D)
        factor = 1.0
        if H:
            factor = row_factor(stream, row, eps, H)
        q = turn(mine, other, q_weight, q_other_weight, cos, sin, eps, factor, D, HAS_NORM).to(qkv.dtype.element_ty)

        # Summed over the keys' axis only at the end: one exchange between warps less per tile.
        totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        top = tl.full([BLOCK_M], -1.0e30, tl.float32)
        if PART != 1:
            new_k = turn(
                new_mine, new_other, k_weight, k_other_weight, own_cos, own_sin, eps, factor, D, HAS_NORM
            ).to(k_cache.dtype.element_ty)  # fmt: skip
            new_v = (new_v.to(tl.float32) * factor).to(v_cache.dtype.element_ty)
            tail_place = ((tail_page * P + end % P) * K + kv_head) * D + d[None, :]
            tl.store(k_cache + tail_place, new_k, mask=tail)
            tl.store(v_cache + tail_place, new_v, mask=tail)
            top = tl.where(is_tail, tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale, -1.0e30)
            totals += tl.where((tl.arange(0, BLOCK_N) == 0) & is_tail, 1.0, 0.0)[None, :]
            acc += new_v.to(tl.float32)

        # The next tile's pages are asked for a tile ahead, since Triton keeps fewer tiles of keys on their way where a
        # load in the loop leads to them.
        key = tl.arange(0, BLOCK_N)[:, None] % P * (K * D) + kv_head * D + d[None, :]
        keys, values = k_cache + key, v_cache + key
        masked = begin
        if PAGED:
            masked = begin + (end - begin) // BLOCK_N * BLOCK_N
            for start in tl.range(begin, masked, BLOCK_N, num_stages=STAGES):
                place = _place(page, start, K * D, P, BLOCK_N, PAGED, WINDOW)
                scores = tl.dot(q, tl.trans(tl.load(keys + place))) * scale
                top, totals, acc = _absorb(scores, tl.load(values + place), top, totals, acc, LAZY=True)
                page = _pages(table, start + BLOCK_N, end, P, BLOCK_N, PAGED, WINDOW)
        for start in tl.range(masked, end, BLOCK_N, num_stages=1 if PAGED else STAGES):
            n = start + tl.arange(0, BLOCK_N)
            cached = n < end
            place = _place(page, start, K * D, P, BLOCK_N, PAGED, WINDOW)
            k = tl.load(keys + place, mask=cached[:, None], other=0.0)
            seen = cached[None, :]
            if WINDOW:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
            v = tl.load(values + place, mask=cached[:, None], other=0.0)
            top, totals, acc = _absorb(scores, v, top, totals, acc, LAZY=False)
            page = _pages(table, start + BLOCK_N, end, P, BLOCK_N, PAGED, WINDOW)

        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        total = tl.sum(totals, axis=1)
        acc = acc / total[:, None]
        if num_chunks == 1:
            target = out + (tile_rows * Q + head)[:, None] * D + d[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])
        else:
            partial = (first_partial + index).to(tl.int64) * Q + head
            tl.store(partials + partial[:, None] * D + d[None, :], acc, mask=inside[:, None])
            tl.store(lse + partial, top + tl.log2(total), mask=inside)
            tl.debug_barrier()  # every thread's partial before the one atomic that announces them
            if PART == 3:
                count = arrived + row * K + kv_head
                if tl.atomic_add(count, 1, sem="acq_rel") == num_chunks - 1:
                    _fold(partials, lse, out, row, own_partial, num_chunks, kv_head, Q, G, D, COLUMNS, FOLD)
                    tl.store(count, 0)
            else:
                # Whoever folds a row of a batch in which some share, it must come to the same: all do it this way.
                parts = tl.zeros([BLOCK_M], tl.int32)
                if PART == 2 or num_queries == 1:
                    count = arrived + row * K + kv_head
                    if tl.atomic_add(count, 1, sem="acq_rel") == num_chunks - 1:
                        tl.store(count, 0)
                        parts = tl.where(inside, num_chunks, 0)
                else:
                    # All rows are announced at once: one after the other, each would wait for the memory.
                    query = tl.arange(0, BLOCK_M)
                    owners = tl.load(query_rows + first_query + query, mask=query < num_queries, other=0)
                    counts = arrived + owners * K + kv_head
                    before = tl.atomic_add(counts, 1, mask=query < num_queries, sem="acq_rel")
                    chunks = tl.load(rows + owners * 4 + 1, mask=query < num_queries, other=0)
                    is_last = (query < num_queries) & (before == chunks - 1)
                    tl.store(counts, 0, mask=is_last)
                    parts = tl.where(inside, tl.gather(tl.where(is_last, chunks, 0), m // G, 0), 0)
                if tl.max(parts, axis=0) > 0:
                    place, part = (tile_rows * Q + head).to(tl.int64) * D, first_partial.to(tl.int64) * Q + head
                    for column in tl.static_range(0, D, FOLD_COLUMNS):
                        _fold_tile(partials, lse, out, place, part, parts, column, Q, D, BLOCK_M, FOLD_COLUMNS)
    if PDL:
        # Whoever had nothing to do, too: what waits for this launch relies on it that the one before has ended.
        tl.extra.cuda.gdc_wait()


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWorkspace:
    """Partials of one layer at a time; layers reuse it since they run in order. Counts are zero between launches."""

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


# What one launch takes: all units, those that rows share, the others; or all of them, none of which is shared.
ALL_UNITS, SHARED_UNITS, OWN_UNITS, NONE_SHARED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    num_programs: int = 132 * 16
    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 3  # one more than tiles of keys that are being used or on their way
    max_registers: int = 128  # per thread: a few spills cost less than a program fewer per multiprocessor
    block_m: int = 16  # query heads per unit: a shared unit holds at most block_m // G rows


def decode_attention_tuning(
    rows: int, group: int, tile: int, short: bool = False
) -> tuple[DecodeTuning, DecodeTuning]:  # fmt: skip
    """For the units that one row has of its own, and for those of `tile` query heads that several rows share. What was
    fastest on an H200 at 1 to 256 rows with 2, 4 and 5 query heads a KV head; see docs/log.md.

    `short`: many rows have a few hundred tokens each, so that many small programs win. Own units have tiles of just the
    heads of one KV head: a tile of 16 spends a third of its instructions on empty rows. Where rows are many, tiles of
    16 keys that lie in one page: the GPU runs at its limit of power, and what attention saves of it lets the products
    run at a higher clock.
    """
    heads = next_power_of_2(group)
    if tile:
        # Beside each other. Of 64 heads, what the loop needs does not fit fewer registers.
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=2)
        return own, DecodeTuning(block_m=tile, block_n=64, num_stages=2, max_registers=255 if tile == 64 else 168)
    if (rows > 192 and heads <= 8) or (short and heads <= 4):
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=1, num_stages=4, max_registers=255)
    elif rows > 128 and heads <= 4:
        own = DecodeTuning(block_m=heads, block_n=16, num_warps=2, num_stages=4, max_registers=168)
    else:
        own = DecodeTuning(block_m=heads)
    return own, own


def tiles_fit(chunk: int, page_size: int, tuning: DecodeTuning) -> bool:
    """Whether the tiles of every chunk lie in one page each, or begin with one, where the kernel counts on it."""
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
) -> None:
    """out [R, Q D] = attention of the new tokens in qkv [R, (Q + 2K) D], whose keys and values enter the caches.

    Caches [pages, P, K, D]; page_table [S, pages per slot] int32; cos_sin [positions, D] float32; q_norm and k_norm
    [D] together or not at all. `units` was filled by `decode_units` with the same window in this pass, in chunks that
    `tiles_fit`. Rows beyond num_rows are left as they were. `part`: a second launch takes the units that this one does
    not, at the same time or in any order. With `stream` [R, H], qkv is the product of a stream that was not normed, and
    is scaled here; where several rows share units it must be normed.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q_heads = out.shape[1] // head_dim
    group = q_heads // kv_heads
    columns = next_power_of_2(group * head_dim)
    assert group <= tuning.block_m, f"{group} query heads per KV head do not fit a tile of {tuning.block_m}"
    _decode_attention_kernel[(tuning.num_programs,)](
        qkv,
        k_cache,
        v_cache,
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
        workspace.partials,
        workspace.lse,
        workspace.arrived,
        out,
        qkv.stride(0),
        page_table.stride(0),
        eps,
        head_dim**-0.5 * 1.4426950408889634,
        Q=q_heads,
        K=kv_heads,
        G=group,
        D=head_dim,
        P=page_size,
        H=0 if stream is None else stream.shape[1],
        HAS_NORM=q_norm is not None,
        WINDOW=window,
        PAGED=not window and page_size % tuning.block_n == 0,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        COLUMNS=columns,
        FOLD=max(1024 // columns, 2),
        FOLD_COLUMNS=head_dim if tuning.block_m <= 32 else head_dim // 2,
        STAGES=tuning.num_stages,
        PDL=pdl,
        PART=part,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
        launch_pdl=pdl,
    )
