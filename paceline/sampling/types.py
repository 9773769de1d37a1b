"""What passes between sampling and the engine: plain arrays, so that an executor without torch knows them too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_TOKEN = -1  # of a row whose logits are no numbers
Bits = npt.NDArray[np.int32]  # [rows, words]: token t may come if bit t % 32 of word t // 32 is set


class Masks(NamedTuple):
    """Which tokens may come, for the rows of a pass that obey a grammar."""

    rows: npt.NDArray[np.int64]  # of the sampling rows
    bits: Bits


Chances = npt.NDArray[np.float32]


class Logprobs(NamedTuple):
    """Of the tokens that a pass chose, a row each. Each has as many columns as the one that asks most; what a row did
    not ask for has no meaning."""

    chosen: Chances  # [n]
    top_ids: npt.NDArray[np.int32]  # [n, k]: the likeliest, best first, equals by lower id
    top: Chances  # [n, k]
    asked: Chances  # [n, m]: of the ids that were asked for

    def of_rows(self, rows: list[int]) -> Logprobs:
        return Logprobs(self.chosen[rows], self.top_ids[rows], self.top[rows], self.asked[rows])


class LogprobRun(NamedTuple):
    """Of one row of a plan: the prompt's tokens that stand at positions from `first` on."""

    row: int
    first: int
    chosen: Chances  # [n]
    ids: npt.NDArray[np.int32]  # [n, k]: the likeliest, best first
    logprobs: Chances  # [n, k]
