"""Tensor parallelism on virtual GPUs: what is divided, what is not, and what is added."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.config import ConfigError, EngineConfig
from paceline.engine.build import build_engine
from paceline.engine.virtual.build import build_virtual
from paceline.engine.virtual.tensor_parallel import RankWork, all_gather_s, all_reduce_s
from paceline.llm import LLM
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelError
from paceline.request import SamplingParams

SMALL, LARGE = shape("qwen3-0.6b"), shape("qwen3-14b")
BANDWIDTH = 4.2e12


def work(num_ranks: int, spec_name: str = "qwen3-0.6b") -> RankWork:
    return RankWork(shape(spec_name), num_ranks, BANDWIDTH)


def test_one_rank_has_everything_and_exchanges_nothing() -> None:
    alone = work(1)
    assert (alone.weights, alone.heads, alone.kv) == (1, 1, 1)
    assert alone.kv_tokens(1000) == 1000
    assert alone.exchange_s(256, 256) == all_reduce_s(1e6, 1) == all_gather_s(1e6, 1) == 0


def test_each_rank_reads_its_part_of_the_weights() -> None:
    shares = [work(count).weights for count in (1, 2, 4, 8)]
    assert shares == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8], rel=2e-3), "norms are on every rank"
    assert all(share > 1 / count for share, count in zip(shares[1:], (2, 4, 8), strict=True))


def test_the_rank_with_most_heads_sets_the_pace() -> None:
    """Eight KV heads of two query heads each are 2, 3 and 3 for three ranks; three of three are 1 and 2 for two."""
    assert (work(3).kv, work(3).heads) == (3 / 8, 3 / 8)
    assert (work(2, "smollm2-135m").kv, work(2, "smollm2-135m").heads) == (2 / 3, 2 / 3)


def test_kv_is_not_divided_below_one_head() -> None:
    few = RankWork(vary(SMALL, num_kv_heads=2), 8, BANDWIDTH)
    assert few.kv == 1 / 2 and few.heads == 1 / 8


def test_an_embedding_that_is_not_the_head_is_not_read() -> None:
    assert work(1).weights_s == pytest.approx(2 * SMALL.num_parameters / BANDWIDTH, rel=1e-3)
    read = LARGE.num_parameters - LARGE.vocab_size * LARGE.hidden_size
    assert work(1, "qwen3-14b").weights_s == pytest.approx(2 * read / BANDWIDTH, rel=1e-3)


def test_memory_that_weights_leave_free_is_kv_cache() -> None:
    tokens = 100_000
    kv_bytes, weights = LARGE.kv_bytes_per_token(2), 2 * LARGE.num_parameters
    expected = (tokens * kv_bytes + weights / 2) / (kv_bytes / 2)
    assert work(2, "qwen3-14b").kv_tokens(tokens) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("collective", [all_reduce_s, all_gather_s])
def test_collectives_have_a_latency_and_take_longer_with_more_bytes(
    collective: Callable[[float, int], float],
) -> None:
    for count in (2, 4, 8):
        times = [collective(num_bytes, count) for num_bytes in (0, 10_000, 1e6, 1e8)]
        assert times == sorted(times) and 5e-6 < times[0] < 20e-6
        assert 1e8 * (count - 1) / count / times[-1] < 450e9, "no more than NVLink has in one direction"
    assert collective(1000, 2) < collective(1000, 4) < collective(1000, 8), "more steps"


def test_a_pass_has_two_all_reduces_per_layer_and_one_for_the_embeddings() -> None:
    states = 16 * SMALL.hidden_size * 2
    assert work(4).exchange_s(16, 0) == pytest.approx((2 * SMALL.num_layers + 1) * all_reduce_s(states, 4))
    logits = 16 * SMALL.vocab_size * 2
    assert work(4).exchange_s(16, 16) - work(4).exchange_s(16, 0) == pytest.approx(all_gather_s(logits, 4))


def test_fixed_time_is_not_divided() -> None:
    half = work(2)
    assert half.batch_s(1.0, 1.0) == 1.0
    assert half.batch_s(1.0, 0.0) == half.weights
    assert half.batch_s(0.5, 1.0) == 0.5, "no more than there is"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: work(16), ConfigError, "tp is 16: the time of collectives is known for the 8 GPUs of one machine"),
        (lambda: RankWork(vary(SMALL, num_heads=4, num_kv_heads=4), 8, BANDWIDTH), ModelError, "num_heads is 4"),
        (
            lambda: EngineConfig(executor="virtual", tp=2, collectives="nccl"),
            ConfigError,
            "collectives is 'nccl' and executor is 'virtual'",
        ),
        (lambda: build_engine(executor="virtual", tp=9), ConfigError, "choose tp 8 or less"),
    ],
)  # fmt: skip
def test_an_impossible_number_of_ranks_is_refused(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()


def test_an_engine_on_virtual_gpus_gives_the_same_tokens_and_says_that_its_speed_is_predicted() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = []
    for count in (1, 4):
        with LLM(executor="virtual", tp=count) as llm:
            outputs.append([one.token_ids for one in llm.generate(["a prompt", "another"], params)])
    assert outputs[0] == outputs[1]
    alone, four = (build_virtual(EngineConfig(executor="virtual", tp=count), {}) for count in (1, 4))
    assert alone.info.device == "virtual"
    assert four.info.device == "4 x virtual, predicted, not measured"
    assert four.scheduler.config.num_pages > 4 * alone.scheduler.config.num_pages
