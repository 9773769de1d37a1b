"""OpenAI's client with structured outputs, tools, choices, logprobs, seeds and stop strings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.helpers import Logprob
from tests.server.process import serving

MODEL = "random-tiny-qwen3"
HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        serving("--load", "random", "--shape", "tiny-qwen3", "--served-name", MODEL, "--kv-tokens", "16384") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        yield client


class Pet(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)


def test_a_pydantic_response_format_is_parsed(client: OpenAI) -> None:
    for seed in range(5):
        reply = client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Pet, seed=seed, max_tokens=300
        )
        pet = reply.choices[0].message.parsed
        assert isinstance(pet, Pet) and reply.choices[0].finish_reason == "stop"


def test_a_streamed_pydantic_response_format_is_parsed(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Pet, seed=1, max_tokens=300
    ) as stream:
        reply = stream.get_final_completion()
    assert isinstance(reply.choices[0].message.parsed, Pet)


def test_json_object_regex_choice_and_grammar_constraints(client: OpenAI) -> None:
    def ask(**options: Any) -> str:
        reply = client.chat.completions.create(model=MODEL, messages=HELLO, seed=3, **options)
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].message.content or ""

    assert ask(extra_body={"guided_regex": "[0-9]{3}-[a-f]{2}"})[3] == "-"
    assert ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert ask(extra_body={"guided_grammar": 'start: "a" "b"{2,4} "c"'}) in ("abbc", "abbbc", "abbbbc")
    reply = client.chat.completions.create(
        model=MODEL, messages=HELLO, seed=3, max_tokens=40, response_format={"type": "json_object"}
    )
    assert (reply.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_tool_call_has_valid_arguments(client: OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[WEATHER, CLOCK],
        seed=seed,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather" and call.id.startswith("call_")
    found = json.loads(call.function.arguments)
    assert set(found) == {"city", "unit"} and found["unit"] in "CF" and len(found["city"]) <= 8


def test_a_streamed_tool_call_is_that_of_the_full_response(client: OpenAI) -> None:
    payload: Any = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "required",
        "seed": 4,
        "parallel_tool_calls": False,
    }
    full = client.chat.completions.create(**payload).choices[0]
    chunks = list(client.chat.completions.create(**payload, stream=True))
    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert deltas[0].function and deltas[0].function.name == "get_weather" and deltas[0].id
    assert all(call.index == 0 and call.id is None for call in deltas[1:])
    arguments = "".join(call.function.arguments or "" for call in deltas if call.function)
    assert full.message.tool_calls and arguments == full.message.tool_calls[0].function.arguments  # type: ignore[union-attr]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(choice.delta.content for chunk in chunks for choice in chunk.choices)


def test_a_conversation_with_tool_calls_and_results_continues(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    for options in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}):
        reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, **options)
        assert reply.choices[0].message.content is not None


def test_choices_differ_and_share_one_prompt(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, n=4, seed=1, max_tokens=12)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in reply.choices}) == 4
    one = client.chat.completions.create(model=MODEL, messages=HELLO, seed=1, max_tokens=12)
    assert one.choices[0].message.content == reply.choices[0].message.content
    assert reply.usage and one.usage and reply.usage.prompt_tokens == one.usage.prompt_tokens
    assert reply.usage.completion_tokens == 48
    texts = ["", "", "", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, n=4, seed=1, max_tokens=12, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in reply.choices]


def test_chat_logprobs(client: OpenAI) -> None:
    payload: Any = {
        "model": MODEL,
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"ignore_eos": True},
    }
    reply = client.chat.completions.create(**payload)
    logprobs = reply.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 6
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token and token.top_logprobs[0].logprob == token.logprob
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    spelt = bytes(byte for token in logprobs.content for byte in token.bytes or [])
    assert spelt.decode("utf-8", "replace") == reply.choices[0].message.content
    streamed = [
        token
        for chunk in client.chat.completions.create(**payload, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    # The second prompt is cached, so its logprobs may be rounded otherwise.
    assert [(one.token, Logprob(one.logprob)) for one in streamed] == [
        (one.token, Logprob(one.logprob)) for one in logprobs.content
    ]


def test_echoed_prompt_logprobs_are_the_same_with_a_cached_prompt(client: OpenAI) -> None:
    prompt = "once upon a time there was a paceline of riders who shared the wind"
    payload: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "echo": True, "logprobs": 2}
    first = client.completions.create(**payload, max_tokens=4).choices[0]
    again = client.completions.create(**payload, max_tokens=4).choices[0]
    scored = client.completions.create(**payload, max_tokens=0).choices[0]
    assert first.text.startswith(prompt) and scored.text == prompt and scored.finish_reason == "length"
    assert first.logprobs and again.logprobs and scored.logprobs
    values, tokens = first.logprobs.token_logprobs, first.logprobs.tokens
    assert values and tokens and values[0] is None and len(values) == len(tokens)  # type: ignore[comparison-overlap]
    assert "".join(tokens) == first.text
    assert first.logprobs.text_offset == [len("".join(tokens[:index])) for index in range(len(tokens))]
    for others in (again.logprobs.token_logprobs, scored.logprobs.token_logprobs):
        assert others is not None
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(values[1 : len(others)], others[1:], strict=False))
    top = first.logprobs.top_logprobs
    assert top and all(len(one) in (2, 3) for one in top[1:])


def test_echoed_prompt_logprobs_can_start_behind_a_cached_prefix(client: OpenAI) -> None:
    prompt = "a paceline shares the wind so that all of its riders arrive sooner than each of them alone"
    payload: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 2}
    whole = client.completions.create(**payload)
    tail = client.completions.create(**payload, extra_body={"prompt_logprobs_start": 40})
    first, second = whole.choices[0].logprobs, tail.choices[0].logprobs
    assert first and second and (first.tokens, first.text_offset) == (second.tokens, second.text_offset)
    assert first.token_logprobs and second.token_logprobs and first.top_logprobs and second.top_logprobs
    assert second.token_logprobs[:40] == second.top_logprobs[:40] == [None] * 40
    values = zip(first.token_logprobs[40:], second.token_logprobs[40:], strict=True)
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in values)
    assert whole.usage and whole.usage.prompt_tokens_details and whole.usage.prompt_tokens_details.cached_tokens == 0
    assert tail.usage and tail.usage.prompt_tokens_details and tail.usage.prompt_tokens_details.cached_tokens == 32
    stream = client.completions.create(**payload, stream=True, extra_body={"prompt_logprobs_start": 40})
    chunks = [chunk.choices[0].logprobs for chunk in stream]
    assert [value for one in chunks if one for value in one.token_logprobs or ()] == second.token_logprobs


def test_prompt_logprobs_of_a_long_prompt_are_streamed_in_pieces(client: OpenAI) -> None:
    prompt = [5 + index % 200 for index in range(600)]
    payload: Any = {"model": MODEL, "prompt": prompt, "seed": 1, "echo": True, "logprobs": 2, "max_tokens": 2, "n": 2}
    whole = client.completions.create(**payload).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**payload, stream=True)]
    for choice in whole:
        assert choice.logprobs and choice.logprobs.token_logprobs and len(choice.logprobs.token_logprobs) > 600
        own = [one for one in chunks if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        for name in ("tokens", "text_offset"):
            found = [value for one in own if one.logprobs for value in getattr(one.logprobs, name)]
            assert found == getattr(choice.logprobs, name)
    assert [len(one.logprobs.tokens or ()) for one in chunks if one.index == 0 and one.logprobs][:2] == [257, 256]


def test_every_choice_of_best_of_echoes_the_prompt_logprobs(client: OpenAI) -> None:
    payload: Any = {"model": MODEL, "prompt": "once upon", "seed": 5, "max_tokens": 4, "echo": True, "logprobs": 0}
    for choice in client.completions.create(**payload, n=4, best_of=5).choices:
        assert choice.logprobs and "".join(choice.logprobs.tokens or ()) == choice.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_logprobs_start": 5, "echo": False}, "prompt_logprobs_start is 5, and there are no prompt logprobs"),
        ({"prompt_logprobs_start": 0, "logprobs": None}, "prompt_logprobs_start is 0, and there are no prompt"),
        ({"prompt_logprobs_start": 3}, "prompt_logprobs_start is 3: give a position of the prompt, 0 to 2"),
    ],
)
def test_an_invalid_start_of_prompt_logprobs_is_refused_by_name(
    client: OpenAI, changes: dict[str, Any], message: str
) -> None:
    payload: Any = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        client.completions.create(**payload, extra_body={"echo": True, "logprobs": 1, **changes})
    assert raised.value.param == "prompt_logprobs_start"


def test_best_of_returns_the_most_likely_and_cannot_stream(client: OpenAI) -> None:
    payload: Any = {"model": MODEL, "prompt": "once", "seed": 5, "max_tokens": 8}
    every = client.completions.create(**payload, n=5, logprobs=0).choices
    best = client.completions.create(**payload, n=2, best_of=5)
    scored: list[Any] = [(choice.logprobs, choice.text) for choice in every]
    means = sorted(((sum(one.token_logprobs) / len(one.tokens), text) for one, text in scored), reverse=True)
    assert [choice.text for choice in best.choices] == [text for _, text in means[:2]]
    assert best.usage and best.usage.completion_tokens == 40
    with pytest.raises(openai.BadRequestError, match="best_of is 5 and stream is true"):
        client.completions.create(**payload, best_of=5, stream=True)


def test_seeds_and_stop_strings(client: OpenAI) -> None:
    payload: Any = {"model": MODEL, "prompt": "once upon", "seed": 7, "max_tokens": 60, "temperature": 1.3}
    full = client.completions.create(**payload).choices[0].text
    assert client.completions.create(**payload).choices[0].text == full
    stop = full[20:23]
    cut = client.completions.create(**payload, stop=[stop]).choices[0]
    assert cut.text == full[: full.index(stop)] and cut.finish_reason == "stop"
    texts = [chunk.choices[0].text for chunk in client.completions.create(**payload, stop=[stop], stream=True)]
    assert "".join(texts) == cut.text
    kept = client.completions.create(**payload, stop=[stop], extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == full[: full.index(stop) + len(stop)]


def test_the_stop_string_is_known_across_processes(client: OpenAI) -> None:
    payload: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 30}
    text = client.chat.completions.create(**payload).choices[0].message.content or ""
    reply: Any = client.post("/messages", body={**payload, "stop_sequences": [text[4:6]]}, cast_to=object)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", text[4:6])


def test_penalties_and_logit_bias_change_the_output(client: OpenAI) -> None:
    payload: Any = {"model": MODEL, "prompt": "once upon", "max_tokens": 30, "temperature": 0}
    plain = client.completions.create(**payload, extra_body={"ignore_eos": True}).choices[0].text
    for options in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 3.0}}):
        body = {"ignore_eos": True, **options.pop("extra_body", {})}  # type: ignore[dict-item]
        assert client.completions.create(**payload, **options, extra_body=body).choices[0].text != plain
    forced = client.completions.create(**payload, logit_bias={"68": 100}).choices[0].text
    assert forced == "A" * 30


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "("},
        {"guided_regex": "((((a{100}){100}){100}){100})"},
        {"guided_regex": "(?=a)b"},
        {"guided_grammar": "start: nothing"},
        {"guided_grammar": "start: a\na: b\nb: a"},
        {"guided_json": '{"type": '},
        {"guided_json": {"type": "string", "pattern": "((a{500}){500}){500}"}},
        {"guided_json": {"$ref": "http://example.com/schema"}},
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 1}},
        {"guided_json": "[" * 100_000},
        {"guided_choice": ["x" * 100_000] * 30},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}},
        {
            "guided_json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)
                ]
            }
        },
    ],
    ids=lambda body: str(body)[:60],
)
def test_an_unusable_grammar_is_400(client: OpenAI, body: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, extra_body=body)
    assert caught.value.message
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices[0].message
