"""Draft depth: how many drafts each decode row of the next forward pass gets (speculative decoding, `speculate` auto).

The depth is the one with the most expected tokens per second. Both sides of that are measured:

- Tokens: a row with k drafts, each right with probability a, yields 1 + a + ... + a^k tokens. A matcher on the host
  estimates a without any draft: it looks up what followed the last two tokens when they occurred before, and compares
  that with each token that is committed. So text that does not repeat itself never has a draft. Passes with drafts
  show how much more or less often these are right. The drafts of a draft model cannot be predicted on the host: for
  them a is measured by drafts alone, begins with that of earlier requests, and rises again slowly while there are none.
- Time: the seconds of a pass relative to what `StepTime` predicts without drafts, as a median of recent passes, by
  number of rows and depth. Batches with a grammar have times of their own: the host computes a mask for each draft, and
  a pass waits for them if they take longer than its logits. An unknown depth starts with a low time, so that it is
  tried; one that was too slow is tried again after a while, in ever longer intervals, since a busy host may have been
  the reason.
"""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.scheduler.plan import DRAFT_DEPTHS, Plan
from paceline.scheduler.step_time import StepTime
from paceline.scheduler.tracked_request import TrackedRequest

MAX_ROWS = 64  # with more rows a pass is too close to the limit of compute for drafts to pay
MAX_GRAMMAR_ROWS = 16  # with a grammar: the host computes a mask for each row and draft, in the time of a pass
_GAIN = 1.05  # tokens per second relative to plain decoding from which on drafts begin
_CHANGE = 1.05  # relative to the present depth, from which on another one replaces it: executors have graphs by depth
_STEP = 1 / 12  # weight of the newest token in the estimate of a
_SOURCE_RATE = 0.8  # first estimate of a for a request with a draft source
_LOWEST_RATE = 0.05  # rows below it do not contribute enough to look further
_MAX_BETTER = 1.5  # how much more often drafts are assumed to be right than predictions
_MODEL_RATE = 0.7  # first estimate of a for a draft model
_FORGIVE = 1 / 2048  # by which a difference between the two shrinks with each pass without drafts
_MAX_JUDGED = 4 * max(DRAFT_DEPTHS)  # tokens: with more that are new, they are a backlog

_RECENT_PASSES = 8
_PLAIN_PASSES = 3  # without drafts, before the first with drafts: the others are compared with them
_FIRST_RETRY, _LAST_RETRY = 256, 4096  # passes after which times that were measured before are forgotten

_INDEX_TOKENS = 1024  # tokens added to indexes in one step: takes about 0.1 ms
_MAX_INDEX_TOKENS = 16_384  # the last tokens of a longer prompt; an entry takes about 100 bytes
_ROWS_PER_PASS = 16  # whose estimates are updated
_KEY_MASK = (1 << 64) - 1


