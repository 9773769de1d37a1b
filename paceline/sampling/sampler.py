"""The sampler: one token for every sampling row of a pass, each with its own parameters.

Parameters are columns by slot, filled when a request joins, so that a pass reads the values of its rows by indexing. A
row costs only what it uses: greedy rows take the largest logit; only rows with a filter compute its threshold. The
filters keep all scores at or above a threshold, so ties are kept or dropped together: temperature, then top-k, then
top-p among the tokens that top-k keeps, and min-p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.sampling.adjust import LogitAdjustments, adjust_row, logit_adjustments
from paceline.sampling.noise import gumbel, row_keys, token_keys
from paceline.sampling.types import NO_TOKEN
from paceline.scheduler.plan import Join

Rows = npt.NDArray[np.int64]


class Sampler:
    def __init__(self, vocab_size: int, max_running: int) -> None:
        self._vocab_size = vocab_size
        self._token_keys = token_keys(vocab_size)
        self._temperature = np.zeros(max_running, np.float32)  # 0: greedy
        self._top_k = np.zeros(max_running, np.int64)  # the vocabulary size if it is off
        self._top_p = np.ones(max_running, np.float32)
        self._min_p = np.zeros(max_running, np.float32)
        self._seed = np.zeros(max_running, np.int64)
        self._adjusted = np.zeros(max_running, np.bool_)
        self._adjustments: list[LogitAdjustments | None] = [None] * max_running

    def join(self, join: Join) -> None:
        """A new request takes a slot: fills the slot's columns."""
        slot, params = join.slot, join.params
        self._temperature[slot] = 0 if params.is_greedy else params.temperature
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = params.seed or 0
        self._adjustments[slot] = logit_adjustments(join, self._vocab_size)
        self._adjusted[slot] = self._adjustments[slot] is not None

    def sample(
        self, logits: Tensor, slots: Rows, positions: Rows, tokens: npt.NDArray[np.int32], masks: Tensor | None = None
    ) -> Rows:
        """Tokens for logits [rows, vocab] of these slots at these positions; NO_TOKEN for a row whose largest logit is
        not finite. May change `logits`.

        `tokens` [slots, positions] are all tokens so far; `masks` [rows, vocab] is false for tokens that are not
        allowed.
        """
        logits = logits.float()
        for row in np.flatnonzero(self._adjusted[slots]).tolist():
            by = self._adjustments[slots[row]]
            assert by is not None, "a slot is marked as adjusted, but has no adjustments"
            adjust_row(logits[row].numpy(), tokens[slots[row], : positions[row]], by)
        if masks is not None:
            logits.masked_fill_(~masks, -torch.inf)
        best: Rows = logits.numpy().argmax(axis=-1)  # a tenth of the time of torch's; NaN counts as the largest
        finite = np.isfinite(logits.numpy()[np.arange(len(best)), best])
        if not finite.all():
            # These rows are sampled from equal logits, so that the others can be sampled in the same call.
            found = self._choose(logits.masked_fill(torch.from_numpy(~finite)[:, None], 0.0), best, slots, positions)
            found[~finite] = NO_TOKEN
            return found
        return self._choose(logits, best, slots, positions)

    def needs_all_logits(self, slots: Rows) -> npt.NDArray[np.bool_]:
        """Rows whose token depends on more than the largest of logits plus noise: they have a filter or adjustments."""
        filtered = (self._top_k[slots] < self._vocab_size) | (self._top_p[slots] < 1) | (self._min_p[slots] > 0)
        needed: npt.NDArray[np.bool_] = self._adjusted[slots] | (filtered & (self._temperature[slots] > 0))
        return needed

    def noisy(self, logits: Tensor, slots: Rows, positions: Rows, first: int) -> Tensor:
        """Scores of rows without filters, whose largest is the sampled token: logits [rows, n] of the token ids from
        `first` on, divided by the temperature, plus noise; of greedy rows the logits."""
        hot = self._temperature[slots] > 0
        scores = logits.float()
        if hot.any():
            at = slice(None) if hot.all() else torch.from_numpy(hot)
            keys = row_keys(self._seed[slots[hot]], positions[hot])[:, None]
            tokens = self._token_keys[first : first + logits.shape[1]]
            temperature = torch.from_numpy(self._temperature[slots[hot]])[:, None]
            scores = scores.clone()
            scores[at] = scores[at] / temperature + gumbel(keys, tokens)
        return scores

    def _choose(self, logits: Tensor, best: Rows, slots: Rows, positions: Rows) -> Rows:
        """best: the tokens with the largest logits."""
        hot = self._temperature[slots] > 0
        if not hot.any():
            return best
        if hot.all():
            return self._draw(logits, slots, positions)
        found = np.empty(len(slots), np.int64)
        found[~hot] = best[~hot]
        found[hot] = self._draw(logits[torch.from_numpy(hot)], slots[hot], positions[hot])
        return found

    def _draw(self, logits: Tensor, slots: Rows, positions: Rows) -> Rows:
        scores = logits / torch.from_numpy(self._temperature[slots])[:, None]
        keys = row_keys(self._seed[slots], positions)
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        free = (top_k == self._vocab_size) & (top_p == 1) & (min_p == 0)
        found = np.empty(len(slots), np.int64)
        # Rows with top-k sort that many candidates, rows with top-p alone sort all of them.
        sorts = (top_k < self._vocab_size) | (top_p == 1)
        for rows in (free, ~free & sorts, ~free & ~sorts):
            if not rows.any():
                continue
            at = slice(None) if rows.all() else torch.from_numpy(rows)
            if rows is free:
                found[rows] = (scores[at] + gumbel(keys[at][:, None], self._token_keys)).argmax(dim=-1).numpy()
            else:
                least = _thresholds(scores[at], top_k[rows], top_p[rows], min_p[rows])
                found[rows] = self._draw_above(scores[at], keys[at], least)
        return found

    def _draw_above(self, scores: Tensor, keys: Tensor, least: Tensor) -> Rows:
        """Samples one token per row among those whose score is at least `least` [rows, 1]; only these need noise."""
        rows, ids = (scores >= least).nonzero(as_tuple=True)  # ordered by row; every row has at least one
        noisy = (scores[rows, ids] + gumbel(keys[rows], self._token_keys[ids])).numpy()
        starts = np.searchsorted(rows.numpy(), np.arange(len(scores)))
        best = np.repeat(np.maximum.reduceat(noisy, starts), np.diff(starts, append=len(noisy)))
        winners = np.flatnonzero(noisy == best)
        _, first = np.unique(rows.numpy()[winners], return_index=True)
        found: Rows = ids.numpy()[winners[first]]
        return found


