"""Constrained outputs are valid however they are scheduled; invalid grammars are refused; no request delays another."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed
from paceline.llm import LLM, RequestOutput
from paceline.request import FinishReason, Grammar, InvalidRequest, Request, SamplingParams
from paceline.sampling.grammar import Compiling, Grammars
from paceline.sampling.grammar_source import num_repeats
from paceline.scheduler.plan import Updates
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.text.json_schema import closed
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import HERMES, LLAMA, MISTRAL, QWEN_XML
from paceline.text.tools import call_grammar

MAX_TOKENS = 120


def make(**options: Any) -> LLM:
    settings = {"kv_tokens": 32768, "max_running": 24, **options}
    return LLM.from_engine(build_engine(load="random", shape="tiny-qwen3", threads=1, **settings))


def schemas(count: int) -> list[dict[str, Any]]:
    """Bounded schemas with varied features, the same every time."""
    rng = random.Random(5)

    def scalar() -> dict[str, Any]:
        return rng.choice(
            [
                lambda: {"type": "string", "maxLength": rng.randint(0, 12)},
                lambda: {"type": "string", "minLength": 2, "maxLength": 5},
                lambda: {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(x|yz){2}$", "^[0-9]{3}-[A-F]$"])},
                lambda: {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
                lambda: {"enum": rng.sample(["red", "green", 1, 2.5, None, True, 'a"b', "ü"], 3)},
                lambda: {"const": rng.choice(["fixed", 42, None, False])},
                lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 99)},
                lambda: {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 2000, "multipleOf": 5},
                lambda: {"type": "number", "minimum": 0, "maximum": 1},
                lambda: {"type": "boolean"},
                lambda: {"type": "null"},
                lambda: {"type": ["boolean", "null"]},
            ]
        )()

    def any_of(depth: int) -> dict[str, Any]:
        return {"anyOf": [schema(depth - 1), schema(depth - 1)]}

    def array(depth: int) -> dict[str, Any]:
        least = rng.randint(0, 2)
        return {"type": "array", "items": schema(depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}

    def fixed_array(depth: int) -> dict[str, Any]:
        first = [schema(depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def object_of(depth: int) -> dict[str, Any]:
        names = rng.sample(["a", "name", "älter", "x-y", "deep key", "n"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: schema(depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }

    def schema(depth: int) -> dict[str, Any]:
        return scalar() if depth == 0 else rng.choice([any_of, array, fixed_array, object_of, object_of])(depth)

    found = []
    for index in range(count):
        one = schema(index % 3)
        if index % 10 == 9:
            one = {
                "$defs": {"part": scalar()},
                "type": "object",
                "required": ["p", "q"],
                "additionalProperties": False,
                "properties": {"p": {"$ref": "#/$defs/part"}, "q": one},
            }
        found.append(one)
    return found


SCHEMAS = schemas(80)


def follow(llm: LLM, count: int = len(SCHEMAS)) -> list[RequestOutput]:
    params = [
        SamplingParams(grammar=Grammar.json_schema(schema), max_tokens=MAX_TOKENS, seed=index, temperature=0.8)
        for index, schema in enumerate(SCHEMAS[:count])
    ]
    return llm.generate([f"number {index}" for index in range(count)], params)


@cache
def default_outputs() -> list[list[int]]:
    """The tokens of the first 15 schemas, with the default options."""
    with make() as llm:
        return [output.token_ids for output in follow(llm, 15)]


def is_prefix(grammars: Grammars, grammar: Grammar, tokens: list[int]) -> bool:
    matcher = grammars.compile(grammar).result().matcher.deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens)


def test_outputs_are_valid_for_eighty_schemas() -> None:
    with make() as llm:
        outputs = follow(llm)
        grammars = llm.engine.grammars
        ended = 0
        for schema, output in zip(SCHEMAS, outputs, strict=True):
            if output.finish_reason is FinishReason.STOP:
                ended += 1
                value = json.loads(output.text)
                jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker(["date", "ipv4"]))
            else:
                assert output.finish_reason is FinishReason.LENGTH
                assert is_prefix(grammars, Grammar.json_schema(schema), output.token_ids)
        assert ended > 60
        assert not llm.engine.grammars._matchers, "no matcher is left"


@pytest.mark.parametrize("options", [{"overlap": "sync"}, {"overlap": "off", "max_running": 3, "kv_tokens": 1024}])
def test_scheduling_does_not_change_constrained_outputs(options: dict[str, Any]) -> None:
    with make(**options) as llm:
        assert [output.token_ids for output in follow(llm, 15)] == default_outputs()


def test_retracted_requests_continue_with_their_grammar() -> None:
    with make() as llm:
        scheduler = llm.engine.scheduler
        plan, count = scheduler.plan, iter(range(10**6))

        def planning(now: float) -> Any:
            running = scheduler.running.requests
            if next(count) % 3 == 0 and running and running[0].retractions < 2:
                scheduler.retract(running[0].id, now, "a test")
            return plan(now) or plan(now)

        scheduler.plan = planning  # type: ignore[method-assign]
        assert [output.token_ids for output in follow(llm, 15)] == default_outputs()
        assert scheduler.counters.retractions > 15


@pytest.fixture(scope="module")
def llm() -> Any:
    with make() as made:
        yield made


def outputs_of(llm: LLM, grammar: Grammar, count: int = 8, **options: Any) -> list[RequestOutput]:
    return llm.generate(
        ["hello"] * count, [SamplingParams(grammar=grammar, seed=seed, **options) for seed in range(count)]
    )


def test_regex_choice_lark_grammar_and_json_object(llm: LLM) -> None:
    for output in outputs_of(llm, Grammar.regex(r"(\d{2}:){2}\d{2}( [ap]m)?")):
        assert re.fullmatch(r"(\d{2}:){2}\d{2}( [ap]m)?", output.text) and output.finish_reason is FinishReason.STOP
    assert {output.text for output in outputs_of(llm, Grammar.choice(["yes", "no", 'per"haps']))} <= {
        "yes",
        "no",
        'per"haps',
    }
    for output in outputs_of(llm, Grammar.lark('start: pair{1,3}\npair: "(" NUMBER ")"\nNUMBER: /[0-9]{1,3}/')):
        assert re.fullmatch(r"(\(\d{1,3}\)){1,3}", output.text)
    for output in outputs_of(llm, Grammar.json_object(), max_tokens=30):
        assert output.text.lstrip().startswith("{")


def test_unconstrained_rows_in_the_same_batch_are_unchanged(llm: LLM) -> None:
    free = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    alone = llm.generate("hello", free)[0].token_ids
    params = [free, SamplingParams(grammar=Grammar.regex("[a-f]{20}"), seed=1)]
    together = llm.generate(["hello", "world"], params)
    assert together[0].token_ids == alone
    assert re.fullmatch("[a-f]{20}", together[1].text)


def test_a_stop_string_ends_a_constrained_output(llm: LLM) -> None:
    schema = Grammar.json_schema({"type": "string", "minLength": 30, "maxLength": 40, "pattern": "^[ab]*$"})
    for output in outputs_of(llm, schema, stop=("aba", "bab")):
        assert output.finish_reason is FinishReason.STOP
        assert "aba" not in output.text and "bab" not in output.text and len(output.text) < 40
        assert output.text.startswith('"')


def test_logits_can_be_adjusted_together_with_a_grammar(llm: LLM) -> None:
    """Also if the grammar allows only banned tokens."""
    only = llm.tokenizer.encode("a")[0]
    for output in outputs_of(
        llm,
        Grammar.regex("a{5}"),
        logit_bias={only: -100},
        bad_words=("a",),
        min_tokens=30,
        frequency_penalty=2.0,
        max_tokens=50,
    ):
        assert output.text == "aaaaa"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("("),
        Grammar.regex("((a{300}){300})"),
        Grammar.lark("start: missing"),
        Grammar.lark("no grammar"),
        Grammar.json_schema("{"),
        Grammar.json_schema('"text"'),
        Grammar.json_schema({"type": "colour"}),
        Grammar("json_schema", "[" * 100_000),
    ],
    ids=str,
)
def test_invalid_grammar_is_refused(llm: LLM, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar "):
        llm.generate("hello", SamplingParams(grammar=grammar, max_tokens=3))
    assert llm.generate("hello", SamplingParams(max_tokens=3))[0].token_ids


class Sink:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.last: Any = None

    def put(self, piece: Any) -> None:
        self.last = piece
        if piece.finish_reason is not None:
            self.ended.set()

    def refuse(self, error: Exception) -> None:
        self.last = error
        self.ended.set()


def test_a_request_that_waits_for_its_grammar_delays_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine
    grammar = Grammar.choice(["left", "right"])
    compiled, later = engine.grammars.compile(grammar).result(), Compiling(grammar)
    later.num_waiting = 2
    monkeypatch.setattr(engine.grammars, "compile", lambda grammar, tenant: later)
    waiting, gone, free = Sink(), Sink(), Sink()
    params = SamplingParams(grammar=Grammar.choice(["left", "right"]), seed=1)
    engine.submit(Job(engine.encode("one"), params), waiting)
    aborted = engine.submit(Job(engine.encode("two"), params), gone)
    engine.submit(Job(engine.encode("three"), SamplingParams(max_tokens=4, ignore_eos=True)), free)
    assert free.ended.wait(30) and free.last.finish_reason is FinishReason.LENGTH
    engine.abort(aborted)
    assert gone.ended.wait(30) and gone.last.finish_reason is FinishReason.ABORT
    assert not waiting.ended.is_set()
    later.set_result(compiled)
    assert waiting.ended.wait(30) and waiting.last.finish_reason is FinishReason.STOP


def test_a_grammar_that_fails_after_submission_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    later = Compiling(Grammar.regex("a"))
    monkeypatch.setattr(llm.engine.grammars, "compile", lambda grammar, tenant: later)
    sink = Sink()
    llm.engine.submit(Job(llm.engine.encode("one"), SamplingParams(grammar=Grammar.regex("a"))), sink)
    later.set_exception(InvalidRequest("grammar is no good."))
    assert sink.ended.wait(30) and isinstance(sink.last, InvalidRequest)


def test_closing_the_engine_ends_requests_that_wait_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    with make() as llm:
        monkeypatch.setattr(llm.engine.grammars, "compile", lambda grammar, tenant: Compiling(grammar))
        llm.engine.submit(Job(llm.engine.encode("one"), SamplingParams(grammar=Grammar.regex("a"))), sink)
    assert sink.ended.is_set() and sink.last.finish_reason is FinishReason.ABORT


class BlockedMasks:
    """Blocks the third computation of masks until `go_on` is set."""

    def __init__(self, engine: Engine) -> None:
        self.go_on, self.count = threading.Event(), 0
        self._fill, engine.grammars._fill = engine.grammars._fill, self.fill  # type: ignore[method-assign]

    def fill(self, matchers: Any, bits: Any) -> None:
        if threading.current_thread().name == "paceline-masks":
            self.count += 1
            assert self.count != 3 or self.go_on.wait(30)
        self._fill(matchers, bits)


class CallingSink(Sink):
    """Calls back with its third token: on the engine's thread, after the third masks were started."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call
        self.tokens: list[int] = []

    def put(self, piece: Any) -> None:
        self.tokens += piece.token_ids
        if piece.token_ids and len(self.tokens) == 3:
            self.call()
        super().put(piece)


