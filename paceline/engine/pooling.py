"""Embeddings: hidden states of a prompt, pooled into one vector.

The executor reduces the states of each prefill chunk (`pool_chunk`) and returns them in `Result.pooled`; the engine
adds up the chunks (`Pooler`). After a retraction a prompt is computed again, so its first chunk starts over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PooledStates(NamedTuple):
    """One prefill chunk of a prompt that is embedded: the sum of its hidden states, or the last one."""

    row: int  # of the plan
    start: int  # position of the chunk's first token
    states: npt.NDArray[np.float64]  # [hidden]


def pool_chunk(pooling: str, states: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Hidden states [tokens, hidden] of a chunk, reduced to [hidden]."""
    pooled: npt.NDArray[np.float64]
    pooled = states[-1].astype(np.float64) if pooling == "last" else states.sum(axis=0, dtype=np.float64)
    return pooled


class Pooler:
    """Collects the chunks of one prompt."""

    def __init__(self, pooling: str) -> None:
        self._pooling = pooling
        self._total: npt.NDArray[np.float64] | None = None

    def add(self, chunk: PooledStates) -> None:
        if self._total is None or chunk.start == 0 or self._pooling == "last":
            self._total = chunk.states
        else:
            self._total = self._total + chunk.states

    def vector(self) -> npt.NDArray[np.float32]:
        """The embedding, scaled to length 1. Only its direction matters, so a sum serves as a mean."""
        assert self._total is not None, "the prompt was not computed"
        norm = max(float(np.linalg.norm(self._total)), 1e-30)
        unit: npt.NDArray[np.float32] = (self._total / norm).astype(np.float32)
        return unit
