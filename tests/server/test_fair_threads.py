"""Tenants use threads in turns, and only for calls that somebody still waits for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from paceline.server.errors import ApiError
from paceline.server.fair_threads import FairThreads


class Held:
    """One thread with a clock of its own, which is held until all calls of a test wait."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._now = 0.0
        self.threads = FairThreads(1, "test", clock=lambda: self._now)
        self._may_run = threading.Event()
        self._first = self.threads.submit("first", self._may_run.wait)

    def call(self, tenant: str, seconds: float = 1.0, then: Callable[[], object] = lambda: None) -> Future[None]:
        def use() -> None:
            self.order.append(tenant)
            self._now += seconds
            then()

        return self.threads.submit(tenant, use)

    def run(self, *calls: Future[None]) -> str:
        self._may_run.set()
        for call in calls:
            call.result(60)
        return "".join(self.order)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.run()
    held.threads.close()
    held.threads.join()


def test_tenants_take_turns(held: Held) -> None:
    assert held.run(*[held.call(tenant) for tenant in "aaaabbc"]) == "abcabaa"


def test_a_tenant_with_slow_calls_gets_fewer_turns(held: Held) -> None:
    slow = [held.call("s", seconds=4.0) for _ in range(3)]
    fast = [held.call("f") for _ in range(8)]
    assert held.run(*slow, *fast) == "sffffsffffs"


def test_a_new_tenant_is_next_whatever_the_others_have_queued(held: Held) -> None:
    late: list[Future[None]] = []
    first = held.call("a", then=lambda: late.append(held.call("z")))
    assert held.run(first, *[held.call(tenant) for tenant in "aaabbb"], *late).startswith("abz")


def test_a_tenant_saves_up_no_time_while_it_asks_for_nothing(held: Held) -> None:
    late: list[Future[None]] = []
    busy = [held.call("a") for _ in range(5)]
    busy.append(held.call("a", then=lambda: late.extend(held.call(tenant) for tenant in "bbbaaa")))
    held.run(*busy)
    assert held.run(*late) == "aaaaaa" + "bbabaa", "and not bbbaaa"


def test_a_call_that_is_cancelled_while_it_waits_never_runs(held: Held) -> None:
    calls = [held.call(tenant) for tenant in "abc"]
    assert calls[1].cancel()
    assert held.run(calls[0], calls[2]) == "ac"


class Body:
    """Something that a call keeps alive."""


@pytest.mark.parametrize("others", [0, 2])
def test_a_cancelled_call_is_released_at_once(held: Held, others: int) -> None:
    kept = [held.call("a") for _ in range(others)]
    body = Body()
    alive = weakref.ref(body)
    call = held.threads.submit("a", partial(id, body))
    del body
    assert alive() is not None
    assert call.cancel()
    assert alive() is None, "while other calls still wait"
    assert held.run(*kept, held.call("b")) == ("aba" if others else "b")


def test_a_tenant_leaves_a_thread_to_the_others() -> None:
    threads, started, may_end = FairThreads(2, "test", max_per_tenant=1), list[str](), threading.Event()

    def call(tenant: str) -> Future[object]:
        return threads.submit(tenant, lambda: (started.append(tenant), may_end.wait()))

    calls = [call("a"), call("a"), call("a")]
    other = threads.submit("b", lambda: list(started))
    assert other.result(60) == ["a"], "the next one of the same tenant has not begun"
    may_end.set()
    for one in calls:
        one.result(60)
    threads.close()
    threads.join()


def test_a_thread_is_initialized_before_its_first_call_and_started_when_none_is_idle() -> None:
    initialized: list[int] = []
    threads = FairThreads(2, "test", initializer=lambda: initialized.append(threading.get_ident()))
    threads.start()
    for tenant in "abc":
        assert threads.submit(tenant, threading.get_ident).result(60) == initialized[0]
    assert len(initialized) == 1
    threads.close()
    threads.join()


def test_an_error_reaches_the_caller_and_the_thread_goes_on(held: Held) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    failing, after = held.call("a", then=fail), held.call("a")
    with pytest.raises(ValueError, match="wrong"):
        held.run(failing)
    held.run(after)


def test_calls_that_wait_fail_when_the_threads_are_closed(held: Held) -> None:
    waiting = held.call("a")
    held.threads.close()
    for call in (waiting.result, lambda: held.call("a")):
        with pytest.raises(ApiError, match="The server is shutting down"):
            call()
    assert held.order == []
