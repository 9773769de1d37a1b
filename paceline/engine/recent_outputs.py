"""Recent outputs as draft sources: a request whose prompt was seen before may get the same output again.

An output is found by its whole prompt, else by the last tokens of it. The whole prompt finds questions that are asked
again, retries, and the first turns of an agent that runs a task again. The last tokens find them where the beginning
differs, such as by the date in a system prompt or by a longer history. Similar outputs of other prompts are not looked
for: an agent that repeats itself within a conversation has its earlier outputs in the prompt, where n-grams find them.

A wrong output costs a few rejected drafts and never changes the result, so prompts are compared by hash. But drafts
change how fast a request is: tenants, cache salts and adapters are as separate here as in the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from paceline.request import FinishReason, Request, Tokens
from paceline.scheduler.plan import NO_TOKENS
from paceline.scheduler.tracked_request import TrackedRequest

MAX_OUTPUTS = 1024  # of a tenant
MAX_TENANTS = 64  # the least recently active one is forgotten: clients may choose tenants
_TAIL = 32  # last tokens of a prompt: the last message of a chat, or its end

Key = tuple[str, str, int]  # cache salt, adapter, hash of token ids


class _Stored(NamedTuple):
    tail: Key
    output: Tokens


class _TenantOutputs:
    """Bounded for each tenant, so that one cannot displace the outputs of another."""

    def __init__(self) -> None:
        self.by_prompt: OrderedDict[Key, _Stored] = OrderedDict()  # the least recently used first
        self.latest: dict[Key, Key] = {}  # from the end of a prompt to the last prompt that had it
        self.num_tokens = 0

    def remove(self, prompt: Key) -> None:
        stored = self.by_prompt.pop(prompt)
        self.num_tokens -= len(stored.output)
        if self.latest.get(stored.tail) == prompt:
            del self.latest[stored.tail]


class RecentOutputs:
    """Used by the engine's thread only."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` of each tenant; 0 stores nothing."""
        self._max_tokens = max_tokens
        self._tenants: OrderedDict[str, _TenantOutputs] = OrderedDict()

    def find(self, request: Request) -> Tokens:
        """The output that this request may repeat, if there is one."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None or not _is_drafted(request):
            return NO_TOKENS
        prompt, tail = _keys(request)
        if prompt not in tenant.by_prompt:
            prompt = tenant.latest.get(tail, prompt)
        stored = tenant.by_prompt.get(prompt)
        if stored is None:
            return NO_TOKENS
        tenant.by_prompt.move_to_end(prompt)
        return stored.output

    def add(self, ended: TrackedRequest) -> None:
        """Stores the output of a request that has ended."""
        size = len(ended.output)
        if (
            not 0 < size <= self._max_tokens
            or not _is_drafted(ended.request)
            or ended.finish_reason is FinishReason.ERROR
        ):
            return
        tenant = self._tenants.setdefault(ended.tenant, _TenantOutputs())
        self._tenants.move_to_end(ended.tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        (prompt, tail), output = _keys(ended.request), np.array(ended.output, np.int32)
        if (before := tenant.by_prompt.get(prompt)) is not None:
            if np.array_equal(before.output[:size], output):  # this one was cut off: the longer one stays
                output = before.output
            tenant.remove(prompt)
        tenant.by_prompt[prompt] = _Stored(tail, output)
        tenant.latest[tail] = prompt
        tenant.num_tokens += len(output)
        while len(tenant.by_prompt) > MAX_OUTPUTS or tenant.num_tokens > self._max_tokens:
            tenant.remove(next(iter(tenant.by_prompt)))

    def clear(self) -> None:
        self._tenants.clear()


def _is_drafted(request: Request) -> bool:
    """Rows with a grammar have no drafts, and embeddings no output."""
    return request.params.grammar is None and not request.prefill_only


def _keys(request: Request) -> tuple[Key, Key]:
    """Of the whole prompt and of its last tokens."""
    _, salt, adapter = request.namespace
    whole, tail = hash(request.keys.tobytes()), hash(request.keys[-_TAIL:].tobytes())
    return (salt, adapter, whole), (salt, adapter, tail)
