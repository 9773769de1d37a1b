"""Draft depth: drafts only where they pay, by measured acceptance and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from paceline.request import Grammar, SamplingParams
from paceline.scheduler.draft_depth import MAX_ROWS, DraftDepth, NgramMatcher
from paceline.scheduler.plan import NO_CHANGES, Plan
from paceline.scheduler.step_time import StepTime
from tests.helpers import harness, request, tracked

RNG = np.random.default_rng(1)
TEXT = RNG.integers(0, 50_000, 400).tolist()
COPY = TEXT * 20
RANDOM = RNG.integers(0, 50_000, 8000).tolist()
MODEL = StepTime(base=0.01, per_prefill_token=0.0, per_decode=0.0, per_context_token=0.0)


def decode_batch(num_rows: int) -> Plan:
    """Only what the time of a pass depends on."""
    ones = np.ones(num_rows, np.int32)
    return Plan(1, ones, ones, ones, ones, ones > 0, num_rows, (), (NO_CHANGES,), num_rows, 0)


class Decoding:
    """Requests that decode given texts. A draft is right if the text repeats the two tokens before it, as the last time
    they occurred; `cost(depth)` is the time of a pass relative to plain decoding."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        accepts: bool = True,
        cost: Callable[[int], float] = lambda depth: 1 + depth / 100,
        first: int = 400,
        plain_s: float = 0.01,
        has_model: bool = False,
        **fields: object,
    ) -> None:
        self.subject = DraftDepth(7, has_model=has_model)
        self.texts, self.accepts, self.cost, self.plain_s = texts, accepts, cost, plain_s
        self.requests = [tracked(text[:first], None, **fields) for text in texts]
        self.depths: list[int] = []

    def step(self, rows: slice = slice(None)) -> int:
        requests = self.requests[rows]
        depth = self.subject.choose(requests)
        self.depths.append(depth)
        seconds = self.plain_s * self.cost(depth)
        self.subject.observe_pass(decode_batch(len(requests)), requests, depth, seconds, MODEL)
        for one, text in zip(requests, self.texts[rows], strict=True):
            at = one.num_tokens
            count = 1 + (self._num_accepted(text, at, depth) if self.accepts else 0)
            one.output.extend(text[at : at + count])
            if depth:
                self.subject.observe_drafts(one, depth, count - 1)
        return depth

    @staticmethod
    def _num_accepted(text: Sequence[int], at: int, depth: int) -> int:
        """The text is one that repeats itself, or random."""
        period = 400
        matches = [text[at + step] == text[at + step - period] for step in range(depth)]
        return matches.index(False) if False in matches else depth

    def run(self, passes: int) -> list[int]:
        return [self.step() for _ in range(passes)]


def test_random_text_never_has_a_draft() -> None:
    assert set(Decoding([RANDOM]).run(2000)) == {0}
    assert set(Decoding([RANDOM[:4000], RANDOM[4000:]]).run(1000)) == {0}


def test_a_copied_text_has_seven_drafts() -> None:
    depths = Decoding([COPY]).run(100)
    assert depths[:3] == [0] * 3, "plain decoding is measured first"
    assert set(depths[24:]) == {7}


@pytest.mark.parametrize("error", [0.1, 0.5, 2.0, 10.0])
def test_a_wrong_step_time_changes_nothing(error: float) -> None:
    """Passes with drafts are compared with passes without."""
    assert Decoding([COPY], plain_s=0.01 * error).run(40)[24:] == [7] * 16
    assert set(Decoding([COPY], plain_s=0.01 * error, cost=lambda depth: 1 + 2 * depth).run(80)[40:]) == {0}


def test_drafts_pay_for_the_batch_if_most_rows_copy() -> None:
    assert Decoding([COPY] * 3 + [RANDOM]).run(60)[-1] == 7
    assert set(Decoding([COPY] + [RANDOM[:2000]] * 15, cost=lambda depth: 1 + depth / 4).run(120)[80:]) == {0}


