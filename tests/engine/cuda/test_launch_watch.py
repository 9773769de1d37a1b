"""Slow launches are counted by cause. Time is faked: nothing here depends on how fast the host is."""

from __future__ import annotations

import gc
import logging
from typing import Any, NamedTuple

import pytest

from paceline.engine.cuda import launch_watch
from paceline.engine.cuda.launch_watch import LaunchWatch
from paceline.kernels._triton import Kernel


class Usage(NamedTuple):
    ru_utime: float
    ru_stime: float = 0.0
    ru_majflt: int = 0


class Host:
    """Clocks that move when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.capture_s = 0.0
        self.reserved, self.usage = 100, Usage(0.0)
        monkeypatch.setattr(launch_watch.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(launch_watch.resource, "getrusage", lambda _: self.usage)
        monkeypatch.setattr(Kernel, "compile_s", 0.0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def slow(host: Host, **changes: Any) -> tuple[str | None, LaunchWatch]:
    """The cause of a launch of 80 ms during which these values changed."""
    watch = LaunchWatch(lambda: host.capture_s, lambda: host.reserved)
    before = watch.begin()
    host.now += 0.08
    for name, value in changes.items():
        setattr(host, name, value)
    cause = watch.end(before, "a pass of 3 rows and 3 tokens")
    watch.close()
    return cause, watch


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "host pause"),
        ({"usage": Usage(0.07)}, "library load"),
        ({"usage": Usage(0.01, 0.0, 3)}, "library load"),  # read from disk
        ({"capture_s": 0.06, "usage": Usage(0.07)}, "capture"),
        ({"reserved": 200, "usage": Usage(0.07)}, "allocation"),
    ],
)
def test_a_slow_launch_is_counted_by_its_cause_and_logged(
    host: Host, changes: dict[str, Any], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        found, watch = slow(host, **changes)
    assert found == cause and watch.slow == {cause: 1} and watch.longest_s == pytest.approx(0.08)
    assert caplog.messages == [f"launch of a pass of 3 rows and 3 tokens took 80 ms: {launch_watch.CAUSES[cause]}"]


def test_compiling_is_a_cause(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LaunchWatch(lambda: 0.0, lambda: 0)
    before = watch.begin()
    host.now += 1.0
    monkeypatch.setattr(Kernel, "compile_s", 0.9)
    assert watch.end(before, "a pass") == "compile"
    watch.close()


def test_a_garbage_collection_is_a_host_pause(host: Host) -> None:
    watch = LaunchWatch(lambda: 0.0, lambda: 0)
    before = watch.begin()

    def collecting(phase: str, _: dict[str, int]) -> None:
        host.now += 0.3 if phase == "start" else 0.0

    gc.callbacks.append(collecting)  # after the watch's own: its clock runs from here
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(collecting)
    host.usage = Usage(0.3)
    assert watch.end(before, "a pass") == "host pause"
    watch.close()
    assert watch._collects not in gc.callbacks


def test_a_quick_launch_is_no_news(host: Host) -> None:
    watch = LaunchWatch(lambda: 0.0, lambda: 0)
    before = watch.begin()
    host.now += 0.049
    assert watch.end(before, "a pass") is None and not watch.slow and watch.longest_s == pytest.approx(0.049)
    watch.close()


def test_memory_of_an_earlier_launch_is_no_cause(host: Host) -> None:
    watch = LaunchWatch(lambda: 0.0, lambda: host.reserved)
    before = watch.begin()
    host.now, host.reserved = host.now + 0.02, 200  # a capture, say
    assert watch.end(before, "a pass") is None
    before = watch.begin()
    host.now += 0.08
    assert watch.end(before, "a pass") == "host pause"
    watch.close()


def test_a_launch_that_ends_while_the_device_is_busy_delays_nobody(host: Host) -> None:
    watch = LaunchWatch(lambda: 0.0, lambda: 0)
    before = watch.begin()
    host.now += 0.2
    assert watch.end(before, "a pass", is_device_busy=True) is None and not watch.slow and not watch.longest_s
    watch.close()
