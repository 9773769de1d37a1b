"""HTTP connections: uvicorn's h11 protocol with limits, and a direct write path for streamed tokens.

A client has `header_s` seconds, from the moment it connects, to send its headers: at most `max_headers`, of at most
`max_header_bytes`. There are at most `max_connections` connections. `http.read_body` limits the body,
`Connection.drain` slow readers.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import cast

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from paceline.config import ServerConfig
from paceline.server.errors import ApiError
from paceline.server.metrics import ServerCounters

log = logging.getLogger("paceline.server")
BACKLOG = 4096
# A chunk takes h11 10 µs, however small it is. Chunked bodies are read in small pieces, with pauses, so that they do
# not occupy the event loop; asyncio alone would read 256 KB at a time.
_READ_BYTES, _CHUNKED_READ_BYTES = 8192, 1024  # at a time
_MAX_PARSE_S, _MAX_CHUNKED_PARSE_S = 0.001, 0.0002  # of CPU time; a connection whose read takes longer is paused
_PAUSE_FACTOR = 4  # pauses between such reads, of all connections together, are that many times as long
_MAX_SMALL_CHUNKS, _MIN_CHUNK_BYTES = 4096, 16  # a body of more chunks with fewer bytes on average is refused
_LINGER_S = 2.0
_ACCEPTED = 16  # at a time: so many connections more can be open for a moment
_NUM_PROBES, _PROBES = 32, ("/health", "/ready", "/metrics")  # connections beyond max_connections, and what they serve
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES_LOG_S = 60.0


class _UvicornState(ServerState):
    """What the connections of a front end share. Computes the Date header when a response needs it; uvicorn's own
    server would refresh it every second."""

    def __init__(self) -> None:
        super().__init__()
        self._date = (0, b"")
        self._next_parse = 0.0
        self.idle: dict[Connection, None] = {}  # connections without a request; the first is idle for longest
        self._no_files_logged = -math.inf

    def pause_s(self, parse_s: float, now: float) -> float:
        """How long to pause a connection whose data took `parse_s` to parse. Paused connections resume one after the
        other, so together they use a fifth of the event loop's time, however many there are."""
        self._next_parse = max(self._next_parse, now) + _PAUSE_FACTOR * parse_s
        return self._next_parse - now

    def close_idle(self, count: int) -> None:
        for connection in list(self.idle)[:count]:
            connection.close_idle()

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """asyncio accepts no connection for a second when no file descriptor is left, and reports it for each try."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_FILES and "accept" in str(context["message"])):
            loop.default_exception_handler(context)
            return
        self.close_idle(_ACCEPTED)
        if time.monotonic() - self._no_files_logged > _NO_FILES_LOG_S:
            self._no_files_logged = time.monotonic()
            log.warning(
                "no connection can be accepted (%s), so idle ones are closed: raise `ulimit -n` (systemd: "
                "LimitNOFILE), or lower max_connections",
                error.strerror,
            )

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return [(b"date", self._date[1])]

    @default_headers.setter
    def default_headers(self, _: list[tuple[bytes, bytes]]) -> None:
        pass


class _HeaderBuffer(ReceiveBuffer):
    """Checks the lines of headers, and of the trailers of a chunked body, before h11 parses them, which takes 10 µs a
    line. What has been checked is not checked again when more arrives."""

    def __init__(self, limits: ServerConfig) -> None:
        super().__init__()
        self._limits = limits
        self._checked = self._num_lines = 0  # of the headers that are arriving
        self.error: ApiError | None = None

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if not self._data.startswith(b"\r\n"):  # no trailers
            self.error = self._check()
            if self.error is not None:
                raise h11.RemoteProtocolError(self.error.message)
        lines = super().maybe_extract_lines()
        if lines is not None:
            self._checked = self._num_lines = 0
        return lines

    def _check(self) -> ApiError | None:
        data, limits = self._data, self._limits
        end = data.find(b"\r\n\r\n", max(0, self._checked - 3))
        stop, num_bytes = (len(data), len(data)) if end < 0 else (end + 2, end + 4)
        if num_bytes > limits.max_header_bytes:
            return ApiError(
                f"The request line and headers are longer than {limits.max_header_bytes} bytes: send less, or raise "
                "the server's max_header_bytes.",
                status=431,
                code="headers_too_large",
            )
        num_lines, before = data.count(b"\n", self._checked, stop), max(0, self._checked - 1)
        # Proxies and servers read such lines differently, which lets a client smuggle a request: RFC 9112, 2.2 and 5.2.
        for what, is_invalid in (
            ("ends in LF without CR", num_lines != data.count(b"\r\n", before, stop)),
            ("continues the one before (obs-fold)", any(data.find(b, before, stop) >= 0 for b in (b"\n ", b"\n\t"))),
        ):
            if is_invalid:
                return _invalid(f"A line of the headers {what}: send every header in one line that ends in CRLF.")
        self._num_lines += num_lines
        self._checked = max(self._checked, stop)
        if self._num_lines > 1 + limits.max_headers:  # the request line is one
            return ApiError(
                f"The request has more than {limits.max_headers} headers: send fewer, or raise the server's "
                "max_headers.",
                status=431,
                code="too_many_headers",
            )
        return None


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_http")


class _Parser(h11.Connection):
    """Refuses requests that h11 accepts: headers as in `_HeaderBuffer`, a body that is framed twice, and bodies of very
    many very small chunks."""

    _num_chunks = _num_bytes = 0  # of the body

    def __init__(self, limits: ServerConfig) -> None:
        # The limit is of chunk headers too. `_HeaderBuffer` refuses headers before h11 does.
        super().__init__(h11.SERVER, limits.max_header_bytes + _READ_BYTES)
        self._receive_buffer: _HeaderBuffer = _HeaderBuffer(limits)

    @property
    def error(self) -> ApiError | None:
        """Why the request was refused; None if h11 knows better."""
        return self._receive_buffer.error

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end  # not its start: the bytes of a whole chunk are counted by then
            self._num_bytes += len(event.data)
            if self._num_chunks > _MAX_SMALL_CHUNKS and self._num_bytes < _MIN_CHUNK_BYTES * self._num_chunks:
                self._refuse(
                    ApiError(
                        f"The body has more than {_MAX_SMALL_CHUNKS} chunks, of less than {_MIN_CHUNK_BYTES} bytes on "
                        "average: send larger chunks, or a Content-Length.",
                        code="chunks_too_small",
                    )
                )
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                given = "with Content-Length" if b"content-length" in names else "in HTTP/1.0"
                self._refuse(_invalid(f"Transfer-Encoding is given {given}: the length of the body is ambiguous."))
        return event

    def _refuse(self, error: ApiError) -> None:
        self._receive_buffer.error = error
        raise h11.RemoteProtocolError(error.message)


class Connection(H11Protocol):
    def __init__(
        self,
        config: uvicorn.Config,
        state: _UvicornState,
        limits: ServerConfig,
        counters: ServerCounters,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, state, {"connection": self}, loop)
        self.conn: _Parser = _Parser(limits)
        self._state, self._limits, self._counters = state, limits, counters
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_chunked = False  # the body of the last request
        self._refused = False  # further data is not read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._limit_reads(is_chunked_body=False)
        self._counters.connections += 1
        num_extra = len(self.connections) - self._limits.max_connections
        if num_extra > 0 and self._state.idle:
            self._state.close_idle(1)
        elif num_extra > _NUM_PROBES:
            self._refuse(self._too_many())
            return
        elif num_extra > 0:
            self.app = self._serve_probe
        self._state.idle[self] = None
        self._start_header_timer()

    async def _serve_probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What orchestrators ask is answered also when all connections have requests: they would end the server."""
        if scope["path"] in _PROBES:
            await self.config.loaded_app(scope, receive, send)
        else:
            error = self._too_many()
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": error.body()})

    def _too_many(self) -> ApiError:
        return ApiError(
            f"{self._limits.max_connections} connections are open, the server's max_connections: retry later.",
            status=503,
            kind="server_error",
            code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )

    def close_idle(self) -> None:
        """Makes room for another connection, at once: what the client has not read of its response is lost."""
        self._state.idle.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def on_response_complete(self) -> None:
        self._state.idle[self] = None
        super().on_response_complete()  # which begins the next request, if it has arrived

    def connection_lost(self, exc: Exception | None) -> None:
        self._counters.connections -= 1
        self._state.idle.pop(self, None)
        self._stop_header_timer()
        super().connection_lost(exc)
        # The scope of a request refers to its connection. Without these cycles, closed connections are freed at once,
        # and not by the garbage collector, which runs once a minute under load.
        self.app_state, self.cycle, self.scope = {}, None, None  # type: ignore[assignment]

    def handle_events(self) -> None:
        if self.transport.is_closing():
            return
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._state.idle.pop(self, None)
            self._stop_header_timer()
            self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        elif self._header_timer is None and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._start_header_timer()  # the next request on this connection has begun to arrive
        self._limit_reads(is_chunked_body=self._is_chunked and self.conn.their_state is h11.SEND_BODY)

    def send_400_response(self, msg: str) -> None:
        error = self.conn.error
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # a response is being sent, and nothing else can be
        elif error is not None or self.cycle is None or self.cycle.response_complete:
            self._refuse(error or _invalid(f"{msg} Send HTTP/1.1."), linger=True)
        else:
            self._refuse(_invalid(f"{msg} The body is not framed as its headers say."))

    def _refuse(self, error: ApiError, *, linger: bool = False) -> None:
        """Responds to a request that does not reach the app, and closes the connection. With `linger`, what the client
        still sends is read for a while: data that nobody reads would reset the connection and lose the response."""
        self._stop_header_timer()
        if self.cycle is not None and not self.cycle.response_complete:  # the app may not write behind this response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error.body()
        own = {"Connection": "close", "Content-Type": "application/json", "Content-Length": str(len(body))}
        headers = {**error.headers, **own}
        lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
        status = HTTPStatus(error.status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n"
        self.transport.write(head.encode() + body)
        if linger:
            self._refused = True
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()
            self._abort_later()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began, max_parse_s = time.thread_time(), self._max_parse_s
        super().data_received(data)
        took = time.thread_time() - began
        if took > max_parse_s:
            self.transport.pause_reading()
            self.loop.call_later(self._state.pause_s(took, time.monotonic()), self._resume_reading)

    def _resume_reading(self) -> None:
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _limit_reads(self, *, is_chunked_body: bool) -> None:
        num_bytes = _CHUNKED_READ_BYTES if is_chunked_body else _READ_BYTES
        self.transport.max_size = num_bytes  # type: ignore[attr-defined]
        self._max_parse_s = _MAX_CHUNKED_PARSE_S if is_chunked_body else _MAX_PARSE_S

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.header_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._counters.slow_clients += 1
        self._refuse(
            ApiError(
                f"The headers did not arrive within {self._limits.header_s:g} seconds: send them faster.",
                status=408,
                code="headers_too_slow",
            )
        )

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def _abort_later(self) -> None:
        """`close` waits until the client has read everything sent, which may never happen."""
        self.loop.call_later(self._limits.slow_reader_s, self.transport.abort)

    # ------------------------------------------------------------------ for `EventStream`

    def write_chunk(self, data: bytes) -> bool:
        """Writes a chunk of the body, bypassing h11. Returns whether the client keeps up; if not, await `drain`."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused

    async def drain(self) -> None:
        """Waits until the client has read enough. A slow client is disconnected, which aborts its request."""
        try:
            await asyncio.wait_for(self.flow.drain(), self._limits.slow_reader_s)
        except TimeoutError:
            self._counters.slow_clients += 1
            self.transport.abort()


def is_loopback(listening_socket: socket.socket) -> bool:
    """Whether only programs of this machine can connect."""
    return ipaddress.ip_address(listening_socket.getsockname()[0]).is_loopback


async def listen(
    app: Callable[..., object], config: ServerConfig, listening_socket: socket.socket, counters: ServerCounters
) -> asyncio.base_events.Server:
    """Starts accepting connections."""
    settings = uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=int(max(1, config.keep_alive_s)),
    )
    settings.load()
    loop = asyncio.get_running_loop()
    state = _UvicornState()
    loop.set_exception_handler(state.on_loop_error)
    make = partial(Connection, settings, state, config, counters, loop)
    # asyncio accepts up to `backlog` connections at a time. With several workers a small value spreads a burst over
    # them; the socket's own backlog is set afterwards.
    backlog = 1 if config.workers > 1 else _ACCEPTED
    server = await loop.create_server(make, sock=listening_socket, backlog=backlog)
    listening_socket.listen(BACKLOG)
    return server
