"""What an executor is: something that carries plans out, in the order they are launched."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.sampling.types import Bits, LogprobRun, Logprobs, Masks
from paceline.scheduler.plan import Plan


class Result(NamedTuple):
    """What a pass yielded, on the host."""

    # One for each sampling row, in row order; or counts[i] of row i, end to end. NO_TOKEN: its logits are no numbers.
    tokens: npt.NDArray[np.int32]
    device_s: float | None = None  # how long the device took, where that is measured
    counts: npt.NDArray[np.int32] | None = None
    idle_s: float | None = None  # how long the device had nothing to do before, where that is measured
    logprobs: Logprobs | None = None  # of the tokens, if somebody asks
    prompt_logprobs: tuple[LogprobRun, ...] = ()
    fetch_s: float | None = None  # how long the pages it fetched were on their way from host memory, where measured


class Pending(Protocol):
    def wait(self) -> Result:
        """Blocks until the pass has run."""


class Executor(Protocol):
    def launch(self, plan: Plan) -> Pending:
        """Starts a pass and returns at once. Passes run in launch order."""


class BusyExecutor(Executor, Protocol):
    """One that makes use of idle time."""

    def run_background_work(self) -> bool:
        """Does a little of what later passes will be glad of. Whether there was something. No pass is in flight."""


class DelayedPending(Pending, Protocol):
    def mask_buffer(self, num_rows: int, num_words: int) -> Bits:
        """Where the bits of this pass's masks are to be written: memory from which the device takes them without
        another copy. Called once, when the pass before has been waited for and before another is launched."""

    def sample(self, masks: Masks) -> None:
        """The tokens can be chosen now; the masks' bits lie in the room. Called once, before `wait`."""


class MaskedExecutor(Executor, Protocol):
    """One whose rows can be told what they may say."""

    def prepare(self, plan: Plan) -> None:
        """Does what launching this plan takes and what does not depend on the passes before. May be left out; else
        the next launch is of this plan."""

    def launch_delayed(self, plan: Plan) -> DelayedPending:
        """As `launch`, when the host does not know yet what some rows may say: the pass runs up to its logits, and
        goes on with `sample`, which must be called before the next launch."""
