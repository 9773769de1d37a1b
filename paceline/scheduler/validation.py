"""Request validation: rejects a request that can never run, and one that finds the queue full.

Every request that passes fits alone, so every accepted request can finish.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from paceline.config import SchedulerConfig
from paceline.request import Refused
from paceline.scheduler.admission import Admission
from paceline.scheduler.memory import Memory
from paceline.scheduler.tracked_request import Phase, TrackedRequest


def validate(request: TrackedRequest, config: SchedulerConfig, memory: Memory) -> int:
    """Returns the maximum number of output tokens of `request`, or raises Refused."""
    prompt = len(request.prompt)
    memory_tokens = memory.num_usable_pages * config.page_size
    max_tokens = 0 if request.prefill_only else request.params.max_tokens
    if max_tokens is None or (max_tokens and config.clip_max_tokens):
        room = config.max_request_tokens - prompt
        max_tokens = room if max_tokens is None else min(max_tokens, room)
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


class QueueLimits:
    """The limits of the queue, and which waiting requests give way to one of higher priority (`full_queue`)."""

    def __init__(self, config: SchedulerConfig, admission: Admission) -> None:
        self._config = config
        self._admission = admission
        # Heap by rank, the youngest of equals first; an entry is stale once its request was admitted or has ended.
        self._lowest: list[tuple[tuple[bool, int], int, TrackedRequest]] = []

    def add(self, request: TrackedRequest) -> None:
        """A new request waits."""
        if self._config.full_queue == "yield":
            heappush(self._lowest, (_rank(request), -request.number, request))
            if len(self._lowest) > 64 + 2 * self._admission.num_waiting:  # mostly stale
                self._lowest = [entry for entry in self._lowest if _has_not_begun(entry[2])]
                heapify(self._lowest)

    def make_room(self, request: TrackedRequest) -> list[TrackedRequest]:
        """The waiting requests, all of lower rank, that must leave for `request`. Raises Refused if there are not
        enough of them."""
        config, admission = self._config, self._admission
        requests_left = config.max_waiting - admission.num_waiting - 1
        tokens_left = config.max_waiting_tokens - admission.num_waiting_tokens - len(request.prompt)
        leaving: list[TrackedRequest] = []
        while requests_left < 0 or tokens_left < 0:
            lowest = self._pop_below(_rank(request))
            if lowest is None:
                for one in leaving:
                    self.add(one)
                waiting = f"{admission.num_waiting} requests are waiting (max_waiting)"
                if requests_left >= 0:
                    waiting = f"{admission.num_waiting_tokens} prompt tokens are waiting (max_waiting_tokens)"
                raise Refused(f"{waiting}: retry later.", retry=True)
            leaving.append(lowest)
            requests_left += 1
            tokens_left += lowest.num_tokens
        return leaving

    def _pop_below(self, rank: tuple[bool, int]) -> TrackedRequest | None:
        heap = self._lowest
        while heap and not _has_not_begun(heap[0][2]):
            heappop(heap)
        return heappop(heap)[2] if heap and heap[0][0] < rank else None


def _rank(request: TrackedRequest) -> tuple[bool, int]:
    """By priority, and below all others if it is a background request."""
    return not request.background, request.priority


def _has_not_begun(request: TrackedRequest) -> bool:
    return request.phase is Phase.WAITING and not request.was_admitted
