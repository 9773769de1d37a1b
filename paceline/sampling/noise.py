"""Gumbel noise that depends only on the seed, the position and the token id.

The argmax of logits + Gumbel noise is a sample of the softmax. Because the noise is computed from counters and not
drawn from a stream, a request gets the same tokens alone, in any batch, after a retraction and overlapped, and only the
tokens that can win need noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * _MIX_1
        values = (values ^ (values >> np.uint64(27))) * _MIX_2
        return values ^ (values >> np.uint64(31))


def row_keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
    """A 64-bit key for each row."""
    keys = _splitmix(_splitmix(seeds.view(np.uint64)) ^ positions.astype(np.int64).view(np.uint64))
    return torch.from_numpy(keys.view(np.int64))


def token_keys(vocab_size: int) -> Tensor:
    """A 64-bit key for each token id."""
    return torch.from_numpy(_splitmix(np.arange(vocab_size, dtype=np.uint64)).view(np.int64))


def gumbel(rows: Tensor, tokens: Tensor) -> Tensor:
    """Float32 noise of the broadcast of rows' and tokens' keys."""
    # The end of splitmix64 on the combined keys. 64-bit multiplication wraps as needed; shifts must be made logical.
    mixed = (rows ^ tokens).mul_(int(_MIX_1.view(np.int64)))
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    mixed.mul_(int(_MIX_2.view(np.int64)))
    # Adding 0.5 keeps 0 and 1 out of the logarithms. 23 bits: with one more, the largest value plus 0.5 would not fit
    # into a float32 and round up to 1, whose noise is infinite and would select even a masked token.
    uniform = ((mixed >> 41) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
