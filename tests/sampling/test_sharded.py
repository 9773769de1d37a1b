"""Sampling of a sharded vocabulary: the tokens of the whole one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.model.shapes import shape
from paceline.parallel.threads import ThreadGroup
from paceline.request import SamplingParams
from paceline.sampling.sampler import Sampler
from paceline.sampling.sharded import ShardedSampler, best_keys, tokens_of
from paceline.sampling.types import NO_TOKEN
from paceline.scheduler.plan import Join

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=5),
    SamplingParams(seed=6, temperature=0.3),
    SamplingParams(seed=7, top_k=3),
    SamplingParams(seed=8, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(seed=9, logit_bias={4: 9.0}),
    SamplingParams(temperature=0, top_k=5),
]
ROWS = len(PARAMS)


def make_sampler(vocab_size: int) -> Sampler:
    sampler = Sampler(vocab_size, ROWS)
    for slot, params in enumerate(PARAMS):
        sampler.join(Join(slot, str(slot), np.array([1, 4], np.int32), 2, params))
    return sampler


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [512, 129])
def test_every_rank_gets_the_token_of_the_whole_vocabulary(vocab_size: int, size: int) -> None:
    spec = replace(shape("tiny-llama"), vocab_size=vocab_size)
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(size)).round(decimals=1)  # with ties
    logits[1, 7] = torch.nan
    logits[2, -1] = torch.inf
    slots, tokens = np.arange(ROWS), np.full((ROWS, 10), 4, np.int32)
    groups = ThreadGroup.of_size(size)
    for position in range(2, 9):
        positions = np.full(ROWS, position)
        expected = make_sampler(vocab_size).sample(logits.clone(), slots, positions, tokens)
        assert expected[1] == expected[2] == NO_TOKEN

        def sample(group: ThreadGroup, positions: np.ndarray = positions) -> list[int]:
            sharded = ShardedSampler(make_sampler(vocab_size), group, spec)
            local = logits[:, group.shard.vocabulary(spec)].clone()
            return sharded.sample(local, slots, positions, tokens).tolist()

        with ThreadPoolExecutor(size) as pool:
            assert list(pool.map(sample, groups)) == [expected.tolist()] * size


def test_keys_have_the_order_of_scores_and_then_of_lower_ids() -> None:
    scores = torch.tensor([-torch.inf, -3e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38])
    keys = best_keys(scores[:, None], 0)
    assert (keys.diff() > 0).all()
    zeros = best_keys(torch.tensor([[-0.0], [0.0]]), 0)
    assert zeros[0] == zeros[1]
    assert best_keys(torch.tensor([[2.0]]), 3) > best_keys(torch.tensor([[2.0]]), 4)
    assert tokens_of(best_keys(torch.tensor([[1.0, 2.0, 2.0], [-torch.inf] * 3]), 10)).tolist() == [11, NO_TOKEN]
