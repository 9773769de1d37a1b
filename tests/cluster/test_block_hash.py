"""Hashes of prompt prefixes, page by page."""

from __future__ import annotations

import numpy as np

from paceline.cluster.block_hash import block_hashes, root_hash

ROOT = root_hash(("a", "", ""))


def test_the_hashes_of_a_longer_prompt_begin_with_those_of_its_prefix() -> None:
    tokens = np.arange(100, dtype=np.int32)
    hashes = block_hashes(tokens, 16, ROOT)
    assert len(hashes) == 6
    assert (hashes[:3] == block_hashes(tokens[:60], 16, ROOT)).all()
    assert (hashes[3:] == block_hashes(tokens[48:], 16, int(hashes[2]), 3)).all()


def test_hashes_depend_on_tokens_order_parent_and_namespace() -> None:
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for page in rng.integers(0, 50, (2_000, 16)).astype(np.int32):
        seen.update(block_hashes(page, 16, ROOT).tolist())
    one, two = np.zeros(16, np.int32), np.ones(16, np.int32)
    for pair in ((one, two), (two, one), (one, one), (two, two)):
        seen.update(block_hashes(np.concatenate(pair), 16, ROOT).tolist())
    seen.update(block_hashes(one, 16, root_hash(("b", "", ""))).tolist())
    assert len(seen) == 2_000 + 2 + 4 + 1
    assert root_hash(("a", "b")) != root_hash(("ab", ""))


def test_a_prompt_shorter_than_a_page_has_no_hashes() -> None:
    assert len(block_hashes(np.arange(15, dtype=np.int32), 16, ROOT)) == 0
