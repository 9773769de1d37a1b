"""Which weights computed a request: weights can be replaced while the engine runs (weight_update.py)."""

from __future__ import annotations

import threading
from bisect import bisect_right

from paceline.scheduler.tracked_request import TrackedRequest


class WeightVersions:
    """The versions of the weights since the start, and which of them a request was computed with."""

    def __init__(self, version: str = "0") -> None:
        self._times: list[float] = []  # of each replacement
        self._versions = [version]
        self.updating = threading.Lock()  # one update at a time

    @property
    def current(self) -> str:
        return self._versions[-1]

    @property
    def num_updates(self) -> int:
        return len(self._times)

    def replace(self, version: str, now: float) -> None:
        self._times.append(now)
        self._versions.append(version)

    def of(self, request: TrackedRequest) -> tuple[str, ...]:
        """The versions that computed the output of a request that is ending now, oldest first: several if the weights
        were replaced between its tokens."""
        started = request.first_token  # what was computed before it, logprobs of the prompt too, was computed again
        first = len(self._times) if started is None else bisect_right(self._times, started)
        return tuple(self._versions[first:])
