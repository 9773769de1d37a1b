"""Pipeline parallelism on a CPU: the tokens of any number of stages are those of one, and all stages are busy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checks.weights import write_folder
from paceline.config import ConfigError, EngineConfig, SchedulerConfig, ServerConfig, check_replicas
from paceline.engine.cpu.inputs import SlotTables
from paceline.engine.late_tokens import LateTokens
from paceline.engine.loop import Loop
from paceline.llm import LLM
from paceline.model.layout import Shard, stored_parts
from paceline.model.shapes import shape
from paceline.model.weights import load_decoder
from paceline.parallel.stages import StagePipe
from paceline.parallel.threads import ThreadGroup
from paceline.request import Grammar, SamplingParams
from paceline.scheduler import Scheduler
from tests.helpers import request, retract_often
from tests.parallel.ranks import ThreadRanks, llm_of, pipeline_llm
from tests.parallel.test_cpu import FAMILIES, GREEDY, PROMPTS, SAMPLED, alone, embedding_of, model


def run(name: str, num_stages: int, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    with pipeline_llm(*model(name), num_stages, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@cache
def one_stage(*params: SamplingParams) -> list[list[int]]:
    return run("tiny-llama", 1, list(params))


# Three stages and two in turn: which family a stage runs does not depend on their number.
@pytest.mark.parametrize(("name", "num_stages"), [(name, 3 - at % 2) for at, name in enumerate(FAMILIES)])
def test_every_family_gives_the_tokens_of_one_stage(name: str, num_stages: int) -> None:
    assert run(name, num_stages) == alone(name)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 7},
        {"overlap": "off"},
        {"overlap": "sync"},
        {"prefix_cache": False},
        {"batching": "prefill-first", "chunk_tokens": 16},
        {"page_size": 1, "num_pages": 170},
        {"max_running": 2},
        {"num_pages": 24, "max_running": 4, "num_host_pages": 100},
    ],
    ids="-".join,
)
def test_every_setting_gives_the_same_tokens(options: dict[str, Any]) -> None:
    assert run("tiny-qwen2", 2, **options) == alone("tiny-qwen2")


def test_prefix_hits_give_the_same_tokens() -> None:
    with pipeline_llm(*model("tiny-llama"), 3) as llm:
        llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in again] == alone("tiny-llama")
    assert sum(output.num_cached_tokens for output in again) > 100


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_retracted_requests_give_the_same_tokens(overlap: str) -> None:
    with pipeline_llm(*model("tiny-qwen3"), 3, overlap=overlap, chunk_tokens=16) as llm:
        retract_often(llm.engine.scheduler, every=3)
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert llm.engine.scheduler.counters.retractions > 3
    assert found == alone("tiny-qwen3")


@pytest.mark.parametrize("num_stages", [2, 3])
def test_seeds_filters_and_penalties_give_the_same_tokens(num_stages: int) -> None:
    assert run("tiny-llama", num_stages, SAMPLED) == one_stage(*SAMPLED)


def test_slots_are_used_again_while_tokens_of_their_last_request_are_on_the_way() -> None:
    """More requests than slots, of different lengths, some of which stop early."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 512, int(rng.integers(1, 9))).tolist() for _ in range(14)]
    stops = tuple(range(0, 512, 9))
    params = [
        SamplingParams(temperature=0.9, seed=n, max_tokens=1 + n % 13, stop_token_ids=stops, ignore_eos=True)
        for n in range(14)
    ]
    found, discarded = [], 0
    for num_stages in (1, 2, 3):
        with pipeline_llm(*model("tiny-llama"), num_stages, max_running=4) as llm:
            outputs = llm.generate(prompts, params)
            found.append([(one.token_ids, one.finish_reason) for one in outputs])
            discarded = llm.engine.scheduler.counters.discarded_tokens
    assert found[1] == found[0] and found[2] == found[0]
    assert {reason for _, reason in found[0]} == {"stop", "length"}
    assert discarded > 0


