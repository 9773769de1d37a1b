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
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.engine.cuda.layers import BlockBuffers, CudaExperts, LayerMaker
from paceline.engine.cuda.limits import check_supported
from paceline.engine.cuda.lora import CudaLora, LoraSizes
from paceline.engine.linear.base import Setting
from paceline.engine.linear.experts import ExpertBuffers, RoutedExperts, expert_matrices
from paceline.engine.linear.formats import Linears
from paceline.engine.linear.packed import operand_dtype
from paceline.engine.linear.stream import Projected, ResidualStream, StreamBuffers
from paceline.kernels._triton import cdiv
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.linear import GemmTuning, decode_tuning
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.route_experts import LiveRows
from paceline.kernels.slot_state import SlotState
from paceline.kernels.soft_cap import soft_cap
from paceline.model.decoder import Decoder, MixtureOfExperts, whole_qk_factors
from paceline.model.rank_group import vocabulary_widths

AttentionKernels = Callable[[int, Tensor, Tensor], None]  # layer, qkv [T, (Q + 2K) D], out [T, Q D]
_MIN_BLOCK_N = 4  # of GEMMs that add to the residual stream


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
        self.spec, self.device, self.dtype = spec, decoder.device, decoder.dtype
        # All layers have these heads, and all that have an MLP have the same: check_supported.
        self.mixer = spec.layers[0].mixer
        self.group, self.whole_spec = decoder.group, decoder.whole_spec
        self.stages, self.shard = decoder.stages, decoder.shard
        self.kv_scales = decoder.kv_scales
        # The first token id whose embedding this rank has; None: it has all.
        self.first_id = None if self.group is None else self.group.shard.vocabulary(spec).start
        self.embedding, self.head, self.norm = decoder.embedding, decoder.head.tensor, decoder.norm.weight
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.lora = CudaLora(decoder, lora, max_tokens) if lora.num_slots else None
        self._make_layers(decoder, tuning)
        self._allocate()

    def _make_layers(self, decoder: Decoder, tuning: GemmTuning) -> None:
        setting = Setting(self.spec, self.dtype, self.device, self.max_tokens, self.group is not None, tuning)
        self._linears = Linears(setting, [linear.weight for _, _, linear in decoder.linears()], self.max_rows)
        mixtures = decoder.mixtures
        experts = self.experts = (
            None
            if not mixtures
            else ExpertBuffers(
                mixtures[0].options,
                len(mixtures),
                self.max_tokens,
                self.embedding_like,
                expert_matrices(mixtures[0].expert_gate_up),
            )
        )

        def routed(mlp: MixtureOfExperts, norm: Tensor, index: int) -> RoutedExperts:
            assert experts is not None, "the spec has layers with experts"
            return RoutedExperts.take_over(mlp, norm, experts, index)

        adapters, add = (None, None) if self.lora is None else (self.lora.matrices, self.lora.add_to)
        maker = LayerMaker(decoder, self._linears, adapters, add, routed)
        self.layers = [maker.make(index, layer) for index, layer in enumerate(decoder.layers)]

    def _allocate(self) -> None:
        """All buffers of passes."""
        spec, mixer, max_tokens, max_rows = self.spec, self.mixer, self.max_tokens, self.max_rows
        norms, like = spec.layers[0].norms, self.embedding_like
        dense = spec.dense_layers[0] if spec.dense_layers else None
        # Hidden states before the norm overflow float16. With ranks the norm adds to the residual stream, and with
        # norms after blocks it is computed with them. A QK-norm over all heads comes between the norm and attention.
        can_defer = self.group is None and norms == "pre" and mixer.qk_norm != "whole"
        has_partial = self.group is not None or norms != "pre" or self._linears.has_packed
        # Zeros: padding rows of a graph are computed like all others, and must not become NaN or infinite.
        x, normed = (like.new_zeros(max_tokens, spec.hidden_size) for _ in range(2))
        self.stream = StreamBuffers(
            x=x,
            normed=normed,
            partial=like.new_zeros(max_tokens if has_partial else 0, spec.hidden_size),
            squares=torch.zeros(max_rows, cdiv(spec.hidden_size, _MIN_BLOCK_N), device=self.device),
            ones=like.new_ones(spec.hidden_size),
            norms=norms,
            eps=spec.rms_eps,
            gelu=dense is not None and dense.activation.kind == "gelu_tanh",
            can_defer=can_defer and self.dtype is not torch.float16,
            group=self.group,
        )
        inputs = operand_dtype(self.dtype) if self._linears.has_packed else self.dtype
        self._qkv = like.new_zeros(max_tokens, mixer.qkv_size)
        self._attended = like.new_zeros(max_tokens, mixer.q_size, dtype=inputs)
        ffn_size = 0 if dense is None else dense.size
        self._gate_up = like.new_zeros(max_tokens, 2 * ffn_size)
        self._act = like.new_zeros(max_tokens, ffn_size, dtype=inputs)
        self.selected = like.new_zeros(max_rows, spec.hidden_size)
        self.selected_attended = like.new_zeros(max_rows, mixer.q_size, dtype=inputs)
        self._logits = like.new_zeros(max_rows if self.shard.is_last else 0, spec.vocab_size)
        self.received = like.new_zeros(0 if self.shard.is_first else max_tokens, spec.hidden_size)
        if self.group is not None:
            self._widths = vocabulary_widths(self.group.shard.size, spec)
            self._own_logits = like.new_zeros(max_rows, max(self._widths))  # all_gather needs equal shapes

    @property
    def embedding_like(self) -> Tensor:
        """A tensor of the dtype and device of activations, with as many columns."""
        return torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)

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
            layer.load(other)
        if self.lora is not None:
            self.lora.reload(decoder)

    def input(self, num_tokens: int) -> Tensor:
        """The buffer for the embeddings [T, H] of a pass, which becomes its residual stream."""
        return self.stream.x[:num_tokens]

    def squares(self, num_tokens: int) -> Tensor | None:
        """The buffer for the sums of squares of the embeddings, [T, 1]; None for many tokens and for models with norms
        after blocks, which need none, and for ranks and stages, which have only some of the embeddings or none."""
        squares, are_used = self.stream.squares, self.group is None and self.stream.norms == "pre"
        return squares[:num_tokens, :1] if num_tokens <= len(squares) and are_used and self.shard.is_first else None

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
            if found.data_ptr() != self.stream.x.data_ptr():
                self.input(num_tokens).copy_(found)

    def attention_buffers(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The qkv and out that `forward` passes to `attend` in every layer."""
        return self._qkv[:num_tokens], self._attended[:num_tokens]

    def block_buffers(self, num_tokens: int, live: LiveRows | None, *, fused: bool) -> BlockBuffers:
        """For the blocks of a pass, or of its last layer."""
        reads_squares = self.layers[0].qkv.reads_squares(num_tokens, fused=fused)
        return BlockBuffers(self._gate_up[:num_tokens], self._act[:num_tokens], live, reads_squares)

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
        found = ForwardPass(self, num_tokens, fused=fused, defer_norm=defer_norm, pdl=pdl, live=live, lora=lora)
        return found.run(attend, output_tokens, live_outputs)

    def defers_norm(self, num_tokens: int, *, fused: bool) -> bool:
        """Whether attention gets a qkv to which it applies the RMSNorm factor itself (`defer_norm`)."""
        qkv = self.layers[0].qkv
        return self.stream.can_defer and qkv.can_defer and not qkv.runs_fused(num_tokens, fused=fused)

    def uses_pdl(self, num_tokens: int) -> bool:
        """Whether a decode batch uses programmatic dependent launch (PDL): 4 to 6% faster where GEMMs are fused
        (docs/log/gemms.md)."""
        is_fused = self.layers[0].qkv.runs_fused(num_tokens, fused=True)
        return is_fused and self.group is None and self.device.type != "cpu"

    def select(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows of `hidden` by `index` [N] int32."""
        return torch.index_select(hidden, 0, index, out=self.selected[: len(index)])

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

    def last_states(self, num_tokens: int) -> Tensor:
        """The hidden states of the last pass, if it computed those of all its tokens."""
        return self.stream.normed[:num_tokens]

    def last_logits(self, rows: int) -> Tensor:
        """The logits of the last pass, which had so many rows."""
        return self._logits[:rows]

    @property
    def is_packed(self) -> bool:
        """Whether some matrices have fewer bits, which cannot be replaced in place."""
        return self._linears.has_packed or (self.experts is not None and self.experts.has_quantized)

    @property
    def saved_weight_bytes(self) -> int:
        """How much smaller quantized matrices are than those in `dtype`, without those of experts."""
        return sum(one.saved_bytes(self.dtype.itemsize) for layer in self.layers for one in layer.linears)

    @property
    def saved_expert_bytes(self) -> int:
        """The same of experts, of which a pass reads some."""
        experts = [layer.block.routed for layer in self.layers if isinstance(layer.block, CudaExperts)]
        found = [matrix for one in experts for matrix in (one.gate_up, one.down) if not isinstance(matrix, Tensor)]
        return sum(math.prod(one.shape) * self.dtype.itemsize - one.num_bytes for one in found)

    def row_limits(self) -> Iterator[None]:
        """Sets what decides between kernels to each value that it can have on a GPU, one after the other. For listing
        kernels without one."""
        return self._linears.row_limits()

    @property
    def tuned_rows(self) -> list[int]:
        """Numbers of rows with which prefill batches launch other kernels."""
        found = {rows for layer in self.layers for one in layer.linears for rows in one.tuned_rows}
        return sorted(rows for rows in found if rows <= self.max_tokens)

    def load_gemm_kernels(
        self, decode_sizes: Sequence[int], prefill_sizes: Sequence[int], output_sizes: Sequence[int] = ()
    ) -> None:
        """Runs the GEMMs of a layer and of the head for all numbers of rows that batches are padded to: cuBLAS chooses
        another kernel for another number of rows, and loads it at first use. output_sizes: of the last layer of a
        prefill batch, whose other rows nobody needs."""
        sizes = {*prefill_sizes, *output_sizes}
        for rows in sorted({*decode_sizes, *sizes}):
            ForwardPass(self, rows, fused=rows not in sizes).load_libraries()
        for rows in sorted({*decode_sizes, *output_sizes}) if self.shard.is_last else ():
            self.logits(self.stream.normed[:rows])
        self.stream.x.zero_()


class ForwardPass:
    """One pass over the buffers of a model: launches the kernels of all layers."""

    def __init__(
        self,
        model: CudaModel,
        num_tokens: int,
        *,
        fused: bool,
        defer_norm: bool = False,
        pdl: bool = False,
        live: LiveRows | None = None,
        lora: bool = False,
    ) -> None:
        assert not (lora and (fused or pdl)), "adapters are added to the output of whole matrices"
        self._model, self._defer_norm = model, defer_norm
        self._lora = model.lora if lora else None
        self.stream = ResidualStream(
            model.stream, num_tokens, fused=fused, pdl=pdl, adapts=lora, square_columns=int(model.shard.is_first)
        )
        self.qkv, self._attended = model.attention_buffers(num_tokens)
        self.block_buffers = model.block_buffers(num_tokens, live, fused=fused)

    def run(
        self, attend: AttentionKernels, output_tokens: Tensor | None = None, live_outputs: LiveRows | None = None
    ) -> Tensor:
        """Hidden states, as `CudaModel.forward`."""
        model, stream = self._model, self.stream
        selects_late = self._lora is not None
        if self._lora is not None:
            self._lora.begin(len(stream), self.block_buffers.live)
        for index, layer in enumerate(model.layers):
            layer.qkv.project(stream, self.qkv, defer=self._defer_norm and stream.can_defer)
            if layer.whole_qk_norm is not None:
                self._norm_qk(layer.whole_qk_norm)
            attend(index, self.qkv, self._attended)
            if output_tokens is not None and layer is model.layers[-1]:
                if not selects_late or not len(output_tokens):
                    self._select(output_tokens, live_outputs)
                if not len(output_tokens):
                    break  # only the keys and values of these tokens are needed
            layer.out.add(Projected(self._attended), stream)
            layer.block.run(stream, self.block_buffers)
        if output_tokens is not None and selects_late and len(output_tokens):
            # Only now: tokens are grouped by adapter in their old order.
            stream.settle()
            self._select(output_tokens, live_outputs)
        if not model.shard.is_last:
            stream.settle()
            return stream.x
        stream.norm(model.norm, stream.normed)
        return stream.normed

    def load_libraries(self) -> None:
        """Runs the GEMMs of the library that such a pass uses, once each: a kernel is loaded at first use."""
        for layer in {type(one.block): one for one in reversed(self._model.layers)}.values():
            layer.qkv.load_library(self.stream, self.stream.normed, self.qkv)
            layer.out.load_library(self.stream, self._attended, self.stream.x, add=True)
            layer.block.load_libraries(self.stream, self.block_buffers)

    def _select(self, rows: Tensor, live: LiveRows | None) -> None:
        model = self._model
        self.stream.select(rows, model.selected)
        self._attended = torch.index_select(self._attended, 0, rows, out=model.selected_attended[: len(rows)])
        self.block_buffers = model.block_buffers(len(rows), live, fused=False)

    def _norm_qk(self, weight: Tensor) -> None:
        """QK-norm over all heads. Its sums of squares are those of all ranks."""
        model, mixer, stream = self._model, self._model.mixer, self.stream
        if model.group is None:
            split, end = mixer.q_size, mixer.q_size + mixer.kv_size
            weights = weight.view(-1)
            for columns in (slice(0, split), slice(split, end)):
                rms_norm(self.qkv[:, columns], weights[columns], stream.eps, self.qkv[:, columns], pdl=stream.pdl)
            return
        heads = self.qkv.view(len(self.qkv), -1, mixer.head_dim)[:, : len(weight)]
        whole = model.whole_spec.layers[0].mixer
        heads.copy_(heads.float() * whole_qk_factors(model.group, whole, mixer, heads, stream.eps) * weight)
