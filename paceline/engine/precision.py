"""Precision: the number formats of a model on a GPU, which its kernels depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import ConfigError, EngineConfig
from paceline.model.layout import Shard, is_matrix, matrix_kind, target_shapes
from paceline.model.spec import ModelSpec
from paceline.model.weights_plan import WeightsPlan
from paceline.weight_formats import FP8, GGUF, GGUF_FORMATS, INT4, WEIGHT_FORMATS, MatrixKind, WeightFormat

if TYPE_CHECKING:
    import torch

FP8_KV = "fp8_e4m3"
# Elements. Layers with smaller matrices are faster in 16 bits than in 4 and 8 on a GPU; the fused kernels were tuned
# for Qwen3-0.6B, and with two rows or more larger ones are faster with cuBLAS alone (docs/log/gemms.md).
LARGE_MATRIX = 1 << 23
FP8_ARCH = 89  # the first one that converts FP8 numbers


@dataclass(frozen=True, slots=True)
class KernelFormat:
    """How the weights of a model are packed, as far as kernels depend on it."""

    group: int = 0  # columns with one scale; 0: all of a row
    # Those of qkv, out, gate_up and down that occur in its layers; (): all have those of the quantization.
    bits: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, plan: WeightsPlan) -> KernelFormat:
        packed = [one for one in plan.matrices if one.packed is not None]
        if plan.quantization != GGUF or not plan.is_stored:
            has_groups = plan.quantization in (FP8.name, INT4.name) and packed
            return cls(packed[0].group if has_groups else 0)
        bits: dict[str, set[int]] = {}
        for one in packed:
            bits.setdefault(one.name.rpartition(".")[2], set()).add(WEIGHT_FORMATS[one.format].bits)
        return cls(bits=tuple(tuple(sorted(bits[name])) for name in ("qkv", "out", "gate_up", "down")))


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: str  # of activations, and of weights that are not quantized
    kv_dtype: str = "auto"  # of the KV cache; auto: dtype
    quantization: str = "none"  # of weights: none, a weight format with kernels for GPUs, or `GGUF`
    lora: tuple[int, int] = (0, 0)  # LoRA adapters that are resident, and their highest rank
    formats: tuple[KernelFormat, ...] = ()  # of each model, if weights are packed

    @classmethod
    def of(cls, config: EngineConfig, dtype: str, formats: tuple[KernelFormat, ...] = ()) -> Precision:
        """As the options say. dtype: auto is known by now."""
        kv_dtype = FP8_KV if config.kv_dtype == FP8_KV else "auto"
        lora = (config.max_loras, config.max_lora_rank) if config.max_lora_rank else (0, 0)
        quantization = "none" if config.quantization == "auto" else config.quantization
        return cls(dtype, kv_dtype, quantization, lora, () if quantization == "none" else formats)

    @property
    def kv_name(self) -> str:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a number in the KV cache of a model whose activations are of `dtype`."""
        return 1 if self.kv_dtype == FP8_KV else dtype.itemsize


def check_arch(config: EngineConfig, arch: int) -> None:
    """Raises ConfigError for a GPU, by its architecture such as 90, that cannot convert FP8 numbers."""
    for name, needed, remedy in (
        ("kv_dtype", config.kv_dtype == FP8_KV, "leave it out"),
        ("quantization", config.quantization == FP8.name, "set it to none"),  # it may be that of the checkpoint
    ):
        if needed and arch < FP8_ARCH:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, which needs a GPU of sm_{FP8_ARCH} or newer, and this one is "
                f"sm_{arch}: {remedy}."
            )


def is_kept_on_gpu(name: str, spec: ModelSpec) -> bool:
    """Whether a GPU keeps a matrix in fewer bits: experts, or, without any, all matrices of layers."""
    return is_matrix(name) and matrix_kind(name) is (MatrixKind.EXPERTS if spec.has_experts else MatrixKind.LINEAR)


def rounding_group(spec: ModelSpec, format: WeightFormat, tp: int = 1) -> int:
    """Columns with one scale: the first choice of the format of which every matrix of a rank has a multiple."""
    if format.groups == (0,) or format in GGUF_FORMATS:
        return format.groups[0]  # of the whole row; or the last group of a row may have fewer columns
    widths = sorted(
        {
            shape[-1]
            for rank in range(tp)
            for name, shape in target_shapes(spec, Shard(rank, tp)).items()
            if is_matrix(name) and is_kept_on_gpu(name, spec)
        }
    )
    for group in format.groups:
        if not any(width % group for width in widths):
            return group
    raise ConfigError(
        f"quantization is {format.name!r} and matrices have {', '.join(map(str, widths))} columns: they must be "
        f"multiples of {format.groups[-1]}; set quantization to none."
    )