def _thresholds(scores: Tensor, top_k: Rows, top_p: npt.NDArray[np.float32], min_p: npt.NDArray[np.float32]) -> Tensor:
    """The lowest score [rows, 1] that the filters of each row keep."""
    highest = scores.amax(dim=-1, keepdim=True)
    floor = torch.from_numpy(min_p)[:, None].log()  # minus infinity if it is off
    least = highest + floor
    some, vocab = top_k < scores.shape[1], scores.shape[1]
    cuts = some | (top_p < 1)
    if not cuts.any():
        return least
    width = vocab if (cuts & ~some).any() else int(top_k[some].max())
    best = scores.topk(width, dim=-1).values
    kth = best.gather(1, torch.from_numpy(np.minimum(top_k, width) - 1)[:, None])
    # Ties with the k-th are kept, so they count for top-p too. Those beyond the sorted ones all have its score.
    extra = ((scores == kth).sum(-1, keepdim=True) - (best == kth).sum(-1, keepdim=True)).double()
    probs = (best - highest).double().exp().masked_fill_(best < kth, 0.0)
    total = probs.sum(-1, keepdim=True) + extra * (kth - highest).double().exp()
    # Kept up to and including the token that reaches top_p: the sum above it must be less. The first is always kept.
    above = probs.cumsum(dim=-1) - probs
    share = torch.from_numpy(np.where(top_p < 1, top_p.astype(np.float64), np.inf))[:, None]
    kept = (above < share * total) & (best >= kth)
    kept[:, 0] = True
    last = best.gather(1, kept.sum(-1, keepdim=True) - 1)
    return torch.where(torch.from_numpy(cuts)[:, None], torch.maximum(least, last), least)
