"""The KV of an FP8 cache on a CPU: keys and values are rounded as a GPU rounds them, and kept in the model's dtype.
For `paceline bench quality`, which measures what that costs where there is no GPU, and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.cpu.quantized_model import DecoderModel
from paceline.engine.cuda.kv_scales import scales_for
from paceline.kernels.fp8 import to_fp8_reference
from paceline.model.decoder import Attend


def rounding(attend: Attend, scales: Sequence[Tensor]) -> Attend:
    """`attend` with keys and values in FP8. scales [2, K] of each layer."""

    def round_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        k, v = (
            to_fp8_reference(x, scale[:, None]).to(x.dtype) * scale[:, None].to(x.dtype)
            for x, scale in zip((k, v), scales[layer], strict=True)
        )
        return attend(layer, q, k, v, sinks)

    return round_and_attend


def calibrated_scales(decoder: DecoderModel, ids: Tensor, attend: Attend) -> list[Tensor]:
    """The scales that a GPU uses: those of the checkpoint, or from a pass of the same token ids
    (engine/cuda/kv_scales.py)."""
    counts = [layer.mixer.num_kv_heads for layer in decoder.spec.layers]
    if decoder.kv_scales is not None:
        return [scales.expand(-1, count) for scales, count in zip(decoder.kv_scales, counts, strict=True)]
    largest = [torch.zeros(2, count) for count in counts]

    def measure_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        for x, found in zip((k, v), largest[layer], strict=True):
            found.copy_(x.abs().amax(dim=(0, 2)))
        return attend(layer, q, k, v, sinks)

    decoder.forward(ids, torch.arange(len(ids)), measure_and_attend)
    return [scales_for(one) for one in largest]
