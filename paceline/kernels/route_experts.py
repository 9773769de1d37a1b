"""The router of a mixture of experts: which experts each row uses, and the rows of each expert side by side.

One launch computes the router's logits, the top k and their weights. What the GEMMs of the experts then need depends on
the number of rows (`RoutedRows`):

    up to 16 rows     a list of the experts that any row uses. An expert computes all rows, which cost nothing: its
                      time is that of reading its weights. The same launch makes the list.
    more rows         the pairs of row and expert, sorted by expert in a second launch, and a table of blocks: up to
                      block_m pairs of one expert each.

Nothing is read on the host: the number of blocks is bounded by that of rows and experts, so that a CUDA graph can
contain all of it. There are no floating-point atomics, and pairs keep the order of rows: the same rows give the same
bits in every run.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels._triton import cdiv, launched, next_power_of_2, pdl_launch_dependents, pdl_wait, tl, triton

LISTED_ROWS = 16  # with more rows, pairs are sorted
_SPLIT_ROWS = 512  # with more rows, a program computes all experts
_MIN_COLUMNS = 16  # of the logits, for tl.dot
_CHUNK = 32  # tiles of rows whose counts are added at a time


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What `ModelSpec` says about the router. shared: a last row of its matrix is the gate of the shared expert."""

    num_experts: int
    num_chosen: int
    sigmoid: bool = False
    renormalise: bool = True
    shared: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LiveRows:
    """Which rows of a batch are no padding: the first ones, or those whose value is not negative."""

    values: torch.Tensor  # int32: [1], their number; or [T]
    by_row: bool


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """Buffers for what the router decides, shared by all layers. `empty` makes them for up to so many rows."""

    matrix: torch.Tensor  # [rows, E] float32: the weight of each expert for each row; 0: not chosen
    factors: torch.Tensor  # [rows] float32: RMSNorm factors
    shared_weights: torch.Tensor  # [rows] float32: of the shared expert
    # Few rows:
    active: torch.Tensor  # [1 + E] int32: how many experts are used, and which
    # More rows:
    ids: torch.Tensor  # [rows, k] int32: experts; E: none
    sorted: torch.Tensor  # [rows * k] int32: pairs, by expert
    blocks: torch.Tensor  # [3, blocks] int32: expert (-1: unused), first pair in `sorted`, end of the expert's pairs
    # Between launches of one layer:
    logits: torch.Tensor  # [rows, E] float32, with few rows
    counts: torch.Tensor  # [tiles of rows, E] int32: rows of a tile that chose each expert; few rows: a row is a tile
    arrived: torch.Tensor  # int32, zero between launches

    @classmethod
    def empty(cls, rows: int, options: RouterOptions, device: torch.device | str) -> RoutedRows:
        experts, chosen = options.num_experts, options.num_chosen

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        split = min(rows, _SPLIT_ROWS)
        return cls(
            matrix=floats(rows, experts),
            factors=floats(rows),
            shared_weights=floats(rows),
            active=ints(1 + experts),
            ids=ints(rows, chosen),
            sorted=ints(rows * chosen),
            blocks=ints(3, max_blocks(rows * chosen, experts, 16)),
            logits=floats(split, _padded(options)),
            counts=ints(max(cdiv(rows, 16), LISTED_ROWS), _padded(options)),
            arrived=ints(max(cdiv(split, 16), LISTED_ROWS + 1)),
        )


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks that the pairs can need, however they are distributed."""
    return num_pairs // block_m + num_experts


def route_reference(
    x: torch.Tensor,
    router: torch.Tensor,
    options: RouterOptions,
    eps: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, k] and weights [T, k], in float64. With eps, RMSNorm is applied to x first."""
    wide = x.double()
    if eps is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    logits = wide @ router[: options.num_experts].double().T
    if bias is not None:
        logits += bias.double()
    scores = torch.sigmoid(logits) if options.sigmoid else torch.softmax(logits, dim=-1)
    weights, ids = torch.topk(scores, options.num_chosen, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if options.renormalise else weights


@triton.jit
def _comparable(logits, is_expert):
    """The logits of experts, with a value for NaN: a row that is not finite gets valid experts, and its output is not
    finite because the row is not."""
    lowest: tl.constexpr = -3.0e38
    return tl.where(is_expert, tl.where(logits == logits, tl.maximum(logits, lowest), lowest), float("-inf"))


@triton.jit
def _choose_by_rank(
    row,
    logits,
    live,
    matrix,
    shared_weights,
    counts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The experts of one row, and 1 in its counts for each. An expert is chosen if fewer than TOP_K others come before
    it, which needs no TOP_K maxima, one after the other."""
    column = tl.arange(0, BLOCK_L)
    is_expert = column < E
    found = logits + row * BLOCK_L
    value = tl.load(found + column, cache_modifier=".cg")
    order = _comparable(value, is_expert)
    rank = tl.zeros([BLOCK_L], tl.int32)
    for start in tl.static_range(0, BLOCK_L, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = _comparable(tl.load(found + other, cache_modifier=".cg"), other < E)
        is_before = (others[None, :] > order[:, None]) | (
            (others[None, :] == order[:, None]) & (other[None, :] < column[:, None])
        )
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    is_chosen = is_expert & (rank < TOP_K)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        score = tl.exp(value - tl.max(order, axis=0))
    if RENORMALISE:
        score = score / tl.sum(tl.where(is_chosen, score, 0.0), axis=0)
    elif not SIGMOID:
        score = score / tl.sum(tl.where(is_expert, score, 0.0), axis=0)
    if LIVE == 1:
        is_chosen = is_chosen & (row < tl.load(live))  # padding chooses nothing
    if LIVE == 2:
        is_chosen = is_chosen & (tl.load(live + row) >= 0)
    tl.store(matrix + row * E + column, tl.where(is_chosen, score, 0.0), mask=is_expert)
    tl.store(counts + row * BLOCK_L + column, is_chosen.to(tl.int32))
    if HAS_SHARED:
        gate = tl.load(found + E, cache_modifier=".cg")
        tl.store(shared_weights + row, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit
def _list_experts(counts, active, load, M, BLOCK_L: tl.constexpr, MAX_ROWS: tl.constexpr):
    """The experts that any of a few rows uses."""
    column = tl.arange(0, BLOCK_L)
    row = tl.arange(0, MAX_ROWS)[:, None]
    count = tl.load(counts + row * BLOCK_L + column[None, :], mask=row < M, other=0, cache_modifier=".cg")
    used = tl.sum(count, axis=0)
    is_used = (used > 0).to(tl.int32)
    tl.store(active + tl.cumsum(is_used, axis=0), column, mask=used > 0)
    tl.store(active, tl.sum(is_used, axis=0))
    tl.atomic_add(load + column, used.to(tl.int64), mask=used > 0, sem="relaxed")


@triton.jit
def _choose(
    logits,  # [BLOCK_M, BLOCK_L]
    m,
    inside,
    is_live,
    tile_m,
    ids,
    matrix,
    shared_weights,
    counts,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The experts of each of many rows, and how many rows of this tile chose each."""
    column = tl.arange(0, BLOCK_L)
    is_expert = (column < E)[None, :]
    if HAS_SHARED:
        gate = tl.sum(tl.where((column == E)[None, :], logits, 0.0), axis=1)
        tl.store(shared_weights + m, 1.0 / (1.0 + tl.exp(-gate)), mask=inside)
    order = _comparable(logits, is_expert)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        score = tl.exp(logits - tl.max(order, axis=1)[:, None])
    taken = tl.zeros([BLOCK_M, BLOCK_L], tl.int32)
    for at in range(TOP_K):
        best = tl.argmax(order, axis=1)
        is_best = column[None, :] == best[:, None]
        taken = tl.where(is_best, 1, taken)
        order = tl.where(is_best, float("-inf"), order)
        tl.store(ids + m * TOP_K + at, tl.where(is_live, best, E), mask=inside)
    if RENORMALISE:
        score = score / tl.sum(tl.where(taken > 0, score, 0.0), axis=1)[:, None]
    elif not SIGMOID:
        score = score / tl.sum(tl.where(is_expert, score, 0.0), axis=1)[:, None]
    taken = tl.where(is_live[:, None], taken, 0)  # padding chooses nothing
    weights = tl.where(taken > 0, score, 0.0)
    tl.store(matrix + m.to(tl.int64)[:, None] * E + column[None, :], weights, mask=inside[:, None] & is_expert)
    tl.store(counts + tile_m * BLOCK_L + column, tl.sum(taken, axis=0))


@launched
@triton.jit(do_not_specialize=["M"])
def _route_kernel(
    x,
    router,
    bias,
    live,
    ids,
    matrix,
    factors,
    shared_weights,
    active,
    counts,
    load,
    logits,
    arrived,
    M,
    eps,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIVE: tl.constexpr,
    LISTED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_m = tl.program_id(0)
    tile_e = tl.program_id(1)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    inside = m < M
    num_rows: tl.constexpr = E + 1 if HAS_SHARED else E
    inputs = x + m.to(tl.int64)[:, None] * K + k[None, :]
    rows = router + n[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if LISTED:
        # Without tl.dot, which computes 16 rows at least, and with weights loaded before the wait: see linear.py.
        if PDL:
            pdl_launch_dependents()
        w = tl.load(rows, mask=(n < num_rows)[:, None] & (k < K)[None, :], other=0.0)
        if PDL:
            pdl_wait()
        for start in tl.static_range(0, K, BLOCK_K):
            is_inside = (start + k < K)[None, :]
            if start > 0:
                w = tl.load(rows + start, mask=(n < num_rows)[:, None] & is_inside, other=0.0)
            wide = tl.load(inputs + start, mask=is_inside, other=0.0).to(tl.float32)
            acc += tl.sum(wide * w.to(tl.float32), axis=1)[None, :]
            squares += wide * wide
    else:
        if PDL:
            pdl_wait()
            pdl_launch_dependents()
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            is_inside = (start + k < K)[None, :]
            a = tl.load(inputs + start, mask=inside[:, None] & is_inside, other=0.0)
            w = tl.load(rows + start, mask=(n < num_rows)[:, None] & is_inside, other=0.0)
            acc = tl.dot(a, tl.trans(w), acc)
            if HAS_NORM:
                wide = a.to(tl.float32)
                squares += wide * wide
    is_live = inside
    if LIVE == 1:
        is_live = is_live & (m < tl.load(live))
    if LIVE == 2:
        is_live = is_live & (tl.load(live + m, mask=inside, other=-1) >= 0)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / K + eps)
        acc = acc * factor[:, None]
        if tile_e == 0:
            tl.store(factors + m, factor, mask=inside)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < E, other=0.0).to(tl.float32)[None, :]
    if LISTED or TILES > 1:
        # The last program of a row has all logits. It adds nothing up, so the result is the same in every run.
        tl.store(logits + m[:, None] * BLOCK_L + n[None, :], acc, mask=inside[:, None])
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile_m, 1, sem="acq_rel") == TILES - 1
        if is_last:
            if LISTED:
                _choose_by_rank(
                    tile_m, logits, live, matrix, shared_weights, counts,
                    E, TOP_K, SIGMOID, RENORMALISE, HAS_SHARED, LIVE, BLOCK_L, CHUNK,
                )  # fmt: skip
                # In the same way, the last row knows the experts of all.
                tl.debug_barrier()
                if tl.atomic_add(arrived + MAX_LISTED, 1, sem="acq_rel") == M - 1:
                    _list_experts(counts, active, load, M, BLOCK_L, MAX_LISTED)
                    tl.store(arrived + MAX_LISTED, 0)
            else:
                column = tl.arange(0, BLOCK_L)
                place = m[:, None] * BLOCK_L + column[None, :]
                found = tl.load(logits + place, mask=inside[:, None], other=0.0, cache_modifier=".cg")
                _choose(
                    found, m, inside, is_live, tile_m, ids, matrix, shared_weights, counts,
                    E, TOP_K, SIGMOID, RENORMALISE, HAS_SHARED, BLOCK_M, BLOCK_L,
                )  # fmt: skip
            tl.store(arrived + tile_m, 0)
    else:
        _choose(
            acc, m, inside, is_live, tile_m, ids, matrix, shared_weights, counts,
            E, TOP_K, SIGMOID, RENORMALISE, HAS_SHARED, BLOCK_M, BLOCK_L,
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["M", "num_tiles", "max_blocks"])
def _sort_pairs_kernel(
    ids,
    counts,
    sorted,
    blocks,
    load,
    M,
    num_tiles,
    max_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per tile of rows. Where its pairs go follows from the counts of all tiles."""
    tile = tl.program_id(0)
    column = tl.arange(0, BLOCK_L)
    other = tl.arange(0, CHUNK)
    m = tile * TILE + tl.arange(0, TILE)
    is_expert = column < E
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    total = tl.zeros([BLOCK_L], tl.int32)
    before = tl.zeros([BLOCK_L], tl.int32)  # in tiles before this one
    for start in range(0, num_tiles, CHUNK):
        at = start + other
        count = tl.load(counts + at[:, None] * BLOCK_L + column[None, :], mask=(at < num_tiles)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((at < tile)[:, None], count, 0), axis=0)
    offset = tl.cumsum(total, axis=0) - total
    slot = tl.full([TILE, BLOCK_L], -1, tl.int32)
    for at in range(TOP_K):
        id = tl.load(ids + m * TOP_K + at, mask=m < M, other=E)
        slot = tl.where(column[None, :] == id[:, None], at, slot)
    is_own = ((slot >= 0) & is_expert[None, :]).to(tl.int32)
    # A row has an expert once at most, so the rows before it are the pairs before it.
    place = (offset + before)[None, :] + tl.cumsum(is_own, axis=0) - is_own
    tl.store(sorted + place, m[:, None] * TOP_K + slot, mask=is_own > 0)
    if tile == 0:
        # The blocks before those of an expert are at most offset // BLOCK_M + expert, so this is where its own begin.
        # Those that it does not need are marked.
        block = offset // BLOCK_M + column
        next_block = (offset + total) // BLOCK_M + column + 1
        # The last one marks all others that the GEMMs look at: with padding there are fewer pairs than rows allow, and
        # those blocks are of an earlier batch.
        next_block = tl.where(column == E - 1, M * TOP_K // BLOCK_M + E, next_block)
        for at in range(tl.max(tl.where(is_expert, next_block - block, 0), axis=0)):
            first = offset + at * BLOCK_M
            target = blocks + block + at
            mask = is_expert & (block + at < next_block)
            tl.store(target, tl.where(first < offset + total, column, -1), mask=mask)
            tl.store(target + max_blocks, first, mask=mask)
            tl.store(target + 2 * max_blocks, offset + total, mask=mask)
        tl.atomic_add(load + column, total.to(tl.int64), mask=is_expert, sem="relaxed")


class RouteTiles(NamedTuple):
    """How the router's GEMM is divided into programs."""

    listed: bool  # the experts that any row uses are listed
    rows: int
    experts: int  # 0: all of them
    block_k: int
    stages: int
    warps: int


def route_tiles(rows: int) -> RouteTiles:
    if rows <= LISTED_ROWS:  # one load of everything, in as many programs as there are multiprocessors
        return RouteTiles(listed=True, rows=1, experts=4, block_k=2048, stages=1, warps=4)
    # No more than 32 rows: with 64, which wgmma computes, the experts of some rows changed from run to run.
    if rows <= _SPLIT_ROWS:
        return RouteTiles(listed=False, rows=16, experts=32, block_k=128, stages=4, warps=2)
    return RouteTiles(listed=False, rows=16, experts=0, block_k=128, stages=2, warps=4)


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    options: RouterOptions,
    routed: RoutedRows,
    load: torch.Tensor,
    *,
    block_m: int,
    eps: float | None = None,
    bias: torch.Tensor | None = None,
    live: LiveRows | None = None,
    pdl: bool = False,
) -> None:
    """Chooses the experts of the rows of x [T, H], with router [E, H], or [E + 1, H] with the gate of a shared expert.

    With more than LISTED_ROWS rows, pairs are sorted into blocks of block_m. eps: RMSNorm is applied to x; its weight
    must be in `router` already. bias [E]: of the logits. load [E] int64: how many rows chose each expert is added to
    it. live: the other rows are padding, which uses no expert (default: there is none).
    """
    rows, width = x.shape
    experts, chosen = options.num_experts, options.num_chosen
    block, padded = route_tiles(rows), _padded(options)
    tiles = padded // min(block.experts or padded, padded)
    _route_kernel[(cdiv(rows, block.rows), tiles)](
        x,
        router,
        router if bias is None else bias,
        routed.ids if live is None else live.values,
        routed.ids,
        routed.matrix,
        routed.factors,
        routed.shared_weights,
        routed.active,
        routed.counts,
        load,
        routed.logits,
        routed.arrived,
        rows,
        0.0 if eps is None else eps,
        K=width,
        E=experts,
        TOP_K=chosen,
        SIGMOID=options.sigmoid,
        RENORMALISE=options.renormalise,
        HAS_SHARED=options.shared,
        HAS_NORM=eps is not None,
        HAS_BIAS=bias is not None,
        LIVE=0 if live is None else 2 if live.by_row else 1,
        LISTED=block.listed,
        TILES=tiles,
        BLOCK_M=block.rows,
        BLOCK_E=padded // tiles,
        BLOCK_L=padded,
        BLOCK_K=min(block.block_k, max(16, next_power_of_2(width))),
        CHUNK=min(padded, 32),
        MAX_LISTED=LISTED_ROWS,
        STAGES=block.stages,
        PDL=pdl,
        num_warps=block.warps,
        launch_pdl=pdl,
    )
    if block.listed:
        return
    sort_pairs(
        routed.ids[:rows],
        routed.counts,
        routed.sorted,
        routed.blocks,
        load,
        num_experts=experts,
        tile=block.rows,
        block_m=block_m,
        pdl=pdl,
    )


def sort_pairs(
    ids: torch.Tensor,
    counts: torch.Tensor,
    sorted: torch.Tensor,
    blocks: torch.Tensor,
    load: torch.Tensor,
    *,
    num_experts: int,
    tile: int,
    block_m: int,
    pdl: bool = False,
) -> None:
    """Sorts pairs of row and expert, ids [T, k], into blocks of block_m. counts [tiles, padded experts]: pairs of each
    tile of rows, by expert. The other arguments are those of `RoutedRows` and `route`."""
    rows, chosen = ids.shape
    num_tiles = cdiv(rows, tile)
    _sort_pairs_kernel[(num_tiles,)](
        ids,
        counts,
        sorted,
        blocks,
        load,
        rows,
        num_tiles,
        blocks.shape[1],
        E=num_experts,
        TOP_K=chosen,
        TILE=tile,
        BLOCK_L=counts.shape[1],
        BLOCK_M=block_m,
        CHUNK=_CHUNK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _padded(options: RouterOptions) -> int:
    """Columns of the logits: a power of two."""
    return max(_MIN_COLUMNS, next_power_of_2(options.num_experts + options.shared))
