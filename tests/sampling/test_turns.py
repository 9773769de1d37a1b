"""Tenants take turns, and one tenant never has two threads."""

from __future__ import annotations

import threading

from paceline.sampling.turns import Turns


class Recorded:
    """Tasks that run only when they are let go, one by one."""

    def __init__(self, num_threads: int, max_per_tenant: int = 1) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._may_end: set[str] = set()
        self.turns: Turns[str] = Turns(self._run, num_threads, "test-turns", max_per_tenant=max_per_tenant)

    def _run(self, task: str) -> None:
        with self._changed:
            self.begun.append(task)
            self._changed.notify_all()
            self._changed.wait_for(lambda: task in self._may_end, 30)

    def wait_begun(self, *tasks: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(tasks) <= set(self.begun), 30), self.begun

    def end(self, *tasks: str) -> None:
        with self._changed:
            self._may_end |= set(tasks)
            self._changed.notify_all()


def test_a_tenant_with_many_tasks_delays_another_by_one_of_them() -> None:
    recorded = Recorded(num_threads=1)
    for index in range(6):
        recorded.turns.add("hostile", f"h{index}")
    recorded.wait_begun("h0")
    recorded.turns.add("other", "o0")
    recorded.turns.add("other", "o1")
    everything = [*(f"h{index}" for index in range(6)), "o0", "o1"]
    recorded.end(*everything)
    recorded.wait_begun(*everything)
    assert recorded.begun == ["h0", "o0", "h1", "o1", "h2", "h3", "h4", "h5"]
    recorded.turns.close()


def test_a_tenant_has_one_thread_so_that_another_finds_one_free() -> None:
    recorded = Recorded(num_threads=2)
    for index in range(16):
        recorded.turns.add("hostile", f"h{index}")
    recorded.wait_begun("h0")
    recorded.turns.add("other", "o0")
    recorded.wait_begun("o0")  # while h0 still runs
    assert recorded.begun == ["h0", "o0"]
    recorded.end("o0")
    recorded.turns.close()
    recorded.end("h0")


def test_tasks_that_wait_are_not_run_after_close() -> None:
    recorded = Recorded(num_threads=1)
    recorded.turns.add("a", "first")
    recorded.wait_begun("first")
    recorded.turns.add("a", "second")
    recorded.turns.close()
    recorded.end("first", "second")
    for thread in threading.enumerate():
        if thread.name == "test-turns":
            thread.join(30)
    assert "second" not in recorded.begun


def test_the_only_tenant_has_two_threads_if_it_may() -> None:
    recorded = Recorded(num_threads=4, max_per_tenant=2)
    for index in range(8):
        recorded.turns.add("only", f"h{index}")
    recorded.wait_begun("h0", "h1")
    recorded.turns.add("other", "o0")
    recorded.wait_begun("o0")
    assert sorted(recorded.begun) == ["h0", "h1", "o0"]
    recorded.end("h1")
    recorded.wait_begun("h2")
    assert "h3" not in recorded.begun
    recorded.turns.close()
    recorded.end("h0", "h2", "o0")
