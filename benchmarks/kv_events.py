"""What KV events cost a step: the same load with and without a listener, in turns, on one core.

    python -m benchmarks.kv_events

256 requests run on the virtual executor and each that finishes is replaced, so that prompts and outputs enter the
prefix tree and old ones are evicted. All time is the scheduler's; events are taken after every step, as the engine
does it. The share of a step depends on how long the device takes: the last line relates the cost to 3.2 ms, a decode
batch of 256 rows of Qwen3-0.6B on an H200, the shortest step of a full batch in docs/log.
"""

from __future__ import annotations

import gc
import statistics
import time

from paceline.bench.scheduler import RUNNING, RequestStream
from paceline.cluster.kv_events import KvEventLog, num_pages
from paceline.config import SchedulerConfig
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.scheduler import Scheduler

DEVICE_STEP_S = 3.2e-3
NUM_PAGES = 12_000  # full after a few hundred steps: from then on every new page evicts one


class _Load:
    def __init__(self, listens: bool) -> None:
        config = SchedulerConfig(num_pages=NUM_PAGES, max_running=RUNNING)
        self.scheduler, self.clock = Scheduler(config), VirtualClock()
        self.executor, self._stream = VirtualExecutor(self.clock), RequestStream()
        self.log = KvEventLog(config.page_size) if listens else None
        if self.log is not None:
            self.scheduler.listen(self.log)
        self.num_events = self.num_pages = 0

    def steps(self, count: int) -> float:
        """CPU seconds of plan, commit and taking the events."""
        spent = 0.0
        for _ in range(count):
            while len(self.scheduler.requests) < RUNNING + 16:
                self.scheduler.add(next(self._stream), self.clock())
            before = time.thread_time()
            plan = self.scheduler.plan(self.clock())
            spent += time.thread_time() - before
            assert plan is not None, "requests are running"
            result = self.executor.launch(plan).wait()
            before = time.thread_time()
            self.scheduler.commit(plan, result.tokens, self.clock(), result.device_s)
            events = self.log.take() if self.log is not None else []
            spent += time.thread_time() - before
            self.num_events += len(events)
            self.num_pages += num_pages(events)
        return spent


def main() -> None:
    loads = {listens: _Load(listens) for listens in (False, True)}
    for load in loads.values():
        load.steps(1_500)
    log = loads[True]
    log.num_events = log.num_pages = 0
    gc.collect()
    gc.freeze()
    gc.disable()
    rounds, size = 100, 40
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for listens in ((False, True), (True, False))[number % 2]:
            times[listens].append(loads[listens].steps(size) / size)
    without, with_events = (statistics.median(times[listens]) for listens in (False, True))
    cost = statistics.median(b - a for a, b in zip(times[False], times[True], strict=True))
    steps = rounds * size
    print(
        f"plan + commit in µs: {without * 1e6:.0f} without events, {with_events * 1e6:.0f} with; {cost * 1e6:.1f} more"
    )
    print(f"per step: {log.num_events / steps:.2f} events of {log.num_pages / steps:.1f} pages")
    print(f"share of a step with {DEVICE_STEP_S * 1e3:.1f} ms on the device: {cost / DEVICE_STEP_S:.2%}")


if __name__ == "__main__":
    main()
