"""Logprobs of prompt tokens on a GPU: kernel by kernel after a prefill batch, those of all its prompts together.

Logits of a token take hundreds of kilobytes, so they are computed in parts of a few sizes, for which libraries have
loaded their kernels. A part takes few launches: a launch queue that is full would delay the reports of the pass before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.cuda.inputs import Column, output_rows, output_sizes
from paceline.engine.cuda.model import CudaModel
from paceline.kernels.layouts import LOGPROB_WORDS, SAMPLING_WORDS, LogprobWord, SamplingWord
from paceline.kernels.logprobs import LogprobWorkspace, chosen_logprobs, top_logprobs
from paceline.request import MAX_LOGPROBS
from paceline.sampling.logprobs import MAX_LOGIT_ROWS, LogprobRequest, LogprobWidth, batches
from paceline.sampling.types import LogprobRun, Logprobs


class PromptLogprobs:
    """Computes them with the kernels of sampled tokens: as if one slot, which requests all alternatives, had sampled
    the next token of the prompt at every position."""

    def __init__(self, model: CudaModel, token_pool: Tensor) -> None:
        device, self._model, self._token_pool = token_pool.device, model, token_pool
        self.max_rows = rows = min(MAX_LOGIT_ROWS, model.max_rows)  # as many as the model has logits of

        def words(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._states = torch.zeros(rows, model.spec.hidden_size, dtype=model.dtype, device=device)
        self._tokens, self._lines = words(1, rows), words(1, rows, LOGPROB_WORDS)  # of one step
        self._slots, self._step, self._num_rows = words(rows), words(1), words(1) + rows
        self._sampling = words(1, SAMPLING_WORDS)
        self._sampling[0, SamplingWord.LOGPROBS] = 1 + MAX_LOGPROBS
        self._workspace = LogprobWorkspace.empty(rows, device)

    def compute(self, requests: Sequence[LogprobRequest], slots: Column, hidden: Tensor, lines: Tensor) -> None:
        """Writes a line [LOGPROB_WORDS] for each token to `lines`, in the order of the requests. slots: of the rows of
        the batch, whose hidden states are `hidden`."""
        at = 0
        for parts in batches(requests, self.max_rows):
            end = 0
            for part in parts:
                first, end = end, end + part.count
                tokens = self._token_pool[int(slots[part.row]), part.first : part.first + part.count]
                self._states[first:end].copy_(hidden[part.index : part.index + part.count])
                self._tokens[0, first:end].copy_(tokens)
            self.launch(output_rows(end, self.max_rows))
            lines[at : at + end].copy_(self._lines[0, :end])
            at += end

    def launch(self, rows: int) -> None:
        """Computes the lines of so many rows, of which the last ones may be padding."""
        logits = self._model.logits(self._states[:rows])
        inputs = logits, self._slots, self._num_rows, self._sampling
        top_logprobs(*inputs, self._lines, self._step, self._workspace)
        chosen_logprobs(*inputs, self._tokens, self._lines, self._step, self._workspace)

    def launch_all(self) -> None:
        """Launches every kernel in every variant."""
        for rows in output_sizes(self.max_rows):
            self.launch(rows)


def logprob_columns(words: npt.NDArray[np.int32], width: LogprobWidth) -> Logprobs:
    """The device's logprobs of rows [n, LOGPROB_WORDS], as many columns as some row requests."""

    def floats(first: int, count: int) -> npt.NDArray[np.float32]:
        return words[:, first : first + count].view(np.float32)

    num_top, num_ids = width
    ids = words[:, LogprobWord.TOP_IDS : LogprobWord.TOP_IDS + num_top]
    top = floats(LogprobWord.TOP_LOGPROBS, num_top)
    return Logprobs(floats(LogprobWord.CHOSEN, 1)[:, 0], ids, top, floats(LogprobWord.REQUESTED, num_ids))


def prompt_runs(lines: npt.NDArray[np.int32], requests: Sequence[LogprobRequest]) -> tuple[LogprobRun, ...]:
    """What `compute` has written, copied: a later pass reuses the lines."""
    runs, at = [], 0
    for request in requests:
        found = logprob_columns(lines[at : at + request.count].copy(), LogprobWidth(request.num_top, 0))
        runs.append(LogprobRun(request.row, request.first, found.chosen, found.top_ids, found.top))
        at += request.count
    return tuple(runs)
