"""No request body is handled on the event loop's thread, and none is encoded beyond the context."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.request import FinishReason
from paceline.server import body_workers, engine_process, process_watch
from paceline.server.app import App
from paceline.server.body_workers import BodyWorkers, is_long
from paceline.server.errors import ApiError
from paceline.server.http import AsgiEvent
from paceline.server.limits import (
    LONG_BODY_BYTES,
    LONG_BODY_OBJECTS,
    MAX_DETOKENIZE_TOKENS,
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
    "/api/embeddings": {"model": "tiny", "prompt": "some text"},
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
    assert not is_long(json.dumps({**HELLO, "messages": messages[:-3]}).encode())
    handled = []
    monkeypatch.setattr(caller.app.state.workers, "_run_in_process", lambda *args: handled.append(args))

    async def use(client: httpx.AsyncClient) -> None:
        await caller.app.state.workers.run(operator.neg, body)

    caller.run(use)
    assert [args[1] for args in handled] == [body]


def test_braces_in_strings_are_not_counted_as_objects() -> None:
    code = 'if (a) { print("{"); } else { b = {"c": "\\"}; }' * 20
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
    """Stands in for the processes of the long bodies: handles one when it is released, which its last byte names."""

    def __init__(self, workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handled: list[bytes] = []
        self.num_taken = 0
        self._released = defaultdict[bytes, threading.Semaphore](lambda: threading.Semaphore(0))
        monkeypatch.setattr(workers, "_run_in_process", self._handle)

    def _handle(self, function: Any, body: bytes, args: tuple[Any, ...]) -> Any:
        self.num_taken += 1
        self._released[bytes(body[-1:])].acquire()
        self.handled.append(bytes(body[-1:]))
        raise ApiError("held")

    def release(self, names: bytes) -> None:
        for name in names:
            self._released[bytes([name])].release()

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Runs a test, and holds nothing after it: a failure must not become a deadlock."""

        async def bounded() -> None:
            try:
                async with asyncio.timeout(60):
                    await test
            finally:
                self.release(b"} 123" * 100)

        asyncio.run(bounded())


LONG_TEXT = json.dumps({**TEXT, "metadata": {"padding": "x" * LONG}}).encode()
TENANTS = [TenantConfig(name=name, keys=(name,)) for name in ("one", "two")]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


