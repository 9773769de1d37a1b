"""Which replica has which page: the index agrees with one plain set per replica."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.cluster import page_index
from paceline.cluster.page_index import PageIndex

NUM_REPLICAS = 4
REPLICAS = st.integers(0, NUM_REPLICAS - 1)
PAGES = st.lists(st.integers(0, 30), max_size=8, unique=True)
SECONDS = st.integers(0, 12).map(float)


class IndexMachine(RuleBasedStateMachine):
    """The reference: a set of pages per replica that events named, another of assumed ones, and what expires when."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex(NUM_REPLICAS)
        self.held: list[set[int]] = [set() for _ in range(NUM_REPLICAS)]
        self.assumed: list[set[int]] = [set() for _ in range(NUM_REPLICAS)]
        self.expiring: list[tuple[float, int, list[int]]] = []

    @rule(replica=REPLICAS, pages=PAGES)
    def stored(self, replica: int, pages: list[int]) -> None:
        self.index.stored(replica, pages)
        self.assumed[replica] -= set(pages) - self.held[replica]
        self.held[replica] |= set(pages)

    @rule(replica=REPLICAS, pages=PAGES)
    def removed(self, replica: int, pages: list[int]) -> None:
        self.index.removed(replica, pages)
        self.held[replica] -= set(pages)

    @rule(replica=REPLICAS)
    def cleared(self, replica: int) -> None:
        self.index.clear(replica)
        self._forget(replica)

    @rule(replica=REPLICAS, capacity=st.integers(0, 20))
    def reported(self, replica: int, capacity: int) -> None:
        self.index.check_capacity(replica, capacity)
        if len(self.held[replica]) > capacity:
            self._forget(replica)

    def _forget(self, replica: int) -> None:
        self.held[replica], self.assumed[replica] = set(), set()
        self.expiring = [one for one in self.expiring if one[1] != replica]

    @rule(replica=REPLICAS, pages=PAGES, expires=SECONDS)
    def assume(self, replica: int, pages: list[int], expires: float) -> None:
        self.index.assume(replica, pages, expires)
        self.assumed[replica] |= set(pages)
        self.expiring.append((expires, replica, pages))

    @rule(now=SECONDS)
    def expire(self, now: float) -> None:
        self.index.expire(now)
        for expires, replica, pages in self.expiring:
            if expires <= now:
                self.assumed[replica] -= set(pages)
        self.expiring = [one for one in self.expiring if one[0] > now]

    @rule(pages=PAGES)
    def prefix(self, pages: list[int]) -> None:
        expected = []
        for held, assumed in zip(self.held, self.assumed, strict=True):
            count = 0
            while count < len(pages) and pages[count] in held | assumed:
                count += 1
            expected.append(count)
        assert self.index.prefix_pages(pages) == expected

    @invariant()
    def memory_is_bounded(self) -> None:
        """Without cleared replicas there is one entry for each page that somebody holds or is assumed to hold."""
        self.index._compact()
        everything = [set[int]().union(*sets) for sets in (self.held, self.assumed)]
        assert len(self.index) == sum(map(len, everything))


class LazyIndexMachine(IndexMachine):
    """The same without compacting after every step: bits of cleared replicas are left in the entries."""

    def memory_is_bounded(self) -> None:
        pass


TestIndex = IndexMachine.TestCase
TestLazyIndex = LazyIndexMachine.TestCase


def test_clearing_replicas_again_and_again_needs_no_more_memory() -> None:
    index = PageIndex(2)
    index.stored(1, range(1000))
    for start in range(0, 400_000, 2000):
        index.stored(0, range(start, start + 2000))
        index.clear(0)
    assert len(index) < 10_000
    assert index.prefix_pages(range(1000)) == [0, 1000]
    for _ in range(1000):  # a replica that restarts with next to nothing
        index.stored(0, [1])
        index.clear(0)
    assert max(index._bits).bit_length() < 200


def test_assumed_pages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_index, "MAX_ASSUMED", 100)
    index = PageIndex(1)
    for start in range(0, 1000, 50):
        index.assume(0, list(range(start, start + 50)), float(start))
    assert len(index) == 100
    assert index.prefix_pages([999]) == [1] and index.prefix_pages([0]) == [0]


def test_sixty_four_replicas_are_told_apart() -> None:
    index, rng = PageIndex(64), np.random.default_rng(0)
    lengths = rng.integers(0, 50, 64).tolist()
    for replica, length in enumerate(lengths):
        index.stored(replica, range(length))
    assert index.prefix_pages(range(50)) == lengths
