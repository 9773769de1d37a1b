"""Decode batches on a GPU: one token per row, from gathering the tokens to sampling. CUDA graphs capture this."""

from __future__ import annotations

from torch import Tensor

from paceline.engine.cuda.attention import CudaAttention
from paceline.engine.cuda.graphs import GraphKey, GraphStage
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.sampling import CudaSampling
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
    ) -> None:
        """slots and positions receive those of the rows, for sampling."""
        self._model, self._attention, self._sampling, self._state = model, attention, sampling, state
        self._slots, self._positions = slots, positions

    def run(self, rows: int, key: GraphKey) -> None:
        """A pass of so many rows, or the stage of it that the key names."""
        model, state = self._model, self._state
        slots, positions = self._slots[:rows], self._positions[:rows]
        if key.stage is GraphStage.TOKENS:
            logits = model.last_logits(rows)
        else:
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
            logits = model.logits(model.forward(rows, attend, fused=True, defer_norm=defer_norm, pdl=pdl))
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
            )