LETTERS = SamplingParams(grammar=Grammar.regex("[a-f]{20}"), seed=1)


def test_aborting_a_request_while_its_masks_are_computed_changes_no_other() -> None:
    with make() as llm:
        engine = llm.engine
        expected = llm.generate("hello", LETTERS)[0].token_ids
        held, gone = BlockedMasks(engine), Sink()
        detach, ended = engine.grammars.detach, []

        def detaching(request: Any) -> None:
            detach(request)
            ended.append(held.count)
            held.go_on.set()

        def abort() -> None:
            engine.abort(next(key for key, live in engine._outputs.active.items() if live.sink is gone))

        engine._outputs._on_finished = detaching
        stays = CallingSink(abort)
        engine.submit_all([Job(engine.encode(text), LETTERS) for text in ("hello", "world")], [stays, gone])
        assert gone.ended.wait(30) and gone.last.finish_reason is FinishReason.ABORT
        assert stays.ended.wait(30) and stays.last.finish_reason is FinishReason.STOP
        assert stays.tokens == expected
        assert ended[0] == 3, "it was detached while the third masks were computed"
        assert not engine.grammars._matchers


def test_closing_the_engine_waits_for_masks() -> None:
    engine = make().engine
    held, closer = BlockedMasks(engine), threading.Thread(target=engine.close)

    def close() -> None:
        closer.start()
        while not engine._closing:
            time.sleep(0.001)

    sink = CallingSink(close)
    engine.submit(Job(engine.encode("hello"), LETTERS), sink)
    assert sink.ended.wait(30) and sink.last.finish_reason is FinishReason.ABORT
    closer.join(0.05)
    executor: Any = engine.executor
    assert closer.is_alive() and not executor._closed, "masks are written to the executor's memory"
    held.go_on.set()
    closer.join(30)
    assert not closer.is_alive() and executor._closed
    assert engine.failure is None and not engine.grammars._workers