def test_a_large_batch_has_no_drafts_and_its_requests_get_them_when_it_shrinks() -> None:
    subject = Decoding([COPY] * 256)
    assert set(subject.run(12)) == {0}
    few = slice(0, MAX_ROWS)
    depths = [subject.step(few) for _ in range(80)]
    assert depths[-1] > 0
    assert subject.step(slice(0, MAX_ROWS + 1)) == 0
    assert subject.step(few) > 0, "a batch around the limit is not indexed again and again"


def test_a_slow_verification_ends_drafts_and_is_tried_again_at_bounded_cost() -> None:
    subject = Decoding([TEXT * 100], cost=lambda depth: 12.0 if depth else 1.0)
    subject.run(40)
    drafted = [depth for depth in subject.run(3000) if depth]
    assert 0 < len(drafted) < 30, "tried again, in ever longer intervals"
    subject.cost = lambda depth: 1.1
    depths = subject.run(4200)
    assert 7 in depths, "the host is no longer busy"
    assert depths[-1] == 7


def test_one_slow_pass_changes_nothing() -> None:
    subject = Decoding([COPY])
    subject.run(60)
    subject.cost = lambda depth: 30.0
    subject.step()
    subject.cost = lambda depth: 1.1
    assert set(subject.run(20)) == {7}


def test_rejected_drafts_end_although_the_text_repeats_itself() -> None:
    """The executor drafts something else than the matcher predicts."""
    subject = Decoding([TEXT * 40], accepts=False, cost=lambda depth: 1 + depth / 10)
    depths = subject.run(2000)
    assert 7 in depths
    assert depths.count(0) > 1800


def test_the_depth_that_pays_is_found() -> None:
    """Each draft costs as much as it brings from the third on."""
    assert Decoding([COPY], cost=lambda depth: {0: 1.0, 2: 1.2, 4: 3.0, 7: 6.0}[depth]).run(200)[-1] == 2


def test_the_depth_changes_slowly() -> None:
    """Half of the text is copied, in short runs: executors have a CUDA graph for each depth."""
    rng = np.random.default_rng(2)
    text = list(TEXT)
    while len(text) < 4000:
        begin = len(text) - 400
        text += text[begin : begin + 12] + rng.integers(0, 50_000, 4).tolist()
    depths = Decoding([text]).run(600)
    changes = sum(one != other for one, other in pairwise(depths))
    assert max(depths) > 0
    assert changes < 60


def test_equally_good_depths_do_not_alternate() -> None:
    noise = np.random.default_rng(3)

    def cost(depth: int) -> float:
        """4 and 7 drafts yield the same tokens per second."""
        return {0: 1.0, 2: 1.5, 4: 1.25, 7: 2.0}[depth] * noise.uniform(0.98, 1.02)

    depths = Decoding([TEXT * 20], cost=cost).run(900)[100:]
    assert set(depths) <= {4, 7}
    assert sum(one != other for one, other in pairwise(depths)) < 5, "the other one is tried again after a while"


def test_a_request_with_a_draft_source_has_drafts_from_the_beginning() -> None:
    warm = Decoding([RANDOM])
    warm.run(4)
    source = np.array(TEXT, np.int32)
    one = tracked([1, 2, 3], draft_source=source)
    assert warm.subject.choose([one]) == 7
    for token in RANDOM[1000:1040]:
        one.output.append(token)
        warm.subject.observe_drafts(one, 7, 0)
    assert warm.subject.choose([one]) == 0, "none of it was right"
    one.output.extend(TEXT[:13])
    assert warm.subject.choose([one]) > 0, "the matcher knows the source"


def test_rows_with_a_grammar_have_drafts_and_times_of_their_own() -> None:
    """Here their masks take long, so that drafts do not pay; without them they still do."""
    subject = Decoding([COPY, COPY])
    cost = subject.cost
    assert subject.run(40)[-1] == 7
    free, masked = SamplingParams(), SamplingParams(grammar=Grammar.regex("a*"))
    subject.requests[1].params = masked
    assert subject.run(40)[-1] == 7
    subject.cost = lambda depth: 1 + 2 * depth
    assert set(subject.run(80)[60:]) == {0}
    subject.cost, subject.requests[1].params = cost, free
    assert subject.run(2)[-1] == 7