class Visit:
    """A request whose client may leave."""

    def __init__(self, app: App, body: bytes, path: str = COMPLETIONS, key: str = "") -> None:
        self.status = 0
        self._unread, self._left = [body], asyncio.Event()
        headers = [(b"authorization", b"Bearer " + key.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> AsgiEvent:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiEvent) -> None:
        self.status = message.get("status", self.status)

    async def leave(self) -> None:
        self._left.set()
        await self.task


@pytest.mark.parametrize("tenant", ["one", None])
def test_slow_short_calls_of_one_tenant_leave_a_thread(tenant: str | None) -> None:
    workers, may_end, begun = BodyWorkers(synthetic_tokenizer(300), 300), threading.Event(), list[int]()

    def slow(number: int) -> None:
        begun.append(number)
        may_end.wait(60)

    async def use() -> None:
        calls = [asyncio.create_task(workers.run_in_thread(slow, number, tenant=tenant)) for number in range(8)]
        async with asyncio.timeout(30):
            assert await workers.run_in_thread(len, b"abc", tenant="two") == 3
            await until(lambda: len(begun) == 2)  # without API keys all clients are one tenant, and none waits for one
        may_end.set()
        await asyncio.gather(*calls)

    try:
        asyncio.run(use())
    finally:
        may_end.set()
        workers.close()


def test_a_flood_of_bodies_does_not_delay_another_tenant(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(engine, tenants=TENANTS)
    process = HeldProcess(app.state.workers, monkeypatch)

    async def use() -> None:
        flood = [Visit(app, LONG_TEXT + b" ", key="one") for _ in range(8)]
        await until(lambda: process.num_taken == 1)
        short = Visit(app, json.dumps(TEXT).encode(), key="two")
        await short.task
        assert short.status == 200
        long = Visit(app, LONG_TEXT, key="two")
        process.release(b"}")
        await long.task
        assert process.handled == [b"}"] and process.num_taken == 2, "beside the first one of the flood"
        process.release(b" " * len(flood))
        await asyncio.gather(*(one.task for one in flood))

    process.run(use())


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_body_whose_client_left_while_it_waited_is_not_handled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    app = make_app(engine)
    process = HeldProcess(app.state.workers, monkeypatch)

    async def use() -> None:
        first = Visit(app, LONG_TEXT + b"1", path)
        await until(lambda: process.num_taken == 1)
        waiting = [Visit(app, LONG_TEXT + digit, path) for digit in (b"2", b"3")]
        await asyncio.sleep(0.1)
        await waiting[0].leave()
        assert waiting[0].status == 0 and app.state.counters.disconnects == 1
        process.release(b"123")
        await asyncio.gather(first.task, waiting[1].task)

    process.run(use())
    assert process.handled == [b"1", b"3"]


def test_bodies_that_wait_have_few_bytes_of_a_tenant_and_of_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_workers, "MAX_TENANT_QUEUED_BODY_BYTES", 2 * len(LONG_TEXT))
    monkeypatch.setattr(body_workers, "MAX_QUEUED_BODY_BYTES", 3 * len(LONG_TEXT))
    caller = Caller(make_app(engine, tenants=TENANTS, admin_key="root"))
    process = HeldProcess(caller.app.state.workers, monkeypatch)

    async def use(client: httpx.AsyncClient) -> None:
        def post(tenant: str, path: str = COMPLETIONS) -> asyncio.Task[httpx.Response]:
            headers = {"Authorization": f"Bearer {tenant}"}
            return asyncio.create_task(client.post(path, content=LONG_TEXT, headers=headers))

        async def is_refused(tenant: str, path: str) -> str:
            refused = await post(tenant, path)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too_many_bodies"
            return refused.json()["error"]["message"]

        waiting = [post("one"), post("one")]
        await asyncio.sleep(0.1)
        for path in (COMPLETIONS, "/tokenize"):
            assert "of tenant one with" in await is_refused("one", path)
        waiting.append(post("two"))
        await asyncio.sleep(0.1)
        assert "of all tenants" in await is_refused("root", "/tokenize")
        process.release(b"}" * (len(waiting) + 1))
        assert {(await response).status_code for response in waiting} == {400}
        assert (await post("one")).status_code == 400, "there is room again"

    caller.run(use)


def test_a_body_larger_than_the_limit_is_handled_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_workers, "MAX_TENANT_QUEUED_BODY_BYTES", 10)
    assert Caller(make_app(engine)).ok(COMPLETIONS, TEXT)


def test_a_tenant_has_max_requests_bodies_in_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(engine, tenants=[TenantConfig(name="one", keys=("one",), max_requests=1)])
    process = HeldProcess(app.state.workers, monkeypatch)

    async def use() -> None:
        first = Visit(app, LONG_TEXT, key="one")
        await until(lambda: process.num_taken == 1)
        second = Visit(app, LONG_TEXT, key="one")
        await second.task
        assert second.status == 429 and app.state.counters.refused["one"] == 1
        process.release(b"}}")
        await first.task
        third = Visit(app, LONG_TEXT, key="one")
        await third.task
        assert third.status == 400, "it was handled"

    process.run(use())


def limited(engine: Engine, tokens_per_minute: int) -> Callable[[Any], httpx.Response]:
    tenant = TenantConfig(name="one", keys=("one",), tokens_per_minute=tokens_per_minute)
    caller = Caller(make_app(engine, tenants=[tenant]))
    return lambda body: caller.request("POST", COMPLETIONS, json=body, headers={"Authorization": "Bearer one"})


def test_a_prompt_that_is_refused_is_charged_to_its_tenant(engine: Engine) -> None:
    post = limited(engine, 1000)
    assert post({**TEXT, "prompt": "a " * 50_000}).json()["error"]["code"] == "context_length_exceeded"
    response = post(TEXT)
    assert response.status_code == 429 and "tokens_per_minute" in response.json()["error"]["message"]
    assert 60 * 20 < int(response.headers["retry-after"]) < 60 * 30, "100,000 characters are about 25,000 tokens"


