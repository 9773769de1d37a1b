"""Disconnects, full queues, engine failures and shutdown, with the app in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.engine import Engine
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app, tiny_engine
from tests.server.virtual import wait_until

ENDLESS = {"model": "tiny", "prompt": "go on", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def own_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines that a test may break."""
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(tiny_engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def health(caller: Caller) -> dict[str, Any]:
    return caller.request("GET", "/health").json()


async def leave_after(
    app: Any, body: dict[str, Any], num_events: int, has_arrived: Callable[[], bool] = lambda: True
) -> list[dict[str, Any]]:
    """Calls the app and disconnects after `num_events` of its messages; with 0, once `has_arrived` is true."""
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    to_receive = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if to_receive:
            return to_receive.pop()
        if num_events == 0:
            while not has_arrived():
                await asyncio.sleep(0.01)
        else:
            await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == num_events:
            gone.set()

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    await asyncio.wait_for(app(scope, receive, send), 120)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["one", ["one", "two", "three"]], ids=["one", "three"])
def test_a_disconnect_aborts_all_jobs_of_a_request(
    own_engine: Callable[..., Engine], stream: bool, prompts: Any
) -> None:
    engine = own_engine()
    caller = Caller(make_app(engine))
    count = 1 if isinstance(prompts, str) else 3
    body = {**ENDLESS, "prompt": prompts, "stream": stream}
    sent = asyncio.run(
        leave_after(caller.app, body, 5 if stream else 0, lambda: len(engine.scheduler.requests) == count)
    )
    assert len(sent) < 500, "it continued without a client"
    wait_until(lambda: health(caller)["num_running"] == 0)
    found = health(caller)
    assert found["num_finished"]["abort"] == count and found["num_finished"]["length"] == 0
    assert found["kv_tokens_free"] == found["kv_tokens"]
    caller.ok(CHAT, HELLO)


def test_a_disconnect_removes_a_waiting_request(own_engine: Callable[..., Engine]) -> None:
    engine = own_engine(max_running=1)
    caller = Caller(make_app(engine))

    def num_requests() -> int:
        return len(engine.scheduler.requests)

    async def main() -> None:
        leave_first = asyncio.Event()
        first = asyncio.create_task(leave_after(caller.app, ENDLESS, 0, leave_first.is_set))
        while num_requests() < 1:
            await asyncio.sleep(0.01)
        assert await leave_after(caller.app, ENDLESS, 0, lambda: num_requests() == 2) == []
        leave_first.set()
        await first

    asyncio.run(main())
    wait_until(lambda: health(caller)["num_finished"]["abort"] == 2)
    assert health(caller)["num_waiting"] == 0


def test_one_refused_prompt_aborts_the_others(own_engine: Callable[..., Engine]) -> None:
    engine = own_engine(max_running=1, max_waiting=2)
    caller = Caller(make_app(engine))
    response = caller.post(COMPLETIONS, ENDLESS, prompt=["a"] * 100)
    assert response.status_code == 429
    wait_until(lambda: health(caller)["num_running"] == 0)
    assert health(caller)["num_waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_retry_after(own_engine: Callable[..., Engine], stream: bool) -> None:
    engine = own_engine(max_running=1, max_waiting=1)
    caller = Caller(make_app(engine))

    async def flood(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {**TEXT, "stream": stream, "max_tokens": 100, "ignore_eos": True}
        return list(await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(12))))

    responses = caller.run(flood)
    refused = [response for response in responses if response.status_code != 200]
    assert 0 < len(refused) < 12
    for response in refused:
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
    caller.ok(CHAT, HELLO)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_displaced_from_the_queue_gets_429_with_retry_after(
    own_engine: Callable[..., Engine], stream: bool
) -> None:
    engine = own_engine(max_running=1, max_waiting=1, full_queue="yield")
    caller = Caller(make_app(engine))
    body = {**TEXT, "stream": stream, "ignore_eos": True}

    async def main(client: httpx.AsyncClient) -> list[httpx.Response]:
        async def send(num_before: int, **changes: Any) -> httpx.Response:
            while len(engine.scheduler.requests) < num_before:
                await asyncio.sleep(0.005)
            return await client.post(COMPLETIONS, json={**body, **changes})

        low = asyncio.create_task(send(1, priority=-2, max_tokens=2))
        high = asyncio.create_task(send(2, priority=-1, max_tokens=2))
        running = await send(0, max_tokens=200)
        return [running, await low, await high]

    running, low, high = caller.run(main)
    assert (running.status_code, low.status_code, high.status_code) == (200, 429, 200), low.text
    assert int(low.headers["retry-after"]) >= 1
    assert low.json()["error"]["code"] == "queue_full" and "of higher priority" in low.json()["error"]["message"]
    assert health(caller)["num_finished"]["displaced"] == 1


def break_after(engine: Engine, num_passes: int) -> None:
    executor = engine.executor
    assert isinstance(executor, CpuExecutor)
    full = executor.runner.run
    left = [num_passes]

    def run(plan: Any, masks: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the device is on fire")
        return full(plan, masks)

    executor.runner.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_ends_every_response_with_an_error(own_engine: Callable[..., Engine], stream: bool) -> None:
    engine = own_engine()
    break_after(engine, 5)
    caller = Caller(make_app(engine))
    response = caller.post(COMPLETIONS, ENDLESS, stream=stream)
    if stream:  # the stream has started: the error is its last event, without [DONE]
        assert response.status_code == 200
        last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    else:
        assert response.status_code == 503
        last = response.json()
    assert last["error"]["code"] == "engine_failed" and "on fire" in last["error"]["message"]
    after = caller.post(CHAT, HELLO)
    assert after.status_code == 503 and after.json()["error"]["code"] == "engine_failed"
    response = caller.request("GET", "/health")
    assert response.status_code == 503
    assert response.json()["status"] == "failed" and "on fire" in response.json()["failure"]


def test_closing_the_engine_ends_streams_with_an_error(own_engine: Callable[..., Engine]) -> None:
    engine = own_engine()
    caller = Caller(make_app(engine))

    async def main(client: httpx.AsyncClient) -> httpx.Response:
        def close_while_streaming() -> None:
            wait_until(lambda: engine.progress.num_passes > 20)
            engine.close()

        closing = asyncio.get_running_loop().run_in_executor(None, close_while_streaming)
        response = await client.post(COMPLETIONS, json={**ENDLESS, "prompt": ["a"] * 8, "stream": True})
        await closing
        return response

    response = caller.run(main)
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "shutting_down"


def test_an_internal_error_is_500_without_details(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("paceline.server.chat.check_messages", broken)
    response = caller.post(CHAT, HELLO)
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "Internal server error: see the server's log.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "secret" in caplog.text
