"""Two engines on a CPU with the default model, over HTTP."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.process import ServerProcess, serving
from tests.server.virtual import metric, wait_until

pytestmark = pytest.mark.cluster

SYSTEMS = [
    f"You answer questions of {name}, who lives in {place}. " + "You are brief and polite, and you never lie. " * 8
    for name, place in (("Ada", "London"), ("Kurt", "Vienna"), ("Emmy", "Erlangen"), ("Alan", "Manchester"))
]
QUESTIONS = ["Where do I live?", "What is two plus two?", "Name a colour."]


def ask(server: ServerProcess, system: str, question: str, max_tokens: int = 4) -> httpx.Response:
    payload = {
        "model": "default",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=payload, timeout=300)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def hit_rate(responses: Sequence[httpx.Response]) -> float:
    usages = [one.json()["usage"] for one in responses]
    return sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages) / sum(
        one["prompt_tokens"] for one in usages
    )


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[ServerProcess]:
    options = ("--replicas", "2", "--kv-tokens", "8192", "--served-name", "default", "--log-level", "warning")
    with serving("--model", str(smollm2_path), *options) as server:
        yield server


def test_prompts_go_to_the_engine_that_has_their_prefix(server: ServerProcess) -> None:
    """Two of three prompts with a prefix can use it. What random routing loses: tests/server/test_replicas.py."""
    responses = [ask(server, system, question) for question in QUESTIONS for system in SYSTEMS]
    assert all(text_of(one) for one in responses)
    assert hit_rate(responses) > 0.45
    used = [metric(server, "prompt_tokens_total", replica=replica) for replica in "01"]
    assert min(used) > 0, "both engines were used"


def test_killing_an_engine_under_load_loses_no_request(server: ServerProcess) -> None:
    expected = {question: text_of(ask(server, SYSTEMS[0], question, 8)) for question in QUESTIONS}
    victim = server.children["engine"][0]
    started = threading.Barrier(9)

    def answer(number: int) -> tuple[str, str]:
        started.wait(60)
        question = QUESTIONS[number % 3]
        return question, text_of(ask(server, SYSTEMS[0], question, 8))

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(answer, number) for number in range(8)]
        started.wait(60)
        wait_until(lambda: metric(server, "num_requests_open") > 0)
        os.kill(victim, signal.SIGKILL)
        for one in waiting:
            question, text = one.result()
            assert text == expected[question], "another engine gives the same greedy answer"
    wait_until(lambda: metric(server, "replicas_up") == 2)
    assert victim not in server.children["engine"]
    assert text_of(ask(server, SYSTEMS[1], "Where do I live?")) != ""
