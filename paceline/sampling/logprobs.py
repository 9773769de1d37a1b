"""Logprobs of output tokens, with alternatives, and of prompt tokens.

Logprobs are those of the model: the log-softmax of its logits, before temperature, penalties, bias and grammar. A row
costs only what it requests. The logits of prompt tokens exist only while the prompt is computed, so a request with
prompt logprobs is computed from the token before the first requested one on, whatever is cached
(`Request.compute_from`); after a retraction the same positions are computed and reported again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.request import MAX_LOGPROBS
from paceline.sampling.types import LogprobRun, Logprobs
from paceline.scheduler.plan import Join, Plan

MAX_LOGIT_ROWS = 256  # rows of logits that exist at a time


class LogprobWidth(NamedTuple):
    """The number of logprob columns that the sampling rows of a pass request."""

    num_top: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Prompt logprobs of one row: the `count` logits from token `index` of the batch on give the logprobs of the prompt
    tokens from position `first` on."""

    row: int
    index: int
    count: int
    first: int
    num_top: int


class LogprobTable:
    """The logprobs that each slot requests."""

    def __init__(self, max_running: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_top = np.full(max_running, -1, np.int64)  # number of alternatives; -1: no logprobs
        self.num_ids = np.zeros(max_running, np.int64)
        self.ids = np.zeros((max_running, MAX_LOGPROBS), np.int64)
        self._prompt = np.full(max_running, -1, np.int64)
        self._prompt_start = np.zeros(max_running, np.int64)
        self._prompt_tokens = np.zeros(max_running, np.int64)

    def join(self, join: Join) -> None:
        slot, params = join.slot, join.params
        self._prompt_tokens[slot] = join.num_prompt_tokens
        self.num_top[slot] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._prompt[slot] = -1 if params.prompt_logprobs is None else min(params.prompt_logprobs, self._vocab_size)
        self._prompt_start[slot] = params.prompt_logprobs_start
        self.num_ids[slot] = len(params.logprob_token_ids)
        self.ids[slot, : len(params.logprob_token_ids)] = params.logprob_token_ids

    def of_output(self, plan: Plan) -> LogprobWidth | None:
        """The width of the output logprobs; None if no sampling row requests any."""
        slots = plan.slots[plan.samples]
        num_top = int(self.num_top[slots].max(initial=-1))
        return None if num_top < 0 else LogprobWidth(num_top, int(self.num_ids[slots].max()))

    def of_prompts(self, plan: Plan) -> list[LogprobRequest]:
        """One entry for each row that computes part of a prompt and requests prompt logprobs."""
        requests: list[LogprobRequest] = []
        if plan.num_decodes == plan.num_rows:
            return requests
        for row in np.flatnonzero(self._prompt[plan.slots] >= 0).tolist():
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            # A position's logits give the logprob of the next token; no prompt token follows the last one.
            first = max(start + 1, int(self._prompt_start[slot]))
            end = min(start + 1 + int(plan.lengths[row]), int(self._prompt_tokens[slot]))
            if first < end:
                index = int(plan.lengths[:row].sum()) + first - 1 - start
                requests.append(LogprobRequest(row, index, end - first, first, int(self._prompt[slot])))
        return requests


def batches(requests: Iterable[LogprobRequest], max_rows: int) -> Iterator[list[LogprobRequest]]:
    """The same requests, in order, in batches of `max_rows` rows of logits together; the last one may have fewer."""
    batch: list[LogprobRequest] = []
    room = max_rows
    for request in requests:
        while request.count:
            part = replace(request, count=min(room, request.count))
            batch.append(part)
            room -= part.count
            request = replace(
                request,
                index=request.index + part.count,
                count=request.count - part.count,
                first=request.first + part.count,
            )
            if not room:
                yield batch
                batch, room = [], max_rows
    if batch:
        yield batch


def without_nan(logits: Tensor) -> Tensor:
    """Logits in float32, with minus infinity for NaN and for values below -1e30, as in the GPU's kernel."""
    values = logits.float()
    return torch.where(values > -1e30, values, -torch.inf)


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The ids [n, count] of the largest of `logits` [n, V], best first, ties by lower id, an order that `topk` does not
    guarantee. `logits` must not contain NaN."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64)
    least = logits.topk(count, dim=-1).values[:, -1:]
    rows, ids = (part.numpy() for part in (logits >= least).nonzero(as_tuple=True))
    order = np.lexsort((ids, -logits.numpy()[rows, ids], rows))
    firsts = np.searchsorted(rows, np.arange(len(logits)))
    return torch.from_numpy(ids[order[firsts[:, None] + np.arange(count)]])


def output_logprobs(
    table: LogprobTable, width: LogprobWidth, slots: npt.NDArray[np.int64], logits: Tensor
) -> Callable[[npt.NDArray[np.int64]], Logprobs]:
    """Reads logits [n, V] of these slots before sampling changes them. Call the result with the sampled tokens [n]."""
    rows = np.flatnonzero(table.num_top[slots] >= 0)
    valid = without_nan(logits[torch.from_numpy(rows)])
    logprobs = valid.log_softmax(dim=-1)
    ids = top_ids(valid, width.num_top)
    requested = torch.from_numpy(table.ids[slots[rows], : width.num_ids])

    def logprobs_of(tokens: npt.NDArray[np.int64]) -> Logprobs:
        def columns(of: Tensor) -> npt.NDArray[np.float32]:
            found = np.zeros((len(slots), of.shape[1]), np.float32)
            found[rows] = logprobs.gather(1, of).numpy()
            return found

        all_ids = np.zeros((len(slots), width.num_top), np.int32)
        all_ids[rows] = ids.numpy()
        chosen = columns(torch.from_numpy(tokens[rows, None]))[:, 0]
        return Logprobs(chosen, all_ids, columns(ids), columns(requested))

    return logprobs_of


def prompt_runs(
    requests: list[LogprobRequest],
    logits_of: Callable[[int, int], Tensor],
    tokens_of: Callable[[LogprobRequest], Tensor],
) -> tuple[LogprobRun, ...]:
    """The requested prompt logprobs. `logits_of(index, count)` are the logits of the batch's tokens, `tokens_of` the
    tokens that follow them."""
    runs = []
    for request in requests:
        for (part,) in batches([request], MAX_LOGIT_ROWS):
            valid = without_nan(logits_of(part.index, part.count))
            logprobs, ids = valid.log_softmax(dim=-1), top_ids(valid, part.num_top)
            chosen = logprobs.gather(1, tokens_of(part)[:, None])[:, 0]
            top = logprobs.gather(1, ids)
            runs.append(LogprobRun(part.row, part.first, chosen.numpy(), ids.int().numpy(), top.numpy()))
    return tuple(runs)
