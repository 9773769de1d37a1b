"""The matrices of all experts of a layer in 8 or 4 bits, and what a GEMM needs to multiply with them.

    FP8     e4m3 numbers, with a float32 scale for each row, or for each block of rows and columns
    MXFP4   e2m1 numbers, with a power of two for each row and 32 columns

MXFP4 numbers are stored in the order in which they are used: 16 bits hold four numbers that are 32 columns apart, and a
chunk is 128 columns of a row. One load of [rows, 32] becomes four operands. The bits of a number, put into a float16,
are 2^-14 times the number: three or four instructions for two numbers.

    chunk of a row    columns 0 .. 31 | 32 .. 63 | 64 .. 95 | 96 .. 127
    its element i     bits 0 .. 3: i | bits 4 .. 7: 32 + i | bits 8 .. 11: 64 + i | bits 12 .. 15: 96 + i
    its scales        a word of four bytes s, of 2^(s - 127)

Numbers become float16 in registers, without rounding, and sums of columns with one scale are scaled in float32. So the
result is that of the dequantized weights, up to the order of the sums. Inputs are float16: RMSNorm writes them so.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import INTERPRETED, cdiv, next_power_of_2, tl, triton
from paceline.kernels.fp8 import FP8, FP8_MAX


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Experts:
    """Matrices [E, N, K]: values times the scale of their rows and columns."""

    values: torch.Tensor  # [E, N, K] FP8
    scales: torch.Tensor  # [E, groups of columns, groups of rows] float32
    rows: int  # with one scale; N is a multiple
    columns: int  # with one scale; the last group may have fewer

    def __post_init__(self) -> None:
        experts, rows, columns = self.values.shape
        expected = (experts, cdiv(columns, self.columns), rows // self.rows)
        assert self.scales.shape == expected and rows % self.rows == 0, f"scales of shape {list(self.scales.shape)}"
        assert self.columns >= columns or self.columns in (16, 32, 64, 128), f"groups of {self.columns} columns"

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.values.shape
        return experts, rows, columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The reference implementation of what the kernels compute with."""
        scales = self.scales.transpose(1, 2).repeat_interleave(self.rows, 1).repeat_interleave(self.columns, 2)
        return (self.values.float() * scales[:, :, : self.values.shape[2]]).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Experts:
    """Matrices [E, N, K], in the layout above. Columns are padded to whole chunks, with zeros."""

    values: torch.Tensor  # [E, N, 32 * chunks] int16
    scales: torch.Tensor  # [E, chunks, N] int32
    num_columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, _ = self.values.shape
        return experts, rows, self.num_columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The reference implementation of what the kernels compute with."""
        experts, rows, _ = self.values.shape
        shifts = torch.tensor([0, 4, 8, 12], device=self.values.device)
        codes = (self.values.int().view(experts, rows, -1, 1, GROUP) >> shifts[:, None]) & 15
        exponents = (self.scales.transpose(1, 2)[..., None] >> 2 * shifts) & 255  # [E, N, chunks, 4]
        numbers = torch.tensor(_NUMBERS, device=self.values.device)[codes]
        return (
            torch.ldexp(numbers, exponents[..., None] - 127)
            .reshape(experts, rows, -1)[..., : self.num_columns]
            .to(dtype)
        )


ExpertMatrices = torch.Tensor | Fp8Experts | Mxfp4Experts  # [E, N, K]

GROUP, CHUNK = 32, 128  # columns of MXFP4 with one scale, and of a chunk
_NUMBERS = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)  # by their four bits


def quantize_fp8_experts(weight: torch.Tensor, block: tuple[int, int] | None = None) -> Fp8Experts:
    """Rounds matrices [E, N, K] to FP8, with a scale per row, or per block of so many rows and columns."""
    experts, num_rows, num_columns = weight.shape
    rows, columns = (1, num_columns) if block is None else block
    groups = cdiv(num_columns, columns)
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(experts, groups, num_rows // rows, device=weight.device)
    for expert in range(experts):  # one at a time: float32 takes four times the memory
        padded = torch.nn.functional.pad(weight[expert].float(), (0, groups * columns - num_columns))
        blocks = padded.view(num_rows // rows, rows, groups, columns)
        scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / FP8_MAX
        rounded = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        values[expert] = rounded.view(num_rows, -1)[:, :num_columns]
        scales[expert] = scale.T
    return Fp8Experts(values, scales, rows, columns)


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4Experts:
    """blocks [E, N, groups, 16] uint8: 32 numbers each, two in a byte, the first in its low half. scales [E, N, groups]
    uint8: s of 2^(s - 127)."""
    experts, rows, groups, _ = blocks.shape
    chunks = cdiv(groups * GROUP, CHUNK)
    values = torch.empty(experts, rows, chunks * GROUP, dtype=torch.int16, device=blocks.device)
    for expert in range(experts):  # one at a time: the numbers one by one take twice the memory
        codes = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(2)
        codes = torch.nn.functional.pad(codes, (0, 0, 0, 4 * chunks - groups)).view(rows, chunks, 4, GROUP).short()
        packed = codes[:, :, 0]
        for place in range(1, 4):
            packed |= codes[:, :, place] << 4 * place
        values[expert] = packed.flatten(1)
    words = torch.nn.functional.pad(scales, (0, 4 * chunks - groups)).view(torch.int32)
    return Mxfp4Experts(values, words.transpose(1, 2).contiguous(), groups * GROUP)


def quantize_mxfp4(weight: torch.Tensor) -> Mxfp4Experts:
    """Rounds matrices [E, N, K] to MXFP4. The largest number of a group gets the highest exponent."""
    experts, rows, columns = weight.shape
    blocks = torch.empty(experts, rows, columns // GROUP, GROUP // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(blocks.shape[:-1], dtype=torch.uint8, device=weight.device)
    for expert in range(experts):  # one at a time: float32 takes eight times the memory
        groups = weight[expert].float().view(rows, -1, GROUP)
        exponents = groups.abs().amax(-1).clamp_min(2.0**-100).log2().floor() - 2
        scaled = groups * torch.exp2(-exponents)[..., None]
        codes = (scaled < 0).to(torch.uint8) << 3
        for middle in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
            codes += (scaled.abs() > middle).to(torch.uint8)
        blocks[expert], scales[expert] = codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
    return pack_mxfp4(blocks, scales)


def values_of(weight: ExpertMatrices) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.values


def scales_of(weight: ExpertMatrices) -> torch.Tensor:
    """Those of quantized matrices; others have none, and the kernel gets a tensor that it does not read."""
    return weight if isinstance(weight, torch.Tensor) else weight.scales


def format_options(weight: ExpertMatrices) -> dict[str, int]:
    """The constants of a kernel that depend on the format: its number, and rows and columns with one scale."""
    if isinstance(weight, torch.Tensor):
        return {"FORMAT": 0, "SCALE_N": 1, "SCALE_K": weight.shape[2]}
    if isinstance(weight, Mxfp4Experts):
        return {"FORMAT": 2, "SCALE_N": 1, "SCALE_K": CHUNK}  # a word of four scales
    return {"FORMAT": 1, "SCALE_N": weight.rows, "SCALE_K": weight.columns}


def block_k(weight: ExpertMatrices, wanted: int) -> int:
    """Columns of a step of a GEMM: as many as wanted, or as there are, or those of one scale; of MXFP4, a chunk."""
    if isinstance(weight, Mxfp4Experts):
        return CHUNK
    columns = weight.shape[2]
    most = min(wanted, max(16, next_power_of_2(columns)))
    return most if isinstance(weight, torch.Tensor) or weight.columns >= columns else min(most, weight.columns)


@triton.jit
def load_tile(pointers, inside, rest, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile [rows, WIDTH], of which `inside` rows and the first `rest` columns are read; the others are 0."""
    if MASK_COLUMNS:
        inside_k = (tl.arange(0, WIDTH) < rest)[None, :]
        tile = tl.load(pointers, mask=inside[:, None] & inside_k, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def add_product(acc, a, w, scales, inside, SCALED: tl.constexpr):
    """acc [M, N] + a [M, K] @ w [N, K]ᵀ. SCALED: times the scale of each row of w, at `scales` [N]."""
    if acc.shape[0] == 1:  # tl.dot computes 16 rows at least
        product = tl.sum(a.to(tl.float32) * w.to(tl.float32), axis=1)
        if SCALED:
            product = product * tl.load(scales, mask=inside, other=0.0)
        acc += product[None, :]
    elif SCALED:
        scale = tl.load(scales, mask=inside, other=0.0)
        acc += tl.dot(a, tl.trans(w.to(a.dtype))) * scale[None, :]
    else:
        acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc)
    return acc


