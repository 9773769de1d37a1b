"""Collectives: gloo gives what the threads of the reference implementation give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.model.layout import Shard
from paceline.model.rank_group import RankGroup
from paceline.parallel.collectives import TorchGroup, connect, listen
from paceline.parallel.threads import ThreadGroup


def gloo(size: int) -> list[TorchGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: TorchGroup(Shard(rank, size), store, "gloo"), range(size)))


def on_all(groups: Sequence[RankGroup], function: Callable[[RankGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(function, groups))


def of_rank(group: RankGroup, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(group.shard.rank))
    return values.to(dtype) if dtype.is_floating_point else (values * 1e3).to(dtype)


@pytest.mark.parametrize("make", [gloo, ThreadGroup.of_size])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_all_ranks(make: Callable[[int], list[RankGroup]], size: int) -> None:
    groups = make(size)
    inputs = [of_rank(group) for group in groups]
    sums = on_all(groups, lambda group: group.all_reduce(of_rank(group)))
    torch.testing.assert_close(sums[0], torch.stack(inputs).sum(0))
    assert all(torch.equal(one, sums[0]) for one in sums), "the same bits on all ranks"
    for found in on_all(groups, lambda group: group.all_gather(of_rank(group))):
        assert torch.equal(found, torch.stack(inputs))
    numbers = [of_rank(group, torch.int64) for group in groups]
    for found in on_all(groups, lambda group: group.all_reduce_max(of_rank(group, torch.int64))):
        assert torch.equal(found, torch.stack(numbers).amax(0))


def test_sixteen_bit_tensors_are_summed_in_32_bits() -> None:
    groups = gloo(3)
    inputs = torch.stack([of_rank(group, torch.bfloat16) for group in groups])
    for found in on_all(groups, lambda group: group.all_reduce(of_rank(group, torch.bfloat16))):
        assert torch.equal(found, inputs.float().sum(0).bfloat16())
    for found in on_all(groups, lambda group: group.all_gather(of_rank(group, torch.bfloat16))):
        assert torch.equal(found, inputs)


def test_ranks_find_each_other_on_the_loopback_interface() -> None:
    store, port = listen()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: TorchGroup(Shard(1, 2), connect(port), "gloo"))
        groups = [TorchGroup(Shard(0, 2), store, "gloo"), other.result()]
    assert torch.equal(*on_all(groups, lambda group: group.all_reduce(of_rank(group))))
