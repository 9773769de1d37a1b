"""What the CPU executor runs: a decoder, or a quantized model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.model.decoder import Attend
from paceline.model.layout import Shard
from paceline.model.lora import LoraRows, LoraWeights
from paceline.model.rank_group import RankGroup, StageLink
from paceline.model.spec import ModelSpec


class DecoderModel(Protocol):
    """A decoder with its weights: `model.decoder.Decoder`, or `QuantizedModel`."""

    @property
    def spec(self) -> ModelSpec: ...  # of this rank, if the model is sharded

    @property
    def whole_spec(self) -> ModelSpec: ...

    @property
    def group(self) -> RankGroup | None: ...

    @property
    def stages(self) -> StageLink | None: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def kv_scales(self) -> Tensor | None: ...  # [layers, 2, 1] of an FP8 KV cache, if the checkpoint has some

    @property
    def precision(self) -> str: ...  # of the weights, for humans

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, lora: LoraRows | None = None) -> Tensor: ...

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        """The matrices of an adapter as `forward` uses them."""

    def logits(self, hidden: Tensor) -> Tensor: ...

    def states(self, hidden: Tensor) -> Tensor:
        """The model's hidden states, from what `forward` returns."""
