"""KV events over real sockets: frames, replay, overflow, and subscribers that are slow or hostile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from paceline.cluster import kv_publisher
from paceline.cluster.kv_events import ClearedPages, KvEvent, PageRun, RemovedPages, StoredPages
from paceline.cluster.kv_publisher import KvEventPublisher, KvEventsError
from paceline.scheduler.kv_events import Medium
from tests.cluster.subscriber import AllBlocksCleared, BlockStored, Subscriber

ANY = "tcp://127.0.0.1:*"


def run_of(first: int, num_pages: int = 1) -> PageRun:
    tokens = np.arange(first, first + 16 * num_pages, dtype=np.int32)
    return PageRun(None, ("default", "", ""), tokens.tobytes(), 16)


def stored(first: int, num_pages: int = 1) -> KvEvent:
    return StoredPages(run_of(first, num_pages), Medium.GPU)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches in little time: what is queued within one interval is one batch."""
    monkeypatch.setattr(kv_publisher, "_INTERVAL_S", 0.001)


def publish_alone(publisher: KvEventPublisher, *events: KvEvent) -> None:
    """As a batch of its own."""
    before = publisher.num_published
    publisher.publish(events)
    wait_until(lambda: publisher.num_published == before + 1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


@contextmanager
def publishing(
    num_cached_pages: int = 1000, ask: Callable[[], None] = lambda: None, topic: str = "kv@pod@model"
) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(ANY, replay_address=ANY, topic=topic)
    publisher.start(num_cached_pages, ask)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: KvEventPublisher) -> Iterator[Subscriber]:
    """A subscriber whose subscription has arrived. It has got some clears."""
    with Subscriber(publisher.addresses[0], b"kv@") as subscriber:
        while not subscriber.poll(20):
            publisher.publish([ClearedPages()])
        while subscriber.poll(20) or subscriber.numbers[-1] < publisher.num_published - 1:
            subscriber.receive()
        yield subscriber


def test_a_batch_has_topic_number_and_events() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        pages = run_of(0, 2)
        publish_alone(publisher, StoredPages(pages, Medium.GPU), StoredPages(pages, Medium.CPU))
        publish_alone(publisher, RemovedPages(pages, Medium.GPU))
        batch = subscriber.receive()
        assert batch.ts > 1.7e9 and batch.data_parallel_rank == 0
        event = batch.events[0]
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.token_ids) == (pages.hashes.tolist(), list(range(32)))
        subscriber.receive()
        assert subscriber.known == {"GPU": set(), "CPU": set(pages.hashes.tolist())}
        assert subscriber.topics == {b"kv@pod@model"}
        assert np.diff(subscriber.numbers).tolist() == [1] * (len(subscriber.numbers) - 1)


def test_a_replay_has_all_batches_from_a_number_on() -> None:
    with publishing() as publisher:
        for number in range(200):  # more than are sent at once
            publish_alone(publisher, stored(number * 16))
        with Subscriber(publisher.addresses[0]) as subscriber:
            everything = subscriber.replay(publisher.addresses[1], 0)
            assert [number for number, _ in everything] == list(range(200))
            assert everything[7][1].events[0].token_ids[0] == 7 * 16
            assert [number for number, _ in subscriber.replay(publisher.addresses[1], 198)] == [198, 199]
            assert subscriber.replay(publisher.addresses[1], 200) == []
            assert subscriber.topics == {b"kv@pod@model"}


def test_a_subscriber_that_missed_too_much_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "_BUFFER_BATCHES", 4)
    published: list[KvEventPublisher] = []
    asked = threading.Semaphore(0)

    def snapshot() -> None:
        asked.release()
        published[0].publish([ClearedPages(), stored(0, 3)])

    with publishing(ask=snapshot) as publisher:
        published.append(publisher)
        with subscribed(publisher) as subscriber:
            for number in range(20):
                publish_alone(publisher, stored(number * 16))
            known = subscriber.replay(publisher.addresses[1], 0)
            assert len(known) <= 5, "as many as the buffer has"
            while subscriber.known != {"GPU": set(run_of(0, 3).hashes.tolist())}:
                subscriber.receive()
            assert asked.acquire(timeout=60)


def test_snapshots_that_subscribers_ask_for_again_and_again_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def snapshot() -> None:
        nonlocal count
        count += 1

    monkeypatch.setattr(kv_publisher, "_SNAPSHOT_INTERVAL_S", 3600.0)
    with publishing(ask=snapshot) as publisher, Subscriber(publisher.addresses[0]) as subscriber:
        for _ in range(5):
            assert subscriber.replay(publisher.addresses[1], 2**64 - 1) == []
        wait_until(lambda: count > 0)
        subscriber.replay(publisher.addresses[1], 2**64 - 1)
        assert count == 1


