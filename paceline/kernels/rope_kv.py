"""QK-norm (where the model has it), RoPE and the write into the paged cache, from the output of the QKV projection.

For the prompt tokens of prefill and mixed batches. Decode rows do the same inside the attention kernel
(decode_attention.py), which saves a launch per layer; both use `norm_and_rotate`, so that they write the same bits.

With `scales` [2, K] float32 the cache holds FP8 numbers: keys and values divided by the scale of their KV head.

Where a token is cached (`positions`) and what it is rotated by (`rope_positions`) are two arrays: the positions of an
image's tokens in its prompt are not those of its grid. For text both are the same tensor.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import UNSPECIALIZED, launched, next_power_of_2, tl, triton
from paceline.kernels.fp8 import to_fp8_reference, to_operand, to_stored
from paceline.kernels.heads import within_head
from paceline.kernels.rms_norm import row_factor, row_factor_reference


def rope_table(positions: int, head_dim: int, base: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """[positions, D] float32: cosines in the first half of a row, sines in the second."""
    inverse = 1.0 / base ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate_reference(x: torch.Tensor, norm: torch.Tensor | None, cos_sin: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, heads, D], cos_sin [T, D] -> float32 of the same shape."""
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
    cos, sin = (part[:, None] for part in cos_sin.float().chunk(2, dim=-1))
    low, high = wide.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rope_kv_reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rope_positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    stream: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the caches in place and returns q [T, Q, D]."""
    _, page_size, kv_heads, head_dim = k_cache.shape
    wide = qkv if stream is None else qkv.float() * row_factor_reference(stream, eps)
    heads = wide.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    table = cos_sin[rope_positions.long()]
    pages = page_table[slots.long(), (positions // page_size).long()].long()
    offsets = (positions % page_size).long()
    k = rotate_reference(k, k_norm, table, eps)
    for cache, new, scale in zip((k_cache, v_cache), (k, v), (None, None) if scales is None else scales, strict=True):
        cache[pages, offsets] = new.to(cache.dtype) if scale is None else to_fp8_reference(new, scale[:, None])
    return rotate_reference(q, q_norm, table, eps).to(qkv.dtype)


@triton.jit
def load_pairs(x, offset, inside, D: tl.constexpr, PADDED: tl.constexpr):
    """The elements of heads, and for each the element half a head away; x + offset points at element 0 of each head
    [rows, 1]. Loaded twice instead of shuffled between threads: the second load is a cache hit."""
    d = tl.arange(0, PADDED)[None, :]
    inside = within_head(inside, D, PADDED)
    mine = tl.load(x + offset + d, mask=inside, other=0.0)
    return mine, tl.load(x + offset + (d + D // 2) % D, mask=inside, other=0.0)


@triton.jit
def load_cos_sin(table, inside, D: tl.constexpr, PADDED: tl.constexpr):
    """Cosines and sines [rows, PADDED] of rows of cos_sin."""
    d = tl.arange(0, PADDED)[None, :] % (D // 2)
    return tl.load(table + d, mask=inside, other=0.0), tl.load(table + D // 2 + d, mask=inside, other=0.0)


@triton.jit
def norm_and_rotate(
    mine,
    other,
    weight,
    other_weight,
    cos,
    sin,
    eps,
    factor,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads scaled by the RMSNorm factor of their row, with QK-norm where the model has it, and rotated."""
    mine = mine.to(tl.float32) * factor
    other = other.to(tl.float32) * factor
    if HAS_NORM:
        rstd = 1.0 / tl.sqrt(tl.sum(mine * mine, axis=1) / D + eps)
        mine = mine * rstd[:, None] * weight.to(tl.float32)
        other = other * rstd[:, None] * other_weight.to(tl.float32)
    return mine * cos + tl.where(tl.arange(0, PADDED)[None, :] < D // 2, -other, other) * sin


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _rope_kv_kernel(
    qkv,
    q_out,
    k_cache,
    v_cache,
    page_table,
    slots,
    positions,
    rope_positions,
    cos_sin,
    q_norm,
    k_norm,
    stream,
    live,
    scales,
    qkv_stride,
    table_stride,
    eps,
    Q: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if HAS_LIVE:
        first, end = tl.load(live), tl.load(live + 1)
        if (token < first) | (token >= end):
            return
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    page = tl.load(page_table + slot * table_stride + position // P).to(tl.int64)
    source = qkv + token * qkv_stride
    table = cos_sin + tl.load(rope_positions + token).to(tl.int64) * D
    d = tl.arange(0, PADDED)[None, :]
    factor = 1.0
    if H:
        factor = row_factor(stream, token, eps, H)

    cos, sin = load_cos_sin(table, True, D, PADDED)
    q_weight, q_other_weight = load_pairs(q_norm, 0, HAS_NORM, D, PADDED)
    k_weight, k_other_weight = load_pairs(k_norm, 0, HAS_NORM, D, PADDED)

    head = tl.arange(0, BLOCK_Q)[:, None]
    mine, other = load_pairs(source, head * D, head < Q, D, PADDED)
    q = norm_and_rotate(mine, other, q_weight, q_other_weight, cos, sin, eps, factor, D, PADDED, HAS_NORM)
    q = to_operand(q, q_out.dtype.element_ty)
    tl.store(q_out + token * Q * D + head * D + d, q, mask=within_head(head < Q, D, PADDED))

    head = tl.arange(0, BLOCK_K)[:, None]
    mine, other = load_pairs(source + Q * D, head * D, head < K, D, PADDED)
    k = norm_and_rotate(mine, other, k_weight, k_other_weight, cos, sin, eps, factor, D, PADDED, HAS_NORM)
    inside = within_head(head < K, D, PADDED)
    v = tl.load(source + (Q + K) * D + head * D + d, mask=inside, other=0.0).to(tl.float32) * factor
    place = (page * P + position % P) * K * D + head * D + d
    k_scale, v_scale = 1.0, 1.0
    if SCALED:
        k_scale = tl.load(scales + head, mask=head < K, other=1.0)
        v_scale = tl.load(scales + K + head, mask=head < K, other=1.0)
    tl.store(k_cache + place, to_stored(k, k_scale, k_cache.dtype.element_ty, SCALED), mask=inside)
    tl.store(v_cache + place, to_stored(v, v_scale, v_cache.dtype.element_ty, SCALED), mask=inside)


def rope_kv(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rope_positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    stream: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Writes q_out [T, Q, D] and the caches [pages, P, K, D] from qkv [T, (Q + 2K) D]. With `stream` [T, H], qkv was
    computed from the hidden states before RMSNorm, and the norm's factor is applied here.

    page_table [S, pages per slot], slots [T], positions [T] and rope_positions [T] are int32, cos_sin [positions, D]
    float32. q_norm and k_norm [D] are given together or not at all. With `live` [2] int32 only tokens live[0]..live[1]
    are processed: decodes come before them, padding after.
    """
    tokens = qkv.shape[0]
    _, page_size, kv_heads, head_dim = k_cache.shape
    q_heads = q_out.shape[1]
    _rope_kv_kernel[(tokens,)](
        qkv,
        q_out,
        k_cache,
        v_cache,
        page_table,
        slots,
        positions,
        rope_positions,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        qkv if stream is None else stream,
        slots if live is None else live,
        cos_sin if scales is None else scales,
        qkv.stride(0),
        page_table.stride(0),
        eps,
        Q=q_heads,
        K=kv_heads,
        D=head_dim,
        PADDED=next_power_of_2(head_dim),
        P=page_size,
        H=0 if stream is None else stream.shape[1],
        HAS_NORM=q_norm is not None,
        HAS_LIVE=live is not None,
        SCALED=scales is not None,
        BLOCK_Q=next_power_of_2(q_heads),
        BLOCK_K=next_power_of_2(kv_heads),
        num_warps=4,
    )