def test_failing_masks_end_all_requests_with_an_error() -> None:
    with make() as llm:
        engine, sink = llm.engine, Sink()
        fill = engine.grammars._fill

        def breaking(matchers: Any, bits: Any) -> None:
            if threading.current_thread().name == "paceline-masks":
                raise MemoryError("no memory for masks")
            fill(matchers, bits)

        engine.grammars._fill = breaking  # type: ignore[method-assign]
        engine.submit(Job(engine.encode("hello"), LETTERS), sink)
        assert sink.ended.wait(30) and sink.last.finish_reason is FinishReason.ERROR
        assert sink.last.error == "MemoryError: no memory for masks"
        with pytest.raises(EngineFailed, match="no memory for masks"):
            engine.submit(Job(engine.encode("hello"), LETTERS), Sink())


def test_started_masks_equal_masks_computed_directly() -> None:
    grammars = Grammars(synthetic_tokenizer(4096), 4096)
    requests = [TrackedRequest(Request(str(index), np.arange(3), SamplingParams())) for index in range(20)]
    for request, schema in zip(requests, SCHEMAS, strict=False):
        if request is not requests[3]:
            grammars.attach(request, grammars.compile(Grammar.json_schema(schema)).result())
    sampled = requests[:5] + requests[6:]

    def buffer(rows: int, words: int) -> Any:
        return np.zeros((rows, words), np.int32)

    expected = grammars.masks(sampled, buffer)
    grammars.start_masks(sampled, buffer)
    for request in requests[:10]:
        grammars.detach(request)
    found = grammars.wait_masks()
    assert np.array_equal(found.rows, expected.rows) and len(found.rows) == 18
    assert np.array_equal(found.bits, expected.bits) and found.bits.any(axis=1).all()
    grammars.start_masks(sampled, buffer)
    assert len(grammars.wait_masks().rows) == 10
    grammars.close()


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("abc", 1),
        ("a{3}", 3),
        ("(a{3}b){4}", 12),
        ("((a{2}){3}|b{50}){2}", 100),
        (r"\(a{3}\){2}", 3),
        ("[({]{7}", 7),
        ("a{2,9}", 9),
        ("a{4,}", 4),
        ("(a)(b{5})c{2}", 5),
        ("a)b{3}", 3),
    ],
)
def test_repetitions_of_a_pattern_are_counted(pattern: str, count: int) -> None:
    assert num_repeats(pattern) == count


