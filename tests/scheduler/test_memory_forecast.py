from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.scheduler.memory_forecast import MemoryForecast, OutputLengths
from tests.helpers import EOS, harness, prompt, request, scheduler

REQUESTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=12)


def naive_peak(requests: list[tuple[int, int]], page_size: int) -> int:
    """The maximum number of pages in use at any moment at which a request ends, one moment after the other."""
    peak = 0
    for _, ends in requests:
        alive = [own for own, remaining in requests if remaining >= ends]
        peak = max(peak, sum(-(-(own + ends) // page_size) for own in alive))
    return peak


@given(REQUESTS, st.tuples(st.integers(0, 50), st.integers(0, 200)), st.sampled_from([1, 4, 16]))
def test_the_predicted_peak_equals_the_naive_simulation(
    requests: list[tuple[int, int]], candidate: tuple[int, int], page_size: int
) -> None:
    own, remaining = (np.array(column, dtype=np.int64) for column in zip(*requests, strict=True))
    forecast = MemoryForecast(page_size, np.arange(len(own)), own, remaining)
    assert forecast.peak_with(*candidate) == naive_peak([*requests, candidate], page_size)
    forecast.add(len(own), *candidate)
    assert forecast.peak_with(3, 7) == naive_peak([*requests, candidate, (3, 7)], page_size)


@given(REQUESTS, REQUESTS, st.tuples(st.integers(0, 50), st.integers(0, 200)), st.integers(0, 400), st.data())
def test_what_is_missing_is_the_peak_above_the_limit_however_many_were_added(
    requests: list[tuple[int, int]],
    added: list[tuple[int, int]],
    candidate: tuple[int, int],
    limit: int,
    data: st.DataObject,
) -> None:
    own, remaining = (np.array(column, dtype=np.int64) for column in zip(*requests, strict=True))
    forecast = MemoryForecast(4, np.arange(len(own)), own, remaining)
    for row, one in enumerate(added, len(own)):
        if data.draw(st.booleans()):
            assert forecast.missing_with(*one, limit) == max(0, naive_peak([*requests, one], 4) - limit)
        forecast.add(row, *one)
        requests.append(one)
    assert forecast.missing_with(*candidate, limit) == max(0, naive_peak([*requests, candidate], 4) - limit)
    assert forecast.peak_with(*candidate) == naive_peak([*requests, candidate], 4)


@given(REQUESTS, st.data())
def test_a_forecast_without_some_requests_is_that_of_the_others(
    requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    own, remaining = (np.array(column, dtype=np.int64) for column in zip(*requests, strict=True))
    forecast = MemoryForecast(4, np.arange(len(own)), own, remaining)
    left = data.draw(st.sets(st.sampled_from(range(len(own)))))
    others = [requests[row] for row in left]
    among = forecast.among(np.array(sorted(left), np.int64))
    assert among.peak_with(3, 7) == naive_peak([*others, (3, 7)], 4)


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(0, 40_000), st.integers(1, 40_000))
def test_the_expectation_of_one_request_is_the_same_as_among_others(
    finished: list[int], generated: int, most: int
) -> None:
    lengths = OutputLengths()
    for length in finished:
        lengths.record(length)
    assert lengths.expected_remaining_of_one(generated, most) == expected(lengths, generated, most)


def expected(lengths: OutputLengths, generated: int, most: int) -> int:
    return int(lengths.expected_remaining(np.array([generated]), np.array([most]))[0])


def test_without_history_the_expectation_is_a_few_hundred_tokens_and_within_the_limit() -> None:
    lengths = OutputLengths()
    assert 300 <= expected(lengths, 0, 32_000) <= 600, "however long the context is"
    assert expected(lengths, 0, 200) > 150, "a short limit is likely to be reached"
    assert expected(lengths, 3000, 32_000) > 3 * expected(lengths, 0, 32_000), "a long output is likely to go on"
    before = expected(lengths, 0, 32_000)
    for _ in range(2000):
        lengths.on_step()
    calm = expected(lengths, 0, 32_000)
    lengths.on_retraction()
    assert calm < expected(lengths, 0, 32_000) < before, "caution decays with every step and rises with a retraction"


def test_every_finished_request_corrects_the_expectation_from_the_first_on() -> None:
    lengths = OutputLengths()
    found = [expected(lengths, 0, 32_000)]
    for _ in range(64):
        lengths.record(10)
        found.append(expected(lengths, 0, 32_000))
    assert found == sorted(found, reverse=True)
    assert found[1] < 0.6 * found[0]
    assert found[-1] < 30


def test_the_expectation_is_conditioned_on_the_generated_tokens() -> None:
    lengths = OutputLengths()
    for _ in range(250):
        lengths.record(10)
        lengths.record(100)
    lengths.caution = 0.0
    assert expected(lengths, 0, 1000) == pytest.approx(55, abs=2)
    assert expected(lengths, 20, 1000) == pytest.approx(80, abs=2), "it is already longer than the short ones"
    assert expected(lengths, 20, 30) == 30, "never more than the maximum"
    assert expected(lengths, 0, 50) == pytest.approx(30, abs=2), "half of them are short, the others cut off at 50"
    assert expected(lengths, 200, 1000) > 200, "longer than any known output: only the prior is left"


def test_a_burst_with_open_max_tokens_runs_at_once() -> None:
    """60 requests of 100 prompt and 200 output tokens in 100,000 tokens of KV, before any has finished."""
    core = scheduler(num_pages=6250, page_size=16, max_running=64, max_batch_tokens=8192, context_tokens=32_768)
    for number in range(60):
        core.add(request(prompt([number] * 100), None, eos_token_ids=(EOS,)), 0.0)
    while core.num_waiting:
        plan = core.plan(0.0)
        assert plan is not None and plan.joins, "nothing waits for memory"
        core.commit(plan, np.ones(int(plan.samples.sum()), np.int32), 0.0, 0.0)
    assert core.num_running == 60


def test_requests_that_use_their_whole_max_tokens_are_rarely_retracted() -> None:
    """40 requests of 400 tokens, none of which meets its EOS, in memory for 18 of them."""
    core = scheduler(num_pages=500, page_size=16, max_running=64, context_tokens=4096)
    for number in range(40):
        core.add(request(prompt([number] * 20), 400, eos_token_ids=(2**30,)), 0.0)
    clock = VirtualClock()
    Loop(core, VirtualExecutor(clock), clock).drain()
    assert core.counters.retractions <= 6


def test_an_output_length_known_in_advance_is_counted_exactly() -> None:
    """Eight requests of 4 + 12 tokens each in memory for exactly five of them: five run, none is retracted."""
    subject = harness(num_pages=20, page_size=4, max_running=8)
    subject.add_all(*(request(prompt([n] * 4), 12) for n in range(8)))
    most = 0
    while subject.scheduler.has_work:
        subject.step()
        most = max(most, subject.scheduler.num_running)
    assert (most, subject.scheduler.counters.retractions) == (5, 0)


def test_learned_lengths_admit_more_than_the_worst_case_would() -> None:
    subject = harness(num_pages=120, page_size=4, max_running=64, vocab=8)
    most = 0
    for number in range(160):
        subject.add(request(prompt([number % 7] * 4, number), 200, eos_token_ids=(EOS,)))
    while subject.scheduler.has_work:
        subject.step()
        most = max(most, subject.scheduler.num_running)
    # Outputs average 8 tokens; the worst case of 200 would let two requests run at a time.
    assert most >= 8
    subject.assert_reference()
