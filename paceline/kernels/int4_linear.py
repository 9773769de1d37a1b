"""GEMMs with 4-bit weights and 16-bit activations (W4A16): weights are converted in registers, in groups with a scale.

    w = scale * (q - zero)        q from 0 to 15; a scale and a zero for each row and 32, 64 or 128 columns

With few rows a GEMM takes as long as reading its weight, if it takes few instructions per weight. So weights are stored
in the order in which they are used: 16 bits hold four weights that are `span` columns apart, and a chunk is 4 * span
columns of a row. One load of [rows, span] becomes four operands. Two instructions turn two numbers of an operand into
float16: the bits of a weight are put into the mantissa of 1024, then 1024 and the zero are subtracted, without
rounding. A group is summed in float32, then scaled.

    chunk of a row     columns 0 .. span-1 | span .. 2 span-1 | 2 span .. 3 span-1 | 3 span .. 4 span-1
    its element i      bits 0 .. 3: i | bits 4 .. 7: span + i | bits 8 .. 11: 2 span + i | bits 12 .. 15: 3 span + i

Weights are the left operand, [N, K] x [K, M], which a tensor core reads from registers: as the right one, a Hopper GPU
would need them in shared memory. With very many rows it is faster to expand a weight (`expand_int4`) and to use cuBLAS.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import INTERPRETED, cdiv, launched, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantised_linear import store_sums

GROUPS = (32, 64, 128)  # columns that share a scale
SYMMETRIC_ZERO = 8  # of weights that are stored without zeros


def span_of(group: int) -> int:
    """Columns between two weights of an element."""
    return min(group, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Matrix:
    """A weight [N, K] on a device, in the layout above. Columns are padded to whole chunks, whose scales are 0."""

    values: torch.Tensor  # [chunks, N, span] int16
    scales: torch.Tensor  # [groups, N] int32: a scale and, in the upper half, a zero, both float16. One load reads both
    group: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.num_columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The reference implementation of what the kernels compute with."""
        rows = self.values.shape[1]
        shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=self.values.device)
        nibbles = (self.values.int()[:, :, None, :] >> shifts[:, None]) & 15  # [chunks, N, 4, span]
        values = nibbles.transpose(0, 1).reshape(rows, -1, self.group).to(dtype)
        scales, zeros = (half.T.to(dtype) for half in self.scales.view(torch.float16).view(-1, rows, 2).unbind(2))
        return ((values - zeros[:, :, None]) * scales[:, :, None]).reshape(rows, -1)[:, : self.num_columns]