def masks_along(grammars: Grammars, grammar: Grammar, count: int) -> list[np.ndarray]:
    """The masks along an output of random allowed tokens."""
    rng, matcher, masks = random.Random(3), grammars.compile(grammar).result().matcher.deep_copy(), []
    while len(masks) < count and not matcher.is_stopped():
        masks.append(np.frombuffer(matcher.compute_bitmask(), np.uint8))
        assert matcher.consume_token(rng.choice(np.flatnonzero(np.unpackbits(masks[-1], bitorder="little"))))
    return masks


def test_token_classes_do_not_change_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = synthetic_tokenizer(4096)
    ours, plain = Grammars(tokenizer, 4096), Grammars(tokenizer, 4096)
    found = [
        Grammar.json_schema({"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9}),
        Grammar.regex(r"([a-z]{2,7} ){20}"),
        *(Grammar.json_schema(schema) for schema in SCHEMAS[:40]),
    ]
    expected = [masks_along(ours, grammar, 40) for grammar in found]
    monkeypatch.setattr("paceline.sampling.grammar._SLICES", [])
    for grammar, masks in zip(found, expected, strict=True):
        assert np.array_equal(masks_along(plain, grammar, 40), masks)


def sentence_piece_tokenizer() -> Tokenizer:
    """Like SentencePiece: a space before every text, and bytes for characters that are in no piece."""
    tokens = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *'▁abcdefghijklmnopqrstuvwxyz{}":,',
        "na",
        "me",
        "name",
        "▁na",
    ]
    merges = [("n", "a"), ("m", "e"), ("na", "me"), ("▁", "na")]
    core = tokenizers.Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, merges, byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(core, eos_ids=(1,), bos_id=0)


@pytest.mark.parametrize(
    "make_tokenizer", [lambda: synthetic_tokenizer(4096), sentence_piece_tokenizer], ids=["bytes", "pieces"]
)
@pytest.mark.parametrize("padding", [0, 100])
def test_allowed_tokens_are_accepted_if_the_model_has_more_ids_than_its_tokenizer(
    make_tokenizer: Callable[[], Tokenizer], padding: int
) -> None:
    tokenizer = make_tokenizer()
    grammars = Grammars(tokenizer, tokenizer.vocab_size + padding)
    schema = {"type": "object", "required": ["name"], "properties": {"name": {"const": "ü na"}}}
    for grammar, expected in (
        (Grammar.lark('start: "\\"name name\\""'), "name name"),
        (Grammar.json_schema({**schema, "additionalProperties": False}), {"name": "ü na"}),
    ):
        request = TrackedRequest(Request("a", np.arange(3), SamplingParams()))
        grammars.attach(request, grammars.compile(grammar).result())
        generated: list[int] = []
        while not (tokenizer.eos_ids & set(generated)):
            mask = grammars.masks([request], lambda rows, words: np.zeros((rows, words), np.int32)).bits[0]
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert len(allowed) and allowed[-1] < tokenizer.vocab_size
            generated.append(int(allowed[0]))
            assert not grammars.advance(Updates((request,), np.array(generated[-1:], np.int32), (), frozenset()))
        assert json.loads(tokenizer.bytes_of(generated, tokenizer.special_ids)) == expected
    grammars.close()


def test_llguidance_tokenizes_as_we_do() -> None:
    tokenizer = synthetic_tokenizer(4096)
    grammars = Grammars(tokenizer, 4096)
    grammars.compile(Grammar.regex("a")).result()
    theirs = grammars._ll_tokenizer
    for text in ("first name", ' {"a": [1, 2.5]}\n', "älter, größer", "x" * 300):
        assert theirs.tokenize_str(text) == tokenizer.encode(text, add_special=False)
    for index in set(range(4096)) - tokenizer.special_ids:
        # The byte 255 is in no text; llguidance begins special tokens with it.
        assert theirs.decode_bytes([index]) == tokenizer.token_bytes(index).removeprefix(b"\xff")


def test_set_up_is_used_by_the_first_grammar() -> None:
    grammars = Grammars(synthetic_tokenizer(512), 512)
    grammars.set_up()
    ahead = grammars._ll_tokenizer
    grammars.compile(Grammar.regex("a")).result()
    assert ahead is not None and grammars._ll_tokenizer is ahead
    grammars.close()


def test_a_tokenizer_that_llguidance_does_not_support_is_refused() -> None:
    core = tokenizers.Tokenizer(models.BPE({"</s>": 0, "▁": 1, "a": 2}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    grammars = Grammars(Tokenizer(core, eos_ids=(0,)), 3)
    for ask in (grammars.set_up, lambda: grammars.compile(Grammar.regex("a")).result()):
        with pytest.raises(InvalidRequest, match=r"cannot use this model's tokenizer .*Metaspace.*: leave it out\."):
            ask()


def accepts(grammars: Grammars, grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole output."""
    tokens = grammars._tokenizer.encode(text, add_special=False)
    matcher = grammars.compile(grammar).result().matcher.deep_copy()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("added", ["none", "tokens", "special tokens"])
@pytest.mark.parametrize(
    ("grammar", "valid"),
    [
        (Grammar.json_schema({"type": "integer"}), "12"),
        (Grammar.json_object(), '{"a": 1}'),
        (Grammar.regex("[0-9]{2}"), "12"),
        (Grammar.choice(["12", "13"]), "12"),
        (Grammar.lark('start: "1" "2"'), "12"),
    ],
)
def test_a_grammar_begins_after_the_reasoning(grammar: Grammar, valid: str, added: str) -> None:
    core = synthetic_tokenizer(600)._core
    if added != "none":
        special = added == "special tokens"
        core.add_tokens([tokenizers.AddedToken(one, special=special, normalized=False) for one in ("<t>", "</t>")])
    grammars = Grammars(Tokenizer(core, eos_ids=(2,)), core.get_vocab_size())
    opened, offered = (
        Grammar(grammar.kind, grammar.source, reasoning) for reasoning in (("", "</t>"), ("<t>", "</t>"))
    )
    reasoning = 'a "quote", a < b </ c,\n{"wrong": 1}.'
    for blanks in ("", "\n", "\n\n"):
        assert accepts(grammars, opened, f"{reasoning}</t>{blanks}{valid}")
        assert accepts(grammars, offered, f"<t>{reasoning}</t>{blanks}{valid}")
    assert accepts(grammars, offered, valid)
    for text in (f"{reasoning}</t>", f"{reasoning}</t>x", f"{reasoning}</t>x</t>{valid}", valid, ""):
        assert not accepts(grammars, opened, text)
    for text in (reasoning, f"{reasoning}</t>{valid}", f"<t>{reasoning}</t>x", "<t>"):
        assert not accepts(grammars, offered, text)
    grammars.close()


def test_a_model_reasons_and_then_follows_its_grammar(llm: LLM) -> None:
    """The random model closes its reasoning because the bias makes it."""
    closing = llm.tokenizer.encode("z")[0]
    grammar = Grammar("regex", "[0-9]{3}", ("", "z"))
    for output in outputs_of(llm, grammar, max_tokens=200, logit_bias={closing: 8}):
        assert output.finish_reason is FinishReason.STOP
        assert re.fullmatch(r"[^z]*z\s{0,4}[0-9]{3}", output.text), output.text


@pytest.fixture(scope="module")
def grammars() -> Any:
    made = Grammars(synthetic_tokenizer(600), 600)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"\d", "07", "\u0663x"),  # an Arabic digit
        (r"\D", "x\u0663", "3"),
        (r"\w", "aZ_9", "\u00e9-"),
        (r"\W", "\u00e9-", "a_9"),
        (r"[\d]", "3", "\u0663"),
        (r"[^\d]", "x\u0663", "3"),
        (r"[\w-]", "a-", "\u00e9"),
        (r"[-\w.]", "a-.", "\u00e9"),
        (r"[\d\-x]", "3-x", "\u0663y"),
        (r"[\D]", "x\u0663", "3"),
        (r"[x\W]", "x-\u00e9", "y"),
        (r"\\d", (r"\d",), r"\3"),
        (r"\s", " \n\t", "x"),
    ],
)
def test_character_classes_are_ascii(grammars: Grammars, pattern: str, accepted: Any, refused: str) -> None:
    """In a regular expression as in the pattern of a schema."""
    for text in accepted:
        assert accepts(grammars, Grammar.regex(pattern), text), text
        schema = Grammar.json_schema({"type": "string", "pattern": f"^{pattern}$"})
        assert accepts(grammars, schema, json.dumps(text, ensure_ascii=False)), text
    for text in (refused,) if isinstance(accepted, tuple) else refused:
        assert not accepts(grammars, Grammar.regex(pattern), text), text
        schema = Grammar.json_schema({"type": "string", "pattern": f"^{pattern}$"})
        assert not accepts(grammars, schema, json.dumps(text, ensure_ascii=False)), text


def test_digits_of_a_regex_are_ascii_in_outputs(llm: LLM) -> None:
    for output in outputs_of(llm, Grammar.regex(r"\d{3}-\w{4}")):
        assert re.fullmatch(r"\d{3}-\w{4}", output.text, re.ASCII)


def longest_blanks(grammars: Grammars, grammar: Grammar, prefix: str) -> int:
    """How many spaces can follow `prefix`, up to 100."""
    matcher = grammars.compile(grammar).result().matcher.deep_copy()
    space = grammars._tokenizer.encode(" ", add_special=False)
    assert matcher.consume_tokens(grammars._tokenizer.encode(prefix, add_special=False))
    return sum(matcher.try_consume_tokens(space) for _ in range(100))


def test_whitespace_is_bounded(grammars: Grammars) -> None:
    """Between the parts of a JSON value, also in the arguments of forced calls; none before and after it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert longest_blanks(grammars, Grammar.json_schema(schema), '{"a":') == 20
    assert longest_blanks(grammars, Grammar.json_object(), "{") == 20
    for prefix in ("", '{"a": 1}'):
        assert longest_blanks(grammars, Grammar.json_schema({**schema, "additionalProperties": False}), prefix) == 0
    for style, head in (
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {'),
        (LLAMA, '{"name": "f", "parameters": {'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {'),
        (QWEN_XML, "<tool_call>\n<function=f>\n<parameter=a>\n"),
    ):
        assert longest_blanks(grammars, call_grammar([tool], style, several=True), head) == 20 * (style != QWEN_XML)
    for own, count in (({"whitespace_flexible": False}, 0), ({"whitespace_pattern": " {1,3}"}, 3), ({}, 20)):
        assert longest_blanks(grammars, Grammar.json_schema({**schema, "x-guidance": own}), '{"a":') == count


def test_strict_objects_end_after_their_properties(llm: LLM, grammars: Grammars) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "inner": {"$ref": "#/$defs/inner"}},
        "required": ["a", "inner"],
        "$defs": {"inner": {"anyOf": [inner, {"type": "null"}]}},
    }
    strict = Grammar.json_schema(closed(schema, "schema"))
    for output in outputs_of(llm, strict, max_tokens=200):
        assert output.finish_reason is FinishReason.STOP
        value = json.loads(output.text)
        assert set(value) == {"a", "inner"} and (value["inner"] is None or set(value["inner"]) == {"b"})
    for grammar, is_open in ((Grammar.json_schema(schema), True), (strict, False)):
        assert accepts(grammars, grammar, '{"a": 1, "inner": {"b": true, "c": 1}, "d": 1}') is is_open
