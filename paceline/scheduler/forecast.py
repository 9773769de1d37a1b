"""When will there be room? What a refused client is told, so that it comes back neither in vain nor too late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from paceline.scheduler.scheduler import Scheduler


def seconds_until_admitted(scheduler: Scheduler, count: int) -> float | None:
    """How long until so many more waiting requests run, if nothing new came; None while step times are unknown.

    A waiting request runs when a running one ends; each end is where the length is known or expected, and a pass takes
    what passes of this size have taken. The prompts that move up have to be computed, too.
    """
    model = scheduler.step_time.model()
    if model is None:
        return None
    waiting = scheduler.num_waiting
    prompts = scheduler.admission.num_waiting_tokens / waiting * min(count, waiting) if waiting else 0.0
    seconds = model.per_prefill_token * prompts
    running = scheduler.admission.running
    if not running:
        return seconds + model.base
    generated = np.array([len(request.output) for request in running], np.int64)
    most = np.array([request.max_tokens for request in running], np.int64) - generated
    expected = scheduler.expected_remaining(generated, most)
    known = np.array([request.ends_by_length for request in running])
    remaining = np.where(known, most, expected)
    # Whoever moved up ends too, an answer later, and makes room again.
    rounds = np.arange((count - 1) // len(running) + 2)
    ends = remaining[:, None] + rounds * float(np.mean(generated + remaining))
    passes = float(np.partition(ends, count - 1, axis=None)[count - 1])
    context = sum(request.num_tokens for request in running)
    return seconds + passes * model.seconds(0, len(running), context)