@triton.jit
def load_quarters(pointers, inside, rest, MASK_COLUMNS: tl.constexpr):
    """The inputs of a chunk of MXFP4 numbers: four tiles [rows, 32]."""
    first = load_tile(pointers, inside, rest, 32, True, MASK_COLUMNS)
    second = load_tile(pointers + 32, inside, rest - 32, 32, True, MASK_COLUMNS)
    third = load_tile(pointers + 64, inside, rest - 64, 32, True, MASK_COLUMNS)
    fourth = load_tile(pointers + 96, inside, rest - 96, 32, True, MASK_COLUMNS)
    return first, second, third, fourth


@triton.jit
def _number(packed, SHIFT: tl.constexpr):
    """2^-14 times the number in bits SHIFT to SHIFT + 3, in float16."""
    code = packed.to(tl.int32) >> SHIFT
    return ((code & 8) << 12 | (code & 7) << 9).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _unpack_mxfp4(packed):
    """The four numbers of each element, times 2^-14, in float16."""
    if INTERPRETED:
        first, second, third, fourth = _number(packed, 0), _number(packed, 4), _number(packed, 8), _number(packed, 12)
    else:
        # Sign and the other bits are moved to bits 15 and 9 to 11 of both halves of a register.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, bits;
            shl.b32 sign, $4, 12;
            shl.b32 bits, $4, 9;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 $0, bits, 0x0e000e00, sign, 0xea;
            shl.b32 sign, $4, 8;
            shl.b32 bits, $4, 5;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 $1, bits, 0x0e000e00, sign, 0xea;
            shl.b32 sign, $4, 4;
            shl.b32 bits, $4, 1;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 $2, bits, 0x0e000e00, sign, 0xea;
            shr.b32 bits, $4, 3;
            and.b32 sign, $4, 0x80008000;
            lop3.b32 $3, bits, 0x0e000e00, sign, 0xea;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second, third, fourth


@triton.jit
def _scale(word, PLACE: tl.constexpr):
    """2^14 times the scale in this byte of a word."""
    return ((((word >> 8 * PLACE) & 255) + 14) << 23).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def add_mxfp4_product(acc, a_0, a_1, a_2, a_3, packed, scales, inside):
    """acc [M, N] + a [M, 128] @ w [N, 128]ᵀ, of a chunk of MXFP4 numbers, whose words of scales are at `scales` [N]."""
    word = tl.load(scales, mask=inside, other=0)
    w_0, w_1, w_2, w_3 = _unpack_mxfp4(packed)
    acc += tl.dot(a_0, tl.trans(w_0.to(a_0.dtype))) * _scale(word, 0)
    acc += tl.dot(a_1, tl.trans(w_1.to(a_0.dtype))) * _scale(word, 1)
    acc += tl.dot(a_2, tl.trans(w_2.to(a_0.dtype))) * _scale(word, 2)
    acc += tl.dot(a_3, tl.trans(w_3.to(a_0.dtype))) * _scale(word, 3)
    return acc
