"""The prefix tree against a dictionary (prefix -> page), and its other promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.config import EVICTION
from paceline.scheduler import eviction
from paceline.scheduler.node import Node
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.tracked_request import TrackedRequest
from tests.helpers import tracked

SPACE = ("default", "", "")


class Tree:
    """A prefix tree with its own page numbers."""

    def __init__(self, page_size: int = 2, eviction: str = "lru", **options: bool) -> None:
        self.tree = PrefixTree(page_size, eviction, **options)
        self.page_size = page_size
        self.next_page = 0
        self.arrivals = 0
        self.step = 1
        self.held: dict[TrackedRequest, Node] = {}

    def hold(self, tokens: list[int], **fields: Any) -> TrackedRequest:
        """Does what a request does: match, lock, compute the rest, insert it."""
        holder = tracked(tokens, **fields)
        holder.key = holder.prompt.tobytes()
        tree, node = self.tree, self.tree.namespace(holder.namespace)
        end = len(tokens) // self.page_size * self.page_size
        tree.lock(holder, node)
        while (child := tree.match_child(node, holder.key, end, self.step)) is not None:
            tree.lock(holder, child, above=node)
            node = child
        row = np.arange(self.next_page, self.next_page + end // self.page_size, dtype=np.int32)
        self.next_page += len(row)
        self.held[holder] = tree.insert(holder, node, holder.key, end, row, self.step - 1)
        return holder

    def release(self, holder: TrackedRequest) -> None:
        self.tree.unlock(holder, self.held.pop(holder))

    def insert(self, tokens: list[int], **fields: Any) -> None:
        self.release(self.hold(tokens, **fields))

    def evict(self, count: int) -> np.ndarray:
        return self.tree.evict(count, self.step)

    def hit(self, waiter: TrackedRequest) -> int:
        """Depth of the cached prefix of a waiting request."""
        return self.tree.hit(self.tree.waiting_nodes[waiter], self.step).depth

    def match(self, tokens: list[int], space: tuple[str, str, str] = SPACE) -> int:
        return self.tree.match(space, np.array(tokens, np.int32).tobytes())

    def wait(self, tokens: list[int], **fields: str) -> TrackedRequest:
        waiter = tracked(tokens, **fields)
        self.arrivals += 1
        waiter.number = self.arrivals
        self.tree.enqueue(waiter, waiter.prompt.tobytes(), (len(tokens) - 1) // self.page_size)
        return waiter


def test_a_prefix_is_found_page_by_page() -> None:
    subject = Tree(page_size=2)
    subject.insert([1, 2, 3, 4, 5])
    assert subject.match([1, 2, 3, 4, 5, 6]) == 4
    assert subject.match([1, 2, 3, 9]) == 2
    assert subject.match([1]) == 0
    assert subject.match([2, 2]) == 0


def test_page_size_one_matches_token_by_token() -> None:
    subject = Tree(page_size=1)
    subject.insert([1, 2, 3])
    assert [subject.match(tokens) for tokens in ([1], [1, 2, 9], [1, 2, 3, 4])] == [1, 2, 3]


@pytest.mark.parametrize("other", [("else", "", ""), ("default", "salt", ""), ("default", "", "adapter")])
def test_namespaces_never_share_prefixes(other: tuple[str, str, str]) -> None:
    subject = Tree()
    subject.insert([1, 2, 3, 4])
    assert subject.match([1, 2, 3, 4], other) == 0


def test_diverging_prompts_split_a_node_and_keep_both_halves() -> None:
    subject = Tree(page_size=2)
    subject.insert([1, 2, 3, 4, 5, 6])
    subject.insert([1, 2, 3, 4, 7, 8])
    assert subject.match([1, 2, 3, 4, 5, 6]) == subject.match([1, 2, 3, 4, 7, 8]) == 6
    assert subject.tree.num_pages == 4


def test_a_locked_path_and_its_ancestors_are_never_evicted() -> None:
    subject = Tree(page_size=2)
    holder = subject.hold([1, 2, 3, 4])
    subject.insert([1, 2, 9, 9])
    assert subject.tree.num_evictable_pages == 1
    subject.evict(1)
    assert subject.match([1, 2, 9, 9]) == 2
    with pytest.raises(AssertionError, match="1 pages to evict, 0 evictable"):
        subject.evict(1)
    subject.release(holder)
    subject.evict(2)
    assert subject.tree.num_pages == 0


def test_eviction_takes_only_what_is_needed_from_the_tail() -> None:
    subject = Tree(page_size=2)
    subject.insert([1, 2, 3, 4, 5, 6])
    assert subject.evict(1).tolist() == [2]
    assert subject.match([1, 2, 3, 4, 5, 6]) == 4


def test_without_partial_eviction_a_node_is_evicted_as_a_whole() -> None:
    subject = Tree(page_size=2, partial_eviction=False)
    subject.insert([1, 2, 3, 4, 5, 6])
    assert len(subject.evict(1)) == 3


def test_lru_evicts_the_least_recently_used() -> None:
    subject = Tree(page_size=1)
    for token in (1, 2, 3):
        subject.insert([token])
    subject.insert([1])
    subject.evict(1)
    assert [subject.match([token]) for token in (1, 2, 3)] == [1, 0, 1]


def test_lfu_evicts_the_least_frequently_used() -> None:
    subject = Tree(page_size=1, eviction="lfu")
    for token in (1, 1, 1, 2, 2, 3):
        subject.insert([token])
    subject.insert([3])
    subject.evict(1)
    subject.evict(1)
    assert [subject.match([token]) for token in (1, 2, 3)] == [1, 0, 0]


def test_cost_aware_eviction_keeps_what_is_expensive_to_recompute() -> None:
    subject = Tree(page_size=64, eviction="cost")
    subject.insert(list(range(8192)))  # its last pages attend to much: recomputing one costs three times as much
    subject.insert(list(range(100_000, 100_064)))
    subject.evict(1)
    assert subject.match(list(range(8192))) == 8192
    assert subject.match(list(range(100_000, 100_064))) == 0


def test_cost_aware_eviction_evicts_unused_expensive_pages_in_the_end() -> None:
    subject = Tree(page_size=1, eviction="cost")
    subject.insert(list(range(5000)))
    for round in range(5100):
        subject.insert([10_000 + round])
        subject.evict(1)
    assert subject.match(list(range(5000))) < 5000


def test_priority_evicts_the_kv_of_low_priorities_first() -> None:
    subject = Tree(page_size=1, eviction="priority")

    def cached() -> list[int]:
        return [token for token in range(1, 9) if subject.match([token])]

    for token, priority in ((1, 5), (2, 0), (3, -1), (4, 0)):
        subject.insert([token], priority=priority)
    subject.insert([3], priority=-2)
    subject.evict(1)
    assert cached() == [1, 2, 4], "the lowest priority, although it was used last"
    subject.evict(1)
    assert cached() == [1, 4], "of equal priorities the least recently used"
    subject.insert([1], priority=0)
    subject.insert([5], priority=4)
    subject.evict(2)
    assert cached() == [1], "it keeps the highest priority of those that used it"
    waiter = subject.wait([1, 7])  # so that the node remains, without KV
    subject.evict(1)
    subject.insert([1], priority=0)
    subject.tree.dequeue(waiter)
    subject.insert([6], priority=1)
    subject.evict(1)
    assert cached() == [6], "it was evicted in between, so the earlier priority does not count"


def test_under_priority_eviction_a_common_prefix_has_the_highest_priority_below_it() -> None:
    subject = Tree(page_size=1, eviction="priority")
    subject.insert([1, 2, 3], priority=0)
    subject.insert([1, 2, 4], priority=7)
    subject.insert([9], priority=3)
    subject.evict(2)
    assert (subject.match([1, 2, 3]), subject.match([1, 2, 4]), subject.match([9])) == (2, 3, 0)


@pytest.mark.parametrize("eviction", list(EVICTION))
def test_a_prefix_that_a_request_waits_for_is_evicted_last(eviction: str) -> None:
    subject = Tree(page_size=1, eviction=eviction)
    subject.insert([1])
    subject.insert([2])
    subject.wait([1, 5])
    subject.evict(1)
    assert (subject.match([1]), subject.match([2])) == (1, 0)


def test_an_evicted_node_that_a_request_waits_for_becomes_a_ghost() -> None:
    subject = Tree(page_size=2)
    subject.insert([1, 2, 3, 4])
    waiter = subject.wait([1, 2, 3, 4, 5])
    assert subject.hit(waiter) == 4
    subject.evict(2)
    assert subject.hit(waiter) == 0
    subject.insert([1, 2, 3, 4])
    assert subject.hit(waiter) == 4, "it is not inserted again: its node became resident again"


def test_a_waiting_prompt_hits_prefixes_computed_while_it_waits() -> None:
    subject = Tree(page_size=2)
    waiter = subject.wait([1, 2, 3, 4, 5, 6, 7])
    subject.insert([1, 2, 3, 4])
    assert subject.hit(waiter) == 4
    subject.insert([1, 2, 3, 4, 5, 6])
    assert subject.hit(waiter) == 6


def test_a_pass_cannot_read_the_prefix_it_computes() -> None:
    subject = Tree(page_size=2)
    waiter = subject.wait([1, 2, 3])
    holder = tracked([1, 2])
    holder.key = holder.prompt.tobytes()
    node = subject.tree.namespace(holder.namespace)
    subject.tree.lock(holder, node)
    subject.tree.insert(holder, node, holder.key, 2, np.array([0], np.int32), subject.step)
    assert subject.hit(waiter) == 0
    subject.step += 1
    assert subject.hit(waiter) == 2


def test_find_end_follows_resident_nodes_and_ghosts_as_far_as_they_match() -> None:
    subject = Tree(page_size=2)
    subject.insert([1, 2, 3, 4])
    subject.wait([1, 2, 3, 4, 5, 6, 7, 8, 9])
    key = np.array([1, 2, 3, 4, 5, 6, 7, 7], np.int32).tobytes()
    namespace = subject.tree.namespace(SPACE)
    depths = [
        None if (node := subject.tree.find_end(namespace, key, end)) is None else node.depth for end in (2, 4, 6, 8, 10)
    ]
    assert depths == [4, 4, 8, None, None]


def test_ghosts_are_removed_with_their_last_waiting_request() -> None:
    subject = Tree(page_size=1)
    first, second = subject.wait([1, 2, 3]), subject.wait([1, 2, 4, 5])
    subject.tree.dequeue(first)
    subject.tree.dequeue(second)
    assert list(subject.tree.nodes()) == [subject.tree.root]


def test_of_two_equal_computations_the_first_survives() -> None:
    subject = Tree(page_size=2)
    first, second = tracked([1, 2, 3, 4]), tracked([1, 2, 3, 4])
    tree = subject.tree
    for holder in (first, second):
        holder.key = holder.prompt.tobytes()
        tree.lock(holder, tree.namespace(holder.namespace))
    space = tree.namespace(first.namespace)
    held = tree.insert(first, space, first.key, 4, np.array([10, 11], np.int32), subject.step)
    assert held.pages.tolist() == [10, 11]
    assert tree.insert(second, space, second.key, 4, np.array([20, 21], np.int32), subject.step) is space
    assert tree.num_pages == 2


def test_matching_costs_what_is_matched_and_not_what_is_cached() -> None:
    """Counted in nodes visited, not in time: a thousand other prompts add none."""
    subject = Tree(page_size=16)
    wanted = list(range(1600))
    subject.insert(wanted)
    visited = []
    original = subject.tree._common
    subject.tree._common = lambda *a: visited.append(1) or original(*a)  # type: ignore[method-assign]
    subject.match(wanted)
    alone = len(visited)
    for other in range(1000):
        subject.insert([50_000 + other] * 16)
    visited.clear()
    subject.match(wanted)
    assert len(visited) == alone


def test_evicting_costs_what_is_evicted_and_not_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in leaves checked: each evicted leaf and its parent, however many leaves there are."""
    subject = Tree(page_size=1)
    for leaf in range(5_000):
        subject.insert([leaf])
    looked_at = []
    original = eviction.is_evictable_leaf
    monkeypatch.setattr(eviction, "is_evictable_leaf", lambda node: looked_at.append(1) or original(node))
    subject.evict(100)
    assert 100 <= len(looked_at) <= 300


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, waits, locks and evictions against a dictionary."""

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=10)
    space = st.sampled_from(["a", "b"])

    @initialize(page_size=st.sampled_from([1, 2, 3]), eviction=st.sampled_from(list(EVICTION)), partial=st.booleans())
    def start(self, page_size: int, eviction: str, partial: bool) -> None:
        self.subject = Tree(page_size, eviction, partial_eviction=partial)
        self.reference: set[tuple[object, ...]] = set()
        self.holders: list[TrackedRequest] = []
        self.waiters: list[TrackedRequest] = []

    def prefixes(self, tokens: list[int], tenant: str) -> list[tuple[object, ...]]:
        size = self.subject.page_size
        return [(tenant, *tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    @rule(tokens=tokens, tenant=space)
    def hold(self, tokens: list[int], tenant: str) -> None:
        self.holders.append(self.subject.hold(tokens, tenant=tenant))
        self.reference |= set(self.prefixes(tokens, tenant))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.subject.release(self.holders.pop(which % len(self.holders)))

    @rule(tokens=tokens, tenant=space)
    def wait(self, tokens: list[int], tenant: str) -> None:
        self.waiters.append(self.subject.wait(tokens, tenant=tenant))

    @precondition(lambda self: self.waiters)
    @rule(which=st.integers(0, 100))
    def stop_waiting(self, which: int) -> None:
        self.subject.tree.dequeue(self.waiters.pop(which % len(self.waiters)))

    @precondition(lambda self: self.waiters)
    @rule(which=st.integers(0, 100))
    def skip_and_unskip(self, which: int) -> None:
        waiter = self.waiters[which % len(self.waiters)]
        self.subject.tree.skip(waiter)
        self.subject.tree.unskip(waiter)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        tree = self.subject.tree
        count = min(count, tree.num_evictable_pages)
        before = tree.num_pages
        evicted = self.subject.evict(count)
        assert len(evicted) >= count
        assert tree.num_pages == before - len(evicted)
        self.reference = {prefix for prefix in self.reference if self.is_resident(prefix)}
        assert len(self.reference) == tree.num_pages, (
            "eviction takes from the end: every prefix of what is left is there"
        )
        for holder in self.holders:
            for prefix in self.prefixes(holder.prompt.tolist(), holder.tenant):
                assert prefix in self.reference, "a locked page was evicted"

    def is_resident(self, prefix: tuple[object, ...]) -> bool:
        tenant, *tokens = prefix
        return self.subject.match(tokens, (str(tenant), "", "")) == len(tokens)  # type: ignore[arg-type]

    @rule(tokens=tokens, tenant=space)
    def match(self, tokens: list[int], tenant: str) -> None:
        expected = 0
        for prefix in self.prefixes(tokens, tenant):
            if prefix not in self.reference:
                break
            expected = len(prefix) - 1
        assert self.subject.match(tokens, (tenant, "", "")) == expected

    @invariant()
    def waiters_hit_what_is_there(self) -> None:
        for waiter in getattr(self, "waiters", []):
            tokens = waiter.prompt.tolist()[:-1]
            assert self.subject.hit(waiter) == self.subject.match(tokens, (waiter.tenant, "", ""))

    @invariant()
    def pages_are_counted(self) -> None:
        if hasattr(self, "subject"):
            assert self.subject.tree.num_pages == len(self.reference)
            locked = {p for holder in self.holders for p in self.prefixes(holder.prompt.tolist(), holder.tenant)}
            assert self.subject.tree.num_locked_pages == len(locked)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=40)
