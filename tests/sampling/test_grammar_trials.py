"""A grammar that takes too long is ended, delays no other tenant, and is not compiled for a request that has left."""

from __future__ import annotations

import json
import queue
import random
import signal
import threading
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

import pytest

from paceline.engine.build import build_engine
from paceline.engine.job import Job
from paceline.request import FinishReason, Grammar, InvalidRequest, SamplingParams
from paceline.sampling import grammar_trials
from paceline.sampling.grammar import Compiling, Grammars
from paceline.sampling.grammar_source import MAX_OPTIONAL
from paceline.text.synthetic import synthetic_tokenizer


def optional(count: int, name: str = "p") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{name}{index}": {"type": "string"} for index in range(count)}}


def hostile(number: int) -> Grammar:
    """Below every limit on its text, and seconds of work for llguidance: its parts are merged into one object."""
    names = [[f"{number}{part}{index}" for index in range(1300)] for part in "abcdefgh"]
    return Grammar.json_schema(
        {"allOf": [{"properties": dict.fromkeys(some, True), "required": some} for some in names]}
    )


@pytest.fixture(scope="module")
def trials() -> Iterator[Grammars]:
    grammars = Grammars(synthetic_tokenizer(512), 512)
    grammars.try_before_compiling()
    yield grammars
    grammars.close()


