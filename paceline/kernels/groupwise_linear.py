"""GEMMs with weights of 4 or 8 bits in groups, and 16-bit activations (W4A16, W8A16): converted in registers.

    w = scale * (q - zero)        4 bits, zeros are integers: GPTQ, AWQ, compressed-tensors. Groups of 32, 64 or 128
    w = scale * q + offset        4 or 8 bits: GGUF files. Groups of 32 columns

With few rows a GEMM takes as long as reading its weight, if it takes few instructions per weight. So weights are
stored in the order in which they are used: 16 bits hold four weights (two of 8 bits) that are `span` columns apart, and
a chunk is 4 * span (2 * span) columns of a row. One load of [rows, span] becomes four (two) operands.

    chunk of a row     columns 0 .. span-1 | span .. 2 span-1 | 2 span .. 3 span-1 | 3 span .. 4 span-1
    its element i      bits 0 .. 3: i | bits 4 .. 7: span + i | bits 8 .. 11: 2 span + i | bits 12 .. 15: 3 span + i

One instruction puts the bits of two weights into the mantissa of 1024, which makes them float16. With a zero, another
one subtracts 1024 and the zero, without rounding; a group is summed in float32, then scaled. With an offset, 1024 is
subtracted, then a multiply-add gives the weight, rounded to float16: an offset is no multiple of its scale.

Weights are the left operand, [N, K] x [K, M], which a tensor core reads from registers: as the right one, a Hopper GPU
would need them in shared memory. With very many rows it is faster to expand a weight (`expand_groupwise`) and to use
cuBLAS.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.kernels._triton import INTERPRETED, cdiv, launched, pdl_launch_dependents, pdl_wait, tl, triton
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantized_linear import store_sums

GROUPS = (32, 64, 128)  # columns that share a scale
OFFSET_GROUP = 32  # of weights with offsets
_PART_ROWS = 4096  # that are computed at once in float32, which takes eight times the memory of 4 bits
SYMMETRIC_ZERO = 8  # of weights that are stored without zeros
_SIGNED = 128  # 8 bits are stored as numbers from 0 to 255, which are so much larger


def span_of(group: int) -> int:
    """Columns between two weights of an element."""
    return min(group, 64)


@dataclass(frozen=True, slots=True, eq=False)
class GroupwiseMatrix:
    """A weight [N, K] on a device, in the layout above. Columns are padded to whole chunks, whose scales are 0."""

    values: torch.Tensor  # [chunks, N, span] int16
    # [groups, N] int32: a scale and, in the upper half, a zero or an offset, both float16. One load reads both.
    scales: torch.Tensor
    group: int
    num_columns: int
    bits: int = 4
    has_offsets: bool = False
    expanded: torch.Tensor | None = None  # [N, K]: the same in 16 bits, if memory allows

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.num_columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def with_expanded(self, dtype: torch.dtype) -> GroupwiseMatrix:
        """The same, also in 16 bits. Computed by torch: when models are loaded, kernels may not be compiled yet."""
        wide = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for first in range(0, len(wide), _PART_ROWS):
            rows = slice(first, first + _PART_ROWS)
            wide[rows] = replace(self, values=self.values[:, rows], scales=self.scales[:, rows]).dequantize().to(dtype)
        return replace(self, expanded=wide)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The reference implementation of what the kernels compute with."""
        rows, fields = self.values.shape[1], 16 // self.bits
        shifts = self.bits * torch.arange(fields, dtype=torch.int32, device=self.values.device)
        # [chunks, N, fields, span]
        numbers = (self.values.int()[:, :, None, :] >> shifts[:, None]) & ((1 << self.bits) - 1)
        values = numbers.transpose(0, 1).reshape(rows, -1, self.group).to(dtype)
        scales, others = (half.T.to(dtype) for half in self.scales.view(torch.float16).view(-1, rows, 2).unbind(2))
        scales, others = scales[:, :, None], others[:, :, None]
        if self.has_offsets:
            # In float32, as a multiply-add that rounds once; in fewer bits it would round twice.
            signed = values.float() - (_SIGNED if self.bits == 8 else 0)
            wide = torch.addcmul(others.float(), signed, scales.float()).half().to(dtype)
        else:
            wide = (values - others) * scales
        return wide.reshape(rows, -1)[:, : self.num_columns]


def pack_groupwise(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int
) -> GroupwiseMatrix:
    """values [N, K] uint8 from 0 to 15, scales and zeros [N, K / group]. Zeros are integers from 0 to 16; None: 8."""
    zeros = torch.full_like(scales, SYMMETRIC_ZERO) if zeros is None else zeros
    return _pack(values, scales, zeros, group, bits=4, has_offsets=False)


