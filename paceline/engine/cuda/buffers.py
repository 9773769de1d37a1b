"""The host and device buffers of forward passes in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.engine.cuda.inputs import PackedBatch, UploadSpan
from paceline.engine.cuda.streams import Streams
from paceline.kernels.layouts import DRAFT_WORDS, LOGPROB_WORDS

SENT_AT_ONCE = 2  # passes of a stage of a pipeline whose hidden states are sent while the next is computed
_INITIAL_WORDS = 1 << 20  # of an upload buffer; it grows when a pass needs more, and that launch waits


class PassBuffers:
    """The buffers and events of one forward pass at a time. They are reused once its results have been read."""

    def __init__(
        self,
        streams: Streams,
        max_running: int,
        max_rows: int,
        max_prompt_lines: int,
        hidden_size: int,
        device: torch.device,
    ) -> None:
        """max_rows: most tokens that a pass samples, which are more than its rows if they have drafts.
        max_prompt_lines: most lines of prompt logprobs."""
        self._streams, self._device = streams, device
        self.uploaded, self.began, self.ended, self.copied = (streams.event() for _ in range(4))
        self.fetch_began, self.fetched = (streams.event() for _ in range(2))
        self.proposed, self.drafts_copied = (streams.event() for _ in range(2))
        self.results = streams.pinned(max_rows)
        self.logprobs = streams.pinned(max_rows * LOGPROB_WORDS).view(max_rows, LOGPROB_WORDS)
        shape = (max_prompt_lines, LOGPROB_WORDS)
        self.prompt_lines = torch.empty(shape, dtype=torch.int32, device=device)
        self.host_prompt_lines = streams.pinned(self.prompt_lines.numel()).view(shape)
        # First the drafts that the host computes masks for, if it does, then the results.
        self.drafts = streams.pinned(max_running * DRAFT_WORDS).view(max_running, DRAFT_WORDS)
        self.pooled = torch.empty(max_running, hidden_size, device=device)  # hidden states of prompts that are embedded
        self.host_pooled = streams.pinned(self.pooled.numel()).view(torch.float32).view(self.pooled.shape)
        self._grow(_INITIAL_WORDS)

    def _grow(self, num_words: int) -> None:
        self._upload = self._streams.pinned(num_words)
        self._words = self._upload.numpy()
        self._staging = torch.empty(num_words, dtype=torch.int32, device=self._device)

    def send(self, packed: PackedBatch) -> None:
        """Copies the upload to the staging buffer asynchronously. The last pass that used these buffers has ended."""
        if packed.num_words > len(self._words):
            self._grow(1 << (packed.num_words - 1).bit_length())
        packed.write(self._words)
        with self._streams.use(self._streams.copy):
            self._staging[: packed.num_words].copy_(self._upload[: packed.num_words], non_blocking=True)
        self.uploaded.record(self._streams.copy)

    def span(self, span: UploadSpan) -> Tensor:
        return self._staging[span.first : span.first + span.count]

    @property
    def diff(self) -> Tensor:
        """The packed diff, which is the first part of the upload."""
        return self._staging
