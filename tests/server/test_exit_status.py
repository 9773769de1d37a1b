"""The exit status of a start that fails: 2 for what stays wrong, 75 (EX_TEMPFAIL) for what may pass."""

from __future__ import annotations

import configparser
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from paceline.cli import app

ROOT = Path(__file__).parents[2]
WRONG, MAY_PASS = 2, os.EX_TEMPFAIL


def start(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert result.stderr.startswith("paceline: ") and result.stderr.count("\n") == 1, result.stderr
    return result.exit_code, result.stderr


def test_a_port_in_use_may_become_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, message = start("--port", str(taken.getsockname()[1]))
    assert status == MAY_PASS and "already in use" in message


def test_an_address_may_come_with_the_network() -> None:
    assert start("--host", "192.0.2.1")[0] == MAY_PASS  # TEST-NET-1: no machine has it
    assert start("--host", "no such host")[0] == WRONG


def test_the_disk_of_a_model_may_be_mounted_later(tmp_path: Path) -> None:
    status, message = start("--model", str(tmp_path))
    assert status == MAY_PASS and "empty folder" in message
    assert start("--model", str(tmp_path / "model"))[0] == MAY_PASS
    assert start("--model", "no-such-model")[0] == WRONG
    (tmp_path / "note.txt").touch()
    assert start("--model", str(tmp_path))[0] == WRONG


def test_the_disk_of_an_adapter_may_be_mounted_later(tmp_path: Path) -> None:
    model = ("--load", "random", "--shape", "tiny-llama")
    for folder in (tmp_path, tmp_path / "adapter"):
        status, message = start(*model, "--lora", f"a={folder}")
        assert status == MAY_PASS and "mount the disk with it" in message
    assert start(*model, "--lora", "a=no-such-adapter")[0] == WRONG
    (tmp_path / "note.txt").touch()
    assert start(*model, "--lora", f"a={tmp_path}")[0] == WRONG


def test_the_disk_of_a_configuration_may_be_mounted_later(tmp_path: Path) -> None:
    status, message = start("--config", str(tmp_path / "paceline.toml"))
    assert status == MAY_PASS and "cannot be read" in message
    assert start("--config", "no-such-file.toml")[0] == WRONG
    assert start("--config", str(tmp_path))[0] == WRONG


@pytest.mark.parametrize(("answer", "expected"), [(None, MAY_PASS), (503, MAY_PASS), (404, WRONG), (401, WRONG)])
def test_the_hub_may_be_reached_later_but_a_model_that_it_does_not_have_is_wrong(
    answer: int | None, expected: int, tmp_path: Path
) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer or 500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as hub:
        port = hub.server_port
        thread = Thread(target=hub.serve_forever)
        if answer is None:
            hub.server_close()
        else:
            thread.start()
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "paceline.cli", "pull", "some-org/some-model"]
        run = subprocess.run(
            command, env={**os.environ, **settings}, check=False, capture_output=True, text=True, timeout=300
        )
        if answer is not None:
            hub.shutdown()
            thread.join()
    assert run.returncode == expected, run.stderr
    assert "could not be fetched from the Hugging Face hub" in run.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-folder", "/proc/not-mounted"], MAY_PASS),
        (["--batch-folder", "/dev/null/x"], WRONG),
        (["--kv-events", "tcp://127.0.0.1:{port}"], MAY_PASS),
        (["--prefix-cache", "false", "--kv-events", "tcp://127.0.0.1:*"], WRONG),
    ],
)
def test_what_a_child_process_finds_has_the_same_status(options: list[str], expected: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        named = [option.replace("{port}", str(taken.getsockname()[1])) for option in options]
        command = [sys.executable, "-m", "paceline.cli", "serve", "--executor", "virtual", "--port", "0", *named]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == expected and "Traceback" not in run.stderr, run.stderr


def test_systemd_starts_it_again_for_as_long_as_it_may_pass() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "paceline.service")
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartPreventExitStatus"].split() == [str(WRONG)]
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"  # else it gives up after five starts
