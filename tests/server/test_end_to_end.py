"""The real thing: `paceline serve` with the default model, and OpenAI's own client."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from paceline.model.fetch import find_model
from paceline.text.load import load_tokenizer
from tests.server.process import Served, serving

MODEL = "smollm2-135m-instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--kv-tokens", "32768") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def health(served: Served) -> dict[str, Any]:
    return httpx.get(f"{served.url}/health", timeout=30).json()


def test_the_start_says_what_was_loaded_and_what_to_try(served: Served) -> None:
    assert f"{MODEL}: llama family, 134.5 M parameters, float32" in served.output
    assert "cpu, " in served.output and "KV cache of 32,768 tokens" in served.output
    assert f"curl {served.url}/v1/chat/completions" in served.output


def test_a_chat_answer_names_paris(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_its_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None and usage.total_tokens == whole.usage.total_tokens
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens
    assert len(chunks) >= 5, "a stream comes in pieces"


def test_completions_continue_the_known_text(client: OpenAI) -> None:
    """The greedy continuation of the default model in float32 that every part of Paceline is held to."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": [504, 3575, 282, 4649, 314], "temperature": 0, "max_tokens": 8,
                             "extra_body": {"ignore_eos": True}}  # fmt: skip
    whole = client.completions.create(**asked)
    known = [7042, 30, 198, 198, 504, 2988, 314, 42]
    assert whole.choices[0].text == load_tokenizer(find_model(MODEL)).decode(known, at_start=False)
    assert whole.choices[0].finish_reason == "length"
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text


def test_sixteen_streams_at_once_each_get_their_own_answer(client: OpenAI, served: Served) -> None:
    questions = [f"Say the number {number}." for number in range(16)]

    def ask(question: str) -> str:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=16, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, questions))
    for index in (0, 7, 15):
        assert together[index] == ask(questions[index])
    assert len(set(together)) > 8
    assert health(served)["num_running"] == 0


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, f"use '{MODEL}'"),
        ({"messages": []}, openai.BadRequestError, "at least one message"),
        ({"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError, "messages[0].role is 'king'"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError, "shorten the prompt"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens is -1"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "lower max_tokens"),
        ({"n": 300}, openai.BadRequestError, "n is 300: give 1 to 128"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions is"),
        ({"extra_body": {"magic": 1}}, openai.BadRequestError, "magic is not a parameter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_clear_error_and_the_next_one_is_served(
    client: OpenAI, changes: dict[str, Any], error: type[openai.APIStatusError], message: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": FRANCE, "stream": stream, **changes})
    assert message in caught.value.message
    served = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=2)
    assert served.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_request(served: Served, stream: bool) -> None:
    before = health(served)["num_finished"]["abort"]
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
    deadline = time.monotonic() + 20
    while (found := health(served))["num_finished"]["abort"] == before:
        assert time.monotonic() < deadline, f"nobody noticed: {found}"
        time.sleep(0.02)
    assert found["num_running"] == 0 and found["kv_tokens_free"] == found["kv_tokens"]


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(served: Served) -> None:
    port = served.url.rsplit(":", 1)[1]
    run = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "serve", "--port", port],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr == (
        f"paceline: port is {port}, which another program uses: end that one, or choose another port (0: any).\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_server_within_seconds_and_tells_who_is_still_there(number: int) -> None:
    with serving("--load", "random", "--shape", "smollm2-135m", "--served-name", "r", "--shutdown-s", "0.5") as served:
        host, port = served.url.removeprefix("http://").split(":")
        idle = socket.create_connection((host, int(port)))  # a connection that never asks for anything
        body = {"model": "r", "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            seconds = served.signal(number)
            rest = [line for line in lines if line]
        idle.close()
        assert served.process.returncode == 0, served.output
        assert seconds < 10
        assert '"code":"shutting_down"' in rest[-1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")
    assert "Traceback" not in served.output and served.output.rstrip().endswith("Stopped.")
