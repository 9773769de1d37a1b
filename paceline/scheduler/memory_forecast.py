"""Memory forecast: expected output lengths, and the peak memory that running requests will need.

Memory is counted in pages, never in tokens: a prompt of 17 tokens costs two pages of 16. Admitting too much ends in a
retraction, admitting too little idles the GPU. So admission does not look at the memory in use now but at the peak from
now on, if every request ends where it is expected to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32] | Ints

_WINDOW = 512  # finished requests that are remembered
# The prior counts as one finished request whose length has a distribution: that of chat traffic, 300 tokens on average
# with a heavy tail. Lomax: P(length > x) = (1 + x / scale)^-3, with mean scale / 2.
_PRIOR_SCALE = 600.0
# Lengths at which the distribution is tabulated: each of the short ones, then in steps of 6%.
_GRID: Floats = np.concatenate([np.arange(64), np.geomspace(64, 1e8, 240)])
_GRID_LENGTHS: list[float] = _GRID.tolist()
_PRIOR_LONGER: Floats = (1.0 + _GRID / _PRIOR_SCALE) ** -3
_MANY = 8  # changes of a forecast: more at once, and it is computed afresh
_PRIOR_TOKENS: Floats = _PRIOR_SCALE / 2 * (1.0 - (1.0 + _GRID / _PRIOR_SCALE) ** -2)


class OutputLengths:
    """Expected remaining output of a request: one formula, for a prior and the last few hundred finished requests.

    It is the mean over those that were longer than this one is now, each cut off where this one must end.
    """

    def __init__(self) -> None:
        # How far the expectation leans towards the worst case (SGLang: new_token_ratio): it starts high, decays with
        # every step and rises with every retraction.
        self.caution = 0.7
        self._recent: deque[int] = deque(maxlen=_WINDOW)
        self._fresh = 0
        self._longer = _PRIOR_LONGER  # number of outputs longer than each length of the grid
        self._tokens = _PRIOR_TOKENS  # tokens of all outputs, each cut off at that length
        self._longer_at: list[float] = self._longer.tolist()
        self._tokens_at: list[float] = self._tokens.tolist()

    def record(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._fresh += 1

    def on_step(self) -> None:
        self.caution = max(0.1, self.caution * 0.995)

    def on_retraction(self) -> None:
        self.caution = min(1.0, self.caution + 0.2)

    def expected_remaining(self, generated: Ints, max_remaining: Ints) -> Ints:
        """Expected further tokens of requests that have `generated` so far and can have up to `max_remaining` more."""
        if self._fresh * 16 > len(self._recent):
            self._tabulate()
        tokens = np.interp(generated + max_remaining, _GRID, self._tokens) - np.interp(generated, _GRID, self._tokens)
        likely = tokens / np.interp(generated, _GRID, self._longer) * (1.0 + self.caution)
        expected: Ints = np.minimum(max_remaining, np.ceil(np.maximum(likely, 1.0))).astype(np.int64)
        return expected

    def expected_remaining_of_one(self, generated: int, max_remaining: int) -> int:
        """The same for one request: arrays of one element would take ten times as long."""
        if self._fresh * 16 > len(self._recent):
            self._tabulate()
        before = _interpolated(generated, self._tokens_at)
        tokens = _interpolated(generated + max_remaining, self._tokens_at) - before
        likely = tokens / _interpolated(generated, self._longer_at) * (1.0 + self.caution)
        return min(max_remaining, math.ceil(max(likely, 1.0)))

    def _tabulate(self) -> None:
        self._fresh = 0
        lengths = np.sort(np.array(self._recent, dtype=np.float64))
        num_within = lengths.searchsorted(_GRID, side="right")
        num_longer = len(lengths) - num_within
        self._longer = _PRIOR_LONGER + num_longer
        self._tokens = _PRIOR_TOKENS + np.append(0.0, lengths.cumsum())[num_within] + num_longer * _GRID
        self._longer_at, self._tokens_at = self._longer.tolist(), self._tokens.tolist()


def _interpolated(length: int, values: list[float]) -> float:
    """As np.interp over _GRID, to the last bit."""
    at = bisect_right(_GRID_LENGTHS, length) - 1
    if at + 1 == len(values):
        return values[at]
    slope = (values[at + 1] - values[at]) / (_GRID_LENGTHS[at + 1] - _GRID_LENGTHS[at])
    return slope * (length - _GRID_LENGTHS[at]) + values[at]


class MemoryForecast:
    """The predicted peak memory of all running requests, in pages.

    Sorted by expected remaining output, descending: when the i-th request ends, the first i are still running and have
    all grown by its remaining output. The peak is the maximum over these moments. `own` counts the tokens in pages that
    only one request holds, including those that its prompt has yet to fill; the caller adds shared pages once. The
    count is exact: rounding each request up to a page separately would cost a page each.
    """

    def __init__(self, page_size: int, rows: Rows, own: Ints, remaining: Ints) -> None:
        order = np.argsort(-remaining, kind="stable")
        self._set(page_size, rows[order], own[order], remaining[order])

    def among(self, rows: Rows) -> MemoryForecast:
        """The forecast of those of its rows that are in `rows`: the others have left."""
        self._insert_pending()
        is_row = np.zeros(1 + max(self._rows.max(initial=0), rows.max(initial=0)), np.bool_)
        is_row[rows] = True
        stays = is_row[self._rows]
        gone = np.flatnonzero(~stays).tolist()
        own, remaining = self._own[stays], self._remaining[stays]
        forecast = MemoryForecast.__new__(MemoryForecast)
        if len(gone) > _MANY:
            forecast._set(self._page_size, self._rows[stays], own, remaining)
            return forecast
        peaks = self._peaks.copy()
        for at in gone:
            peaks[at + 1 :] -= (self._remaining[at + 1 :] + (self._own[at] + self._page_size - 1)) // self._page_size
        forecast._page_size = self._page_size
        forecast._rows, forecast._own, forecast._remaining = self._rows[stays], own, remaining
        forecast._peaks_changed(peaks[stays])
        return forecast

    def _set(self, size: int, rows: Rows, own: Ints, remaining: Ints) -> None:
        """Of rows that are sorted."""
        self._page_size, self._own, self._remaining = size, own, remaining
        self._rows: Rows = rows
        # peaks[i] = sum over j <= i of ceil((own[j] + remaining[i]) / size), without a loop over pairs: beyond its
        # whole pages, request j needs one more page, two if its last page overflows, none if it has no remainder.
        ranks = np.arange(1, len(rows) + 1)
        is_at_most = (own % size).astype(np.int32)[None, :] <= np.arange(size, dtype=np.int32)[:, None]
        at_most = is_at_most.cumsum(axis=1, dtype=np.int32)  # [x, i]: how many of the first i have a remainder <= x
        pages, rest = remaining // size, remaining % size
        overflowing = np.where(rest > 0, ranks - at_most[size - np.maximum(rest, 1), ranks - 1], -at_most[0])
        self._peaks_changed(np.cumsum(self._own // size) + ranks * (pages + 1) + overflowing)

    def _peaks_changed(self, peaks: Ints) -> None:
        """Nothing that follows from the peaks before is valid any more."""
        self._peaks = peaks
        self._highest = int(peaks.max(initial=0))
        self._pending: list[tuple[int, int, int]] = []  # rows that were added and are not in the columns yet
        # Candidates of one step often have the same lengths, and an admitted one was a candidate before.
        self._insertions: dict[tuple[int, int], _Insertion] = {}

    def peak_with(self, own: int, remaining: int) -> int:
        """The peak if a request with that many own and expected tokens were admitted."""
        self._insert_pending()
        return self._insertion(own, remaining).peak

    def missing_with(self, own: int, remaining: int, limit: int) -> int:
        """By how many pages the peak with such a request would be above `limit`; 0 if it would not."""
        # No peak rises by more than all pages of the request: before it ends, the others hold no more than when the
        # next one of them ends. While that fits, the peaks need not be computed.
        pages = -(-(own + remaining) // self._page_size)
        if self._highest + pages <= limit:
            return 0
        self._insert_pending()
        return 0 if self._highest + pages <= limit else max(0, self._insertion(own, remaining).peak - limit)

    def add(self, row: int, own: int, remaining: int) -> None:
        """A request was admitted."""
        self._pending.append((row, own, remaining))
        self._highest += -(-(own + remaining) // self._page_size)
        if (own, remaining) in self._insertions:
            self._insert_pending()

    def _insert_pending(self) -> None:
        """Computes the peaks with the requests that were added."""
        added = self._pending
        if len(added) > _MANY:
            columns = np.array(added, np.int64).T
            rows = np.concatenate([self._rows, columns[0].astype(np.int32)])
            own, remaining = np.concatenate([self._own, columns[1]]), np.concatenate([self._remaining, columns[2]])
            order = np.argsort(-remaining, kind="stable")
            self._set(self._page_size, rows[order], own[order], remaining[order])
            return
        for row, own, remaining in added:
            insertion = self._insertion(own, remaining)
            position = insertion.position
            self._rows = np.concatenate([self._rows[:position], np.array([row], np.int32), self._rows[position:]])
            self._own = _inserted(self._own, position, own)
            self._remaining = _inserted(self._remaining, position, remaining)
            self._peaks_changed(np.concatenate([self._peaks[:position], [insertion.at_its_end], insertion.later]))

    def _insertion(self, own: int, remaining: int) -> _Insertion:
        insertion = self._insertions.get((own, remaining))
        if insertion is None:
            size = self._page_size
            position = int(np.searchsorted(-self._remaining, -remaining, side="right"))
            before = int(((self._own[:position] + (remaining + size - 1)) // size).sum())
            at_its_end = before - (-(own + remaining) // size)
            later = self._peaks[position:] + (self._remaining[position:] + (own + size - 1)) // size
            peak = max(at_its_end, int(self._peaks[:position].max(initial=0)), int(later.max(initial=0)))
            insertion = self._insertions[own, remaining] = _Insertion(peak, position, at_its_end, later)
        return insertion


class _Insertion(NamedTuple):
    """A forecast with one more request."""

    peak: int
    position: int  # how many requests run longer
    at_its_end: int  # pages in use when it ends
    later: Ints  # pages in use when each request that ends earlier does


def _inserted(column: Ints, position: int, value: int) -> Ints:
    return np.concatenate([column[:position], [value], column[position:]])
