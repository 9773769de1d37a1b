"""KvConnection: framed messages over a socket, in both directions, each on a thread of its own.

Sending never blocks the caller: messages are queued, and each may wait for copies that must end before it is sent. Over
a Unix socket pages are in shared memory, whose descriptors are passed along; over TCP they follow their message, or
NIXL writes them before it is sent.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.cluster.kv_nixl import MemoryMapped, NixlMemory, RemoteMemory, RemotePages
from paceline.cluster.kv_protocol import (
    MAX_HANDSHAKE_BYTES,
    Challenge,
    Hello,
    KvLayout,
    KvMessage,
    KvProtocolError,
    KvRejected,
    PagesSent,
    Ping,
    Pong,
    Rejected,
    Welcome,
    encode_frame,
    is_proof,
    prove,
    read_message,
)
from paceline.request import PacelineError, Unavailable
from paceline.shared_pages import PagePart, SharedPages

log = logging.getLogger("paceline.kv")
HANDSHAKE_S = 10.0  # for all of it, however slowly the peer sends
JOIN_S = 10.0  # for threads to end; those that a dead device holds up are left behind
_SEND_TIMEOUT_S = 30.0  # a peer that reads nothing for so long is lost
_USER_TIMEOUT_S = 15.0  # what is sent and not acknowledged for so long ends a TCP connection
_NONCE_BYTES = 32
_MAX_DESCRIPTORS = 64  # one for each rank
_EMPTY: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class Waitable(Protocol):
    def wait(self) -> None: ...


class Handler(Protocol):
    """Called on the connection's reading thread."""

    def on_message(self, message: KvMessage, payload: npt.NDArray[np.uint8]) -> None: ...

    def on_closed(self, reason: str) -> None:
        """Called once, after the last message. Queued messages that were not sent are dropped, their copies ended."""


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """unix:<path> or tcp://<host>:<port>."""
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not port.isdigit() or not host:
        raise PacelineError(f"the address {address!r} is not unix:<path> or tcp://<host>:<port>.")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]").replace("*", "0.0.0.0"), int(port))


def connect(address: str, timeout_s: float = HANDSHAKE_S) -> socket.socket:
    family, where = parse_address(address)
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout_s)
        found.connect(where)
        set_options(found)
    except BaseException:
        found.close()
        raise
    return found


def bind(address: str) -> socket.socket:
    family, where = parse_address(address)
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen()
    except OSError as error:
        found.close()
        raise Unavailable(f"cannot listen for decode engines on {address}: {error}: choose another address.") from None
    return found


def set_options(found: socket.socket) -> None:
    """Of both ends: a link that is cut says nothing, and is noticed by what is not acknowledged."""
    if found.family == socket.AF_UNIX:
        return
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", int(1000 * _USER_TIMEOUT_S)),
        ("TCP_KEEPIDLE", int(_USER_TIMEOUT_S / 3)),
        ("TCP_KEEPINTVL", int(_USER_TIMEOUT_S / 3)),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):  # not on every system
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---------------------------------------------------------------------- handshake


def greet(
    peer: socket.socket, token: str, layout: KvLayout, shared: SharedPages | None, memory: NixlMemory | None = None
) -> bool:
    """The decode engine's side. `shared`: its memory, which the prefill engine maps; `memory`: the same, if NIXL may
    write it. Returns whether pages are written there: if not, they are sent. Raises KvRejected."""
    read = _handshake_reader(peer)
    challenge = read_message(read, MAX_HANDSHAKE_BYTES)
    if not isinstance(challenge, Challenge):
        raise KvProtocolError("the peer is not a prefill engine: it began with another message.")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = prove(token, "decode", challenge.nonce)
    frame = encode_frame(Hello(answer, nonce, layout, 0 if shared is None else shared.num_pages, memory is not None))
    if shared is None:
        peer.sendall(frame)
    else:  # the descriptors travel with the first byte
        descriptors = array.array("i", [part.descriptor for part in shared.parts])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        peer.sendall(frame[peer.sendmsg([frame], rights) :])
    reply = read_message(read, MAX_HANDSHAKE_BYTES)
    if isinstance(reply, Rejected):
        raise KvRejected(reply.reason)
    if not isinstance(reply, Welcome) or not is_proof(reply.answer, token, "prefill", nonce):
        raise KvRejected("the prefill engine does not know kv_token: start both with the same one.")
    if memory is None or not reply.nixl:
        if memory is not None:
            log.warning("pages are sent over TCP: the prefill engine has another kv_transport")
        return shared is not None
    peer.sendall(encode_frame(memory.describe()))
    mapped = read_message(read, MAX_HANDSHAKE_BYTES)
    if not isinstance(mapped, MemoryMapped):
        raise KvProtocolError("the prefill engine did not say whether it can write by NIXL.")
    if mapped.error:
        log.warning("pages are sent over TCP: the prefill engine cannot write by NIXL (%s)", mapped.error)
    return not mapped.error


