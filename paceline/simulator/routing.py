"""SimulatedRouter: the router of the server in front of virtual GPUs.

Load reports and KV events arrive after every forward pass, without delay.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.held_pages import HeldPages
from paceline.cluster.kv_events import KvEventLog
from paceline.cluster.load import load_of
from paceline.cluster.router import LATE_S, Router, RouteRequest
from paceline.engine.loop import StepOutput
from paceline.simulator.replica import VirtualReplica
from paceline.simulator.workloads import Arrival


class SimulatedRouter:
    def __init__(self, gpus: Sequence[VirtualReplica], strategy: str) -> None:
        self._gpus = gpus
        page_size = gpus[0].scheduler.config.page_size
        self._router = Router(len(gpus), page_size, strategy)
        self._logs = [KvEventLog(page_size) for _ in gpus]
        self._held = [HeldPages() for _ in gpus]
        self._reported = [0.0] * len(gpus)
        self._added = [0] * len(gpus)
        for index, gpu in enumerate(gpus):
            gpu.scheduler.listen(self._logs[index])
            self._router.start(index, 0.0)

    def add(self, arrival: Arrival) -> None:
        for index, gpu in enumerate(self._gpus):
            # An idle replica takes no steps, but it is not late.
            if not gpu.scheduler.has_work and self._reported[index] < arrival.at - LATE_S / 2:
                self._report(index, arrival.at)
        request = arrival.request()
        routed = RouteRequest(arrival.id, request.keys, request.namespace, request.tenant, request.params.max_tokens)
        index = self._router.choose(routed, arrival.at).replica
        self._added[index] += 1
        if not self._gpus[index].add(arrival):
            self._router.finished(arrival.id)

    def stepped(self, gpu: VirtualReplica, output: StepOutput) -> None:
        for ended in output.updates.finished:
            self._router.finished(ended.request.id, len(ended.request.output))
        self._report(self._gpus.index(gpu), gpu.clock.now)

    def _report(self, index: int, now: float) -> None:
        self._held[index].changes(self._logs[index].take()).apply(self._router, index)
        self._router.report(index, load_of(self._gpus[index].scheduler), now, self._added[index])
        self._reported[index] = now
