"""The mask worker begins a call at once, raises its errors, and ends when it is closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from paceline.sampling.mask_worker import MaskWorker


@pytest.fixture
def worker() -> Iterator[MaskWorker]:
    made = MaskWorker("a-worker")
    yield made
    made.close()
    assert not any(thread.name == "a-worker" for thread in threading.enumerate())


def until(go_on: threading.Event, ended: threading.Event) -> None:
    assert go_on.wait(30)
    ended.set()


def test_calls_run_on_one_other_thread_and_are_waited_for(worker: MaskWorker) -> None:
    seen: list[str] = []
    for _ in range(100):
        worker.start(lambda: seen.append(threading.current_thread().name))
        worker.wait()
    assert seen == ["a-worker"] * 100


def test_start_returns_while_the_call_runs(worker: MaskWorker) -> None:
    go_on, ended = threading.Event(), threading.Event()
    worker.start(lambda: until(go_on, ended))
    assert not ended.is_set()
    go_on.set()
    worker.wait()
    assert ended.is_set()


def test_wait_raises_the_error_of_the_call_once(worker: MaskWorker) -> None:
    class Panic(BaseException):
        pass

    def breaking() -> None:
        raise Panic("a bad call")

    worker.start(breaking)
    with pytest.raises(Panic, match="a bad call"):
        worker.wait()
    worker.start(lambda: None)
    worker.wait()


def test_a_finished_call_is_released(worker: MaskWorker) -> None:
    kept = threading.Event()
    gone = weakref.ref(kept)
    worker.start(kept.set)
    worker.wait()
    del kept
    assert gone() is None


def test_one_call_at_a_time(worker: MaskWorker) -> None:
    with pytest.raises(AssertionError, match="no call was started"):
        worker.wait()
    worker.start(lambda: None)
    with pytest.raises(AssertionError, match="before the previous one was waited for"):
        worker.start(lambda: None)
    worker.wait()


def test_close_waits_for_the_running_call_only() -> None:
    worker, go_on, ended = MaskWorker("a-worker"), threading.Event(), threading.Event()
    worker.start(lambda: until(go_on, ended))
    closer = threading.Thread(target=worker.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive() and not ended.is_set()
    go_on.set()
    closer.join(30)
    assert not closer.is_alive() and ended.is_set()
