"""The virtual GPU: charges a step-time model to a clock and computes nothing.

The scheduler in front of it is the real one, so a run shows what it would decide on such a device. On a `VirtualClock`
a day passes in seconds; on a `WallClock` passes take as long as on the modelled device, and a server behaves like one
with a GPU.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.engine.executor import Capabilities, Executor, Result
from paceline.engine.pooling import PooledStates
from paceline.engine.virtual.drafts import DraftVerifier
from paceline.scheduler.plan import Plan, Swap
from paceline.scheduler.step_time import StepTime

# One H200 with a 0.6B model in bfloat16: weights read once a pass, KV at 4.2 TB/s, prefill at half the matrix rate. A
# draft reads no KV of its own: it is charged as a prompt token at the full rate, an estimate until it is measured.
SMALL_MODEL_H200 = StepTime(
    base=0.9e-3,
    per_prefill_token=3.0e-6,
    per_decode=2.0e-6,
    per_context_token=114_688 / 4.2e12,
    per_draft_token=1.5e-6,
)


class Clock(Protocol):
    @property
    def now(self) -> float: ...

    def advance_to(self, time: float) -> None:
        """Advances to `time`; does nothing if it is later already."""


class PassTime(Protocol):
    """How long passes take; called once per pass, in order."""

    def of(self, plan: Plan) -> float: ...


class VirtualClock:
    """Time that advances only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time cannot run backwards by {-seconds} seconds"
        self.now += seconds

    def advance_to(self, time: float) -> None:
        self.now = max(self.now, time)


