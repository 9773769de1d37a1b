"""New weights on several ranks and stages: all of them replace theirs behind the same pass, or none does."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paceline.checks.harness import TimedSink
from paceline.checks.weights import write_folder
from paceline.engine.executor import Executor
from paceline.engine.job import Job
from paceline.engine.output import Conflict, OutputDelta
from paceline.engine.pausing import PauseMode
from paceline.engine.weight_source import WeightSource
from paceline.engine.weight_update import update_weights
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelError
from paceline.model.weights import random_weights
from paceline.request import FinishReason, InvalidRequest, SamplingParams
from tests.parallel.ranks import ThreadRanks, cpu_llm, pipeline_llm
from tests.parallel.test_cpu import PROMPTS, model

SHAPE = "tiny-qwen3"
KINDS = [("tp", 2), ("pp", 2)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@cache
def new_weights() -> dict[str, Tensor]:
    return random_weights(model(SHAPE)[0], seed=99, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    write_folder(path, model(SHAPE)[0], new_weights())
    return path


def ranked_llm(kind: str, size: int) -> LLM:
    return (cpu_llm if kind == "tp" else pipeline_llm)(*model(SHAPE), size)


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}{kind[1]}")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with ranked_llm(*request.param) as made:
        yield made


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS, count: int = 5) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, greedy(count))]


def new_tokens(prompts: list[list[int]] = PROMPTS, count: int = 5) -> list[list[int]]:
    """Those of one rank that has had the new weights from the start."""
    with cpu_llm(model(SHAPE)[0], new_weights(), 1) as llm:
        return tokens_of(llm, prompts, count)


def ranks_of(llm: LLM) -> ThreadRanks:
    executor: Any = llm.engine.executor
    ranks: ThreadRanks = executor._ranks
    return ranks


class PausingSink(TimedSink):
    """Pauses the engine with the first token, so that the request runs when the weights are replaced."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._engine = llm.engine

    def put(self, delta: OutputDelta) -> None:
        if not self.tokens:
            self._engine.pause(PauseMode.CONTINUE)
        super().put(delta)


def stopped_request(llm: LLM, count: int) -> TimedSink:
    sink = PausingSink(llm)
    llm.engine.submit(Job(llm.engine.encode(PROMPTS[1]), greedy(count), stream=True), sink)
    assert sink.started.wait(60)
    return sink


def ended(sink: TimedSink) -> tuple[FinishReason | None, tuple[str, ...]]:
    assert sink.ended.wait(60) and sink.last is not None
    return sink.last.finish_reason, sink.last.weight_versions


def test_new_weights_give_the_tokens_of_an_engine_that_loaded_them(llm: LLM, folder: Path) -> None:
    before = tokens_of(llm)
    assert update_weights(llm.engine, folder).dropped_kv_tokens > 0
    after = llm.generate(PROMPTS, greedy(5))
    assert [output.token_ids for output in after] == new_tokens() != before
    assert after[1].weight_versions == ("1",)


def test_a_request_that_runs_meanwhile_continues_with_the_new_weights(llm: LLM, folder: Path) -> None:
    running = stopped_request(llm, 12)
    llm.engine.pause(PauseMode.CONTINUE).result(60)
    old = list(running.tokens)
    update_weights(llm.engine, folder, mode="continue")
    llm.engine.resume()
    assert ended(running) == (FinishReason.LENGTH, ("0", "1"))
    assert running.tokens[len(old) :] == new_tokens([[*PROMPTS[1], *old]], 12 - len(old))[0]


def test_requests_that_run_meanwhile_finish_or_are_aborted(llm: LLM, folder: Path) -> None:
    expected = tokens_of(llm, [PROMPTS[1]], 30)[0]
    waited = TimedSink()
    llm.engine.submit(Job(llm.engine.encode(PROMPTS[1]), greedy(30), stream=True), waited)
    assert waited.started.wait(60)
    update_weights(llm.engine, folder)
    assert ended(waited) == (FinishReason.LENGTH, ("0",)) and waited.tokens == expected
    aborted = stopped_request(llm, 100)
    update_weights(llm.engine, folder, mode="abort")
    llm.engine.resume()
    assert ended(aborted)[0] is FinishReason.ABORT
    assert tokens_of(llm, PROMPTS[:2]) == new_tokens(PROMPTS[:2])


class Reading:
    """Replaces `read_weights` of a rank: remembers what it has read, and does something before or instead."""

    def __init__(self, executor: Executor, error: Exception | None = None, change: Path | None = None) -> None:
        self.error, self._change = error, change
        self.decoders: list[weakref.ref[Decoder]] = []
        self.called = threading.Event()
        self._inner = executor.read_weights
        executor.read_weights = self  # type: ignore[method-assign, assignment]

    def __call__(self, source: WeightSource) -> Decoder:
        if self._change is not None:
            os.utime(self._change, ns=(1, 1))
        if self.error is not None:
            self.called.set()
            raise self.error
        decoder = self._inner(source)
        self.decoders.append(weakref.ref(decoder))
        self.called.set()
        return decoder


def assert_released(llm: LLM, ranks: list[Reading]) -> None:
    llm.generate([PROMPTS[0]], greedy(1))  # behind the message that drops them
    deadline = time.monotonic() + 60
    while any(ref() is not None for rank in ranks for ref in rank.decoders):  # a rank may still be reading
        assert time.monotonic() < deadline, "a rank holds weights that are not used"
        gc.collect()
        time.sleep(0.01)


@pytest.mark.parametrize(("kind", "size"), [("tp", 3), ("pp", 3)])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_read_its_part_changes_nothing(kind: str, size: int, failing: int, folder: Path) -> None:
    with ranked_llm(kind, size) as llm:
        before = tokens_of(llm)
        ranks = [Reading(one) for one in (llm.engine.executor.local, *ranks_of(llm).executors)]
        ranks[1].error = MemoryError("too little")
        message = r"rank 1 of 3: MemoryError\('too little'\)"
        if failing == 0:
            ranks[0].error, message = ModelError("the disk is gone."), "the disk is gone"
        with pytest.raises(InvalidRequest, match=message):
            update_weights(llm.engine, folder)
        assert all(rank.called.wait(60) for rank in ranks)
        assert_released(llm, ranks)
        again = llm.generate(PROMPTS, greedy(5))
        assert [output.token_ids for output in again] == before and again[1].weight_versions == ("0",)
        assert again[1].num_cached_tokens > 0, "the prefix cache is untouched"
        ranks[0].error = ranks[1].error = None
        update_weights(llm.engine, folder)  # reports of the update that failed are not taken for those of this one
        assert tokens_of(llm) == new_tokens()


def test_files_that_change_between_the_reads_of_two_ranks_are_noticed(llm: LLM, tmp_path: Path) -> None:
    write_folder(tmp_path, model(SHAPE)[0], new_weights())
    Reading(ranks_of(llm).executors[0], change=tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="has changed while it was read"):
        update_weights(llm.engine, tmp_path)


def test_ranks_release_what_they_have_read_if_the_engine_cannot_pause(llm: LLM, folder: Path) -> None:
    running = stopped_request(llm, 6)
    rank = Reading(ranks_of(llm).executors[0])
    with pytest.raises(Conflict, match="mode is 'wait' and the engine is paused"):
        update_weights(llm.engine, folder)
    llm.engine.resume()
    assert ended(running) == (FinishReason.LENGTH, ("0",))
    assert len(rank.decoders) == 1
    assert_released(llm, [rank])
