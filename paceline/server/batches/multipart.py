"""Uploads: multipart/form-data with one file, streamed to disk.

Pieces of the body are parsed and written in a thread, so a long upload neither blocks the event loop nor is in memory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from paceline.config import ServerConfig
from paceline.server.errors import ApiError
from paceline.server.http import ClientDisconnected, Receive
from paceline.server.limits import MAX_FIELD_BYTES, MAX_FILENAME_CHARACTERS, MAX_FORM_PARTS, MAX_UPLOAD_S

_PIECE_BYTES = 1 << 18  # parsed and written at a time
_MAX_HEADERS = 8192  # of one part
_MAX_OVERHEAD = 65_536  # of a body: headers and short parts
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME, _FILENAME = re.compile(r'[; ]name="([^"]*)"'), re.compile(r'filename="((?:[^"\\]|\\.)*)"')


class MultipartParser:
    """Takes the body in pieces. The content of the part `file` goes to `output`, short parts to `fields`."""

    def __init__(self, boundary: bytes, output: BinaryIO, max_bytes: int) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._output, self._max_bytes = output, max_bytes
        self._buffer = bytearray(b"\r\n")  # the first delimiter needs no line break before it
        self._part: str | None = None  # whose content is being read
        self._num_parts = 0
        self._in_preamble = True
        self.filename: str | None = None
        self.num_bytes = 0  # of the file
        self.fields: dict[str, bytes] = {}
        self.is_complete = False

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while not self.is_complete and self._step():
            pass
        if self.is_complete:
            self._buffer.clear()

    def _step(self) -> bool:
        """Reads to the end of a part, or of its headers. Returns whether it got there."""
        if self._part is None and not self._in_preamble:
            return self._read_headers()
        at = self._buffer.find(self._delimiter)
        # A delimiter may be cut in two: what could be its beginning stays.
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        self._add(bytes(self._buffer[:end]))
        del self._buffer[:end]
        after = len(self._delimiter)
        if at < 0 or len(self._buffer) < after + 2:
            return False
        following = bytes(self._buffer[after : after + 2])
        if following not in (b"--", b"\r\n"):
            raise _invalid("a boundary is not followed by a line break")
        self.is_complete = following == b"--"
        del self._buffer[:after]
        self._part, self._in_preamble = None, False
        return True

    def _read_headers(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEADERS:
                raise _invalid(f"the headers of a part are longer than {_MAX_HEADERS} bytes")
            return False
        headers = self._buffer[:end].decode("utf-8", "replace")
        del self._buffer[: end + 4]
        lines = [line for line in headers.split("\r\n") if line.lower().startswith("content-disposition:")]
        name = _NAME.search(lines[0]) if lines else None
        self._num_parts += 1
        if name is None:
            raise _invalid("a part has no name: send `Content-Disposition: form-data; name=...`")
        if self._num_parts > MAX_FORM_PARTS:
            raise _invalid(f"it has more than {MAX_FORM_PARTS} parts")
        self._part = name[1]
        if self._part in self.fields or (self._part == "file" and self.filename is not None):
            raise _invalid(f"it has two parts named {self._part[:40]!r}")
        if self._part == "file":
            filename = _FILENAME.search(lines[0])
            self.filename = safe_name(filename[1] if filename else "")
        else:
            self.fields[self._part] = b""
        return True

    def _add(self, data: bytes) -> None:
        if self._part is None or not data:
            return
        if self._part != "file":
            self.fields[self._part] += data
            if len(self.fields[self._part]) > MAX_FIELD_BYTES:
                raise _invalid(f"part {self._part[:40]!r} is longer than {MAX_FIELD_BYTES} bytes")
            return
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._output.write(data)


async def receive_upload(
    receive: Receive, headers: Mapping[str, str], path: Path, config: ServerConfig
) -> MultipartParser:
    """Writes the uploaded file to `path`. Returns its name and the other parts."""
    found = _BOUNDARY.match(headers.get("content-type", ""))
    if found is None:
        raise _invalid("the header Content-Type is not `multipart/form-data; boundary=...`")
    if int(headers.get("content-length", 0)) > config.batch_file_bytes + _MAX_OVERHEAD:
        raise too_large(config.batch_file_bytes)
    with await asyncio.to_thread(open, path, "xb") as output:
        parser = MultipartParser((found[1] or found[2]).encode(), output, config.batch_file_bytes)
        try:
            async with asyncio.timeout(MAX_UPLOAD_S):
                await _feed(receive, parser, config)
        except TimeoutError:
            raise ApiError(
                f"The upload paused for more than {config.body_s:g} seconds, or took more than {MAX_UPLOAD_S:g}: "
                "send it faster, or in several files.",
                status=408,
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from None
    if not parser.is_complete:
        raise _invalid("it ends before the closing boundary")
    return parser


async def _feed(receive: Receive, parser: MultipartParser, config: ServerConfig) -> None:
    piece, num_received, more = bytearray(), 0, True
    while more:
        event = await asyncio.wait_for(receive(), config.body_s)
        if event["type"] == "http.disconnect":
            raise ClientDisconnected
        piece += event.get("body", b"")
        more = event.get("more_body", False)
        if len(piece) >= _PIECE_BYTES or not more:
            num_received += len(piece)
            if num_received > config.batch_file_bytes + _MAX_OVERHEAD:
                raise too_large(config.batch_file_bytes)
            await asyncio.to_thread(parser.feed, bytes(piece))
            piece.clear()


def safe_name(name: str) -> str:
    """The last part of a path, without control characters. It is shown, and never used as a path."""
    name = re.split(r"[/\\]", name)[-1]
    return "".join(character for character in name if character.isprintable())[:MAX_FILENAME_CHARACTERS] or "file"


def too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"The file is longer than {max_bytes} bytes: split it, or raise the server's batch_file_bytes.",
        status=413,
        code="file_too_large",
        headers={"Connection": "close"},
    )


def _invalid(why: str) -> ApiError:
    return ApiError(f"The upload is invalid: {why}.", code="invalid_multipart", headers={"Connection": "close"})
