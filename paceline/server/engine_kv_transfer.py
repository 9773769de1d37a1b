"""Prefill/decode disaggregation in the engine process: one of the two sides of KV transfers, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.cluster.kv_protocol import layout_of
from paceline.cluster.kv_receiver import RemotePrefill
from paceline.cluster.kv_sender import PrefillServer
from paceline.config import ConfigError
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output_processor import Sink
from paceline.request import FinishReason
from paceline.scheduler import Scheduler
from paceline.server.metrics import MetricFamily, counter, gauge
from paceline.server.process_messages import KvTransferSetup


class EngineKvTransfer:
    def __init__(self, engine: Engine, setup: KvTransferSetup, model: str, on_received: Callable[[str], None]) -> None:
        """`on_received` is called with the front end of each prompt that another engine asks for."""
        if not engine.executor.capabilities.kv_transfer:
            raise ConfigError(f"role is {setup.role!r}, and this executor cannot send or receive KV: remove it.")
        self._engine = engine
        self._sender: PrefillServer | None = None
        self._receiver: RemotePrefill | None = None
        layout = layout_of(engine, model)
        if setup.role == "prefill":
            self._sender = PrefillServer(
                engine, layout, setup.token, setup.listen, on_received=on_received, nixl=setup.nixl
            )
        else:
            self._receiver = RemotePrefill(
                engine,
                layout,
                setup.token,
                peers=setup.peers,
                min_tokens=setup.from_tokens,
                timeout_s=setup.timeout_s,
                nixl=setup.nixl,
            )

    def submit(self, job: Job, sink: Sink, front_end: str) -> None:
        if self._receiver is None:
            self._engine.submit(job, sink)
        else:
            self._receiver.submit(job, sink, front_end)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """Ends a request that is not in the engine yet. Returns whether there is one."""
        return self._receiver is not None and self._receiver.finish(request_id, reason)

    def waiting_jobs(self) -> list[tuple[Job, float, str]]:
        """As `RemotePrefill.waiting_jobs`."""
        return [] if self._receiver is None else self._receiver.waiting_jobs()

    def after_step(self) -> None:
        """On the engine's thread."""
        if self._sender is not None:
            self._sender.after_step()

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()

    def metrics(self, scheduler: Scheduler) -> list[MetricFamily]:
        host = scheduler.memory.host
        if self._receiver is not None:
            one = self._receiver
            return [
                *_transfers("received", one.num_started, one.num_completed, one.num_bytes, one.failures),
                counter("kv_transfer_seconds", "From the submission of a request to its last page.", one.seconds),
                counter("kv_transfer_recomputed_requests", "Requests whose KV did not come: computed here.",
                        one.num_recomputed),
                gauge("kv_transfer_requests_waiting", "Requests that wait for KV transfers.", one.num_waiting),
                gauge("kv_transfer_pages_in_transit", "Pages of host memory that are reserved for KV.",
                      0 if host is None else host.num_pages_reserved),
            ]  # fmt: skip
        assert self._sender is not None, "an engine with a role sends or receives"
        sender = self._sender
        return [
            *_transfers("sent", sender.num_started, sender.num_completed, sender.num_bytes, sender.failures),
            gauge("kv_transfer_requests_waiting", "Requests that wait for KV transfers.", sender.num_open),
        ]


def _transfers(
    direction: str, started: int, completed: int, num_bytes: int, failures: Mapping[str, int]
) -> list[MetricFamily]:
    label = {"direction": direction}
    return [
        counter("kv_transfers_started", "KV transfers, complete or not, by direction.", started, label),
        counter("kv_transfers", "Complete KV transfers, by direction.", completed, label),
        counter("kv_transfer_bytes", "KV of complete received transfers, or sent.", num_bytes, label),
        MetricFamily(
            "kv_transfer_failures",
            "counter",
            "Failed KV transfers, by direction and cause.",
            [({**label, "cause": cause}, count) for cause, count in sorted(failures.items())],
        ),
    ]
