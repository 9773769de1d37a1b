"""Prefill and decode engines in processes of their own, with the default model: same answers, whoever dies."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.ports import free_ports
from tests.server.process import ServerProcess, serving
from tests.server.virtual import get, metric, wait_until

pytestmark = pytest.mark.cluster

STORY = "The harbour was quiet that morning, and the boats lay still under a grey sky. " * 3
PROMPTS = [f"Story {number}. {STORY} Now count from {number}:" for number in range(3)]
SECRET = ("--kv-token", "a-secret-of-both", "--threads", "1")
LIMITS = ("--prefill-from-tokens", "48", "--kv-tokens", "8192", "--host-kv-tokens", "8192")


def common(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--served-name", "default", "--log-level", "warning", *LIMITS)


def complete(server: ServerProcess, prompt: str, **more: Any) -> httpx.Response:
    payload = {"model": "default", "prompt": prompt, "max_tokens": 5, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/completions", json=payload, timeout=300)


def answer(server: ServerProcess, prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    response = complete(server, prompt, **more)
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["text"], body["usage"]


@pytest.fixture(scope="module")
def address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)}"


@pytest.fixture(scope="module")
def decode(smollm2_path: Path, address: str) -> Iterator[ServerProcess]:
    """A decode server whose prefill server is not up yet."""
    with serving(*common(smollm2_path), *SECRET, "--role", "decode", "--prefill-peers", address) as server:
        yield server


@pytest.fixture(scope="module")
def one(decode: ServerProcess) -> list[tuple[str, dict[str, Any]]]:
    """Answers and usage of a single engine: it computes what no other engine does."""
    found = [answer(decode, prompt) for prompt in PROMPTS]
    assert metric(decode, "kv_transfers_total") == 0
    return found


@pytest.fixture(scope="module")
def pair(smollm2_path: Path) -> Iterator[ServerProcess]:
    with serving(*common(smollm2_path), "--replicas", "2", "--prefill-replicas", "1") as server:
        yield server


def wait_for(condition: Callable[[], Any]) -> None:
    """Asks now and then: metrics take time that the engines need."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.25)


def assert_nothing_is_left(server: ServerProcess) -> None:
    wait_for(lambda: metric(server, "num_requests_open") == metric(server, "http_requests_in_progress") == 0)
    wait_for(lambda: metric(server, "kv_transfer_pages_in_transit") == 0)
    wait_for(lambda: metric(server, "kv_transfer_requests_waiting") == 0)
    health = get(server, "/health").json()
    assert health["num_running"] == health["num_waiting"] == 0
    assert health["kv_tokens_free"] == health["kv_tokens"]
    assert metric(server, "scheduler_state_repairs_total") == 0


def test_answers_and_usage_are_those_of_one_engine(pair: ServerProcess, one: list[Any]) -> None:
    assert [answer(pair, prompt) for prompt in PROMPTS] == one
    assert metric(pair, "kv_transfers_total", direction="received") == len(PROMPTS)
    assert metric(pair, "kv_transfer_bytes_total", direction="received") > 1e6
    assert metric(pair, "router_prefills_total") == len(PROMPTS)
    computed = [metric(pair, "prompt_tokens_total", replica=replica) for replica in "01"]
    assert computed[0] > 3 * computed[1], "prompts by the first, outputs by the second"
    assert_nothing_is_left(pair)


def under_load(server: ServerProcess, expected: list[Any], victim: int) -> None:
    """Kills an engine while requests are in all stages: each is answered as ever, or ends with an error."""
    replies: list[str] = []
    started = threading.Barrier(9)

    def ask(number: int) -> None:
        started.wait(60)
        prompt = number % len(PROMPTS)
        response = complete(server, PROMPTS[prompt] + " and" * (number // len(PROMPTS)), stream=number % 2 == 0)
        replies.append(response.text)
        if number < len(PROMPTS) and number % 2 and response.status_code == 200:
            assert response.json()["choices"][0]["text"] == expected[prompt][0]

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, number) for number in range(8)]
        started.wait(60)
        wait_until(lambda: metric(server, "num_requests_open") > 2)
        os.kill(victim, signal.SIGKILL)
        for one in waiting:
            one.result()
    assert len(replies) == 8 and all(text for text in replies), "every request got an answer"
    wait_for(lambda: metric(server, "replicas_up") == 2)
    assert_nothing_is_left(server)


def engine_pid(server: ServerProcess, *, prefill: bool) -> int:
    """A prefill engine listens for others."""

    def listens(pid: int) -> bool:
        return any("/kv-" in str(one.laddr) for one in psutil.Process(pid).net_connections("unix") if one.status)

    return next(pid for pid in server.children["engine"] if listens(pid) == prefill)


def test_killing_the_prefill_engine_under_load_loses_no_request(pair: ServerProcess, one: list[Any]) -> None:
    under_load(pair, one, engine_pid(pair, prefill=True))
    assert [answer(pair, prompt)[0] for prompt in PROMPTS] == [text for text, _ in one]


def test_killing_the_decode_engine_under_load_hangs_nothing(pair: ServerProcess, one: list[Any]) -> None:
    under_load(pair, one, engine_pid(pair, prefill=False))
    assert [answer(pair, prompt)[0] for prompt in PROMPTS] == [text for text, _ in one]


def test_two_servers_transfer_over_tcp(smollm2_path: Path, decode: ServerProcess, address: str, one: list[Any]) -> None:
    before = metric(decode, "kv_transfer_failures_total")
    with serving(*common(smollm2_path), *SECRET, "--role", "prefill", "--kv-listen", address):
        # What is cached under another salt is not used. The decode server connects again after a while, and computes
        # prompts itself until then.
        salts = map(str, itertools.count())
        wait_for(lambda: [answer(decode, PROMPTS[0], cache_salt=next(salts))] and metric(decode, "kv_transfers_total"))
        transfers = metric(decode, "kv_transfers_total")
        assert [answer(decode, prompt, cache_salt="second") for prompt in PROMPTS] == one
        assert metric(decode, "kv_transfers_total") == transfers + len(PROMPTS)
        assert_nothing_is_left(decode)
    assert before <= metric(decode, "kv_transfer_failures_total") <= before + 1
    assert [answer(decode, prompt, cache_salt="third") for prompt in PROMPTS] == one, "without it, as before"
