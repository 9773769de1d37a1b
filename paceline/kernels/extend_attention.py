"""Prefill attention over the paged cache: ragged chunks of queries, each seeing its row's whole past.

The keys and values of the pass are already in the cache (rope_kv.py), so a chunk, a cache hit and a whole prompt are
the same thing here. The heads that share a KV head are packed into one tile, so K and V are read once for all.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels._triton import next_power_of_2, tl, triton


@dataclass(frozen=True, slots=True)
class ExtendTuning:
    block_m: int = 128  # query heads per tile: block_m / G tokens
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


def tokens_per_tile(tuning: ExtendTuning, group: int) -> int:
    return tuning.block_m // next_power_of_2(group)


def extend_tiles(
    starts: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], tokens: int, first_row: int = 0
) -> npt.NDArray[np.int32]:
    """[tiles, 2]: (row, first token within the row's queries) of the rows from `first_row` on, the tile with most keys
    first so none starts late."""
    counts = -(-lengths // tokens)
    counts[:first_row] = 0
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    begins = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (begins * tokens).astype(np.int32)
    order = np.argsort(-(starts[rows] + offsets), kind="stable")
    return np.stack([rows[order], offsets[order]], axis=1).astype(np.int32)


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
    table_stride,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
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
    table = page_table + slot * table_stride
    for at in tl.range(begin, plain, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // P).to(tl.int64)
        source = (((page * P + n % P) * K + kv_head) * D)[:, None] + d[None, :]
        k = tl.load(k_cache + source)
        scores = tl.dot(queries, tl.trans(k)) * scale
        higher = tl.maximum(top, tl.max(scores, axis=1))
        keep = tl.exp2(top - higher)
        weight = tl.exp2(scores - higher[:, None])
        v = tl.load(v_cache + source)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None])
        top = higher
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
        higher = tl.maximum(top, tl.max(scores, axis=1))
        keep = tl.exp2(top - higher)
        weight = tl.exp2(scores - higher[:, None])
        v = tl.load(v_cache + source, mask=cached[:, None], other=0.0)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None])
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside[:, None])


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
) -> None:
    """out [T, Q, D] = causal attention of q [T, Q, D] over each row's cache [pages, P, K, D] up to its own position.

    Row r's queries are q[query_starts[r]:query_starts[r + 1]] in slot row_slots[r], at consecutive positions of
    which positions [T] holds each. tiles [n, 2] is `extend_tiles` for `tokens_per_tile`; rows it does not name (the
    decodes of a mixed pass) are left alone. All index tensors are int32 on the device.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    q_heads = q.shape[1]
    group = q_heads // kv_heads
    _extend_attention_kernel[(kv_heads, tiles.shape[0])](
        q,
        k_cache,
        v_cache,
        page_table,
        tiles,
        row_slots,
        positions,
        query_starts,
        out,
        page_table.stride(0),
        head_dim**-0.5 * 1.4426950408889634,
        Q=q_heads,
        K=kv_heads,
        G=group,
        PADDED_G=next_power_of_2(group),
        D=head_dim,
        P=page_size,
        WINDOW=window,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
    )
