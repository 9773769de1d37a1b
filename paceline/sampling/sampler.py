"""The sampler: one token for every sampling row of a pass, each by its own parameters.

Parameters are columns by slot, filled when a request joins, so that a pass picks its rows' values by indexing.
A row pays for what it asks: greedy rows take the largest logit; only rows with top-k or top-p are sorted.
The order is temperature, then top-k, then top-p among what top-k left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.request import SamplingParams
from paceline.sampling.noise import gumbel, row_keys, token_keys

Rows = npt.NDArray[np.int64]


class Sampler:
    def __init__(self, vocab_size: int, max_running: int) -> None:
        self._vocab_size = vocab_size
        self._token_keys = token_keys(vocab_size)
        self._temperature = np.zeros(max_running, np.float32)
        self._top_k = np.zeros(max_running, np.int64)  # the vocabulary's size where it is off
        self._top_p = np.ones(max_running, np.float32)
        self._seed = np.zeros(max_running, np.int64)
        self._may_stop_at = np.zeros(max_running, np.int64)  # the first position where a stop id may stand
        self._stop_ids: list[Rows] = [np.empty(0, np.int64)] * max_running

    def join(self, slot: int, params: SamplingParams, num_prompt_tokens: int, stop_ids: frozenset[int]) -> None:
        """`slot` belongs to a new request from the next pass on."""
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = params.top_p
        self._seed[slot] = params.seed or 0
        # With min_tokens = n, the n-th output token is the first that may end the request.
        self._may_stop_at[slot] = num_prompt_tokens + params.min_tokens - 1
        self._stop_ids[slot] = np.array(sorted(i for i in stop_ids if i < self._vocab_size), np.int64)

    def sample(self, logits: Tensor, slots: Rows, positions: Rows) -> npt.NDArray[np.int64]:
        """Tokens for logits [rows, vocab] of these slots, to stand at these positions. May change `logits`."""
        self._forbid_stops(logits, slots, positions)
        hot = self._temperature[slots] > 0
        if not hot.any():
            tokens: npt.NDArray[np.int64] = logits.argmax(dim=-1).numpy()
            return tokens
        if hot.all():
            return self._draw(logits, slots, positions)
        tokens = np.empty(len(slots), np.int64)
        tokens[~hot] = logits[torch.from_numpy(~hot)].argmax(dim=-1).numpy()
        tokens[hot] = self._draw(logits[torch.from_numpy(hot)], slots[hot], positions[hot])
        return tokens

    def _forbid_stops(self, logits: Tensor, slots: Rows, positions: Rows) -> None:
        for row in np.flatnonzero(positions < self._may_stop_at[slots]).tolist():
            ids = self._stop_ids[slots[row]]
            if len(ids) < self._vocab_size:  # with nothing left to choose, a stop id it must be
                logits[row, torch.from_numpy(ids)] = -torch.inf

    def _draw(self, logits: Tensor, slots: Rows, positions: Rows) -> npt.NDArray[np.int64]:
        scores = logits.float() / torch.from_numpy(self._temperature[slots])[:, None]
        keys = row_keys(self._seed[slots], positions)[:, None]
        top_k, top_p = self._top_k[slots], self._top_p[slots]
        free = (top_k == self._vocab_size) & (top_p == 1)
        tokens = np.empty(len(slots), np.int64)
        # Rows with a top-k look at so many candidates, rows with top-p alone at all of them.
        for rows in (free, ~free & (top_k < self._vocab_size), ~free & (top_k == self._vocab_size)):
            if not rows.any():
                continue
            at = slice(None) if rows.all() else torch.from_numpy(rows)
            if rows is free:
                tokens[rows] = (scores[at] + gumbel(keys[at], self._token_keys)).argmax(dim=-1).numpy()
            else:
                tokens[rows] = self._draw_best(scores[at], keys[at], top_k[rows], top_p[rows])
        return tokens

    def _draw_best(
        self, scores: Tensor, keys: Tensor, top_k: Rows, top_p: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.int64]:
        best, ids = scores.topk(int(top_k.max()), dim=-1)
        rank = torch.arange(best.shape[1])
        best = best.masked_fill(rank >= torch.from_numpy(top_k)[:, None], -torch.inf)
        chances = best.softmax(dim=-1, dtype=torch.float64)
        # Up to and with the token that reaches top_p: what lies above a token must be less. The first always stays.
        above = chances.cumsum(dim=-1) - chances
        cut = above >= torch.from_numpy(top_p.astype(np.float64))[:, None]
        cut[:, 0] = False
        winner = (best.masked_fill_(cut, -torch.inf) + gumbel(keys, self._token_keys[ids])).argmax(dim=-1, keepdim=True)
        tokens: npt.NDArray[np.int64] = ids.gather(1, winner)[:, 0].numpy()
        return tokens
