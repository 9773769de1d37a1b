"""Step time model: t0 + a·prefill tokens + b·decodes + c·context tokens, fitted to measured passes.

It turns an inter-token latency target into a token budget, and drives the virtual GPU. Coefficients are never negative:
a pass with more work does not get faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import Plan

_DECAY = 0.998  # weight of a pass relative to the next one: the last few hundred count
_SCALE = np.array([1.0, 1e-3, 1e-2, 1e-5])  # scales the four features to the same order of magnitude


@dataclass(frozen=True, slots=True)
class StepTime:
    base: float
    per_prefill_token: float
    per_decode: float
    per_context_token: float

    def seconds(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        return (
            self.base
            + self.per_prefill_token * num_prefill_tokens
            + self.per_decode * num_decodes
            + self.per_context_token * num_context_tokens
        )

    def of(self, plan: Plan) -> float:
        return self.seconds(plan.num_prefill_tokens, plan.num_decodes, plan.num_context_tokens)

    def prefill_tokens_within(self, seconds: float, num_decodes: int, num_context_tokens: int) -> int | None:
        """Number of prompt tokens that fit beside the decodes; None if they cost nothing."""
        if self.per_prefill_token <= 0:
            return None
        spare = seconds - self.seconds(0, num_decodes, num_context_tokens)
        return max(0, int(spare / self.per_prefill_token))


class StepTimeFit:
    """Least squares with exponential decay over the passes so far; features with a negative weight are left out."""

    def __init__(self) -> None:
        self.num_passes = 0
        self._pending: list[tuple[float, float, float, float, float]] = []  # features and seconds, not in the sums yet
        self._moments: npt.NDArray[np.float64] = np.zeros((4, 4))
        self._targets: npt.NDArray[np.float64] = np.zeros(4)
        self._model: StepTime | None = None

    def observe(self, plan: Plan, seconds: float) -> None:
        self._pending.append((1.0, plan.num_prefill_tokens, plan.num_decodes, plan.num_context_tokens, seconds))
        self.num_passes += 1
        if len(self._pending) >= 256:
            self._accumulate()

    def model(self) -> StepTime | None:
        """The fitted model, or None after fewer than 8 passes."""
        if self.num_passes < 8:
            return None
        if self._pending:
            self._accumulate()
            self._model = StepTime(*self._solve().tolist())
        return self._model

    def _accumulate(self) -> None:
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
