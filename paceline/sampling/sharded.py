"""Sampling where each rank has the logits of a part of the vocabulary (tensor parallelism).

The sampled token is the argmax of logits plus noise, and noise depends on seed, position and token id alone. So each
rank finds the best of its own tokens, and one all-reduce decides: the maximum of int64 numbers with the score in the
high half, in an order that integers have too, and the inverted token id in the low half, so that ties go to the lower
id. Rows with filters or adjustments need all logits: these are gathered, and every rank samples them in the same way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.model.rank_group import RankGroup, gather_logits
from paceline.model.spec import ModelSpec
from paceline.sampling.sampler import Rows, Sampler
from paceline.sampling.types import NO_TOKEN

_LOW = 0x7FFFFFFF
_INVALID = torch.iinfo(torch.int64).max  # a row of which some rank has NaN or infinity
_MINUS_INFINITY = -0x7F800001  # `_order` of it: a row of which no rank has a finite logit


class ShardedSampler:
    def __init__(self, sampler: Sampler, group: RankGroup, spec: ModelSpec) -> None:
        """sampler: that of the whole vocabulary, which also has the requests' parameters."""
        self._sampler, self._group, self._spec = sampler, group, spec
        self._first = group.shard.vocabulary(spec).start

    def sample(self, logits: Tensor, slots: Rows, positions: Rows, tokens: npt.NDArray[np.int32]) -> Rows:
        """As `Sampler.sample`, for this rank's logits [rows, n]. The same tokens on every rank."""
        gathered = self._sampler.needs_all_logits(slots)
        found = np.empty(len(slots), np.int64)
        if gathered.any():
            rows = torch.from_numpy(gathered)
            whole = gather_logits(self._group, self._spec, logits[rows])
            found[gathered] = self._sampler.sample(whole, slots[gathered], positions[gathered], tokens)
        if not gathered.all():
            rest = ~gathered
            scores = self._sampler.noisy(logits[torch.from_numpy(rest)], slots[rest], positions[rest], self._first)
            found[rest] = tokens_of(self._group.all_reduce_max(best_keys(scores, self._first))).numpy()
        return found


def best_keys(scores: Tensor, first: int) -> Tensor:
    """For each row of scores [rows, n] of the token ids from `first` on, an int64: the larger, the better."""
    best, ids = scores.max(dim=-1)  # NaN if there is any
    # The lowest id where several scores are equal: `max` does not say which it returns.
    ids = (scores == best[:, None]).int().argmax(dim=-1).where(~best.isnan(), ids)
    keys = _order(best) << 32 | (_LOW - (ids + first))
    return keys.where(~(best.isnan() | (best == torch.inf)), _INVALID)


def tokens_of(keys: Tensor) -> Tensor:
    """The token ids of the best keys; NO_TOKEN for rows without a finite largest score."""
    has_token = (keys != _INVALID) & (keys >> 32 != _MINUS_INFINITY)
    return (_LOW - (keys & _LOW)).where(has_token, NO_TOKEN)


def _order(values: Tensor) -> Tensor:
    """Integers in the order of float32 values. Both zeros are equal."""
    bits = (values + 0.0).view(torch.int32).long()
    return bits.where(bits >= 0, -(bits & _LOW) - 1)
