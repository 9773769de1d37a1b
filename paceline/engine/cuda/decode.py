"""Decode batches on a GPU: one token per row, or a few with drafts, from gathering the tokens to sampling. CUDA graphs
capture this."""

from __future__ import annotations

from torch import Tensor

from paceline.engine.cuda.attention import CudaAttention
from paceline.engine.cuda.graphs import GraphKey, GraphStage
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.sampling import CudaSampling
from paceline.kernels.decode_attention import NewTokens
from paceline.kernels.drafts import DraftBuffers, accept_drafts, propose_drafts
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.slot_state import SlotState


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
    ) -> None:
        """slots and positions receive those of the rows, for sampling."""
        self._model, self._attention, self._sampling, self._state = model, attention, sampling, state
        self._slots, self._positions = slots, positions
        self._drafts = drafts
        self.coin = 0  # benchmarks: the probability that a draft is accepted, times 256; 0: if it is right

    def run(self, rows: int, key: GraphKey) -> None:
        """A pass of so many rows, or the stage of it that the key names."""
        drafts = self._drafts if key.drafts else None
        num_tokens = rows * (1 + key.drafts)
        slots, positions = self._slots[:num_tokens], self._positions[:num_tokens]
        if key.stage is GraphStage.TOKENS:
            logits = self._model.last_logits(rows)
        elif drafts is None:
            logits = self._logits(rows, key, slots, positions)
        else:
            logits = self._draft_logits(rows, key.drafts, drafts, slots, positions)
        if key.stage is not GraphStage.LOGITS:
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

    def _logits(self, rows: int, key: GraphKey, slots: Tensor, positions: Tensor) -> Tensor:
        model, state = self._model, self._state
        pdl = not key.shared_block_m and model.uses_pdl(rows)
        defer_norm = not key.shared_block_m and model.defers_norm(rows, fused=True)
        attend = self._attention.decode(
            rows,
            state.num_rows,
            key.shared_block_m,
            key.short_contexts,
            self._sampling.step,
            defer_norm=defer_norm,
        )
        gather_tokens(state, model.embedding, model.input(rows), slots, positions, squares=model.squares(rows))
        return model.logits(model.forward(rows, attend, fused=True, defer_norm=defer_norm, pdl=pdl))

    def _draft_logits(
        self, rows: int, num_drafts: int, drafts: DraftBuffers, slots: Tensor, positions: Tensor
    ) -> Tensor:
        """Proposes drafts; the logits after each row's next token and after each of its drafts."""
        model, state, num_tokens = self._model, self._state, len(slots)
        propose_drafts(state, drafts, rows, num_drafts, always=self.coin > 0)
        attend = self._attention.decode(
            rows,
            state.num_rows,
            0,
            step=self._sampling.step,
            defer_norm=False,
            new_tokens=NewTokens(drafts.query_starts, drafts.num_fed, 1 + num_drafts),
        )
        gather_tokens(
            state,
            model.embedding,
            model.input(num_tokens),
            slots,
            positions,
            drafts.token_rows[:num_tokens],
            drafts.query_starts,
            squares=model.squares(num_tokens),
        )
        return model.logits(model.forward(num_tokens, attend, fused=True, pdl=model.uses_pdl(num_tokens)))
