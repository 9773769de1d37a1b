"""Reference implementation of scheduler and prefix tree: one request after the other, a dictionary as the cache.

No pages are shared, moved, locked or evicted; the cache maps a prefix to the KV of its last page. The tokens of the
real scheduler must equal these.
"""

from __future__ import annotations

from paceline.request import FinishReason, Request
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.testing import _MASK, _kv, _sample, _seed, content_of


class ReferenceScheduler:
    def __init__(self, page_size: int, vocab: int) -> None:
        self.page_size = page_size
        self.vocab = vocab
        self.cache: dict[tuple[object, ...], list[int]] = {}
        self.hit_tokens = 0

    def run(self, request: TrackedRequest) -> tuple[list[int], FinishReason]:
        """All tokens of one request, computed with the KV that earlier requests left in the dictionary."""
        space = request.namespace
        tokens = content_of(request.prompt, request.keys)
        values = self._cached(space, tokens)
        self.hit_tokens += len(values)
        stops = set(request.params.stop_token_ids) | (
            set() if request.params.ignore_eos else set(request.request.eos_token_ids)
        )
        output: list[int] = []
        reason = FinishReason.LENGTH
        while True:
            total = (_seed(request.namespace) + sum(values)) & _MASK
            for position in range(len(values), len(tokens)):
                values.append(_kv(tokens[position], position, total))
                total = (total + values[-1]) & _MASK
            if request.prefill_only:
                break
            output.append(_sample(total, self.vocab))
            if output[-1] in stops and len(output) >= request.params.min_tokens:
                reason = FinishReason.STOP
                break
            if len(output) >= request.max_tokens:
                break
            tokens.append(output[-1])
        for end in range(self.page_size, len(values) + 1, self.page_size):
            self.cache[(*space, *tokens[:end])] = values[end - self.page_size : end]
        return output, reason

    def match(self, request: Request) -> int:
        space = request.namespace
        return len(self._cached(space, content_of(request.prompt, request.keys)))

    def _cached(self, space: tuple[object, ...], tokens: list[int]) -> list[int]:
        values: list[int] = []
        for end in range(self.page_size, len(tokens), self.page_size):  # the last token is always fed
            page = self.cache.get((*space, *tokens[:end]))
            if page is None:
                break
            values += page
        return values
