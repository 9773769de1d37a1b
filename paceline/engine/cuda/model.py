"""The decoder as GPU kernels: one implementation for decode batches, which CUDA graphs capture, and prefill batches.

All activations are in buffers that are allocated once, so that the addresses in a graph stay valid and a forward pass
allocates nothing. Passes share the buffers in stream order.

    a layer:  [norm] qkv [bias] -> attention -> out [+ x] -> [norm] gate,up silu -> down [+ x]

With few rows each of the four GEMMs is one fused kernel that also applies RMSNorm to its input and adds to the residual
stream (kernels/linear.py); with many rows cuBLAS is faster. The weight of a norm is folded into the GEMM after it when
the model is built. What remains of the norm is one factor per row. After a cuBLAS GEMM, attention and SiLU apply it
when they read the GEMM's output (`defer_norm`), where they can, so that a layer takes six launches instead of eight.

With tensor parallelism the model has one rank's weights. The outputs of `out` and `down` are summed over the ranks, and
the norm that follows adds them to the residual stream:

    a layer:  [+ x, norm] qkv -> attention -> out -> all-reduce -> [+ x, norm] gate,up -> silu -> down -> all-reduce
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.kernels._triton import cdiv
from paceline.kernels.linear import LinearTuning, LinearWorkspace, decode_tuning, linear, num_squares
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.silu_mul import silu_mul
from paceline.model.decoder import Decoder
from paceline.model.rank_group import RankGroup, vocabulary_widths
from paceline.model.spec import ModelSpec

GemmTuning = Callable[[int, int, bool], LinearTuning | None]  # rows, columns, gated -> fused kernel; None: cuBLAS
AttentionKernels = Callable[[int, Tensor, Tensor], None]  # layer, qkv [T, (Q + 2K) D], out [T, Q D]

_MAX_FUSED_ROWS = 128
# The fused kernels were tuned for Qwen3-0.6B. A layer with a matrix of 8 million elements or more is faster with cuBLAS
# alone, at any number of rows (docs/log/gemms.md).
_LARGE_WEIGHT = 1 << 23
_MAX_SPLIT_K = 4
_UNPADDED_STEP = 512  # rows: GEMMs of larger prefill batches are loaded at multiples
_UNSUPPORTED_FIELDS = ("activation", "norm_placement", "attention_scale", "score_cap", "logit_cap")  # of ModelSpec


def check_supported(spec: ModelSpec) -> None:
    """Raises ConfigError for a model that the kernels cannot compute. One that learns an option leaves the list."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in _UNSUPPORTED_FIELDS and value != field.default:
            raise ConfigError(f"{field.name} is {value!r}, which device cuda does not support: choose device cpu.")
    if spec.head_dim & (spec.head_dim - 1) or spec.head_dim < 16:
        raise ConfigError(
            f"head_dim is {spec.head_dim}: device cuda needs a power of two of at least 16; choose device cpu."
        )


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """A linear layer, weight [N, K]. gated: the first half of its columns is the gate, the second half is up."""

    weight: Tensor
    bias: Tensor | None
    gated: bool = False

    @property
    def columns(self) -> int:
        return self.weight.shape[0] // (2 if self.gated else 1)

    def load(self, weight: Tensor, bias: Tensor | None, norm: Tensor | None = None) -> None:
        """Copies other weights in place; `norm` is folded into them."""
        self.weight.copy_(weight)
        if norm is not None:
            self.weight.mul_(norm.to(self.weight.device))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)


@dataclass(frozen=True, slots=True, eq=False)
class CudaMlp:
    """The gated MLP of a layer. A mixture of experts would be another class with the same `run`."""

    gate_up: LinearWeights
    down: LinearWeights

    def run(self, forward: ForwardPass) -> None:
        """forward.x += down(silu(gate(norm(x))) * up(norm(x)))"""
        if not forward.fused_norm_linear(self.gate_up, forward.act):
            defer_norm = forward.model.can_defer_norm(self.gate_up)
            forward.cublas_norm_linear(self.gate_up, forward.gate_up, defer_norm=defer_norm)
            silu_mul(forward.gate_up, forward.act, forward.x if defer_norm else None, forward.eps, pdl=forward.pdl)
        forward.add_linear(self.down, forward.act)


@dataclass(frozen=True, slots=True, eq=False)
class CudaLayer:
    """The weights of a layer, and its attention options: what is specific to a layer, `CudaAttention` reads here."""

    qkv: LinearWeights
    out: LinearWeights
    mlp: CudaMlp
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos_sin: Tensor
    window: int  # sliding window; 0: none


