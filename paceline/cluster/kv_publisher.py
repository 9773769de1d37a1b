"""Publishes KV events over ZeroMQ, with the frames and the replay of vLLM's publisher.

    PUB      topic | sequence number, 8 bytes, big-endian | batch (MessagePack)
    ROUTER   request: empty | first sequence number     replies: empty | topic | sequence number | batch
                                                        last reply: empty | empty | ff ff ff ff ff ff ff ff | empty

The engine's thread only appends to a queue; a thread of its own looks at it every few milliseconds, hashes, encodes
and sends. There is no lock and no wake-up between the two: on a busy host each would cost the engine's thread more than
the events themselves. Nothing that subscribers do reaches the engine: PUB and ROUTER drop what a slow one does not
read, and replays are sent a few batches at a time.

A router must not believe in pages that are gone. The first batch of an engine is therefore a clear, and if the queue
overflows, it is replaced by one. A snapshot follows: a clear and then all cached pages, as ordinary batches. It is also
published when a subscriber asks for batches that are no longer, or not yet, there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from paceline.cluster.kv_events import ClearedPages, KvEvent, KvEventBatch, num_pages, to_message
from paceline.codec import encode
from paceline.request import Unavailable

log = logging.getLogger("paceline.kv_events")
_END = b"\xff" * 8
_INTERVAL_S = 0.01  # between two looks at the queue and at replay requests
_MESSAGE_PAGES = 512  # in one message, unless a single event has more
_PAUSE_S = 0.001  # between the messages of a snapshot
_BUFFER_BATCHES = 10_000  # for replay, as vLLM has by default
_BUFFER_BYTES = 64 << 20
_UNREAD_MESSAGES = 1000  # of one subscriber, before it misses messages
_REPLAY_BATCHES = 64  # sent between two looks at the queue: a replay must not take the interpreter lock from the engine
_SNAPSHOT_INTERVAL_S = 10.0  # at least: the engine's thread visits the whole prefix tree for it
_QUEUE_SLACK_PAGES = 65_536
_MAX_REQUEST_BYTES = 256


class KvEventsError(Unavailable):
    """KV events cannot be published; the message says why."""


class _Queue:
    """Events in order. One thread puts, one takes, and each writes its own counter: no lock is needed."""

    __slots__ = ("events", "num_put", "num_taken")

    def __init__(self) -> None:
        self.events: deque[KvEvent] = deque()
        self.num_put = self.num_taken = 0  # pages


class KvEventPublisher:
    """Binds its sockets at once, publishes after `start`."""

    def __init__(self, address: str, *, replay_address: str | None = None, topic: str = "", rank: int = 0) -> None:
        """`rank`: the data parallel rank in every batch."""
        self._topic, self._rank = topic.encode(), rank
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.addresses: list[str] = []  # of the publisher and the replay socket, with the port that * became
        self._publisher = self._bind("kv_events", zmq.PUB, address, _UNREAD_MESSAGES)
        self._replayer: zmq.Socket[bytes] | None = None
        if replay_address is not None:
            # A replay is at most the whole buffer and the end: more is dropped, as ROUTER does.
            self._replayer = self._bind("kv_events_replay", zmq.ROUTER, replay_address, _BUFFER_BATCHES + 1)
        self.num_published = 0  # batches
        self.num_overflows = 0
        self._queue = _Queue()
        self._closing = threading.Event()
        # Of the publishing thread
        self._num_overflows_seen = 0
        self._wants_snapshot = False
        self._buffer: deque[bytes] = deque()  # the last batches, up to number `num_published`
        self._buffer_bytes = 0
        self._replay: tuple[bytes, int] | None = None  # who gets it, and the next batch
        self._next_snapshot = 0.0
        self._thread: threading.Thread | None = None

    def _bind(self, option: str, kind: int, address: str, max_unread: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        socket.sndhwm = max_unread
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)  # what subscribers send
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            reason = zmq.strerror(error.errno or 0)
            raise KvEventsError(
                f"{option} is {address!r}, which cannot be bound: {reason}. Give another address or port."
            ) from None
        self.addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return socket

    def start(self, num_cached_pages: int, ask_for_snapshot: Callable[[], None]) -> None:
        """Starts the thread. `num_cached_pages`: that the cache can have. `ask_for_snapshot` is called on the thread;
        some time later `publish` is called with a clear and everything that is cached."""
        # A snapshot always fits beside as many changes: else it would overflow the queue and ask for the next one.
        self._max_queued = 2 * num_cached_pages + _QUEUE_SLACK_PAGES
        self._ask_for_snapshot = ask_for_snapshot
        self._thread = threading.Thread(target=self._run, name="paceline-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queues the events of a step. Never blocks."""
        queue, count = self._queue, num_pages(events)
        is_snapshot = isinstance(events[0], ClearedPages)
        if not is_snapshot and queue.num_put - queue.num_taken + count > self._max_queued:
            self.num_overflows += 1
            events, count, is_snapshot = [ClearedPages()], 0, True
        if is_snapshot:  # makes all that is queued irrelevant
            queue = _Queue()
        queue.num_put += count
        queue.events.extend(events)
        self._queue = queue

    def close(self) -> None:
        """Publishes what is queued and ends the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=200)
        self._context.term()

    # ------------------------------------------------------------------ the publishing thread

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(_INTERVAL_S)
            if self._queue.events:
                self._publish_queued()
            elif closing:
                return
            else:
                self._take_snapshot()
            self._serve_replay()

    def _publish_queued(self) -> None:
        """Publishes what is queued, in messages of bounded size."""
        part: list[KvEvent] = []
        size = 0
        queue = self._queue
        while queue.events and queue is self._queue:  # another one begins with a clear
            event = queue.events.popleft()
            count = num_pages([event])
            queue.num_taken += count
            if part and size + count > _MESSAGE_PAGES:
                self._send(part)
                time.sleep(_PAUSE_S)  # a snapshot: leave the interpreter lock to the engine's thread now and then
                part, size = [], 0
            part.append(event)
            size += count
        if part:
            self._send(part)

    def _send(self, events: Sequence[KvEvent]) -> None:
        try:
            messages = []
            for event in events:
                messages.append(to_message(event))
                time.sleep(0)  # offers the interpreter lock
            payload = encode(KvEventBatch(time.time(), messages, self._rank))
        except Exception:  # a bug of ours; routers must not keep what may be wrong now
            log.exception("cannot encode KV events: a clear is published instead")
            payload = encode(KvEventBatch(time.time(), [to_message(ClearedPages())], self._rank))
            self._wants_snapshot = True
        self._publisher.send_multipart((self._topic, self.num_published.to_bytes(8, "big"), payload))
        self.num_published += 1
        self._buffer.append(payload)
        self._buffer_bytes += len(payload)
        while len(self._buffer) > _BUFFER_BATCHES or self._buffer_bytes > _BUFFER_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft())

    def _take_snapshot(self) -> None:
        wanted = self._wants_snapshot or self.num_overflows != self._num_overflows_seen
        if wanted and time.monotonic() >= self._next_snapshot:
            self._wants_snapshot, self._num_overflows_seen = False, self.num_overflows
            self._next_snapshot = time.monotonic() + _SNAPSHOT_INTERVAL_S
            self._ask_for_snapshot()

    @property
    def _oldest(self) -> int:
        """Number of the oldest batch in the buffer, or of the next one."""
        return self.num_published - len(self._buffer)

    def _serve_replay(self) -> None:
        if self._replayer is None:
            return
        if self._replay is None and self._replayer.poll(0):
            frames = self._replayer.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.debug(
                    "ignored a replay request of %d frames: expected an empty one and one of 8 bytes", len(frames)
                )
                return
            first = int.from_bytes(frames[2], "big")
            if not self._oldest <= first <= self.num_published:
                self._wants_snapshot = True
            self._replay = frames[0], max(first, self._oldest)
        if self._replay is not None:
            client, first = self._replay
            first = max(first, self._oldest)  # some may have left the buffer since
            end = min(first + _REPLAY_BATCHES, self.num_published)
            for number in range(first, end):
                payload = self._buffer[number - self._oldest]
                self._replayer.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            self._replay = client, end
            if end == self.num_published:
                self._replayer.send_multipart((client, b"", b"", _END, b""))
                self._replay = None
