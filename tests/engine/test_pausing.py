"""Pausing an engine in all modes, and replacing its weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checks.harness import TimedSink
from paceline.checks.weights import write_folder
from paceline.config import EngineConfig
from paceline.engine.build import build_engine
from paceline.engine.cache_flush import flush_when_idle
from paceline.engine.engine import Engine, EngineHooks
from paceline.engine.job import Job
from paceline.engine.output import Conflict, EngineFailed, OutputDelta
from paceline.engine.pausing import PauseMode
from paceline.engine.virtual.build import build_virtual
from paceline.engine.weight_update import update_weights
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.model.weights import load_decoder, random_weights
from paceline.request import FinishReason, Grammar, InvalidRequest, SamplingParams

SPEC = shape("tiny-qwen3")
PROMPT = list(range(10, 60))


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


def submit(engine: Engine, count: int, prompt: list[int] = PROMPT, **options: Any) -> TimedSink:
    sink = TimedSink()
    engine.submit(Job(engine.encode(prompt), greedy(count), stream=True, **options), sink)
    return sink


class Trigger(TimedSink):
    """Calls a function on the engine's thread with the first token: what it posts comes before the next pass."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def put(self, delta: OutputDelta) -> None:
        if not self.tokens:
            self.result = self.action()
        super().put(delta)


def on_first_token(engine: Engine, action: Callable[[], object], params: SamplingParams) -> Trigger:
    sink = Trigger(action)
    engine.submit(Job(engine.encode(PROMPT), params, stream=True), sink)
    assert sink.started.wait(60)
    return sink


def stopped(engine: Engine, count: int) -> TimedSink:
    """A request in an engine that paused after its first tokens."""
    sink = on_first_token(engine, lambda: engine.pause(PauseMode.CONTINUE), greedy(count))
    sink.result.result(60)
    return sink


def test_pauses_of_the_operator_are_reported_in_order_and_no_others() -> None:
    found: list[bool] = []
    engine = build_virtual(EngineConfig(executor="virtual"), {}, hooks=EngineHooks(on_pause=found.append))
    with closing(engine):
        sink = stopped(engine, 5)
        with pytest.raises(Conflict):
            engine.pause(PauseMode.WAIT).result(60)  # refused: the request cannot finish
        engine.pause(PauseMode.CONTINUE, who="update").result(60)
        engine.resume(who="update")
        engine.resume()
        assert reason(sink) is FinishReason.LENGTH
        engine.pause().result(60)
        engine.resume()
        engine.call(lambda _: None).result(60)
    assert found == [True, False, True, False]


def reason(sink: TimedSink) -> FinishReason | None:
    assert sink.ended.wait(60) and sink.last is not None
    return sink.last.finish_reason


