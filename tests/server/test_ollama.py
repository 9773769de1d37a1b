"""`/api/…` with Ollama's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import ollama
import pytest
from ollama import AsyncClient, ResponseError

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.output import EngineFailed
from paceline.request import FinishReason
from tests.server.scripted import CALL, ScriptedCaller
from tests.server.serving import Caller, make_app

MESSAGES = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0, "num_predict": 6}
CHAT: Any = {"model": "tiny", "messages": MESSAGES, "options": GREEDY}


@pytest.fixture
def scripted(engine: Engine) -> ScriptedCaller:
    return ScriptedCaller(engine)


def run(caller: Caller, use: Callable[[AsyncClient], Awaitable[Any]], **headers: str) -> Any:
    async def main() -> Any:
        transport = httpx.ASGITransport(caller.app, raise_app_exceptions=False)
        client = AsyncClient(host="http://tiny", transport=transport, headers=headers, timeout=300)
        async with client._client:
            return await use(client)

    return asyncio.run(main())


def chat(caller: Caller, **fields: Any) -> ollama.ChatResponse:
    return run(caller, lambda client: client.chat(**{**CHAT, **fields}))


def stream(caller: Caller, **fields: Any) -> list[ollama.ChatResponse]:
    async def use(client: AsyncClient) -> list[ollama.ChatResponse]:
        return [part async for part in await client.chat(**{**CHAT, **fields}, stream=True)]

    return run(caller, use)


def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name
        days: how many
    """
    return "sunny"


def test_a_chat_is_the_output_of_openais(caller: Caller) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    text = caller.ok("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    reply, parts = chat(caller), stream(caller)
    assert reply.message.role == "assistant" and reply.message.content == text and reply.model == "tiny"
    assert "".join(part.message.content or "" for part in parts) == text
    for last in (reply, parts[-1]):
        assert last.done and last.done_reason == "length" and last.eval_count == 6 and last.prompt_eval_count
    assert not any(part.done for part in parts[:-1])


def test_lines_of_json_are_streamed_by_default(caller: Caller) -> None:
    response = caller.post("/api/chat", CHAT)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True] and len(lines) > 1


def test_durations_are_nanoseconds(scripted: ScriptedCaller) -> None:
    scripted.client.text = "Hello"
    for last in (chat(scripted), stream(scripted)[-1]):
        assert last.total_duration == 1_750_000_000 and last.load_duration == 0
        assert last.prompt_eval_duration == 500_000_000 and last.eval_duration == 1_000_000_000


def test_generate_answers_a_prompt_through_the_template(caller: Caller) -> None:
    async def use(client: AsyncClient) -> tuple[str, str]:
        whole = await client.generate(model="tiny", prompt="Hello there", options=GREEDY)
        parts = [part async for part in await client.generate("tiny", "Hello there", options=GREEDY, stream=True)]
        return whole.response, "".join(part.response for part in parts)

    assert run(caller, use) == (chat(caller).message.content,) * 2


def test_the_system_prompt_of_generate_is_used(scripted: ScriptedCaller) -> None:
    run(scripted, lambda client: client.generate(model="tiny", prompt="Hello", system="Be brief."))
    assert scripted.client.prompt.index("Be brief.") < scripted.client.prompt.index("Hello")


def test_a_request_without_a_prompt_loads_the_model(caller: Caller) -> None:
    for reply in (
        run(caller, lambda client: client.generate(model="tiny:latest", keep_alive="5m")),
        run(caller, lambda client: client.chat(model="tiny", messages=[])),
    ):
        assert reply.done and reply.done_reason == "load"
    assert caller.post("/api/generate", {"model": "tiny"}).json()["done_reason"] == "load"


@pytest.mark.parametrize("size", [1, 1000])
def test_calls_are_sent_whole_and_results_are_accepted(scripted: ScriptedCaller, size: int) -> None:
    scripted.client.text, scripted.client.size = f"Let me see.\n{CALL}\n{CALL}", size
    reply, parts = chat(scripted, tools=[get_weather]), stream(scripted, tools=[get_weather])
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    for calls in (reply.message.tool_calls or [], streamed):
        assert [call.function.arguments for call in calls] == [{"city": "Rome", "days": 2}] * 2
        assert calls[0].function.name == "get_weather"
    assert "".join(part.message.content or "" for part in parts) == reply.message.content == "Let me see."
    assert "The weather of a city." in scripted.client.prompt
    scripted.client.text = "Sunny."
    result = {"role": "tool", "content": "21 degrees", "tool_name": "get_weather"}
    chat(scripted, messages=[*MESSAGES, reply.message, result])
    assert scripted.client.prompt.index("Rome") < scripted.client.prompt.index("21 degrees")


def test_a_call_cut_off_by_the_limit_is_kept(scripted: ScriptedCaller) -> None:
    scripted.client.text, scripted.client.reason = CALL[:60], FinishReason.LENGTH
    for calls in (
        chat(scripted, tools=[get_weather]).message.tool_calls or [],
        [call for part in stream(scripted, tools=[get_weather]) for call in part.message.tool_calls or ()],
    ):
        assert calls[0].function.arguments == {"invalid_json": '{"city": "R'}


