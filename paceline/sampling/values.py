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


class LogprobRun(NamedTuple):
    """Of one row of a plan: the tokens that stand at positions from `first` on."""

    row: int
    first: int
    chosen: npt.NDArray[np.float32]  # [n]
    ids: npt.NDArray[np.int32]  # [n, k]: the likeliest, best first, then those that were asked for by id
    logprobs: npt.NDArray[np.float32]  # [n, k]
