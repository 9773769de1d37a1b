"""PrefillServer: the prefill engine's side of prefill/decode disaggregation.

Decode engines connect and ask for prompts. Each is run as a request that samples one token, which nobody sees: it shows
that the KV contains no NaN. After every step of the engine, the pages that its passes have completed are exported, so
pages travel while the next chunk is computed. Pages that were cached here are sent too.

    StartPrefill ─▶ job ─▶ step, export, step, export ─▶ PagesSent ... PrefillDone
                                    │ shared memory: into the decode engine's pages
                                    └ TCP, NIXL: into a staging buffer, then to the socket or by NIXL

Passes are captured in graphs or launched as a whole, so pages are exported chunk by chunk, not layer by layer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.cluster.handshakes import LOG_INTERVAL_S, Handshakes, RejectionLog, group_of
from paceline.cluster.kv_connection import HANDSHAKE_S, JOIN_S, KvConnection, bind, set_options, welcome
from paceline.cluster.kv_nixl import NixlMemory, RemotePages
from paceline.cluster.kv_protocol import (
    CancelPrefill,
    KvLayout,
    KvMessage,
    KvProtocolError,
    PagesSent,
    Ping,
    Pong,
    PrefillDone,
    PrefillFailed,
    StartPrefill,
)
from paceline.engine.job import Job
from paceline.request import FinishReason, PacelineError, SamplingParams
from paceline.scheduler.page_pool import NO_PAGES, PagePool, Pages
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.shared_pages import SharedPages

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.output import OutputDelta

log = logging.getLogger("paceline.kv")
STAGING_BYTES = 1 << 30  # for pages that wait for a socket
_MESSAGE_BYTES = 4 << 20  # of pages in one message over TCP
_ACCEPT_RETRY_S = 0.1
# Greedy, and one token: it proves that the KV is free of NaN.
_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A prompt that is computed for a decode engine. Fields below `targets` are used by the engine's thread."""

    link: _Link
    start: StartPrefill
    job_id: str
    targets: Pages  # in the decode engine's memory, or in the staging buffer
    request: TrackedRequest | None = None
    num_sent: int = 0  # pages
    cached_tokens: int | None = None  # when it has finished
    end_reason: str | None = None  # why it is aborted, if it is
    failure: str | None = None

    def put(self, delta: OutputDelta) -> None:
        if delta.finish_reason is FinishReason.LENGTH:
            self.cached_tokens = 0 if delta.usage is None else delta.usage.cached_tokens
        elif delta.finish_reason is not None:
            self.failure = self.failure or self.end_reason or delta.error or delta.finish_reason.value

    def refuse(self, error: PacelineError) -> None:
        self.failure = self.failure or str(error)


@dataclass(slots=True, eq=False)
class _Link:
    """A connected decode engine."""

    server: PrefillServer
    name: str
    memory: SharedPages | RemotePages | None  # of the decode engine, if pages are written there
    connection: KvConnection = field(init=False)
    transfers: dict[str, _Outgoing] = field(default_factory=dict)  # guarded by the server's lock

    @property
    def shared(self) -> SharedPages | None:
        return self.memory if isinstance(self.memory, SharedPages) else None

    @property
    def remote(self) -> RemotePages | None:
        return self.memory if isinstance(self.memory, RemotePages) else None

    def on_message(self, message: KvMessage, payload: npt.NDArray[np.uint8]) -> None:
        match message:
            case StartPrefill():
                self.server.start(self, message)
            case CancelPrefill():
                self.server.cancel(self, message.id)
            case Ping():
                self.connection.send_now(Pong())
            case _:
                raise KvProtocolError(f"a decode engine sent {type(message).__name__}.")

    def on_closed(self, reason: str) -> None:
        log.info("decode engine %s has disconnected: %s", self.name, reason)
        self.server.disconnected(self)


