"""The lines of a batch: requests in the input file, results in the output and the error file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.request import short
from paceline.server.batches.objects import BatchError
from paceline.server.batches.store import make_id
from paceline.server.limits import (
    MAX_BATCH_ERRORS,
    MAX_BATCH_LINE_BYTES,
    MAX_BATCH_LINES,
    MAX_CUSTOM_ID_CHARACTERS,
)


class InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streams(msgspec.Struct):
    stream: Any = None


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class ResultLine(msgspec.Struct):
    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None

    @property
    def is_ok(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class _CustomId(msgspec.Struct):
    custom_id: str


_decoder = msgspec.json.Decoder(InputLine)
_streams_decoder, _custom_id_decoder = msgspec.json.Decoder(_Streams), msgspec.json.Decoder(_CustomId)


def responded(custom_id: str, status: int, request_id: str, body: bytes) -> ResultLine:
    if b"\n" in body:  # one line is one result
        body = msgspec.json.format(body, indent=-1)
    return ResultLine(make_id("batch_req_"), custom_id, LineResponse(status, request_id, msgspec.Raw(body)), None)


def not_run(custom_id: str, code: str, message: str) -> ResultLine:
    return ResultLine(make_id("batch_req_"), custom_id, None, LineError(code, message))


# ---------------------------------------------------------------------- input


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1. One that is too long is cut."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_BATCH_LINE_BYTES + 2):
            number += 1
            is_cut = not line.endswith(b"\n") and len(line) > MAX_BATCH_LINE_BYTES + 1
            if not (line := line.strip()):
                continue
            yield number, line
            while is_cut:
                rest = file.readline(1 << 20)
                is_cut = bool(rest) and not rest.endswith(b"\n")


def parse_line(line: bytes) -> InputLine:
    """A line of a file that was validated."""
    return _decoder.decode(line)


def validate(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """The number of requests, and what is wrong with the file: its first errors."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    total = 0
    for number, line in read_lines(path):
        total += 1
        if total > MAX_BATCH_LINES:
            errors.append(BatchError("too_many_requests", f"The file has more than {MAX_BATCH_LINES} requests."))
        elif error := _check(line, endpoint, seen):
            error.line = number
            errors.append(error)
        if total > MAX_BATCH_LINES or len(errors) >= MAX_BATCH_ERRORS:
            break
    if not total:
        errors.append(BatchError("empty_file", "The file has no requests: give one JSON object per line."))
    return total, errors


def _check(line: bytes, endpoint: str, seen: set[str]) -> BatchError | None:
    if len(line) > MAX_BATCH_LINE_BYTES:
        return BatchError("line_too_long", f"The line is longer than {MAX_BATCH_LINE_BYTES} bytes.")
    try:
        found = _decoder.decode(line)
        is_object = bytes(found.body).lstrip().startswith(b"{")
        streams = is_object and _streams_decoder.decode(found.body).stream
    except msgspec.ValidationError as error:
        return BatchError("invalid_request", f"{error}: expected custom_id, method, url and body.")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchError("invalid_json_line", f"The line is not valid JSON: {error}.")
    name = found.custom_id
    if not 0 < len(name) <= MAX_CUSTOM_ID_CHARACTERS:
        most = MAX_CUSTOM_ID_CHARACTERS
        return BatchError(
            "invalid_custom_id", f"custom_id has {len(name)} characters: give 1 to {most}.", None, "custom_id"
        )
    if name in seen:
        return BatchError("duplicate_custom_id", f"custom_id {short(name)} occurs twice.", None, "custom_id")
    seen.add(name)
    if found.method != "POST":
        return BatchError("invalid_method", f"method is {short(found.method)}: give POST.", None, "method")
    if found.url != endpoint:
        message = f"url is {short(found.url)}: give {endpoint}, the endpoint of the batch."
        return BatchError("invalid_url", message, None, "url")
    if not is_object:
        return BatchError("invalid_body", "body is not an object.", None, "body")
    if streams:
        return BatchError(
            "stream_not_supported", "stream is true: a batch has no streams; omit it.", None, "body.stream"
        )
    return None


# ---------------------------------------------------------------------- results


@dataclass
class Done:
    """What the output and the error file of a batch contain."""

    custom_ids: set[str] = field(default_factory=set)
    num_completed: int = 0
    num_failed: int = 0


def read_results(output: Path, errors: Path) -> Done:
    """Reads the results so far, and removes a last line that a crash has cut."""
    done = Done()
    done.num_completed = _read_results(output, done.custom_ids)
    done.num_failed = _read_results(errors, done.custom_ids)
    return done


def _read_results(path: Path, custom_ids: set[str]) -> int:
    if not path.exists():
        return 0
    count = num_bytes = 0
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(num_bytes)
                os.fsync(file.fileno())
                break
            num_bytes += len(line)
            count += 1
            custom_ids.add(_custom_id_decoder.decode(line).custom_id)
    return count
