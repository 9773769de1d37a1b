"""KV pages that the ranks of tensor parallelism copy for other engines: memory, commands and their end.

Each rank copies its own part of a page, into its own file of the `SharedPages`. Rank 0 alone talks to other engines:

    rank 0   map_pages ── descriptor, by a socket ──▶ rank 1 maps its part ── reply ─▶
             export_pages ── ring, between passes ──▶ rank 1 copies ── report when it has ended ─▶

Copies end in the order in which they were launched, so a report needs no number. Neither mapping memory, which takes
seconds where it is pinned, nor waiting for copies holds up the passes of a rank: each has a thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec

from paceline.engine.executor import Completion, Executor
from paceline.engine.rank_messages import (
    AfterLaunched,
    CopiesEnded,
    ExportPages,
    MapPages,
    MemoryReply,
    MemoryRequest,
    ShareHostPages,
    UnmapPages,
)
from paceline.request import PacelineError
from paceline.shared_pages import PagePart, SharedPages

# ---------------------------------------------------------------------- rank 0


class _RankCopies:
    """The end of a copy on all other ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._missing = num_ranks
        self._error: PacelineError | None = None
        self._ended = threading.Event()

    def end(self, error: PacelineError | None) -> None:
        """On one rank."""
        self._error = self._error or error
        self._missing -= 1
        if not self._missing:
            self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class CopyReports:
    """What the other ranks report about copies."""

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._open: list[deque[_RankCopies]] = [deque() for _ in range(num_ranks)]
        self._lost: dict[int, PacelineError] = {}

    def expect(self) -> Completion:
        """Called before every message that the ranks report the end of."""
        with self._lock:
            found = _RankCopies(len(self._open))
            for index, copies in enumerate(self._open):
                if index in self._lost:
                    found.end(self._lost[index])
                else:
                    copies.append(found)
            return found

    def on_report(self, index: int, report: CopiesEnded) -> None:
        error = PacelineError(f"rank {index + 1} cannot copy KV pages: {report.error}") if report.error else None
        with self._lock:
            self._open[index].popleft().end(error)

    def on_lost(self, index: int, error: PacelineError) -> None:
        """Nothing comes from this rank any more."""
        with self._lock:
            self._lost[index] = error
            while self._open[index]:
                self._open[index].popleft().end(error)


