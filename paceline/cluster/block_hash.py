"""Hashes of prompt prefixes, page by page: what engines and the router call a cached page.

The hash of page i is that of its parent plus a mix of its own tokens and i, modulo 2^64. So all pages of a prompt are
hashed by a few array operations, and the hash of a page says all tokens before it too. Two pages with equal hashes
mislead the router, never an engine: a prefix tree compares tokens.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paceline.request import Tokens

Hashes = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)
def _multipliers(page_size: int) -> Hashes:
    """Random odd numbers, the same in every process: one per token of a page, and one for its index."""
    size = 8 * (page_size + 1)
    return np.frombuffer(hashlib.shake_256(b"paceline block hash").digest(size), np.uint64) | np.uint64(1)


def root_hash(namespace: tuple[str, ...]) -> int:
    """What the first page of a prompt has as its parent: requests share KV only within one namespace."""
    digest = hashlib.blake2b("\0".join(namespace).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def block_hashes(tokens: Tokens, page_size: int, parent: int, num_before: int = 0) -> Hashes:
    """The hash of every whole page of `tokens`, which follow `num_before` pages, the last of which is `parent`."""
    count = len(tokens) // page_size
    multipliers = _multipliers(page_size)
    pages = tokens[: count * page_size].reshape(count, page_size).astype(np.uint64)
    with np.errstate(over="ignore"):
        hashes = (pages + np.uint64(1)) @ multipliers[:-1]
        hashes += (np.arange(num_before, num_before + count, dtype=np.uint64) + np.uint64(1)) * multipliers[-1]
        hashes ^= hashes >> np.uint64(31)
        hashes *= multipliers[0]
        hashes ^= hashes >> np.uint64(29)
        hashes *= multipliers[-1]
        hashes ^= hashes >> np.uint64(32)
        return np.cumsum(hashes, dtype=np.uint64) + np.uint64(parent)
