"""The decoder as GPU kernels: one implementation for decode batches, which CUDA graphs capture, and prefill batches.

All activations are in buffers that are allocated once, so that the addresses in a graph stay valid and a forward pass
allocates nothing. Passes share the buffers in stream order.

    a layer:  [norm] qkv [bias] -> attention -> out [+ x] -> [norm] gate,up silu -> down [+ x]

With few rows each of the four GEMMs is one fused kernel that also applies RMSNorm to its input and adds to the residual
stream (kernels/linear.py); with many rows cuBLAS is faster. The weight of a norm is folded into the GEMM after it when
the model is built. What remains of the norm is one factor per row. After a cuBLAS GEMM, attention and SiLU apply it
when they read the GEMM's output (`defer_norm`), where they can, so that a layer takes six launches instead of eight.

Where the model norms the output of a block (`LayerSpec.norms` both or post), one launch norms the output, adds it to
the residual stream and norms that for the next block:

    a layer:  qkv -> attention -> out -> [norm, + x, norm] gate,up -> activation -> down -> [norm, + x, norm]

With tensor parallelism the model has one rank's weights. The outputs of `out` and `down` are summed over the ranks, and
the norm that follows adds them to the residual stream:

    a layer:  [+ x, norm] qkv -> attention -> out -> all-reduce -> [+ x, norm] gate,up -> silu -> down -> all-reduce

With pipeline parallelism it has the layers of one stage. `received` has the hidden states of the stage before. Those
after its last layer, which the next stage gets, are the residual stream, without a norm (stages.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.cuda.experts import ExpertBuffers, RoutedExperts, expert_matrices
from paceline.engine.cuda.groupwise import max_groupwise_rows
from paceline.engine.cuda.limits import check_supported
from paceline.engine.cuda.linear_weights import LinearWeights
from paceline.engine.cuda.lora import CudaLora, LoraSizes
from paceline.engine.cuda.quantized import (
    QuantizedBuffers,
    QuantizedPass,
    load_library_kernels,
    max_small_rows,
    operand_dtype,
    quantized_tuning,
)
from paceline.engine.precision import LARGE_MATRIX
from paceline.kernels._triton import cdiv
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.groupwise_linear import GroupwiseMatrix
from paceline.kernels.linear import (
    LinearTuning,
    LinearWorkspace,
    decode_tuning,
    few_rows_tuning,
    linear,
    num_squares,
    summed_tuning,
)
from paceline.kernels.lora import AdapterMatrix
from paceline.kernels.quantized_linear import QuantizedMatrix
from paceline.kernels.rms_norm import post_norm, rms_norm
from paceline.kernels.route_experts import LiveRows
from paceline.kernels.silu_mul import silu_mul
from paceline.kernels.slot_state import SlotState
from paceline.kernels.soft_cap import soft_cap
from paceline.model.decoder import Decoder, MixtureOfExperts, Mlp, whole_qk_factors
from paceline.model.norm import weight_of
from paceline.model.rank_group import RankGroup, vocabulary_widths

GemmTuning = Callable[[int, int, bool], LinearTuning | None]  # rows, columns, gated -> fused kernel; None: cuBLAS
AttentionKernels = Callable[[int, Tensor, Tensor], None]  # layer, qkv [T, (Q + 2K) D], out [T, Q D]

_MAX_FUSED_ROWS = 128
_MAX_SUMMED_ROWS = 2  # with more, weights are read from the L2 cache too often
_LARGE_MATRIX_WITH_EXPERTS = 3 << 22
_MAX_SPLIT_K = 4
_MIN_BLOCK_N = 4  # of GEMMs that add to the residual stream
_MIN_SPLIT_ROWS = 32  # with half as many rows, K is split into twice as many parts


@dataclass(frozen=True, slots=True, eq=False)
class CudaMlp:
    """The gated MLP of a layer."""

    gate_up: LinearWeights
    down: LinearWeights

    post_norm: Tensor | None = None

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        return self.gate_up, self.down

    def run(self, forward: ForwardPass) -> None:
        """forward.x += norm(down(activation(gate(norm(x))) * up(norm(x))))"""
        if not forward.fused_norm_linear(self.gate_up, forward.act):
            defer_norm = forward.model.can_defer_norm(self.gate_up)
            forward.cublas_norm_linear(self.gate_up, forward.gate_up, defer_norm=defer_norm)
            if forward.quantized is not None:
                forward.quantized.add_gated_linear(self.down, forward.gate_up)
                return
            stream = forward.x if defer_norm else None
            silu_mul(forward.gate_up, forward.act, stream, forward.eps, pdl=forward.pdl, gelu=forward.gelu)
        forward.add_linear(self.down, forward.act, self.post_norm)

    def gemms(self, forward: ForwardPass) -> Iterator[tuple[LinearWeights, Callable[[], object]]]:
        yield self.gate_up, partial(forward.cublas_norm_linear, self.gate_up, forward.gate_up, defer_norm=True)
        yield self.down, partial(forward.add_linear, self.down, forward.act, self.post_norm)

    def load(self, other: Mlp | MixtureOfExperts, norm: Tensor | None, post_norm: Tensor | None = None) -> None:
        assert isinstance(other, Mlp), "the decoders have the same spec"
        self.gate_up.load(other.gate_up, norm)
        self.down.load(other.down)
        if self.post_norm is not None and post_norm is not None:
            self.post_norm.copy_(post_norm)


@dataclass(frozen=True, slots=True, eq=False)
class CudaExperts:
    """A mixture of experts in place of an MLP. The GEMMs of a shared expert are cuBLAS's; the router computes its gate.

    With tensor parallelism each rank has some columns of every expert, and the sum over ranks is that of a dense layer.
    """

    routed: RoutedExperts
    shared: CudaMlp | None

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        return () if self.shared is None else self.shared.linears

    def run(self, forward: ForwardPass) -> None:
        """forward.x += experts(norm(x))"""
        model, rows = forward.model, len(forward.x)
        group = model.group
        if group is not None:
            forward.norm()  # also adds what the ranks have summed to x
        normed = None if group is None else forward.normed
        self.routed.start(forward.x, normed, forward.eps, forward.live, pdl=forward.pdl)
        shared_act = None if self.shared is None else self._run_shared(forward, self.shared.gate_up)
        # From here on x is not read any more.
        out = forward.x if group is None else model.partial(rows)
        squares = None
        if forward.fused and self.shared is None and model.fused_tuning(model.layers[0].qkv, rows) is not None:
            forward.square_columns = self.routed.num_squares(rows)
            squares = forward.squares()
        else:
            forward.square_columns = 0
        self.routed.finish(out, forward.x if group is None else None, squares, pdl=forward.pdl)
        if self.shared is not None and shared_act is not None:
            torch.addmm(out, shared_act, self.shared.down.weight.T, out=out)
        if group is not None:
            forward.partial = group.all_reduce(out)

    def _run_shared(self, forward: ForwardPass, gate_up: LinearWeights) -> Tensor:
        """The activations of the shared expert, weighted by its gate."""
        model, (between, act) = forward.model, self._shared_buffers(forward)
        weights, defer_norm = self.routed.buffers.routed.shared_weights, model.can_defer_norm(gate_up)
        if model.group is None:
            forward.cublas_norm_linear(gate_up, between, defer_norm=defer_norm)
        else:
            torch.mm(forward.normed, gate_up.weight.T, out=between)
        silu_mul(between, act, forward.x if defer_norm else None, forward.eps, weights=weights, pdl=forward.pdl)
        return act

    def _shared_buffers(self, forward: ForwardPass) -> tuple[Tensor, Tensor]:
        rows, buffers = len(forward.x), self.routed.buffers
        return buffers.shared_gate_up[:rows], buffers.shared_act[:rows]

    def gemms(self, forward: ForwardPass) -> Iterator[tuple[LinearWeights, Callable[[], object]]]:
        if self.shared is not None:
            (between, act), gate_up, down = self._shared_buffers(forward), self.shared.gate_up, self.shared.down
            yield gate_up, partial(forward.cublas_norm_linear, gate_up, between, defer_norm=True)
            yield down, partial(forward.add_linear, down, act)

    def load(self, other: Mlp | MixtureOfExperts, norm: Tensor | None, post_norm: Tensor | None = None) -> None:
        assert isinstance(other, MixtureOfExperts) and norm is not None, "the decoders have the same spec"
        self.routed.load(other, norm)
        if self.shared is not None and other.shared is not None:
            self.shared.load(other.shared, norm)


class CudaBlock(Protocol):
    """What follows the attention of a layer: an MLP, or a mixture of experts."""

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """Its GEMMs, except those of experts."""

    def run(self, forward: ForwardPass) -> None: ...

    def gemms(self, forward: ForwardPass) -> Iterator[tuple[LinearWeights, Callable[[], object]]]:
        """Those GEMMs by cuBLAS, to be run once, so that it loads its kernels."""

    def load(self, other: Mlp | MixtureOfExperts, norm: Tensor | None, post_norm: Tensor | None = None) -> None:
        """Copies other weights in place; `norm` is folded into them, `post_norm` is that of its output."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaLayer:
    """The weights of a layer, and its attention options: what may differ between layers, `CudaAttention` reads here."""

    qkv: LinearWeights
    out: LinearWeights
    mlp: CudaBlock
    q_norm: Tensor | None  # these two: head by head, by attention
    k_norm: Tensor | None
    whole_qk_norm: Tensor | None  # over all heads: [Q + K, D]
    post_norm: Tensor | None  # of what attention adds
    cos_sin: Tensor
    window: int  # sliding window; 0: none
    scale: float  # factor of the scores before the softmax
    score_cap: float | None
    sinks: Tensor | None = None  # [Q]: attention sinks


