"""RankGroup: the ranks that a model is sharded over, and the collectives that its forward pass needs; StageLink: the
stages that its layers are divided among.

The interfaces are here because the decoder uses them; `parallel/` implements them. Where there is neither, the whole
model is on one device, and nothing is communicated.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.layout import WHOLE_MODEL, Shard
from paceline.model.linear import Table, rows_of
from paceline.model.spec import ModelSpec


class RankGroup(Protocol):
    """All ranks call the same collectives in the same order. What is gathered or a maximum has the same bits on every
    rank; sums may differ by rounding."""

    @property
    def shard(self) -> Shard: ...

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs can contain these collectives."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. `tensor`, which is contiguous, may be overwritten and returned."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[ranks, ...]: the tensors of all ranks, which have the same shape."""

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The maximum over ranks of int64 numbers. `tensor` may be overwritten and returned."""


class StageLink(Protocol):
    """One stage of a pipeline. Hidden states are sent in the order of the passes."""

    @property
    def shard(self) -> Shard: ...

    def begin(self) -> None:
        """The first stage begins a pass."""

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Hidden states [T, H] of the stage before."""

    def send(self, hidden: Tensor) -> None:
        """To the stage behind. `hidden` is not changed any more."""

    @property
    def elapsed_s(self) -> float:
        """Time that the pass has taken on this stage and those before, without waiting for other passes."""

    def send_result(self, data: bytes) -> None:
        """To the first stage."""

    def receive_result(self, stage: int | None = None) -> bytes:
        """Blocks until a stage, by default the last one, has sent its next result. Called by another thread than the
        others."""


def shard_of(group: RankGroup | StageLink | None) -> Shard:
    return WHOLE_MODEL if group is None else group.shard


def embed(group: RankGroup | None, spec: ModelSpec, embedding: Table, tokens: Tensor) -> Tensor:
    """Embeddings [T, H] of token ids, of which each rank has a part."""
    if group is None:
        return rows_of(embedding, tokens)
    ids = group.shard.vocabulary(spec)
    rows = tokens - ids.start
    is_here = (rows >= 0) & (rows < embedding.shape[0])
    return group.all_reduce(rows_of(embedding, rows.where(is_here, 0)) * is_here[:, None])


def gather_logits(group: RankGroup | None, spec: ModelSpec, logits: Tensor) -> Tensor:
    """Logits [N, vocab] on every rank, from those of each rank's part of the vocabulary."""
    if group is None:
        return logits
    widths = vocabulary_widths(group.shard.size, spec)
    gathered = group.all_gather(F.pad(logits, (0, max(widths) - logits.shape[1])))
    return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], dim=1)


def vocabulary_widths(num_ranks: int, spec: ModelSpec) -> list[int]:
    """How many token ids each rank has."""
    parts = [Shard(rank, num_ranks).vocabulary(spec) for rank in range(num_ranks)]
    return [part.stop - part.start for part in parts]
