"""`/v1/responses` with OpenAI's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.output import EngineFailed
from paceline.request import FinishReason
from paceline.server.apis import responses
from paceline.server.response_store import ResponseStore
from tests.server.scripted import CALL, ScriptedCaller, run_package
from tests.server.serving import Caller, make_app
from tests.server.virtual import virtual

PATH = "/v1/responses"
HELLO: Any = {"model": "tiny", "input": "Hello there", "max_output_tokens": 6, "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def scripted(engine: Engine) -> ScriptedCaller:
    return ScriptedCaller(engine)


def run(caller: Caller, use: Callable[[AsyncOpenAI], Awaitable[Any]], key: str = "none") -> Any:
    return run_package(caller, use, AsyncOpenAI, base_url="http://tiny/v1", api_key=key)


def create(caller: Caller, key: str = "none", **fields: Any) -> Response:
    return run(caller, lambda client: client.responses.create(**{**HELLO, **fields}), key)


def stream(caller: Caller, **fields: Any) -> list[Any]:
    async def use(client: AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(**{**HELLO, **fields}, stream=True)]

    events = run(caller, use)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def without_ids(response: Response) -> Any:
    """What two responses to the same request have in common."""
    found = response.model_dump(exclude={"id", "created_at", "usage"})
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    return found


def test_a_response_is_the_output_of_the_chat(caller: Caller) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 6}
    chat = caller.ok("/v1/chat/completions", body, temperature=0)
    reply = create(caller, metadata={"a": "b"})
    assert reply.id.startswith("resp_") and reply.object == "response" and reply.metadata == {"a": "b"}
    assert reply.output_text == chat["choices"][0]["message"]["content"]
    assert reply.status == "incomplete" and reply.incomplete_details
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage and reply.usage.output_tokens == 6 and reply.usage.total_tokens == chat["usage"]["total_tokens"]


def test_instructions_and_items_are_the_messages_of_a_chat(scripted: ScriptedCaller) -> None:
    scripted.client.text = "Done."
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]  # fmt: skip
    assert create(scripted, instructions="You help.", input=items).output_text == "Done."
    prompt = scripted.client.prompt
    positions = [prompt.index(text) for text in ("You help.", "Be brief.", "Weather?", "Let me see.", "Rome", "sunny")]
    assert positions == sorted(positions) and prompt.count("<|im_start|>assistant") == 2


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_ends_with_the_same_response(scripted: ScriptedCaller, size: int) -> None:
    scripted.client.text, scripted.client.size = f"Let me see.\n{CALL}\n{CALL}", size
    full = create(scripted, tools=[WEATHER])
    events = stream(scripted, tools=[WEATHER])
    last = events[-1]
    assert [item.type for item in full.output] == ["message", "function_call", "function_call"]
    assert full.output_text == "Let me see." and full.status == "completed"
    assert json.loads(full.output[1].arguments) == {"city": "Rome", "days": 2}
    assert last.type == "response.completed" and without_ids(last.response) == without_ids(full)
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Let me see."
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    for item in done[1:]:
        deltas = [one.delta for one in events if one.type.endswith("arguments.delta") and one.item_id == item.id]
        assert "".join(deltas) == item.arguments


def test_the_packages_stream_helper_accepts_the_events(scripted: ScriptedCaller) -> None:
    scripted.client.text = CALL

    async def use(client: AsyncOpenAI) -> Any:
        async with client.responses.stream(**HELLO, tools=[WEATHER]) as opened:
            async for _ in opened:
                pass
            return await opened.get_final_response()

    (call,) = run(scripted, use).output
    assert call.parsed_arguments == {"city": "Rome", "days": 2}


def test_a_forced_call_and_a_json_schema_are_honoured(caller: Caller) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    (call,) = create(caller, tools=[WEATHER], tool_choice=choice, max_output_tokens=200).output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format: Any = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    reply = create(caller, text={"format": format}, max_output_tokens=200)
    assert json.loads(reply.output_text)["a"] in (1, 2) and reply.status == "completed"


def test_a_response_continues_the_previous_one(scripted: ScriptedCaller) -> None:
    scripted.client.text = "Blue."
    first = create(scripted, input="My colour?", instructions="Be kind.")
    scripted.client.text = CALL
    second = create(scripted, input="And the weather?", previous_response_id=first.id, tools=[WEATHER])
    output: Any = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "sunny"}
    create(scripted, input=[output], previous_response_id=second.id)
    prompt = scripted.client.prompt
    positions = [prompt.index(text) for text in ("My colour?", "Blue.", "And the weather?", "Rome", "sunny")]
    assert positions == sorted(positions) and "Be kind." not in prompt  # instructions are not carried over
    assert second.previous_response_id == first.id


def test_a_short_body_with_a_long_history_is_a_long_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(make_app(engine, tenants=[TenantConfig(name="one", keys=("one",), tokens_per_minute=10_000)]))
    state, handled, charged = caller.app.state, list[int](), list[float]()
    in_process, charge = state.workers._run_in_process, state.limiter.charge

    def observed(function: Any, body: Any, args: Any) -> Any:
        handled.append(len(body))
        assert charged, "before the work"
        return in_process(function, body, args)

    first = create(caller, "one", metadata={f"key{number}": "x" * 500 for number in range(12)})
    monkeypatch.setattr(state.workers, "_run_in_process", observed)
    monkeypatch.setattr(state.limiter, "charge", lambda name, num: (charged.append(num), charge(name, num)))
    second = create(caller, "one", input="And?", previous_response_id=first.id)
    assert len(handled) == 1 and handled[0] > 6000, "the stored conversation, in the process of long bodies"
    assert charged[0] == handled[0] // 4 and sum(charged) == pytest.approx(second.usage.total_tokens, abs=40)

    decoded, decoder = list[int](), responses._stored_decoder
    monkeypatch.setattr(state.workers, "_run_in_process", lambda function, body, args: function(body, *args))
    monkeypatch.setattr(
        responses,
        "_stored_decoder",
        SimpleNamespace(decode=lambda data: (decoded.append(threading.get_ident()), decoder.decode(data))[1]),
    )
    third = create(caller, "one", input="And?", previous_response_id=first.id)
    assert without_ids(second) == without_ids(third)
    headers = {"Authorization": "Bearer one"}
    for path in (f"/v1/responses/{first.id}", f"/v1/responses/{first.id}/input_items"):
        assert caller.request("GET", path, headers=headers).status_code == 200
    assert len(decoded) == 3 and threading.get_ident() not in decoded, "not on the event loop"


def test_a_streamed_response_is_stored_before_its_end_is_sent(scripted: ScriptedCaller) -> None:
    scripted.client.text = "Blue."

    async def use(client: AsyncOpenAI) -> str:
        async for event in await client.responses.create(**HELLO, stream=True):
            if event.type == "response.completed":
                return (await client.responses.retrieve(event.response.id)).output_text
        raise AssertionError("the stream has no end")

    assert run(scripted, use) == "Blue."


def test_a_call_cut_off_by_the_limit_is_stored(scripted: ScriptedCaller) -> None:
    scripted.client.text, scripted.client.reason = CALL[:60], FinishReason.LENGTH
    first = create(scripted, tools=[WEATHER])
    assert first.status == "incomplete" and first.output[0].status == "incomplete"
    create(scripted, previous_response_id=first.id)
    assert "invalid_json" in scripted.client.prompt


def test_stored_responses_are_retrieved_and_deleted(caller: Caller) -> None:
    first, unstored = create(caller), create(caller, store=False)
    assert first.store is True and unstored.store is False
    assert run(caller, lambda client: client.responses.retrieve(first.id)) == first
    run(caller, lambda client: client.responses.delete(first.id))
    for gone in (first.id, unstored.id):
        with pytest.raises(openai.NotFoundError):
            run(caller, lambda client, gone=gone: client.responses.retrieve(gone))
        with pytest.raises(openai.NotFoundError):
            run(caller, lambda client, gone=gone: client.responses.delete(gone))
        with pytest.raises(openai.BadRequestError) as caught:
            create(caller, previous_response_id=gone)
        assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_a_tenant_cannot_reach_the_responses_of_another(engine: Engine) -> None:
    tenants = [TenantConfig(name="a", keys=("key-a",)), TenantConfig(name="b", keys=("key-b",))]
    caller = Caller(make_app(engine, tenants=tenants, admin_key="root"))
    mine = create(caller, key="key-a").id
    with pytest.raises(openai.NotFoundError):
        run(caller, lambda client: client.responses.retrieve(mine), key="key-b")
    with pytest.raises(openai.NotFoundError):
        run(caller, lambda client: client.responses.delete(mine), key="key-b")
    with pytest.raises(openai.BadRequestError):
        create(caller, key="key-b", previous_response_id=mine)
    assert run(caller, lambda client: client.responses.retrieve(mine), key="key-a").id == mine
    assert run(caller, lambda client: client.responses.retrieve(mine), key="root").id == mine


def test_the_store_is_bounded_for_each_tenant() -> None:
    store = ResponseStore()

    def put(tenant: str, name: str, data: bytes) -> None:
        store.put(tenant, name, data, max_responses=3, max_bytes=10)

    put("other", "x", b"1")
    for name in "abc":
        put("team", name, b"1")
    assert store.get("a", "team") == b"1"  # now the most recently used
    put("team", "d", b"1")
    assert [name for name in "abcd" if store.get(name, "team")] == ["a", "c", "d"]
    put("team", "e", b"1" * 9)
    assert [name for name in "abcde" if store.get(name, "team")] == ["d", "e"]
    put("team", "f", b"1" * 11)  # too large for the store: nothing is dropped for it
    assert [name for name in "abcdef" if store.get(name, "team")] == ["d", "e"]
    assert store.get("x", "other") == b"1" and store.get("x", "team") is None and store.get("x", None) == b"1"


def test_a_server_without_a_store_refuses_what_needs_it(engine: Engine) -> None:
    caller = Caller(make_app(engine, stored_responses=0))
    assert create(caller).store is False
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError, match="this server stores no responses"):
            create(caller, **fields)


def test_all_workers_see_the_same_responses() -> None:
    with virtual("--workers", "2") as server:
        first = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").responses.create(model="virtual", input="a")
        for _ in range(8):  # a connection each: both workers accept some
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                assert client.responses.retrieve(first.id).output_text == first.output_text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input",
         "input[0].content[0].type is 'input_image', which is not supported: give input_text or output_text."),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "input[0].type is 'item_reference', which"),
        ({"input": []}, "input", "input is []: give a list of at least one message."),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input",
         "input[0].arguments is '{': give a JSON object."),
        ({"tools": [{"type": "web_search"}]}, "tools",
         "tools[0].type is 'web_search', which is not supported: give function."),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice.type is 'file_search', which is not"),
        ({"background": True}, "background", "background is True, which is not supported: omit it."),
        ({"conversation": "conv_1"}, "conversation", "conversation is 'conv_1', which is not supported: omit it."),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort is 'high', and the model's chat"),
        ({"include": ["message.output_text.logprobs"]}, "include", "include[0] is 'message.output_text.logprobs'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0: give at least 1."),
        ({"max_output_tokens": 90_000}, "max_output_tokens", "max_output_tokens is 90000 and the prompt has 24 tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "`text.format.name` is required."),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type is 'xml', which is not supported: give text"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(caller: Caller, fields: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(caller, **fields)
    assert message in caught.value.message and caught.value.param == param


def test_a_stream_that_fails_ends_with_response_failed(scripted: ScriptedCaller) -> None:
    scripted.client.text, scripted.client.error = "partial", EngineFailed("the engine died: retry.")
    last = stream(scripted)[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error and last.response.error.message == "the engine died: retry."
    with pytest.raises(openai.NotFoundError):
        run(scripted, lambda client: client.responses.retrieve(last.response.id))


def test_the_input_items_of_a_stored_response_are_listed(scripted: ScriptedCaller) -> None:
    first = create(scripted, input="Hello there", instructions="Be brief.")
    parts = [{"type": "input_text", "text": text} for text in ("And in ", "Rome?")]
    items: Any = [
        {"role": "user", "content": parts},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"role": "user", "content": "Thanks"},
    ]
    second = create(scripted, input=items, previous_response_id=first.id)

    async def listed(client: AsyncOpenAI, of: str, **query: Any) -> list[Any]:
        return [item async for item in client.responses.input_items.list(of, **query)]

    (hello,) = run(scripted, lambda client: listed(client, first.id))
    assert (hello.type, hello.role, hello.content[0].text) == ("message", "user", "Hello there")
    for limit in (1, 2, 3, 100):
        found = run(scripted, lambda client, limit=limit: listed(client, second.id, order="asc", limit=limit))
        assert [item.type for item in found] == ["message", "function_call", "function_call_output", "message"]
        assert [part.model_dump(exclude_none=True) for part in found[0].content] == parts
        assert found[3].content[0].text == "Thanks"
        assert json.loads(found[1].arguments) == {"city": "Rome"} and found[2].output == "rain"
        newest = run(scripted, lambda client, limit=limit: listed(client, second.id, limit=limit))
        assert newest == found[::-1]
    path = f"{PATH}/{second.id}/input_items"
    for query, status in (("limit=0", 400), ("limit=101", 400), ("after=no", 400), ("order=up", 400), ("limit=2", 200)):
        assert scripted.request("GET", f"{path}?{query}").status_code == status
    assert scripted.request("GET", f"{PATH}/resp_none/input_items").status_code == 404
