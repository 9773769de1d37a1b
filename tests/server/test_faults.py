"""Clients that go away, queues that are full, an engine that breaks, a server that ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.engine import Engine
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, app_of, tiny_engine

ENDLESS = {"model": "tiny", "prompt": "go on", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def own_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines that a test may break."""
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(tiny_engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def health(caller: Caller) -> dict[str, Any]:
    return caller.request("GET", "/health").json()


async def leave_after(app: Any, body: dict[str, Any], num_events: int) -> list[dict[str, Any]]:
    """Calls the app by hand and disconnects after so many of its messages (0: as soon as the body is sent)."""
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    to_receive = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if to_receive:
            return to_receive.pop()
        if num_events == 0:
            await asyncio.sleep(0.05)
        else:
            await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == num_events:
            gone.set()

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    await asyncio.wait_for(app(scope, receive, send), 20)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["one", ["one", "two", "three"]], ids=["one", "three"])
def test_a_client_that_goes_away_aborts_its_requests(
    own_engine: Callable[..., Engine], stream: bool, prompts: Any
) -> None:
    engine = own_engine()
    caller = Caller(app_of(engine))
    count = 1 if isinstance(prompts, str) else 3
    sent = asyncio.run(
        leave_after(caller.app, {**ENDLESS, "prompt": prompts, "stream": stream}, num_events=5 if stream else 0)
    )
    assert len(sent) < 500, "it went on for nobody"
    wait_until(lambda: health(caller)["num_running"] == 0)
    found = health(caller)
    assert found["num_finished"]["abort"] == count and found["num_finished"]["length"] == 0
    assert found["kv_tokens_free"] == found["kv_tokens"]
    caller.ok(CHAT, HELLO)


def test_a_client_that_leaves_while_it_waits_is_forgotten(own_engine: Callable[..., Engine]) -> None:
    engine = own_engine(max_running=1)
    caller = Caller(app_of(engine))

    async def main() -> None:
        first = asyncio.create_task(leave_after(caller.app, {**ENDLESS, "stream": True}, num_events=200))
        await asyncio.sleep(0.1)
        assert not first.done()
        assert await leave_after(caller.app, ENDLESS, num_events=0) == []
        await first

    asyncio.run(main())
    wait_until(lambda: health(caller)["num_finished"]["abort"] == 2)
    assert health(caller)["num_waiting"] == 0


def test_one_refused_prompt_of_many_aborts_the_others(own_engine: Callable[..., Engine]) -> None:
    engine = own_engine(max_running=1, max_waiting=2)
    caller = Caller(app_of(engine))
    response = caller.post(COMPLETIONS, ENDLESS, prompt=["a"] * 100)
    assert response.status_code == 429
    wait_until(lambda: health(caller)["num_running"] == 0)
    assert health(caller)["num_waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_and_says_when_to_come_again(own_engine: Callable[..., Engine], stream: bool) -> None:
    engine = own_engine(max_running=1, max_waiting=1)
    caller = Caller(app_of(engine))

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


def break_after(engine: Engine, num_passes: int) -> None:
    executor = engine.executor
    assert isinstance(executor, CpuExecutor)
    whole = executor.device.run
    left = [num_passes]

    def run(plan: Any, masks: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the device is on fire")
        return whole(plan, masks)

    executor.device.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks_ends_every_answer_with_an_error(own_engine: Callable[..., Engine], stream: bool) -> None:
    engine = own_engine()
    break_after(engine, 5)
    caller = Caller(app_of(engine))
    response = caller.post(COMPLETIONS, ENDLESS, stream=stream)
    if stream:  # it had begun: the error is its last event, and there is no [DONE]
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


def test_an_engine_that_is_closed_ends_its_streams_with_an_error(own_engine: Callable[..., Engine]) -> None:
    engine = own_engine()
    caller = Caller(app_of(engine))

    async def main(client: httpx.AsyncClient) -> httpx.Response:
        asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.3), engine.close()))
        return await client.post(COMPLETIONS, json={**ENDLESS, "prompt": ["a"] * 8, "stream": True})

    response = caller.run(main)
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "shutting_down"


def test_a_mistake_of_ours_is_500_and_says_nothing_of_the_inside(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("paceline.server.app.ChatResponse", broken)
    response = caller.post(CHAT, HELLO)
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "the server made a mistake: its log says more.", "type": "server_error", "param": None,
        "code": "internal_error",
    }  # fmt: skip
    assert "secret" in caplog.text
