"""The decoder as GPU kernels: one body for decode passes, which graphs capture, and for passes with prompts.

All activations live in buffers made once, so that a graph's addresses stay valid and a pass allocates nothing. What
passes share, they share in stream order.

    a layer:  [norm] qkv [bias] -> attention -> out [+ x] -> [norm] gate,up silu -> down [+ x]

With few rows each of the four products is one fused kernel that also norms its input and adds to the stream
(kernels/linear.py); with many, cuBLAS is faster. A norm's weight is folded into the matrix behind it when the model is
taken over. What is left of a norm is one factor a row: behind cuBLAS, attention and silu apply it when they read the
product (`raw`), where they can, so that a layer is six launches and not eight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.kernels._triton import cdiv
from paceline.kernels.linear import LinearTuning, LinearWorkspace, decode_tuning, linear, num_squares
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.silu_mul import silu_mul
from paceline.model.decoder import Decoder

Tuning = Callable[[int, int, bool], LinearTuning | None]  # rows, columns, gated
AttendKernel = Callable[[int, Tensor, Tensor], None]  # layer, qkv [T, (Q + 2K) D], out [T, Q D]

_MAX_FUSED_ROWS = 128
# The fused kernels were fitted to Qwen3-0.6B. A layer with a matrix of 8 million numbers or more is quicker with cuBLAS
# alone, at any number of rows (docs/log.md).
_LARGE_WEIGHT = 1 << 23
_MAX_SPLIT = 4  # along K
# Fields of ModelSpec that the kernels compute only with their defaults.
_UNSUPPORTED = ("activation", "attention_scale", "score_cap", "logit_cap", "norm_placement")


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    weight: Tensor
    bias: Tensor | None
    gated: bool = False

    @property
    def columns(self) -> int:
        return self.weight.shape[0] // (2 if self.gated else 1)


@dataclass(frozen=True, slots=True, eq=False)
class CudaLayer:
    qkv: _Product
    out: _Product
    gate_up: _Product
    down: _Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos_sin: Tensor
    window: int  # 0: none


class CudaModel:
    """Takes a decoder over: its matrices are changed in place, so the decoder itself must not be run any more."""

    def __init__(self, decoder: Decoder, *, max_tokens: int, max_rows: int, tuning: Tuning = decode_tuning) -> None:
        spec = decoder.spec
        spec.refuse("the CUDA executor", _UNSUPPORTED, "choose device cpu")
        if spec.head_dim & (spec.head_dim - 1) or spec.head_dim < 16:
            raise ConfigError(
                f"head_dim is {spec.head_dim}: on a GPU it must be a power of two from 16 up; choose device cpu."
            )
        self.spec, self.device, self.dtype = spec, decoder.device, decoder.dtype
        self.embedding, self.head, self.norm = decoder.embedding, decoder.head, decoder.norm
        self._tuning = tuning
        self._ones = torch.ones_like(decoder.norm)
        still = torch.zeros_like(decoder.rope_tables[0])  # layers without positions turn by nothing
        still[:, : spec.head_dim // 2] = 1
        self.layers = [self._take_over(decoder, index, still) for index in range(spec.num_layers)]
        self._max_fused_rows = _MAX_FUSED_ROWS if self._largest_weight() < _LARGE_WEIGHT else 0

        def empty(rows: int, columns: int) -> Tensor:
            # Zeros: padding rows of a graph are computed like any other, and must not become infinite.
            return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

        self._x, self._normed = (empty(max_tokens, spec.hidden_size) for _ in range(2))
        self._qkv = empty(max_tokens, spec.q_size + 2 * spec.kv_size)
        self._attended = empty(max_tokens, spec.q_size)
        self._both, self._act = empty(max_tokens, 2 * spec.ffn_size), empty(max_tokens, spec.ffn_size)
        self._last, self._last_attended = empty(max_rows, spec.hidden_size), empty(max_rows, spec.q_size)
        self._logits = empty(max_rows, spec.vocab_size)
        self._squares = torch.zeros(max_rows, cdiv(spec.hidden_size, 16), device=self.device)
        fused_rows = min(max_rows, self._max_fused_rows)
        widest = max(spec.hidden_size, spec.q_size + 2 * spec.kv_size)
        self._workspace = LinearWorkspace(
            torch.empty(_MAX_SPLIT * fused_rows * widest, device=self.device),
            torch.zeros(cdiv(fused_rows, 16) * cdiv(widest, 16), dtype=torch.int32, device=self.device),
        )

    def _take_over(self, decoder: Decoder, index: int, still: Tensor) -> CudaLayer:
        layer, spec = decoder.layers[index], self.spec
        rope = spec.layer_ropes[index]
        with torch.no_grad():
            for weight, norm in ((layer.qkv, layer.attention_norm), (layer.mlp.gate_up, layer.mlp_norm)):
                assert norm is not None, "norm_placement is pre"
                weight.mul_(norm)
                norm.fill_(1)  # taken over twice, it would be folded twice
        return CudaLayer(
            qkv=_Product(layer.qkv, layer.qkv_bias),
            out=_Product(layer.out, layer.out_bias),
            gate_up=_Product(layer.mlp.gate_up, layer.mlp.gate_up_bias, gated=True),
            down=_Product(layer.mlp.down, layer.mlp.down_bias),
            q_norm=None if layer.qk_norm is None else layer.qk_norm[0],
            k_norm=None if layer.qk_norm is None else layer.qk_norm[spec.num_heads],
            cos_sin=still if rope is None else decoder.rope_tables[rope],
            window=spec.windows[index] or 0,
        )

    def _largest_weight(self) -> int:
        layer = self.layers[0]
        return max(product.weight.numel() for product in (layer.qkv, layer.out, layer.gate_up, layer.down))

    def input(self, num_tokens: int) -> Tensor:
        """Where the embeddings [T, H] of a pass go."""
        return self._x[:num_tokens]

    def squares(self, num_tokens: int) -> Tensor | None:
        """Where the sums of squares of the embeddings go, [T, 1]; a pass of many tokens needs none."""
        return self._squares[:num_tokens, :1] if num_tokens <= len(self._squares) else None

    def attention_buffers(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The qkv and out that `forward` gives to `attend`, in every layer."""
        return self._qkv[:num_tokens], self._attended[:num_tokens]

    def forward(
        self, num_tokens: int, attend: AttendKernel, *, fused: bool, raw: bool = False, pdl: bool = False,
        picked: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [T, H] after the last norm, of the embeddings in `input`. raw: `attend` scales its qkv.

        picked [N] int32: only of these tokens. What the last layer does behind its attention is done for them alone."""
        return _Forward(self, num_tokens, fused, raw, pdl).run(attend, picked)

    def takes_raw(self, num_tokens: int, *, fused: bool) -> bool:
        """Whether attention may be given a product of the stream as it is, and scale it itself."""
        qkv = self.layers[0].qkv
        return self._can_be_raw(qkv) and not (fused and self._choose(qkv, num_tokens) is not None)

    def _can_be_raw(self, product: _Product) -> bool:
        """A bias comes after the factor; and a stream that was not normed is too large for float16."""
        return product.bias is None and self.dtype is not torch.float16

    def uses_pdl(self, num_tokens: int) -> bool:
        """The `pdl` of a decode's kernels: where the products of a layer are fused, 4 to 6% (docs/log.md)."""
        return self._choose(self.layers[0].qkv, num_tokens) is not None and self.device.type == "cuda"

    def pick(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows of `hidden` by `index` [N] int32."""
        return torch.index_select(hidden, 0, index, out=self._last[: len(index)])

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]; overwritten by the next pass."""
        return torch.mm(hidden, self.head.T, out=self._logits[: len(hidden)])

    def last_logits(self, rows: int) -> Tensor:
        """Where the last pass has left them, if it had so many rows."""
        return self._logits[:rows]

    def _choose(self, product: _Product, rows: int) -> LinearTuning | None:
        """The fused kernel for a product of so many rows; None for cuBLAS."""
        tuning = self._tuning(rows, product.columns, product.gated) if rows <= self._max_fused_rows else None
        if tuning is None or product.weight.shape[1] % (tuning.split_k * tuning.block_k):
            return None
        return tuning


class _Forward:
    """One pass being put together. `known`: how many columns of squares hold the sums of squares of x's rows; 0: nobody
    left them."""

    def __init__(self, model: CudaModel, num_tokens: int, fused: bool, raw: bool, pdl: bool) -> None:
        self.model = model
        self.fused, self.raw, self.pdl = fused, raw, pdl
        self.x, self.normed = model._x[:num_tokens], model._normed[:num_tokens]
        self.qkv, self.attended = model._qkv[:num_tokens], model._attended[:num_tokens]
        self.both, self.act = model._both[:num_tokens], model._act[:num_tokens]
        self.known = 1
        self.eps = model.spec.rms_eps

    def run(self, attend: AttendKernel, picked: Tensor | None) -> Tensor:
        model = self.model
        for index, layer in enumerate(model.layers):
            self._inward(layer.qkv, self.qkv)
            attend(index, self.qkv, self.attended)
            if picked is not None and layer is model.layers[-1]:
                self._pick(picked)
                if not len(picked):
                    break  # their keys and values are all that is wanted of these tokens
            self._outward(layer.out, self.attended)
            self._inward(layer.gate_up, self.act)
            self._outward(layer.down, self.act)
        self._norm(model.norm)
        return self.normed

    def _pick(self, rows: Tensor) -> None:
        model, count = self.model, len(rows)
        assert not self.fused, "squares are not picked"
        self.x = torch.index_select(self.x, 0, rows, out=model._last[:count])
        self.attended = torch.index_select(self.attended, 0, rows, out=model._last_attended[:count])
        self.normed, self.both, self.act = (buffer[:count] for buffer in (model._normed, model._both, model._act))

    def _choose(self, product: _Product) -> LinearTuning | None:
        return self.model._choose(product, len(self.x)) if self.fused else None

    def _norm(self, weight: Tensor) -> None:
        rms_norm(self.x, weight, self.eps, self.normed, pdl=self.pdl)

    def _inward(self, product: _Product, out: Tensor) -> None:
        """A product of the normed stream."""
        tuning = self._choose(product)
        if tuning is not None and self.known:
            linear(self.x, product.weight, out, tuning, bias=product.bias, squares=self._squares(), eps=self.eps,
                   gated=product.gated, workspace=self.model._workspace if tuning.split_k > 1 else None,
                   pdl=self.pdl)  # fmt: skip
            return
        raw = self.model._can_be_raw(product) and (product.gated or self.raw)
        if not raw:
            self._norm(self.model._ones)
        source, target = self.x if raw else self.normed, self.both if product.gated else out
        if product.bias is None:
            torch.mm(source, product.weight.T, out=target)
        else:
            torch.addmm(product.bias, source, product.weight.T, out=target)
        if product.gated:
            silu_mul(target, out, self.x if raw else None, self.eps, pdl=self.pdl)

    def _outward(self, product: _Product, source: Tensor) -> None:
        """A product that is added to the stream."""
        tuning = self._choose(product)
        if tuning is not None:
            self.known = num_squares(product.columns, tuning)
            linear(source, product.weight, self.x, tuning, bias=product.bias, residual=self.x,
                   squares_out=self._squares(), workspace=self.model._workspace, pdl=self.pdl)  # fmt: skip
            return
        torch.addmm(self.x, source, product.weight.T, out=self.x)
        if product.bias is not None:
            self.x.add_(product.bias)
        self.known = 0

    def _squares(self) -> Tensor:
        return self.model._squares[: len(self.x), : self.known]
