"""How likely tokens were: of the output, with alternatives, and of the prompt.

What is told is the model's own opinion: the softmax of its logits, before temperature, penalties, bias and grammar.
Rows pay for what they ask. The logits of a prompt's tokens exist only while these are computed, so a request that asks
for them is computed from its first token on, whatever is cached (`Request.compute_from`); after a retraction the same
positions are computed again, and told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.request import MAX_LOGPROBS
from paceline.sampling.types import LogprobRun, Logprobs
from paceline.scheduler.plan import Join, Plan

MOST_ROWS = 256  # of logits at a time


class LogprobWidth(NamedTuple):
    """How many columns there are to tell of a pass's output."""

    num_top: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """`count` logits, of the pass's tokens from `index` on, are wanted for the prompt's tokens at `first` and after."""

    row: int
    index: int
    count: int
    first: int
    num_top: int


class LogprobTable:
    """Who wants to know what, by slot."""

    def __init__(self, max_running: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_top = np.full(max_running, -1, np.int64)  # how many alternatives; -1: nothing is asked
        self.num_ids = np.zeros(max_running, np.int64)
        self.ids = np.zeros((max_running, MAX_LOGPROBS), np.int64)
        self._prompt = np.full(max_running, -1, np.int64)
        self._prompt_tokens = np.zeros(max_running, np.int64)

    def join(self, join: Join) -> None:
        slot, params = join.slot, join.params
        self._prompt_tokens[slot] = join.num_prompt_tokens
        self.num_top[slot] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._prompt[slot] = -1 if params.prompt_logprobs is None else min(params.prompt_logprobs, self._vocab_size)
        self.num_ids[slot] = len(params.logprob_token_ids)
        self.ids[slot, : len(params.logprob_token_ids)] = params.logprob_token_ids

    def of_output(self, plan: Plan) -> LogprobWidth | None:
        """None if no sampling row asks."""
        slots = plan.slots[plan.samples]
        num_top = int(self.num_top[slots].max(initial=-1))
        return None if num_top < 0 else LogprobWidth(num_top, int(self.num_ids[slots].max()))

    def of_prompts(self, plan: Plan) -> list[LogprobRequest]:
        """For each row that computes part of a prompt and asks; `index` counts the pass's tokens."""
        found = []
        for row in np.flatnonzero(self._prompt[plan.slots] >= 0).tolist():
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            # The prompt's last token is followed by none of it.
            count = min(int(plan.lengths[row]), int(self._prompt_tokens[slot]) - 1 - start)
            if count > 0:
                index = int(plan.lengths[:row].sum())
                found.append(LogprobRequest(row, index, count, start + 1, int(self._prompt[slot])))
        return found


def split(ask: LogprobRequest, most: int = MOST_ROWS) -> Iterator[LogprobRequest]:
    """The same in parts of which the logits are not too many at a time."""
    for at in range(0, ask.count, most):
        count = min(most, ask.count - at)
        yield replace(ask, index=ask.index + at, count=count, first=ask.first + at)


def numbers(logits: Tensor) -> Tensor:
    """As float32, minus infinity for what is no number or below any that a model means: as the GPU's kernel has it."""
    values = logits.float()
    return torch.where(values > -1e30, values, -torch.inf)


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The ids [n, count] of the largest of `numbers` [n, V], best first, equals by lower id: which of these `topk`
    takes, nobody says."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64)
    least = logits.topk(count, dim=-1).values[:, -1:]
    rows, ids = (part.numpy() for part in (logits >= least).nonzero(as_tuple=True))
    order = np.lexsort((ids, -logits.numpy()[rows, ids], rows))
    firsts = np.searchsorted(rows, np.arange(len(logits)))
    return torch.from_numpy(ids[order[firsts[:, None] + np.arange(count)]])


def output_logprobs(
    asks: LogprobTable, width: LogprobWidth, slots: npt.NDArray[np.int64], logits: Tensor
) -> Callable[[npt.NDArray[np.int64]], Logprobs]:
    """Reads logits [n, V] of these slots' rows before they are changed. What is returned is to be called with the
    tokens [n] that were chosen."""
    rows = np.flatnonzero(asks.num_top[slots] >= 0)
    raw = numbers(logits[torch.from_numpy(rows)])
    chances = raw.log_softmax(dim=-1)
    ids = top_ids(raw, width.num_top)
    asked = torch.from_numpy(asks.ids[slots[rows], : width.num_ids])

    def told(tokens: npt.NDArray[np.int64]) -> Logprobs:
        def column(of: Tensor) -> npt.NDArray[np.float32]:
            found = np.zeros((len(slots), of.shape[1]), np.float32)
            found[rows] = chances.gather(1, of).numpy()
            return found

        all_ids = np.zeros((len(slots), width.num_top), np.int32)
        all_ids[rows] = ids.numpy()
        chosen = column(torch.from_numpy(tokens[rows, None]))[:, 0]
        return Logprobs(chosen, all_ids, column(ids), column(asked))

    return told


def prompt_runs(
    asks: list[LogprobRequest], logits_of: Callable[[int, int], Tensor], tokens_of: Callable[[LogprobRequest], Tensor]
) -> tuple[LogprobRun, ...]:
    """What each part of a prompt was asked. `logits_of(index, count)` are those of the pass's tokens, `tokens_of` the
    tokens that follow them."""
    found = []
    for ask in asks:
        for part in split(ask):
            raw = numbers(logits_of(part.index, part.count))
            chances, ids = raw.log_softmax(dim=-1), top_ids(raw, part.num_top)
            chosen = chances.gather(1, tokens_of(part)[:, None])[:, 0]
            found.append(LogprobRun(part.row, part.first, chosen.numpy(), ids.int().numpy(),
                                    chances.gather(1, ids).numpy()))  # fmt: skip
    return tuple(found)
