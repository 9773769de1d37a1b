"""How long forward passes take, learned from those measured so far.

`StepTimeFit` fits t0 + a·prefill tokens + b·decodes + c·context tokens: it estimates waits, and the same model drives
the virtual GPU. Coefficients are never negative: a pass with more work does not get faster.

`MixedBatchTimes` turns an inter-token latency target into a token budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Plan

_REFIT_PASSES = 16  # a fit costs as much as planning several decode batches
_DECAY = 0.998  # weight of a pass relative to the next one: the last few hundred count
_SCALE = np.array([1.0, 1e-3, 1e-2, 1e-5])  # scales the four features to the same order of magnitude
_RECENT_BATCHES = 8
_FIRST_TOKENS = 1024  # prompt tokens of a mixed batch before any batch was measured
_MAX_STRETCH = 4  # a mixed batch takes at most this many times its target, if its decodes are slow


@dataclass(frozen=True, slots=True)
class StepTime:
    base: float
    per_prefill_token: float
    per_decode: float
    per_context_token: float
    per_draft_token: float = 0.0  # the virtual GPU; fits do not observe it

    def seconds(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        return (
            self.base
            + self.per_prefill_token * num_prefill_tokens
            + self.per_decode * num_decodes
            + self.per_context_token * num_context_tokens
        )

    def of(self, plan: Plan) -> float:
        seconds = self.seconds(plan.num_prefill_tokens, plan.num_decodes, plan.num_context_tokens)
        return seconds + self.per_draft_token * plan.num_drafts


class _Batch(NamedTuple):
    weighted: float  # prompt tokens, each counted as often as its context makes it take longer
    tokens: int
    seconds: float


class StepTimeFit:
    """Least squares with exponential decay over the passes so far; features with a negative weight are left out."""

    def __init__(self) -> None:
        self.num_passes = 0
        self._pending: list[tuple[float, float, float, float, float]] = []  # features and seconds, not in the sums yet
        self._moments: npt.NDArray[np.float64] = np.zeros((4, 4))
        self._targets: npt.NDArray[np.float64] = np.zeros(4)
        self._model: StepTime | None = None
        self._fitted_passes = 0

    def observe(self, plan: Plan, seconds: float) -> None:
        self._pending.append((1.0, plan.num_prefill_tokens, plan.num_decodes, plan.num_context_tokens, seconds))
        self.num_passes += 1
        if len(self._pending) >= 256:
            self._accumulate()

    def model(self) -> StepTime | None:
        """The fitted model, or None after fewer than 8 passes."""
        if self.num_passes < 8:
            return None
        if self._model is None or self.num_passes - self._fitted_passes >= _REFIT_PASSES:
            self._accumulate()
            self._model, self._fitted_passes = StepTime(*self._solve().tolist()), self.num_passes
        return self._model

    def _accumulate(self) -> None:
        if not self._pending:
            return
        passes = np.array(self._pending)
        self._pending.clear()
        features, seconds = passes[:, :4] * _SCALE, passes[:, 4]
        weights = _DECAY ** np.arange(len(passes) - 1, -1, -1)
        weighted = features * weights[:, None]
        decay = _DECAY ** len(passes)
        self._moments = self._moments * decay + weighted.T @ features
        self._targets = self._targets * decay + weighted.T @ seconds

    def _solve(self) -> npt.NDArray[np.float64]:
        kept = [0, 1, 2, 3]
        ridge = 1e-9 * max(1e-12, float(np.trace(self._moments)))
        while True:
            moments = self._moments[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
            weights = np.linalg.solve(moments, self._targets[kept])
            if (weights >= 0).all() or len(kept) == 1:
                result: npt.NDArray[np.float64] = np.zeros(4)
                result[kept] = np.maximum(weights, 0.0)
                result *= _SCALE
                return result
            kept.pop(int(weights.argmin()))


class MixedBatchTimes:
    """How many prompt tokens fit into a mixed batch of a given duration, by the last few batches.

    Their number is scaled by the time of the whole batch, decodes included. Time per prompt token falls with their
    number, so the budget grows to the target from below, within a few batches. Only batches of similar size count,
    without the slowest: it may have waited for something else. A prompt token counts as often as its context makes it
    take longer, so a batch after a long context has fewer tokens.
    """

    def __init__(self, double_cost_context: int) -> None:
        """`double_cost_context`: context at which a prompt token takes twice as long as without any."""
        self._double_cost_context = double_cost_context
        self._mixed: deque[_Batch] = deque(maxlen=_RECENT_BATCHES)
        self._prefills: deque[_Batch] = deque(maxlen=_RECENT_BATCHES)
        self._rates: tuple[float, float, float] | None = None

    def observe(self, plan: Plan, seconds: float) -> None:
        num_decodes, num_tokens = plan.num_decodes, plan.num_prefill_tokens
        if num_tokens and seconds > 0:
            pairs = int(plan.starts[num_decodes:].astype(np.int64) @ plan.lengths[num_decodes:])
            recent = self._mixed if num_decodes else self._prefills
            recent.append(_Batch(num_tokens + pairs / self._double_cost_context, num_tokens, seconds))
            self._rates = None

    def tokens_within(self, seconds: float) -> tuple[float, float]:
        """Prompt tokens within `seconds`, and the same weighted by context. Prompts get half of the time or more, so
        that they make progress beside slow decodes."""
        if not self._mixed and not self._prefills:
            return _FIRST_TOKENS, _FIRST_TOKENS
        tokens_per_s, weighted_per_s, half_s = self._rates = self._rates or self._find_rates()
        seconds = max(seconds, min(half_s, _MAX_STRETCH * seconds))
        return seconds * tokens_per_s, seconds * weighted_per_s

    def _find_rates(self) -> tuple[float, float, float]:
        """Prompt tokens per second, the same weighted by context, and the duration of which prompts get half."""
        recent = self._mixed or self._prefills
        similar = max(one.weighted for one in recent) / 2
        large = sorted((one for one in recent if one.weighted >= similar), key=lambda one: one.weighted / one.seconds)
        if len(large) > 1:
            del large[0]  # the slowest
        weighted, tokens, seconds = (sum(column) for column in zip(*large, strict=True))
        half_s = 0.0
        if self._mixed:
            # As many tokens as the fastest batch computes in half the time of these
            fastest = max(one.weighted / one.seconds for one in (*self._prefills, *self._mixed))
            half_s = fastest * seconds / len(large) / 2 * seconds / weighted
        return tokens / seconds, weighted / seconds, half_s
