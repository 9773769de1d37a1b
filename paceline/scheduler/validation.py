"""Request validation: rejects a request that can never run, and one that finds the queue full.

Every request that passes fits alone, so every accepted request can finish.
"""

from __future__ import annotations

from paceline.config import SchedulerConfig
from paceline.request import Refused, Request
from paceline.scheduler.admission import Admission
from paceline.scheduler.memory import Memory


def validate(request: Request, config: SchedulerConfig, memory: Memory, admission: Admission) -> int:
    """Returns the maximum number of output tokens of `request`, or raises Refused."""
    prompt = len(request.prompt)
    if admission.num_waiting >= config.max_waiting:
        raise Refused(f"{admission.num_waiting} requests are waiting (max_waiting): retry later.", retry=True)
    if admission.num_waiting_tokens + prompt > config.max_waiting_tokens:
        raise Refused(
            f"{admission.num_waiting_tokens} prompt tokens are waiting (max_waiting_tokens): retry later.", retry=True
        )
    memory_tokens = memory.num_usable_pages * config.page_size
    max_tokens = 0 if request.prefill_only else request.params.max_tokens
    if max_tokens is None:
        max_tokens = min(config.context_tokens, memory_tokens) - prompt
        if max_tokens < 1:
            raise Refused(
                f"the prompt has {prompt} tokens, which leaves none for output in a context of "
                f"{config.context_tokens} tokens and KV memory for {memory_tokens}: shorten the prompt.",
                retry=False,
            )
    if prompt + max_tokens > config.context_tokens:
        raise Refused(
            f"prompt and max_tokens are {prompt} + {max_tokens} tokens, more than the context of "
            f"{config.context_tokens}: shorten the prompt or lower max_tokens.",
            retry=False,
        )
    if memory.pages_for(prompt + max_tokens) > memory.num_usable_pages:
        raise Refused(
            f"prompt and max_tokens are {prompt} + {max_tokens} tokens, more than the KV memory for {memory_tokens}: "
            "shorten the prompt or lower max_tokens.",
            retry=False,
        )
    return max_tokens
