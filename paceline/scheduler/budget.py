"""What fits.

Memory is counted in pages, never in tokens: a prompt of 17 tokens costs two pages of 16. Admitting too much ends
in a retraction, admitting too little idles the GPU; so what counts is not how much is in use now but the most
that will be in use at any time from now on, if every request ends where it is expected to.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FEW = 32  # finished requests below which their lengths say too little
_WINDOW = 512


class OutputLengths:
    """How many tokens a request will still produce, from how long the last few hundred were."""

    def __init__(self) -> None:
        # How far expectation leans towards the worst case: careful at first, bolder while nothing goes wrong.
        self.caution = 0.7
        self._recent: deque[int] = deque(maxlen=_WINDOW)
        self._fresh = 0
        self._sorted: Floats = np.empty(0)
        self._sums_above: Floats = np.zeros(1)

    def record(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._fresh += 1

    def step_went_well(self) -> None:
        self.caution = max(0.1, self.caution * 0.995)

    def had_to_retract(self) -> None:
        self.caution = min(1.0, self.caution + 0.2)

    def expected_remaining(self, generated: Ints, most: Ints) -> Ints:
        """Expected further tokens of requests that have `generated` so far and can have `most` more."""
        if len(self._recent) < _FEW:
            careful: Ints = np.ceil(most * self.caution).astype(np.int64)
            return careful
        if self._fresh * 16 > len(self._recent):
            self._sorted = np.sort(np.array(self._recent, dtype=np.float64))
            self._sums_above = np.append(self._sorted[::-1].cumsum()[::-1], 0.0)
            self._fresh = 0
        # The mean of those recent outputs that were longer than this one is by now; beyond the longest of them
        # nothing is known but `most`.
        first_longer = np.searchsorted(self._sorted, generated, side="right")
        num_longer = len(self._sorted) - first_longer
        mean = self._sums_above[first_longer] / np.maximum(num_longer, 1) - generated
        likely = np.where(num_longer > 0, mean * (1.0 + self.caution), most * self.caution)
        expected: Ints = np.minimum(most, np.ceil(np.maximum(likely, 1.0))).astype(np.int64)
        return expected


class MemoryForecast:
    """The predicted peak of memory over all running requests, in pages.

    Sorted by expected remaining output, descending: when the i-th request ends, the first i are still there and
    have all grown by its remaining output. The peak is the largest of these moments. `own` are the tokens in pages
    that only a request itself holds, with those its prompt has yet to fill; what several share is counted once, by
    the caller. The count is exact: rounding every request up to a page on its own would cost a page each.
    """

    def __init__(self, page_size: int, own: Ints, remaining: Ints) -> None:
        size = self._page_size = page_size
        order = np.argsort(-remaining, kind="stable")
        self._own, self._remaining = own[order], remaining[order]
        # peaks[i] = sum over j <= i of ceil((own[j] + remaining[i]) / size), without a loop over pairs: beyond
        # its whole pages, request j needs one more page, two if its last page overflows, none if it has no rest.
        count = len(order)
        ranks = np.arange(1, count + 1)
        rests = np.zeros((count, size), np.int32)
        rests[ranks - 1, self._own % size] = 1
        at_most = rests.cumsum(axis=0).cumsum(axis=1)  # [i, x]: how many of the first i have a rest of x or less
        pages, rest = self._remaining // size, self._remaining % size
        overflowing = np.where(rest > 0, ranks - at_most[ranks - 1, size - np.maximum(rest, 1)], -at_most[:, 0])
        self._peaks = np.cumsum(self._own // size) + ranks * (pages + 1) + overflowing
        # Requests that are asked about in one step are often alike, and one that joins was asked about before.
        self._joining: dict[tuple[int, int], _Joining] = {}

    def peak_with(self, own: int, remaining: int) -> int:
        """The peak if a request with that many own and expected tokens joined."""
        return self._with(own, remaining).peak

    def add(self, own: int, remaining: int) -> None:
        """A request has joined."""
        joining = self._with(own, remaining)
        place = joining.place
        self._own = _inserted(self._own, place, own)
        self._remaining = _inserted(self._remaining, place, remaining)
        self._peaks = np.concatenate([self._peaks[:place], [joining.at_its_end], joining.later])
        self._joining.clear()

    def _with(self, own: int, remaining: int) -> _Joining:
        joining = self._joining.get((own, remaining))
        if joining is None:
            size = self._page_size
            place = int(np.searchsorted(-self._remaining, -remaining, side="right"))
            before = int(((self._own[:place] + (remaining + size - 1)) // size).sum())
            at_its_end = before - (-(own + remaining) // size)
            later = self._peaks[place:] + (self._remaining[place:] + (own + size - 1)) // size
            peak = max(at_its_end, int(self._peaks[:place].max(initial=0)), int(later.max(initial=0)))
            joining = self._joining[own, remaining] = _Joining(peak, place, at_its_end, later)
        return joining


class _Joining(NamedTuple):
    """What one more request would do to an outlook."""

    peak: int
    place: int  # how many run longer
    at_its_end: int  # pages in use
    later: Ints  # pages in use whenever one of those that run less long ends: it is still there


def _inserted(column: Ints, place: int, value: int) -> Ints:
    return np.concatenate([column[:place], [value], column[place:]])