@pytest.fixture(params=["on", "off"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = build_engine(load="random", shape="tiny-qwen3", kv_tokens=4096, threads=1, overlap=request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape."""
    path = tmp_path_factory.mktemp("weights")
    write_folder(path, SPEC, random_weights(SPEC, seed=99))
    return path


def new_tokens(folder: Path, count: int) -> list[int]:
    """The output of an engine that loads these weights at its start."""
    engine = build_engine(load="random", shape="tiny-qwen3", kv_tokens=4096, threads=1)
    engine.executor.load_weights(load_decoder(folder, dtype="float32"))
    with LLM.from_engine(engine) as llm:
        return llm.generate([PROMPT], greedy(count))[0].token_ids


# ---------------------------------------------------------------------- pause and resume


def test_a_paused_engine_accepts_requests_and_serves_them_after_resume(engine: Engine) -> None:
    engine.pause().result(60)
    passes = engine.progress.num_passes
    sink = submit(engine, 4)
    why = engine.call(lambda scheduler: [scheduler.explain(one) for one in scheduler.requests]).result(60)
    assert "waits for the engine to resume: it is paused" in why[0]
    assert engine.is_paused and engine.progress.num_passes == passes and not sink.tokens
    engine.resume()
    assert reason(sink) is FinishReason.LENGTH
    assert not engine.is_paused


def test_wait_lets_running_requests_finish_and_holds_new_ones(engine: Engine) -> None:
    running = submit(engine, 60)
    running.started.wait(60)
    pause = engine.pause(PauseMode.WAIT)
    held = submit(engine, 1, [7, 8, 9])
    pause.result(60)
    assert reason(running) is FinishReason.LENGTH and len(running.tokens) == 60
    assert not held.ended.is_set()
    engine.resume()
    assert reason(held) is FinishReason.LENGTH


def test_abort_ends_running_requests_and_keeps_waiting_ones(engine: Engine) -> None:
    running = on_first_token(engine, lambda: engine.pause(PauseMode.ABORT), greedy(1500))
    running.result.result(60)
    assert reason(running) is FinishReason.ABORT
    held = submit(engine, 2)
    engine.resume()
    assert reason(held) is FinishReason.LENGTH


@pytest.mark.parametrize("grammar", [None, Grammar.regex("[a-z ]{200}")], ids=["plain", "grammar"])
def test_continue_stops_between_passes_and_changes_no_token(engine: Engine, grammar: Grammar | None) -> None:
    params = replace(greedy(80), grammar=grammar, ignore_eos=grammar is None)
    expected = LLM.from_engine(engine).generate([PROMPT], params)[0].token_ids
    running = on_first_token(engine, lambda: engine.pause(PauseMode.CONTINUE), params)
    running.result.result(60)
    assert len(running.tokens) < 80
    for _ in range(3):
        engine.pause(PauseMode.CONTINUE).result(60)
        assert engine.call(lambda scheduler: scheduler.num_in_flight).result(60) == 0
        passes = engine.progress.num_passes
        assert engine.call(lambda scheduler: scheduler.num_running).result(60) <= 1
        assert engine.progress.num_passes == passes
        engine.resume()
    assert reason(running) is FinishReason.LENGTH
    assert running.tokens == expected


def test_requests_of_a_paused_engine_can_be_aborted_and_expire(engine: Engine) -> None:
    engine.pause().result(60)
    expiring = submit(engine, 4, timeout_s=0.05)
    aborted = submit(engine, 4, id="mine")
    engine.abort("mine")
    assert reason(aborted) is FinishReason.ABORT
    assert reason(expiring) is FinishReason.DEADLINE
    assert engine.is_paused


def test_a_paused_engine_closes(engine: Engine) -> None:
    engine.pause().result(60)
    sink = submit(engine, 4)
    engine.close()
    assert reason(sink) is FinishReason.ABORT


def test_closing_the_engine_ends_a_pause_that_waits_for_running_requests(engine: Engine) -> None:
    def pause_and_close() -> Future[None]:
        pause = engine.pause(PauseMode.WAIT)
        engine._closing = True  # as close() does, before the next pass
        return pause

    running = on_first_token(engine, pause_and_close, greedy(1500))
    engine.close()
    with pytest.raises(EngineFailed, match="the engine was closed"):
        running.result.result(60)


def test_resuming_early_cancels_the_pause(engine: Engine) -> None:
    def pause_and_resume() -> Future[None]:
        pause = engine.pause(PauseMode.WAIT)
        engine.resume()
        return pause

    running = on_first_token(engine, pause_and_resume, greedy(60))
    with pytest.raises(Conflict, match="resumed before it was paused"):
        running.result.result(60)
    assert reason(running) is FinishReason.LENGTH


# ---------------------------------------------------------------------- flush


def num_cached_pages(engine: Engine) -> int:
    return engine.call(lambda scheduler: scheduler.memory.tree.num_pages).result(60)


def test_a_flush_that_waits_drops_what_running_requests_used(engine: Engine) -> None:
    with ThreadPoolExecutor() as pool:
        running = on_first_token(engine, lambda: pool.submit(flush_when_idle, engine, 60), greedy(100))
        held = submit(engine, 2, [7, 8, 9])
        assert running.result.result(60) >= (len(PROMPT) + 99) // 16
    assert reason(running) is FinishReason.LENGTH and len(running.tokens) == 100
    assert reason(held) is FinishReason.LENGTH and not engine.is_paused
    assert num_cached_pages(engine) == 0, "the last request had no whole page"


def test_a_flush_that_times_out_drops_nothing_and_holds_no_request_back(engine: Engine) -> None:
    LLM.from_engine(engine).generate([PROMPT], greedy(2))
    running = on_first_token(engine, lambda: None, greedy(1500))
    with pytest.raises(Conflict, match=r"requests still run after timeout_s = 0\.01 seconds, and nothing"):
        flush_when_idle(engine, 0.01)
    assert num_cached_pages(engine) > 0
    assert reason(submit(engine, 2, [7, 8, 9])) is FinishReason.LENGTH
    assert not running.refused


def test_several_flushes_at_once_do_no_harm(engine: Engine) -> None:
    with ThreadPoolExecutor() as pool:

        def begin() -> list[Future[int]]:
            return [pool.submit(flush_when_idle, engine, 60) for _ in range(4)]

        running = on_first_token(engine, begin, greedy(100))
        pages = [flush.result(60) for flush in running.result]
    assert sorted(pages)[:3] == [0, 0, 0] and max(pages) >= 9
    assert reason(submit(engine, 2)) is FinishReason.LENGTH


def test_a_flush_leaves_a_paused_engine_paused(engine: Engine) -> None:
    LLM.from_engine(engine).generate([PROMPT], greedy(2))
    engine.pause().result(60)
    assert flush_when_idle(engine, 60) == 3
    assert engine.is_paused


# ---------------------------------------------------------------------- weights


def test_new_weights_give_the_tokens_of_an_engine_that_loaded_them(engine: Engine, folder: Path) -> None:
    llm = LLM.from_engine(engine)
    before = llm.generate([PROMPT], greedy(12))[0]
    update = update_weights(engine, folder)
    after = llm.generate([PROMPT], greedy(12))[0]
    assert after.token_ids == new_tokens(folder, 12) != before.token_ids
    assert (before.weight_versions, after.weight_versions) == (("0",), ("1",))
    assert update.version == "1" and update.dropped_kv_tokens > 0
    assert after.num_cached_tokens == 0


def test_a_request_that_spans_versions_says_so(engine: Engine, folder: Path) -> None:
    running = stopped(engine, 100)
    update_weights(engine, folder, mode="continue", version="step-7")
    engine.resume()
    assert reason(running) is FinishReason.LENGTH and len(running.tokens) == 100
    assert running.last is not None and running.last.weight_versions == ("0", "step-7")
    assert engine.weights.current == "step-7"


def test_wait_and_abort_leave_no_request_of_two_versions(engine: Engine, folder: Path) -> None:
    running = submit(engine, 60)
    running.started.wait(60)
    update_weights(engine, folder)
    assert reason(running) is FinishReason.LENGTH
    assert running.last is not None and running.last.weight_versions == ("0",)
    long = stopped(engine, 1500)
    update_weights(engine, folder, mode="abort")
    assert reason(long) is FinishReason.ABORT


def test_an_engine_that_was_paused_stays_paused(engine: Engine, folder: Path) -> None:
    engine.pause().result(60)
    update_weights(engine, folder)
    assert engine.call(lambda _: engine.is_paused).result(60)
    held = submit(engine, 5)
    engine.resume()
    assert reason(held) is FinishReason.LENGTH and held.tokens == new_tokens(folder, 5)


def test_waiting_for_requests_that_an_operator_stopped_is_an_error(engine: Engine, folder: Path) -> None:
    running = stopped(engine, 80)
    with pytest.raises(Conflict, match="mode is 'wait' and the engine is paused with 1 running"):
        update_weights(engine, folder)
    engine.resume()
    assert reason(running) is FinishReason.LENGTH
    assert running.last is not None and running.last.weight_versions == ("0",)


def test_weights_that_do_not_fit_change_nothing(engine: Engine, folder: Path, tmp_path: Path) -> None:
    llm = LLM.from_engine(engine)
    before = llm.generate([PROMPT], greedy(6))[0]
    with pytest.raises(InvalidRequest, match="neither a folder nor a"):
        update_weights(engine, tmp_path / "missing")
    other = shape("tiny-smollm")
    write_folder(tmp_path / "other", other, random_weights(other))
    with pytest.raises(InvalidRequest, match="path has a model with family 'llama', the served one has 'qwen3'"):
        update_weights(engine, tmp_path / "other")
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_text((folder / "config.json").read_text())
    (short / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(InvalidRequest, match="damaged or truncated"):
        update_weights(engine, short)
    config = json.loads((folder / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    with pytest.raises(InvalidRequest, match=r"a model with layers\[0\].mixer.rope.theta 5.0, the served one"):
        update_weights(engine, short)
    with pytest.raises(InvalidRequest, match="mode is 'later': choose one of wait, abort, continue"):
        update_weights(engine, folder, mode="later")
    again = llm.generate([PROMPT], greedy(6))[0]
    assert again.token_ids == before.token_ids and again.weight_versions == ("0",)
    assert again.num_cached_tokens > 0, "the prefix cache is untouched"


def test_one_update_at_a_time(engine: Engine, folder: Path) -> None:
    with engine.weights.updating, pytest.raises(Conflict, match="another weight update is in progress"):
        update_weights(engine, folder)
    assert update_weights(engine, folder).version == "1"


def test_no_adapter_is_loaded_while_weights_are_replaced(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be arranged for the old weights, and used with the new ones."""
    found, load = [], engine.executor.load_weights
    monkeypatch.setattr(
        engine.executor, "load_weights", lambda one: (found.append(engine.adapters.loading.locked()), load(one))
    )
    update_weights(engine, folder)
    assert found == [True] and not engine.adapters.loading.locked()


def test_if_copying_fails_the_engine_fails(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.executor, "load_weights", fail)
    with pytest.raises(EngineFailed, match="replaced only in part"):
        update_weights(engine, folder)
    failed = threading.Event()
    while engine.failure is None:
        failed.wait(0.01)
    with pytest.raises(EngineFailed):
        submit(engine, 1)


def test_16_bit_weights_are_replaced_too(folder: Path) -> None:
    with LLM(load="random", shape="tiny-qwen3", kv_tokens=4096, threads=1, dtype="bfloat16") as llm:
        update_weights(llm.engine, folder)
        expected = load_decoder(folder, dtype="bfloat16")
        assert torch.equal(llm.engine.executor.runner.decoder.embedding, expected.embedding)  # type: ignore[attr-defined]


def test_a_virtual_executor_has_no_weights(folder: Path) -> None:
    engine = build_virtual(EngineConfig(executor="virtual"), {})
    with pytest.raises(InvalidRequest, match="this engine cannot replace weights"):
        update_weights(engine, folder)
    engine.close()
