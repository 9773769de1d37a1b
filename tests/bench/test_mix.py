"""`paceline bench offline mix`: every cycle of its batches has what makes launches slow."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.bench import mix

CONTEXT = 32_768


@pytest.mark.parametrize("seed", range(3))
def test_a_cycle_has_24_long_prompts_long_contexts_and_512_rows(seed: int) -> None:
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(config=SimpleNamespace(context_tokens=CONTEXT)),
        executor=SimpleNamespace(capabilities=SimpleNamespace(logits=True)),
    )
    llm: Any = SimpleNamespace(engine=engine)
    runner: Any = SimpleNamespace(fitted=lambda work: work)
    rng = random.Random(seed)
    batches = [mix._batch(runner, llm, rng, place) for place in range(mix._CYCLE)]
    lengths = [[len(prompt) for prompt in batch.prompts] for batch in batches]
    assert sum(one.count(16_000) == 24 and len(one) > 24 for one in lengths) == 1, "beside short ones, which decode"
    assert sum(min(one) == 24_000 and len(one) == 16 for one in lengths) == 1
    assert max(map(len, lengths)) == 512
    for batch in batches:
        for prompt, params in zip(batch.prompts, batch.params, strict=True):
            assert len(prompt) + (params.max_tokens or 0) <= CONTEXT
