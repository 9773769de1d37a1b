"""From logits to tokens on a GPU: adjustments, masks, sampling, and how likely the tokens were.

All of it is part of a decode pass's graph. Masks, which the host knows only when the pass before has ended, cut it in
two: one graph ends with the logits, and what is behind them is another, so that the host, which has just computed the
masks, has one launch to do before the forward pass ends.

Logprobs are told of the logits as the model gave them. Their kernel comes first, before adjusting and masking change
these, and has a place of the same size for every row; it reads in the slot's words what the row asks. Only how likely
the chosen token was is known last. A mask has left that token's logit alone; where rows are adjusted, a copy of all
logits is kept for it, which takes as much memory again in graphs and beside them.

Of prompts they are launched kernel by kernel, as all of a pass with prompts is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.cuda.inputs import ALIGN
from paceline.engine.cuda.streams import CudaEvent, Streams
from paceline.kernels._triton import cdiv
from paceline.kernels.adjust import AdjustState, adjust_logits, mask_logits
from paceline.kernels.logprobs import (
    ASKED,
    TOLD_WORDS,
    TOP_CHANCES,
    TOP_IDS,
    LogprobWorkspace,
    chosen_logprobs,
    top_logprobs,
)
from paceline.kernels.sampling import SampleWorkspace, sample
from paceline.kernels.slot_state import SlotState
from paceline.sampling.logprobs import MAX_LOGIT_ROWS, LogprobRequest, LogprobWidth, split
from paceline.sampling.types import Bits, LogprobRun, Logprobs, Masks


@dataclass(slots=True, eq=False)
class Told:
    """Log-chances of a prompt's tokens on their way to the host: [n, 1 + k] of these and of alternatives, whose ids are
    [n, k]."""

    ask: LogprobRequest
    chances: Tensor
    ids: Tensor
    host_chances: Tensor
    host_ids: Tensor

    def copy(self) -> None:
        """On the results stream, behind the pass."""
        self.host_chances.copy_(self.chances.view(torch.int32).reshape(-1), non_blocking=True)
        self.host_ids.copy_(self.ids.reshape(-1), non_blocking=True)

    def run(self) -> LogprobRun:
        """Once the copy is there."""
        chances = self.host_chances.view(torch.float32).numpy().reshape(self.chances.shape).copy()
        ids = self.host_ids.numpy().reshape(self.ids.shape).copy()
        return LogprobRun(self.ask.row, self.ask.first, chances[:, 0], ids, chances[:, 1:])


def told_columns(words: npt.NDArray[np.int32], width: LogprobWidth) -> Logprobs:
    """What the device told of rows [n, TOLD_WORDS], as far as somebody asks."""

    def floats(first: int, count: int) -> npt.NDArray[np.float32]:
        return words[:, first : first + count].view(np.float32)

    num_top, num_ids = width
    ids = words[:, TOP_IDS : TOP_IDS + num_top]
    return Logprobs(floats(0, 1)[:, 0], ids, floats(TOP_CHANCES, num_top), floats(ASKED, num_ids))


class MaskBuffer:
    """Where masks come to the device: those of one pass at a time, and always to the same place, where a graph
    finds them.

    Masks of a pass are written when the one before has been waited for; nobody reads that one's any more.
    """

    def __init__(self, streams: Streams, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._streams = streams
        self.arrived: CudaEvent = streams.event()
        # num_masks, rows, bits; parts begin where Triton always finds the same alignment
        self._bits_from = ALIGN + cdiv(max_rows, ALIGN) * ALIGN
        self._num_words = cdiv(vocab_size, 32)
        self._host: Tensor | None = None  # made at first use: few engines need it, and there is always room
        self._words = torch.zeros(mask_words(max_rows, vocab_size), dtype=torch.int32, device=device)
        self.num_masks, self.rows = self._words[:1], self._words[ALIGN : ALIGN + max_rows]
        self.bits = self._words[self._bits_from :].view(max_rows, self._num_words)

    def room(self, num_rows: int, num_words: int) -> Bits:
        assert num_words == self._num_words, f"masks have {num_words} words, and the vocabulary {self._num_words}"
        if self._host is None:
            self._host = self._streams.pinned(len(self._words))
        return self._host.numpy()[self._bits_from :][: num_rows * num_words].reshape(num_rows, num_words)

    def send(self, masks: Masks) -> None:
        """Puts masks, whose bits are in the room, on their way: they are there once `arrived` has passed."""
        assert self._host is not None, "bits are written into the room first"
        words = self._host.numpy()
        assert not masks.bits.size or np.shares_memory(masks.bits, words), "bits are written into the room"
        words[0] = len(masks.rows)
        words[ALIGN : ALIGN + len(masks.rows)] = masks.rows
        size = self._bits_from + masks.bits.size
        with self._streams.use(self._streams.copy):
            self._words[:size].copy_(self._host[:size], non_blocking=True)
        self.arrived.record(self._streams.copy)


def mask_words(max_rows: int, vocab_size: int) -> int:
    return ALIGN + cdiv(max_rows, ALIGN) * ALIGN + max_rows * cdiv(vocab_size, 32)


class CudaSampling:
    def __init__(
        self, streams: Streams, state: SlotState, max_running: int, max_length: int, vocab_size: int, depth: int
    ) -> None:
        device = state.token_pool.device
        self._streams, self._state = streams, state
        self.masks = MaskBuffer(streams, max_running, vocab_size, device)
        self._workspace = SampleWorkspace.empty(max_running, device)
        self.adjust = AdjustState.empty(max_running, max_length, device)
        self._logprobs = LogprobWorkspace.empty(max_running, device)
        self.results = torch.zeros(depth, max_running, dtype=torch.int32, device=device)
        self.told = torch.zeros(depth, max_running, TOLD_WORDS, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, index: Tensor | None, *, adjusts: bool, filters: bool,
        logprobs: bool, masked: bool = False,
    ) -> None:  # fmt: skip
        """The next token of every row, into the token pool and the results of this step, and what is to be told of it.
        Changes the logits."""
        state, raw = self._state, logits
        if logprobs:
            top_logprobs(logits, slots, state.num_rows, state.sampling, self.told, self.step, self._logprobs, index)
            raw = logits.clone() if adjusts else logits
        if adjusts:
            adjust_logits(logits, slots, positions, state.num_rows, state.token_pool, self.adjust, index)
        if masked:
            mask_logits(logits, self.masks.num_masks, self.masks.rows, self.masks.bits)
        sample(
            logits, slots, positions, state.num_rows, state, self.results, self.step, self._workspace, index=index,
            filters=filters,
        )  # fmt: skip
        if logprobs:
            chosen_logprobs(
                raw, slots, state.num_rows, state.sampling, self.results, self.told, self.step, self._logprobs, index
            )

    def tell_prompts(
        self, asks: Sequence[LogprobRequest], slots: Sequence[int], logits_of: Callable[[int, int], Tensor]
    ) -> list[Told]:
        """For rows of these slots, part by part: `logits_of` is overwritten by its next call."""
        found = []
        for ask, slot in zip(asks, slots, strict=True):
            for part in split(ask, min(MAX_LOGIT_ROWS, self.results.shape[1])):
                chances = logits_of(part.index, part.count).float().log_softmax(dim=-1)
                tokens = self._state.token_pool[slot, part.first : part.first + part.count].long()
                top, top_ids = _top(chances, part.num_top)
                both = torch.cat([chances.gather(1, tokens[:, None]), top], dim=1)
                pinned = self._streams.pinned
                found.append(Told(part, both, top_ids, pinned(both.numel()), pinned(top_ids.numel())))
        return found


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if not count:
        return values[:, :0], values[:, :0].int()
    top, ids = values.topk(count, dim=-1)
    return top, ids.int()
