"""What KV events cost a step: the same load with and without them, in turns.

    python -m benchmarks.kv_events

256 requests run on the virtual executor and each that finishes is replaced, so that prompts and outputs enter the
prefix tree and old ones are evicted. First only plan and commit are timed, with events that are taken after every step
and not read. Then whole steps, overlapped, on a device that takes 3.2 ms for each: a decode batch of 256 rows of
Qwen3-0.6B on an H200, the shortest step of a full batch in docs/log. Here a thread hashes, encodes and publishes the
events, so its share of the interpreter lock counts too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from paceline.bench.scheduler import RUNNING, RequestStream
from paceline.cluster.kv_events import KvEventLog, num_pages
from paceline.cluster.kv_publisher import KvEventPublisher
from paceline.config import SchedulerConfig
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualExecutor, WallClock
from paceline.scheduler import Scheduler, StepTime

DEVICE_STEP_S = 3.2e-3
NUM_PAGES = 12_000  # full after a few hundred steps: from then on every new page evicts one
ROUNDS = 60


class _Load:
    def __init__(self, listens: bool) -> None:
        config = SchedulerConfig(num_pages=NUM_PAGES, max_running=RUNNING)
        self.scheduler, self._stream = Scheduler(config), RequestStream()
        self._instant = VirtualExecutor(WallClock(), StepTime(0.0, 0.0, 0.0, 0.0))
        device = VirtualExecutor(WallClock(), StepTime(DEVICE_STEP_S, 0.0, 0.0, 0.0))
        self._loop = Loop(self.scheduler, device, time.monotonic)
        self._log = KvEventLog(config.page_size) if listens else None
        self.publisher = KvEventPublisher("tcp://127.0.0.1:*") if listens else None
        if self._log is not None and self.publisher is not None:
            self.scheduler.listen(self._log)
            self.publisher.start(NUM_PAGES, lambda: None)
        self.num_events = self.num_pages = 0

    def _refill(self) -> None:
        while len(self.scheduler.requests) < RUNNING + 16:
            self.scheduler.add(next(self._stream), time.monotonic())

    def host_s(self, num_steps: int) -> float:
        """CPU seconds of plan, commit and taking the events, per step."""
        spent = 0.0
        for _ in range(num_steps):
            self._refill()
            before = time.thread_time()
            plan = self.scheduler.plan(time.monotonic())
            spent += time.thread_time() - before
            assert plan is not None, "requests are running"
            result = self._instant.launch(plan).wait()
            before = time.thread_time()
            self.scheduler.commit(plan, result.tokens, time.monotonic(), result.device_s)
            events = self._log.take() if self._log is not None else []
            spent += time.thread_time() - before
            self.num_events += len(events)
            self.num_pages += num_pages(events)
        return spent / num_steps

    def step_s(self, num_steps: int) -> float:
        """Seconds of a step with everything that a listener needs."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self._refill()
            self._loop.step()
            if self._log is not None and self.publisher is not None and (events := self._log.take()):
                self.publisher.publish(events)
        spent = time.perf_counter() - began
        while self.scheduler.num_in_flight:
            self._loop.step(launch=False)
        return spent / num_steps


def _compare(measure: Callable[[_Load], float], loads: dict[bool, _Load]) -> tuple[float, float, float]:
    """Medians without and with events, and of the difference of two rounds in turn."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS):
        for listens in ((False, True), (True, False))[number % 2]:
            times[listens].append(measure(loads[listens]))
    more = statistics.median(b - a for a, b in zip(times[False], times[True], strict=True))
    return statistics.median(times[False]), statistics.median(times[True]), more


def main() -> None:
    loads = {listens: _Load(listens) for listens in (False, True)}
    for load in loads.values():
        load.host_s(1_500)
    listening = loads[True]
    listening.num_events = listening.num_pages = 0
    gc.collect()
    gc.freeze()
    gc.disable()
    without, with_events, more = (1e6 * value for value in _compare(lambda load: load.host_s(60), loads))
    count = ROUNDS * 60
    print(f"per step: {listening.num_events / count:.2f} events of {listening.num_pages / count:.1f} pages")
    print(
        f"plan + commit: {without:.0f} µs without events, {with_events:.0f} µs with; {more:.1f} µs more, "
        f"{more / DEVICE_STEP_S / 1e6:.2%} of a step of {DEVICE_STEP_S * 1e3:.1f} ms"
    )
    without, with_events, more = (1e3 * value for value in _compare(lambda load: load.step_s(60), loads))
    print(f"whole step: {without:.3f} ms without events, {with_events:.3f} ms with; {more / without:+.2%}")
    assert listening.publisher is not None, "it publishes"
    listening.publisher.close()


if __name__ == "__main__":
    main()
