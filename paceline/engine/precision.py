"""Precision: the number formats of a model on a GPU, which its kernels depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import ConfigError, EngineConfig
from paceline.model.layout import Shard
from paceline.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

FP8_KV = "fp8_e4m3"
GPU_FORMATS = ("fp8", "int4", "mxfp4", "gguf", "q8", "q4")  # of weights in fewer bits than activations
OFFSET_FORMATS = ("gguf", "q8", "q4")  # 4 or 8 bits in groups of 32 with an offset, as in GGUF files
GROUPWISE_FORMATS = ("int4", *OFFSET_FORMATS)
INT4_GROUPS = (128, 64, 32)
MXFP4_BITS = 4.25  # of a number, with its part of a scale
# Elements. The fused kernels were tuned for Qwen3-0.6B. With two rows or more, a layer with a matrix of 8 million
# elements or more is faster with cuBLAS alone (docs/log/gemms.md).
LARGE_MATRIX = 1 << 23
FP8_ARCH = 89  # the first one that converts FP8 numbers


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of a model are quantised, as far as kernels depend on it."""

    group: int = 0  # columns with one scale; 0: all of a row
    # Those of qkv, out, gate_up and down that occur in its layers; (): of OFFSET_FORMATS as the quantization says.
    bits: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: str  # of activations, and of weights that are not quantised
    kv_dtype: str = "auto"  # of the KV cache; auto: dtype
    quantization: str = "none"  # of weights: none, or one of GPU_FORMATS
    lora: tuple[int, int] = (0, 0)  # LoRA adapters that are resident, and their highest rank
    formats: tuple[WeightFormat, ...] = ()  # of each model with quantised weights

    @classmethod
    def of(cls, config: EngineConfig, dtype: str, formats: tuple[WeightFormat, ...] = ()) -> Precision:
        """As the options say. dtype: auto is known by now."""
        check_kv_dtype(config, "cuda", dtype)
        kv_dtype = FP8_KV if config.kv_dtype == FP8_KV else "auto"
        lora = (config.max_loras, config.max_lora_rank) if config.max_lora_rank else (0, 0)
        quantization = config.quantization if config.quantization in GPU_FORMATS else "none"
        return cls(dtype, kv_dtype, quantization, lora, () if quantization == "none" else formats)

    @property
    def kv_name(self) -> str:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a number in the KV cache of a model whose activations are of `dtype`."""
        return 1 if self.kv_dtype == FP8_KV else dtype.itemsize


def rounding_group(spec: ModelSpec, tp: int = 1) -> int:
    """Columns with one scale, if weights are rounded to 4 bits: 128, or fewer where a matrix of a rank has no multiple
    of it."""
    ranks = (Shard(rank, tp).spec(spec) for rank in range(tp))
    widths = dict.fromkeys(width for rank in ranks for width in rank.linear_columns)
    for group in INT4_GROUPS:
        if not any(width % group for width in widths):
            return group
    raise ConfigError(
        f"quantization is 'int4' and matrices have {', '.join(map(str, widths))} columns: they must be multiples of "
        f"{INT4_GROUPS[-1]}; set quantization to none."
    )


def check_arch(config: EngineConfig, arch: int) -> None:
    """Raises ConfigError for a GPU, by its architecture such as 90, that cannot convert FP8 numbers."""
    for name, needed, remedy in (
        ("kv_dtype", config.kv_dtype == FP8_KV, "leave it out"),
        ("quantization", config.quantization == "fp8", "set it to none"),  # it may be that of the checkpoint
    ):
        if needed and arch < FP8_ARCH:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, which needs a GPU of sm_{FP8_ARCH} or newer, and this one is "
                f"sm_{arch}: {remedy}."
            )


def check_kv_dtype(config: EngineConfig, device: str, dtype: str) -> None:
    """Raises ConfigError unless the device has a KV cache of this type beside activations of `dtype`. With weights in 4
    or 8 bits on a CPU, KV is in bfloat16 beside activations in float32."""
    given = config.kv_dtype
    if device == "cpu" and config.quantization != "none":
        dtype = "bfloat16"
    if given == FP8_KV and device != "cuda":
        raise ConfigError(f"kv_dtype is {given!r}, which needs a GPU: leave it out, KV is in {dtype} on a CPU.")
    if given == "bfloat16" and dtype != "bfloat16":
        raise ConfigError(
            f"kv_dtype is {given!r} and dtype is {dtype!r}: set dtype to bfloat16, or leave kv_dtype out."
        )