def pack_with_offsets(
    values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, *, bits: int
) -> GroupwiseMatrix:
    """values [N, K] int8: from 0 to 15 if they have 4 bits; scales and offsets [N, K / 32]. The last group may have
    fewer columns."""
    if bits == 8:
        values = values.view(torch.uint8) ^ _SIGNED  # the sign bit: adds 128
    return _pack(values.view(torch.uint8), scales, offsets, OFFSET_GROUP, bits=bits, has_offsets=True)


def _pack(
    values: torch.Tensor, scales: torch.Tensor, others: torch.Tensor, group: int, *, bits: int, has_offsets: bool
) -> GroupwiseMatrix:
    assert group in GROUPS, f"groups of {group} columns"
    rows, columns = values.shape
    assert rows * columns < 1 << 32, "kernels count elements with 32 bits"
    span, fields = span_of(group), 16 // bits
    chunk = fields * span
    padded = torch.nn.functional.pad(values, (0, -columns % chunk)).reshape(rows, -1, fields, span)
    packed = padded[:, :, 0].to(torch.int16)
    for place in range(1, fields):
        packed |= padded[:, :, place].to(torch.int16) << bits * place
    both = torch.stack((scales.to(torch.float16), others.to(torch.float16)), dim=2)
    rest = -(-columns // chunk) * (chunk // group) - both.shape[1]
    words = torch.nn.functional.pad(both, (0, 0, 0, rest)).view(torch.int32).squeeze(2)
    return GroupwiseMatrix(packed.transpose(0, 1).contiguous(), words.T.contiguous(), group, columns, bits, has_offsets)


def quantize_int4(weight: torch.Tensor, group: int = 128, *, symmetric: bool = False) -> GroupwiseMatrix:
    """Rounds a weight [N, K] to 4 bits: between the smallest and the largest of a group; symmetric: between -8 and 7
    times a scale."""
    rows, columns = weight.shape
    assert columns % group == 0, f"{columns} columns are not in groups of {group}"
    count = columns // group
    values = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, count, dtype=torch.float16, device=weight.device)
    zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    for first in range(0, rows, _PART_ROWS):
        part = slice(first, first + _PART_ROWS)
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
    return pack_groupwise(values, scales, None if symmetric else zeros, group)


def expand_groupwise_reference(weight: GroupwiseMatrix, out: torch.Tensor) -> None:
    out.copy_(weight.dequantize())


