"""The types that sampling and the engine exchange: numpy arrays, so that an executor without torch can use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_TOKEN = -1  # the token of a row whose logits contain NaN
Bits = npt.NDArray[np.int32]  # [rows, words]: token t is allowed if bit t % 32 of word t // 32 is set


Drafts = Sequence[Sequence[int]]  # by sampling row (speculative decoding); empty: no row has any


class Masks(NamedTuple):
    """The allowed tokens of the rows that follow a grammar."""

    # Indices into the tokens that are sampled: a sampling row has one, and behind it one for each of its drafts.
    rows: npt.NDArray[np.int64]
    bits: Bits


LogprobArray = npt.NDArray[np.float32]


class Logprobs(NamedTuple):
    """Logprobs of the sampled tokens, one row each. The widest request decides the number of columns; columns that a
    row did not request have no meaning."""

    chosen: LogprobArray  # [n]
    top_ids: npt.NDArray[np.int32]  # [n, k]: the most likely tokens, best first, ties by lower id
    top: LogprobArray  # [n, k]
    asked: LogprobArray  # [n, m]: of the requested ids

    def of_rows(self, rows: list[int]) -> Logprobs:
        return Logprobs(self.chosen[rows], self.top_ids[rows], self.top[rows], self.asked[rows])


class LogprobRun(NamedTuple):
    """Logprobs of one row of a plan: the prompt tokens at positions from `first` on."""

    row: int
    first: int
    chosen: LogprobArray  # [n]
    ids: npt.NDArray[np.int32]  # [n, k]: the most likely tokens, best first
    logprobs: LogprobArray  # [n, k]
