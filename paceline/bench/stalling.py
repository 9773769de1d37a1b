"""Three replicas of which one is stopped for nine tenths of the time, on a clock of their own: for tests and `paceline
bench router`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paceline.cluster.load import LoadReport
from paceline.cluster.router import Router, RouteRequest
from paceline.scheduler.step_time import StepTime

TICK_S = 0.01
SERVICE_S = 0.05  # of a request, on a replica that is not stopped
_TIMES = StepTime(base=5e-3, per_prefill_token=2e-5, per_decode=1e-5, per_context_token=1e-8)


@dataclass
class Replica:
    """Serves one request after the other, and predicts the wait as if it were never stopped."""

    queue: deque[tuple[str, float]] = field(default_factory=deque)  # ids, and when they came
    left_s: float = SERVICE_S  # of the first
    num_added: int = 0
    reported: float = 0.0

    def report(self, router: Router, index: int, now: float) -> None:
        load = LoadReport(1000, 1, len(self.queue), 50, SERVICE_S * len(self.queue), _TIMES, 0, 2048)
        router.report(index, load, now, self.num_added)
        self.reported = now


def run(
    strategy: str, *, period_s: float = 1.0, stopped: float = 0.9, until: float = math.inf, seconds: float = 120.0
) -> tuple[float, float]:
    """The part of the requests that the last replica, which is stopped until then, got in the second half, and the mean
    latency of all in seconds."""
    router, replicas, rng = Router(3, 16, strategy), [Replica() for _ in range(3)], np.random.default_rng(0)
    for index in range(3):
        router.start(index, 0.0)
        replicas[index].report(router, index, 0.0)
    chosen, latencies = [], []
    for number, now in enumerate(np.arange(TICK_S, seconds, TICK_S).tolist()):
        for index, one in enumerate(replicas):
            if index == 2 and now < until and now % period_s >= (1 - stopped) * period_s:
                continue
            left_s = TICK_S
            while one.queue and left_s > 0:
                spent = min(left_s, one.left_s)
                one.left_s, left_s = one.left_s - spent, left_s - spent
                if one.left_s <= 1e-9:
                    id, came = one.queue.popleft()
                    router.finished(id, 8)
                    one.left_s = SERVICE_S
                    latencies.append((came, now - came))
            if now - one.reported >= (0.02 if one.queue else 1.0):
                one.report(router, index, now)
        if rng.random() < 0.28:  # 28 requests a second; the replicas can serve 42
            prompt = rng.integers(0, 50_000, 64, dtype=np.int32)
            index = router.choose(RouteRequest(str(number), prompt, ("default",), "default", 8), now).replica
            replicas[index].queue.append((str(number), now))
            replicas[index].num_added += 1
            if now > seconds / 2:
                chosen.append(index)
    late = [latency for came, latency in latencies if came > seconds / 2]
    late += [seconds - came for one in replicas for _, came in one.queue]
    return chosen.count(2) / len(chosen), float(np.mean(late))