@triton.jit
def _less_zeros(packed, word_0, word_1, word_2, word_3):
    """The four weights of each element less their zeros, in float16. They are not scaled."""
    zero_0, zero_1 = _other(word_0)[:, None], _other(word_1)[:, None]
    zero_2, zero_3 = _other(word_2)[:, None], _other(word_3)[:, None]
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
def _converted_4_bits(packed, word_0, word_1, word_2, word_3):
    """The four weights of each element, in float16."""
    scale_0, scale_1 = _scale(word_0)[:, None], _scale(word_1)[:, None]
    scale_2, scale_3 = _scale(word_2)[:, None], _scale(word_3)[:, None]
    offset_0, offset_1 = _other(word_0)[:, None], _other(word_1)[:, None]
    offset_2, offset_3 = _other(word_2)[:, None], _other(word_3)[:, None]
    if INTERPRETED:
        numbers = packed.to(tl.int32)
        first = _multiply_add(numbers & 15, scale_0, offset_0)
        second = _multiply_add(numbers >> 4 & 15, scale_1, offset_1)
        third = _multiply_add(numbers >> 8 & 15, scale_2, offset_2)
        fourth = _multiply_add(numbers >> 12 & 15, scale_3, offset_3)
    else:
        # As above, but 1024 (or 64) is subtracted on its own: with an offset the difference would be rounded.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 high, a, b, c, d, base, sixteenth, less;
            shr.b32 high, $4, 8;
            lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 c, high, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, high, 0x00f000f0, 0x64006400, 0xea;
            mov.b32 base, 0x64006400;
            mov.b32 less, 0xd400d400;
            mov.b32 sixteenth, 0x2c002c00;
            sub.f16x2 a, a, base;
            fma.rn.f16x2 b, b, sixteenth, less;
            sub.f16x2 c, c, base;
            fma.rn.f16x2 d, d, sixteenth, less;
            fma.rn.f16x2 $0, a, $5, $9;
            fma.rn.f16x2 $1, b, $6, $10;
            fma.rn.f16x2 $2, c, $7, $11;
            fma.rn.f16x2 $3, d, $8, $12;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [packed, scale_0, scale_1, scale_2, scale_3, offset_0, offset_1, offset_2, offset_3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second, third, fourth


@triton.jit
def _converted_8_bits(packed, scales, chunk, inside, num_rows):
    """The two weights of each element, in float16."""
    scales += 2 * chunk * num_rows
    word_0 = tl.load(scales, mask=inside, other=0)
    word_1 = tl.load(scales + num_rows, mask=inside, other=0)
    scale_0, scale_1 = _scale(word_0)[:, None], _scale(word_1)[:, None]
    offset_0, offset_1 = _other(word_0)[:, None], _other(word_1)[:, None]
    if INTERPRETED:
        numbers = packed.to(tl.int32)
        first = _multiply_add((numbers & 255) - 128, scale_0, offset_0)
        second = _multiply_add((numbers >> 8 & 255) - 128, scale_1, offset_1)
    else:
        # 0x6480 is 1152: 1024, and 128 of the sign.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, base;
            lop3.b32 a, $2, 0x00ff00ff, 0x64006400, 0xea;
            prmt.b32 b, $2, 0x64646464, 0x4341;
            mov.b32 base, 0x64806480;
            sub.f16x2 a, a, base;
            sub.f16x2 b, b, base;
            fma.rn.f16x2 $0, a, $3, $5;
            fma.rn.f16x2 $1, b, $4, $6;
            }""",
            "=&r,=&r,r,r,r,r,r",
            [packed, scale_0, scale_1, offset_0, offset_1],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second


@triton.jit
def _multiply_add(numbers, scale, offset):
    return (numbers.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)).to(tl.float16)


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
def _columns(inputs, start, place, inside, K: tl.constexpr, CHUNK: tl.constexpr):
    """The inputs from column `start` on; zeros behind the last one."""
    if K % CHUNK == 0:
        mask = inside[:, None]
    else:
        mask = inside[:, None] & (place[None, :] < K - start)
    return tl.load(inputs + start, mask=mask, other=0.0)


@triton.jit
def _scale(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _other(word):
    """A zero or an offset."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@launched
