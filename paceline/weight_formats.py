"""The table of weight formats: what is known of each without reading a tensor.

Reading, sizing, refusing, compiling and the documents ask this table, and no other place lists the formats. What
computes with one is chosen by the type of its tensors, never by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class MatrixKind(StrEnum):
    """Which kernels multiply with a matrix."""

    TABLE = "embedding"  # the embedding and the LM head
    LINEAR = "linear"  # attention and the MLP of a dense layer
    EXPERTS = "experts"  # the routed experts of a layer, one behind the other
    OTHER = "other"  # routers and shared experts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """One row of the table."""

    name: str
    title: str  # in the banner of a server
    bits: int  # of a value
    scale_bits: int  # of what a group has beside its values: a scale, with an offset or a zero
    groups: tuple[int, ...]  # columns with one scale, where kernels have a choice the best first; 0: a whole row
    block: int = 0  # rows and columns that may have one scale instead; 0: none
    block_kinds: frozenset[MatrixKind] = frozenset()  # with kernels for blocks
    least_columns: int = 1  # that kernels multiply at once: a part of a rank begins at a multiple of it
    schemes: tuple[str, ...]  # what is read into it
    kernels: Mapping[str, frozenset[MatrixKind]] = field(hash=False)  # by device
    rounding: str  # how other weights become it
    help: str  # of --quantization

    def num_bytes(self, rows: int, columns: int, group: int = 0, block_rows: int = 1) -> int:
        """The memory of a matrix. group: columns with one scale, of `block_rows` rows; 0: all."""
        num_scales = -(-rows // block_rows) * -(-columns // (group or columns))
        return (rows * columns * self.bits + num_scales * self.scale_bits) // 8


_LINEAR, _EXPERTS = frozenset({MatrixKind.LINEAR}), frozenset({MatrixKind.EXPERTS})
_ALL_DENSE = frozenset({MatrixKind.TABLE, MatrixKind.LINEAR})

FP8 = WeightFormat(
    name="fp8",
    title="FP8",
    bits=8,
    scale_bits=32,
    groups=(0,),
    block=128,
    block_kinds=frozenset({MatrixKind.EXPERTS}),
    least_columns=16,
    schemes=("fp8", "compressed-tensors float-quantized"),
    kernels={"cuda": _LINEAR | _EXPERTS},
    rounding="to e4m3 with a scale per row; of experts, with a scale per row of each",
    help="weights are rounded to FP8 (e4m3) with a scale per row; with many rows activations, too; of a mixture of "
    "experts, the weights of the experts only (GPU only)",
)
INT4 = WeightFormat(
    name="int4",
    title="4 bits",
    bits=4,
    scale_bits=32,
    groups=(128, 64, 32),
    schemes=("gptq", "awq", "compressed-tensors pack-quantized"),
    kernels={"cuda": _LINEAR},
    rounding="between the smallest and the largest value of a group, with a zero of 4 bits",
    help="weights are rounded to 4 bits in groups of 128; activations stay in 16 bits (GPU only)",
)
MXFP4 = WeightFormat(
    name="mxfp4",
    title="MXFP4",
    bits=4,
    scale_bits=8,
    groups=(32,),
    least_columns=32,
    schemes=("mxfp4",),
    kernels={"cuda": _EXPERTS},
    rounding="to e2m1 with a power of two per group",
    help="the weights of experts are rounded to MXFP4, unless they are stored so (GPU only)",
)
Q8 = WeightFormat(
    name="q8",
    title="8 bits",
    bits=8,
    scale_bits=32,
    groups=(32,),
    schemes=("GGUF Q8_0, Q5_0, Q5_1, Q5_K, Q6_K and others",),
    kernels={"cuda": _LINEAR, "cpu": _ALL_DENSE},
    rounding="by the largest value of a group",
    help="weights are rounded to 8 bits in groups of 32",
)
Q4 = WeightFormat(
    name="q4",
    title="4 bits",
    bits=4,
    scale_bits=32,
    groups=(32,),
    schemes=("GGUF Q4_0, Q4_1, Q4_K", "on a CPU also gptq, awq, compressed-tensors pack-quantized"),
    kernels={"cuda": _LINEAR, "cpu": _ALL_DENSE},
    rounding="between the smallest and the largest value of a group",
    help="weights are rounded to 4 bits in groups of 32",
)
# Of a GGUF file, whose matrices differ: each stays in the one of these that it is stored in, and one kind of kernel has
# both.
GGUF = "gguf"
GGUF_FORMATS = (Q4, Q8)
WEIGHT_FORMATS: dict[str, WeightFormat] = {one.name: one for one in (FP8, INT4, MXFP4, Q8, Q4)}


HEAD = ("--quantization", "bits", "columns with one scale", "checkpoints", "GPU", "CPU", "rounding of other weights")


def format_rows() -> list[tuple[str, ...]]:
    """One row per format, in the columns of `HEAD`, for the docs."""

    def kinds(one: WeightFormat, device: str) -> str:
        return ", ".join(kind for kind in MatrixKind if kind in one.kernels.get(device, ())) or "expanded"

    def groups(one: WeightFormat) -> str:
        found = [str(group) if group else "a row" for group in one.groups]
        return ", ".join([*found, *([f"blocks of {one.block} x {one.block} (experts)"] if one.block else [])])

    return [
        (
            one.name,
            str(one.bits),
            groups(one),
            ", ".join(one.schemes),
            kinds(one, "cuda"),
            kinds(one, "cpu"),
            one.rounding,
        )
        for one in WEIGHT_FORMATS.values()
    ]


def title_of(quantization: str) -> str:
    """How the weights of a model are called."""
    return "4 and 8 bits" if quantization == GGUF else WEIGHT_FORMATS[quantization].title
