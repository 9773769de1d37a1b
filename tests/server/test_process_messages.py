"""The supervisor and its children exchange tagged messages, and an exit on either side is an expected event."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from paceline.config import ServerConfig
from paceline.engine.virtual.build import VOCAB_SIZE
from paceline.server import process_messages as messages
from paceline.server.engine_client import ServedModel
from paceline.server.process_messages import EngineSetup, FrontEndSetup, LineDecoder, ModelSource, ProtocolError
from paceline.server.supervisor import ChildProcess
from tests.server.virtual import wait_until

MODEL = ServedModel("m", "llama", 1, "float32", "cpu", 512, 2048, 2048, 8, 8192, 0, 64)
VIRTUAL = ModelSource(options={"executor": "virtual"})


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (messages.ToFrontEnd, messages.EngineUp("ipc://x", MODEL)),
        (messages.ToFrontEnd, messages.EngineDown("signal 9")),
        (messages.ToFrontEnd, messages.EngineLoading()),
        (messages.ToFrontEnd, messages.Shutdown(3.0)),
        (messages.ToFrontEnd, messages.SetDraining(True)),
        (messages.FromFrontEnd, messages.FrontEndListening()),
        (messages.FromFrontEnd, messages.SetDraining(False)),
        (messages.ToEngine, messages.FrontEndGone("front-end-0.1")),
        (messages.FromEngine, messages.LoadingProgress(1, 2)),
        (messages.FromEngine, messages.StartupFailed("no such model")),
        (messages.FromEngine, messages.EngineReady(MODEL)),
    ],
)
def test_a_message_survives_the_pipe_as_one_line(channel: object, message: msgspec.Struct) -> None:
    line = messages.encode_line(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    decoder: LineDecoder[object] = LineDecoder(channel)
    assert decoder.decode(line) == message


@pytest.mark.parametrize(
    "line", [b'{"type":"Nonsense"}', b'{"type":"EngineUp"}', b'{"up":1}', b"{}", b"[]", b"hello", b""]
)
@pytest.mark.parametrize(
    "channel", [messages.ToFrontEnd, messages.FromFrontEnd, messages.ToEngine, messages.FromEngine]
)
def test_an_unknown_message_is_an_error(channel: object, line: bytes) -> None:
    decoder: LineDecoder[object] = LineDecoder(channel)
    with pytest.raises(ProtocolError, match="Cannot read the message"):
        decoder.decode(line)


def child(module: str) -> ChildProcess[object]:
    received: list[object] = []
    decoder: LineDecoder[object] = LineDecoder(messages.FromEngine)
    return ChildProcess(module, VIRTUAL, decoder, received.append)


def test_a_child_that_writes_something_else_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="The Zen of Python"):
        asyncio.run(child("this").run())


def test_messages_to_a_child_that_has_exited_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        process = child("__future__")  # a module that exits at once and reads nothing
        running = asyncio.create_task(process.run())
        while not running.done():
            process.send(messages.FrontEndGone("x" * 10_000))
            await asyncio.sleep(0)
        process.send(messages.FrontEndGone("after its exit"))
        return running.result()

    with caplog.at_level(logging.DEBUG):
        assert asyncio.run(main()) == 0
    assert "exception" not in caplog.text.lower()


def engine_setup(folder: Path) -> EngineSetup:
    return EngineSetup(
        name="virtual",
        address=f"ipc://{folder}/engine",
        source=VIRTUAL,
        watchdog_s=60.0,
        tenants=(),
        log_level="warning",
        log_format="text",
    )


def front_end_setup(folder: Path, descriptor: int) -> FrontEndSetup:
    return FrontEndSetup(
        name="front-end-0.1",
        address=f"ipc://{folder}/front-end",
        socket=descriptor,
        model="virtual",
        tokenizer=VOCAB_SIZE,
        config=ServerConfig(),
        tenants=(),
    )


@pytest.mark.parametrize("module", ["engine_process", "front_end"])
@pytest.mark.parametrize("has_setup", [False, True], ids=["before its setup", "while it loads"])
def test_a_child_that_loses_its_supervisor_while_starting_exits_quietly(
    module: str, has_setup: bool, tmp_path: Path
) -> None:
    with socket.socket() as listening_socket:
        listening_socket.bind(("127.0.0.1", 0))
        descriptor = listening_socket.fileno()
        setup = engine_setup(tmp_path) if module == "engine_process" else front_end_setup(tmp_path, descriptor)
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", f"paceline.server.{module}"],
            stdin=subprocess.PIPE,
            stdout=writing,
            stderr=subprocess.PIPE,
            pass_fds=(descriptor,),
        )
        os.close(writing)
        os.close(reading)  # before it writes anything: every write of the child fails
        _, errors = process.communicate(messages.encode_line(setup) if has_setup else b"", timeout=120)
    assert process.returncode == 1 and errors == b"", errors.decode()


def test_a_child_that_hangs_is_killed_with_the_processes_that_it_has_started(tmp_path: Path) -> None:
    """Signs of life are counted, not timed: what is not checked is not missed."""
    (tmp_path / "silent_child.py").write_text(
        "import subprocess, sys\n"
        "from paceline.server.process_messages import Alive, send_to_supervisor\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "other.send_signal(19)\n"  # stopped: it cannot notice that its parent is gone
        "send_to_supervisor(Alive(str(other.pid)))\n"
        "sys.stdin.read()\n"
        "other.wait()\n"
    )

    async def main(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
        process = child("silent_child")
        assert process.check(1.0) is None, "it has not begun"
        running = asyncio.create_task(process.run())
        while process._failure is None:
            await asyncio.sleep(0.01)
        other, process._failure, process._num_silent = int(process._failure), None, 0
        checks = 0
        while (why := process.check(10.0)) is None:
            checks += 1
        assert why == "no sign of life for 10 s" and checks == 10 / messages.BEAT_S
        assert process.check(10.0) is None, "once"
        return await running, other

    with pytest.MonkeyPatch.context() as monkeypatch:
        status, other = asyncio.run(main(monkeypatch))
    assert status == -9
    wait_until(lambda: not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE)


def test_a_child_that_reports_a_failure_is_killed() -> None:
    process = child("paceline")
    process._num_silent, process._failure = 0, "no progress for 61 s"
    assert process.check(10.0) == "no progress for 61 s"
