"""A served model publishes KV events: subscribers know what is cached, whatever happens to the engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from paceline.cluster.block_hash import block_hashes, root_hash
from tests.cluster.subscriber import AllBlocksCleared, BlockStored, Subscriber
from tests.ports import free_ports
from tests.server.process import ServerProcess, serving

MODEL = ("--load", "random", "--shape", "tiny-qwen3", "--threads", "1", "--kv-tokens", "4096")
TOPIC = "kv@127.0.0.1:8000@tiny"
PROMPT = list(range(100, 200))  # six whole pages


@pytest.fixture(scope="module")
def addresses() -> list[str]:
    first = free_ports(2)
    return [f"tcp://127.0.0.1:{port}" for port in (first, first + 1)]


@pytest.fixture(scope="module")
def server(addresses: list[str]) -> Iterator[ServerProcess]:
    events, replay = addresses
    options = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-topic", TOPIC, "--admin-key", "secret")
    with serving(*MODEL, *options) as server:
        yield server


@pytest.fixture
def subscriber(addresses: list[str], server: ServerProcess) -> Iterator[Subscriber]:
    """One that knows what the engine has cached: it subscribed, then had everything replayed."""
    with Subscriber(addresses[0], b"kv@") as subscriber:
        wait_until_subscribed(subscriber, server)
        for number, batch in subscriber.replay(addresses[1], 0):
            subscriber.apply(batch)
            subscriber.replayed = number
        yield subscriber


def wait_until_subscribed(subscriber: Subscriber, server: ServerProcess) -> None:
    while not subscriber.poll(20):
        complete(server, list(os.urandom(40)))  # a prompt that is not cached


def complete(server: ServerProcess, prompt: list[int], **fields: Any) -> None:
    body = {"model": "tiny-qwen3", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text


def hashes_of(prompt: list[int], salt: str = "") -> set[int]:
    return set(block_hashes(np.array(prompt, np.int32), 16, root_hash(("default", salt, ""))).tolist())


def receive_until_known(subscriber: Subscriber, hashes: set[int]) -> None:
    while not hashes <= subscriber.known.get("GPU", set()):
        subscriber.receive()


def test_the_pages_of_a_prompt_are_published_by_the_hashes_that_a_router_computes(
    subscriber: Subscriber, server: ServerProcess
) -> None:
    complete(server, PROMPT)
    receive_until_known(subscriber, hashes_of(PROMPT))
    complete(server, PROMPT, cache_salt="salt")
    receive_until_known(subscriber, hashes_of(PROMPT, "salt"))
    assert subscriber.last is not None
    (event,) = [one for one in subscriber.last.events if isinstance(one, BlockStored)]
    assert (event.parent_block_hash, event.token_ids) == (None, PROMPT[:96])
    assert event.extra_keys == [["salt"], None, None, None, None, None]
    assert (event.block_size, event.medium, event.lora_name) == (16, "GPU", None)
    assert subscriber.topics == {TOPIC.encode()}


def test_a_flush_and_evictions_are_published(subscriber: Subscriber, server: ServerProcess) -> None:
    complete(server, PROMPT)
    receive_until_known(subscriber, hashes_of(PROMPT))
    admin = {"Authorization": "Bearer secret"}
    flush = httpx.post(f"{server.url}/admin/cache", json={"action": "flush"}, headers=admin, timeout=120)
    assert flush.status_code == 200, flush.text
    while any(subscriber.known.values()):
        subscriber.receive()
    complete(server, PROMPT)
    receive_until_known(subscriber, hashes_of(PROMPT))
    for number in range(6):  # 6 · 1,000 tokens in memory for 4,096
        complete(server, [number] * 1000)
    while hashes_of(PROMPT) & subscriber.known["GPU"]:
        subscriber.receive()
    assert len(subscriber.known["GPU"]) <= 256, "pages of the cache"


def test_a_new_subscriber_can_ask_for_a_snapshot(server: ServerProcess, addresses: list[str]) -> None:
    complete(server, PROMPT)
    with Subscriber(addresses[0]) as subscriber:
        wait_until_subscribed(subscriber, server)
        assert subscriber.replay(addresses[1], 2**64 - 1) == []
        while not (subscriber.last and isinstance(subscriber.last.events[0], AllBlocksCleared)):
            subscriber.receive()
        receive_until_known(subscriber, hashes_of(PROMPT))


def test_metrics_count_batches(subscriber: Subscriber, server: ServerProcess) -> None:
    complete(server, PROMPT)
    receive_until_known(subscriber, hashes_of(PROMPT))
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer secret"}, timeout=60).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("paceline_kv_event"))
    assert float(values["paceline_kv_event_batches_total"]) > subscriber.replayed
    assert float(values["paceline_kv_event_overflows_total"]) == 0


def test_after_a_crash_of_the_engine_numbers_begin_again_with_a_clear(
    subscriber: Subscriber, server: ServerProcess, addresses: list[str]
) -> None:
    complete(server, PROMPT)
    receive_until_known(subscriber, hashes_of(PROMPT))
    (engine,) = server.children["engine"]
    os.kill(engine, signal.SIGKILL)
    while server.children["engine"] in ([], [engine]) or httpx.get(f"{server.url}/ready").status_code != 200:
        time.sleep(0.02)
    before, subscriber.replayed = max(subscriber.replayed, *subscriber.numbers, 0), -1
    while not subscriber.numbers or subscriber.numbers[-1] >= before:  # the last of the old engine come first
        wait_until_subscribed(subscriber, server)  # the new one has bound the same address
        subscriber.receive()
    # Numbers have started again, so it asks for all of them.
    (number, batch), *_ = subscriber.replay(addresses[1], 0)
    assert number == 0 and isinstance(batch.events[0], AllBlocksCleared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv-events", "ipc:///nonexistent/x"), "which cannot be bound: No such file or directory"),
        (("--kv-events", "tcp://127.0.0.1:*", "--no-prefix-cache"), "prefix_cache is off"),
    ],
)
def test_options_that_cannot_work_are_reported(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError) as caught, serving("--executor", "virtual", *options):
        pass
    assert message in " ".join(str(caught.value).split())