class NgramMatcher:
    """Predicts each token of a request as the one that followed the last occurrence of the two tokens before it, and
    estimates how often that is right."""

    __slots__ = ("_accepted", "_index", "_key", "_num_seen", "_predicted", "_rate", "rate")

    def __init__(self, request: TrackedRequest) -> None:
        self._index: dict[int, int] = {}  # two tokens, as one integer -> the next
        self._key = 0  # the last two tokens
        # Output tokens that it has seen; negative: so many tokens of draft source and prompt are missing.
        num_before = len(request.draft_source) + len(request.prompt)
        self._num_seen = max(-num_before, len(request.output) - _MAX_INDEX_TOKENS)
        self._rate = _SOURCE_RATE if len(request.draft_source) else 0.0  # of right predictions
        # Of passes with drafts: the rates of accepted drafts and of right predictions. The executor may draft better or
        # worse than this.
        self._accepted = self._predicted = 1.0
        self.rate = self._rate  # the probability that a draft is right

    def _update_rate(self) -> None:
        self.rate = self._rate
        if self._rate >= _LOWEST_RATE:
            self.rate *= min(_MAX_BETTER, self._accepted / max(self._predicted, _LOWEST_RATE))
            self.rate = min(1.0, self.rate)

    def catch_up(self, request: TrackedRequest, limit: int) -> int:
        """Takes the tokens that are new, at most `limit` of a backlog. Returns how many of a backlog it took."""
        num_new = len(request.output) - self._num_seen
        if self._num_seen < 0 or num_new > _MAX_JUDGED:
            return self._index_backlog(request, limit)
        if num_new:
            self._judge(request.output)
            self._accepted += (self._predicted - self._accepted) * _FORGIVE
            self._update_rate()
        return 0

    def _judge(self, output: array[int]) -> int:
        """Compares the tokens that are new with their predictions. Returns how many were right."""
        index, key, rate, num_right = self._index, self._key, self._rate, 0
        for at in range(self._num_seen, len(output)):
            token = output[at]
            is_right = index.get(key) == token
            rate += (is_right - rate) * _STEP
            num_right += is_right
            index[key] = token
            key = (key << 32 | token) & _KEY_MASK
        self._key, self._rate, self._num_seen = key, rate, len(output)
        return num_right

    def _index_backlog(self, request: TrackedRequest, limit: int) -> int:
        tokens = np.concatenate([request.draft_source, request.prompt, np.array(request.output, np.int32)])
        begin = len(tokens) - len(request.output) + self._num_seen
        end = min(begin + limit, len(tokens))
        wide = tokens[max(0, begin - 2) : end].astype(np.int64)
        keys = wide[:-1] << 32 | wide[1:]
        self._index.update(zip(keys[:-1].tolist(), wide[2:].tolist(), strict=True))
        if len(keys):
            self._key = int(keys[-1])
        self._num_seen += end - begin
        return end - begin

    def observe_drafts(self, request: TrackedRequest, num_drafts: int, num_accepted: int) -> None:
        """The last 1 + `num_accepted` tokens of the output are of a pass that verified so many drafts."""
        num_new = len(request.output) - self._num_seen
        if self._num_seen < 0 or num_new > _MAX_JUDGED:  # a backlog
            return
        num_right = self._judge(request.output)
        num_tried = num_accepted + (num_accepted < max(1, num_drafts))
        weight = min(1.0, num_tried * _STEP)
        self._accepted += (num_accepted / num_tried - self._accepted) * weight
        self._predicted += (num_right / max(1, num_new) - self._predicted) * weight
        self._update_rate()


class ModelAcceptance:
    """How often the drafts of a draft model are right for one request."""

    __slots__ = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def catch_up(self, request: TrackedRequest, limit: int) -> int:
        self.rate = _forgiven(self.rate)
        return 0

    def observe_drafts(self, request: TrackedRequest, num_drafts: int, num_accepted: int) -> None:
        self.rate = _observed(self.rate, num_drafts, num_accepted, _STEP)


def _observed(rate: float, num_drafts: int, num_accepted: int, step: float) -> float:
    """The rate after so many drafts, of which so many were accepted."""
    num_tried = num_accepted + (num_accepted < num_drafts)
    return rate + (num_accepted / max(1, num_tried) - rate) * min(1.0, num_tried * step)


def _forgiven(rate: float) -> float:
    """A low rate rises with every pass, so that drafts are tried again."""
    return max(rate, rate + (_MODEL_RATE - rate) * _FORGIVE)


class _PassTimes:
    """Seconds of recent passes with one number of rows and one depth, relative to those expected without drafts."""

    __slots__ = ("_first", "_last_pass", "_recent", "_retry_passes", "num_samples", "ratio")

    def __init__(self, first: float) -> None:
        self._first = first
        self._retry_passes = _FIRST_RETRY
        self._last_pass = 0
        self._forget()

    def _forget(self) -> None:
        self._recent = deque([self._first], maxlen=_RECENT_PASSES)
        self.ratio = self._first
        self.num_samples = 0

    def observe(self, ratio: float, now: int) -> None:
        self._recent.append(ratio)
        self._last_pass = now
        self.ratio = statistics.median(self._recent)
        self.num_samples += 1
        if self.num_samples >= _RECENT_PASSES:  # in use, no longer on trial
            self._retry_passes = _FIRST_RETRY

    def expire(self, now: int) -> None:
        """Forgets what was measured long ago, so that the depth is tried again."""
        if now - self._last_pass >= self._retry_passes and self.ratio > self._first:
            self._retry_passes = min(2 * self._retry_passes, _LAST_RETRY)
            self._last_pass = now
            self._forget()


