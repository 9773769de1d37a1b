from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.memory_forecast import MemoryForecast, OutputLengths
from tests.helpers import EOS, harness, prompt, request

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
    forecast = MemoryForecast(page_size, own, remaining)
    assert forecast.peak_with(*candidate) == naive_peak([*requests, candidate], page_size)
    forecast.add(*candidate)
    assert forecast.peak_with(3, 7) == naive_peak([*requests, candidate, (3, 7)], page_size)


def expected(lengths: OutputLengths, generated: int, most: int) -> int:
    return int(lengths.expected_remaining(np.array([generated]), np.array([most]))[0])


def test_without_history_the_expectation_starts_cautious_and_decays() -> None:
    lengths = OutputLengths()
    assert expected(lengths, 0, 1000) == 700
    for _ in range(2000):
        lengths.on_step()
    assert expected(lengths, 0, 1000) == 100
    lengths.on_retraction()
    assert expected(lengths, 0, 1000) == pytest.approx(300, abs=1)


def test_with_history_the_expectation_is_conditioned_on_the_generated_tokens() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.record(10)
        lengths.record(100)
    lengths.caution = 0.0
    assert expected(lengths, 0, 1000) == 55
    assert expected(lengths, 20, 1000) == 80, "it is already longer than the short ones"
    assert expected(lengths, 20, 30) == 30, "never more than the maximum"
    lengths.caution = 0.5
    assert expected(lengths, 200, 1000) == 500, "longer than any known output: a share of the maximum"


def test_an_output_length_known_in_advance_is_counted_exactly() -> None:
    """Eight requests of 4 + 12 tokens each in memory for exactly five of them: five run, none is retracted."""
    subject = harness(num_pages=20, page_size=4, max_running=8)
    subject.add(*(request(prompt([n] * 4), 12) for n in range(8)))
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
