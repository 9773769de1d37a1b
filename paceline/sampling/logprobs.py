"""How likely tokens were: of the output, with alternatives, and of the prompt.

What is told is the model's own opinion: the softmax of its logits, before temperature, penalties, bias and grammar.
Rows pay for what they ask. The logits of a prompt's tokens exist only while these are computed, so a request that asks
for them is computed from its first token on, whatever is cached (`Request.compute_from`); after a retraction the same
positions are computed again, and told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.request import Request
from paceline.scheduler.plan import Plan

MOST_ROWS = 256  # of logits at a time


@dataclass(frozen=True, slots=True)
class Ask:
    """`count` logits, of the pass's tokens from `index` on, are wanted for the tokens at `first` and after."""

    row: int
    index: int
    count: int
    first: int
    num_top: int
    ids: tuple[int, ...]


class LogprobAsks:
    """Who wants to know what, by slot."""

    def __init__(self, max_running: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._output = np.full(max_running, -1, np.int64)  # how many alternatives; -1: nothing is asked
        self._prompt = np.full(max_running, -1, np.int64)
        self._ids: list[tuple[int, ...]] = [()] * max_running

    def join(self, slot: int, request: Request) -> None:
        params = request.params
        self._output[slot] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._prompt[slot] = -1 if params.prompt_logprobs is None else min(params.prompt_logprobs, self._vocab_size)
        self._ids[slot] = params.logprob_token_ids

    def of_output(self, plan: Plan) -> list[Ask]:
        """One for each sampling row that asks; `index` counts sampling rows."""
        if not (self._output[plan.slots] >= 0).any():
            return []
        rows = np.flatnonzero(plan.samples)
        slots = plan.slots[rows]
        return [
            Ask(int(rows[i]), i, 1, int(plan.starts[rows[i]] + plan.lengths[rows[i]]), int(self._output[slots[i]]),
                self._ids[slots[i]])
            for i in np.flatnonzero(self._output[slots] >= 0).tolist()
        ]  # fmt: skip

    def of_prompts(self, plan: Plan) -> list[Ask]:
        """For each row that computes part of a prompt and asks; `index` counts the pass's tokens."""
        found = []
        for row in np.flatnonzero(self._prompt[plan.slots] >= 0).tolist():
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            # The prompt's last token is followed by none of it.
            count = min(int(plan.lengths[row]), len(plan.requests[row].prompt) - 1 - start)
            if count > 0:
                index = int(plan.lengths[:row].sum())
                found.append(Ask(row, index, count, start + 1, int(self._prompt[slot]), ()))
        return found


def split(ask: Ask, most: int = MOST_ROWS) -> Iterator[Ask]:
    """The same in parts of which the logits are not too many at a time."""
    for at in range(0, ask.count, most):
        count = min(most, ask.count - at)
        yield replace(ask, index=ask.index + at, count=count, first=ask.first + at)


def top_of(logits: Tensor, num_top: int, ids: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [n, V]: all log-chances, the ids of the alternatives and theirs."""
    chances = logits.float().log_softmax(dim=-1)
    top, top_ids = chances.topk(num_top, dim=-1)
    if ids:
        asked = torch.tensor([ids], device=logits.device).expand(len(logits), -1)
        top, top_ids = torch.cat([top, chances.gather(1, asked)], 1), torch.cat([top_ids, asked], 1)
    return chances, top_ids, top


def prompt_runs(
    asks: list[Ask], logits_of: Callable[[int, int], Tensor], tokens_of: Callable[[Ask], Tensor]
) -> Iterator[tuple[Ask, Tensor, Tensor, Tensor]]:
    """What each part of a prompt was asked: log-chances of its tokens, ids and log-chances of alternatives.

    `logits_of(index, count)` are those of the pass's tokens, `tokens_of` the tokens that follow them.
    """
    for ask in asks:
        for part in split(ask):
            chances, ids, top = top_of(logits_of(part.index, part.count), part.num_top, part.ids)
            yield part, chances.gather(1, tokens_of(part)[:, None])[:, 0], ids, top
