"""No request body is handled on the event loop's thread, and none is encoded beyond the context."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.request import FinishReason
from paceline.server import body_workers, engine_process
from paceline.server.body_workers import BodyWorkers, is_long
from paceline.server.errors import ApiError
from paceline.server.limits import (
    LONG_BODY_BYTES,
    LONG_BODY_OBJECTS,
    MAX_DETOKENIZE_TOKENS,
    MAX_LONG_BODIES,
    MAX_TENANT_LONG_BODIES,
    MAX_TOKENIZE_CHARACTERS,
)
from paceline.server.response import LogprobFormatter
from paceline.server.routes import ROUTES
from paceline.text import tokenizer as tokenizer_module
from paceline.text.chat import ChatTemplate
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer, TooManyTokens
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app

LONG = LONG_BODY_BYTES + 1


@pytest.fixture(scope="module")
def caller(engine: Engine) -> Iterator[Caller]:
    caller = Caller(make_app(engine, admin_key="root", log_prompts=True, log_level="info"))
    yield caller
    caller.app.state.workers.close()


def refused(caller: Caller, path: str, body: Any) -> dict[str, Any]:
    response = caller.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# A request to every route with a body, which encodes or decodes text if the route does.
BODIES: dict[str, Any] = {
    CHAT: HELLO,
    COMPLETIONS: {**TEXT, "echo": True, "prompt": [5, 6, 7]},
    "/v1/embeddings": {"model": "tiny", "input": "some text"},
    "/v1/rerank": {"model": "tiny", "query": "some text", "documents": ["a", "b"]},
    "/score": {"model": "tiny", "text_1": "some text", "text_2": ["a", "b"]},
    "/v1/responses": {"model": "tiny", "input": "some text", "max_output_tokens": 2},
    "/v1/messages": {**HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HELLO["messages"]},
    "/api/chat": {"model": "tiny", "messages": HELLO["messages"], "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "some text", "options": {"num_predict": 2}},
    "/api/embed": {"model": "tiny", "input": "some text"},
    "/api/show": {"model": "tiny"},
    "/tokenize": {"messages": HELLO["messages"]},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/batches": {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/admin/cache": {"action": "pin", "name": "never", "prompt": "x", "expires_in_s": 0},
    "/admin/pause": {"mode": "never"},
    "/admin/weights": {"path": "nowhere", "mode": "never"},
    "/admin/trace": {"seconds": 0},
    "/v1/load_lora_adapter": {"lora_name": "one", "lora_path": "one"},
    "/v1/unload_lora_adapter": {"lora_name": "one"},
}
# What some of these bodies name is not there.
REFUSED = ("/admin", "/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def test_every_route_encodes_decodes_and_renders_off_the_event_loop(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            called.append(name)
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (Tokenizer, "encode"),
        (Tokenizer, "encode_batch"),
        (Tokenizer, "decode"),
        (ChatTemplate, "render"),
    ):
        watch(owner, name)
    assert set(BODIES) == {route.path for route in ROUTES if route.request is not None}
    with caplog.at_level("INFO", "paceline.server"):  # log_prompts decodes too
        for path, body in BODIES.items():
            response = caller.request("POST", path, json=body, headers={"Authorization": "Bearer root"})
            may_be_refused = path.startswith(REFUSED) and response.status_code < 500
            assert response.status_code == 200 or may_be_refused, response.text
    assert {"encode", "decode", "render"} <= set(called)


def test_prompt_logprobs_are_formatted_off_the_event_loop(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    original, num_tokens = LogprobFormatter.token_text, 0

    def watched(formatter: LogprobFormatter, token: int) -> str:
        nonlocal num_tokens
        num_tokens += 1
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return original(formatter, token)

    monkeypatch.setattr(LogprobFormatter, "token_text", watched)
    body = {**TEXT, "prompt": [5, 6, 7], "echo": True, "logprobs": 2, "max_tokens": 0, "n": 2}
    for stream in (False, True):
        assert caller.post(COMPLETIONS, {**body, "stream": stream}).status_code == 200
    assert num_tokens >= 2 * 2 * 3


def test_prompt_logprobs_reach_the_front_end_in_small_messages() -> None:
    def prompt_logprobs(count: int) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(index, -1.0) for index in range(count))

    for count, sizes in ((0, [0]), (256, [256]), (257, [256, 1]), (1000, [256, 256, 256, 232])):
        last = OutputDelta("", (9,), FinishReason.LENGTH, prompt_logprobs=prompt_logprobs(count))
        *pieces, end = engine_process._in_pieces(last)
        assert [len(one.prompt_logprobs) for one in (*pieces, end)] == sizes
        assert sum((one.prompt_logprobs for one in (*pieces, end)), ()) == last.prompt_logprobs
        assert replace(end, prompt_logprobs=last.prompt_logprobs) == last
        assert {(one.text, one.token_ids, one.finish_reason) for one in pieces} <= {("", (), None)}


class _CountingCore:
    """A tokenizer core that counts the characters it is given."""

    def __init__(self, core: Any) -> None:
        self._core, self.num_characters = core, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_characters += sum(map(len, texts))
        return self._core.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


@pytest.mark.parametrize("word", ["a ", "a", "\n"])
def test_a_text_far_beyond_the_limit_is_refused_without_being_encoded_whole(word: str) -> None:
    tokenizer = synthetic_tokenizer(20_000)
    tokenizer._core = core = _CountingCore(tokenizer._core)  # type: ignore[assignment]
    with pytest.raises(TooManyTokens, match="the text has more than 8192 tokens"):
        tokenizer.encode(word * 5_000_000, limit=8192)
    assert core.num_characters <= 65_536


def test_a_long_text_with_few_tokens_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = synthetic_tokenizer(20_000)
    monkeypatch.setattr(tokenizer_module, "_CHARACTERS_PER_TOKEN", 2)  # this vocabulary has up to four per token
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", 1000)
    text = "aaaa" * 1000
    assert tokenizer.encode(text, limit=1000) == tokenizer.encode(text) and len(tokenizer.encode(text)) == 1000
    with pytest.raises(TooManyTokens):
        tokenizer.encode(text * 8, limit=1000)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {**TEXT, "prompt": "a " * 50_000}, "prompt"),
        (COMPLETIONS, {**TEXT, "prompt": ["a", "a " * 50_000]}, "prompt"),
        (CHAT, {**HELLO, "messages": [{"role": "user", "content": "a " * 50_000}]}, "messages"),
        (CHAT, {**HELLO, "messages": HELLO["messages"] * 2049}, "messages"),
        ("/v1/embeddings", {"model": "tiny", "input": "a " * 50_000}, "input"),
        (COMPLETIONS, {**TEXT, "prompt": [7] * 200_000}, "prompt"),  # a long body, so in the other process
        (COMPLETIONS, {**TEXT, "prompt": "a " * 200_000}, "prompt"),
        (CHAT, {**HELLO, "messages": [{"role": "user", "content": "a " * 200_000}]}, "messages"),
    ],
)
def test_a_prompt_beyond_the_context_is_400_on_every_route(caller: Caller, path: str, body: Any, param: str) -> None:
    error = refused(caller, path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "tokens: this model's maximum context length is 2048 tokens, for prompt and output " in error["message"]


def test_a_pin_beyond_the_context_is_400(caller: Caller) -> None:
    body = {"action": "pin", "name": "x", "prompt": "a " * 50_000}
    response = caller.request("POST", "/admin/cache", json=body, headers={"Authorization": "Bearer root"})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_long_body_has_the_same_response_as_a_short_one(caller: Caller) -> None:
    padding = {"metadata": {"padding": "x" * LONG}}
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    for path, body in (
        (COMPLETIONS, {**TEXT, "logprobs": 2, "echo": True, "n": 2, "seed": 1}),
        (CHAT, {**HELLO, "tools": tools, "logprobs": True, "top_logprobs": 2}),
        ("/v1/embeddings", {"model": "tiny", "input": ["one", "two"]}),
    ):
        # Salts, so that the second does not find the prefix of the first in the cache.
        short, long = caller.ok(path, body, cache_salt="1"), caller.ok(path, body, cache_salt="2", **padding)
        for found in (short, long):
            for name in ("id", "created"):
                found.pop(name, None)
        assert short == long
    assert caller.events(COMPLETIONS, TEXT, **padding)[-1] == "[DONE]"
    assert caller.ok("/tokenize", {"prompt": "x y", **padding}) == caller.ok("/tokenize", {"prompt": "x y"})


def test_a_body_with_many_objects_is_a_long_one(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = HELLO["messages"] * (LONG_BODY_OBJECTS // len(HELLO["messages"]) + 1)
    body = json.dumps({**HELLO, "messages": messages}).encode()
    assert len(body) < LONG_BODY_BYTES and is_long(body) and is_long(bytearray(body))
    assert not is_long(json.dumps({**HELLO, "messages": messages[:-100]}).encode())
    handled = []
    monkeypatch.setattr(caller.app.state.workers, "_run_in_process", lambda *args: handled.append(args))

    async def use(client: httpx.AsyncClient) -> None:
        await caller.app.state.workers.run(operator.neg, body)

    caller.run(use)
    assert [args[1] for args in handled] == [body]


def test_braces_in_strings_are_not_counted_as_objects() -> None:
    code = 'if (a) { print("{"); } else { b = {"c": "\\"}; }' * 1000
    body = json.dumps({**TEXT, "prompt": code, "user": '"'}).encode()
    assert body.count(b"{") > LONG_BODY_OBJECTS and len(body) < LONG_BODY_BYTES and not is_long(body)


def test_tokenize_is_exact_up_to_its_limit_and_refuses_more(caller: Caller) -> None:
    text = "once upon a time " * 20_000
    assert caller.ok("/tokenize", {"prompt": text})["tokens"] == caller.app.state.tokenizer.encode(text)
    error = refused(caller, "/tokenize", {"prompt": "x" * (MAX_TOKENIZE_CHARACTERS + 1)})
    assert error["message"] == "The text has 1048577 characters: give at most 1048576." and error["param"] == "prompt"
    error = refused(caller, "/detokenize", {"tokens": [5] * (MAX_DETOKENIZE_TOKENS + 1)})
    assert error["message"] == "tokens has 1048577 entries: give at most 1048576."


def test_errors_of_a_long_body_quote_little_of_it(caller: Caller) -> None:
    for changes in (
        {"y" * LONG: 1},
        {"stop": ["x" * LONG]},
        {"bad_words": ["x" * LONG]},
        {"model": "m" * LONG},
        {"guided_regex": "x" * 300_000},
        {"guided_choice": [1] * LONG},
        {"logit_bias": {"1" * LONG: 1}},
        {"temperature": "x" * LONG},
        {"prompt": [[]] * LONG},
    ):
        response = caller.post(COMPLETIONS, {**TEXT, **changes})
        assert response.status_code in (400, 404), response.text[:300]
        assert len(response.content) < 1500 and response.json()["error"]["message"].endswith("."), response.text


class HeldProcess:
    """Stands in for the process of the long bodies: handles one when it is released."""

    def __init__(self, workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handled: list[bytes] = []
        self._turns = threading.Semaphore(0)
        monkeypatch.setattr(workers, "_run_in_process", self._handle)

    def _handle(self, function: Any, body: bytes, args: tuple[Any, ...]) -> Any:
        self._turns.acquire()
        self.handled.append(bytes(body[:1]))
        raise ApiError("held")

    def release(self, count: int) -> None:
        self._turns.release(count)


LONG_TEXT = json.dumps({**TEXT, "metadata": {"padding": "x" * LONG}}).encode()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_tenant_with_many_long_bodies_gets_503_and_the_others_are_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(make_app(engine, tenants=[TenantConfig(name=name, keys=(name,)) for name in ("one", "two")]))
    workers = caller.app.state.workers
    process = HeldProcess(workers, monkeypatch)

    async def use(client: httpx.AsyncClient) -> None:
        def post(tenant: str, path: str = COMPLETIONS, content: bytes = LONG_TEXT) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(
                client.post(path, content=content, headers={"Authorization": f"Bearer {tenant}"})
            )

        waiting = [post("one") for _ in range(MAX_TENANT_LONG_BODIES)]
        await until(lambda: workers._num_long["one"] == MAX_TENANT_LONG_BODIES)
        for path in (COMPLETIONS, "/tokenize"):
            refused = await post("one", path)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too_many_long_bodies"
            assert refused.json()["error"]["message"].startswith("16 request bodies of tenant one of more than 131072")
        assert (await post("one", content=json.dumps(TEXT).encode())).status_code == 200
        waiting.append(post("two"))
        await until(lambda: workers._num_long["two"] == 1)
        process.release(len(waiting))
        assert {(await response).status_code for response in waiting} == {400}
        assert workers._num_long.total() == 0

    caller.run(use)
    workers.close()


def test_long_bodies_of_all_tenants_together_are_limited(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = caller.app.state.workers
    process = HeldProcess(workers, monkeypatch)

    async def use(client: httpx.AsyncClient) -> None:
        tasks = [
            asyncio.create_task(workers.run(operator.neg, b"x" * LONG, tenant=str(index % 8)))
            for index in range(MAX_LONG_BODIES)
        ]
        await until(lambda: workers._num_long.total() == MAX_LONG_BODIES)
        refused = await client.post(COMPLETIONS, content=LONG_TEXT)
        assert refused.status_code == 503 and refused.json()["error"]["message"].startswith("64 request bodies of more")
        process.release(len(tasks))
        await asyncio.gather(*tasks, return_exceptions=True)

    caller.run(use)


def test_tenants_take_turns_with_long_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = BodyWorkers(synthetic_tokenizer(300), 300)
    process = HeldProcess(workers, monkeypatch)

    async def use() -> None:
        tasks = []
        for tenant in "aaaabbc":
            tasks.append(asyncio.create_task(workers.run(operator.neg, tenant.encode() * LONG, tenant=tenant)))
            await asyncio.sleep(0)  # it takes its place in the queue
        tasks[1].cancel()  # while it waits
        process.release(len(tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert workers._num_long.total() == 0
        last = asyncio.create_task(workers.run(operator.neg, b"z" * LONG, tenant="z"))
        process.release(1)
        await asyncio.gather(last, return_exceptions=True)

    asyncio.run(use())
    workers.close()
    assert b"".join(process.handled) == b"abcabaz"


def test_a_dead_process_fails_its_request_and_is_replaced(caller: Caller) -> None:
    workers = caller.app.state.workers
    long = {**TEXT, "metadata": {"padding": "x" * LONG}}
    caller.ok(COMPLETIONS, long)
    first = workers._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    response = caller.post(COMPLETIONS, long)
    assert response.status_code == 503 and response.json()["error"]["code"] == "body_process_died"
    caller.ok(COMPLETIONS, long)
    assert workers._process is not first


def test_a_bug_in_the_process_is_500_and_logged(capfd: pytest.CaptureFixture[str]) -> None:
    workers = BodyWorkers(synthetic_tokenizer(300), 300)
    try:
        with pytest.raises(ApiError, match="Internal server error"):
            asyncio.run(workers.run(operator.neg, b"x" * LONG))
    finally:
        workers.close()
    assert "TypeError: bad operand type for unary -" in capfd.readouterr().err


def test_the_process_ends_with_its_front_end() -> None:
    process = body_workers._start(300)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
