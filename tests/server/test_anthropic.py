"""`/v1/messages` with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.output import EngineFailed
from paceline.request import FinishReason, Refused
from tests.lazy import Lazy
from tests.server.scripted import CALL, ScriptedCaller, run_package
from tests.server.serving import Caller, make_app

anthropic = Lazy("anthropic")

PATH = "/v1/messages"
HELLO: Any = {"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": "Hello there"}]}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {
    "name": "get_time",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},  # else it may never end
}


@pytest.fixture
def scripted(engine: Engine) -> ScriptedCaller:
    return ScriptedCaller(engine)


def run(caller: Caller, use: Callable[[Any], Awaitable[Any]], key: str = "none") -> Any:
    return run_package(caller, use, anthropic.AsyncAnthropic, base_url="http://tiny", api_key=key)


def create(caller: Caller, **fields: Any) -> Any:
    return run(caller, lambda client: client.messages.create(**{**HELLO, **fields}))


def stream(caller: Caller, **fields: Any) -> tuple[Any, list[Any]]:
    """The message that the client accumulates, and the events."""

    async def use(client: Any) -> tuple[Any, list[Any]]:
        async with client.messages.stream(**{**HELLO, **fields}) as opened:
            events = [event async for event in opened]
            return await opened.get_final_message(), events

    return run(caller, use)


def refused(caller: Caller, **fields: Any) -> str:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(caller, **fields)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    return caught.value.body["error"]["message"]


def test_a_message_is_the_output_of_the_chat(caller: Caller) -> None:
    body = {"model": "tiny", "messages": HELLO["messages"], "max_tokens": 6, "temperature": 0}
    chat = caller.ok("/v1/chat/completions", body)
    reply = create(caller, extra_body={"temperature": 0})
    assert reply.id.startswith("msg_") and reply.role == "assistant" and reply.model == "tiny"
    assert [block.type for block in reply.content] == ["text"]
    assert reply.content[0].text == chat["choices"][0]["message"]["content"]
    assert reply.stop_reason == "max_tokens" and reply.stop_sequence is None
    total = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert total == chat["usage"]["prompt_tokens"] and reply.usage.output_tokens == 6


def test_a_stream_has_the_same_message(caller: Caller) -> None:
    full = create(caller, extra_body={"temperature": 0})
    found, events = stream(caller, extra_body={"temperature": 0})
    assert found.content[0].text == full.content[0].text
    assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 6
    names = list(dict.fromkeys(event.type for event in events))
    assert names == ["message_start", "content_block_start", "content_block_delta", "text", "content_block_stop",
                     "message_delta", "message_stop"]  # fmt: skip


def test_events_are_named(caller: Caller) -> None:
    response = caller.post(PATH, HELLO, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in response.text


def test_a_stop_sequence_is_reported(caller: Caller) -> None:
    text = create(caller, extra_body={"temperature": 0}).content[0].text
    stop = text[2:4]
    reply = create(caller, extra_body={"temperature": 0}, stop_sequences=["never", stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == text[: text.index(stop)]
    streamed, _ = stream(caller, extra_body={"temperature": 0}, stop_sequences=["never", stop])
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"get_weather", "get_time"}), ({"type": "tool", "name": "get_weather"}, {"get_weather"})],
)
def test_a_forced_call_is_a_tool_use_block(caller: Caller, choice: Any, names: set[str]) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    for reply in (create(caller, **fields, max_tokens=200), stream(caller, **fields, max_tokens=200)[0]):
        (block,) = reply.content
        assert reply.stop_reason == "tool_use" and block.type == "tool_use" and block.id
        assert block.name in names and (block.name == "get_time" or set(block.input) == {"city", "unit"})


def test_text_and_calls_are_blocks_in_order(scripted: ScriptedCaller) -> None:
    scripted.client.text = f"Let me see.\n{CALL}\n{CALL}"
    for size in (1, 5, 1000):
        scripted.client.size = size
        full = create(scripted, tools=[WEATHER])
        streamed, _ = stream(scripted, tools=[WEATHER])
        for reply in (full, streamed):
            assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
            assert reply.content[0].text == "Let me see." and reply.stop_reason == "tool_use"
            assert reply.content[1].input == {"city": "Rome", "days": 2}
            assert reply.content[1].id != reply.content[2].id


def test_arguments_cut_off_by_max_tokens_are_kept(scripted: ScriptedCaller) -> None:
    scripted.client.text, scripted.client.reason = CALL[:60], FinishReason.LENGTH
    (block,) = create(scripted, tools=[WEATHER]).content
    assert block.input == {"invalid_json": '{"city": "R'}


def test_cached_prompt_tokens_are_counted_apart(scripted: ScriptedCaller) -> None:
    scripted.client.text = "Hello"
    count = run(scripted, lambda client: client.messages.count_tokens(model="tiny", messages=HELLO["messages"]))
    for reply in (create(scripted), stream(scripted)[0]):
        assert reply.usage.cache_read_input_tokens == 4 and reply.usage.input_tokens == count.input_tokens - 4


def test_a_coding_agents_request_is_served(scripted: ScriptedCaller) -> None:
    """Blocks with cache_control, tools of every turn, results and errors of tools, metadata."""
    cache = {"cache_control": {"type": "ephemeral"}}
    tools = [{**CLOCK, "name": f"tool_{number}", **cache} for number in range(9)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}, {"type": "text", "text": "Soon.", **cache}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "toolu_1", "name": "tool_1", "input": {"path": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "tool_2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "1 + 1"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no file", "is_error": True, **cache},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    scripted.client.text = "Done."
    reply = create(
        scripted,
        messages=messages,
        tools=tools,
        system=[{"type": "text", "text": "You fix code."}, {"type": "text", "text": "Be brief.", **cache}],
        metadata={"user_id": "u-1"},
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        extra_headers={"anthropic-beta": "claude-code-20250219"},
        extra_query={"beta": "true"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    )
    assert reply.content[0].text == "Done."
    prompt = scripted.client.prompt
    wanted = ["You fix code.Be brief.", "tool_8", "Fix it.Soon.", "Looking.", '"path": "a.py"', "1 + 1",
              "Error: no file", "Go on."]  # fmt: skip
    positions = [prompt.index(text) for text in wanted]
    assert positions == sorted(positions)


def test_a_json_schema_constrains_the_output(caller: Caller) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    reply = create(caller, max_tokens=200, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(reply.content[0].text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type is 'image', which is not supported: give text or tool_result."),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages[0].content[0].text` is required."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}]},
         "Unknown parameter: messages[0].content[0].colour. Omit it."),
        ({"messages": [{"role": "robot", "content": "a"}]},
         "messages[0].role is 'robot': /openapi.json lists the allowed values."),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content is 7: give a string or a list."),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "messages must end with a user message: continuing an assistant message (prefill) is not supported."),
        ({"messages": []},
         "messages must end with a user message: continuing an assistant message (prefill) is not supported."),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
         "tools[0].type is 'web_search_20250305', which is not supported: tools run by the server are not available; "
         "give tools with an input_schema."),
        ({"tools": [{"name": "a"}]}, "`tools[0].input_schema` is required."),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]},
         "tool_choice.name is None and type is 'tool': give a name with type tool alone."),
        ({"tool_choice": {"type": "any"}}, "tool_choice forces a call, so `tools` is required."),
        ({"extra_body": {"temperature": -1}}, "temperature is -1.0: "),
        ({"stop_sequences": [""]}, "stop_sequences has '': give strings of at least one character."),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is [{}], which is not supported: omit it."),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens is 'many': give"),
        ({"max_tokens": 0}, "max_tokens is 0: give at least 1."),
        ({"max_tokens": 100_000}, "input length and `max_tokens` exceed context limit: max_tokens is 100000 and the "),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "prompt is too long: "),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:50],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(caller: Caller, fields: Any, message: str) -> None:
    assert message in refused(caller, **fields)


def test_errors_before_the_handler_have_anthropics_form(engine: Engine) -> None:
    caller = Caller(make_app(engine, tenants=[TenantConfig(name="team", keys=("key",))], max_body_bytes=2000))
    body = {**HELLO, "messages": [{"role": "user", "content": "x" * 3000}]}
    key = {"x-api-key": "key"}
    for response, status, kind in (
        (caller.request("POST", PATH, json=HELLO), 401, "authentication_error"),
        (caller.request("POST", f"{PATH}/count_tokens", json=HELLO), 401, "authentication_error"),
        (caller.request("POST", f"{PATH}/batches", json=HELLO, headers=key), 404, "not_found_error"),
        (caller.request("GET", PATH, headers=key), 405, "invalid_request_error"),
        (caller.request("POST", PATH, json=body, headers=key), 413, "request_too_large"),
        (caller.request("POST", PATH, json={**HELLO, "model": "other"}, headers=key), 404, "not_found_error"),
        (caller.request("POST", PATH, content=b"{", headers=key), 400, "invalid_request_error"),
    ):
        assert response.status_code == status, response.text
        assert response.json()["type"] == "error" and response.json()["error"]["type"] == kind
    assert run(caller, lambda client: client.messages.create(**HELLO), key="key").content


def test_errors_of_the_engine_have_anthropics_form(scripted: ScriptedCaller) -> None:
    scripted.client.error = Refused("the queue is full: retry later.", retry=True, retry_after_s=3)
    with pytest.raises(anthropic.RateLimitError) as limited:
        create(scripted)
    assert limited.value.response.headers["retry-after"] == "3"
    scripted.client.text, scripted.client.error = "partial", EngineFailed("the engine died: retry.")
    with pytest.raises(anthropic.APIStatusError, match="the engine died"):
        stream(scripted)
    scripted.app.state.draining = True
    with pytest.raises(anthropic.InternalServerError) as stopping:
        create(scripted)
    assert stopping.value.status_code == 503 and stopping.value.body["error"]["type"] == "overloaded_error"


def test_models_are_listed_in_anthropics_form(caller: Caller) -> None:
    async def listed(client: Any) -> list[Any]:
        return [model async for model in client.models.list()]

    (model,) = run(caller, listed)
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny") and model.created_at.year > 2000
    assert run(caller, lambda client: client.models.retrieve("tiny")) == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        run(caller, lambda client: client.models.retrieve("other"))
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caller.request("GET", "/v1/models").json()["object"] == "list", "without anthropic-version it is OpenAI's"
