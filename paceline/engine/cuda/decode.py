"""Decode batches on a GPU: one token per row, or a few with drafts, from gathering the tokens to sampling. CUDA graphs
capture this."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engine.cuda.attention import CudaAttention
from paceline.engine.cuda.graphs import GraphKey, GraphStage
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.sampling import CudaSampling
from paceline.kernels.decode_attention import NewTokens
from paceline.kernels.drafts import DraftBuffers, accept_drafts, propose_drafts
from paceline.kernels.route_experts import LiveRows
from paceline.kernels.slot_state import SlotState


class DecodeForward:
    """The forward pass of decode batches of one model."""

    def __init__(
        self, model: CudaModel, attention: CudaAttention, state: SlotState, slots: Tensor, positions: Tensor
    ) -> None:
        """slots and positions receive those of the tokens, for sampling."""
        self._model, self._attention, self._state = model, attention, state
        self._slots, self._positions = slots, positions

    def logits(self, rows: int, key: GraphKey = GraphKey(), step: Tensor | None = None) -> Tensor:  # noqa: B008
        """The logits after the next token of each row. step: is incremented."""
        return self._model.logits(self.next_states(rows, key, step))

    def next_states(self, rows: int, key: GraphKey, step: Tensor | None = None) -> Tensor:
        """The hidden states of the next token of each row. step: is incremented."""
        model, state = self._model, self._state
        fused = not key.lora
        pdl = fused and not key.shared_block_m and model.uses_pdl(rows)
        defer_norm = not key.shared_block_m and model.defers_norm(rows, fused=fused)
        attend = self._attention.decode(
            rows, state.num_rows, key.shared_block_m, key.short_contexts, step, defer_norm=defer_norm
        )
        slots, positions = self._slots[:rows], self._positions[:rows]
        model.embed(state, slots, positions, squares=model.squares(rows))
        live = LiveRows(state.num_rows, by_row=False)
        return model.forward(rows, attend, fused=fused, defer_norm=defer_norm, pdl=pdl, live=live, lora=key.lora)

    def states(
        self, rows: int, new_tokens: NewTokens, token_rows: Tensor, step: Tensor | None = None, *, lora: bool = False
    ) -> Tensor:
        """The hidden states of all new tokens of rows that have several. token_rows: the row of each, or -1. lora: some
        rows have adapters."""
        model, state, num_tokens = self._model, self._state, len(token_rows)
        squares = model.squares(num_tokens)  # what fused GEMMs need
        attend = self._attention.decode(rows, state.num_rows, 0, step=step, defer_norm=False, new_tokens=new_tokens)
        slots, positions = self._slots[:num_tokens], self._positions[:num_tokens]
        model.embed(state, slots, positions, token_rows, new_tokens.query_starts, squares)
        fused = squares is not None and not lora
        pdl = fused and model.uses_pdl(num_tokens)
        live = LiveRows(token_rows, by_row=True)
        return model.forward(num_tokens, attend, fused=fused, pdl=pdl, live=live, lora=lora)


class DecodeRunner:
    def __init__(
        self,
        model: CudaModel,
        attention: CudaAttention,
        sampling: CudaSampling,
        state: SlotState,
        slots: Tensor,
        positions: Tensor,
        drafts: DraftBuffers | None = None,
        propose: Callable[..., Tensor] | None = None,
    ) -> None:
        """slots and positions receive those of the rows, for sampling. propose: `DraftModel.propose`."""
        self._model, self._sampling, self._state = model, sampling, state
        self._forward = DecodeForward(model, attention, state, slots, positions)
        self._slots, self._positions = slots, positions
        self._drafts, self._propose = drafts, propose
        self.coin = 0  # benchmarks: the probability that a draft is accepted, times 256; 0: if it is right

    def run(self, rows: int, key: GraphKey) -> None:
        """A pass of so many rows, or the stage of it that the key names. Only the last stage of a pipeline samples."""
        if not self._model.shard.is_last:
            self._forward.next_states(rows, key, self._sampling.step)
            return
        drafts = self._drafts if key.drafts else None
        num_tokens = rows * (1 + key.drafts)
        slots, positions = self._slots[:num_tokens], self._positions[:num_tokens]
        if drafts is not None and key.stage in (GraphStage.ALL, GraphStage.DRAFTS):
            model_drafts = None
            if self._propose is not None:
                model_drafts = self._propose(rows, key.drafts, filters=key.filters)
            propose_drafts(self._state, drafts, rows, key.drafts, always=self.coin > 0, model_drafts=model_drafts)
        if key.stage is GraphStage.DRAFTS:
            return
        if key.stage is GraphStage.TOKENS:
            logits = self._model.last_logits(num_tokens)
        elif drafts is None:
            logits = self._forward.logits(rows, key, self._sampling.step)
        else:
            new_tokens = NewTokens(drafts.query_starts, drafts.num_fed, 1 + key.drafts)
            token_rows = drafts.token_rows[:num_tokens]
            hidden = self._forward.states(rows, new_tokens, token_rows, self._sampling.step, lora=key.lora)
            logits = self._model.logits(hidden)
        if key.stage is GraphStage.LOGITS:
            return
        self._sampling.sample(
            logits,
            slots,
            positions,
            None,
            adjusts=key.adjusts,
            filters=key.filters,
            logprobs=key.logprobs,
            masked=key.stage is GraphStage.TOKENS,
            drafts=drafts,
        )
        if drafts is not None:
            results, step = self._sampling.results, self._sampling.step
            accept_drafts(self._state, drafts, results, step, rows, key.drafts, coin=self.coin)
