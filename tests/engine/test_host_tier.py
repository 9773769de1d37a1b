"""The host memory tier in whole engines: tokens do not change when KV pages are spilled and fetched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.config import ConfigError
from paceline.engine.build import build_engine
from paceline.engine.cpu import kv_cache
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.llm import LLM
from paceline.request import Request, SamplingParams
from paceline.scheduler import Scheduler
from paceline.scheduler.invariants import check
from paceline.scheduler.plan import Plan, Swap

OPTIONS: dict[str, Any] = {
    "load": "random", "shape": "tiny-llama", "threads": 1, "dtype": "float32", "page_size": 4, "max_running": 6,
    "max_batch_tokens": 64, "max_prefill_tokens": 64, "chunk_tokens": 16,
}  # fmt: skip
RNG = np.random.default_rng(7)
BEGINNINGS = [RNG.integers(3, 500, 40).tolist() for _ in range(5)]
# Every beginning comes up again and again, long after others have taken its memory.
PROMPTS = [[*BEGINNINGS[number % 5][: 20 + 4 * (number % 6)], number + 3] for number in range(20)]
PARAMS = [SamplingParams(temperature=0, max_tokens=6 + 5 * (number % 4)) for number in range(20)]


def answers(**options: Any) -> tuple[list[list[int]], Any]:
    """Outputs of all prompts, a few at a time, and the counters."""
    with LLM(**OPTIONS, **options) as llm:
        found = []
        for first in range(0, 20, 10):
            outputs = llm.generate(PROMPTS[first : first + 10], PARAMS[first : first + 10])
            found += [output.token_ids for output in outputs]
        llm.engine.call(check).result()
        return found, llm.engine.scheduler.counters


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    found, counters = answers(num_pages=400)
    assert counters.evicted_pages == 0
    return found


@pytest.mark.parametrize(
    ("overlap", "host"),
    [
        ("off", {"num_host_pages": 200}),
        ("on", {"num_host_pages": 20}),
        ("on", {"num_host_pages": 200, "max_swap_pages": 2}),
        ("on", {}),
        ("sync", {"num_host_pages": 20}),
    ],
)
def test_tokens_are_those_of_ample_memory(expected: list[list[int]], overlap: str, host: dict[str, Any]) -> None:
    found, counters = answers(num_pages=16, overlap=overlap, **host)
    assert found == expected
    assert counters.evicted_pages > 50 and counters.retractions > 0
    assert bool(counters.fetched_tokens) == bool(counters.spilled_pages) == bool(host)


def test_a_wrongly_fetched_page_changes_the_tokens(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above can fail: pages are not copied."""
    monkeypatch.setattr(kv_cache.KVCache, "swap", lambda self, swap: None)
    found, _ = answers(num_pages=30, num_host_pages=200)
    assert found != expected


def test_the_virtual_and_the_cpu_executor_get_the_same_plans() -> None:
    """One request after the other, so that plans do not depend on how long passes take."""
    plans: list[Plan] = []
    params = [replace(each, ignore_eos=True) for each in PARAMS]
    engine = build_engine(**OPTIONS, num_pages=30, num_host_pages=60, max_swap_pages=3, overlap="off")
    launch = engine.executor.launch

    def launching(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.executor.launch = launching  # type: ignore[method-assign]
    with LLM.from_engine(engine) as llm:
        outputs = [llm.generate([prompt], each)[0].token_ids for prompt, each in zip(PROMPTS, params, strict=True)]
        config = engine.scheduler.config
    said = dict(enumerate(outputs))
    clock, scheduler = VirtualClock(), Scheduler(config)
    seen: list[Plan] = []

    def tokens(plan: Plan) -> np.ndarray:
        seen.append(plan)
        rows = np.flatnonzero(plan.samples).tolist()
        requests = scheduler.requests_of(plan)
        return np.array([said[int(requests[row].id)][len(requests[row].output)] for row in rows], np.int32)

    loop = Loop(scheduler, VirtualExecutor(clock, tokens=tokens), clock, overlap=False)
    for number, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
        scheduler.add(Request(str(number), np.array(prompt), each), clock())
        loop.drain()
    assert len(seen) == len(plans)
    moved = 0
    for ours, theirs in zip(seen, plans, strict=True):
        assert np.array_equal(ours.starts, theirs.starts)
        assert np.array_equal(ours.page_changes, theirs.page_changes)
        assert (ours.swap is None) == (theirs.swap is None)
        if ours.swap is not None and theirs.swap is not None:
            moved += len(ours.swap.fetch_pages)
            for name in Swap.__slots__:
                assert np.array_equal(getattr(ours.swap, name), getattr(theirs.swap, name)), name
    assert moved > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv_tokens": 3}, "host_kv_tokens is 3, less than a page of 4 tokens: raise or remove it."),
        ({"host_kv_tokens": 64, "num_host_pages": 4}, "host_kv_tokens is 64 and num_host_pages is 4: set only one of"),
        (
            {"host_kv_tokens": 10**12},
            r"\(host_kv_tokens 1000000000000\), which takes .* of host memory, but only .* are free",
        ),
        ({"num_host_pages": 10**12}, r"num_host_pages is 1000000000000 .*: lower it to \d+ \(\d+\) or less."),
    ],
)
def test_more_host_memory_than_available_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(**OPTIONS, num_pages=30, **options)


def test_a_virtual_engine_has_host_memory_too() -> None:
    prompts = [[number + 10] * 3000 for number in range(3)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(executor="virtual", kv_tokens=4096, host_kv_tokens=16_384) as llm:
        for prompt in [*prompts, *prompts]:
            llm.generate([prompt], params)
        counters, config = llm.engine.scheduler.counters, llm.engine.scheduler.config
        assert config.num_host_pages == 1024 and config.host_page_cost == pytest.approx(11.54, rel=0.01)
        assert counters.fetched_tokens > 4000
    with pytest.raises(ConfigError, match="host_kv_tokens is 3, less than a page of 16"):
        build_engine(executor="virtual", host_kv_tokens=3)
    with pytest.raises(ConfigError, match="host_kv_tokens is 64 and num_host_pages is 4: set only one of them"):
        build_engine(executor="virtual", host_kv_tokens=64, num_host_pages=4)


def test_outputs_report_tokens_fetched_from_host_memory() -> None:
    with LLM(**OPTIONS, num_pages=12, num_host_pages=60) as llm:
        first, _, again = (llm.generate([PROMPTS[number]], PARAMS[number])[0] for number in (4, 1, 4))
    assert (first.num_cached_tokens, first.num_fetched_tokens) == (0, 0)
    assert again.num_cached_tokens == 36 and again.token_ids == first.token_ids
    assert 0 < again.num_fetched_tokens <= 36


def test_host_memory_is_given_in_tokens() -> None:
    with LLM(**OPTIONS, num_pages=30, host_kv_tokens=400) as llm:
        assert llm.engine.scheduler.config.num_host_pages == 100
