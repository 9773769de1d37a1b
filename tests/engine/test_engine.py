"""The engine's interface: streams, cancellation, deadlines, stop strings, isolation of errors."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.engine.timeline import Timeline
from paceline.engine.virtual.build import build_virtual
from paceline.engine.virtual.executor import VirtualClock, VirtualExecutor
from paceline.llm import LLM
from paceline.request import FinishReason, Grammar, InvalidRequest, PacelineError, Refused, SamplingParams
from paceline.scheduler import Scheduler
from paceline.text.stop import TextStream
from paceline.text.synthetic import synthetic_tokenizer

LONG = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


async def collect(engine: Engine, prompt: Any, params: SamplingParams, **options: Any) -> list[OutputDelta]:
    return [piece async for piece in engine.stream(Job(engine.encode(prompt), params, **options))]


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def test_stream_and_generate_return_the_same_tokens(engine: Engine) -> None:
    prompts = ["hello there", "abc", "some longer prompt with words", "x"] * 4
    expected = LLM.from_engine(engine).generate(prompts, greedy(12))

    async def all_at_once() -> list[list[OutputDelta]]:
        return await asyncio.gather(*(collect(engine, prompt, greedy(12)) for prompt in prompts))

    for pieces, output in zip(asyncio.run(all_at_once()), expected, strict=True):
        assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
        assert "".join(piece.text for piece in pieces) == output.text == engine.tokenizer.decode(
            output.token_ids, at_start=False)  # fmt: skip
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        last = pieces[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.usage is not None and last.timings is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(output.prompt_token_ids), 12)
        assert (
            0 <= (last.timings.admitted_s or 0) <= (last.timings.first_token_s or 0) <= (last.timings.finished_s or 0)
        )


def test_cached_tokens_are_reported(engine: Engine) -> None:
    prompt = list(range(10, 60))
    asyncio.run(collect(engine, prompt, greedy(2)))
    last = asyncio.run(collect(engine, prompt, greedy(2)))[-1]
    assert last.usage is not None
    assert last.usage.cached_tokens == 48


def test_leaving_a_stream_aborts_the_request(engine: Engine) -> None:
    async def leave() -> None:
        stream = engine.stream(Job(engine.encode("hello"), LONG))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.to_thread(wait_until, lambda: not engine.scheduler.has_work)  # while this loop still runs

    asyncio.run(leave())
    assert engine.scheduler.counters.finished[FinishReason.ABORT] == 1
    assert len(asyncio.run(collect(engine, "hello", greedy(3)))) >= 1


def test_cancelling_a_task_aborts_the_request(engine: Engine) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(engine, "hello", LONG))
        while not engine.scheduler.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: not engine.scheduler.has_work)

    asyncio.run(cancel())
    assert engine.scheduler.counters.finished[FinishReason.ABORT] == 1
    assert not engine._outputs.active


def test_a_deadline_ends_a_request_and_keeps_what_it_has(engine: Engine) -> None:
    pieces = asyncio.run(collect(engine, "hello", SamplingParams(temperature=0, ignore_eos=True), timeout_s=0.15))
    assert pieces[-1].finish_reason is FinishReason.DEADLINE
    found = [token for piece in pieces for token in piece.token_ids]
    whole = LLM.from_engine(engine).generate("hello", greedy(len(found) + 1))[0].token_ids
    assert found == whole[:-1]


def test_a_running_timeout_and_a_queue_timeout_end_a_request(engine: Engine) -> None:
    long = SamplingParams(temperature=0, ignore_eos=True)
    pieces = asyncio.run(collect(engine, "hello", long, running_timeout_s=0.15))
    assert pieces[-1].finish_reason is FinishReason.RUNNING_TIMEOUT
    engine.pause().result(60)
    pieces = asyncio.run(collect(engine, "hello", long, queue_timeout_s=0.05))
    assert [piece.finish_reason for piece in pieces] == [FinishReason.QUEUE_TIMEOUT]
    with pytest.raises(InvalidRequest, match="queue_timeout_s is 0: give seconds, more than 0"):
        asyncio.run(collect(engine, "hello", long, queue_timeout_s=0))


@pytest.mark.parametrize("overlap", ["off", "on", "sync"])
def test_a_stop_string_ends_the_text_before_it(overlap: str) -> None:
    engine = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=4096, overlap=overlap)
    llm = LLM.from_engine(engine)
    with llm:
        whole = llm.generate("hello there", greedy(40))[0]
        middle = len(whole.text) // 2
        stop = whole.text[middle : middle + 5]
        cut = whole.text.index(stop)
        output = llm.generate("hello there", greedy(40, stop=["never seen", stop]))[0]
        assert (output.text, output.finish_reason) == (whole.text[:cut], FinishReason.STOP)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < 40
        pieces = asyncio.run(collect(engine, "hello there", greedy(40, stop=stop)))
        assert "".join(piece.text for piece in pieces) == whole.text[:cut]
        wait_until(lambda: not engine.scheduler.has_work)
        assert engine.scheduler.counters.finished[FinishReason.STOP] == 2
        # Not before min_tokens: the same string does not end it then.
        late = llm.generate("hello there", greedy(40, stop=stop, min_tokens=len(output.token_ids) + 1))[0]
        assert len(late.token_ids) > len(output.token_ids)


def test_the_stop_token_is_not_part_of_the_text(engine: Engine) -> None:
    llm = LLM.from_engine(engine)
    whole = llm.generate("hello there", greedy(20))[0]
    token = whole.token_ids[7]
    first = whole.token_ids.index(token)
    output = llm.generate("hello there", greedy(20, stop_token_ids=(token,)))[0]
    assert (output.token_ids, output.finish_reason) == (whole.token_ids[: first + 1], FinishReason.STOP)
    assert output.text == engine.tokenizer.decode(whole.token_ids[:first], at_start=False)


def test_requests_that_are_not_streamed_are_detokenized_while_they_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, sizes = TextStream.push, []

    def noting(self: TextStream, ids: Iterable[int]) -> str:
        listed = list(ids)
        sizes.append(len(listed))
        return push(self, listed)

    monkeypatch.setattr(TextStream, "push", noting)
    prompts, llm = ["one", "two", "three and more"] * 7, LLM.from_engine(engine)
    outputs = llm.generate(prompts, greedy(90))
    for output in outputs:
        assert output.text == engine.tokenizer.decode(output.token_ids, at_start=False)
    assert sum(sizes) == 90 * len(prompts), "every token is made text once"
    assert max(sizes) <= 40, "at their ends, which come together, little is left to do"
    assert len(sizes) <= 12 * len(prompts), "and not token by token"

    def breaking(self: TextStream, ids: Iterable[int]) -> str:
        raise ValueError("a broken text")

    monkeypatch.setattr(TextStream, "push", breaking)
    with pytest.raises(EngineFailed, match="a broken text"):
        llm.generate("one", greedy(90))
    assert not engine.call(lambda scheduler: len(scheduler.requests)).result(), "it ended where it broke"
    monkeypatch.undo()
    assert llm.generate("one", greedy(90))[0].text == outputs[0].text


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_every_request_gets_the_logprobs_of_its_own_tokens(overlap: str) -> None:
    """Streamed or not, also when requests finish while a pass with their rows is in flight."""
    engine = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=8192, overlap=overlap)
    llm = LLM.from_engine(engine)
    with llm:
        prompts = [f"prompt number {index}" for index in range(9)]
        whole = llm.generate(prompts, greedy(12))
        params = [
            greedy(12, logprobs=None if index % 3 == 2 else index, stop_token_ids=(output.token_ids[index],))
            for index, output in enumerate(whole)
        ]
        alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
        together = llm.generate(prompts, params)

        async def all_at_once() -> list[list[OutputDelta]]:
            each = zip(prompts, params, strict=True)
            return await asyncio.gather(*(collect(engine, prompt, one) for prompt, one in each))

        streamed = asyncio.run(all_at_once())
        assert overlap == "off" or engine.scheduler.counters.discarded_tokens > 0
    for one, expected, output, pieces in zip(params, alone, together, streamed, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.text == expected.text == "".join(piece.text for piece in pieces)
        if one.logprobs is None:
            assert output.logprobs is None and not any(piece.logprobs for piece in pieces)
            continue
        assert expected.logprobs is not None and output.logprobs is not None
        for logprobs in (expected.logprobs, output.logprobs, [each for piece in pieces for each in piece.logprobs]):
            assert [each.token_id for each in logprobs] == output.token_ids
            assert [len(each.top) for each in logprobs] == [one.logprobs] * len(logprobs)
            for each, same in zip(logprobs, expected.logprobs, strict=True):
                assert each.logprob == pytest.approx(same.logprob, abs=1e-4)
                assert all(token != each.token_id or value == each.logprob for token, value in each.top)
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)


def test_logprobs_of_a_request_that_is_not_streamed_are_in_its_final_delta(engine: Engine) -> None:
    class CollectingSink:
        def __init__(self) -> None:
            self.pieces: SimpleQueue[OutputDelta] = SimpleQueue()

        def put(self, piece: OutputDelta) -> None:
            self.pieces.put(piece)

        def refuse(self, error: PacelineError) -> None:
            raise AssertionError(error)

    sink = CollectingSink()
    engine.submit(Job(engine.encode("hello"), greedy(20, logprobs=2, prompt_logprobs=1), stream=False), sink)
    piece = sink.pieces.get(timeout=20)
    assert piece.finish_reason is FinishReason.LENGTH and sink.pieces.empty()
    assert [one.token_id for one in piece.logprobs] == list(piece.token_ids) and len(piece.token_ids) == 20
    assert piece.usage is not None and len(piece.prompt_logprobs) == piece.usage.prompt_tokens - 1
    # A request that ends in an error gets no tokens and no logprobs.
    engine.submit(
        Job(engine.encode("hello"), SamplingParams(temperature=0, ignore_eos=True, logprobs=2), stream=False), sink
    )
    wait_until(lambda: any(live.logprobs for live in list(engine._outputs.active.values())))
    engine.close()
    piece = sink.pieces.get(timeout=20)
    assert (piece.error, piece.token_ids, piece.logprobs) == ("the engine was closed", (), ())


def test_garbage_is_not_collected_in_the_middle_of_generate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = engine.loop.step, set()

    def noting(**options: Any) -> Any:
        seen.add(gc.isenabled())
        return step(**options)

    monkeypatch.setattr(engine.loop, "step", noting)
    llm = LLM.from_engine(engine)
    llm.generate("hello", greedy(5))
    assert seen == {False} and gc.isenabled()
    with pytest.raises(Refused):
        llm.generate([1] * 5, greedy(10**9))
    assert gc.isenabled()
    gc.disable()
    try:
        llm.generate("hello", greedy(5))
        assert not gc.isenabled(), "if it was off before, it stays off"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", greedy(1), InvalidRequest, "the prompt is empty: give at least one token."),
        ([], greedy(1), InvalidRequest, "the prompt is empty: give at least one token."),
        ([512], greedy(1), InvalidRequest, "token id 512: the model's ids are 0 to 511."),
        ([-1], greedy(1), InvalidRequest, "negative token id"),
        ([0.5], greedy(1), InvalidRequest, "flat list of token ids"),
        ([1] * 2049, SamplingParams(), Refused, "leaves none for output in a context of 2048"),
        ([1] * 5, greedy(10**9), Refused, "more than the context of 2048"),
        ("a\ud800", greedy(1), InvalidRequest, "lone surrogate"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_and_the_next_request_is_served(
    engine: Engine, prompt: Any, params: SamplingParams, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("[", "\\[")):
        asyncio.run(collect(engine, prompt, params))
    with pytest.raises(error):
        LLM.from_engine(engine).generate([[5, 6], prompt], params)
    assert len(LLM.from_engine(engine).generate([[5, 6]], greedy(4))[0].token_ids) == 4
    wait_until(lambda: not engine.scheduler.has_work and not engine._outputs.active)


def test_a_request_id_cannot_be_used_twice_at_a_time(engine: Engine) -> None:
    async def twice() -> None:
        stream = engine.stream(Job(engine.encode("hello"), LONG, id="a"))
        await anext(stream)
        with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
            await collect(engine, "hello", greedy(2), id="a")
        await anext(stream)  # the first one continues
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(twice())


def test_a_detokenization_error_ends_only_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    push, seen = TextStream.push, []

    def breaking(self: TextStream, ids: Iterable[int]) -> str:
        seen.append(self)
        if self is seen[0] and len(seen) > 6:
            raise ValueError("a broken text")
        return push(self, ids)

    expected = [output.token_ids for output in LLM.from_engine(engine).generate(["one", "two", "three"], greedy(9))]
    monkeypatch.setattr(TextStream, "push", breaking)

    async def three() -> list[list[OutputDelta]]:
        return await asyncio.gather(*(collect(engine, text, greedy(9)) for text in ("one", "two", "three")))

    found = asyncio.run(three())
    reasons = [pieces[-1].finish_reason for pieces in found]
    assert reasons.count(FinishReason.ERROR) == 1
    assert reasons.count(FinishReason.LENGTH) == 2
    for pieces, tokens in zip(found, expected, strict=True):
        if pieces[-1].finish_reason is FinishReason.LENGTH:
            assert [token for piece in pieces for token in piece.token_ids] == tokens
        else:
            assert pieces[-1].error == "ValueError('a broken text')"


def test_a_failed_pass_ends_every_request_with_an_error(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    device = engine.executor.runner  # type: ignore[attr-defined]
    run, passes = device.run, []

    def breaking(plan: Any, masks: Any) -> Any:
        passes.append(plan)
        if len(passes) == 5:
            raise RuntimeError("the device is on fire")
        return run(plan, masks)

    device.run = breaking

    async def two() -> list[list[OutputDelta]]:
        return await asyncio.gather(*(collect(engine, text, LONG) for text in ("one", "two")))

    for pieces in asyncio.run(two()):
        assert pieces[-1].finish_reason is FinishReason.ERROR
        assert "the device is on fire" in (pieces[-1].error or "")
    assert len(passes) == 5  # the pass behind it was not run on memory that cannot be trusted
    with pytest.raises(EngineFailed, match="the device is on fire"):
        asyncio.run(collect(engine, "three", LONG))
    (record,) = [one for one in caplog.records if one.name == "paceline.engine" and one.levelname == "ERROR"]
    assert record.exc_info is not None and record.message == "the engine failed; all requests end with an error"


def test_close_aborts_running_requests_and_refuses_new_ones(engine: Engine) -> None:
    async def closed() -> list[OutputDelta]:
        task = asyncio.create_task(collect(engine, "hello", LONG))
        while not engine.scheduler.requests:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        return await task

    assert asyncio.run(closed())[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineFailed, match="was closed"):
        asyncio.run(collect(engine, "hello", LONG))


def test_a_request_that_finishes_during_close_keeps_its_output(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.loop.step

    def closing(**options: Any) -> Any:
        output = step(**options)
        engine._closing = output is not None and bool(output.updates.finished)
        return output

    monkeypatch.setattr(engine.loop, "step", closing)
    with LLM.from_engine(engine) as llm:
        output = llm.generate("hello", greedy(4))[0]
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 4 and output.text


def test_a_closed_event_loop_leaves_no_request_behind(engine: Engine) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        stream = engine.stream(Job(engine.encode("hello"), LONG))
        await anext(stream)
        return stream

    kept = loop.run_until_complete(begin())
    loop.close()
    wait_until(lambda: not engine.scheduler.has_work)
    assert not engine._outputs.active
    assert len(LLM.from_engine(engine).generate("hello", greedy(3))[0].token_ids) == 3
    del kept


def test_maintenance_runs_in_units_and_a_new_request_waits_for_one_at_most(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.engine._IDLE_S", 0.3)
    llm, go_on = LLM.from_engine(engine), threading.Event()
    events: list[str] = []

    def run_background_work() -> bool:
        events.append("run_background_work")
        assert go_on.wait(10)
        return events.count("run_background_work") < 3

    def ask() -> None:
        llm.generate("hello", greedy(2))
        events.append("answer")

    monkeypatch.setattr(engine.executor, "run_background_work", run_background_work, raising=False)
    ask()
    wait_until(lambda: "run_background_work" in events)
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: engine._inbox)  # while the run_background_work is under way
    go_on.set()
    asking.join(10)
    wait_until(lambda: events.count("run_background_work") == 3)
    time.sleep(0.4)
    assert events == ["answer", "run_background_work", "answer", "run_background_work", "run_background_work"]


def test_maintenance_is_postponed_while_requests_are_expected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    timeouts: list[float | None] = []
    has_mail = engine._has_mail

    def spy_has_mail(timeout: float | None) -> bool:
        timeouts.append(timeout)
        return has_mail(timeout)

    def first_unit(_: float) -> list[str]:
        begun.append(True)
        return []

    monkeypatch.setattr(engine.scheduler, "check_idle", first_unit)
    monkeypatch.setattr(engine, "_has_mail", spy_has_mail)
    monkeypatch.setattr("paceline.engine.engine._IDLE_S", 3600.0)
    engine.expect_requests()
    monkeypatch.setattr("paceline.engine.engine._IDLE_S", 0.01)
    engine.submit(Job(engine.encode("hello"), greedy(2)), SimpleNamespace(put=lambda _: None, refuse=lambda _: None))
    wait_until(lambda: any(timeout is not None and timeout > 60 for timeout in timeouts))  # 0.01 s have passed
    assert not begun
    engine._expects_until = 0.0
    engine.call(lambda _: None).result()
    wait_until(lambda: begun)


def test_an_idle_engine_uses_no_cpu(engine: Engine) -> None:
    LLM.from_engine(engine).generate("hello", greedy(3))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.05


def test_requests_can_be_submitted_from_many_threads(engine: Engine) -> None:
    llm = LLM.from_engine(engine)
    expected = [llm.generate(f"prompt {index}", greedy(6))[0].token_ids for index in range(8)]
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        found[index] = llm.generate(f"prompt {index}", greedy(6))[0].token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(8)] == expected


@pytest.mark.parametrize("overlap", ["off", "on", "sync"])
def test_the_next_pass_is_launched_before_the_last_is_committed(overlap: str) -> None:
    timeline = Timeline()
    engine = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=1024, overlap=overlap, trace=timeline)
    with LLM.from_engine(engine) as llm:
        llm.generate("hello", greedy(12))
    events = [(span.what, span.step) for span in timeline.spans]
    launched_ahead = [
        step for event, step in events
        if event == "commit" and ("launch", step + 1) in events[: events.index(("commit", step))]
    ]  # fmt: skip
    assert len(launched_ahead) == (0 if overlap == "off" else 11)


def test_the_environment_chooses_the_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_OVERLAP", "off")
    engine = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=1024)
    assert not engine.loop.overlap
    engine.close()
    engine = build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=1024, overlap="sync")
    assert engine.loop.overlap and engine.loop.sync
    engine.close()
    monkeypatch.setenv("PACELINE_OVERLAP", "maybe")
    with pytest.raises(ValueError, match="PACELINE_OVERLAP is 'maybe': choose one of on, off, sync"):
        build_engine(load="random", shape="tiny-llama", threads=1, kv_tokens=1024)


def test_a_failing_sink_ends_only_its_request(engine: Engine) -> None:
    class Broken:
        errors: list[Exception] = []  # noqa: RUF012

        def put(self, piece: OutputDelta) -> None:
            raise OSError("connection lost")

        def refuse(self, error: Exception) -> None:
            self.errors.append(error)

    engine.submit(Job(engine.encode("hello"), LONG), Broken())
    assert len(LLM.from_engine(engine).generate("hello", greedy(5))[0].token_ids) == 5
    assert "connection lost" in str(Broken.errors[0])
    assert not engine._outputs.active


def test_call_runs_on_the_engine_thread_between_steps(engine: Engine) -> None:
    async def ask() -> None:
        stream = engine.stream(Job(engine.encode("hello"), LONG, id="a"))
        await anext(stream)
        assert "is decoding" in engine.call(lambda scheduler: scheduler.explain("a")).result(5)
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda _: 1 // 0).result(5)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(ask())


def test_dropping_the_llm_ends_its_threads() -> None:
    llm = LLM(load="random", shape="tiny-llama", threads=1, kv_tokens=1024)
    llm.generate("hello", greedy(3))
    thread = llm.engine._thread
    del llm
    assert not thread.is_alive()


def test_an_abort_takes_effect_within_two_steps() -> None:
    """Counted in passes from the moment the engine receives it: seconds depend on the machine."""
    engine = build_virtual(EngineConfig(executor="virtual"), {"num_pages": 4096})
    took: SimpleQueue[int] = SimpleQueue()

    class Leaver:
        def __init__(self, request_id: str) -> None:
            self.request_id, self.num_pieces, self.left_at = request_id, 0, 0

        def put(self, piece: OutputDelta) -> None:
            self.num_pieces += 1
            if piece.finish_reason is not None:
                assert piece.finish_reason is FinishReason.ABORT
                took.put(engine.progress.num_passes - self.left_at)
            elif self.num_pieces == 10:
                self.left_at = engine.progress.num_passes
                engine.abort(self.request_id)

        def refuse(self, error: PacelineError) -> None:
            raise AssertionError(error)

    try:
        for number in range(20):
            sink = Leaver(f"r-{number}")
            params = SamplingParams(max_tokens=3000, ignore_eos=True)
            engine.submit(Job(engine.encode([number + 1] * 40), params, id=sink.request_id), sink)
        assert all(took.get(timeout=20) <= 2 for _ in range(20))
        assert engine.call(lambda scheduler: scheduler.memory.num_available_pages).result() == 4096
    finally:
        engine.close()


def test_an_executor_without_logits_refuses_grammars_and_logprobs() -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=64))
    executor = VirtualExecutor(VirtualClock())
    engine = Engine(scheduler, executor, synthetic_tokenizer(512), vocab_size=512)
    for params in (SamplingParams(logprobs=1), SamplingParams(grammar=Grammar.regex("a"))):
        with pytest.raises(InvalidRequest, match="this executor does not compute logits"):
            asyncio.run(collect(engine, "hello", params))
    engine.close()