def test_logprobs_are_those_of_one_stage() -> None:
    params = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, logprob_token_ids=(5, 500), max_tokens=6)
    found = []
    for num_stages in (1, 3):
        with pipeline_llm(*model("tiny-qwen3"), num_stages) as llm:
            outputs = llm.generate(PROMPTS, [GREEDY, params, GREEDY, params, params])
            found.append([(one.token_ids, one.logprobs, one.prompt_logprobs) for one in outputs])
    for one, other in zip(*found, strict=True):
        assert one[0] == other[0]
        for mine, theirs in zip((one[1] or []) + (one[2] or []), (other[1] or []) + (other[2] or []), strict=True):
            if mine is not None and theirs is not None:
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
                ours, others = ([one.logprob, *dict(one.top).values()] for one in (mine, theirs))
                assert np.allclose(ours, others, atol=1e-4)


@pytest.mark.parametrize("overlap", ["on", "sync", "off"])
def test_grammars_give_the_same_tokens(overlap: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=8, grammar=Grammar("regex", "[0-9]{4}-[a-f]+")),
        SamplingParams(seed=4, max_tokens=8, grammar=Grammar("regex", "(yes|no) [0-9]+")),
        GREEDY,
        SAMPLED[1],
        SamplingParams(temperature=0, max_tokens=8, grammar=Grammar("regex", "[x-z]{3,9}")),
    ]
    for num_stages in (2, 3) if overlap == "on" else (3,):
        assert run("tiny-llama", num_stages, params, overlap=overlap) == one_stage(*params)


def test_embeddings_are_those_of_one_stage() -> None:
    vectors = []
    for num_stages in (1, 2):
        with pipeline_llm(*model("tiny-llama"), num_stages) as llm:
            vectors.append(embedding_of(llm.engine))
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-5


def test_aborted_requests_leave_the_others_their_tokens() -> None:
    with pipeline_llm(*model("tiny-llama"), 3, max_running=3) as llm:
        engine, scheduler = llm.engine, llm.engine.scheduler
        plan, count = scheduler.plan, iter(range(10**9))
        aborted: list[str] = []

        def planning(now: float) -> Any:
            victims = [one.id for one in scheduler.running.decoding if len(one.prompt) == 2]
            if next(count) % 2 and victims:
                scheduler.abort(victims[0], now)
                aborted.append(victims[0])
            return plan(now)

        scheduler.plan = planning  # type: ignore[method-assign]
        prompts = [prompt for one in PROMPTS for prompt in (one, [5, 6])]
        outputs = engine_outputs(llm, prompts)
        assert engine.failure is None and len(aborted) == len(PROMPTS)
    assert [tokens for tokens, reason in outputs if reason == "length"] == alone("tiny-llama")


