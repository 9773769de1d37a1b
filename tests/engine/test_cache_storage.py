"""The tensors of cache groups, and what a whole page of them is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paceline.engine.cache_storage import CacheStorage, WholePages
from paceline.model.layers import PagedKv
from paceline.model.spec import ModelSpec
from paceline.request import SamplingParams
from paceline.scheduler.plan import NO_TOKENS, Join
from tests.moving_average import hybrid_spec

SLOTS, PAGES, PAGE_SIZE = 5, 7, 4


def spec_of_three_groups() -> ModelSpec:
    """Layers with a state, with attention, with a window, and with other heads."""
    spec = hybrid_spec("sawsa")
    last: Any = spec.layers[4]
    other = replace(last, mixer=replace(last.mixer, num_kv_heads=4, head_dim=10))
    return replace(spec, layers=(*spec.layers[:4], other))


def storage() -> CacheStorage:
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return CacheStorage(spec_of_three_groups(), PAGES, PAGE_SIZE, SLOTS, torch.bfloat16, zeros)


def test_layers_that_keep_the_same_share_a_tensor() -> None:
    spec, found = spec_of_three_groups(), storage()
    groups = spec.cache_groups
    assert [group.layers for group in groups] == [(0, 3), (1, 2), (4,)], "windows share pages"
    assert [type(group.cache) is PagedKv for group in groups] == [False, True, True]
    assert [tuple(one.shape) for one in found.paged] == [(4, PAGES, PAGE_SIZE, 2, 8), (2, PAGES, PAGE_SIZE, 4, 10)]
    assert sorted(found.kv) == [1, 2, 4] and sorted(found.states) == [0, 3]
    assert found.kv[2].data_ptr() == found.paged[0][2].data_ptr()
    size = 4 * 3 * spec.hidden_size
    assert all(state.shape == (SLOTS, size) for state in found.states.values())
    assert found.states[3].view(torch.float32).shape == (SLOTS, size // 4)
    assert sum(one.nbytes for one in found.slotted) == SLOTS * groups[0].unit_bytes(2, PAGE_SIZE)
    assert sum(one.nbytes for one in found.paged) == PAGES * PAGE_SIZE * spec.kv_bytes_per_token(2)


def test_the_states_of_those_who_join_are_cleared() -> None:
    found = storage()
    (units,) = found.slotted
    units.fill_(255)
    found.begin([Join(slot, "", NO_TOKENS, 0, SamplingParams()) for slot in (3, 1)])
    assert [int(units[slot].max()) for slot in range(SLOTS)] == [255, 0, 255, 0, 255]


def test_a_whole_page_has_the_pages_of_all_groups() -> None:
    groups = [torch.randn(4, PAGES, PAGE_SIZE, 2, 8), torch.randn(2, PAGES, PAGE_SIZE, 4, 10)]
    whole, before = WholePages(groups), [group.clone() for group in groups]
    pages = whole.read(torch.tensor([5, 2]))
    assert pages.shape == (2, whole.num_elements)
    assert torch.equal(pages[1], torch.cat([group[:, 2].flatten() for group in groups]))
    whole.write(torch.tensor([0, 6]), pages)
    for group, old in zip(groups, before, strict=True):
        assert torch.equal(group[:, [0, 6, 1]], old[:, [5, 2, 1]])