class DraftDepth:
    def __init__(self, max_drafts: int, *, has_model: bool = False) -> None:
        """has_model: drafts come from a draft model."""
        self._depths = [depth for depth in DRAFT_DEPTHS if depth <= max_drafts]
        self._matchers: dict[TrackedRequest, NgramMatcher | ModelAcceptance] = {}
        self._model_rate = _MODEL_RATE if has_model else None  # with which new requests begin
        # By rows, rounded up to a power of two, depth, and whether some row has a grammar.
        self._times: dict[tuple[int, int, bool], _PassTimes] = {}
        self._num_passes = 0
        self._depth = 0  # of the last pass
        self._next_row = 0  # whose estimate is updated next

    def choose(self, requests: Sequence[TrackedRequest]) -> int:
        """The drafts per row of a decode batch of these requests."""
        self._num_passes += 1
        if self._model_rate is not None:
            self._model_rate = _forgiven(self._model_rate)
        self._depth = self._choose(requests)
        return self._depth

    def _choose(self, requests: Sequence[TrackedRequest]) -> int:
        if len(requests) > MAX_ROWS:
            return 0  # matchers stay, for a batch that shrinks again: indexing 64 prompts takes milliseconds
        has_grammar = _has_grammar(requests)
        if has_grammar and len(requests) > MAX_GRAMMAR_ROWS:
            return 0
        self._catch_up(requests)
        rates = [0.0 if matcher is None else matcher.rate for matcher in map(self._matchers.get, requests)]
        if max(rates, default=0.0) < _LOWEST_RATE:
            return 0
        return self._most_profitable(np.array(rates), has_grammar)

    def _catch_up(self, requests: Sequence[TrackedRequest]) -> None:
        """Updates some of the estimates, in turns: looking at 64 rows in every pass takes longer than at four times the
        tokens in every fourth."""
        budget, matchers = _INDEX_TOKENS, self._matchers
        first = self._next_row if self._next_row < len(requests) else 0
        self._next_row = first + _ROWS_PER_PASS
        for request in requests[first : self._next_row]:
            matcher = matchers.get(request)
            if matcher is None:
                matcher = matchers[request] = self._new_matcher(request)
            budget -= matcher.catch_up(request, budget)

    def _new_matcher(self, request: TrackedRequest) -> NgramMatcher | ModelAcceptance:
        if self._model_rate is None:
            return NgramMatcher(request)
        return ModelAcceptance(_SOURCE_RATE if len(request.draft_source) else self._model_rate)

    def _most_profitable(self, rates: npt.NDArray[np.float64], has_grammar: bool) -> int:
        num_rows = len(rates)
        plain = self._times_of(num_rows, 0, has_grammar)
        if plain.num_samples < _PLAIN_PASSES:
            return 0
        gains = {0: 1.0}  # tokens per second relative to plain decoding
        powers = np.cumsum(rates[:, None] ** np.arange(max(DRAFT_DEPTHS) + 1), axis=1).sum(axis=0) / num_rows
        for depth in self._depths:
            times = self._times_of(num_rows, depth, has_grammar)
            times.expire(self._num_passes)
            gains[depth] = float(powers[depth]) / times.ratio
        best = max(gains, key=gains.__getitem__)
        present = gains[self._depth]
        if self._depth and present > 1 and gains[best] < _CHANGE * present:
            return self._depth
        return best if gains[best] >= _GAIN else 0

    def _times_of(self, num_rows: int, depth: int, has_grammar: bool) -> _PassTimes:
        key = 1 << (num_rows - 1).bit_length(), depth, has_grammar
        if key not in self._times:
            self._times[key] = _PassTimes(1.05 + key[0] * depth / 400 if depth else 1.0)
        return self._times[key]

    def observe_pass(
        self, plan: Plan, requests: Sequence[TrackedRequest], depth: int, seconds: float, model: StepTime
    ) -> None:
        """A decode batch of these requests with `depth` drafts per row took so long."""
        if depth in (0, *self._depths) and plan.num_decodes <= MAX_ROWS:  # not where all rows are about to end
            expected, has_grammar = model.seconds(0, plan.num_decodes, plan.num_context_tokens), _has_grammar(requests)
            if depth:  # relative to what passes without drafts take now: the model may be wrong for these rows
                expected *= self._times_of(plan.num_decodes, 0, has_grammar).ratio
            if expected > 0:
                times = self._times_of(plan.num_decodes, depth, has_grammar)
                times.observe(seconds / expected, self._num_passes)

    def observe_drafts(self, request: TrackedRequest, num_drafts: int, num_accepted: int) -> None:
        """A pass whose rows were to have drafts had so many of this request; its tokens are committed."""
        matcher = self._matchers.get(request)
        if matcher is not None:
            matcher.observe_drafts(request, num_drafts, num_accepted)
        if self._model_rate is not None:
            self._model_rate = _observed(self._model_rate, num_drafts, num_accepted, _STEP)

    def forget(self, request: TrackedRequest) -> None:
        self._matchers.pop(request, None)


def _has_grammar(requests: Sequence[TrackedRequest]) -> bool:
    return any(request.params.grammar is not None for request in requests)
