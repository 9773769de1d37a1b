"""Batches in a real server: processes are killed in the middle of one, and every line has exactly one result."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from tests.server.batching import jsonl, line
from tests.server.process import ServerProcess, serving
from tests.server.virtual import body, complete, expected_text, get, metric, virtual, wait_until

pytestmark = pytest.mark.cluster

NUM_LINES, NUM_TOKENS = 160, 200


@contextmanager
def batch_server(folder: Path) -> Iterator[tuple[ServerProcess, OpenAI]]:
    arguments = ("--workers", "2", "--batch-folder", str(folder), "--max-running", "16", "--max-batch-tokens", "1024")
    with virtual(*arguments) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
        yield server, client


def prompt(number: int) -> list[int]:
    return [600 + number, *range(500, 540)]


def start(client: OpenAI) -> Any:
    lines = [line(str(number), body=body(prompt(number), NUM_TOKENS)) for number in range(NUM_LINES)]
    file = client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def num_results(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "files").glob("*o.data"))


def check_results(client: OpenAI, batch_id: str) -> None:
    wait_until(
        lambda: client.batches.retrieve(batch_id).status == "completed", why=lambda: client.batches.retrieve(batch_id)
    )
    batch = client.batches.retrieve(batch_id)
    assert batch.error_file_id is None and batch.request_counts and batch.request_counts.completed == NUM_LINES
    found = [json.loads(one) for one in client.files.content(batch.output_file_id or "").text.splitlines()]
    assert sorted(int(one["custom_id"]) for one in found) == list(range(NUM_LINES))
    for one in found[:: NUM_LINES // 20]:
        text = one["response"]["body"]["choices"][0]["text"]
        assert text == expected_text(prompt(int(one["custom_id"])), NUM_TOKENS)


def test_a_batch_survives_the_death_of_the_server_of_front_ends_and_of_the_engine(tmp_path: Path) -> None:
    with batch_server(tmp_path) as (server, client):
        batch = start(client)
        wait_until(lambda: num_results(tmp_path) > NUM_LINES // 10)
        requests = get(server, "/v1/requests").json()["data"]
        assert requests and {one["tenant"] for one in requests} == {"default:batch"}
        assert complete(server, [7, 8, 9], 3).status_code == 200
        assert client.batches.retrieve(batch.id).status == "in_progress", "a client does not wait for a batch"
        children = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(server.process.pid, signal.SIGKILL)
        psutil.wait_procs(children, 60)
        num_before = num_results(tmp_path)
        assert num_before < NUM_LINES
    with batch_server(tmp_path) as (server, client):
        wait_until(lambda: num_results(tmp_path) > max(num_before, NUM_LINES // 4))
        for front_end in server.children["front_end"]:  # one of them runs the batch
            os.kill(front_end, signal.SIGKILL)
        num_before = num_results(tmp_path)
        wait_until(lambda: num_results(tmp_path) > max(num_before, NUM_LINES // 2))
        (engine,) = server.children["engine"]
        os.kill(engine, signal.SIGKILL)
        check_results(client, batch.id)
        assert metric(server, "batches_running") == 0


def test_a_graceful_shutdown_leaves_the_batch_to_the_next_start(tmp_path: Path) -> None:
    with batch_server(tmp_path) as (server, client):
        batch = start(client)
        wait_until(lambda: num_results(tmp_path) > NUM_LINES // 10)
        with ThreadPoolExecutor(1) as pool:
            client_request = pool.submit(complete, server, [7, 8, 9], 100)
            tenants = lambda: {one["tenant"] for one in get(server, "/v1/requests").json()["data"]}  # noqa: E731
            wait_until(lambda: "default" in tenants() or client_request.done())
            server.signal(signal.SIGTERM)
            assert client_request.result().status_code == 200, "a client's request gets its time to finish"
        assert server.process.returncode == 0 and num_results(tmp_path) < NUM_LINES
    with batch_server(tmp_path) as (server, client):
        check_results(client, batch.id)


def test_a_model_with_tenants_in_the_background_and_batches(tmp_path: Path) -> None:
    """The engine of a model, as opposed to the virtual one, gets the background tenants too."""
    config = tmp_path / "paceline.toml"
    config.write_text(
        f'[server]\nbatch_folder = "{tmp_path}/batches"\nserved_name = "tiny"\n[engine]\nkv_tokens = 8192\n'
        '[[tenants]]\nname = "alice"\nkeys = ["alice"]\n[[tenants]]\nname = "bob"\nkeys = ["bob"]\nbackground = true\n'
    )
    with serving("--load", "random", "--shape", "tiny-qwen3", "--config", str(config)) as server:
        for key in ("alice", "bob"):
            with OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=120) as client:
                data = jsonl(line(str(number)) for number in range(5))
                file = client.files.create(file=("requests.jsonl", data), purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                assert client.completions.create(model="tiny", prompt="a", max_tokens=3).choices
                wait_until(lambda found=client, one=batch: found.batches.retrieve(one.id).status == "completed")
                assert client.batches.retrieve(batch.id).request_counts.completed == 5  # type: ignore[union-attr]
