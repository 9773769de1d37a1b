"""The decoder in float32 on the CPU, with weights arranged for its GEMM kernels.

The reference implementation is `model.decoder.Decoder`; a test compares the two. They differ where a measurement gave a
reason (one Xeon core, SmolLM2-135M; milliseconds for all GEMMs of a forward pass):

    rows           1    2    4    8   16   32
    F.linear      38   39   76  120   92  117     the weight as it is stored
    transposed    31   45   61   97   93  102     one row is a sum of contiguous rows
    packed        42   40   51   68   67   95     oneDNN's own layout, packed once

So one row, and more than 32, use the transposed weight; counts between use the packed copy, if memory allows both. Norm
weights are folded into the matrices that follow them, and rotation is one swap and two multiplications: a forward pass
of one row is a thousand small calls, and each costs as much as its arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.kv_sizing import free_memory
from paceline.model.decoder import (
    Attend,
    Decoder,
    DecoderLayer,
    MixtureOfExperts,
    Mlp,
    add_chosen,
    route,
    scaled,
    soft_cap,
    whole_qk_factors,
)
from paceline.model.layout import Shard
from paceline.model.lora import AddAdapters, LayerAdapter, LoraRows, LoraWeights
from paceline.model.rank_group import RankGroup, StageLink, embed
from paceline.model.spec import ModelSpec

_PACKED_MEMORY_FRACTION = 0.2  # of the free memory: the most that the packed copies may take
_TUNED_ROWS = 16  # the number of rows that the packing is tuned for
_MAX_PACKED_ROWS = 32  # with more rows the transposed weight is faster again


class DecoderModel(Protocol):
    """A decoder with its weights: `model.decoder.Decoder`, or `CpuModel` with the weights rearranged."""

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


class _Linear:
    """x W' + b, with the copy of W that is faster for the number of rows. name: what adapters call it."""

    __slots__ = ("_bias", "_name", "_packed", "_transposed")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool, name: str = "") -> None:
        self._name = name
        self._transposed = weight.t().contiguous()
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS) if packed else None

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        y = self._multiplied(x)
        if adapt is not None:
            adapt(self._name, x, y)
        return y

    def _multiplied(self, x: Tensor) -> Tensor:
        if self._packed is not None and 1 < len(x) <= _MAX_PACKED_ROWS:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return result
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """x + y W' + b, for the residual stream x."""
        is_packed = self._packed is not None and 1 < len(x) <= _MAX_PACKED_ROWS
        if is_packed or self._bias is not None or adapt is not None:
            return self(y, adapt).add_(x)
        return torch.addmm(x, y, self._transposed)


