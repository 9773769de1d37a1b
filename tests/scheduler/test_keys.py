"""Keys: what prefixes are compared by where a token alone does not say what it stands for.

The toy model computes other KV for the same tokens with other keys, so a prefix shared by mistake changes the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.request import InvalidRequest, Request
from paceline.scheduler.draft_depth import NgramMatcher
from paceline.scheduler.memory import prefix_key
from paceline.scheduler.plan import Join
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.testing import Harness
from tests.helpers import ReplayedEvents, harness, prompt, request, tracked

IMAGE = 5  # the placeholder token of an image
TEXT = range(10, 18)


def with_image(number: int, *end: int, **fields: Any) -> Request:
    """Eight tokens of text, eight of an image, and `end`. Equal numbers are equal images."""
    tokens = prompt(TEXT, [IMAGE] * 8, list(end))
    keys = tokens.copy()
    keys[8:16] = 1_000_000 * number + np.arange(8)
    return request(tokens, fields.pop("max_tokens", 4), keys=keys, **fields)


def run_each(subject: Harness, *requests: Request) -> list[TrackedRequest]:
    added = []
    for one in requests:
        added.append(subject.add(one))
        subject.run()
    return added


def test_the_keys_of_text_are_its_tokens_without_a_copy() -> None:
    one = request(range(5))
    assert one.keys is one.prompt
    assert tracked(range(5)).keys is not None
    known = TrackedRequest(one)
    assert known.keys is known.prompt is one.prompt


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([1, 2], "keys has 2 integers for a prompt of 3 tokens: give one for each token."),
        ([], "keys has 0 integers for a prompt of 3 tokens: give one for each token."),
        ([1, 2, -3], "keys has a negative token id, -3: token ids start at 0."),
        ([1, 2, 2**31], f"token id {2**31} is too large: token ids must fit into 32 bits."),
    ],
)
def test_keys_that_do_not_fit_the_prompt_are_refused(keys: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request("r", np.array([1, 2, 3]), keys=np.array(keys, np.int64))
    assert str(caught.value) == message


def test_equal_tokens_with_other_keys_share_nothing_behind_them() -> None:
    subject = harness(overlap=True)
    first, same, other, text = run_each(
        subject, with_image(1, 20), with_image(1, 21), with_image(2, 20), request(prompt(TEXT, [IMAGE] * 8, 20))
    )
    assert [one.num_cached for one in (first, same, other, text)] == [0, 16, 8, 8]
    assert other.output != first.output != text.output
    subject.assert_reference()


def test_waiting_requests_with_other_keys_do_not_wait_for_each_other() -> None:
    """Those with equal keys wait a step for the one that computes the image."""
    subject = harness(prefix_wait_tokens=8, page_size=8)
    first, same, other = subject.add_all(with_image(1, 20), with_image(1, 21), with_image(2, 22))
    subject.step()
    assert (first.slot is not None, same.slot is not None) == (True, False)
    subject.run()
    assert (same.num_cached, other.num_cached) == (16, 8)
    subject.assert_reference()


def test_a_retracted_request_finds_its_own_keys_again() -> None:
    subject = harness(overlap=True, num_pages=64)
    one, other = subject.add_all(with_image(1, 20, max_tokens=20), with_image(2, 20, max_tokens=20))
    for _ in range(6):
        subject.step()
    computed = subject.scheduler.counters.computed_tokens
    for each in (one, other):
        subject.scheduler.retract(each.id, subject.clock(), "a test")
    subject.run()
    assert one.retractions == other.retractions == 1
    assert subject.scheduler.counters.computed_tokens - computed <= 2 * (4 + 2), "the rest is cached"
    subject.assert_reference()


def test_an_image_is_fetched_from_host_memory_for_equal_keys_only() -> None:
    subject = harness(num_pages=20, num_host_pages=32, prefix_wait_tokens=4)
    run_each(subject, with_image(1, 20), request(prompt(range(100, 164)), 4))
    same, other = run_each(subject, with_image(1, 21), with_image(2, 21))
    assert same.num_fetched > 0 and same.num_cached == 16
    assert other.num_cached <= 8
    subject.assert_reference()


def test_pages_of_another_engine_belong_to_the_keys() -> None:
    subject = harness(num_pages=40, num_host_pages=32)
    scheduler, wanted = subject.scheduler, with_image(1, 20)
    assert scheduler.num_missing_tokens(wanted) == 16
    reservation = scheduler.reserve_received("t", wanted)
    assert reservation is not None
    subject.add(with_image(3, 1, max_tokens=1))  # knows the contents of its image only
    subject.run()
    scheduler.release_received("t")
    assert scheduler.num_missing_tokens(wanted) == 8
    run_each(subject, wanted)
    assert scheduler.num_missing_tokens(wanted) == 0 == scheduler.match(wanted) - 16
    assert scheduler.num_missing_tokens(with_image(2, 20)) == 8 == scheduler.match(with_image(2, 20))


def test_kv_events_name_keys() -> None:
    """A router that follows them finds an image by its keys."""
    subject = harness()
    events = ReplayedEvents(subject.scheduler)
    (one,) = run_each(subject, with_image(1, 20, max_tokens=1))
    events.check()
    known = prefix_key(one)
    assert {path for _, _, path in events.pages} == {known[: 16 * page] for page in range(1, 5)}
    assert known[:64] == one.request.keys[:16].tobytes()


def test_executors_and_drafts_get_tokens() -> None:
    one = TrackedRequest(with_image(1, 20))
    assert Join.of(one, 0).tokens.tolist() == one.prompt.tolist()
    matcher = NgramMatcher(one)
    one.output.extend([IMAGE, IMAGE, IMAGE])
    while matcher.catch_up(one, 100):
        pass
    repeated = TrackedRequest(request(one.prompt, 4))
    other = NgramMatcher(repeated)
    repeated.output.extend([IMAGE, IMAGE, IMAGE])
    while other.catch_up(repeated, 100):
        pass
    assert matcher._index == other._index