@triton.jit(do_not_specialize=["M"])
def _groupwise_linear_kernel(
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
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
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
    CHUNK: tl.constexpr = 16 // BITS * SPAN
    PER_CHUNK: tl.constexpr = CHUNK // GROUP
    # A step of the loop: with short chunks, several of them.
    STEP: tl.constexpr = 256 // CHUNK if OFFSETS else 1
    chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
    steps: tl.constexpr = (chunks + STEP - 1) // STEP
    per_split: tl.constexpr = (steps + SPLIT_K - 1) // SPLIT_K
    first = split * per_split
    end = tl.minimum(first + per_split, steps)
    kind: tl.constexpr = x.dtype.element_ty
    place = tl.arange(0, SPAN)
    weights = weight + row[:, None] * SPAN + place[None, :]
    inputs = x + (m.to(tl.int64) * x_stride)[:, None] + place[None, :]
    if PDL:
        pdl_wait()
        pdl_launch_dependents()
    acc = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    for step in tl.range(first, end, num_stages=STAGES):
        for part in tl.static_range(STEP):
            chunk = step * STEP + part
            start = chunk * CHUNK
            inside = inside_w
            if chunks % STEP:
                inside &= chunk < chunks
            packed = tl.load(weights + chunk * num_rows * SPAN, mask=inside[:, None], other=0)
            a_0 = _columns(inputs, start, place, inside_m, K, CHUNK * STEP)
            a_1 = _columns(inputs, start + SPAN, place, inside_m, K, CHUNK * STEP)
            if BITS == 8:
                w_0, w_1 = _converted_8_bits(packed, scales + row, chunk, inside, num_rows)
                acc = tl.dot(w_0.to(kind), tl.trans(a_0), acc)
                acc = tl.dot(w_1.to(kind), tl.trans(a_1), acc)
            else:
                a_2 = _columns(inputs, start + 2 * SPAN, place, inside_m, K, CHUNK * STEP)
                a_3 = _columns(inputs, start + 3 * SPAN, place, inside_m, K, CHUNK * STEP)
                word_0, word_1, word_2, word_3 = _words(scales + row, chunk, inside, num_rows, PER_CHUNK)
                if OFFSETS:
                    w_0, w_1, w_2, w_3 = _converted_4_bits(packed, word_0, word_1, word_2, word_3)
                    acc = tl.dot(w_0.to(kind), tl.trans(a_0), acc)
                    acc = tl.dot(w_1.to(kind), tl.trans(a_1), acc)
                    acc = tl.dot(w_2.to(kind), tl.trans(a_2), acc)
                    acc = tl.dot(w_3.to(kind), tl.trans(a_3), acc)
                else:
                    w_0, w_1, w_2, w_3 = _less_zeros(packed, word_0, word_1, word_2, word_3)
                    total = tl.dot(w_0.to(kind), tl.trans(a_0))
                    if PER_CHUNK == 4:
                        acc += total * _scale(word_0).to(tl.float32)[:, None]
                        total = tl.dot(w_1.to(kind), tl.trans(a_1))
                    else:
                        total = tl.dot(w_1.to(kind), tl.trans(a_1), total)
                    acc += total * _scale(word_1).to(tl.float32)[:, None]
                    total = tl.dot(w_2.to(kind), tl.trans(a_2))
                    if PER_CHUNK == 4:
                        acc += total * _scale(word_2).to(tl.float32)[:, None]
                        total = tl.dot(w_3.to(kind), tl.trans(a_3))
                    else:
                        total = tl.dot(w_3.to(kind), tl.trans(a_3), total)
                    acc += total * _scale(word_3).to(tl.float32)[:, None]
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


def groupwise_linear(
    x: torch.Tensor,
    weight: GroupwiseMatrix,
    out: torch.Tensor,
    tuning: LinearTuning,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """As `quantized_linear`, with weights in groups. block_k of the tuning is not used: a step is a chunk."""
    rows, width = x.shape
    columns = out.shape[1]
    t = tuning
    assert t.split_k == 1 or (workspace is not None and not gated), "split_k needs a workspace and excludes a gate"
    if workspace is not None:
        assert t.split_k * rows * columns <= workspace.partials.numel(), "the workspace is too small"
    _groupwise_linear_kernel[(cdiv(rows, t.block_m), cdiv(columns, t.block_n), t.split_k)](
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
        BITS=weight.bits,
        OFFSETS=weight.has_offsets,
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
def _expand_groupwise_kernel(
    weight,
    scales,
    out,
    N,
    K: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    place = tl.arange(0, SPAN)
    CHUNK: tl.constexpr = 16 // BITS * SPAN
    packed = tl.load(weight + (chunk * N + row)[:, None] * SPAN + place[None, :], mask=inside[:, None], other=0)
    start = chunk * CHUNK
    target = out + (row.to(tl.int64) * K + start)[:, None] + place[None, :]
    # Columns from here on; without a mask of columns, eight are stored at once.
    rest = tl.where(inside[:, None], CHUNK if K % CHUNK == 0 else K - start - place[None, :], 0)
    if BITS == 8:
        w_0, w_1 = _converted_8_bits(packed, scales + row, chunk, inside, N)
    else:
        word_0, word_1, word_2, word_3 = _words(scales + row, chunk, inside, N, CHUNK // GROUP)
        if OFFSETS:
            w_0, w_1, w_2, w_3 = _converted_4_bits(packed, word_0, word_1, word_2, word_3)
        else:
            w_0, w_1, w_2, w_3 = _less_zeros(packed, word_0, word_1, word_2, word_3)
            w_0 = w_0.to(tl.float32) * _scale(word_0).to(tl.float32)[:, None]
            w_1 = w_1.to(tl.float32) * _scale(word_1).to(tl.float32)[:, None]
            w_2 = w_2.to(tl.float32) * _scale(word_2).to(tl.float32)[:, None]
            w_3 = w_3.to(tl.float32) * _scale(word_3).to(tl.float32)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(target, w_0.to(kind), mask=rest > 0)
    tl.store(target + SPAN, w_1.to(kind), mask=rest > SPAN)
    if BITS == 4:
        tl.store(target + 2 * SPAN, w_2.to(kind), mask=rest > 2 * SPAN)
        tl.store(target + 3 * SPAN, w_3.to(kind), mask=rest > 3 * SPAN)


def expand_groupwise(weight: GroupwiseMatrix, out: torch.Tensor, block_n: int = 64) -> None:
    """out [N, K] = the dequantized weight. out is contiguous."""
    chunks, rows, span = weight.values.shape
    _expand_groupwise_kernel[(chunks, cdiv(rows, block_n))](
        weight.values,
        weight.scales,
        out,
        rows,
        K=weight.num_columns,
        BITS=weight.bits,
        OFFSETS=weight.has_offsets,
        GROUP=weight.group,
        SPAN=span,
        BLOCK_N=block_n,
        num_warps=4,
    )