def test_a_prompt_that_is_accepted_is_charged_its_tokens_and_not_its_bytes(engine: Engine) -> None:
    post = limited(engine, 1000)
    padding = {"metadata": {"padding": "x" * 6000}}
    assert [post({**TEXT, **padding, "max_tokens": 1}).status_code for _ in range(5)] == [200] * 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a " * 2500}),
        ("/detokenize", {"tokens": [5] * 2500}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a " * 2500}]}),
    ],
)
def test_tokenize_counts_against_the_limits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    tenants = [TenantConfig(name="one", keys=("one",), tokens_per_minute=1000), TenantConfig(name="two", keys=("two",))]
    app = make_app(engine, tenants=tenants, admin_key="root")
    caller = Caller(app)

    def post(key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return caller.request("POST", path, json={"model": "tiny", **body}, headers=headers)

    assert post("one").status_code == 200
    response = post("one")
    assert response.status_code == 429 and "tokens_per_minute" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 1 and app.state.counters.refused["one"] == 1
    assert post("two").status_code == 200 and post("root").status_code == 200 == post("root").status_code


def test_tokenize_counts_as_one_of_max_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(engine, tenants=[TenantConfig(name="one", keys=("one",), max_requests=1)])
    process = HeldProcess(app.state.workers, monkeypatch)
    text = json.dumps({"model": "tiny", "prompt": "a " * LONG}).encode()

    async def use() -> None:
        first = Visit(app, text, "/tokenize", "one")
        await until(lambda: process.num_taken == 1)
        second = Visit(app, LONG_TEXT, key="one")
        await second.task
        assert second.status == 429
        process.release(b"}")
        await first.task

    process.run(use())


def test_output_is_charged_too(engine: Engine) -> None:
    post = limited(engine, 60)
    assert post({**TEXT, "prompt": [5, 6], "max_tokens": 90, "ignore_eos": True}).status_code == 200
    assert post({**TEXT, "prompt": [5, 6], "max_tokens": 1}).status_code == 429


def test_the_process_of_a_front_end_is_started_before_the_first_long_body() -> None:
    workers = BodyWorkers(synthetic_tokenizer(300), 300)
    workers.start()
    assert asyncio.run(workers.run(len, b"x" * LONG)) == LONG
    (process,) = workers._processes
    assert process.poll() is None
    workers.close()
    assert process.poll() is not None


def test_a_dead_process_fails_its_request_and_is_replaced(caller: Caller) -> None:
    workers = caller.app.state.workers
    long = {**TEXT, "metadata": {"padding": "x" * LONG}}
    caller.ok(COMPLETIONS, long)
    (first,) = workers._processes
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    response = caller.post(COMPLETIONS, long)
    assert response.status_code == 503 and response.json()["error"]["code"] == "body_process_died"
    caller.ok(COMPLETIONS, long)
    assert workers._processes and first not in workers._processes


@pytest.mark.parametrize("long", [{"padding": "x" * LONG}, {"padding": "x" * (1 << 20)}])
def test_a_process_that_is_stopped_is_replaced(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, long: dict[str, str]
) -> None:
    monkeypatch.setattr(process_watch, "CHECK_S", 0.05)
    workers = caller.app.state.workers
    caller.ok(COMPLETIONS, TEXT, metadata=long)
    (first,) = workers._processes
    os.kill(first.pid, signal.SIGSTOP)
    response = caller.post(COMPLETIONS, {**TEXT, "metadata": long})  # the larger one does not fit into the pipe
    assert response.status_code == 503 and response.json()["error"]["code"] == "body_process_died"
    assert first.poll() == -signal.SIGKILL and "has not responded for" in caplog.text
    caller.ok(COMPLETIONS, TEXT, metadata=long)


def evaluated(code: str) -> bytes:
    """A long body that `eval` evaluates in the process."""
    return code.encode() + b" #" + b"x" * LONG


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("__import__('threading').Event().wait()", "has not responded for"),
        ("sum(iter(int, 1))", "has used 0.2 s of CPU time"),
    ],
)
def test_a_process_that_hangs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str, why: str
) -> None:
    workers = BodyWorkers(synthetic_tokenizer(300), 300)
    try:
        assert asyncio.run(workers.run(len, b"x" * LONG)) == LONG
        with monkeypatch.context() as patch:
            patch.setattr(process_watch, "CHECK_S", 0.05)
            patch.setattr(process_watch, "MAX_CPU_S", 0.2)
            with pytest.raises(ApiError, match="died or hung"):
                asyncio.run(workers.run(eval, evaluated(code)))
        assert why in caplog.text
        assert asyncio.run(workers.run(len, b"x" * LONG)) == LONG
    finally:
        workers.close()


def test_a_process_that_works_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_watch, "CHECK_S", 0.1)
    monkeypatch.setattr(process_watch, "MAX_IDLE_CHECKS", 10)
    workers = BodyWorkers(synthetic_tokenizer(300), 300)
    try:
        work = evaluated("sum(range(60_000_000))")  # takes longer than these checks
        assert asyncio.run(workers.run(eval, work)) == 30_000_000 * 59_999_999
    finally:
        workers.close()


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
