"""The running set: its lists and what it caches about them stay consistent."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.request import Request
from paceline.scheduler import Scheduler
from paceline.scheduler.running_set import RunningSet
from paceline.scheduler.tracked_request import Phase, TrackedRequest
from tests.helpers import harness, prompt, request, scheduler


def admitted(core: Scheduler, *requests: Request) -> tuple[RunningSet, list[TrackedRequest]]:
    """The running set after one pass that prefills all of `requests`."""
    added = [core.add(one, 0.0) for one in requests]
    assert core.plan(0.0) is not None
    return core.running, added


def test_prefilling_requests_are_in_order_of_first_admission() -> None:
    core = scheduler(chunk_tokens=2, max_prefill_tokens=64)
    running, (first, second) = admitted(core, request(range(8)), request(range(20, 28)))
    assert running.prefilling == [first, second] and not running.decoding
    running.discard(first)
    first.enter(Phase.WAITING)
    running.start_prefill(first)
    assert running.prefilling == running.requests == [first, second]
    assert len(running) == 2


def test_decode_slots_and_tenants_follow_the_decoding_requests() -> None:
    core = scheduler()
    running, (one, other) = admitted(core, request([1], 9, tenant="a"), request([2], 9, tenant="b"))
    slots = running.decode_slots
    assert slots.tolist() == [one.slot, other.slot] and running.decodes_by_tenant == {"a": 1, "b": 1}
    assert running.decode_slots is slots, "a steady step builds nothing"
    with pytest.raises(ValueError, match="read-only"):
        slots[0] = 5
    running.stop_decoding(one)
    assert running.decode_slots.tolist() == [other.slot] and running.decodes_by_tenant == {"b": 1}
    assert slots.tolist() == [one.slot, other.slot], "a plan in flight keeps its column"


def test_discarding_a_request_that_has_left_does_nothing() -> None:
    core = scheduler()
    running, (one,) = admitted(core, request([1], 9))
    running.stop_decoding(one)
    running.discard(one)
    assert len(running) == 0 and not running


def test_sharing_is_kept_until_a_decode_joins_or_leaves_or_rows_are_remapped() -> None:
    subject = harness()
    for number in range(3):
        subject.add(request(prompt(range(1, 10), number + 20), 30))
    for _ in range(3):
        subject.step()
    running, starts = subject.scheduler.running, np.full(3, 10, np.int32)
    step = subject.scheduler.step
    requests, rows = running.decoding, running.decode_slots
    sharing = running.decode_sharing(requests, rows, starts, step)
    assert sharing is not None and sharing.common.tolist() == [8, 8]
    assert running.decode_sharing(requests, rows, starts, step + 1) is sharing
    running.rows_remapped()
    again = running.decode_sharing(requests, rows, starts, step + 2)
    assert again is not None and again.common.tolist() == [8, 8] and again.version == step + 2 != sharing.version
    running.stop_decoding(running.decoding[-1])
    fewer = running.decode_sharing(running.decoding, running.decode_slots, starts[:2], step + 3)
    assert fewer is not None and fewer.common.tolist() == [8]


def test_sharing_is_not_kept_for_another_request_in_the_same_slot() -> None:
    subject = harness(max_running=2)
    _, other = subject.add_all(request(prompt(range(1, 10), 20), 30), request(prompt(range(1, 10), 21), 30))
    for _ in range(3):
        subject.step()
    before = subject.executor.plans[-1]
    assert before.sharing is not None and before.num_decodes == 2
    subject.scheduler.abort(other.id, subject.clock())
    subject.add(request(prompt(range(30, 40)), 30))
    for _ in range(3):
        subject.step()
    after = subject.executor.plans[-1]
    assert after.slots.tolist() == before.slots.tolist() and after.num_decodes == 2
    assert after.sharing is None or after.sharing.common.tolist() == [0]
