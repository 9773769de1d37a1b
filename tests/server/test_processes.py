"""Killed processes, signals under load, disconnects: the server stays up and reports what happened."""

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
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.server.process_messages import FromFrontEnd, LineDecoder, ModelSource
from paceline.server.supervisor import ChildProcess
from paceline.text.synthetic import synthetic_tokenizer
from tests.server.process import ServerProcess
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
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """For tests that leave it unchanged."""
    with virtual() as server:
        yield server


async def stream_all(server: ServerProcess, payload: list[dict[str, Any]], when_started: Any) -> list[bytes]:
    """Opens all streams, calls `when_started` after the first event of each, and reads all to their end."""

    async def read(one: tuple[asyncio.StreamReader, asyncio.StreamWriter], first: bytes) -> bytes:
        reader, _ = one
        raw = first
        while b"data: [DONE]" not in raw[-64:] and b'data: {"error"' not in raw[-1024:]:
            data = await asyncio.wait_for(reader.read(65536), 300)
            if not data:
                break
            raw += data
        return raw

    opened = [await open_stream(server, one) for one in payload]
    try:
        for reader, _ in opened:
            await asyncio.wait_for(reader.readuntil(b"data: "), 300)
        await asyncio.to_thread(when_started)
        return list(await asyncio.gather(*(read(one, b"data: ") for one in opened)))
    finally:
        for _, writer in opened:
            writer.close()


def test_killing_the_engine_ends_every_stream_with_an_error_and_restarts_it() -> None:
    with virtual() as server:
        (engine,), front_ends = server.children["engine"], server.children["front_end"]
        payload = [body([500 + number] * 8, 8_000) for number in range(64)]
        streams = asyncio.run(stream_all(server, payload, lambda: os.kill(engine, signal.SIGKILL)))
        for number, raw in enumerate(streams):
            found = events(raw)
            assert found[-1]["error"]["code"] == "engine_failed" and "SIGKILL" in found[-1]["error"]["message"]
            output = text_of(found[:-1])
            assert output and expected_text([500 + number] * 8, 8000).startswith(output), (
                "no token was lost or repeated"
            )
        wait_until(lambda: get(server, "/ready").status_code == 200)
        assert complete(server, [7, 8, 9], 12).json()["choices"][0]["text"] == expected_text([7, 8, 9], 12)
        assert server.children["front_end"] == front_ends, "the front end was not restarted"
        assert server.children["engine"] != [engine]
        assert_nothing_is_left(server)


def test_requests_without_an_engine_are_503_at_once() -> None:
    with virtual() as server:
        (engine,) = server.children["engine"]
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: get(server, "/ready").status_code == 503)
        response = complete(server, [7], 1)
        assert response.status_code in (200, 503)  # 200: the engine was restarted already
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "engine_failed" and response.headers["retry-after"]
        assert get(server, "/v1/models").status_code in (200, 503)
        assert "paceline_engine_up" in get(server, "/metrics").text
    assert "Traceback" not in server.output, "the exit of another process is an expected event"


def test_killing_a_front_end_does_not_affect_the_others() -> None:
    with virtual("--workers", "2") as server:
        payload = [body([600 + number] * 8, 1_500) for number in range(24)]
        victim = server.children["front_end"][0]
        engines = server.children["engine"]
        streams = asyncio.run(stream_all(server, payload, lambda: os.kill(victim, signal.SIGSEGV)))
        completed = [events(raw)[-1] == b"[DONE]" for raw in streams]
        assert any(completed), "the other front end's streams continued"
        for number, raw in enumerate(streams):
            if completed[number]:
                assert text_of(events(raw)) == expected_text([600 + number] * 8, 1_500)
        assert server.children["engine"] == engines
        wait_until(lambda: len(server.children["front_end"]) == 2 and victim not in server.children["front_end"])
        assert "Fatal Python error: Segmentation fault" in server.output and "front_end.py" in server.output
        assert "front-end-0 exited unexpectedly: signal 11, SIGSEGV" in server.output
        assert complete(server, [7, 8, 9], 12).json()["choices"][0]["text"] == expected_text([7, 8, 9], 12)
        wait_until(lambda: metric(server, "num_requests_running") == 0, why=lambda: get(server, "/v1/requests").text)


def test_killing_the_supervisor_ends_all_its_children() -> None:
    with virtual() as server:
        children = [psutil.Process(pid) for pids in server.children.values() for pid in pids]
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(children, timeout=600)
        assert alive == []


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with virtual("--shutdown-s", "30", "--virtual-slowdown", "4") as server:
        refused: list[int] = []

        def end() -> None:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: get(server, "/ready").status_code == 503)
            response = complete(server, [1], 1)
            refused.append(response.status_code)
            assert response.json()["error"]["code"] == "shutting_down"

        payload = [body([700 + number] * 8, 500) for number in range(32)]
        streams = asyncio.run(stream_all(server, payload, end))
        assert refused == [503]
        for number, raw in enumerate(streams):
            found = events(raw)
            assert found[-1] == b"[DONE]" and text_of(found) == expected_text([700 + number] * 8, 500)
        assert server.process.wait(120) == 0, server.output


def test_sigterm_fails_requests_that_do_not_finish_in_time() -> None:
    with virtual("--shutdown-s", "0.3", "--virtual-slowdown", "4") as server:
        payload = [body([800 + number] * 8, 20_000) for number in range(16)]
        streams = asyncio.run(stream_all(server, payload, lambda: server.process.send_signal(signal.SIGTERM)))
        assert {events(raw)[-1]["error"]["code"] for raw in streams} == {"shutting_down"}
        assert server.process.wait(120) == 0, server.output


