"""From logits to tokens on a GPU: adjustments, grammar masks, sampling and logprobs.

All of it is part of a decode batch's graph. Grammar masks are known to the host only when the previous pass has ended,
so they split the graph in two: one ends with the logits, the other continues after them. The host, which has just
computed the masks, then has one launch to do before the forward pass ends. With drafts (speculative decoding) every
token of a row has its mask; these drafts come from a third graph, the first to run.

Logprobs are those of the model's own logits. Their kernel therefore runs first, before adjustments and masks change the
logits; it reads from the slot's words what each row requests, and has space of the same size for every row. The logprob
of the sampled token comes last. A mask has not changed that token's logit; where rows have adjustments, a copy of all
logits is kept for it, which needs as much memory again, in graphs and outside of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.engine.cuda.inputs import ALIGN, output_sizes
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.streams import CudaEvent, Streams
from paceline.kernels._triton import cdiv
from paceline.kernels.adjust import AdjustState, adjust_logits, count_seen, mask_logits
from paceline.kernels.drafts import MAX_DRAFTS, DraftBuffers
from paceline.kernels.layouts import LOGPROB_WORDS
from paceline.kernels.logprobs import LogprobWorkspace, chosen_logprobs, top_logprobs
from paceline.kernels.sampling import SampleWorkspace, sample
from paceline.kernels.slot_state import SlotState
from paceline.sampling.types import Bits, Masks


class MaskBuffer:
    """The grammar masks of one pass at a time, at a fixed address on the device, where graphs read them.

    The host writes the masks of a pass after it has waited for the previous one, which has read its own by then.
    """

    def __init__(self, streams: Streams, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """max_rows: most tokens that a pass samples."""
        self._streams = streams
        self.arrived: CudaEvent = streams.event()
        # num_masks, rows, bits; each at a multiple of ALIGN, so that Triton's specialisation is always the same
        self._first_bit_word = ALIGN + cdiv(max_rows, ALIGN) * ALIGN
        self._num_words = cdiv(vocab_size, 32)
        self._words = torch.zeros(mask_words(max_rows, vocab_size), dtype=torch.int32, device=device)
        self._host = streams.pinned(len(self._words))
        self.num_masks, self.rows = self._words[:1], self._words[ALIGN : ALIGN + max_rows]
        self.bits = self._words[self._first_bit_word :].view(max_rows, self._num_words)

    def host_bits(self, num_masks: int, num_words: int) -> Bits:
        """Pinned memory for the bits of the next masks."""
        assert num_words == self._num_words, f"masks have {num_words} words, but the vocabulary needs {self._num_words}"
        return self._host.numpy()[self._first_bit_word :][: num_masks * num_words].reshape(num_masks, num_words)

    def send(self, masks: Masks) -> None:
        """Copies masks, whose bits are in `host_bits`, to the device asynchronously; `arrived` is recorded after it."""
        words = self._host.numpy()
        assert not masks.bits.size or np.shares_memory(masks.bits, words), (
            "the bits of masks must be written into host_bits"
        )
        words[0] = len(masks.rows)
        words[ALIGN : ALIGN + len(masks.rows)] = masks.rows
        size = self._first_bit_word + masks.bits.size
        with self._streams.use(self._streams.copy):
            self._words[:size].copy_(self._host[:size], non_blocking=True)
        self.arrived.record(self._streams.copy)


def mask_words(max_rows: int, vocab_size: int) -> int:
    return ALIGN + cdiv(max_rows, ALIGN) * ALIGN + max_rows * cdiv(vocab_size, 32)


class CudaSampling:
    """Samples the rows of a pass. Results and logprobs are rings of `depth` steps, so that passes in flight do not
    overwrite each other's."""

    def __init__(self, streams: Streams, state: SlotState, model: CudaModel, depth: int, *, has_drafts: bool) -> None:
        (max_running, max_length), device = state.token_pool.shape, state.token_pool.device
        max_rows, vocab_size = model.max_rows, model.spec.vocab_size
        self._streams, self._state = streams, state
        self.has_drafts = has_drafts  # in some passes: then rows may have got several tokens since the last
        self.masks = MaskBuffer(streams, max_rows, vocab_size, device)
        self.workspace = SampleWorkspace.empty(max_rows, device)
        self.adjust = AdjustState.empty(max_running, max_length, device)
        self._logprob_workspace = LogprobWorkspace.empty(max_rows, device)
        self.results = torch.zeros(depth, max_rows, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(depth, max_rows, LOGPROB_WORDS, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def load_kernels(self, model: CudaModel) -> None:
        """Runs what sampling needs of torch once: torch, too, loads its kernels at first use."""
        for rows in output_sizes(model.max_rows):
            index = torch.zeros(rows, dtype=torch.int32, device=model.device)
            model.logits(model.select(model.last_states(1), index)).clone()
        self.step.add_(0)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        index: Tensor | None,
        *,
        adjusts: bool,
        filters: bool,
        logprobs: bool,
        masked: bool = False,
        drafts: DraftBuffers | None = None,
    ) -> None:
        """Writes the next token of every row into the token pool and the results of this step, and its logprobs.
        Changes the logits. drafts: rows have several tokens, whose next ones are written into the results only."""
        state, step, workspace = self._state, self.step, self._logprob_workspace
        num_rows = state.num_rows if drafts is None else drafts.num_tokens
        unadjusted = logits
        if logprobs:
            top_logprobs(logits, slots, num_rows, state.sampling, self.logprobs, step, workspace, index)
            unadjusted = logits.clone() if adjusts else logits
        if adjusts:
            if self.has_drafts:
                count_seen(state.row_slots, state.num_rows, state.num_computed, state.token_pool, self.adjust)
            num_drafts = 0 if drafts is None else MAX_DRAFTS
            adjust_logits(logits, slots, positions, num_rows, state.token_pool, self.adjust, index, num_drafts)
        if masked:
            mask_logits(logits, self.masks.num_masks, self.masks.rows, self.masks.bits)
        sample(
            logits,
            slots,
            positions,
            num_rows,
            state if drafts is None else drafts.without_rows(state),
            self.results,
            step,
            self.workspace,
            index=index,
            filters=filters,
        )
        if logprobs:
            chosen_logprobs(
                unadjusted,
                slots,
                num_rows,
                state.sampling,
                self.results,
                self.logprobs,
                step,
                workspace,
                index,
            )