class WallClock:
    """Real time: waiting for a pass sleeps until it would have ended."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def advance_to(self, time_: float) -> None:
        seconds = time_ - time.monotonic()
        if seconds > 0:
            time.sleep(seconds)


class HostLink:
    """The link between a virtual GPU and host memory. Pages are spilled and fetched concurrently with passes, each
    direction one plan at a time, in the order of the CUDA executor (cuda/swap.py). Gathering and placing pages on the
    device takes no time here."""

    def __init__(self, page_s: float) -> None:
        self._page_s = page_s
        self._idle_out = self._idle_in = 0.0  # when each direction becomes idle
        self._leaving = deque([0.0, 0.0], 2)  # when the two spill buffers are empty again, the last used one last
        self._filled: dict[int, float] = {}  # when each host page is filled

    def starts(self, swap: Swap, now: float, idle_from: float) -> float:
        """When a pass that is launched `now` can start, on a device that is busy until `idle_from`."""
        begins = max(now, idle_from)
        if len(swap.spill_hosts):
            begins = max(begins, self._leaving[0])
            self._idle_out = max(self._idle_out, begins) + self._page_s * len(swap.spill_hosts)
            self._leaving.append(self._idle_out)
            self._filled.update(dict.fromkeys(swap.spill_hosts.tolist(), self._idle_out))
        if len(swap.fetch_hosts):
            filled = max(self._filled[host] for host in swap.fetch_hosts.tolist())
            self._idle_in = max(self._idle_in, now, filled) + self._page_s * len(swap.fetch_hosts)
            begins = max(begins, self._idle_in)
        return begins


class _VirtualPending:
    def __init__(self, clock: Clock, ends: float, result: Result) -> None:
        self._clock = clock
        self._ends = ends
        self.result = result  # known at once

    def wait(self) -> Result:
        self._clock.advance_to(self._ends)
        return self.result


class VirtualExecutor(Executor):
    """Charges each pass its `step_time`. Passes run one after the other, whatever the host does meanwhile."""

    capabilities = Capabilities(pooling=True)

    def __init__(
        self,
        clock: Clock,
        step_time: PassTime = SMALL_MODEL_H200,
        tokens: Callable[[Plan], np.ndarray] | None = None,
        launching: Callable[[Plan], float] | None = None,
        link: HostLink | None = None,
        drafts: DraftVerifier | None = None,
    ) -> None:
        """`tokens`: the tokens of a plan's sampling rows; zeros if not given. `launching`: seconds for which the host
        launches kernels of a pass while the device already runs the first ones; none if not given. `link`: to host
        memory; if not given, moving pages takes no time. `drafts`: verifies the drafts of plans that have any."""
        self._clock = clock
        self._step_time = step_time
        self._tokens = tokens
        self._launching = launching
        self._link = link
        self._drafts = drafts
        self._idle_from = 0.0
        self._embeddings: dict[int, npt.NDArray[np.float64]] = {}  # by slot
        self.busy_s = 0.0
        self.span = (0.0, 0.0)  # start and end of the last launched pass

    def launch(self, plan: Plan) -> _VirtualPending:
        seconds = self._step_time.of(plan)
        starts = max(self._idle_from, self._clock.now)
        if self._link is not None and plan.swap is not None:
            starts = self._link.starts(plan.swap, self._clock.now, self._idle_from)
        idle_s = starts - self._idle_from
        if self._launching is not None:
            launched = self._clock.now + self._launching(plan)
            seconds = max(seconds, launched - starts)  # its last kernel cannot end before it is launched
            self._clock.advance_to(launched)
        self._idle_from = starts + seconds
        self.busy_s += seconds
        self.span = (starts, self._idle_from)
        yielded, counts, num_drafts = plan, None, None
        if self._drafts is not None:
            yielded, counts, num_drafts = self._drafts.verify(plan)
        assert plan.drafts is None or counts is not None, "a plan has drafts, and this executor verifies none"
        count = int(np.count_nonzero(yielded.samples))
        tokens = np.zeros(count, np.int32) if self._tokens is None else self._tokens(yielded)
        result = Result(tokens, seconds, counts, num_drafts, idle_s, pooled=self._pool(plan))
        return _VirtualPending(self._clock, self._idle_from, result)

    def _pool(self, plan: Plan) -> tuple[PooledStates, ...]:
        """Embeddings are synthetic too: a vector that depends on the prompt only, the same for each of its chunks."""
        for join in plan.joins:
            self._embeddings.pop(join.slot, None)
            if join.pooling is not None:
                rng = np.random.default_rng(zlib.crc32(join.tokens[: join.num_prompt_tokens].tobytes()))
                self._embeddings[join.slot] = rng.standard_normal(_EMBEDDING_SIZE)
        if not self._embeddings:
            return ()
        slots = plan.slots.tolist()
        return tuple(
            PooledStates(row, int(plan.starts[row]), self._embeddings[slots[row]])
            for row in range(plan.num_decodes, plan.num_rows)
            if slots[row] in self._embeddings
        )


def slowed(step_time: StepTime, factor: float) -> StepTime:
    return StepTime(*(value * factor for value in dataclasses.astuple(step_time)))


_NEVER = 1 << 40
_EMBEDDING_SIZE = 64


class VirtualTokens:
    """The tokens of a virtual model: a function of the prompt and the position, whatever else runs or was retracted.

    So a client detects lost and repeated tokens. An output ends by itself after 16 to 255 tokens, a length that depends
    on the prompt too.
    """

    def __init__(self, max_running: int, first: int, vocab_size: int, end: int) -> None:
        """Token ids start at `first`; `end` is the EOS token."""
        self._first, self._count, self._end = first, vocab_size - first, end
        self._base = np.zeros(max_running, np.int64)
        self._ends = np.zeros(max_running, np.int64)  # position at which the output of this slot ends

    def __call__(self, plan: Plan) -> np.ndarray:
        for join in plan.joins:
            prompt = join.tokens[: join.num_prompt_tokens]
            self._base[join.slot] = zlib.crc32(prompt.tobytes())
            ends = _NEVER if join.params.ignore_eos else self.length(prompt)
            self._ends[join.slot] = len(prompt) + ends
        rows = np.flatnonzero(plan.samples)
        slots = plan.slots[rows]
        positions = plan.starts[rows].astype(np.int64) + plan.lengths[rows]
        tokens = self._first + (self._base[slots] + 7919 * positions) % self._count
        tokens[positions >= self._ends[slots]] = self._end
        return tokens.astype(np.int32)

    @staticmethod
    def length(prompt: np.ndarray) -> int:
        """Output tokens for this prompt, without the EOS token."""
        return 16 + zlib.crc32(prompt.tobytes(), 1) % 240

    def answer(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        """The first tokens after `prompt` with EOS ignored: the reference implementation of `__call__`."""
        base = zlib.crc32(prompt.tobytes())
        return [
            self._first + (base + 7919 * position) % self._count
            for position in range(len(prompt), len(prompt) + num_tokens)
        ]


class ClockTokens:
    """Tokens that encode when their pass ended, in units of `TICK_S`, so a receiver can measure their latency."""

    TICK_S = 0.0005

    def __init__(self, first: int, vocab_size: int, ends: Callable[[], float]) -> None:
        """`ends`: returns when the pass being launched will end."""
        self._first, self._count, self._ends = first, vocab_size - first, ends

    def __call__(self, plan: Plan) -> np.ndarray:
        token = self._first + int(self._ends() / self.TICK_S) % self._count
        return np.full(int(np.count_nonzero(plan.samples)), token, np.int32)

    def age(self, token: int, now: float) -> float:
        """Seconds between the end of the token's pass and `now`."""
        ticks = (int(now / self.TICK_S) - (token - self._first)) % self._count
        return ticks * self.TICK_S