class CpuMlp:
    """The gated MLP of a layer."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, mlp: Mlp, norm: Tensor | None, *, packed: bool) -> None:
        self._gate_up = _Linear(_folded(mlp.gate_up, norm), mlp.gate_up_bias, packed=packed, name="gate_up")
        self._down = _Linear(mlp.down, mlp.down_bias, packed=packed, name="down")
        self._activation = mlp.activation

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        return self._down(self._activated(x, adapt), adapt)

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """x + mlp(y)."""
        return self._down.add_to(x, self._activated(y, adapt), adapt)

    def _activated(self, x: Tensor, adapt: AddAdapters | None) -> Tensor:
        return self._activation(*self._gate_up(x, adapt).chunk(2, dim=-1))


class CpuExperts:
    """A mixture of experts. The norm before it is folded in, and rows are counted by expert. It has no adapters."""

    __slots__ = ("_experts", "_shared", "num_rows")

    def __init__(self, experts: MixtureOfExperts, norm: Tensor | None, *, packed: bool) -> None:
        if norm is not None:
            # In place: a copy of all experts may not fit into memory.
            shared = () if experts.shared is None else (experts.shared_gate, experts.shared.gate_up)
            for weight in (experts.expert_gate_up, experts.router, *shared):
                if weight is not None:
                    weight.mul_(norm)
            norm.fill_(1)  # otherwise a second model of these weights would fold it again
        self._experts = replace(experts, shared=None)
        self._shared = None if experts.shared is None else CpuMlp(experts.shared, None, packed=packed)
        self.num_rows = torch.zeros(len(experts.router), dtype=torch.int64)  # that each expert has computed

    def __call__(self, x: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        return self.add_to(torch.zeros_like(x), x)

    def add_to(self, x: Tensor, y: Tensor, adapt: AddAdapters | None = None) -> Tensor:
        """x + experts(y)."""
        experts = self._experts
        ids, weights = route(F.linear(y, experts.router, experts.router_bias), experts.options)
        out = x.clone()
        self.num_rows += add_chosen(out, y, ids, weights, experts)
        if self._shared is not None and experts.shared_gate is not None:
            out.addcmul_(torch.sigmoid(F.linear(y, experts.shared_gate)), self._shared(y))
        return out


class _CpuLayer:
    """The rearranged weights of one layer, and what of its mixer a forward pass reads."""

    __slots__ = (
        "attention_post_norm", "folded", "heads", "mixer", "mlp", "mlp_post_norm", "norms_inputs", "norms_whole_qk",
        "out", "qk_norm", "qkv", "rope", "sinks", "whole_mixer",
    )  # fmt: skip

    def __init__(self, layer: DecoderLayer, *, packed: bool) -> None:
        self.mixer, self.whole_mixer, self.rope = layer.mixer, layer.whole_mixer, layer.rope
        self.heads = layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.head_dim
        self.norms_inputs, self.norms_whole_qk = layer.attention_norm is not None, layer.mixer.qk_norm == "whole"
        # The norms that are folded into matrices, and so into the adapters of these.
        self.folded = {"qkv": layer.attention_norm, "gate_up": layer.mlp_norm}
        self.qkv = _Linear(_folded(layer.qkv, layer.attention_norm), layer.qkv_bias, packed=packed, name="qkv")
        self.out = _Linear(layer.out, layer.out_bias, packed=packed, name="out")
        self.mlp = _block(layer.mlp, layer.mlp_norm, packed=packed)
        self.qk_norm, self.sinks = layer.qk_norm, layer.sinks
        self.attention_post_norm, self.mlp_post_norm = layer.attention_post_norm, layer.mlp_post_norm


def _block(mlp: Mlp | MixtureOfExperts, norm: Tensor | None, *, packed: bool) -> CpuMlp | CpuExperts:
    if isinstance(mlp, MixtureOfExperts):
        return CpuExperts(mlp, norm, packed=packed)
    return CpuMlp(mlp, norm, packed=packed)


class CpuModel:
    """A decoder's weights, rearranged. It takes the layers out of the decoder one by one, so that memory holds the
    weights once and not twice."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.dtype == torch.float32 and decoder.device.type == "cpu", "made for float32 on the CPU"
        self.spec, self.dtype, self.kv_dtype = decoder.spec, decoder.dtype, decoder.kv_dtype
        self.precision, self.kv_scales = decoder.precision, decoder.kv_scales
        self.whole_spec, self.group = decoder.whole_spec, decoder.group
        self.stages, self.shard = decoder.stages, decoder.shard
        self._embedding = decoder.embedding
        self._eps = torch.full((1, 1), decoder.spec.rms_eps)
        self._ropes = [_swap_table(table) for table in decoder.rope_tables]
        packed = bool(torch.backends.mkldnn.is_available()) and (  # type: ignore[no-untyped-call, unused-ignore]
            decoder.spec.num_parameters * 4 <= _PACKED_MEMORY_FRACTION * free_memory()
        )
        self._norm = decoder.norm
        if self.shard.is_last:
            self._head = _Linear(decoder.head * (decoder.norm * decoder.spec.logit_scale), None, packed=packed)
        self._layers: list[_CpuLayer] = []
        while decoder.layers:
            self._layers.append(_CpuLayer(decoder.layers.pop(0), packed=packed))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, lora: LoraRows | None = None) -> Tensor:
        """Hidden states [T, hidden], scaled to unit mean square; the final norm's weight is folded into the head. Of a
        stage that is not the last: not scaled, and sent on."""
        spec, eps = self.spec, self._eps
        rotations = [table[positions].unsqueeze(1).chunk(2, dim=-1) for table in self._ropes]
        if self.stages is None or self.shard.is_first:
            x = scaled(embed(self.group, spec, self._embedding, tokens), spec.embedding_scale)
        else:
            x = self.stages.receive(len(tokens), spec.hidden_size, self.dtype)
        for index, layer in enumerate(self._layers):
            adapt = None if lora is None else partial(lora.add, index)
            num_q, num_kv, size = layer.heads
            qkv = layer.qkv(_normed(x, eps) if layer.norms_inputs else x, adapt)
            qk, v = torch.split(qkv.view(-1, num_q + 2 * num_kv, size), [num_q + num_kv, num_kv], dim=1)
            if layer.qk_norm is not None and layer.norms_whole_qk:
                factors = whole_qk_factors(self.group, layer.whole_mixer, layer.mixer, qk, spec.rms_eps)
                qk = qk * factors * layer.qk_norm
            elif layer.qk_norm is not None:
                qk = _normed(qk, eps) * layer.qk_norm
            if layer.rope is not None:
                cos, sin = rotations[layer.rope]
                qk = torch.addcmul(qk * cos, qk.roll(size // 2, dims=-1), sin)
            q, k = torch.split(qk, [num_q, num_kv], dim=1)
            x = self._add(x, layer.out, attend(index, q, k, v, layer.sinks), layer.attention_post_norm, adapt)
            x = self._add(x, layer.mlp, _normed(x, eps) if layer.norms_inputs else x, layer.mlp_post_norm, adapt)
        if self.stages is not None and not self.shard.is_last:
            self.stages.send(x)
            return x
        return _normed(x, eps)

    def _add(
        self,
        x: Tensor,
        block: _Linear | CpuMlp | CpuExperts,
        y: Tensor,
        post_norm: Tensor | None,
        adapt: AddAdapters | None,
    ) -> Tensor:
        """x + norm(block(y))."""
        if self.group is None and post_norm is None:
            return block.add_to(x, y, adapt)
        out = block(y, adapt) if self.group is None else self.group.all_reduce(block(y, adapt))
        return x + out if post_norm is None else torch.addcmul(x, _normed(out, self._eps), post_norm)

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        """Norms are folded into adapters as they are into the matrices."""

        def folded(index: int, layer: LayerAdapter) -> LayerAdapter:
            norms = self._layers[index].folded
            return {
                name: tuple(replace(part, a=_folded(part.a, norms.get(name))) for part in parts)
                for name, parts in layer.items()
            }

        return LoraWeights(tuple(folded(index, layer) for index, layer in enumerate(weights.layers)))

    @property
    def expert_rows(self) -> list[list[int]]:
        """Of each layer with experts: rows that each has computed."""
        return [layer.mlp.num_rows.tolist() for layer in self._layers if isinstance(layer.mlp, CpuExperts)]

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states as the model defines them, of what `forward` returns."""
        return hidden * self._norm

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return soft_cap(self._head(hidden), self.spec.logit_cap)


def arranged_like(model: DecoderModel, decoder: Decoder) -> DecoderModel:
    """Other weights of a model, rearranged if the model's are."""
    return CpuModel(decoder) if isinstance(model, CpuModel) else decoder


def _folded(weight: Tensor, norm: Tensor | None) -> Tensor:
    """`weight` with the norm's weight multiplied into its columns."""
    return weight if norm is None else weight * norm


def _swap_table(cos_sin: Tensor) -> Tensor:
    """The rope table such that rotated = x * first half + (x with its halves swapped) * second half."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    return torch.cat((cos, cos, -sin, sin), dim=-1)


def _normed(x: Tensor, eps: Tensor) -> Tensor:
    """x divided by its root mean square: RMSNorm without its weight."""
    # Four calls; torch's mean alone is three.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
