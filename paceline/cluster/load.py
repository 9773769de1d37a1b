"""LoadReport: how busy a replica is, by its own scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.step_time import StepTime
from paceline.scheduler.wait_estimate import seconds_until_admitted


@dataclass(frozen=True, slots=True)
class LoadReport:
    num_pages: int = 0  # capacity of its prefix cache, host memory included
    num_running: int = 0
    num_waiting: int = 0
    num_context_tokens: int = 0  # of the running requests
    wait_s: float = 0.0  # predicted, until the prompt of a new request is computed
    step_time: StepTime | None = None  # None: not enough passes yet
    num_prompt_tokens: int = 0  # left to compute, of running requests
    max_prefill_tokens: int = 0  # of one pass


def load_of(scheduler: Scheduler) -> LoadReport:
    config, running, model = scheduler.config, scheduler.running, scheduler.step_time.model()
    computed = scheduler.memory.slots.computed
    left = sum(request.num_tokens - int(computed[request.slot]) for request in running.prefilling)
    wait_s = 0.0
    if model is not None:
        if scheduler.num_waiting or len(running) >= config.max_running:
            wait_s = seconds_until_admitted(scheduler, scheduler.num_waiting + 1) or 0.0
        wait_s += model.per_prefill_token * left
    return LoadReport(
        num_pages=config.num_pages + config.num_host_pages,
        num_running=len(running),
        num_waiting=scheduler.num_waiting,
        num_context_tokens=sum(request.num_tokens for request in running.requests),
        wait_s=wait_s,
        step_time=model,
        num_prompt_tokens=left,
        max_prefill_tokens=config.max_prefill_tokens,
    )
