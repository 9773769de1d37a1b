import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.page_pool import PagePool


def test_each_page_is_allocated_once() -> None:
    pool = PagePool(8)
    pages = np.concatenate([pool.allocate(3), pool.allocate(5)])
    assert sorted(pages.tolist()) == list(range(8))
    assert pool.num_free == 0


def test_allocating_more_than_is_free_fails() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages requested, 2 are free"):
        pool.allocate(3)


def test_a_page_cannot_be_freed_twice() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages[:1])
    with pytest.raises(AssertionError, match=r"pages freed twice: \[0\]"):
        pool.free(pages)


@given(st.lists(st.integers(0, 6), max_size=40))
def test_free_and_allocated_pages_always_add_up(sizes: list[int]) -> None:
    pool, taken = PagePool(16), []
    for size in sizes:
        if size <= pool.num_free and size % 2:
            taken.append(pool.allocate(size))
        elif taken:
            pool.free(taken.pop(0))
        held = [page for pages in taken for page in pages.tolist()]
        assert sorted(held + pool.free_pages().tolist()) == list(range(16))
