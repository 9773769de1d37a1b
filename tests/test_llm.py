"""The Python API with the default model."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from paceline import LLM, RequestOutput, SamplingParams, progress
from paceline.config import ConfigError
from paceline.engine.engine import Engine
from paceline.engine.output import Timings
from paceline.llm import Choice
from paceline.model.fetch import fetch_default
from paceline.model.gguf import gguf_spec, gguf_tensors
from paceline.model.gguf_file import open_gguf
from paceline.request import FinishReason, Grammar, InvalidRequest, Refused
from paceline.scheduler import EventKind
from tests.server.scripted import tokenizer_with

KNOWN = [7042, 30, 198, 198, 504, 2988, 314, 42]  # the greedy continuation of "The capital of France is"
GREEDY_8 = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Liberté, égalité,", "你好，世界", "🙂🙃", "A",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "The quick brown fox jumps over the lazy dog. " * 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(threads=1, kv_tokens=8192) as made:
        yield made


def test_greedy_decoding_gives_the_known_continuation(llm: LLM) -> None:
    output = llm.generate([[504, 3575, 282, 4649, 314]], GREEDY_8)[0]
    assert output.token_ids == KNOWN
    assert output.text == " Paris.\n\nThe answer is:"
    assert (output.finish_reason, output.prompt_token_ids) == (FinishReason.LENGTH, [504, 3575, 282, 4649, 314])
    assert isinstance(output, RequestOutput)


def test_an_embedding_is_a_unit_vector_that_depends_on_the_text_alone(llm: LLM) -> None:
    for pooling in ("mean", "last"):
        france, water = llm.embed(TEXTS[:2], pooling)
        assert france.dtype == np.float32 and abs(float(france @ france) - 1) < 1e-5 and float(france @ water) < 0.99
        (alone,) = llm.embed([504, 3575, 282, 4649, 314], pooling)
        assert np.allclose(alone, france, atol=1e-4)
    with pytest.raises(InvalidRequest, match="pooling is 'max': choose one of mean, last"):
        llm.embed("a", "max")


def test_chat_applies_the_template_and_stops_at_eos(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    one = llm.chat(question, params)
    assert "Paris" in one[0].text
    assert one[0].finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in one[0].text
    two = llm.chat([question, [{"role": "user", "content": "Name a colour."}]], params)
    assert two[0].text == one[0].text
    assert len(two) == 2
    assert two[0].num_cached_tokens > 0


def test_mixed_prompts_equal_transformers(llm: LLM) -> None:
    import transformers

    # transformers takes most of a minute to read a GGUF file. It gets the weights as we read them, which a slow test
    # compares with its own reading.
    file = open_gguf(fetch_default())
    spec = gguf_spec(file)
    mixer, rope = spec.layers[0].mixer, spec.rotations[0].rope
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.layers[0].ffn.size,
        num_hidden_layers=spec.num_layers, num_attention_heads=mixer.num_heads, num_key_value_heads=mixer.num_kv_heads,
        rms_norm_eps=spec.rms_eps, rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=spec.tied, max_position_embeddings=spec.context_tokens,
    )  # fmt: skip
    with torch.device("meta"):  # no random weights
        theirs = transformers.LlamaForCausalLM(config)
    weights = {name: stored.read(()).float() for name, stored in gguf_tensors(file).items()}
    assert theirs.load_state_dict(weights, strict=False, assign=True).missing_keys == ["lm_head.weight"]
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)  # its frequencies are no weights
    outputs = llm.generate(TEXTS, GREEDY_8)
    for text, output in zip(TEXTS, outputs, strict=True):
        # One forward pass over prompt and output: they are the greedy tokens if each is the argmax at its position.
        prompt = llm.tokenizer.encode(text)
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + output.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert output.token_ids == logits.argmax(dim=-1).tolist(), text


@pytest.mark.parametrize("bad", ["", [], [1] * 9000, [49_152], ["a"]])
def test_an_invalid_prompt_raises_and_the_next_call_works(llm: LLM, bad: Any) -> None:
    with pytest.raises((InvalidRequest, Refused)):
        llm.generate(["fine", bad], GREEDY_8)
    assert llm.generate("The capital of France is", GREEDY_8)[0].token_ids == KNOWN


PROMPTS = "give a string, a list of token ids, or a list of either."
FLAT = "give a string or a flat list of token ids (integers)."


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None), f"prompts is None: {PROMPTS}"),
        (lambda llm: llm.generate({"prompt": "a"}), f"prompts is {{'prompt': 'a'}}: {PROMPTS}"),
        (lambda llm: llm.generate(5), f"prompts is 5: {PROMPTS}"),
        (lambda llm: llm.generate(b"abc"), f"prompts is b'abc': {PROMPTS}"),
        (lambda llm: llm.generate({1, 2}), f"prompts is {{1, 2}}: {PROMPTS}"),
        (lambda llm: llm.generate(one for one in "a"), f": {PROMPTS}"),
        (lambda llm: llm.generate(["a", None]), f"prompts[1]: the prompt is None: {FLAT}"),
        (lambda llm: llm.generate(["a", b"b"]), f"prompts[1]: the prompt is b'b': {FLAT}"),
        (lambda llm: llm.generate([["a"]]), f"prompts[0]: the prompt is ['a']: {FLAT}"),
        (lambda llm: llm.generate([[[1], [2, 3]]]), f"prompts[0]: the prompt is [[1], [2, 3]]: {FLAT}"),
        (lambda llm: llm.generate([1, "a"]), f"prompts[0]: the prompt is [1, 'a']: {FLAT}"),
        (lambda llm: llm.generate([[True]]), f"prompts[0]: the prompt is [True]: {FLAT}"),
        (lambda llm: llm.generate([{"prompt": "a"}]), f"prompts[0]: the prompt is {{'prompt': 'a'}}: {FLAT}"),
        (lambda llm: llm.generate([[]]), "prompts[0]: the prompt is empty: give at least one token."),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "params is {'max_tokens': 3}: give SamplingParams"),
        (lambda llm: llm.generate("a", 5), "params is 5: give SamplingParams, or a list with one for each prompt."),
        (lambda llm: llm.generate(["a", "b"], [GREEDY_8, None]), "params[1] is None: give SamplingParams."),
        (lambda llm: llm.generate(["a", "b"], [GREEDY_8]), "params has 1 entries for 2 prompts"),
        (lambda llm: llm.embed(None), f"prompts is None: {PROMPTS}"),
        (lambda llm: llm.embed("a", None), "pooling is None: choose one of mean, last."),
        (lambda llm: llm.chat("hi"), "messages is 'hi': give a list of messages, or a list of such lists."),
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "give a list of messages, or a list of such lists."),
        (lambda llm: llm.chat([]), "messages is []: give a list of at least one message."),
        (lambda llm: llm.chat(["hi"]), "messages[0] is 'hi': give an object with role and content."),
        (lambda llm: llm.chat([[{"role": "user", "content": "x"}], None]), "conversation 1: messages is None: give a"),
        (lambda llm: llm.update_weights(None), "path is None: give a folder or a .gguf file."),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_runs(virtual: LLM, call: Any, message: str) -> None:
    before = virtual.engine.scheduler.counters.added
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        call(virtual)
    assert virtual.engine.scheduler.counters.added == before


def test_the_engine_expects_requests_before_they_are_prepared(virtual: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    encode = virtual.engine.encode
    monkeypatch.setattr(virtual.engine, "expect_requests", lambda: events.append("expect"))
    monkeypatch.setattr(virtual.engine, "encode", lambda prompt: (events.append("encode"), encode(prompt))[1])
    virtual.generate(["a", "b"], GREEDY_8)
    virtual.embed("a")
    assert events == ["expect", "encode", "encode", "expect", "encode"]


def test_params_are_shared_or_one_per_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 3)]
    assert [len(output.token_ids) for output in llm.generate(["a", "b"], each)] == [1, 3]
    with pytest.raises(InvalidRequest, match="params has 2 entries for 3 prompts: give one, or one per prompt"):
        llm.generate(["a", "b", "c"], each)
    assert llm.generate([], GREEDY_8) == []


def test_invalid_messages_raise(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role is 'wizard'"):
        llm.chat([{"role": "wizard", "content": "hi"}])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def virtual() -> Iterator[LLM]:
    with LLM(executor="virtual", context_tokens=2048) as made:
        yield made


def test_an_output_without_max_tokens_has_256_tokens_or_what_fits(virtual: LLM) -> None:
    endless = SamplingParams(ignore_eos=True)
    prompts = [[5] * 10, [6] * 2000]
    assert [len(output.token_ids) for output in virtual.generate(prompts, endless)] == [256, 48]
    for params, expected in ((SamplingParams(ignore_eos=True, min_tokens=300), 300), (replace(endless, n=2), 256)):
        output = virtual.generate(prompts[:1], params)[0]
        assert {len(choice.token_ids) for choice in output.choices} == {expected}
        assert output.choices[0].clipped_max_tokens is None
    assert endless.max_tokens is None, "the caller's object is unchanged"
    with pytest.raises(Refused, match="the prompt has 2048 tokens, which leaves none for output"):
        virtual.generate([[5] * 2048])


def test_a_terminal_shows_requests_and_tokens_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], virtual: LLM
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.001)
    prompts, params = [[5] * 30, [6] * 40], SamplingParams(max_tokens=50, ignore_eos=True)
    virtual.generate(prompts, params)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    virtual.generate(prompts, params, progress=False)
    assert terminal.getvalue() == ""

    class Resuming(Terminal):  # the engine is paused until the first line is shown
        def flush(self) -> None:
            virtual.engine.resume()

    virtual.engine.pause().result()
    monkeypatch.setattr(sys, "stderr", terminal := Resuming())
    virtual.generate(prompts, params)
    first, *_, last = terminal.getvalue().removeprefix("\r").split("\r")
    assert re.fullmatch(r"0/2 requests, \d+ s", first)
    assert re.fullmatch(r"2/2 requests, \d+ s, prompt 70 tokens \([\d,]+/s\), output 100 tokens \([\d,]+/s\) *\n", last)
    monkeypatch.setattr(sys, "stderr", None)  # a program without a console
    virtual.generate(prompts, params)


def test_the_line_ends_without_a_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.ProgressLine(1, lambda: None) as line:
        assert line.interval_s is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    samples = iter([progress.CallProgress(1, 2, 3), None])
    with progress.ProgressLine(2, lambda: next(samples)) as line:
        line.update()
        with progress.ProgressLine(2, lambda: None) as second:
            assert second.interval_s is None, "one line at a time"
    assert terminal.getvalue().startswith("\r1/2 requests") and terminal.getvalue().endswith("\n")


def test_an_unknown_option_is_reported_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean page_size"):
        LLM(load="random", shape="tiny-llama", pagesize=3)


def test_the_longest_requests_are_added_first_and_outputs_keep_their_order(llm: LLM) -> None:
    llm.engine.scheduler.journal.events.clear()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3, 5)]
    outputs = llm.generate(["a", "b", "c", "d"], params)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 3, 5]
    added = [event for event in llm.engine.scheduler.journal.events if event.kind is EventKind.ADD]
    assert [event.detail[1] for event in added] == [5, 5, 3, 1]


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_chat_separates_reasoning_from_the_answer(special: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>{% endif %}"
    tokenizer = tokenizer_with(template + "{# </think> #}", special)
    llm = LLM.from_engine(cast("Engine", SimpleNamespace(tokenizer=tokenizer)))
    texts, given = ["<think>Two and two.</think>\n\nFour.", "No marker.", "<think>Cut off"], []

    def generate(prompts: Any, params: Any, progress: bool, lora: str = "") -> list[RequestOutput]:
        given.extend(params if isinstance(params, list) else [params])
        timings = Timings(0.0, 0.0, 0.0, 0)
        choices = [Choice(text, [5], FinishReason.STOP, timings) for text in texts]
        return [RequestOutput(prompt, choices, 0) for prompt in prompts]

    monkeypatch.setattr(llm, "generate", generate)
    message, regex = {"role": "user", "content": "2 + 2?"}, SamplingParams(grammar=Grammar.regex("[0-9]"))
    (output,) = llm.chat([message], regex)
    assert [(choice.reasoning_content, choice.text) for choice in output.choices] == [
        ("Two and two.", "Four."),
        ("", "No marker."),
        ("Cut off", ""),
    ]
    assert (output.reasoning_content, output.text) == ("Two and two.", "Four.")
    assert given[-1].skip_special_tokens == (not special), "the parser needs the markers"
    assert given[-1].grammar == Grammar("regex", "[0-9]", ("<think>", "</think>"))
    opened = llm.chat([[message], [message]], [regex, SamplingParams()], thinking=True)  # by the prompt
    assert [one.choices[1].reasoning_content for one in opened] == ["No marker."] * 2
    assert given[-2].grammar == Grammar("regex", "[0-9]", ("", "</think>")) and given[-1].grammar is None
    (whole,) = llm.chat([message], regex, separate_reasoning=False)
    assert [choice.text for choice in whole.choices] == texts and whole.reasoning_content == ""
    assert given[-1] is regex
