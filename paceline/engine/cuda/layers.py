"""The layers of the decoder on a GPU: what attention reads of one, and the blocks behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.linear.adapted import Adapted
from paceline.engine.linear.base import CudaLinear, Place
from paceline.engine.linear.experts import RoutedExperts
from paceline.engine.linear.formats import Linears
from paceline.engine.linear.stream import Projected, ResidualStream
from paceline.kernels.lora import AdapterMatrix
from paceline.kernels.route_experts import LiveRows
from paceline.kernels.silu_mul import silu_mul
from paceline.model.decoder import Decoder, DecoderLayer, MixtureOfExperts, Mlp
from paceline.model.linear import Linear
from paceline.model.norm import weight_of

AddAdapters = Callable[[AdapterMatrix, Tensor, Tensor], None]  # matrix, source, out


@dataclass(frozen=True, slots=True, eq=False)
class BlockBuffers:
    """What the MLPs of a pass share."""

    gate_up: Tensor  # [T, 2F]
    act: Tensor  # [T, F]
    live: LiveRows | None  # which rows are no padding, if some are; experts do not compute the others
    reads_squares: bool  # whether the matrix behind a block reads the sums of squares of x


class CudaBlock(Protocol):
    """What follows the attention of a layer: an MLP, or a mixture of experts."""

    @property
    def linears(self) -> tuple[CudaLinear, ...]:
        """Its matrices, except those of experts."""

    @property
    def norm(self) -> Tensor | None:
        """The weight of the norm before it, if that is not folded into its matrices."""

    def run(self, stream: ResidualStream, buffers: BlockBuffers) -> None:
        """x += block(norm(x))"""

    def load_libraries(self, stream: ResidualStream, buffers: BlockBuffers) -> None:
        """Runs the library's GEMMs that such a pass uses."""

    def load(self, other: Mlp | MixtureOfExperts, norm: Tensor | None, norm_behind: Tensor | None = None) -> None:
        """Copies other weights in place; `norm` is folded into them, `norm_behind` is that of its output."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaMlp:
    """The gated MLP of a layer."""

    gate_up: CudaLinear
    down: CudaLinear

    @property
    def linears(self) -> tuple[CudaLinear, ...]:
        return self.gate_up, self.down

    @property
    def norm(self) -> Tensor | None:
        return self.gate_up.norm

    def run(self, stream: ResidualStream, buffers: BlockBuffers) -> None:
        between = self.gate_up.project(stream, buffers.gate_up, buffers.act, defer=stream.can_defer)
        self.down.add(between, stream)

    def load_libraries(self, stream: ResidualStream, buffers: BlockBuffers) -> None:
        self.gate_up.load_library(stream, stream.normed, buffers.gate_up)
        self.down.load_library(stream, buffers.act, stream.x, add=True)

    def load(self, other: Mlp | MixtureOfExperts, norm: Tensor | None, norm_behind: Tensor | None = None) -> None:
        assert isinstance(other, Mlp), "the decoders have the same spec"
        self.gate_up.load(other.gate_up, norm)
        self.down.load(other.down)
        load_vector(self.down.norm_behind, norm_behind)


@dataclass(frozen=True, slots=True, eq=False)
class CudaExperts:
    """A mixture of experts in place of an MLP. The GEMMs of a shared expert are cuBLAS's; the router computes its gate.

    With tensor parallelism each rank has some columns of every expert, and the sum over ranks is that of a dense layer.
    """

    routed: RoutedExperts
    shared: CudaMlp | None

    @property
    def linears(self) -> tuple[CudaLinear, ...]:
        return () if self.shared is None else self.shared.linears

    @property
    def norm(self) -> None:
        return None

    def run(self, stream: ResidualStream, buffers: BlockBuffers) -> None:
        adds, normed = stream.adds_directly(None), None
        if not adds or stream.partial is not None:
            normed = stream.normed
            stream.norm(None, normed)
        self.routed.start(stream.x, normed, stream.eps, buffers.live, pdl=stream.pdl)
        shared_act = None if self.shared is None else self._run_shared(stream, self.shared.gate_up, normed)
        # From here on x is not read any more.
        num_squares = 0
        if buffers.reads_squares and self.shared is None:
            num_squares = self.routed.num_squares(len(stream))
        stream.square_columns = num_squares
        out = stream.x if adds else stream.partial_buffer
        squares = stream.squares if num_squares else None
        self.routed.finish(out, stream.x if adds else None, squares, pdl=stream.pdl)
        if self.shared is not None and shared_act is not None:
            self.shared.down.multiply(shared_act, out, add=True)
        if not adds:
            stream.add(out)

    def _run_shared(self, stream: ResidualStream, gate_up: CudaLinear, normed: Tensor | None) -> Tensor:
        """The activations of the shared expert, weighted by its gate."""
        between, act = self._shared_buffers(stream)
        if normed is None:
            found = gate_up.plainly_project(stream, between, act, defer=stream.can_defer)
        else:
            gate_up.multiply(normed, between)
            found = Projected(between)
        weights = self.routed.buffers.routed.shared_weights
        silu_mul(between, act, found.normed_by, stream.eps, weights=weights, pdl=stream.pdl)
        return act

    def _shared_buffers(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        rows, buffers = len(stream), self.routed.buffers
        return buffers.shared_gate_up[:rows], buffers.shared_act[:rows]

    def load_libraries(self, stream: ResidualStream, buffers: BlockBuffers) -> None:
        if self.shared is not None:
            between, act = self._shared_buffers(stream)
            self.shared.gate_up.multiply(stream.normed, between)
            self.shared.down.multiply(act, stream.x, add=True)

    def load(self, other: Mlp | MixtureOfExperts, norm: Tensor | None, norm_behind: Tensor | None = None) -> None:
        assert isinstance(other, MixtureOfExperts) and norm is not None, "the decoders have the same spec"
        self.routed.load(other, norm)
        if self.shared is not None and other.shared is not None:
            self.shared.load(other.shared, norm)


@dataclass(frozen=True, slots=True, eq=False)
class CudaLayer:
    """The weights of a layer, and its attention options: what may differ between layers, `CudaAttention` reads here."""

    qkv: CudaLinear
    out: CudaLinear
    block: CudaBlock
    q_norm: Tensor | None  # these two: head by head, by attention
    k_norm: Tensor | None
    whole_qk_norm: Tensor | None  # over all heads: [Q + K, D]
    cos_sin: Tensor
    window: int  # sliding window; 0: none
    scale: float  # factor of the scores before the softmax
    score_cap: float | None
    sinks: Tensor | None = None  # [Q]: attention sinks

    @property
    def linears(self) -> tuple[CudaLinear, ...]:
        return self.qkv, self.out, *self.block.linears

    def load(self, other: DecoderLayer) -> None:
        """Copies the weights of another layer in place."""
        self.qkv.load(other.qkv, weight_of(other.attention_norm))
        self.out.load(other.out)
        self.block.load(other.mlp, weight_of(other.mlp_norm), weight_of(other.mlp_post_norm))
        load_vector(self.out.norm_behind, weight_of(other.attention_post_norm))
        load_vector(self.whole_qk_norm, other.qk_norm)
        load_vector(self.sinks, other.sinks)
        if other.qk_norm is not None:
            load_vector(self.q_norm, other.qk_norm[0])
            load_vector(self.k_norm, other.qk_norm[other.mixer.num_heads])


class LayerMaker:
    """Makes the layers of a model of those of a decoder, whose weights are changed in place."""

    def __init__(
        self,
        decoder: Decoder,
        linears: Linears,
        adapters: list[dict[str, AdapterMatrix]] | None,
        add_adapters: AddAdapters | None,
        routed: Callable[[MixtureOfExperts, Tensor, int], RoutedExperts],
    ) -> None:
        """adapters: by layer and matrix. routed: makes the experts of a layer, with the norm before them, and its
        number among the layers with experts."""
        self._linears, self._adapters, self._add_adapters, self._routed = linears, adapters, add_adapters, routed
        self._rope_tables, self._num_experts = decoder.rope_tables, 0
        # For layers without RoPE: cos 1, sin 0.
        head_dim = decoder.spec.layers[0].mixer.head_dim
        self._identity_rope = torch.zeros(decoder.max_positions, head_dim, device=decoder.device)
        self._identity_rope[:, : head_dim // 2] = 1

    @torch.no_grad()
    def make(self, index: int, layer: DecoderLayer) -> CudaLayer:
        mixer, is_whole = layer.mixer, layer.mixer.qk_norm == "whole"
        adapters: Mapping[str, AdapterMatrix] = {} if self._adapters is None else self._adapters[index]
        norms = weight_of(layer.attention_norm), weight_of(layer.mlp_norm)
        qkv = self._linear(layer.qkv, Place(layer.qkv.bias, norm=norms[0]), adapters.get("qkv"))
        out = self._linear(
            layer.out, Place(layer.out.bias, norm_behind=weight_of(layer.attention_post_norm)), adapters.get("out")
        )
        block = self._block(layer.mlp, norms[1], weight_of(layer.mlp_post_norm), adapters)
        for norm, kept in zip(norms, (qkv.norm, block.norm), strict=True):
            if norm is not None and kept is None:
                norm.fill_(1)  # otherwise a second model of this decoder would fold it again
        return CudaLayer(
            qkv=qkv,
            out=out,
            block=block,
            q_norm=None if layer.qk_norm is None or is_whole else layer.qk_norm[0],
            k_norm=None if layer.qk_norm is None or is_whole else layer.qk_norm[mixer.num_heads],
            whole_qk_norm=layer.qk_norm if is_whole else None,
            cos_sin=self._identity_rope if layer.rope is None else self._rope_tables[layer.rope],
            window=mixer.window or 0,
            scale=mixer.softmax_scale,
            score_cap=mixer.score_cap,
            sinks=layer.sinks,
        )

    def _block(
        self,
        mlp: Mlp | MixtureOfExperts,
        norm: Tensor | None,
        norm_behind: Tensor | None,
        adapters: Mapping[str, AdapterMatrix],
    ) -> CudaBlock:
        if isinstance(mlp, Mlp):
            return self._mlp(mlp, norm, norm_behind, adapters)
        assert norm is not None, "check_supported refuses experts without a norm before them"
        shared = None if mlp.shared is None else self._mlp(mlp.shared, norm, None, {})
        self._num_experts += 1
        return CudaExperts(self._routed(mlp, norm, self._num_experts - 1), shared)

    def _mlp(
        self, mlp: Mlp, norm: Tensor | None, norm_behind: Tensor | None, adapters: Mapping[str, AdapterMatrix]
    ) -> CudaMlp:
        gate_up = Place(mlp.gate_up.bias, gated=True, norm=norm)
        down = Place(mlp.down.bias, norm_behind=norm_behind)
        return CudaMlp(
            self._linear(mlp.gate_up, gate_up, adapters.get("gate_up")),
            self._linear(mlp.down, down, adapters.get("down")),
        )

    def _linear(self, linear: Linear, place: Place, adapter: AdapterMatrix | None) -> CudaLinear:
        made, add = self._linears.make(linear.weight, place), self._add_adapters
        if adapter is None or add is None:
            return made
        return Adapted(made, lambda source, out: add(adapter, source, out))


def load_vector(mine: Tensor | None, theirs: Tensor | None) -> None:
    """Copies a vector in place, if there is one."""
    if mine is not None and theirs is not None:
        mine.copy_(theirs)
