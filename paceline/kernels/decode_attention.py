"""Decode attention over the paged cache: one launch that also norms, rotates and writes the new key and value.

A program takes (unit, KV head) pairs in turn, up to a count that lies on the device, so that one captured graph
serves every batch. The row's tail unit starts its softmax from the new token, taken from the qkv product, and writes
that token's key and value: nobody reads them from the cache in this pass, so nothing has to wait for the write.

A row of several chunks leaves one float32 partial per chunk. Whoever finishes last (an atomic count per row and head)
folds them, in the order of the chunks whoever that is: a second launch per layer would cost more than the fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import tl, triton
from paceline.kernels.decode_units import DecodeUnits
from paceline.kernels.rope_kv import rope_kv_reference, rotate_row


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
) -> torch.Tensor:
    """[R, Q D] in float64. Writes the new keys and values first, then attends row by row."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q = rope_kv_reference(qkv, k_cache, v_cache, page_table, slots, positions, cos_sin, q_norm, k_norm, eps)
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
def _fold(partials, lse, out, row, first_partial, num_chunks, head, Q: tl.constexpr, D: tl.constexpr):
    """out[row, head] from its partials, 16 chunks at a time, ascending."""
    d = tl.arange(0, D)
    block = tl.arange(0, 16)
    top = -1.0e30
    total = 0.0
    value = tl.zeros([D], tl.float32)
    for start in range(0, num_chunks, 16):
        inside = start + block < num_chunks
        place = (first_partial + start + block).to(tl.int64) * Q + head
        # .cg: written by other multiprocessors in this launch, so the first-level cache must not answer.
        weight = tl.load(lse + place, mask=inside, other=-float("inf"), cache_modifier=".cg")
        piece = tl.load(partials + place[:, None] * D + d[None, :], mask=inside[:, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(weight, axis=0))
        weight = tl.exp2(weight - higher)
        keep = tl.exp2(top - higher)
        value = value * keep + tl.sum(piece * weight[:, None], axis=0)
        total = total * keep + tl.sum(weight, axis=0)
        top = higher
    tl.store(out + (row.to(tl.int64) * Q + head) * D + d, (value / total).to(out.dtype.element_ty))


@triton.jit
def _decode_attention_kernel(
    qkv,
    k_cache,
    v_cache,
    page_table,
    cos_sin,
    q_norm,
    k_norm,
    units,
    num_units,
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
    HAS_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    d = tl.arange(0, D)
    m = tl.arange(0, BLOCK_M)
    num_work = tl.load(num_units) * K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        unit = units + work // K * 8
        kv_head = work % K
        row = tl.load(unit)
        slot = tl.load(unit + 1).to(tl.int64)
        first_query = tl.load(unit + 2)
        num_queries = tl.load(unit + 3)
        begin = tl.load(unit + 4)
        end = tl.load(unit + 5)
        index = tl.load(unit + 6)
        is_tail = tl.load(unit + 7) != 0

        inside = m // G < num_queries
        tile_rows = row + tl.zeros([BLOCK_M], tl.int32)
        if num_queries > 1:
            tile_rows = tl.load(query_rows + first_query + m // G, mask=inside, other=0)
        position = tl.load(rows + tile_rows * 4)
        head = kv_head * G + m % G
        q = rotate_row(
            qkv,
            (tile_rows.to(tl.int64) * qkv_stride + head * D)[:, None],
            inside[:, None],
            q_norm,
            cos_sin + position.to(tl.int64)[:, None] * D,
            eps,
            D,
            HAS_NORM,
        ).to(qkv.dtype.element_ty)

        top = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        if is_tail:
            # end is the position being decoded: the cache holds begin..end, this token makes it end + 1.
            source = qkv + row.to(tl.int64) * qkv_stride
            new_k = rotate_row(
                source + (Q + kv_head) * D,
                tl.zeros([1, 1], tl.int32),
                tl.full([1, 1], 1, tl.int1),
                k_norm,
                cos_sin + end.to(tl.int64) * D,
                eps,
                D,
                HAS_NORM,
            ).to(k_cache.dtype.element_ty)
            new_v = tl.load(source + (Q + K + kv_head) * D + d).to(v_cache.dtype.element_ty)
            page = tl.load(page_table + slot * table_stride + end // P).to(tl.int64)
            place = ((page * P + end % P) * K + kv_head) * D
            tl.store(k_cache + place + d[None, :], new_k)
            tl.store(v_cache + place + d, new_v)
            top = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale
            total += 1.0
            acc += new_v.to(tl.float32)[None, :]

        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            n = start + tl.arange(0, BLOCK_N)
            cached = n < end
            page = tl.load(page_table + slot * table_stride + n // P, mask=cached, other=0).to(tl.int64)
            place = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
            k = tl.load(k_cache + place, mask=cached[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            if WINDOW:
                scores = tl.where(
                    cached[None, :] & (n[None, :] > position[:, None] - WINDOW), scores, -float("inf")
                )
            else:
                scores = tl.where(cached[None, :], scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            keep = tl.exp2(top - higher)
            weight = tl.exp2(scores - higher[:, None])
            v = tl.load(v_cache + place, mask=cached[:, None], other=0.0)
            total = total * keep + tl.sum(weight, axis=1)
            acc = acc * keep[:, None] + tl.dot(weight.to(v.dtype), v)
            top = higher

        acc = acc / total[:, None]
        num_chunks = tl.load(rows + row * 4 + 1)
        if num_chunks == 1:
            target = out + (tile_rows.to(tl.int64) * Q + head)[:, None] * D + d[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])
        else:
            place = (tl.load(rows + tile_rows * 4 + 2) + index).to(tl.int64) * Q + head
            tl.store(partials + place[:, None] * D + d[None, :], acc, mask=inside[:, None])
            tl.store(lse + place, top + tl.log2(total), mask=inside)
            tl.debug_barrier()  # every thread's partial before the one atomic that announces them
            for query in range(0, num_queries):
                owner = row
                if num_queries > 1:
                    owner = tl.load(query_rows + first_query + query)
                owner_chunks = tl.load(rows + owner * 4 + 1)
                count = arrived + owner * K + kv_head
                if tl.atomic_add(count, 1, sem="acq_rel") == owner_chunks - 1:
                    first_partial = tl.load(rows + owner * 4 + 2)
                    for g in range(0, G):
                        _fold(partials, lse, out, owner, first_partial, owner_chunks, kv_head * G + g, Q, D)
                    tl.store(count, 0)


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


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    num_programs: int = 132 * 16
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    block_m: int = 16  # query heads per unit: a shared unit holds at most block_m // G rows


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
) -> None:
    """out [R, Q D] = attention of the new tokens in qkv [R, (Q + 2K) D], whose keys and values enter the caches.

    Caches [pages, P, K, D]; page_table [S, pages per slot] int32; cos_sin [positions, D] float32; q_norm and k_norm
    [D] together or not at all. `units` was filled by `decode_units` with the same window in this pass. Rows beyond
    num_rows are left as they were.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q_heads = out.shape[1] // head_dim
    group = q_heads // kv_heads
    assert group <= tuning.block_m, f"{group} query heads per KV head do not fit a tile of {tuning.block_m}"
    _decode_attention_kernel[(tuning.num_programs,)](
        qkv,
        k_cache,
        v_cache,
        page_table,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        units.units,
        units.num_units,
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
        HAS_NORM=q_norm is not None,
        WINDOW=window,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        PDL=pdl,
        num_warps=tuning.num_warps,
        launch_pdl=pdl,
    )