def pack_int4(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> Int4Matrix:
    """values [N, K] uint8 from 0 to 15, scales and zeros [N, K / group]. Zeros are integers from 0 to 16; None: 8."""
    assert group in GROUPS, f"groups of {group} columns"
    rows, columns = values.shape
    assert rows * columns < 1 << 32, "kernels count elements with 32 bits"
    span = span_of(group)
    rest = -columns % (4 * span)
    values = torch.nn.functional.pad(values, (0, rest)).reshape(rows, -1, 4, span)
    packed = values[:, :, 0].to(torch.int16)
    for place in range(1, 4):
        packed |= values[:, :, place].to(torch.int16) << 4 * place
    zeros = torch.full_like(scales, SYMMETRIC_ZERO) if zeros is None else zeros
    both = torch.stack((scales.to(torch.float16), zeros.to(torch.float16)), dim=2)
    words = torch.nn.functional.pad(both, (0, 0, 0, rest // group)).view(torch.int32).squeeze(2)
    return Int4Matrix(packed.transpose(0, 1).contiguous(), words.T.contiguous(), group, columns)


def quantise_int4(weight: torch.Tensor, group: int = 128, *, symmetric: bool = False) -> Int4Matrix:
    """Rounds a weight [N, K] to 4 bits: between the smallest and the largest of a group; symmetric: between -8 and 7
    times a scale."""
    rows, columns = weight.shape
    assert columns % group == 0, f"{columns} columns are not in groups of {group}"
    count = columns // group
    values = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, count, dtype=torch.float16, device=weight.device)
    zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    for first in range(0, rows, 4096):  # in parts: float32 takes eight times the memory
        part = slice(first, first + 4096)
        groups = weight[part].float().reshape(-1, count, group)
        smallest, largest = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        if symmetric:
            scale = torch.maximum(-smallest / 8, largest / 7).half()
        else:
            scale = ((largest - smallest) / 15).half()
        inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
        if not symmetric:
            zeros[part] = (-smallest * inverse).round().clamp(0, 15).half()
        rounded = (groups * inverse[..., None]).round_() + zeros[part].float()[..., None]
        values[part] = rounded.clamp_(0, 15).to(torch.uint8).flatten(1)
        scales[part] = scale
    return pack_int4(values, scales, None if symmetric else zeros, group)


def expand_int4_reference(weight: Int4Matrix, out: torch.Tensor) -> None:
    out.copy_(weight.dequantise())


@triton.jit
def _unpack(packed, zero_0, zero_1, zero_2, zero_3):
    """The four weights of each element less their zeros, in float16."""
    if INTERPRETED:
        nibbles = packed.to(tl.int32)
        first = (nibbles & 15).to(tl.float16) - zero_0
        second = (nibbles >> 4 & 15).to(tl.float16) - zero_1
        third = (nibbles >> 8 & 15).to(tl.float16) - zero_2
        fourth = (nibbles >> 12 & 15).to(tl.float16) - zero_3
    else:
        # 0x6400 is 1024, whose last bit counts 1. A nibble in bits 4 to 7 counts 16: a sixteenth of both is 64 + q.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 high, a, b, c, d, base, sixteenth;
            shr.b32 high, $4, 8;
            lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 c, high, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, high, 0x00f000f0, 0x64006400, 0xea;
            mov.b32 base, 0x64006400;
            add.f16x2 $0, $5, base;
            sub.f16x2 $0, a, $0;
            add.f16x2 $2, $7, base;
            sub.f16x2 $2, c, $2;
            mov.b32 base, 0xd400d400;
            mov.b32 sixteenth, 0x2c002c00;
            sub.f16x2 $1, base, $6;
            fma.rn.f16x2 $1, b, sixteenth, $1;
            sub.f16x2 $3, base, $8;
            fma.rn.f16x2 $3, d, sixteenth, $3;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [packed, zero_0, zero_1, zero_2, zero_3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second, third, fourth


@triton.jit
def _words(scales, chunk, inside, num_rows, PER_CHUNK: tl.constexpr):
    """Scale and zero of each of the four operands of a chunk, which has 2 or 4 groups."""
    scales += chunk * PER_CHUNK * num_rows
    first = tl.load(scales, mask=inside, other=0)
    third = tl.load(scales + PER_CHUNK // 2 * num_rows, mask=inside, other=0)
    second, fourth = first, third
    if PER_CHUNK == 4:
        second = tl.load(scales + num_rows, mask=inside, other=0)
        fourth = tl.load(scales + 3 * num_rows, mask=inside, other=0)
    return first, second, third, fourth


@triton.jit
def _scale(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _zero(word):
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@launched
@triton.jit(do_not_specialize=["M"])
def _int4_linear_kernel(
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    partials,
    arrived,
    M,
    N,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows vary fastest: programs that read the same weights run at the same time and share them in the L2 cache.
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_m = m < M
    # With a gate, the columns of a tile are those of the gate followed by the matching columns of up.
    wide_n = tl.arange(0, WIDTH)
    column = tile_n * BLOCK_N + wide_n % BLOCK_N
    inside_w = column < N
    row = column + wide_n // BLOCK_N * N
    num_rows = N * (WIDTH // BLOCK_N)
    CHUNK: tl.constexpr = 4 * SPAN
    PER_CHUNK: tl.constexpr = CHUNK // GROUP
    chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
    per_split: tl.constexpr = (chunks + SPLIT_K - 1) // SPLIT_K
    first = split * per_split
    end = tl.minimum(first + per_split, chunks)
    kind: tl.constexpr = x.dtype.element_ty
    place = tl.arange(0, SPAN)
    weights = weight + row[:, None] * SPAN + place[None, :]
    inputs = x + (m.to(tl.int64) * x_stride)[:, None] + place[None, :]
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    acc = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    for chunk in tl.range(first, end, num_stages=STAGES):
        start = chunk * CHUNK
        packed = tl.load(weights + chunk * num_rows * SPAN, mask=inside_w[:, None], other=0)
        if K % CHUNK == 0:
            a_0 = tl.load(inputs + start, mask=inside_m[:, None], other=0.0)
            a_1 = tl.load(inputs + (start + SPAN), mask=inside_m[:, None], other=0.0)
            a_2 = tl.load(inputs + (start + 2 * SPAN), mask=inside_m[:, None], other=0.0)
            a_3 = tl.load(inputs + (start + 3 * SPAN), mask=inside_m[:, None], other=0.0)
        else:
            rest = K - start - place[None, :]
            a_0 = tl.load(inputs + start, mask=inside_m[:, None] & (rest > 0), other=0.0)
            a_1 = tl.load(inputs + (start + SPAN), mask=inside_m[:, None] & (rest > SPAN), other=0.0)
            a_2 = tl.load(inputs + (start + 2 * SPAN), mask=inside_m[:, None] & (rest > 2 * SPAN), other=0.0)
            a_3 = tl.load(inputs + (start + 3 * SPAN), mask=inside_m[:, None] & (rest > 3 * SPAN), other=0.0)
        word_0, word_1, word_2, word_3 = _words(scales + row, chunk, inside_w, num_rows, PER_CHUNK)
        w_0, w_1, w_2, w_3 = _unpack(
            packed, _zero(word_0)[:, None], _zero(word_1)[:, None], _zero(word_2)[:, None], _zero(word_3)[:, None]
        )
        total = tl.dot(w_0.to(kind), tl.trans(a_0))
        if PER_CHUNK == 4:
            acc += total * _scale(word_0)[:, None]
            total = tl.dot(w_1.to(kind), tl.trans(a_1))
        else:
            total = tl.dot(w_1.to(kind), tl.trans(a_1), total)
        acc += total * _scale(word_1)[:, None]
        total = tl.dot(w_2.to(kind), tl.trans(a_2))
        if PER_CHUNK == 4:
            acc += total * _scale(word_2)[:, None]
            total = tl.dot(w_3.to(kind), tl.trans(a_3))
        else:
            total = tl.dot(w_3.to(kind), tl.trans(a_3), total)
        acc += total * _scale(word_3)[:, None]
    store_sums(
        tl.trans(acc),
        bias,
        residual,
        out,
        partials,
        arrived,
        M,
        N,
        HAS_BIAS=HAS_BIAS,
        HAS_RESIDUAL=HAS_RESIDUAL,
        SPLIT_K=SPLIT_K,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        WIDTH=WIDTH,
    )


def int4_linear(
    x: torch.Tensor,
    weight: Int4Matrix,
    out: torch.Tensor,
    tuning: LinearTuning,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """As `quantised_linear`, with 4-bit weights. block_k of the tuning is not used: a step is a chunk."""
    rows, width = x.shape
    columns = out.shape[1]
    t = tuning
    assert t.split_k == 1 or (workspace is not None and not gated), "split_k needs a workspace and excludes a gate"
    if workspace is not None:
        assert t.split_k * rows * columns <= workspace.partials.numel(), "the workspace is too small"
    _int4_linear_kernel[(cdiv(rows, t.block_m), cdiv(columns, t.block_n), t.split_k)](
        x,
        weight.values,
        weight.scales,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        weight.scales if workspace is None else workspace.partials,
        weight.scales if workspace is None else workspace.arrived,
        rows,
        columns,
        x.stride(0),
        K=width,
        GROUP=weight.group,
        SPAN=weight.values.shape[2],
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SPLIT_K=t.split_k,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        WIDTH=t.block_n * (2 if gated else 1),
        STAGES=t.num_stages,
        PDL=pdl,
        num_warps=t.num_warps,
        launch_pdl=pdl,
    )


@launched
@triton.jit
def _expand_int4_kernel(
    weight,
    scales,
    out,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    place = tl.arange(0, SPAN)
    packed = tl.load(weight + (chunk * N + row)[:, None] * SPAN + place[None, :], mask=inside[:, None], other=0)
    word_0, word_1, word_2, word_3 = _words(scales + row, chunk, inside, N, 4 * SPAN // GROUP)
    w_0, w_1, w_2, w_3 = _unpack(
        packed, _zero(word_0)[:, None], _zero(word_1)[:, None], _zero(word_2)[:, None], _zero(word_3)[:, None]
    )
    start = chunk * 4 * SPAN
    target = out + (row.to(tl.int64) * K + start)[:, None] + place[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    w_0 = (w_0.to(tl.float32) * _scale(word_0)[:, None]).to(kind)
    w_1 = (w_1.to(tl.float32) * _scale(word_1)[:, None]).to(kind)
    w_2 = (w_2.to(tl.float32) * _scale(word_2)[:, None]).to(kind)
    w_3 = (w_3.to(tl.float32) * _scale(word_3)[:, None]).to(kind)
    if K % (4 * SPAN) == 0:  # without a mask of columns, eight are stored at once
        tl.store(target, w_0, mask=inside[:, None])
        tl.store(target + SPAN, w_1, mask=inside[:, None])
        tl.store(target + 2 * SPAN, w_2, mask=inside[:, None])
        tl.store(target + 3 * SPAN, w_3, mask=inside[:, None])
    else:
        rest = tl.where(inside[:, None], K - start - place[None, :], 0)  # columns from here on
        tl.store(target, w_0, mask=rest > 0)
        tl.store(target + SPAN, w_1, mask=rest > SPAN)
        tl.store(target + 2 * SPAN, w_2, mask=rest > 2 * SPAN)
        tl.store(target + 3 * SPAN, w_3, mask=rest > 3 * SPAN)


def expand_int4(weight: Int4Matrix, out: torch.Tensor, block_n: int = 64) -> None:
    """out [N, K] = the dequantised weight. out is contiguous."""
    chunks, rows, span = weight.values.shape
    _expand_int4_kernel[(chunks, cdiv(rows, block_n))](
        weight.values,
        weight.scales,
        out,
        rows,
        K=weight.num_columns,
        GROUP=weight.group,
        SPAN=span,
        BLOCK_N=block_n,
        num_warps=4,
    )