def test_a_long_prompt_is_indexed_in_steps() -> None:
    one = tracked(RANDOM, None)
    matcher = NgramMatcher(one)
    assert [matcher.catch_up(one, 3000) for _ in range(4)] == [3000, 3000, 2000, 0]
    one.output.extend(RANDOM[2998:3002])
    matcher.catch_up(one, 0)
    assert matcher.rate > 0, "the last two of the four tokens were predicted, from both sides of a step"


def test_a_released_request_is_forgotten() -> None:
    subject = Decoding([COPY])
    subject.run(60)
    subject.subject.forget(subject.requests[0])
    assert subject.subject.choose(subject.requests) == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_scheduler_with_adaptive_drafts_gives_the_same_tokens_in_fewer_passes(overlap: bool) -> None:
    """A vocabulary of one token is copied text; with 64 tokens the toy model's output is random."""
    steps = {}
    for vocab in (1, 64):
        subject = harness(overlap=overlap, draft_tokens=7, adaptive_drafts=True, vocab=vocab, num_pages=400)
        subject.add_all(request([1, 2, 3], 200), request([4, 5], 200))
        steps[vocab] = subject.run()
        subject.assert_reference()
        assert bool(subject.scheduler.counters.drafted_tokens) == (vocab == 1)
    assert steps[1] < 120 < steps[64]


def test_mixed_batches_have_no_drafts_and_positions_stay_exact() -> None:
    subject = harness(overlap=True, draft_tokens=7, adaptive_drafts=True, vocab=1, num_pages=800, chunk_tokens=4)
    subject.add(request([1, 2, 3], 300))
    for number in range(40):
        subject.step()
        if number % 5 == 4:
            subject.add(request(range(1, 12), 2))
    subject.run()
    subject.assert_reference()
    plans = subject.executor.plans
    mixed = [plan for plan in plans if 0 < plan.num_decodes < plan.num_rows]
    assert mixed
    assert all(plan.drafts is None or not plan.drafts.any() for plan in mixed)
    assert any(plan.drafts is not None and plan.drafts.any() for plan in plans)
    assert any(plan.drafts is not None and not plan.drafts.any() for plan in mixed), "behind a pass with drafts"


def test_times_of_passes_with_drafts_do_not_change_the_step_time() -> None:
    subject = harness(draft_tokens=7, adaptive_drafts=True, vocab=1, num_pages=400)
    subject.add(request([1, 2, 3], 300))
    subject.run()
    plain = [plan for plan in subject.executor.plans if plan.drafts is None or not plan.drafts.any()]
    assert subject.scheduler.step_time.num_passes == len(plain) < len(subject.executor.plans)


def test_a_draft_model_is_used_while_it_is_right() -> None:
    decoding = Decoding([COPY], has_model=True)
    for _ in range(60):
        decoding.step()
    assert decoding.depths[:3] == [0, 0, 0] and decoding.depths[-20:] == [7] * 20


def test_a_draft_model_that_is_wrong_is_tried_rarely() -> None:
    """Not by every new request either: they begin with the rate of earlier ones."""
    decoding = Decoding([RANDOM], has_model=True, accepts=False, cost=lambda depth: 1 + depth / 10)
    for _ in range(300):
        decoding.step()
    assert 0 < sum(depth > 0 for depth in decoding.depths) < 40
    later = Decoding([RANDOM], has_model=True, accepts=False, cost=lambda depth: 1 + depth / 10)
    later.subject = decoding.subject
    for _ in range(20):
        later.step()
    assert sum(depth > 0 for depth in later.depths) < 5
    later.depths.clear()
    for _ in range(4000):
        if later.step():
            break
    assert later.depths[-1], "it is never tried again"
