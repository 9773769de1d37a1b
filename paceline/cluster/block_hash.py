"""Hashes of prompt prefixes, page by page: what engines and the router call a cached page.

The hash of page i is that of its parent plus a mix of its own keys and i, modulo 2^64. So all pages of a prompt are
hashed by a few array operations, and the hash of a page says all keys before it too. The keys of text are its tokens.
Two pages with equal hashes mislead the router, never an engine: a prefix tree compares keys.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.request import Tokens

Hashes = npt.NDArray[np.uint64]
_NUM_FIRST = 4096  # pages whose index terms are kept


_SHIFTS = [np.uint64(bits) for bits in (31, 29, 32)]  # made once: a scalar costs as much as an operation on a page


class _Constants(NamedTuple):
    """Random odd numbers, the same in every process: one per token of a page, and one for its index."""

    multipliers: Hashes
    token_sum: np.uint64  # of these: token ids count from 1
    index_multiplier: np.uint64
    index_terms: Hashes  # of the first pages


@lru_cache(maxsize=8)
def _constants(page_size: int) -> _Constants:
    digest = hashlib.shake_256(b"paceline block hash").digest(8 * (page_size + 1))
    numbers = np.frombuffer(digest, np.uint64) | np.uint64(1)
    return _Constants(
        numbers[:-1], numbers[:-1].sum(), numbers[-1], np.arange(1, _NUM_FIRST + 1, dtype=np.uint64) * numbers[-1]
    )


def root_hash(namespace: tuple[str, ...]) -> int:
    """What the first page of a prompt has as its parent: requests share KV only within one namespace."""
    digest = hashlib.blake2b("\0".join(namespace).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def block_hashes(keys: Tokens, page_size: int, parent: int, num_before: int = 0) -> Hashes:
    """The hash of every whole page of `keys`, which follow `num_before` pages, the last of which is `parent`."""
    count = len(keys) // page_size
    constants = _constants(page_size)
    pages = keys[: count * page_size].reshape(count, page_size).astype(np.uint64)
    hashes: Hashes = pages @ constants.multipliers
    hashes += constants.token_sum
    end = num_before + count
    if end <= _NUM_FIRST:
        hashes += constants.index_terms[num_before:end]
    else:
        hashes += np.arange(num_before + 1, end + 1, dtype=np.uint64) * constants.index_multiplier
    hashes ^= hashes >> _SHIFTS[0]
    hashes *= constants.multipliers[0]
    hashes ^= hashes >> _SHIFTS[1]
    hashes *= constants.index_multiplier
    hashes ^= hashes >> _SHIFTS[2]
    hashes = hashes.cumsum()
    hashes += np.uint64(parent)
    return hashes