class Held:
    """Grammars whose compilation waits for `go_on`, except those of `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grammars: Grammars, *free: Grammar) -> None:
        self.begun: list[Grammar] = []
        self.go_on, self._changed = threading.Event(), threading.Condition()
        compile_now = grammars._compile

        def compile_later(compiling: Compiling) -> Any:
            with self._changed:
                self.begun.append(compiling.grammar)
                self._changed.notify_all()
            assert compiling.grammar in free or self.go_on.wait(30)
            return compile_now(compiling)

        monkeypatch.setattr(grammars, "_compile", compile_later)

    def wait_begun(self, grammar: Grammar) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: grammar in self.begun, 30)


@pytest.mark.parametrize("count", [6, 16])
def test_schemas_of_one_tenant_delay_no_schema_of_another(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    grammars, small = Grammars(synthetic_tokenizer(512), 512), Grammar.json_schema(optional(1))
    held = Held(monkeypatch, grammars, small)
    waiting = [grammars.compile(Grammar.regex(f"a{index}"), "hostile") for index in range(count)]
    held.wait_begun(waiting[0].grammar)
    assert grammars.compile(small, "other").result(30)
    assert held.begun == [waiting[0].grammar, small]
    held.go_on.set()
    assert all(one.result(30) for one in waiting), "each in its turn"
    grammars.close()


def test_a_grammar_whose_requests_have_all_left_is_never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, last = Grammars(synthetic_tokenizer(512), 512), Grammar.regex("z")
    held = Held(monkeypatch, grammars, last)
    first = grammars.compile(Grammar.regex("a"))
    held.wait_begun(first.grammar)
    left, shared = Grammar.regex("b"), Grammar.regex("c")
    gone, kept = grammars.compile(left), [grammars.compile(shared), grammars.compile(shared)]
    grammars.abandon(gone)
    grammars.abandon(kept[0])
    ended = grammars.compile(last)
    held.go_on.set()
    assert ended.result(30) and kept[1].result(30)
    assert held.begun == [first.grammar, shared, last]
    assert grammars.compile(left).result(30), "it can be asked for again"
    grammars.close()


def test_a_grammar_that_two_tenants_wait_for_is_compiled_in_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, both = Grammars(synthetic_tokenizer(512), 512), Grammar.regex("b")
    held = Held(monkeypatch, grammars, both)
    first = grammars.compile(Grammar.regex("a"), "slow")
    held.wait_begun(first.grammar)
    assert grammars.compile(both, "slow") is grammars.compile(both, "other")
    assert grammars.compile(both, "other").result(30)
    held.go_on.set()
    assert first.result(30) and held.begun.count(both) == 1
    grammars.close()


def test_aborting_a_request_abandons_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(load="random", shape="tiny-qwen3", threads=1, kv_tokens=1024)
    held = Held(monkeypatch, engine.grammars)
    first = engine.grammars.compile(Grammar.regex("a"))
    held.wait_begun(first.grammar)
    ended = threading.Event()

    class Sink:
        def put(self, delta: Any) -> None:
            ended.set()

        def refuse(self, error: Exception) -> None: ...

    engine.abort(engine.submit(Job(engine.encode("x"), SamplingParams(grammar=Grammar.regex("b"))), Sink()))
    assert ended.wait(30)
    held.go_on.set()
    assert engine.grammars.compile(Grammar.regex("c")).result(30)
    assert Grammar.regex("b") not in held.begun
    engine.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"timeout_s": 0.2}, FinishReason.DEADLINE), ({"queue_timeout_s": 0.2}, FinishReason.QUEUE_TIMEOUT)],
)
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_deadline_ends_a_request_whose_grammar_waits(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, float], reason: FinishReason, is_busy: bool
) -> None:
    engine = build_engine(load="random", shape="tiny-qwen3", threads=1, kv_tokens=8192)
    held = Held(monkeypatch, engine.grammars)
    first = engine.grammars.compile(Grammar.regex("a"))
    held.wait_begun(first.grammar)
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Sink:
        def put(self, delta: Any) -> None:
            ends.put(delta)

        def refuse(self, error: Exception) -> None:
            ends.put(error)

    class Ignored(Sink):
        def put(self, delta: Any) -> None: ...

    if is_busy:
        other = engine.submit(Job(engine.encode("y"), SamplingParams(max_tokens=2000, ignore_eos=True)), Ignored())
    engine.submit(Job(engine.encode("x"), SamplingParams(grammar=Grammar.regex("b")), **fields), Sink())
    assert ends.get(timeout=30).finish_reason is reason
    if is_busy:
        engine.abort(other)
    held.go_on.set()
    assert engine.grammars.compile(Grammar.regex("c")).result(30)
    assert Grammar.regex("b") not in held.begun, "nobody waits for it"
    engine.close()


def test_too_many_optional_properties_are_refused_at_once(trials: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar has an object with 5,000 optional properties: give"):
        trials.compile(Grammar.json_schema(optional(5000))).result()
    schema = {**optional(MAX_OPTIONAL + 400), "required": [f"p{index}" for index in range(400)]}
    assert trials.compile(Grammar.json_schema(schema)).result()
    several = {"anyOf": [optional(MAX_OPTIONAL, name) for name in "abc"]}
    for grammar in (Grammar.json_schema(several), Grammar.lark(f"start: %json {json.dumps(several)}")):
        with pytest.raises(InvalidRequest, match=r"^grammar has 1,350 optional properties in all its objects: give"):
            trials.compile(grammar).result()


@pytest.mark.parametrize("kind", [{"type": "string"}, {"enum": [1, 2]}, {"type": "object"}, {"type": "integer"}])
def test_an_object_with_as_many_optional_properties_as_allowed_is_generated(
    trials: Grammars, kind: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {f"p{index}": kind for index in range(MAX_OPTIONAL)}}
    matcher = trials.compile(Grammar.json_schema(schema)).result().matcher.deep_copy()
    value = "{}" if kind == {"type": "object"} else '"a"' if kind == {"type": "string"} else "1"
    text = f'{{"p{MAX_OPTIONAL // 2}": {value}, "p{MAX_OPTIONAL - 1}": {value}}}'
    for token in synthetic_tokenizer(512).encode(text):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


def test_a_schema_with_slow_masks_is_refused(trials: Grammars) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices(ascii_lowercase, k=8)) for _ in range(1500)]
    alternatives = " | ".join(f"r{index}" for index in range(len(words)))
    rules = "\n".join(f'r{index}: /[a-z ]{{1,{index + 1}}}/ "{word}"' for index, word in enumerate(words))
    with pytest.raises(
        InvalidRequest, match=r"^grammar takes \d+\.\d ms of CPU time to find the tokens .*: give fewer"
    ):
        trials.compile(Grammar.lark(f"start: {alternatives}\n{rules}")).result()
    schema = {"anyOf": [optional(1, f"a{index}_") for index in range(MAX_OPTIONAL)]}
    with pytest.raises(
        InvalidRequest, match=r"it allows too much at one place \(4950 items .*at most 2000\): give fewer"
    ):
        trials.compile(Grammar.json_schema(schema)).result()


def test_a_grammar_beyond_its_cpu_time_is_refused_and_others_go_on(trials: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar takes more than 1 s of CPU time .*: simplify it\.$"):
        trials.compile(hostile(0)).result()
    assert trials.compile(Grammar.json_schema(optional(1))).result()


def test_a_trial_ends_when_its_last_request_leaves(trials: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    running = trials._trials
    assert running is not None
    began, ended, run = threading.Event(), threading.Event(), running.run

    def observed(text: Any, note: Any) -> str:
        try:
            return run(text, lambda connection: (note(connection), began.set()))
        finally:
            ended.set()

    monkeypatch.setattr(running, "run", observed)
    compiling = trials.compile(hostile(1))
    assert began.wait(30)
    trials.abandon(compiling)
    assert ended.wait(30) and compiling.cancelled()
    assert trials.compile(Grammar.regex("after")).result()


def test_errors_are_the_same_with_and_without_a_trial(trials: Grammars) -> None:
    direct = Grammars(synthetic_tokenizer(512), 512)
    for grammar in (
        Grammar.regex("("),
        Grammar.lark("start: missing"),
        Grammar.json_schema({"type": "colour"}),
        Grammar.json_schema("{"),
        Grammar.regex("((a{300}){300})"),
    ):
        messages = []
        for grammars in (direct, trials):
            with pytest.raises(InvalidRequest) as caught:
                grammars.compile(grammar).result()
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    direct.close()


def test_a_killed_process_is_replaced(trials: Grammars) -> None:
    running = trials._trials
    assert running is not None and running._process is not None
    running._process.send_signal(signal.SIGKILL)
    running._process.wait()
    assert trials.compile(Grammar.regex("replaced")).result()


def test_a_process_that_is_stopped_is_replaced(trials: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    running = trials._trials
    assert trials.compile(Grammar.regex("before")).result() and running is not None
    stopped = running._process
    assert stopped is not None
    stopped.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trials, "MAX_S", 0.2)
        with pytest.raises(InvalidRequest, match=r"not compiled within 0\.2 s: try again later"):
            trials.compile(Grammar.regex("stopped")).result()
    assert stopped.poll() == -signal.SIGKILL
    assert trials.compile(Grammar.regex("stopped")).result(), "in another process"


def test_the_process_ends_with_the_engine() -> None:
    grammars = Grammars(synthetic_tokenizer(512), 512)
    grammars.try_before_compiling()
    assert grammars._trials is not None and grammars._trials._process is not None
    process = grammars._trials._process
    grammars.close()
    assert process.poll() is not None
