"""Processes that die, signals that come under load, clients that leave: the server stays up and tells the truth."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from paceline.server.supervisor import _Child
from tests.server.process import Served
from tests.server.virtual import (
    assert_nothing_is_left,
    body,
    complete,
    events,
    expected_text,
    get,
    metric,
    open_stream,
    text_of,
    virtual,
    wait_until,
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """For tests that leave it as they found it."""
    with virtual() as served:
        yield served


async def stream_all(served: Served, asked: list[dict[str, Any]], when_begun: Any) -> list[bytes]:
    """Opens all streams, calls `when_begun` when each has had its first event, and reads each to its end."""

    async def read(one: tuple[asyncio.StreamReader, asyncio.StreamWriter], first: bytes) -> bytes:
        reader, _ = one
        raw = first
        while b"data: [DONE]" not in raw[-64:] and b'data: {"error"' not in raw[-1024:]:
            data = await asyncio.wait_for(reader.read(65536), 60)
            if not data:
                break
            raw += data
        return raw

    opened = [await open_stream(served, one) for one in asked]
    try:
        for reader, _ in opened:
            await asyncio.wait_for(reader.readuntil(b"data: "), 60)
        await asyncio.to_thread(when_begun)
        return list(await asyncio.gather(*(read(one, b"data: ") for one in opened)))
    finally:
        for _, writer in opened:
            writer.close()


def test_an_engine_that_is_killed_ends_every_stream_with_an_error_and_comes_back() -> None:
    with virtual() as served:
        (engine,), front_ends = served.children["engine"], served.children["front_end"]
        asked = [body([500 + number] * 8, 8_000) for number in range(64)]
        streams = asyncio.run(stream_all(served, asked, lambda: os.kill(engine, signal.SIGKILL)))
        for number, raw in enumerate(streams):
            found = events(raw)
            assert found[-1]["error"]["code"] == "engine_failed" and "SIGKILL" in found[-1]["error"]["message"]
            said = text_of(found[:-1])
            assert said and expected_text([500 + number] * 8, 8000).startswith(said), "no token was lost or repeated"
        wait_until(lambda: get(served, "/ready").status_code == 200)
        assert complete(served, [7, 8, 9], 12).json()["choices"][0]["text"] == expected_text([7, 8, 9], 12)
        assert served.children["front_end"] == front_ends, "the front end stayed"
        assert served.children["engine"] != [engine]
        assert_nothing_is_left(served)


def test_while_there_is_no_engine_requests_are_told_so_at_once() -> None:
    with virtual() as served:
        (engine,) = served.children["engine"]
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: get(served, "/ready").status_code == 503)
        response = complete(served, [7], 1)
        assert response.status_code in (200, 503)  # 200: it was back already
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "engine_failed" and response.headers["retry-after"]
        assert get(served, "/v1/models").status_code in (200, 503)
        assert "paceline_engine_up" in get(served, "/metrics").text
    assert "Traceback" not in served.output, "that there is no engine is no fault of the front end's"


def test_a_front_end_that_is_killed_takes_nothing_with_it() -> None:
    with virtual("--workers", "2") as served:
        asked = [body([600 + number] * 8, 3_000) for number in range(24)]
        victim = served.children["front_end"][0]
        engines = served.children["engine"]
        streams = asyncio.run(stream_all(served, asked, lambda: os.kill(victim, signal.SIGKILL)))
        whole = [events(raw)[-1] == b"[DONE]" for raw in streams]
        assert any(whole), "the other front end's streams went on"
        for number, raw in enumerate(streams):
            if whole[number]:
                assert text_of(events(raw)) == expected_text([600 + number] * 8, 3_000)
        assert served.children["engine"] == engines
        wait_until(lambda: len(served.children["front_end"]) == 2 and victim not in served.children["front_end"])
        assert complete(served, [7, 8, 9], 12).json()["choices"][0]["text"] == expected_text([7, 8, 9], 12)
        wait_until(lambda: metric(served, "num_requests_running") == 0, why=lambda: get(served, "/v1/requests").text)


def test_a_supervisor_that_is_killed_leaves_nobody_behind() -> None:
    with virtual() as served:
        children = [psutil.Process(pid) for pids in served.children.values() for pid in pids]
        served.process.kill()
        served.process.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with virtual("--shutdown-s", "30", "--virtual-slowdown", "4") as served:
        refused: list[int] = []

        def end() -> None:
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with httpx.Client(timeout=10) as client:
                response = client.post(f"{served.url}/v1/completions", json=body([1], 1))
                refused.append(response.status_code)
                assert response.json()["error"]["code"] == "shutting_down"
                refused.append(client.get(f"{served.url}/ready").status_code)

        asked = [body([700 + number] * 8, 500) for number in range(32)]
        streams = asyncio.run(stream_all(served, asked, end))
        assert refused == [503, 503]
        for number, raw in enumerate(streams):
            found = events(raw)
            assert found[-1] == b"[DONE]" and text_of(found) == expected_text([700 + number] * 8, 500)
        assert served.process.wait(30) == 0, served.output


def test_sigterm_hands_back_what_does_not_finish_in_time() -> None:
    with virtual("--shutdown-s", "0.3", "--virtual-slowdown", "4") as served:
        asked = [body([800 + number] * 8, 20_000) for number in range(16)]
        streams = asyncio.run(stream_all(served, asked, lambda: served.process.send_signal(signal.SIGTERM)))
        assert {events(raw)[-1]["error"]["code"] for raw in streams} == {"shutting_down"}
        assert served.process.wait(30) == 0, served.output


def test_a_second_signal_ends_it_at_once() -> None:
    with virtual("--shutdown-s", "600", "--virtual-slowdown", "4") as served:
        children = [psutil.Process(pid) for pids in served.children.values() for pid in pids]

        def twice() -> None:
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            served.process.send_signal(signal.SIGTERM)

        asyncio.run(stream_all(served, [body([900] * 8, 30_000)], twice))
        assert served.process.wait(20) == 128 + signal.SIGTERM
        assert psutil.wait_procs(children, timeout=20)[1] == []


def test_a_thousand_requests_with_random_aborts_leave_nothing(served: Served) -> None:
    rng = random.Random(1)
    plans = [(rng.randrange(8), rng.randint(1, 200), rng.random()) for _ in range(1000)]

    async def one(number: int, kind: int, tokens: int, patience: float, seats: asyncio.Semaphore) -> bool:
        prompt = [1000 + number % 50] * (8 + number % 37)
        async with seats:
            if kind < 4:  # stays to the end
                reader, writer = await open_stream(served, body(prompt, tokens))
                raw = b""
                while b"data: [DONE]" not in raw[-64:]:
                    data = await asyncio.wait_for(reader.read(65536), 60)
                    assert data, raw[-500:]
                    raw += data
                writer.close()
                assert text_of(events(raw)) == expected_text(prompt, tokens)
                return True
            reader, writer = await open_stream(served, body(prompt, tokens + 2000, stream=kind < 6))
            await asyncio.sleep(patience * 0.05)
            if kind == 7:
                writer.transport.abort()
            else:
                writer.close()
            return False

    async def main() -> list[bool]:
        seats = asyncio.Semaphore(100)
        return list(await asyncio.gather(*(one(n, *plan, seats) for n, plan in enumerate(plans))))

    assert sum(asyncio.run(main())) == sum(kind < 4 for kind, _, _ in plans)
    assert_nothing_is_left(served)


def test_an_idle_server_uses_next_to_no_cpu(served: Served) -> None:
    processes = [psutil.Process(served.process.pid)]
    processes += [psutil.Process(pid) for pids in served.children.values() for pid in pids]
    time.sleep(2.5)  # the look after itself, once

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(2)
    assert used() - before < 0.1


def test_a_client_that_leaves_frees_what_it_held(served: Served) -> None:
    async def main() -> None:
        reader, writer = await open_stream(served, body([77] * 8, 30_000))
        await reader.readuntil(b"data: ")
        writer.transport.abort()

    before = metric(served, "request_success_total", finished_reason="abort")
    asyncio.run(main())
    wait_until(lambda: metric(served, "request_success_total", finished_reason="abort") == before + 1)
    assert_nothing_is_left(served)


def test_many_clients_are_answered_at_once_and_in_full(served: Served) -> None:
    def ask(number: int) -> str:
        return complete(served, [1500 + number] * 4, 40).json()["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(64))) == [expected_text([1500 + number] * 4, 40) for number in range(64)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--executor", "virtual", "--model", "x"), "which runs no model: leave model, load and shape out."),
        (("--executor", "virtual", "--num-pages", "4", "--kv-tokens", "64"), "give one of them."),
        (("--load", "random", "--shape", "no-such"), "no-such"),
        (("--config", "/no/such/file.toml"), "cannot be read"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_ends(arguments: tuple[str, ...], message: str) -> None:
    run = subprocess.run([sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *arguments], check=False,
                         capture_output=True, text=True, timeout=120)  # fmt: skip
    assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr, run.stderr


def test_a_child_that_is_killed_again_keeps_its_status(caplog: pytest.LogCaptureFixture) -> None:
    async def killed() -> int:
        child = _Child("nobody", {}, print)
        child._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", "input()", stdin=asyncio.subprocess.PIPE
        )
        while process.returncode is None:
            child.kill()
            await asyncio.sleep(0)
        return process.returncode

    async def many() -> list[int]:
        return [await killed() for _ in range(20)]

    assert asyncio.run(many()) == [-signal.SIGKILL] * 20
    assert "Unknown child process" not in caplog.text
