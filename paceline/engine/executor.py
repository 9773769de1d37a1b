"""What an executor is: something that carries plans out, in the order they are launched."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Plan


class Result(NamedTuple):
    """What a pass yielded, on the host."""

    tokens: npt.NDArray[np.int32]  # one for each sampling row, in row order; or counts[i] of row i, end to end
    device_s: float | None = None  # how long the device took, where that is measured
    counts: npt.NDArray[np.int32] | None = None
    idle_s: float | None = None  # how long the device had nothing to do before, where that is measured


class Pending(Protocol):
    def wait(self) -> Result:
        """Blocks until the pass has run."""


class Executor(Protocol):
    def launch(self, plan: Plan) -> Pending:
        """Starts a pass and returns at once. Passes run in launch order."""