def engine_outputs(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], str | None]]:
    return [(one.token_ids, one.finish_reason) for one in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_all_stages_are_busy_if_there_are_enough_rows(num_stages: int) -> None:
    """While the host waits for a pass, each of the others that are in flight has a stage to itself, and one more is
    behind them."""
    with pipeline_llm(*model("tiny-llama"), num_stages, max_running=8) as llm:
        loop: Loop = llm.engine.loop
        commit, in_flight = loop._commit, []

        def committing(one: Any, result: Any) -> Any:
            in_flight.append(len(loop._launched) + 1)
            return commit(one, result)

        loop._commit = committing  # type: ignore[method-assign]
        prompts = [[3 + number, 4] for number in range(8)]
        llm.generate(prompts, replace(GREEDY, max_tokens=12))
    assert in_flight[num_stages + 1 : -num_stages - 2] == [num_stages + 1] * (len(in_flight) - 2 * num_stages - 3)
    assert len(in_flight) >= 11 * num_stages


def test_a_pass_is_one_message_and_stages_end_with_the_engine() -> None:
    llm = pipeline_llm(*model("tiny-llama"), 3)
    executor: Any = llm.engine.executor
    ranks: ThreadRanks = executor._ranks
    llm.generate(PROMPTS, GREEDY)
    assert ranks.num_messages == llm.engine.scheduler.counters.steps
    llm.close()
    assert ranks.stopped == [True, True]


def test_the_time_of_a_pass_is_that_of_all_stages_without_waiting() -> None:
    ranks = ThreadGroup.of_size(2)
    first, last = map(StagePipe, ranks)
    first.begin()
    first._began -= 5.0  # it has computed for five seconds
    first.send(torch.zeros(2, 3))
    assert last.receive(2, 3, torch.float32).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert 5.0 <= last.elapsed_s < 10.0


def test_a_late_token_is_not_stored_for_another_request_in_its_slot() -> None:
    """A request ends with a pass in flight; its slot is given to another before the token arrives."""
    core = Scheduler(SchedulerConfig(num_pages=64, page_size=4, max_running=1, num_stages=2))
    tables = SlotTables(1, 64, 4)
    late = LateTokens(1, tables.store_tokens)
    core.add(request([1, 2, 3], 2, id="one"), 0.0)
    core.add(request([7, 8, 9, 10, 11, 12], 2, id="other"), 0.0)
    plans = []
    for token in (40, 41):
        plan = core.plan(0.0)
        assert plan is not None
        plans.append(plan)
        tables.apply(plan)
        late.begin(plan)
        if token == 40:
            core.commit(plan, np.array([token], np.int32), 0.0, 0.0)
            late.put(plan, np.array([token], np.int32))
    plan = core.plan(0.0)
    assert plan is not None and [join.request_id for join in plan.joins] == ["other"]
    tables.apply(plan)
    late.put(plans[1], np.array([41], np.int32))
    late.begin(plan)
    assert tables.tokens[0, :6].tolist() == [7, 8, 9, 10, 11, 12]


def test_layers_are_divided_by_their_time_in_a_decode_batch() -> None:
    """The head of SmolLM2-135M is as large as eight of its 30 layers."""
    spec = shape("smollm2-135m")
    for num_stages, expected in ((1, [30]), (2, [19, 11]), (3, [13, 12, 5]), (30, [1] * 30)):
        shards = [Shard(stage=stage, num_stages=num_stages) for stage in range(num_stages)]
        assert [len(shard.layers(spec)) for shard in shards] == expected
        assert [layer for shard in shards for layer in shard.layers(spec)] == list(range(30))
    with pytest.raises(ValueError, match=r"num_layers is 30, which 31 stages cannot divide among them: choose pp 30"):
        Shard(stage=0, num_stages=31).spec(spec)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-smollm"])
def test_stages_read_every_parameter_once_and_a_tied_embedding_twice(name: str) -> None:
    spec = shape(name)
    read = [list(stored_parts(spec, Shard(stage=stage, num_stages=3))) for stage in range(3)]
    names = [one for part in read for one in part]
    twice = ["model.embed_tokens.weight"] if spec.tied else []
    assert sorted(names) == sorted([*stored_parts(spec), *twice])


def test_a_folder_of_safetensors_is_read_in_stages(tmp_path: Path) -> None:
    spec, weights = model("tiny-smollm")
    write_folder(tmp_path, spec, weights)
    pipes = [StagePipe(group) for group in ThreadGroup.of_size(2)]
    with llm_of([load_decoder(tmp_path, stages=pipe) for pipe in pipes], num_stages=2) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == alone("tiny-smollm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "pp is 2 and tp is 2: tensor and pipeline parallelism cannot be combined yet"),
        ({"executor": "virtual"}, "pp is 2 and executor is 'virtual': it runs no model"),
        ({"speculate": "auto"}, "pp is 2 and speculate is 'auto': a pipeline has no speculative decoding"),
        ({"record": "x"}, "pp is 2 and record is 'x': passes of a pipeline cannot be recorded"),
        ({"role": "decode"}, "pp is 2 and role is 'decode': stages cannot send their KV yet"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(pp=2, **options)


def test_prefill_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_replicas is 1 and pp is 2: stages cannot send their KV yet"):
        check_replicas(ServerConfig(replicas=2, prefill_replicas=1), EngineConfig(pp=2), ())
