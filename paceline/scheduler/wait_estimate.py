"""Wait estimate: how long until a waiting request is admitted, for the Retry-After of a refused one."""

from __future__ import annotations

import numpy as np

from paceline.scheduler.scheduler import Scheduler


def seconds_until_admitted(scheduler: Scheduler, count: int) -> float | None:
    """Seconds until `count` more waiting requests run, if no new ones arrive; None while step times are unknown.

    A waiting request is admitted when a running one ends, which is where its length is known or expected. A pass takes
    as long as passes of this size have taken. The prompts of the admitted requests have to be computed, too.
    """
    model = scheduler.step_time.model()
    if model is None:
        return None
    waiting = scheduler.num_waiting
    prompts = scheduler.admission.num_waiting_tokens / waiting * min(count, waiting) if waiting else 0.0
    seconds = model.per_prefill_token * prompts
    running = scheduler.running.requests
    if not running:
        return seconds + model.base
    generated = np.array([len(request.output) for request in running], np.int64)
    max_remaining = np.array([request.max_tokens for request in running], np.int64) - generated
    expected = scheduler.expected_remaining(generated, max_remaining)
    known = np.array([request.ends_by_length for request in running])
    remaining = np.where(known, max_remaining, expected)
    # A request that is admitted then ends one mean output later and makes space again.
    rounds = np.arange((count - 1) // len(running) + 2)
    ends = remaining[:, None] + rounds * float(np.mean(generated + remaining))
    passes = float(np.partition(ends, count - 1, axis=None)[count - 1])
    context = sum(request.num_tokens for request in running)
    return seconds + passes * model.seconds(0, len(running), context)
