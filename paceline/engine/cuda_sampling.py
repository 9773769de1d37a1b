"""From logits to tokens on a GPU: adjustments, masks, sampling, and how likely the tokens were.

Adjusting and sampling are part of a decode pass's graph. Two things are not: masks, which the host knows only when the
pass before has ended, and logprobs, whose number differs from pass to pass. A pass with either runs its graph up to the
logits. With masks, what is behind them is a second graph, so that the host, which has just computed the masks, has one
launch to do before the forward pass ends; with logprobs it is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.cuda_inputs import ALIGN
from paceline.engine.cuda_streams import Event, Streams
from paceline.kernels._triton import cdiv
from paceline.kernels.adjust import AdjustState, adjust_logits, mask_logits
from paceline.kernels.sampling import SampleWorkspace, sample
from paceline.kernels.slot_state import SlotState
from paceline.sampling.logprobs import MOST_ROWS, Ask, split
from paceline.sampling.values import Bits, LogprobRun, Masks


@dataclass(slots=True, eq=False)
class Told:
    """Log-chances on their way to the host: [n, 1 + k] of tokens and alternatives, and the ids [n, k] of these."""

    asks: Sequence[Ask]
    chances: Tensor
    ids: Tensor
    host_chances: Tensor
    host_ids: Tensor

    def copy(self) -> None:
        """On the results stream, behind the pass."""
        self.host_chances.copy_(self.chances.view(torch.int32).reshape(-1), non_blocking=True)
        self.host_ids.copy_(self.ids.reshape(-1), non_blocking=True)

    def runs(self) -> list[LogprobRun]:
        """Once the copy is there."""
        chances = self.host_chances.view(torch.float32).numpy().reshape(self.chances.shape).copy()
        ids = self.host_ids.numpy().reshape(self.ids.shape).copy()
        found, at, most = [], 0, self.ids.shape[1] - max(len(ask.ids) for ask in self.asks)
        for ask in self.asks:
            rows = slice(at, at + ask.count)
            at += ask.count
            # All rows have as many columns as the one that asks most.
            kept = [*range(ask.num_top), *range(most, most + len(ask.ids))]
            found.append(LogprobRun(ask.row, ask.first, chances[rows, 0], ids[rows][:, kept],
                                    chances[rows, 1:][:, kept]))  # fmt: skip
        return found


class MaskBuffer:
    """Where masks come to the device: those of one pass at a time, and always to the same place, where a graph
    finds them.

    Masks of a pass are written when the one before has been waited for; nobody reads that one's any more.
    """

    def __init__(self, streams: Streams, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._streams = streams
        self.arrived: Event = streams.event()
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
        self.results = torch.zeros(depth, max_running, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, index: Tensor | None, *, adjusts: bool, filters: bool,
        masked: bool = False,
    ) -> None:  # fmt: skip
        """The next token of every row, into the token pool and the results of this step. Changes the logits."""
        state = self._state
        if adjusts:
            adjust_logits(logits, slots, positions, state.num_rows, state.token_pool, self.adjust, index)
        if masked:
            mask_logits(logits, self.masks.num_masks, self.masks.rows, self.masks.bits)
        sample(
            logits, slots, positions, state.num_rows, state, self.results, self.step, self._workspace, index=index,
            filters=filters,
        )  # fmt: skip

    def tell_output(self, asks: Sequence[Ask], rows: Tensor, ids: Tensor, logits: Tensor) -> Callable[[Tensor], Told]:
        """Remembers the logits of rows [n] before they are changed. What is returned is to be called with the tokens
        [sampling rows] that were chosen; ids [n, m] are those that were asked for."""
        raw = logits.index_select(0, rows).float()
        total = raw.logsumexp(dim=-1, keepdim=True)
        top, top_ids = _top(raw, max(ask.num_top for ask in asks))
        parts = [top, raw.gather(1, ids.long())]
        all_ids = torch.cat([top_ids, ids], dim=1)

        def told(tokens: Tensor) -> Told:
            chosen = raw.gather(1, tokens.index_select(0, rows).long().clamp(min=0)[:, None])  # NO_TOKEN is no index
            return self._on_its_way(asks, torch.cat([chosen, *parts], dim=1) - total, all_ids)

        return told

    def tell_prompts(
        self, asks: Sequence[Ask], slots: Sequence[int], logits_of: Callable[[int, int], Tensor]
    ) -> list[Told]:
        """For rows of these slots, part by part: `logits_of` is overwritten by its next call."""
        found = []
        for ask, slot in zip(asks, slots, strict=True):
            for part in split(ask, min(MOST_ROWS, self.results.shape[1])):
                chances = logits_of(part.index, part.count).float().log_softmax(dim=-1)
                tokens = self._state.token_pool[slot, part.first : part.first + part.count].long()
                top, top_ids = _top(chances, part.num_top)
                both = torch.cat([chances.gather(1, tokens[:, None]), top], dim=1)
                found.append(self._on_its_way([part], both, top_ids))
        return found

    def _on_its_way(self, asks: Sequence[Ask], chances: Tensor, ids: Tensor) -> Told:
        pinned: Any = self._streams.pinned
        return Told(asks, chances, ids, pinned(chances.numel()), pinned(ids.numel()))


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if not count:
        return values[:, :0], values[:, :0].int()
    top, ids = values.topk(count, dim=-1)
    return top, ids.int()
