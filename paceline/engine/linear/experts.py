"""The routed experts of a layer on the GPU, and the buffers that all layers share. `CudaExperts` uses them.

up to 16 rows:  route -> gate,up -> down [+ x]
more rows:      route -> sort -> gate,up -> down -> sum [+ x]

A norm is not folded into quantized weights: they would have to be rounded again. One more launch, after the router,
norms the inputs of the experts and writes them in the type to which weights are converted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.linear.packed import operand_dtype
from paceline.kernels.expert_tuning import ExpertTuning, tuning_of
from paceline.kernels.expert_weights import ExpertMatrices, Fp8Experts, Mxfp4Experts
from paceline.kernels.experts import (
    ClampedSwiglu,
    ExpertWorkspace,
    add_down,
    add_gate_up,
    num_squares,
)
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.route_experts import LiveRows, RoutedRows, RouterOptions, route, route_tiles
from paceline.model.decoder import MixtureOfExperts
from paceline.model.layers import Experts
from paceline.model.linear import Matrix, expanded

_MAX_PDL_ROWS = 1  # with more, or with quantized experts, a layer is slower with PDL (docs/log/experts.md)


class ExpertBuffers:
    """What all layers with experts share, and how many rows each expert has computed."""

    def __init__(
        self,
        experts: Experts,
        num_layers: int,
        max_tokens: int,
        like: Tensor,
        matrices: ExpertMatrices,
    ) -> None:
        """experts: of each of so many layers, on this rank. like: has the type and columns of activations. matrices:
        those of some layer; if they are quantized, their inputs have the type to which they are converted."""
        operands = None if isinstance(matrices, Tensor) else operand_dtype(like.dtype)
        self.has_quantized = operands is not None
        count, chosen, shared, hidden = experts.count, experts.per_token, experts.shared_size, like.shape[1]
        routing, activation = experts.routing, experts.activation
        self.options = RouterOptions(count, chosen, routing.kind == "sigmoid", routing.renormalise, shared=bool(shared))
        self.clamped: ClampedSwiglu | None = None
        if activation.kind == "clamped_swiglu":
            self.clamped = ClampedSwiglu(activation.swiglu_alpha, activation.swiglu_limit)
        self._tuning = tuning_of(matrices)
        self.routed = RoutedRows.empty(max_tokens, self.options, like.device)
        sizes = (max_tokens, chosen, count, experts.size, hidden)
        self.workspace = ExpertWorkspace.empty(*sizes, like, operands)
        self.inputs = like.new_zeros(0 if operands is None else max_tokens, hidden, dtype=operands)
        self.shared_gate_up, self.shared_act = (like.new_zeros(max_tokens, width) for width in (2 * shared, shared))
        # Rows of int64 begin at multiples of 16 bytes, as kernels expect.
        padded = count + count % 2
        self._loads = torch.zeros(num_layers, padded, dtype=torch.int64, device=like.device)

    @property
    def loads(self) -> Tensor:
        """[layers, experts] int64: rows that chose each expert, since the start. Those of padding are not counted."""
        return self._loads[:, : self.options.num_experts]

    def load_of(self, index: int) -> Tensor:
        return self._loads[index]

    def tuning(self, rows: int) -> ExpertTuning:
        return self._tuning(rows, self.options.num_chosen, self.options.num_experts)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The router and the experts of a layer, with the norm before them folded in; not into quantized experts."""

    router: Tensor  # [E, H], or [E + 1, H] with the gate of the shared expert
    gate_up: ExpertMatrices  # [E, 2F, H]
    down: ExpertMatrices  # [E, H, F]
    buffers: ExpertBuffers
    counts: Tensor  # [E] int64: rows that chose each expert
    router_bias: Tensor | None = None  # [E]
    gate_up_bias: Tensor | None = None  # [E, 2F]
    down_bias: Tensor | None = None  # [E, H]; of ranks, only the first has it
    norm: Tensor | None = None  # [H]: of the inputs of quantized experts

    @classmethod
    def take_over(cls, experts: MixtureOfExperts, norm: Tensor, buffers: ExpertBuffers, index: int) -> RoutedExperts:
        """Those of a decoder's layer, changed in place. index: among the layers with experts."""
        router = experts.router.mul_(norm)
        if experts.shared_gate is not None:
            router = torch.cat((router, experts.shared_gate.mul_(norm)))
        gate_up = expert_matrices(experts.expert_gate_up)
        is_quantized = not isinstance(gate_up, Tensor)
        return cls(
            router=router,
            gate_up=gate_up.mul_(norm) if isinstance(gate_up, Tensor) else gate_up,
            down=expert_matrices(experts.expert_down),
            buffers=buffers,
            counts=buffers.load_of(index),
            router_bias=experts.router_bias,
            gate_up_bias=experts.expert_gate_up_bias,
            down_bias=experts.expert_down_bias,
            norm=norm.clone() if is_quantized else None,  # that of the decoder becomes 1
        )

    def load(self, other: MixtureOfExperts, norm: Tensor) -> None:
        """Copies other weights in place; `norm` is folded into them."""
        assert isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor), "quantized weights are not replaced"
        norm, count = norm.to(self.router.device), self.buffers.options.num_experts
        self.router[:count].copy_(other.router).mul_(norm)
        if other.shared_gate is not None:
            self.router[count:].copy_(other.shared_gate).mul_(norm)
        self.gate_up.copy_(expanded(other.expert_gate_up, self.gate_up.dtype)).mul_(norm)
        self.down.copy_(expanded(other.expert_down, self.down.dtype))
        for mine, theirs in (
            (self.router_bias, other.router_bias),
            (self.gate_up_bias, other.expert_gate_up_bias),
            (self.down_bias, other.expert_down_bias),
        ):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def start(self, x: Tensor, normed: Tensor | None, eps: float, live: LiveRows | None, *, pdl: bool) -> None:
        """Chooses the experts of the rows of x, which RMSNorm is applied to, and computes their activations. normed:
        the norm of x without its weight, if that is computed already. pdl: see linear.py."""
        pdl = pdl and self._uses_pdl(len(x))
        buffers, tuning = self.buffers, self.buffers.tuning(len(x))
        routed, options = buffers.routed, buffers.options
        inputs = x if normed is None else normed
        route(
            inputs,
            self.router,
            options,
            routed,
            self.counts,
            block_m=tuning.block_m,
            eps=eps if normed is None else None,
            bias=self.router_bias,
            live=live,
            pdl=pdl,
        )
        if self.norm is not None:
            inputs = buffers.inputs[: len(x)]
            rms_norm(x, self.norm, eps, inputs)
        add_gate_up(
            inputs,
            self.gate_up,
            routed,
            buffers.workspace,
            tuning,
            bias=self.gate_up_bias,
            clamped=buffers.clamped,
            normed=normed is None and self.norm is None,
            pdl=pdl,
        )

    def num_squares(self, rows: int) -> int:
        """How many columns of `squares` `finish` fills."""
        return num_squares(rows, self.down.shape[1], self.buffers.tuning(rows))

    def finish(self, out: Tensor, residual: Tensor | None, squares: Tensor | None = None, *, pdl: bool) -> None:
        """out = residual + the experts of the rows that `start` got. Does not read x. squares: receives the sums of
        squares of out."""
        buffers = self.buffers
        add_down(
            self.down,
            buffers.routed,
            buffers.workspace,
            out,
            buffers.tuning(len(out)),
            bias=self.down_bias,
            residual=residual,
            squares_out=squares,
            pdl=pdl and self._uses_pdl(len(out)),
        )

    def _uses_pdl(self, rows: int) -> bool:
        return rows <= _MAX_PDL_ROWS and self.norm is None


def expert_matrices(weight: Matrix) -> ExpertMatrices:
    assert isinstance(weight, Tensor | Fp8Experts | Mxfp4Experts), f"no kernel multiplies with {type(weight).__name__}"
    return weight


def tuned_sizes(buffers: ExpertBuffers, max_tokens: int) -> list[int]:
    """Numbers of rows with which every kernel variant is launched."""
    found = {(buffers.tuning(rows), route_tiles(rows)): rows for rows in range(1, max_tokens + 1)}
    return sorted(found.values())