class PrefillServer:
    def __init__(
        self,
        engine: Engine,
        layout: KvLayout,
        token: str,
        address: str,
        *,
        on_received: Callable[[str], None] = lambda front_end: None,
        staging_bytes: int = STAGING_BYTES,
        nixl: bool = False,
    ) -> None:
        """Listens on `address`. `after_step` must be called after every step of the engine, on its thread.
        `on_received` is called with the front end of each prompt. nixl: decode engines that have it, too, get their
        pages by NIXL."""
        self._engine, self._layout, self._token = engine, layout, token
        self._on_received = on_received
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._transfers: dict[str, _Outgoing] = {}  # by job; those that have been submitted
        self._queued: deque[_Outgoing] = deque()  # until the staging buffer has space
        self._links: set[_Link] = set()
        self._staging: SharedPages | None = None
        self._pool = PagePool(0)
        if not address.startswith("unix:"):
            self._staging = SharedPages.create(max(1, staging_bytes // layout.page_bytes), *layout.rank_page_bytes)
            self._pool = PagePool(self._staging.num_pages)
            engine.executor.map_pages(self._staging)
        self._memory = NixlMemory(self._staging) if nixl and self._staging is not None else None
        self._is_closed = False
        self._handshakes: dict[threading.Thread, socket.socket] = {}
        self._strangers: Handshakes[threading.Thread] = Handshakes()
        self._rejections = RejectionLog()
        self._ending: set[threading.Thread] = set()  # of connections that are no longer in `_links`
        # Metrics
        self.num_bytes = self.num_started = self.num_completed = 0
        self.failures: Counter[str] = Counter()  # by cause
        self._socket = bind(address)
        self._socket.settimeout(LOG_INTERVAL_S)
        self._accepter = threading.Thread(target=self._accept, name="paceline-kv-accept", daemon=True)
        self._accepter.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def num_open(self) -> int:
        return len(self._transfers) + len(self._queued)

    def close(self) -> None:
        """Ends all connections, and the threads of this object. Not on the engine's thread: they may wait for it."""
        with self._lock:
            self._is_closed = True
        # A thread in `accept` does not notice that the socket is closed, but that it is shut down.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # not every system allows it for a listening socket
            log.debug("cannot shut down the listening socket", exc_info=True)
        self._socket.close()
        self._accepter.join(JOIN_S)
        with self._lock:
            handshakes = dict(self._handshakes)
        for thread, peer in handshakes.items():
            with contextlib.suppress(OSError):  # the peer may be gone already
                peer.shutdown(socket.SHUT_RDWR)
            thread.join(JOIN_S)
        with self._lock:
            links = list(self._links)
        for link in links:
            link.connection.close("the prefill engine is closed")
        for link in links:
            link.connection.join()
        with self._lock:
            ending = list(self._ending)
        for thread in ending:
            thread.join(JOIN_S)
        if self._memory is not None:
            self._memory.close()
        if self._staging is not None:
            self._staging.close()

    # ------------------------------------------------------------------ connections

    def _accept(self) -> None:
        while True:
            try:
                peer, address = self._socket.accept()
            except TimeoutError:
                with self._lock:
                    self._rejections.flush(time.monotonic())
                continue
            except OSError as error:
                if self._is_closed:
                    return
                with self._lock:  # no descriptors left, ...
                    self._rejections.add(f"its connection cannot be accepted: {error}", time.monotonic())
                time.sleep(_ACCEPT_RETRY_S)
                continue
            thread = threading.Thread(target=self._welcome, args=(peer,), name="paceline-kv-welcome", daemon=True)
            is_welcome, victim = True, None
            with self._lock:
                if peer.family != socket.AF_UNIX:  # which only the user of this process can connect to
                    is_welcome, victim = self._strangers.admit(thread, group_of(address[0]), time.monotonic())
                if is_welcome:
                    self._handshakes[thread] = peer
                if victim is not None:
                    with contextlib.suppress(OSError):  # it may have ended
                        self._handshakes[victim].shutdown(socket.SHUT_RDWR)
            if is_welcome:
                thread.start()
            else:
                self._reject(f"{group_of(address[0])} connects too often", peer)

    def _reject(self, reason: str, peer: socket.socket) -> None:
        peer.close()
        with self._lock:
            self.failures["rejected"] += 1
            self._rejections.add(reason, time.monotonic())

    def _welcome(self, peer: socket.socket) -> None:
        try:
            self._connect(peer)
        finally:
            with self._lock:
                self._strangers.ended(threading.current_thread())
                del self._handshakes[threading.current_thread()]

    def _connect(self, peer: socket.socket) -> None:
        name = f"decode-{next(self._numbers)}"
        try:
            set_options(peer)
            memory = welcome(peer, self._token, self._layout, self._memory)
            if isinstance(memory, SharedPages):
                memory.connection = peer.fileno()
                self._engine.executor.map_pages(memory)
        except (OSError, PacelineError, RuntimeError, ValueError) as error:
            self._reject(str(error), peer)
            return
        link = _Link(self, name, memory)
        with self._lock:
            self._links.add(link)
            link.connection = KvConnection(peer, link, f"paceline-kv-{name}")
        log.info("%s is connected by %s", name, "shared memory" if link.shared else "NIXL" if link.remote else "TCP")

    def disconnected(self, link: _Link) -> None:
        """Its copies have ended."""
        with self._lock:
            self._links.discard(link)
            self._ending = {one for one in self._ending if one.is_alive()} | {threading.current_thread()}
            ended = list(link.transfers.values())
            self._queued = deque(one for one in self._queued if one.link is not link)
        for one in ended:
            self._abort(one, "connection")
        if link.remote is not None:
            link.remote.close()
        if link.shared is not None:
            # Exports that were launched after the connection ended may still run.
            shared = link.shared
            try:
                executor = self._engine.executor
                self._engine.call(lambda _: executor.after_launched()).result(HANDSHAKE_S).wait()
                executor.unmap_pages(shared)
            except (PacelineError, TimeoutError):
                log.debug("the engine has ended: its memory is unmapped with it")
            shared.close()

    # ------------------------------------------------------------------ prompts

    def start(self, link: _Link, message: StartPrefill) -> None:
        size, count = self._layout.page_size, message.num_pages
        targets = np.frombuffer(message.targets, np.int32)
        is_whole = len(message.prompt) == 4 * size * (message.first_page + count)
        if count < 1 or message.first_page < 0 or not is_whole:
            raise KvProtocolError(f"{len(message.prompt) // 4} tokens for pages {message.first_page} and {count} more.")
        if len(message.keys) not in (0, len(message.prompt)):
            raise KvProtocolError(f"{len(message.keys) // 4} keys for {len(message.prompt) // 4} tokens.")
        if link.memory is not None and (
            len(targets) != count or targets.min() < 0 or targets.max() >= link.memory.num_pages
        ):
            raise KvProtocolError(f"{len(targets)} target pages for {count}, of {link.memory.num_pages}.")
        self._on_received(message.front_end)
        one = _Outgoing(link, message, f"prefill-{link.name}-{message.id}", targets)
        with self._lock:
            if message.id in link.transfers:
                raise KvProtocolError(f"transfer {message.id} was started twice.")
            self.num_started += 1
            link.transfers[message.id] = one
            self._queued.append(one)
        self._submit_queued()

    def _submit_queued(self) -> None:
        """Submits the jobs for which there is space: in order, so that a long one is not overtaken for ever."""
        while True:
            with self._lock:
                if not self._queued:
                    return
                one = self._queued[0]
                count = one.start.num_pages
                if one.link.shared is None and self._pool.num_free < count <= self._pool.num_pages:
                    return
                self._queued.popleft()
                if one.link.shared is None and count <= self._pool.num_pages:
                    one.targets = self._pool.allocate(count)
                self._transfers[one.job_id] = one
            if one.start.weights != self._engine.weights.current:
                one.failure = f"the weights here have version {self._engine.weights.current}"
            elif not len(one.targets):
                one.failure = f"{count} pages are more than the {self._pool.num_pages} of the staging buffer"
            try:
                if one.failure is None:
                    self._engine.submit(self._job(one), one)
            except PacelineError as error:
                one.failure = str(error)
            if one.failure is not None and not self._wake_engine():
                self._end(one)

    def _job(self, one: _Outgoing) -> Job:
        start = one.start
        return Job(
            np.frombuffer(start.prompt, np.int32),
            _PARAMS,
            id=one.job_id,
            tenant=start.tenant,
            priority=start.priority,
            timeout_s=start.timeout_s,
            cache_salt=start.cache_salt,
            stream=False,
            is_exported=True,
            keys=np.frombuffer(start.keys, np.int32),
        )

    def cancel(self, link: _Link, id: str) -> None:
        with self._lock:
            one = link.transfers.get(id)
            if one is not None and one in self._queued:
                self._queued.remove(one)
                self._transfers[one.job_id] = one
        if one is None:  # it has ended: the answer to it is on its way, or the decode engine does not know that
            link.connection.send(PrefillFailed(id, "unknown"))
            return
        self._abort(one, "cancelled")
        self._wake_engine()

    def _abort(self, one: _Outgoing, reason: str) -> None:
        # In this order: when the engine's thread sees the failure, the request is about to end. Otherwise it could be
        # admitted after its transfer was forgotten, and nobody would release its hold.
        one.end_reason = reason
        self._engine.finish(one.job_id, FinishReason.ABORT)
        one.failure = one.failure or reason

    def _wake_engine(self) -> bool:
        """Has `after_step` called. False: the engine has ended, so it never will be."""
        try:
            self._engine.call(lambda _: None)
        except PacelineError:
            return False
        return True

    # ------------------------------------------------------------------ the engine's thread

    def after_step(self) -> None:
        """Exports what the passes launched so far complete."""
        if not self._transfers:
            return
        for one in list(self._transfers.values()):
            if one.failure is not None:
                self._end(one)
            elif one.request is None:
                one.request = self._engine.scheduler.requests.get(one.job_id)
            if one.request is not None and one.failure is None:
                self._export(one, one.request)

    def _export(self, one: _Outgoing, request: TrackedRequest) -> None:
        memory, start = self._engine.scheduler.memory, one.start
        is_finished = one.cached_tokens is not None
        pages = memory.exported_pages(request)[start.first_page : start.first_page + start.num_pages]
        if len(pages) > one.num_sent:
            self._send_pages(one, pages[one.num_sent :])
        memory.release_hold(request.id)
        if is_finished:
            if one.num_sent < start.num_pages:
                one.failure = f"{one.num_sent} of {start.num_pages} pages were computed"
            elif self._engine.weights.current != start.weights:
                one.failure = "the weights were replaced"
            self._end(one)

    def _send_pages(self, one: _Outgoing, pages: Pages) -> None:
        first, shared = one.num_sent, one.link.shared
        one.num_sent += len(pages)
        self.num_bytes += len(pages) * self._layout.page_bytes
        targets = one.targets[first : one.num_sent]
        if shared is not None:
            end = self._engine.executor.export_pages(pages, shared, targets)
            one.link.connection.send(PagesSent(one.start.id, first, len(pages)), after=(end,))
            return
        staging = self._staging
        assert staging is not None, "pages that are sent are staged"
        end = self._engine.executor.export_pages(pages, staging, targets)
        remote = one.link.remote
        if remote is not None:
            there = np.frombuffer(one.start.targets, np.int32)[first : one.num_sent]
            message = PagesSent(one.start.id, first, len(pages))
            one.link.connection.send(message, after=(end,), before=partial(remote.write, targets.copy(), there))
            return
        most = max(1, _MESSAGE_BYTES // self._layout.page_bytes)
        for at in range(0, len(pages), most):
            part = targets[at : at + most]
            one.link.connection.send_pages(PagesSent(one.start.id, first + at, len(part)), staging, part, (end,))

    def _end(self, one: _Outgoing) -> None:
        start, link = one.start, one.link
        # If it is aborted it may have been added since the last step, and may run once more.
        request = one.request or self._engine.scheduler.requests.get(one.job_id)
        if request is not None:
            request.is_exported = False
            self._engine.scheduler.memory.release_hold(request.id)
        with self._lock:
            self._transfers.pop(one.job_id, None)
            link.transfers.pop(start.id, None)
        if one.failure is None:
            assert one.cached_tokens is not None, "it has finished"
            self.num_completed += 1
            message: KvMessage = PrefillDone(start.id, start.num_pages, one.cached_tokens, start.weights)
        else:
            self.failures[one.end_reason or "failed"] += 1
            message = PrefillFailed(start.id, one.failure)
        staged, one.targets = one.targets if link.shared is None else NO_PAGES, NO_PAGES

        def free() -> None:
            with self._lock:
                self._pool.free(staged)
            self._submit_queued()

        link.connection.send(message, then=free if len(staged) else lambda: None)
