"""Plans of models on the hub, of which headers alone are fetched: a stub of the hub on loopback counts the bytes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_folder import save_tiny_model
from tests.tiny_int4 import GPTQ, save_int4

COMMIT = "0" * 40


class StubHub(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.sent, self.ignores_ranges = folder, 0, False


class _Handler(BaseHTTPRequestHandler):
    server: StubHub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        if self.path.startswith("/api/models/"):
            files = [{"rfilename": one.name} for one in sorted(self.server.folder.iterdir())]
            data = json.dumps({"id": "some/model", "modelId": "some/model", "sha": COMMIT, "siblings": files}).encode()
            self._send(200, data, {"Content-Type": "application/json"}, has_body=has_body)
            return
        path = self.server.folder / self.path.split("?")[0].rpartition("/")[2]
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, has_body=False)
            return
        data, headers, status = path.read_bytes(), {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT}, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and not self.server.ignores_ranges:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        self._send(status, data, headers, has_body=has_body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, has_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.server.sent += len(data)
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: the output of the tests is read."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    with StubHub(tmp_path / "hub") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def plan(hub: StubHub, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since the hub client reads its address when it is imported."""
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "paceline.cli", "models", "--plan", "some/model", *options]
    environment = {**os.environ, **address, "COLUMNS": "200", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_plan_of_a_model_on_the_hub_fetches_headers_only(hub: StubHub, tmp_path: Path) -> None:
    """There are holes where 40 MB of weights would be."""
    save_tiny_model(hub.folder, vocab_size=160_000)
    weights = hub.folder / "model.safetensors"
    assert weights.stat().st_size > 40_000_000
    found = plan(hub, tmp_path / "home", "--arch", "sm_90", "--memory", "80")
    assert found.returncode == 0, found.stderr
    assert re.search(r"embedding +bfloat16 +converted +10 MB", found.stdout), found.stdout
    assert "fits: 80.0 GB are free" in found.stdout
    assert hub.sent < 300_000, "headers and configs"
    too_large = plan(hub, tmp_path / "home", "--arch", "sm_90", "--memory", "0.1", "--dtype", "bfloat16")
    assert too_large.returncode == 0 and "fits: 100 MB are free" in too_large.stdout


def test_a_plan_of_a_4_bit_checkpoint_on_the_hub_says_what_is_kept(hub: StubHub, tmp_path: Path) -> None:
    """The order of its columns is a tensor, and is checked when the model is loaded."""
    save_int4(hub.folder, {**GPTQ, "desc_act": True})
    found = plan(hub, tmp_path / "home", "--arch", "sm_90")
    assert found.returncode == 0, found.stderr
    assert re.search(r"quantization +int4 +the weights are stored so", found.stdout), found.stdout
    assert re.search(r"qkv of layers 0-1 +int4 +32 +as stored", found.stdout), found.stdout


def test_what_cannot_be_planned_is_an_error(hub: StubHub, tmp_path: Path) -> None:
    save_tiny_model(hub.folder)
    for change, error in (
        (lambda: setattr(hub, "ignores_ranges", True), "cannot be read in part: run `paceline pull some/model` first"),
        (lambda: (hub.folder / "model.safetensors").write_bytes(b"{}"), "it is not a safetensors file"),
        (lambda: save_file({"a": torch.zeros(2)}, hub.folder / "model.safetensors"), "lacks model.embed_tokens.weight"),
    ):
        hub.ignores_ranges = False
        change()
        found = plan(hub, tmp_path / "home", "--arch", "sm_90")
        assert found.returncode == 2 and error in found.stderr, found.stderr
    hub.server_close()
    found = plan(hub, tmp_path / "home")
    assert found.returncode == 75 and "headers of 'some/model' could not be fetched" in found.stderr