def test_a_second_signal_exits_at_once() -> None:
    with virtual("--shutdown-s", "600", "--virtual-slowdown", "4") as server:
        children = [psutil.Process(pid) for pids in server.children.values() for pid in pids]

        def twice() -> None:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: get(server, "/ready").status_code == 503)  # it has acted on the first signal
            server.process.send_signal(signal.SIGTERM)

        asyncio.run(stream_all(server, [body([900] * 8, 30_000)], twice))
        assert server.process.wait(120) == 128 + signal.SIGTERM
        assert psutil.wait_procs(children, timeout=600)[1] == []


def test_a_thousand_requests_with_random_aborts_leave_nothing_behind(server: ServerProcess) -> None:
    rng = random.Random(1)
    plans = [(rng.randrange(8), rng.randint(1, 200), rng.random()) for _ in range(1000)]

    async def one(number: int, kind: int, tokens: int, patience: float, seats: asyncio.Semaphore) -> bool:
        prompt = [1000 + number % 50] * (8 + number % 37)
        async with seats:
            if kind < 4:  # reads to the end
                reader, writer = await open_stream(server, body(prompt, tokens))
                raw = b""
                while b"data: [DONE]" not in raw[-64:]:
                    data = await asyncio.wait_for(reader.read(65536), 300)
                    assert data, raw[-500:]
                    raw += data
                writer.close()
                assert text_of(events(raw)) == expected_text(prompt, tokens)
                return True
            reader, writer = await open_stream(server, body(prompt, tokens + 2000, stream=kind < 6))
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
    assert_nothing_is_left(server)


def test_an_idle_server_uses_almost_no_cpu(server: ServerProcess) -> None:
    processes = [psutil.Process(server.process.pid)]
    processes += [psutil.Process(pid) for pids in server.children.values() for pid in pids]

    def cpu_time() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def is_quiet() -> bool:
        before = cpu_time()
        time.sleep(2)
        return cpu_time() - before < 0.1

    wait_until(is_quiet)  # not at once: an engine that becomes idle checks its state first


def test_a_disconnect_frees_the_requests_memory(server: ServerProcess) -> None:
    async def main() -> None:
        reader, writer = await open_stream(server, body([77] * 8, 30_000))
        await reader.readuntil(b"data: ")
        writer.transport.abort()

    before = metric(server, "request_success_total", finished_reason="abort")
    asyncio.run(main())
    wait_until(lambda: metric(server, "request_success_total", finished_reason="abort") == before + 1)
    assert_nothing_is_left(server)


def test_many_concurrent_clients_get_complete_responses(server: ServerProcess) -> None:
    def request(number: int) -> str:
        return complete(server, [1500 + number] * 4, 40).json()["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(request, range(64))) == [expected_text([1500 + number] * 4, 40) for number in range(64)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--executor", "virtual", "--model", "x"), "which runs no model: remove model, load and shape."),
        (("--executor", "virtual", "--num-pages", "4", "--kv-tokens", "64"), "give one of them."),
        (("--load", "random", "--shape", "no-such"), "no-such"),
        (("--config", "no-such-file.toml"), "cannot be read"),
    ],
)
def test_a_server_that_cannot_start_reports_why_and_exits(arguments: tuple[str, ...], message: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr, run.stderr


def test_a_tokenizer_that_cannot_be_used_ends_the_start_with_one_message(tmp_path: Path) -> None:
    """All at once: each start takes seconds."""
    cases = {
        "broken": ("{", "tokenizer.json cannot be read"),
        "larger": (synthetic_tokenizer(400).to_json(), "the tokenizer has 400 tokens and the model only 300"),
    }
    starts = {}
    for name, (tokenizer, _) in cases.items():
        folder = save_tiny_model(tmp_path / name, vocab_size=300)
        (folder / "tokenizer.json").write_text(tokenizer)
        command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", "--model", str(folder)]
        command += ["--workers", "2"] if name == "broken" else []
        starts[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    outputs = {name: process.communicate(timeout=600)[0] for name, process in starts.items()}
    for name, output in outputs.items():
        assert starts[name].returncode == 2 and "Traceback" not in output, output
        # The message may be wrapped.
        assert "".join(output.split()).count("".join(cases[name][1].split())) == 1, output


def test_killing_a_child_repeatedly_keeps_its_exit_status(caplog: pytest.LogCaptureFixture) -> None:
    async def killed() -> int:
        decoder: LineDecoder[FromFrontEnd] = LineDecoder(FromFrontEnd)
        child = ChildProcess("unused", ModelSource(), decoder, print)
        child._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", "input()", stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        while process.returncode is None:
            child.kill()
            await asyncio.sleep(0)
        return process.returncode

    async def many() -> list[int]:
        return [await killed() for _ in range(20)]

    assert asyncio.run(many()) == [-signal.SIGKILL] * 20
    assert "Unknown child process" not in caplog.text


def test_every_front_end_finishes_its_requests_in_a_shutdown() -> None:
    """Not only until the first of them, which may have none, has exited."""
    with virtual("--workers", "2") as server, ThreadPoolExecutor(1) as pool:
        request = pool.submit(complete, server, [7, 8, 9], 200)
        wait_until(lambda: bool(get(server, "/v1/requests").json()["data"]) or request.done())
        server.signal(signal.SIGTERM)
        assert request.result().status_code == 200
