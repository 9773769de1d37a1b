"""An invalid request gets a one-line error, and the next request is served."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.server.fields import UNSUPPORTED_FIELDS
from paceline.server.request_types import ChatRequest
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app


def refused(caller: Caller, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = caller.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    caller.ok(CHAT, HELLO)
    return error


def messages(*items: Any) -> dict[str, Any]:
    return {"messages": list(items)}


TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"messages": []}, "messages", "messages is []: give a list of at least one message."),
        ({"messages": "hi"}, "messages", "messages is 'hi': give a list."),
        ({"messages": None}, "messages", "messages is None: give a list."),
        (messages(3), "messages", "messages[0] is 3: give an object."),
        (messages({"role": "king", "content": "x"}), "messages",
         "messages[0].role is 'king': choose one of system, developer, user, assistant, tool."),
        (messages({"role": "function", "content": "x"}), "messages",
         "messages[0].role is 'function': choose one of system, developer, user, assistant, tool."),
        (messages({"content": "x"}), "messages",
         "messages[0].role is None: choose one of system, developer, user, assistant, tool."),
        (messages(USER, {"role": "user"}), "messages",
         "messages[1].content is missing: give a string or a list of text parts."),
        (messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}), "messages",
         "messages[0].content[0].type is 'image_url': only text parts are supported."),
        (messages({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}), "messages",
         "messages[0].tool_calls[0] is {'id': '1'}: give id, type and a function with a name and arguments that are "
         "a JSON object."),
        (messages({**USER, "colour": "red"}), "messages",
         "Unknown parameter: messages[0].colour. Omit it."),
        ({"max_tokens": -5}, "max_tokens", "max_tokens is -5: give at least 1."),
        ({"max_tokens": None, "max_completion_tokens": -5}, "max_completion_tokens",
         "max_completion_tokens is -5: give at least 1."),
        ({"max_tokens": None, "max_completion_tokens": 10**6}, "max_completion_tokens",
         "max_completion_tokens is 1000000 and the prompt has 24 tokens: this model's maximum context length is 2048 "
         "tokens, for both together; lower max_completion_tokens or shorten the prompt."),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0: give at least 1."),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5: give an integer."),
        ({"max_tokens": "many"}, "max_tokens", "max_tokens is 'many': give an integer."),
        ({"max_tokens": True}, "max_tokens", "max_tokens is True: give an integer."),
        ({"max_completion_tokens": 3}, "max_completion_tokens",
         "max_completion_tokens is 3 and max_tokens, its deprecated name, is 6: give one of them."),
        ({"temperature": -1}, "temperature", "temperature is -1.0: give 0 (always the likeliest token) to 10000."),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot': give a number."),
        ({"top_p": 0}, "top_p", "top_p is 0.0: give a number above 0 and up to 1 (all tokens)."),
        ({"top_k": 0}, "top_k", "top_k is 0: give 1 or more, or leave it out to keep all tokens."),
        ({"seed": 10**30}, "seed", f"seed is {10**30}: give a whole number of 64 bits."),
        ({"stop": [""]}, "stop", "stop has '': give strings of at least one character."),
        ({"stop": ["a"] * 65}, "stop", "stop has 65 strings: give at most 64."),
        ({"stop": [1]}, "stop", "stop[0] is 1: give a string."),
        ({"min_tokens": 9}, "min_tokens", "min_tokens is 9, more than max_tokens 6: lower it."),
        ({"stream": "yes"}, "stream", "stream is 'yes': give true or false."),
        ({"stream_options": {"include_usage": True}}, "stream_options",
         "stream_options is given and stream is not true: omit it, or set stream."),
        ({"temprature": 1}, "temprature",
         "Unknown parameter: temprature. Did you mean temperature?"),
        ({"n": 0}, "n", "n is 0: give 1 to 128."),
        ({"n": True}, "n", "n is True: give an integer."),
        ({"suffix": "x"}, "suffix", "suffix is 'x', which is not supported: omit it."),
        ({"min_p": 2}, "min_p", "min_p is 2.0: give 0 (all tokens) to 1."),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3.0: give -2 to 2; 0 changes nothing."),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x': keys are token ids."),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias has token id 9999: the model's ids are 0 to 511."),
        ({"top_logprobs": 2}, "top_logprobs",
         "top_logprobs is given and logprobs is not true: set logprobs, or omit top_logprobs."),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21: give 0 to 20."),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1: give 0 to 20."),
        ({"response_format": {"type": "yaml"}}, "response_format",
         "response_format.type is 'yaml': choose one of text, json_object, json_schema."),
        ({"response_format": {"type": "json_schema"}}, "response_format",
         "`response_format.json_schema.schema` is required."),
        ({"guided_choice": []}, "choice", "choice is []: give a list of strings of at least one character."),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice",
         "guided_choice and guided_regex are both given: give one of them."),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos",
         "ignore_eos is True and a grammar is given, which must be able to end: drop one."),
        ({"tool_choice": "required"}, "tool_choice",
         "tool_choice forces a call, so `tools` is required."),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice",
         "tool_choice is 'maybe': give none, auto, required or a function."),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
         "tool_choice is 'g', which is not one of the tools: name one of them."),
        ({"prediction": "text"}, "prediction", "prediction is 'text': give an object."),
        ({"prediction": {"type": "content"}}, "prediction", "`prediction.content` is required."),
        ({"prediction": {"type": "tokens", "content": "x"}}, "prediction",
         "prediction.type is 'tokens': give content."),
        ({"prediction": {"type": "content", "content": 3}}, "prediction",
         "prediction.content is 3: give a string or a list."),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction",
         "`prediction.content[0].text` is required."),
        ({"prediction": {"type": "content", "content": [{"type": "image_url", "text": "x"}]}}, "prediction",
         "prediction.content[0].type is 'image_url': give text."),
        ({"prediction": {"type": "content", "content": "x", "weight": 2}}, "prediction",
         "Unknown parameter: prediction.weight. Omit it."),
        ({"prediction": {"type": "content", "content": "x y z " * 2000}}, "prediction",
         "prediction has more than 2048 tokens, this model's maximum context length: shorten it."),
        ({"prediction": {"type": "content", "content": "x y z " * 20_000}}, "prediction",
         "prediction has more than 2048 tokens, this model's maximum context length: shorten it."),
        ({"tools": [{**TOOL, "type": "retrieval"}]}, "tools",
         "tools[0].type is 'retrieval': only function is supported."),
    ],
)  # fmt: skip
def test_an_invalid_chat_request_names_the_param(caller: Caller, changes: Any, param: str, message: str) -> None:
    error = refused(caller, CHAT, {**HELLO, **changes})
    assert (error["message"], error["param"], error["type"]) == (message, param, "invalid_request_error")


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_fields_are_errors(caller: Caller, name: str, stream: bool) -> None:
    path, body = (CHAT, HELLO) if name not in ChatRequest.__struct_fields__ else (COMPLETIONS, TEXT)
    error = refused(caller, path, {**body, "stream": stream, name: {"something": "else"}})
    assert error["param"] == name and error["code"] == "unsupported_parameter" and name in error["message"]


def test_a_missing_required_field_is_named(caller: Caller) -> None:
    error = refused(caller, CHAT, {name: value for name, value in HELLO.items() if name != "messages"})
    assert error["param"] == "messages" and error["message"] == "`messages` is required."


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty: give at least one token."),
        ([], "prompt is []: give a string, a list of token ids, or a list of either."),
        (["a", ""], "prompt[1] is empty: give at least one token."),
        ([[1], []], "prompt[1] is empty: give at least one token."),
        (["a", 1], "prompt is ['a', 1]: give a string, a list of token ids, or a list of either."),
        ([1.5], "prompt is [1.5]: give a string, a list of token ids, or a list of either."),
        ({"text": "a"}, "prompt is {'text': 'a'}: give a string, a list of token ids, or a list of either."),
        ([1, -2], "prompt has token id -2: token ids are 0 to 511."),
        ([1, 512], "prompt has token id 512: token ids are 0 to 511."),
        ([1, 2**70], f"prompt has token id {2**70}: token ids are 0 to 511."),
        (["a"] * 129, "prompt has 129 entries: give at most 128."),
    ],
)
def test_an_invalid_prompt_names_the_param(caller: Caller, prompt: Any, message: str) -> None:
    error = refused(caller, COMPLETIONS, {**TEXT, "prompt": prompt})
    assert (error["message"], error["param"]) == (message, "prompt")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        (
            {"max_tokens": 10**9, "prompt": [5] * 7},
            "max_tokens",
            "max_tokens is 1000000000 and the prompt has 7 tokens: this model's maximum context length is 2048 tokens, "
            "for both together; lower max_tokens or shorten the prompt.",
        ),
        ({"prompt": [5] * 2048, "max_tokens": 1}, "prompt", "The prompt has 2048 tokens: this model's maximum"),
        ({"prompt": [5] * 3000}, "prompt", "prompt has 3000 tokens: this model's maximum context length is 2048"),
        ({"prompt": ["a", "b " * 3000]}, "prompt", "prompt[1] has 6000 tokens: this model's maximum context"),
        ({"prompt": ["a", "b " * 40_000]}, "prompt", "prompt[1] has more than 2048 tokens: this model's"),
    ],
)
def test_a_request_beyond_the_context_is_400_also_when_streaming(
    caller: Caller, changes: Any, param: str, message: str, stream: bool
) -> None:
    error = refused(caller, COMPLETIONS, {**TEXT, "stream": stream, **changes})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(message)


def test_an_unknown_model_is_404_and_names_the_served_one(caller: Caller) -> None:
    error = refused(caller, CHAT, {**HELLO, "model": "gpt-9"}, status=404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "The model 'gpt-9' does not exist: use 'tiny'."
    assert caller.request("GET", "/v1/models/gpt-9").status_code == 404


def test_a_request_without_a_model_is_for_the_one_that_is_served(caller: Caller) -> None:
    without = {name: value for name, value in HELLO.items() if name != "model"}
    for body in (without, {**without, "model": ""}):
        answer = caller.ok(CHAT, body)
        assert answer["model"] == "tiny" and answer["choices"][0] == caller.ok(CHAT, HELLO)["choices"][0]
    for path, more in (
        ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 3}),
        ("/v1/responses", {"input": "a"}),
    ):
        assert caller.ok(path, more)["model"] == "tiny"


def test_an_integer_may_be_written_as_a_float(caller: Caller) -> None:
    whole = caller.ok(CHAT, {**HELLO, "max_tokens": 2.0, "seed": 1.0, "temperature": 1})
    assert whole["usage"]["completion_tokens"] == 2
    for value, message in (
        (2.5, "max_tokens is 2.5: give an integer."),
        (1e300, "max_tokens is 1e+300: give an integer."),
    ):
        assert refused(caller, CHAT, {**HELLO, "max_tokens": value})["message"] == message
    options = {"num_predict": 2.0, "temperature": 0}
    reply = caller.ok("/api/chat", {"messages": HELLO["messages"], "options": options, "stream": False})
    assert reply["eval_count"] == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": NaN}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_is_not_a_json_object_is_400(caller: Caller, path: str, body: bytes) -> None:
    response = caller.request("POST", path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (rb'"\ud800"', r"The body has the lone surrogate \ud800 (byte 27): send valid Unicode"),
        (
            rb'"a\uDC00b"',
            r"The body has the lone surrogate \uDC00 (byte 28): send valid Unicode",
        ),
        (rb'"\ud83d\ude00\ud83d"', r"The body has the lone surrogate \ud83d (byte 39): send valid Unicode, such as"),
        (b'"a\xff"', "The body is not valid UTF-8 (byte 28): send JSON in UTF-8."),
        (rb'"\\ud800"', "The body is not valid JSON (Input data was truncated): send one JSON object."),
    ],
)
def test_text_that_is_not_unicode_says_where(caller: Caller, text: bytes, message: str) -> None:
    body = b'{"model":"tiny","prompt":' + b" " + text + (b"" if b"\\\\" in text else b"}")
    response = caller.request("POST", COMPLETIONS, content=body)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)


def test_completions_say_what_max_tokens_may_be(caller: Caller) -> None:
    for value in (0, -1):
        error = refused(caller, COMPLETIONS, {**TEXT, "max_tokens": value})
        assert (
            error["message"] == f"max_tokens is {value}: give at least 1, or 0 with echo to get the prompt's logprobs."
        )
        assert error["param"] == "max_tokens"


def test_a_body_too_large_is_413(engine: Engine) -> None:
    caller = Caller(make_app(engine, max_body_bytes=2000))
    error = refused(caller, CHAT, {**HELLO, "metadata": {"padding": "x" * 2000}}, status=413)
    assert error["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
    ],
)
def test_an_unknown_route_or_method_has_the_error_format(
    caller: Caller, method: str, path: str, status: int, code: str
) -> None:
    response = caller.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("allow" in response.headers) == (status == 405)


def test_a_grammar_that_becomes_too_expensive_is_a_fault_of_the_request(caller: Caller) -> None:
    """Its first mask is cheap, so it is accepted. A 503 would make clients try again."""
    parts = [
        {"type": "object", "properties": {f"{part}_{index}": {"type": "string"} for index in range(450)}}
        for part in range(2)
    ]
    behind_a_choice = {
        "type": "object",
        "properties": {"k": {"enum": [1, 2]}, "v": {"allOf": parts}},
        "required": ["k", "v"],
        "x-guidance": {"whitespace_flexible": False},
    }
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": behind_a_choice}}
    for stream in (False, True):
        response = caller.post(CHAT, {**HELLO, "max_tokens": 50}, response_format=schema, stream=stream)
        text = response.text
        assert response.status_code == 400 or stream, text
        assert (
            "the grammar exceeded its cost limit" in text and "simplify it" in text and "grammar_too_expensive" in text
        )
    caller.ok(CHAT, HELLO)


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"guided_grammar": "start: start"},
    ],
)
def test_a_grammar_that_refers_only_to_itself_is_explained(caller: Caller, constraint: dict[str, Any]) -> None:
    message = refused(caller, CHAT, {**HELLO, **constraint})["message"]
    assert message.endswith("a rule or $ref refers only to itself, so that no text matches it.")