def test_embeddings_are_those_of_openais_route(caller: Caller) -> None:
    texts = ["some text", "another"]
    body = {"model": "tiny", "input": texts, "encoding_format": "float"}
    wanted = [one["embedding"] for one in caller.ok("/v1/embeddings", body)["data"]]
    for model in ("tiny", "tiny:latest"):
        found = run(caller, lambda client, model=model: client.embed(model, texts, options={"num_gpu": 1}))
        assert [list(one) for one in found.embeddings] == wanted and found.model == "tiny"
        assert found.prompt_eval_count and found.total_duration
    assert list(run(caller, lambda client: client.embed("tiny", texts[0])).embeddings[0]) == wanted[0]
    for fields, message in (
        ({"input": "a " * 5000}, "this model's maximum context length is 2048 tokens"),
        ({"input": []}, "input"),
        ({"options": {"num_ctx": 10**6}}, "num_ctx is 1000000"),
        ({"input": "a " * 5000, "truncate": True}, "this model's maximum context length is 2048 tokens"),
        ({"dimensions": 65}, "dimensions"),
    ):
        response = caller.post("/api/embed", {"model": "tiny", "input": "a", **fields})
        assert response.status_code == 400 and message in response.json()["error"], response.text


def test_options_are_sampling_parameters(scripted: ScriptedCaller) -> None:
    options = {"num_predict": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.4, "min_p": 0.1, "seed": 3, "stop": ["x"],
               "repeat_penalty": 1.1, "num_ctx": 1024, "num_gpu": 1, "mirostat": 0}  # fmt: skip
    chat(scripted, options=options)
    params = scripted.client.jobs[-1].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 7, 0.4)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 3, ("x",), 1.1)
    chat(scripted, options={"num_predict": -1, "top_k": 0, "seed": -1})
    params = scripted.client.jobs[-1].params
    assert params.max_tokens is None and params.seed is None


def test_format_is_json_or_a_schema(caller: Caller) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    reply = chat(caller, format=schema, options={"num_predict": 200, "seed": 1})
    assert json.loads(reply.message.content or "")["a"] in (1, 2)
    reply = chat(caller, format="json", options={"num_predict": 20, "seed": 1})
    assert (reply.message.content or "").lstrip().startswith("{")


def test_the_model_is_listed_and_described(caller: Caller) -> None:
    (model,) = run(caller, lambda client: client.list()).models
    assert model.model == "tiny" and model.details.family == "qwen3" and model.size
    for name in ("tiny", "tiny:latest"):
        info = run(caller, lambda client, name=name: client.show(name))
        assert info.capabilities == ["completion", "tools"] and info.modelinfo["qwen3.context_length"] == 2048
    assert caller.request("GET", "/api/version").json()["version"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{**MESSAGES[0], "images": ["aGk="]}]}, "messages[0].images is given, which is not supported"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot': choose one of system"),
        ({"options": {"num_ctx": 100_000}}, "num_ctx is 100000: the context of this server is 2048 tokens"),
        ({"options": {"mirostat": 2}}, "mirostat is 2, which is not supported: omit it."),
        ({"options": {"temprature": 1}}, "Unknown parameter: temprature. Did you mean temperature?"),
        ({"options": {"top_k": "a"}}, "options.top_k is 'a': give an integer."),
        ({"options": {"num_predict": 0}}, "num_predict is 0: give at least 1."),
        (
            {"options": {"num_predict": 9000}},
            "num_predict is 9000 and the prompt has 24 tokens: this model's maximum context length",
        ),
        ({"options": {"repeat_penalty": -1}}, "repeat_penalty is -1.0: "),
        ({"format": "xml"}, "format is 'xml': give json or a JSON schema."),
        ({"think": True}, "think is 'medium', and the model's chat template has no variable for it: omit it."),
        ({"think": "much"}, "think is 'much': "),
        ({"logprobs": True}, "logprobs is True, which is not supported: omit it."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_refused_by_name(caller: Caller, fields: Any, message: str) -> None:
    response = caller.post("/api/chat", {**CHAT, **fields})
    assert response.status_code == 400 and list(response.json()) == ["error"], response.text
    assert message in response.json()["error"]


def test_errors_have_ollamas_form(engine: Engine, scripted: ScriptedCaller) -> None:
    caller = Caller(make_app(engine, tenants=[TenantConfig(name="team", keys=("key",))]))
    with pytest.raises(ResponseError, match="Missing or invalid API key") as denied:
        chat(caller)
    assert denied.value.status_code == 401
    assert run(caller, lambda client: client.chat(**CHAT), Authorization="Bearer key").done
    with pytest.raises(ResponseError, match="The model 'other' does not exist") as missing:
        chat(scripted, model="other")
    assert missing.value.status_code == 404
    with pytest.raises(ResponseError, match="Unknown route: POST /api/pull"):
        run(scripted, lambda client: client.pull("tiny"))
    scripted.client.text, scripted.client.error = "partial", EngineFailed("the engine died: retry.")
    with pytest.raises(ResponseError, match="the engine died"):
        stream(scripted)


def test_ps_lists_the_loaded_model(caller: Caller) -> None:
    (running,) = run(caller, lambda client: client.ps()).models
    (listed,) = run(caller, lambda client: client.list()).models
    assert (running.name, running.digest, running.size) == ("tiny", listed.digest, listed.size)
    assert running.size_vram == 0 and running.context_length == 2048
    assert running.expires_at is not None and running.expires_at.year > 2300


def test_the_older_embeddings_are_those_of_embed(caller: Caller) -> None:
    found = run(caller, lambda client: client.embeddings(model="tiny", prompt="once upon a time"))
    embedded = run(caller, lambda client: client.embed(model="tiny:latest", input="once upon a time"))
    assert list(found.embedding) == pytest.approx(embedded.embeddings[0], abs=1e-6)
    assert caller.post("/api/embeddings", {"prompt": ""}).status_code == 400