def welcome(
    peer: socket.socket, token: str, layout: KvLayout, memory: NixlMemory | None = None
) -> SharedPages | RemotePages | None:
    """The prefill engine's side. `memory`: its own, if NIXL may be used. Returns the decode engine's memory, if pages
    are written there. Raises KvRejected."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    descriptors: list[int] = []
    read = _handshake_reader(peer, descriptors)
    peer.sendall(encode_frame(Challenge(nonce)))
    try:
        hello = read_message(read, MAX_HANDSHAKE_BYTES)
        if not isinstance(hello, Hello) or not is_proof(hello.answer, token, "decode", nonce):
            reason = "kv_token is another one: start both engines with the same."
        elif differences := layout.differences(hello.layout):
            reason = f"the KV layouts differ: {differences}."
        elif hello.num_shared_pages and len(descriptors) != layout.tp:
            reason = f"{layout.tp} descriptors of shared memory are expected, and {len(descriptors)} came."
        else:
            parts = []
            for page_bytes in layout.rank_page_bytes if hello.num_shared_pages else ():
                parts.append(PagePart(descriptors[0], hello.num_shared_pages, page_bytes))
                del descriptors[0]  # it owns it
            shared = SharedPages(parts) if parts else None
            by_nixl = hello.nixl and memory is not None
            peer.sendall(encode_frame(Welcome(prove(token, "prefill", hello.nonce), by_nixl)))
            return _mapped(peer, read, memory) if by_nixl and memory is not None else shared
        peer.sendall(encode_frame(Rejected(reason)))
        raise KvRejected(reason)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(peer: socket.socket, read: Callable[[int], bytes], memory: NixlMemory) -> RemotePages | None:
    """The memory that a decode engine offers, if NIXL can write it."""
    offered = read_message(read, MAX_HANDSHAKE_BYTES)
    if not isinstance(offered, RemoteMemory):
        raise KvProtocolError("the decode engine did not say where its memory is.")
    try:
        remote = memory.connect(offered)
    except Exception as error:  # NIXL's own exceptions have no common class
        log.warning("pages are sent over TCP: NIXL cannot reach the decode engine (%s)", error)
        peer.sendall(encode_frame(MemoryMapped(str(error)[:1000] or type(error).__name__)))
        return None
    peer.sendall(encode_frame(MemoryMapped()))
    return remote


def _handshake_reader(peer: socket.socket, descriptors: list[int] | None = None) -> Callable[[int], bytes]:
    """Reads until HANDSHAKE_S from now. descriptors: gets those that a Unix socket passes along."""
    deadline = time.monotonic() + HANDSHAKE_S
    peer.settimeout(HANDSHAKE_S)

    def receive(count: int) -> bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise KvProtocolError(f"the handshake has not ended after {HANDSHAKE_S:g} s.")
        peer.settimeout(left_s)
        if descriptors is None or peer.family != socket.AF_UNIX:
            return peer.recv(count)
        data, found, _, _ = socket.recv_fds(peer, count, _MAX_DESCRIPTORS)
        descriptors.extend(found)
        return data

    return partial(_read_exactly, receive)


def _read_exactly(receive: Callable[[int], bytes], count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = receive(min(count - len(data), 1 << 20))
        if not piece:
            raise KvProtocolError("the connection ended within a message.")
        data += piece
    return bytes(data)


# ---------------------------------------------------------------------- connection


@dataclass(frozen=True, slots=True)
class _Sending:
    write: Callable[[], None]
    after: Iterable[Waitable]
    then: Callable[[], None] = lambda: None


class KvConnection:
    def __init__(self, peer: socket.socket, handler: Handler, name: str) -> None:
        """Takes over a socket after the handshake."""
        self._peer, self._handler = peer, handler
        self._queue: SimpleQueue[_Sending | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # one message at a time
        self._has_ended = False  # nothing is sent any more
        self._closed = threading.Event()
        self._reason = ""
        peer.settimeout(None)
        seconds = int(_SEND_TIMEOUT_S)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, np.array([seconds, 0], np.int64).tobytes())
        self._writer = threading.Thread(target=self._write, name=f"{name}-write", daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, name=f"{name}-read", daemon=True)
        self._reader.start()

    def send(
        self,
        message: KvMessage,
        *,
        after: Iterable[Waitable] = (),
        before: Callable[[], None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends a message once `after` has ended, and `before` was called. `then` is called in any case, sent or
        not."""

        def write() -> None:
            before()
            self._peer.sendall(encode_frame(message))

        self._put(_Sending(write, after, then))

    def send_pages(
        self, message: PagesSent, memory: SharedPages, pages: npt.NDArray[np.int32], after: Iterable[Waitable]
    ) -> None:
        """Sends a message with these pages of `memory` as its payload, once `after` has ended."""

        def write() -> None:
            payload = memory.read(pages)
            checked = msgspec.structs.replace(message, num_bytes=payload.nbytes, checksum=zlib.crc32(payload.data))
            self._peer.sendall(encode_frame(checked))
            self._peer.sendall(payload.data)

        self._put(_Sending(write, after))

    def send_now(self, message: Ping | Pong) -> None:
        """Sends a message at once, before those that wait for copies. It may block, as long as the peer does not
        read."""
        with self._sending, contextlib.suppress(OSError):  # the reading thread notices the end
            self._peer.sendall(encode_frame(message))

    def try_to_ping(self) -> bool:
        """Sends a ping if that does not block."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            poll = select.poll()
            poll.register(self._peer, select.POLLOUT)
            if not poll.poll(0):
                return False
            self._peer.sendall(encode_frame(Ping()))
        except (OSError, ValueError):  # as above
            return False
        finally:
            self._sending.release()
        return True

    def _put(self, sending: _Sending) -> None:
        with self._lock:
            if not self._has_ended:
                self._queue.put(sending)
                return
        sending.then()

    def close(self, reason: str) -> None:
        """Ends the connection; the handler is told."""
        self._reason = self._reason or reason
        self._closed.set()
        with contextlib.suppress(OSError):  # the peer may be gone already
            self._peer.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Waits until a closed connection has ended and the handler has been told. Not on its own threads."""
        self._reader.join(JOIN_S)

    def _write(self) -> None:
        while (sending := self._queue.get()) is not None:
            try:
                for one in sending.after:
                    one.wait()
                with self._sending:
                    if not self._closed.is_set():
                        sending.write()
            except Exception as error:  # of the socket or of the copies: the transfers of this connection are lost
                self.close(f"sending failed: {error or type(error).__name__}")
            finally:
                sending.then()

    def _read(self) -> None:
        read, buffer = partial(_read_exactly, self._peer.recv), _EMPTY
        try:
            while not self._closed.is_set():
                message = read_message(read)
                payload = _EMPTY
                if isinstance(message, PagesSent) and message.num_bytes:
                    if len(buffer) < message.num_bytes:
                        buffer = np.empty(message.num_bytes, np.uint8)
                    payload = buffer[: message.num_bytes]
                    self._fill(payload)
                self._handler.on_message(message, payload)
        except Exception as error:
            self.close(str(error) or type(error).__name__)
        with self._lock:
            self._has_ended = True
            self._queue.put(None)
        self._writer.join()  # copies that were launched have ended
        self._peer.close()
        self._handler.on_closed(self._reason)

    def _fill(self, payload: npt.NDArray[np.uint8]) -> None:
        view = payload.data
        while view:
            count = self._peer.recv_into(view)
            if not count:
                raise KvProtocolError("the connection ended within pages.")
            view = view[count:]
