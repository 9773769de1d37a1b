"""A subscriber to KV events, written from vLLM's published field list alone."""

from __future__ import annotations

from types import TracebackType

import msgspec
import zmq

TIMEOUT_MS = 60_000  # generous: the machine may be busy
END = 2**64 - 1


class Event(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(Event, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event, forbid_unknown_fields=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


decoder = msgspec.msgpack.Decoder(EventBatch)


class Subscriber:
    """Keeps what a router would know: the hashes on each medium."""

    def __init__(self, address: str, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        self._socket.connect(address)
        self.known: dict[str | None, set[int]] = {}
        self.numbers: list[int] = []
        self.topics: set[bytes] = set()
        self.replayed = -1  # batches up to this number are known from a replay
        self.last: EventBatch | None = None

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._socket.poll(timeout_ms))

    def receive(self) -> EventBatch:
        while True:
            assert self.poll(TIMEOUT_MS), "no KV event came"
            topic, number, payload = self._socket.recv_multipart()
            assert len(number) == 8
            if int.from_bytes(number, "big") > self.replayed:
                break
        self.topics.add(topic)
        self.numbers.append(int.from_bytes(number, "big"))
        return self.apply(decoder.decode(payload))

    def apply(self, batch: EventBatch) -> EventBatch:
        self.last = batch
        for event in batch.events:
            match event:
                case BlockStored():
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    self.known.setdefault(event.medium, set()).update(event.block_hashes)
                case BlockRemoved():
                    self.known.setdefault(event.medium, set()).difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.known.clear()
        return batch

    def replay(self, address: str, first: int) -> list[tuple[int, EventBatch]]:
        """The answer to a replay request, without its end."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(address)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert socket.poll(TIMEOUT_MS), "the replay did not end"
            delimiter, topic, number, payload = socket.recv_multipart()
            assert delimiter == b""
            if int.from_bytes(number, "big") == END:
                assert (topic, payload) == (b"", b"")
                socket.close(linger=0)
                return found
            self.topics.add(topic)
            found.append((int.from_bytes(number, "big"), decoder.decode(payload)))
