"""What is taken at all: a request that can never run is refused at once, and so is one too many.

Every request that passes here fits alone, so every accepted request can finish.
"""

from __future__ import annotations

from paceline.config import SchedulerConfig
from paceline.request import Refused, Request
from paceline.scheduler.admission import Admission
from paceline.scheduler.memory import Memory


def accept(request: Request, config: SchedulerConfig, memory: Memory, admission: Admission) -> int:
    """The most tokens this request may produce, or Refused."""
    prompt = len(request.prompt)
    if admission.num_waiting >= config.max_waiting:
        raise Refused(f"{admission.num_waiting} requests wait already (max_waiting): try again later.", retry=True)
    if admission.num_waiting_tokens + prompt > config.max_waiting_tokens:
        raise Refused(
            f"{admission.num_waiting_tokens} prompt tokens wait already (max_waiting_tokens): try again later.",
            retry=True,
        )
    usable = memory.num_usable_pages * config.page_size
    most = 0 if request.prefill_only else request.params.max_tokens
    if most is None:
        most = min(config.context_tokens, usable) - prompt
        if most < 1:
            raise Refused(
                f"the prompt has {prompt} tokens and leaves no room for output in a context of "
                f"{config.context_tokens} and a memory of {usable} tokens: shorten it.",
                retry=False,
            )
    if prompt + most > config.context_tokens:
        raise Refused(
            f"prompt and max_tokens are {prompt} + {most} tokens, more than the context of {config.context_tokens}: "
            "shorten the prompt or lower max_tokens.",
            retry=False,
        )
    if memory.pages_for(prompt + most) > memory.num_usable_pages:
        raise Refused(
            f"prompt and max_tokens are {prompt} + {most} tokens, more than the memory for {usable} can ever hold: "
            "shorten the prompt or lower max_tokens.",
            retry=False,
        )
    return most