class CudaModel:
    """Takes over a decoder: its weights are changed in place, so the decoder must not be used any more."""

    def __init__(self, decoder: Decoder, *, max_tokens: int, max_rows: int, tuning: GemmTuning = decode_tuning) -> None:
        spec = decoder.spec
        check_supported(spec)
        self.spec, self.device, self.dtype = spec, decoder.device, decoder.dtype
        self.group = decoder.group
        # The first token id whose embedding this rank has; None: it has all.
        self.first_id = None if self.group is None else self.group.shard.vocabulary(spec).start
        self.embedding, self.head, self.norm = decoder.embedding, decoder.head, decoder.norm
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self._tuning = tuning
        self._ones = torch.ones_like(decoder.norm)
        identity_rope = torch.zeros_like(decoder.rope_tables[0])  # for layers without RoPE: cos 1, sin 0
        identity_rope[:, : spec.head_dim // 2] = 1
        self.layers = [self._take_over(decoder, index, identity_rope) for index in range(spec.num_layers)]
        # Fused GEMMs add to the residual stream and use its squares, which ranks know only after an all-reduce.
        is_fused = self._largest_weight() < _LARGE_WEIGHT and self.group is None
        self._max_fused_rows = _MAX_FUSED_ROWS if is_fused else 0

        def empty(rows: int, columns: int) -> Tensor:
            # Zeros: padding rows of a graph are computed like all others, and must not become NaN or infinite.
            return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

        self._x, self._normed = (empty(max_tokens, spec.hidden_size) for _ in range(2))
        self._qkv = empty(max_tokens, spec.q_size + 2 * spec.kv_size)
        self._attended = empty(max_tokens, spec.q_size)
        self._gate_up, self._act = empty(max_tokens, 2 * spec.ffn_size), empty(max_tokens, spec.ffn_size)
        self._selected, self._selected_attended = empty(max_rows, spec.hidden_size), empty(max_rows, spec.q_size)
        self._logits = empty(max_rows, spec.vocab_size)
        if self.group is not None:
            self._widths = vocabulary_widths(self.group.shard.size, spec)
            self._own_logits = empty(max_rows, max(self._widths))  # all_gather needs the same shape on every rank
            self._partial = empty(max_tokens, spec.hidden_size)
        self._squares = torch.zeros(max_rows, cdiv(spec.hidden_size, 16), device=self.device)
        fused_rows = min(max_rows, self._max_fused_rows)
        widest = max(spec.hidden_size, spec.q_size + 2 * spec.kv_size)
        self._workspace = LinearWorkspace(
            torch.empty(_MAX_SPLIT_K * fused_rows * widest, device=self.device),
            torch.zeros(cdiv(fused_rows, 16) * cdiv(widest, 16), dtype=torch.int32, device=self.device),
        )

    def _take_over(self, decoder: Decoder, index: int, identity_rope: Tensor) -> CudaLayer:
        layer, spec = decoder.layers[index], self.spec
        rope = spec.layer_ropes[index]
        with torch.no_grad():
            for weight, norm in ((layer.qkv, layer.attention_norm), (layer.mlp.gate_up, layer.mlp_norm)):
                assert norm is not None, "norm_placement is pre"
                weight.mul_(norm)
                norm.fill_(1)  # otherwise a second CudaModel of this decoder would fold it again
        return CudaLayer(
            qkv=LinearWeights(layer.qkv, layer.qkv_bias),
            out=LinearWeights(layer.out, layer.out_bias),
            mlp=CudaMlp(
                gate_up=LinearWeights(layer.mlp.gate_up, layer.mlp.gate_up_bias, gated=True),
                down=LinearWeights(layer.mlp.down, layer.mlp.down_bias),
            ),
            q_norm=None if layer.qk_norm is None else layer.qk_norm[0],
            k_norm=None if layer.qk_norm is None else layer.qk_norm[spec.num_heads],
            cos_sin=identity_rope if rope is None else decoder.rope_tables[rope],
            window=spec.windows[index] or 0,
        )

    @torch.no_grad()
    def load(self, decoder: Decoder) -> None:
        """Copies the weights of another decoder of the same spec, on any device, in place: CUDA graphs hold the
        addresses of ours."""
        self.embedding.copy_(decoder.embedding)
        self.norm.copy_(decoder.norm)
        if not self.spec.tied:
            self.head.copy_(decoder.head)
        for layer, other in zip(self.layers, decoder.layers, strict=True):
            layer.qkv.load(other.qkv, other.qkv_bias, other.attention_norm)
            layer.out.load(other.out, other.out_bias)
            layer.mlp.gate_up.load(other.mlp.gate_up, other.mlp.gate_up_bias, other.mlp_norm)
            layer.mlp.down.load(other.mlp.down, other.mlp.down_bias)
            if layer.q_norm is not None and layer.k_norm is not None and other.qk_norm is not None:
                layer.q_norm.copy_(other.qk_norm[0])
                layer.k_norm.copy_(other.qk_norm[self.spec.num_heads])

    def _largest_weight(self) -> int:
        layer = self.layers[0]
        return max(one.weight.numel() for one in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down))

    def input(self, num_tokens: int) -> Tensor:
        """The buffer for the embeddings [T, H] of a pass, which becomes its residual stream."""
        return self._x[:num_tokens]

    def squares(self, num_tokens: int) -> Tensor | None:
        """The buffer for the sums of squares of the embeddings, [T, 1]; None for many tokens, which need none, and for
        ranks, which have only some of the embeddings."""
        return self._squares[:num_tokens, :1] if num_tokens <= len(self._squares) and self.group is None else None

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
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, of the embeddings in `input`. defer_norm: `attend` applies the
        RMSNorm factor to its qkv.

        output_tokens [N] int32: only the hidden states of these tokens. After its attention, the last layer computes
        nothing else."""
        return ForwardPass(self, num_tokens, fused, defer_norm, pdl).run(attend, output_tokens)

    def defers_norm(self, num_tokens: int, *, fused: bool) -> bool:
        """Whether attention gets a qkv to which it applies the RMSNorm factor itself (`defer_norm`)."""
        qkv = self.layers[0].qkv
        return self.can_defer_norm(qkv) and not (fused and self.fused_tuning(qkv, num_tokens) is not None)

    def can_defer_norm(self, weights: LinearWeights) -> bool:
        """A bias must be added after the factor is applied; and hidden states before the norm overflow float16. With
        ranks the norm adds to the residual stream."""
        return weights.bias is None and self.dtype is not torch.float16 and self.group is None

    def uses_pdl(self, num_tokens: int) -> bool:
        """Whether a decode batch uses programmatic dependent launch (PDL): 4 to 6% faster where GEMMs are fused
        (docs/log/gemms.md)."""
        return self.fused_tuning(self.layers[0].qkv, num_tokens) is not None and self.device.type != "cpu"

    def select(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows of `hidden` by `index` [N] int32."""
        return torch.index_select(hidden, 0, index, out=self._selected[: len(index)])

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]; the next pass overwrites them. Ranks gather theirs, so that all of them sample in the same way."""
        found = self._logits[: len(hidden)]
        if self.group is None:
            return torch.mm(hidden, self.head.T, out=found)
        own = self._own_logits[: len(hidden)]
        torch.mm(hidden, self.head.T, out=own[:, : len(self.head)])
        gathered = self.group.all_gather(own)
        parts = [part[:, :width] for part, width in zip(gathered, self._widths, strict=True)]
        return torch.cat(parts, dim=1, out=found)

    def last_states(self, num_tokens: int) -> Tensor:
        """The hidden states of the last pass, if it computed those of all its tokens."""
        return self._normed[:num_tokens]

    def last_logits(self, rows: int) -> Tensor:
        """The logits of the last pass, which had so many rows."""
        return self._logits[:rows]

    def load_gemm_kernels(self, decode_sizes: Sequence[int], prefill_sizes: Sequence[int]) -> None:
        """Runs the GEMMs of a layer and of the head for all numbers of rows that are padded to, and some of those that
        are not: cuBLAS chooses another kernel for another number of rows, and loads it at first use."""
        sizes = {*prefill_sizes, *range(_UNPADDED_STEP, self.max_tokens + 1, _UNPADDED_STEP), self.max_tokens}
        for rows in sorted({*decode_sizes, *sizes}):
            forward, layer = ForwardPass(self, rows, fused=False, defer_norm=True, pdl=False), self.layers[0]
            for weights, run in (
                (layer.qkv, partial(forward.cublas_norm_linear, layer.qkv, forward.qkv, defer_norm=True)),
                (layer.out, partial(forward.add_linear, layer.out, forward.attended)),
                (
                    layer.mlp.gate_up,
                    partial(forward.cublas_norm_linear, layer.mlp.gate_up, forward.gate_up, defer_norm=True),
                ),
                (layer.mlp.down, partial(forward.add_linear, layer.mlp.down, forward.act)),
            ):
                if rows in sizes or self.fused_tuning(weights, rows) is None:
                    run()
        for rows in decode_sizes:
            self.logits(self._normed[:rows])
        self._x.zero_()

    def fused_tuning(self, weights: LinearWeights, rows: int) -> LinearTuning | None:
        """The fused kernel for a GEMM of so many rows; None for cuBLAS."""
        tuning = self._tuning(rows, weights.columns, weights.gated) if rows <= self._max_fused_rows else None
        if tuning is None or weights.weight.shape[1] % (tuning.split_k * tuning.block_k):
            return None
        return tuning


class ForwardPass:
    """One forward pass over the model's buffers: launches the kernels of all layers.

    `x` is the residual stream. `square_columns`: how many columns of the squares buffer hold the sums of squares of its
    rows; 0 after a cuBLAS GEMM, which writes none.
    """

    def __init__(self, model: CudaModel, num_tokens: int, fused: bool, defer_norm: bool, pdl: bool) -> None:
        self.model = model
        self.fused, self.defer_norm, self.pdl = fused, defer_norm, pdl
        self.x, self.normed = model._x[:num_tokens], model._normed[:num_tokens]
        self.qkv, self.attended = model._qkv[:num_tokens], model._attended[:num_tokens]
        self.gate_up, self.act = model._gate_up[:num_tokens], model._act[:num_tokens]
        self.square_columns = 1
        self.eps = model.spec.rms_eps
        self.partial: Tensor | None = None  # summed over ranks, and not yet added to x

    def run(self, attend: AttentionKernels, output_tokens: Tensor | None) -> Tensor:
        model = self.model
        for index, layer in enumerate(model.layers):
            if not self.fused_norm_linear(layer.qkv, self.qkv):
                defer_norm = self.defer_norm and model.can_defer_norm(layer.qkv)
                self.cublas_norm_linear(layer.qkv, self.qkv, defer_norm=defer_norm)
            attend(index, self.qkv, self.attended)
            if output_tokens is not None and layer is model.layers[-1]:
                self._select(output_tokens)
                if not len(output_tokens):
                    break  # only the keys and values of these tokens are needed
            self.add_linear(layer.out, self.attended)
            layer.mlp.run(self)
        self._norm(model.norm)
        return self.normed

    def fused_norm_linear(self, weights: LinearWeights, out: Tensor) -> bool:
        """out = linear(norm(x)), with the gate's activation, by one fused kernel. Returns False if there is none for
        this batch."""
        tuning = self._tuning(weights)
        if tuning is None or not self.square_columns:
            return False
        linear(
            self.x,
            weights.weight,
            out,
            tuning,
            bias=weights.bias,
            squares=self._squares(),
            eps=self.eps,
            gated=weights.gated,
            workspace=self.model._workspace if tuning.split_k > 1 else None,
            pdl=self.pdl,
        )
        return True

    def cublas_norm_linear(self, weights: LinearWeights, out: Tensor, *, defer_norm: bool) -> None:
        """out = linear(norm(x)). defer_norm: the kernel that reads `out` applies the RMSNorm factor."""
        if not defer_norm:
            self._norm(self.model._ones)
        source = self.x if defer_norm else self.normed
        if weights.bias is None:
            torch.mm(source, weights.weight.T, out=out)
        else:
            torch.addmm(weights.bias, source, weights.weight.T, out=out)

    def add_linear(self, weights: LinearWeights, source: Tensor) -> None:
        """x += linear(source)"""
        if self.model.group is not None:
            self._sum_linear(weights, source, self.model.group)
            return
        tuning = self._tuning(weights)
        if tuning is None:
            torch.addmm(self.x, source, weights.weight.T, out=self.x)
            if weights.bias is not None:
                self.x.add_(weights.bias)
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
            squares_out=self._squares(),
            workspace=self.model._workspace,
            pdl=self.pdl,
        )

    def _sum_linear(self, weights: LinearWeights, source: Tensor, group: RankGroup) -> None:
        """partial = the sum of linear(source) over ranks, which the next norm adds to x."""
        out = torch.mm(source, weights.weight.T, out=self.model._partial[: len(source)])
        if weights.bias is not None:
            out.add_(weights.bias)
        self.partial = group.all_reduce(out)

    def _select(self, rows: Tensor) -> None:
        model, count = self.model, len(rows)
        assert not self.fused, "the sums of squares are not selected"
        self.x = torch.index_select(self.x, 0, rows, out=model._selected[:count])
        self.attended = torch.index_select(self.attended, 0, rows, out=model._selected_attended[:count])
        self.normed, self.gate_up, self.act = (buffer[:count] for buffer in (model._normed, model._gate_up, model._act))

    def _tuning(self, weights: LinearWeights) -> LinearTuning | None:
        return self.model.fused_tuning(weights, len(self.x)) if self.fused else None

    def _norm(self, weight: Tensor) -> None:
        if self.partial is None:
            rms_norm(self.x, weight, self.eps, self.normed, pdl=self.pdl)
        else:
            rms_norm(self.partial, weight, self.eps, self.normed, residual=self.x, pdl=self.pdl)
            self.partial = None

    def _squares(self) -> Tensor:
        return self.model._squares[: len(self.x), : self.square_columns]
