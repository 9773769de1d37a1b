"""ServiceMeter: how much slower a replica serves than it predicts, measured by when it reports.

A replica with work reports after its passes. One that is not scheduled, or whose device stalls, predicts as ever and
reports late. The time by which it is late, as part of the time in which it had work, is what it does not serve.
"""

from __future__ import annotations

import math

_DECAY_S = 30.0  # after which a stall counts a third
_PRIOR_S = 1.0  # of service: one late report proves little


class ServiceMeter:
    def __init__(self) -> None:
        self.since = math.inf  # the last report, or the beginning of its work; inf: it has none
        self.slowdown = 1.0  # as of the last report
        self._stalled = self._observed = self._at = 0.0

    def began(self, now: float) -> None:
        """It has work from now on."""
        self.since = now

    def ended(self) -> None:
        """It has no work left."""
        self.since = math.inf

    def reported(self, now: float, allowed_s: float) -> None:
        """`allowed_s`: between two reports, without being late."""
        self._stalled, self._observed = self._up_to(now, allowed_s)
        self._at, self.slowdown = now, _slowdown(self._stalled, self._observed)
        if self.since < math.inf:
            self.since = now

    def slowdown_at(self, now: float, allowed_s: float) -> float:
        """With the report that has not come yet."""
        return self.slowdown if now - self.since <= allowed_s else _slowdown(*self._up_to(now, allowed_s))

    def _up_to(self, now: float, allowed_s: float) -> tuple[float, float]:
        """Decayed seconds in which it was late, and in which it had work."""
        kept = math.exp((self._at - now) / _DECAY_S)
        gap = max(0.0, now - self.since)
        return self._stalled * kept + max(0.0, gap - allowed_s), self._observed * kept + gap


def _slowdown(stalled: float, observed: float) -> float:
    return (observed + _PRIOR_S) / (observed - stalled + _PRIOR_S)