class RankMemory:
    """Passes memory to the other ranks, and gets theirs. May be used by any thread."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)
        self._lock = threading.Lock()

    def join_host_pages(self, local: SharedPages) -> SharedPages:
        """The host memory tier of all ranks; local: of rank 0."""
        parts = list(local.parts)
        for rank in range(1, 1 + len(self._sockets)):
            reply, descriptors = self._ask(rank, ShareHostPages())
            parts.append(_mapped(descriptors, reply.num_pages, reply.page_bytes))
        return SharedPages(parts)

    def map(self, id: int, target: SharedPages) -> None:
        """Every rank maps its part. Raises if one cannot."""
        for rank, part in enumerate(target.parts[1:], 1):
            connection = () if target.connection is None else (target.connection,)
            self._ask(rank, MapPages(id, part.num_pages, part.page_bytes), part.descriptor, *connection)

    def unmap(self, id: int) -> None:
        """Also of ranks that have not mapped it."""
        for rank in range(1, 1 + len(self._sockets)):
            self._ask(rank, UnmapPages(id))

    def close(self) -> None:
        for one in self._sockets:
            one.close()

    def _ask(self, rank: int, request: MemoryRequest, *descriptors: int) -> tuple[MemoryReply, list[int]]:
        peer = self._sockets[rank - 1]
        try:
            with self._lock:
                _send(peer, request, descriptors)
                data, found = _receive(peer)
        except OSError as error:
            raise PacelineError(f"rank {rank} cannot share memory: {error}") from None
        reply = msgspec.json.decode(data, type=MemoryReply)
        if reply.error:
            raise PacelineError(f"rank {rank} cannot share memory: {reply.error}")
        return reply, found


# ---------------------------------------------------------------------- the other ranks


class RankCopier:
    """Maps memory for rank 0 and executes its copies."""

    def __init__(self, executor: Executor, memory: socket.socket, report: Callable[[CopiesEnded], None]) -> None:
        """memory: the socket of `RankMemory` to this rank."""
        self._executor, self._memory, self._report = executor, memory, report
        self._targets: dict[int, SharedPages] = {}
        self._connections: dict[int, list[int]] = {}  # by target: see `SharedPages.connection`
        self._launched: SimpleQueue[Completion | None] = SimpleQueue()
        self._reporter = threading.Thread(target=self._report_ends, name="paceline-copies", daemon=True)
        self._reporter.start()
        threading.Thread(target=self._serve, name="paceline-memory", daemon=True).start()

    def launch(self, message: ExportPages | AfterLaunched) -> None:
        """In the order of the passes."""
        if isinstance(message, AfterLaunched):
            self._launched.put(self._executor.after_launched())
        else:
            target = self._targets[message.target]
            self._launched.put(self._executor.export_pages(message.pages, target, message.targets))

    def close(self) -> None:
        """Waits until all copies have ended and were reported."""
        self._launched.put(None)
        self._reporter.join()

    def _report_ends(self) -> None:
        while (copies := self._launched.get()) is not None:
            try:
                copies.wait()
            except Exception as error:  # of the transfer that waits for it; if the device has failed, so do passes
                self._report(CopiesEnded(repr(error)))
            else:
                self._report(CopiesEnded())

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 has closed the socket
            while True:
                data, descriptors = _receive(self._memory)
                shared: list[int] = []
                try:
                    reply = self._answer(msgspec.json.decode(data, type=MemoryRequest), descriptors, shared)
                except Exception as error:  # rank 0 reports it, and does without this memory
                    reply = MemoryReply(str(error) or type(error).__name__)
                _send(self._memory, reply, shared)

    def _answer(self, request: MemoryRequest, descriptors: list[int], shared: list[int]) -> MemoryReply:
        """shared: gets the descriptors of the reply."""
        match request:
            case MapPages(id, num_pages, page_bytes):
                self._connections[id] = descriptors[1:]
                target = SharedPages([_mapped(descriptors[:1], num_pages, page_bytes)])
                self._executor.map_pages(target)
                self._targets[id] = target
            case UnmapPages(id):
                if (mapped := self._targets.pop(id, None)) is not None:
                    self._executor.unmap_pages(mapped)
                    mapped.close()
                for connection in self._connections.pop(id, ()):
                    os.close(connection)
            case ShareHostPages():
                host = self._executor.host_pages
                assert host is not None, "pages are received by an engine of role decode"
                shared.append(host.parts[0].descriptor)
                return MemoryReply(num_pages=host.num_pages, page_bytes=host.page_bytes)
        return MemoryReply()


# ---------------------------------------------------------------------- the socket: one line of JSON, and descriptors


def _send(peer: socket.socket, message: MemoryRequest | MemoryReply, descriptors: Sequence[int]) -> None:
    data = msgspec.json.encode(message) + b"\n"
    if descriptors:
        socket.send_fds(peer, [data], list(descriptors))
    else:
        peer.sendall(data)


def _receive(peer: socket.socket) -> tuple[bytes, list[int]]:
    data, descriptors = b"", list[int]()
    while not data.endswith(b"\n"):
        piece, found, _, _ = socket.recv_fds(peer, 1 << 12, 2)
        descriptors += found
        if not piece:
            raise ConnectionError("the process has ended")
        data += piece
    return data, descriptors


def _mapped(descriptors: list[int], num_pages: int, page_bytes: int) -> PagePart:
    (descriptor,) = descriptors
    try:
        return PagePart(descriptor, num_pages, page_bytes)
    except BaseException:
        os.close(descriptor)
        raise