class CudaModel:
    """Takes over a decoder: its weights are changed in place, so the decoder must not be used any more."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_tokens: int,
        max_rows: int,
        tuning: GemmTuning = decode_tuning,
        lora: LoraSizes = LoraSizes(),  # noqa: B008  (frozen)
    ) -> None:
        """tuning: of all GEMMs that are not quantized. With the default, one or two rows are computed by sums, and
        models with experts have a tuning of their own. lora: memory for so many adapters is allocated."""
        spec = decoder.spec
        check_supported(spec)
        # All layers have these heads and norms, and all that have an MLP have the same: check_supported.
        self.mixer, self.norms = spec.layers[0].mixer, spec.layers[0].norms
        dense = spec.dense_layers[0] if spec.dense_layers else None
        self.gelu = dense is not None and dense.activation.kind == "gelu_tanh"
        self.spec, self.device, self.dtype = spec, decoder.device, decoder.dtype
        weight = decoder.layers[0].qkv.weight
        self.is_quantized, self.is_groupwise = not isinstance(weight, Tensor), isinstance(weight, GroupwiseMatrix)
        self.group, self.whole_spec = decoder.group, decoder.whole_spec
        self.stages, self.shard = decoder.stages, decoder.shard
        self.kv_scales = decoder.kv_scales
        # The first token id whose embedding this rank has; None: it has all.
        self.first_id = None if self.group is None else self.group.shard.vocabulary(spec).start
        self.embedding, self.head, self.norm = decoder.embedding, decoder.head.tensor, decoder.norm.weight
        self.max_tokens, self.max_rows = max_tokens, max_rows
        is_default = tuning is decode_tuning
        # Experts take most of the time of a layer: its other GEMMs are fused for the launches that this saves.
        self._tuning = few_rows_tuning if spec.has_experts and is_default else tuning
        self._ones = torch.ones(spec.hidden_size, dtype=self.dtype, device=self.device)
        # For layers without RoPE: cos 1, sin 0.
        identity_rope = torch.zeros(decoder.max_positions, self.mixer.head_dim, device=self.device)
        identity_rope[:, : self.mixer.head_dim // 2] = 1
        self.experts = None
        mixtures = decoder.mixtures
        if mixtures:
            like, some = decoder.layers[0].qkv.tensor, mixtures[0]
            matrices = expert_matrices(some.expert_gate_up)
            self.experts = ExpertBuffers(some.options, len(mixtures), max_tokens, like, matrices)
        self.has_quantized_experts = self.experts is not None and self.experts.has_quantized
        self.lora = CudaLora(decoder, lora, max_tokens) if lora.num_slots else None
        self.layers = [self._take_over(decoder, index, identity_rope) for index in range(spec.num_layers)]
        # Fused GEMMs add to the residual stream and use its squares, which ranks know only after an all-reduce. Those
        # of weights in groups use none.
        largest = LARGE_MATRIX if self.experts is None else _LARGE_MATRIX_WITH_EXPERTS
        self._max_fused_rows = self._max_summed_rows = 0
        if self.is_groupwise or (self.group is None and self.is_quantized):
            self._max_fused_rows = max_small_rows(self._quantized_matrices())
        elif self.group is None:
            is_small = self._largest_weight() < largest
            self._max_fused_rows = _MAX_FUSED_ROWS if is_small else 1
            if is_default:
                self._max_summed_rows = _MAX_SUMMED_ROWS if is_small else 1

        def empty(rows: int, columns: int, dtype: torch.dtype = self.dtype) -> Tensor:
            # Zeros: padding rows of a graph are computed like all others, and must not become NaN or infinite.
            return torch.zeros(rows, columns, dtype=dtype, device=self.device)

        inputs = operand_dtype(self.dtype) if self.is_quantized else self.dtype

        self._x, self._normed = (empty(max_tokens, spec.hidden_size) for _ in range(2))
        self._qkv = empty(max_tokens, self.mixer.qkv_size)
        self._attended = empty(max_tokens, self.mixer.q_size, inputs)
        ffn_size = 0 if dense is None else dense.size
        self._gate_up, self._act = empty(max_tokens, 2 * ffn_size), empty(max_tokens, ffn_size, inputs)
        self._selected = empty(max_rows, spec.hidden_size)
        self._selected_attended = empty(max_rows, self.mixer.q_size, inputs)
        self._logits = empty(max_rows if self.shard.is_last else 0, spec.vocab_size)
        self.received = empty(0 if self.shard.is_first else max_tokens, spec.hidden_size)
        if self.group is not None:
            self._widths = vocabulary_widths(self.group.shard.size, spec)
            self._own_logits = empty(max_rows, max(self._widths))  # all_gather needs the same shape on every rank
        if self.group is not None or self.norms != "pre":
            self._partial = empty(max_tokens, spec.hidden_size)
        self._squares = torch.zeros(max_rows, cdiv(spec.hidden_size, _MIN_BLOCK_N), device=self.device)
        fused_rows = min(max_tokens if self.is_groupwise else max_rows, self._max_fused_rows)
        widest = max(spec.hidden_size, self.mixer.qkv_size)
        self._workspace = LinearWorkspace(
            torch.empty(_MAX_SPLIT_K * max(fused_rows, _MIN_SPLIT_ROWS) * widest, device=self.device),
            torch.zeros(cdiv(max(fused_rows, 16), 16) * cdiv(widest, 16), dtype=torch.int32, device=self.device),
        )
        self._quantized_buffers = None
        if self.is_quantized:
            self._quantized_buffers = QuantizedBuffers.empty(
                spec, max_tokens, self.dtype, self.device, self._quantized_matrices()
            )

    def _take_over(self, decoder: Decoder, index: int, identity_rope: Tensor) -> CudaLayer:
        layer = decoder.layers[index]
        mixer, is_whole = layer.mixer, layer.mixer.qk_norm == "whole"
        num_experts = sum(isinstance(one.mlp, MixtureOfExperts) for one in decoder.layers[:index])
        adapters = {} if self.lora is None else self.lora.matrices[index]
        with torch.no_grad():
            norms = weight_of(layer.attention_norm), weight_of(layer.mlp_norm)
            qkv = LinearWeights.taken_over(layer.qkv, norms[0], adapters=adapters.get("qkv"))
            mlp = self._take_over_mlp(layer.mlp, norms[1], weight_of(layer.mlp_post_norm), num_experts, adapters)
            for norm in () if self.is_quantized else norms:
                if norm is not None:
                    norm.fill_(1)  # otherwise a second CudaModel of this decoder would fold it again
        return CudaLayer(
            qkv=qkv,
            out=LinearWeights.taken_over(layer.out, adapters=adapters.get("out")),
            mlp=mlp,
            q_norm=None if layer.qk_norm is None or is_whole else layer.qk_norm[0],
            k_norm=None if layer.qk_norm is None or is_whole else layer.qk_norm[mixer.num_heads],
            whole_qk_norm=layer.qk_norm if is_whole else None,
            post_norm=weight_of(layer.attention_post_norm),
            cos_sin=identity_rope if layer.rope is None else decoder.rope_tables[layer.rope],
            window=mixer.window or 0,
            scale=mixer.softmax_scale,
            score_cap=mixer.score_cap,
            sinks=layer.sinks,
        )

    def _take_over_mlp(
        self,
        mlp: Mlp | MixtureOfExperts,
        norm: Tensor | None,
        post_norm: Tensor | None,
        num_sparse: int,
        adapters: Mapping[str, AdapterMatrix],
    ) -> CudaBlock:
        """num_sparse: layers with experts before this one."""
        if isinstance(mlp, Mlp):
            gate_up = LinearWeights.taken_over(mlp.gate_up, norm, gated=True, adapters=adapters.get("gate_up"))
            down = LinearWeights.taken_over(mlp.down, adapters=adapters.get("down"))
            return CudaMlp(gate_up, down, post_norm)
        assert norm is not None, "check_supported refuses experts without a norm before them"
        shared = None
        if mlp.shared is not None:
            gate_up = LinearWeights.taken_over(mlp.shared.gate_up, norm, gated=True)
            shared = CudaMlp(gate_up, LinearWeights.taken_over(mlp.shared.down))
        assert self.experts is not None, "the spec has layers with experts"
        return CudaExperts(RoutedExperts.take_over(mlp, norm, self.experts, num_sparse), shared)

    @torch.no_grad()
    def load(self, decoder: Decoder) -> None:
        """Copies the weights of another decoder of the same spec, on any device, in place: CUDA graphs hold the
        addresses of ours."""
        self.kv_scales = decoder.kv_scales
        self.embedding.copy_(decoder.embedding)
        self.norm.copy_(decoder.norm.weight)
        if not (self.spec.tied and self.shard.is_first):  # then it is the embedding
            self.head.copy_(decoder.head.tensor)
        for layer, other in zip(self.layers, decoder.layers, strict=True):
            layer.qkv.load(other.qkv, weight_of(other.attention_norm))
            layer.out.load(other.out)
            layer.mlp.load(other.mlp, weight_of(other.mlp_norm), weight_of(other.mlp_post_norm))
            for mine, theirs in (
                (layer.whole_qk_norm, other.qk_norm),
                (layer.post_norm, weight_of(other.attention_post_norm)),
                (layer.sinks, other.sinks),
            ):
                if mine is not None and theirs is not None:
                    mine.copy_(theirs)
            if layer.q_norm is not None and layer.k_norm is not None and other.qk_norm is not None:
                layer.q_norm.copy_(other.qk_norm[0])
                layer.k_norm.copy_(other.qk_norm[other.mixer.num_heads])
        if self.lora is not None:
            self.lora.reload(decoder)

    def _largest_weight(self) -> int:
        layer = self.layers[0]
        return max(one.weight.numel() for one in (layer.qkv, layer.out, *layer.mlp.linears))

    def input(self, num_tokens: int) -> Tensor:
        """The buffer for the embeddings [T, H] of a pass, which becomes its residual stream."""
        return self._x[:num_tokens]

    def squares(self, num_tokens: int) -> Tensor | None:
        """The buffer for the sums of squares of the embeddings, [T, 1]; None for many tokens and for models with norms
        after blocks, which need none, and for ranks and stages, which have only some of the embeddings or none."""
        are_used = self.group is None and self.norms == "pre" and self.shard.is_first
        return self._squares[:num_tokens, :1] if num_tokens <= len(self._squares) and are_used else None

    def embed(
        self,
        state: SlotState,
        slots: Tensor,
        positions: Tensor,
        token_rows: Tensor | None = None,
        query_starts: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> None:
        """Writes the embeddings of a pass's tokens into `input`, or what was received; slots and positions [T] receive
        those of the tokens. The other arguments are those of `gather_tokens`."""
        num_tokens = len(slots)
        gather_tokens(
            state,
            self.embedding if self.shard.is_first else None,
            self.input(num_tokens),
            slots,
            positions,
            token_rows,
            query_starts,
            squares=squares,
            first_id=self.first_id,
            scale=self.spec.embedding_scale,
        )
        if self.shard.is_first:
            self.sum_input(num_tokens)
        else:
            self.input(num_tokens).copy_(self.received[:num_tokens])

    def sum_input(self, num_tokens: int) -> None:
        """Sums the embeddings in `input` over all ranks: each token's is on one of them."""
        if self.group is not None:
            found = self.group.all_reduce(self.input(num_tokens))
            if found.data_ptr() != self._x.data_ptr():
                self.input(num_tokens).copy_(found)

    def attention_buffers(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The qkv and out that `forward` passes to `attend` in every layer."""
        return self._qkv[:num_tokens], self._attended[:num_tokens]

    def forward(
        self,
        num_tokens: int,
        attend: AttentionKernels,
        *,
        fused: bool,
        defer_norm: bool = False,
        pdl: bool = False,
        output_tokens: Tensor | None = None,
        live: LiveRows | None = None,
        live_outputs: LiveRows | None = None,
        lora: bool = False,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, of the embeddings in `input`; of a stage before the last, without
        that norm and in `input`. defer_norm: `attend` applies the RMSNorm factor to its qkv. lora: some tokens have
        adapters; without `fused`.

        output_tokens [N] int32: only the hidden states of these tokens. After its attention, the last layer computes
        nothing else. live: which tokens are no padding, if some are; experts do not compute the others. live_outputs:
        which of `output_tokens`."""
        adapters = self.lora if lora else None
        forward = ForwardPass(self, num_tokens, fused, defer_norm, pdl, live, adapters)
        return forward.run(attend, output_tokens, live_outputs)

    def defers_norm(self, num_tokens: int, *, fused: bool) -> bool:
        """Whether attention gets a qkv to which it applies the RMSNorm factor itself (`defer_norm`)."""
        qkv = self.layers[0].qkv
        return self.can_defer_norm(qkv) and not (fused and self.fused_tuning(qkv, num_tokens) is not None)

    def can_defer_norm(self, weights: LinearWeights) -> bool:
        """A bias must be added after the factor is applied; and hidden states before the norm overflow float16. With
        ranks the norm adds to the residual stream, and with norms after blocks it is computed with them. A QK-norm over
        all heads comes between it and attention."""
        is_plain = self.group is None and self.norms == "pre" and self.mixer.qk_norm != "whole"
        can_fold = weights.bias is None and weights.quantized is None
        return can_fold and self.dtype is not torch.float16 and is_plain

    def uses_pdl(self, num_tokens: int) -> bool:
        """Whether a decode batch uses programmatic dependent launch (PDL): 4 to 6% faster where GEMMs are fused
        (docs/log/gemms.md)."""
        is_fused = self.fused_tuning(self.layers[0].qkv, num_tokens) is not None
        return is_fused and self.group is None and self.device.type != "cpu"

    def select(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows of `hidden` by `index` [N] int32."""
        return torch.index_select(hidden, 0, index, out=self._selected[: len(index)])

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]; the next pass overwrites them. Ranks gather theirs, so that all of them sample in the same way."""
        found = self._logits[: len(hidden)]
        if self.group is None:
            self._head_logits(hidden, found)
        else:
            own = self._own_logits[: len(hidden)]
            self._head_logits(hidden, own[:, : len(self.head)])
            gathered = self.group.all_gather(own)
            parts = [part[:, :width] for part, width in zip(gathered, self._widths, strict=True)]
            torch.cat(parts, dim=1, out=found)
        if self.spec.logit_cap is not None:
            soft_cap(found, self.spec.logit_cap)
        return found

    def _head_logits(self, hidden: Tensor, out: Tensor) -> None:
        scale = self.spec.logit_scale
        if scale == 1.0:
            torch.mm(hidden, self.head.T, out=out)
        else:
            torch.addmm(out, hidden, self.head.T, beta=0, alpha=scale, out=out)

    def partial(self, rows: int) -> Tensor:
        """The buffer [rows, H] for a rank's part of a sum."""
        return self._partial[:rows]

    def last_states(self, num_tokens: int) -> Tensor:
        """The hidden states of the last pass, if it computed those of all its tokens."""
        return self._normed[:num_tokens]

    def last_logits(self, rows: int) -> Tensor:
        """The logits of the last pass, which had so many rows."""
        return self._logits[:rows]

    @property
    def saved_weight_bytes(self) -> int:
        """How much smaller quantized matrices are than those in `dtype`, without those of experts."""
        if not self.is_quantized:
            return 0
        found = self._quantized_matrices()
        return sum(math.prod(one.shape) * self.dtype.itemsize - one.num_bytes for one in found)

    def _quantized_matrices(self) -> list[QuantizedMatrix | GroupwiseMatrix]:
        found = [one.quantized for layer in self.layers for one in (layer.qkv, layer.out, *layer.mlp.linears)]
        return [one for one in found if one is not None]

    @property
    def saved_expert_bytes(self) -> int:
        """The same of experts, of which a pass reads some."""
        experts = [layer.mlp.routed for layer in self.layers if isinstance(layer.mlp, CudaExperts)]
        found = [matrix for one in experts for matrix in (one.gate_up, one.down) if not isinstance(matrix, Tensor)]
        return sum(math.prod(one.shape) * self.dtype.itemsize - one.num_bytes for one in found)

    def row_limits(self) -> Iterator[None]:
        """Sets the largest number of rows for fused GEMMs to each value that it can have on a GPU, one after the other:
        with weights in groups it depends on the memory of the GPU. For listing kernels without one."""
        before = self._max_fused_rows
        limits = {before}
        if self.is_groupwise:
            matrices = [one for one in self._quantized_matrices() if isinstance(one, GroupwiseMatrix)]
            limits |= {max_groupwise_rows(matrices, in_memory=in_memory) for in_memory in (False, True)}
        for limit in sorted(limits):
            self._max_fused_rows = limit
            yield
        self._max_fused_rows = before

    def load_gemm_kernels(
        self, decode_sizes: Sequence[int], prefill_sizes: Sequence[int], output_sizes: Sequence[int] = ()
    ) -> None:
        """Runs the GEMMs of a layer and of the head for all numbers of rows that batches are padded to: cuBLAS chooses
        another kernel for another number of rows, and loads it at first use. output_sizes: of the last layer of a
        prefill batch, whose other rows nobody needs."""
        sizes = {*prefill_sizes, *output_sizes}
        if self._quantized_buffers is not None:
            layer, buffers = self.layers[0], self._quantized_buffers
            outputs = (self._qkv, buffers.partial, self._gate_up, buffers.partial)
            linears = zip((layer.qkv, layer.out, *layer.mlp.linears), outputs, strict=True)
            load_library_kernels(list(linears), buffers, sorted({*decode_sizes, *sizes}))
        for rows in () if self.is_quantized else sorted({*decode_sizes, *sizes}):
            forward, layer = ForwardPass(self, rows, fused=False, defer_norm=True, pdl=False), self.layers[0]
            blocks = {type(layer.mlp): layer.mlp for layer in self.layers}  # one of each kind
            gemms: list[tuple[LinearWeights, Callable[[], object]]] = [
                (layer.qkv, partial(forward.cublas_norm_linear, layer.qkv, forward.qkv, defer_norm=True)),
                (layer.out, partial(forward.add_linear, layer.out, forward.attended, layer.post_norm)),
            ]
            for block in blocks.values():
                gemms += block.gemms(forward)
            for weights, run in gemms:
                if rows in sizes or self.fused_tuning(weights, rows) is None:
                    run()
        for rows in sorted({*decode_sizes, *output_sizes}) if self.shard.is_last else ():
            self.logits(self._normed[:rows])
        self._x.zero_()

    def fused_tuning(self, weights: LinearWeights, rows: int) -> LinearTuning | None:
        """The fused kernel for a GEMM of so many rows; None for cuBLAS."""
        if weights.quantized is not None:
            return quantized_tuning(weights, rows) if rows <= self._max_fused_rows else None
        if rows > self._max_fused_rows:
            return None
        if rows <= self._max_summed_rows:
            return summed_tuning(weights.weight.shape[1], weights.columns, weights.gated)
        tuning = self._tuning(rows, weights.columns, weights.gated)
        if tuning is None or tuning.block_m == 1:
            return tuning
        return None if weights.weight.shape[1] % (tuning.split_k * tuning.block_k) else tuning


class ForwardPass:
    """One forward pass over the model's buffers: launches the kernels of all layers.

    `x` is the residual stream. `square_columns`: how many columns of the squares buffer hold the sums of squares of its
    rows; 0 after a cuBLAS GEMM, which writes none, and for what another stage has sent.
    """

    def __init__(
        self,
        model: CudaModel,
        num_tokens: int,
        fused: bool,
        defer_norm: bool,
        pdl: bool,
        live: LiveRows | None = None,
        lora: CudaLora | None = None,
    ) -> None:
        assert lora is None or not (fused or pdl), "adapters are added to the output of cuBLAS"
        self.model, self.live, self.lora = model, live, lora
        self.fused, self.defer_norm, self.pdl = fused, defer_norm, pdl
        self.x, self.normed = model._x[:num_tokens], model._normed[:num_tokens]
        self.qkv, self.attended = model._qkv[:num_tokens], model._attended[:num_tokens]
        self.gate_up, self.act = model._gate_up[:num_tokens], model._act[:num_tokens]
        self.square_columns = 1 if model.shard.is_first else 0
        self.eps, self.gelu = model.spec.rms_eps, model.gelu
        self.partial: Tensor | None = None  # summed over ranks, and not yet added to x
        self.quantized: QuantizedPass | None = None
        if model._quantized_buffers is not None:
            self.quantized = QuantizedPass(
                self.x, model._quantized_buffers, model._workspace, model.group, self.eps, pdl
            )
        self.norms_input = model.norms != "post"  # of a block
        self.is_normed = False  # `normed` is the norm of x

    def run(self, attend: AttentionKernels, output_tokens: Tensor | None, live_outputs: LiveRows | None) -> Tensor:
        model = self.model
        if self.lora is not None:
            self.lora.begin(len(self.x), self.live)
        for index, layer in enumerate(model.layers):
            if not self.fused_norm_linear(layer.qkv, self.qkv):
                defer_norm = self.defer_norm and model.can_defer_norm(layer.qkv)
                self.cublas_norm_linear(layer.qkv, self.qkv, defer_norm=defer_norm)
            if layer.whole_qk_norm is not None:
                self._norm_qk(layer.whole_qk_norm)
            attend(index, self.qkv, self.attended)
            if output_tokens is not None and layer is model.layers[-1]:
                if self.lora is None or not len(output_tokens):
                    self._select(output_tokens, live_outputs)
                if not len(output_tokens):
                    break  # only the keys and values of these tokens are needed
            self.add_linear(layer.out, self.attended, layer.post_norm)
            layer.mlp.run(self)
        if output_tokens is not None and self.lora is not None and len(output_tokens):
            # Only now: tokens are grouped by adapter in their old order.
            self._add_partial()
            self._select(output_tokens, live_outputs)
        if not model.shard.is_last:
            self._add_partial()
            return self.x
        self.norm(model.norm)
        return self.normed

    def _add_partial(self) -> None:
        """Adds to x what the next norm would add."""
        if self.quantized is not None:
            self.partial = self.quantized.take_partial()
        if self.partial is not None:
            self.x.add_(self.partial)
            self.partial = None

    def fused_norm_linear(self, weights: LinearWeights, out: Tensor) -> bool:
        """out = linear(norm(x)), with the gate's activation, by one fused kernel. Returns False if there is none for
        this batch."""
        tuning = self._tuning(weights)
        if tuning is not None and self.quantized is not None:
            self.quantized.norm_linear(weights, out, small=True)
            return True
        norms_row = self.model.norms == "pre"  # otherwise x is normed already, or needs no norm
        if tuning is None or (norms_row and not self.square_columns):
            return False
        linear(
            self.x if norms_row else self._input(),
            weights.weight,
            out,
            tuning,
            bias=weights.bias,
            squares=self.squares() if norms_row else None,
            eps=self.eps,
            gated=weights.gated,
            workspace=self.model._workspace if tuning.split_k > 1 else None,
            pdl=self.pdl,
            gelu=self.gelu and weights.gated,
        )
        return True

    def cublas_norm_linear(self, weights: LinearWeights, out: Tensor, *, defer_norm: bool) -> None:
        """out = linear(norm(x)). defer_norm: the kernel that reads `out` applies the RMSNorm factor."""
        if self.quantized is not None:
            self.quantized.norm_linear(weights, out, small=False)
            return
        source = self.x if defer_norm else self._input()
        if weights.bias is None:
            torch.mm(source, weights.weight.T, out=out)
        else:
            torch.addmm(weights.bias, source, weights.weight.T, out=out)
        self._adapt(weights, source, out)

    def _input(self) -> Tensor:
        """norm(x), or x where the model norms only the outputs of blocks."""
        if self.norms_input and not self.is_normed:
            self.norm()
        return self.normed if self.norms_input else self.x

    def _adapt(self, weights: LinearWeights, source: Tensor, out: Tensor) -> None:
        """out += what the adapters add. Where the norm is deferred, neither has its factor yet."""
        if self.lora is not None and weights.adapters is not None:
            self.lora.add_to(weights.adapters, source, out)

    def add_linear(self, weights: LinearWeights, source: Tensor, norm: Tensor | None = None) -> None:
        """x += linear(source), or its norm with this weight."""
        if self.quantized is not None:
            self.quantized.add_linear(weights, source, small=self._tuning(weights) is not None)
            return
        if norm is not None:
            self._add_normed_linear(weights, source, norm)
            return
        if self.model.group is not None:
            self.partial = self._sum_linear(weights, source, self.model.group)  # the next norm adds it to x
            return
        tuning = self._tuning(weights)
        if tuning is None:
            torch.addmm(self.x, source, weights.weight.T, out=self.x)
            if weights.bias is not None:
                self.x.add_(weights.bias)
            self._adapt(weights, source, self.x)
            self.square_columns = 0
            return
        self.square_columns = num_squares(weights.columns, tuning)
        linear(
            source,
            weights.weight,
            self.x,
            tuning,
            bias=weights.bias,
            residual=self.x,
            squares_out=self.squares(),
            workspace=self.model._workspace,
            pdl=self.pdl,
        )

    def _sum_linear(self, weights: LinearWeights, source: Tensor, group: RankGroup | None) -> Tensor:
        """linear(source), summed over ranks."""
        out = self.model._partial[: len(source)]
        tuning = self._tuning(weights)
        if tuning is not None:
            linear(
                source, weights.weight, out, tuning, bias=weights.bias, workspace=self.model._workspace, pdl=self.pdl
            )
            return out
        torch.mm(source, weights.weight.T, out=out)
        if weights.bias is not None:
            out.add_(weights.bias)
        self._adapt(weights, source, out)
        return out if group is None else group.all_reduce(out)

    def _add_normed_linear(self, weights: LinearWeights, source: Tensor, norm: Tensor) -> None:
        added = self._sum_linear(weights, source, self.model.group)
        post_norm(added, norm, self.eps, self.x, self.normed if self.norms_input else None, pdl=self.pdl)
        self.is_normed, self.square_columns = self.norms_input, 0

    def _norm_qk(self, weight: Tensor) -> None:
        """QK-norm over all heads. Its sums of squares are those of all ranks."""
        model, mixer = self.model, self.model.mixer
        if model.group is None:
            split, end = mixer.q_size, mixer.q_size + mixer.kv_size
            weights = weight.view(-1)
            for columns in (slice(0, split), slice(split, end)):
                rms_norm(self.qkv[:, columns], weights[columns], self.eps, self.qkv[:, columns], pdl=self.pdl)
            return
        heads = self.qkv.view(len(self.qkv), -1, mixer.head_dim)[:, : len(weight)]
        whole = model.whole_spec.layers[0].mixer
        heads.copy_(heads.float() * whole_qk_factors(model.group, whole, mixer, heads, self.eps) * weight)

    def _select(self, rows: Tensor, live: LiveRows | None) -> None:
        model, count = self.model, len(rows)
        assert not self.fused, "the sums of squares are not selected"
        self.live = live
        self.x = torch.index_select(self.x, 0, rows, out=model._selected[:count])
        if self.quantized is not None:
            self.quantized.x = self.x
        self.attended = torch.index_select(self.attended, 0, rows, out=model._selected_attended[:count])
        self.normed, self.gate_up, self.act = (buffer[:count] for buffer in (model._normed, model._gate_up, model._act))

    def _tuning(self, weights: LinearWeights) -> LinearTuning | None:
        # Weights in groups are converted in registers for few rows of prompts, too: they would be expanded otherwise.
        return self.model.fused_tuning(weights, len(self.x)) if self.fused or self.model.is_groupwise else None

    def norm(self, weight: Tensor | None = None) -> None:
        """normed = norm(x), after adding to x what ranks have summed. weight: if it is not folded into what follows."""
        weight = self.model._ones if weight is None else weight
        if self.quantized is not None:
            self.partial = self.quantized.take_partial()
        if self.partial is None:
            rms_norm(self.x, weight, self.eps, self.normed, pdl=self.pdl)
        else:
            rms_norm(self.partial, weight, self.eps, self.normed, residual=self.x, pdl=self.pdl)
            self.partial = None

    def squares(self) -> Tensor:
        return self.model._squares[: len(self.x), : self.square_columns]
