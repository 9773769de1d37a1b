"""`paceline serve` with the default model, and OpenAI's client."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from paceline.model.fetch import find_model
from paceline.text.load import load_tokenizer
from tests.server.process import ServerProcess, serving
from tests.server.virtual import wait_until

MODEL = "smollm2-135m-instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--kv-tokens", "32768") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


def health(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{server.url}/health", timeout=120).json()


def test_the_startup_message_describes_the_model_and_shows_an_example(server: ServerProcess) -> None:
    found = re.search(f"{MODEL}: llama family, 134.5 M parameters, (.*)", server.output)
    assert found is not None and found[1] in (
        "4- and 8-bit",
        "4- and 8-bit, for prompts bfloat16 (AMX)",
        "float32",  # without a C compiler
    )
    assert "cpu, " in server.output and "KV cache of 32,768 tokens" in server.output
    assert f"curl {server.url}/v1/chat/completions" in server.output


def test_a_chat_response_names_paris(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_has_the_same_text_and_ends_with_usage(client: OpenAI) -> None:
    full = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == full.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    usage = chunks[-1].usage
    assert usage is not None and full.usage is not None and usage.total_tokens == full.usage.total_tokens
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens


def test_completions_match_the_reference_continuation(client: OpenAI) -> None:
    """The greedy continuation of the default model in float32 that all parts of Paceline are tested against."""
    payload: dict[str, Any] = {
        "model": MODEL,
        "prompt": [504, 3575, 282, 4649, 314],
        "temperature": 0,
        "max_tokens": 8,
        "extra_body": {"ignore_eos": True},
    }
    full = client.completions.create(**payload)
    known = [7042, 30, 198, 198, 504, 2988, 314, 42]
    assert full.choices[0].text == load_tokenizer(find_model(MODEL)).decode(known, at_start=False)
    assert full.choices[0].finish_reason == "length"
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**payload, stream=True))
    assert streamed == full.choices[0].text


def test_sixteen_concurrent_streams_each_get_their_own_text(client: OpenAI, server: ServerProcess) -> None:
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
    assert health(server)["num_running"] == 0


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
        ({"extra_body": {"magic": 1}}, openai.BadRequestError, "Unknown parameter: magic."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_an_error_and_the_next_request_is_served(
    client: OpenAI, changes: dict[str, Any], error: type[openai.APIStatusError], message: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": FRANCE, "stream": stream, **changes})
    assert message in caught.value.message
    response = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=2)
    assert response.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_the_request(server: ServerProcess, stream: bool) -> None:
    before = health(server)["num_finished"]["abort"]
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(300, read=0.5))
    wait_until(lambda: health(server)["num_finished"]["abort"] > before)
    found = health(server)
    assert found["num_running"] == 0 and found["kv_tokens_free"] == found["kv_tokens"]


def test_a_port_in_use_is_a_one_line_error_with_exit_code_75(server: ServerProcess) -> None:
    port = server.url.rsplit(":", 1)[1]
    run = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "serve", "--port", port],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 75
    assert run.stderr == (
        f"paceline: port is {port}, which is already in use: stop that program, or choose another port (0: any).\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_open_streams_with_an_error_and_exits(number: int) -> None:
    with serving("--executor", "virtual", "--served-name", "r", "--shutdown-s", "0.5") as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle = socket.create_connection((host, int(port)))  # a connection without a request
        body = {"model": "r", "prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            seconds = server.signal(number)
            rest = [line for line in lines if line]
        idle.close()
        assert server.process.returncode == 0, server.output
        assert seconds < 60, "far above the shutdown_s of 0.5 seconds: a busy machine is slow"
        assert '"code":"shutting_down"' in rest[-1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    assert "Traceback" not in server.output and server.output.rstrip().endswith("Stopped.")