def test_an_overflow_publishes_a_clear_and_asks_for_a_snapshot() -> None:
    asked = threading.Event()
    with publishing(0, asked.set) as publisher, subscribed(publisher) as subscriber:
        publisher.publish([stored(0)])
        subscriber.receive()
        assert subscriber.known["GPU"]
        publisher.publish([stored(0, kv_publisher._QUEUE_SLACK_PAGES + 1)])
        batch = subscriber.receive()
        assert [type(event) for event in batch.events] == [AllBlocksCleared]
        assert asked.wait(60)
        assert (publisher.num_overflows, subscriber.known) == (1, {})


def test_a_snapshot_of_any_size_is_published_in_messages_of_bounded_size() -> None:
    with publishing(0) as publisher, subscribed(publisher) as subscriber:
        before = len(subscriber.numbers)
        runs = [run_of(number * 1600, 100) for number in range(40)]
        publisher.publish([ClearedPages(), *(StoredPages(run, Medium.GPU) for run in runs)])
        expected = {one for run in runs for one in run.hashes.tolist()}
        while subscriber.known.get("GPU") != expected:
            batch = subscriber.receive()
            assert sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored)) <= 512
        assert len(subscriber.numbers) - before == 8


def test_subscribers_that_do_not_read_delay_nobody() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        context = zmq.Context()
        stalled = context.socket(zmq.SUB)
        stalled.setsockopt(zmq.RCVHWM, 1)
        stalled.setsockopt(zmq.RCVBUF, 4096)
        stalled.subscribe(b"")
        stalled.connect(publisher.addresses[0])
        asking = context.socket(zmq.DEALER)  # asks for everything and reads nothing
        asking.setsockopt(zmq.RCVHWM, 1)
        asking.connect(publisher.addresses[1])
        for number in range(1200):
            asking.send_multipart([b"", (0).to_bytes(8, "big")])
            publisher.publish([stored(number * 16, 20)])
            assert subscriber.receive().events[0].token_ids[0] == number * 16
        assert np.diff(subscriber.numbers).tolist() == [1] * (len(subscriber.numbers) - 1)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "request_frames",
    [[b""], [b"", b"1234567"], [b"", b"x" * 9], [b"y", b"12345678"], [b"", b"", b"12345678"], [b"", b"z" * 100_000]],
)
def test_malformed_replay_requests_are_ignored(request_frames: list[bytes]) -> None:
    with publishing() as publisher, Subscriber(publisher.addresses[0]) as subscriber:
        publisher.publish([stored(0)])
        wait_until(lambda: publisher.num_published == 1)
        context = zmq.Context()
        hostile = context.socket(zmq.DEALER)
        hostile.connect(publisher.addresses[1])
        hostile.send_multipart(request_frames)
        for address in publisher.addresses:  # not ZeroMQ at all
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            with socket.create_connection((host.strip("[]"), int(port))) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
        assert len(subscriber.replay(publisher.addresses[1], 0)) == 1
        assert not hostile.poll(0), "it got no answer"
        context.destroy(linger=0)


def test_an_address_in_use_is_reported_with_its_option() -> None:
    with publishing() as publisher:
        address = publisher.addresses[0]
        with pytest.raises(KvEventsError) as caught:
            KvEventPublisher(address)
        assert str(caught.value) == (
            f"kv_events is {address!r}, which cannot be bound: Address already in use. Give another address or port."
        )
        with pytest.raises(KvEventsError, match="kv_events_replay is "):
            KvEventPublisher(ANY, replay_address=address)


def test_a_batch_that_cannot_be_encoded_clears_what_routers_know() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        publisher.publish([stored(0)])
        subscriber.receive()
        broken = PageRun(None, ("default", "\ud800", ""), run_of(0).tokens, 16)
        publisher.publish([StoredPages(broken, Medium.GPU)])
        subscriber.receive()
        assert subscriber.known == {}
        publisher.publish([stored(16)])
        subscriber.receive()
        assert subscriber.known["GPU"], "it goes on"


def test_steps_that_come_together_are_one_batch_and_closing_publishes_what_is_queued() -> None:
    publisher = KvEventPublisher(ANY)
    publisher._max_queued = 100  # as after the start; the thread is not there yet
    for number in range(50):
        publisher.publish([stored(number * 16)])
    publisher._closing.set()
    publisher.start(1000, lambda: None)
    publisher.close()
    assert publisher.num_published == 1 and not publisher._queue.events
