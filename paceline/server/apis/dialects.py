"""Dialects: how an API frames a stream, words an error, and which request fields it refuses.

The path decides the dialect, so that an error has the form the client expects even where no route was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.server.errors import ApiError
from paceline.server.fields import OPENAI_FIELDS, FieldRules

Json = dict[str, Any]
_SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    prefix: str  # of the paths that speak it
    stream_type: str  # media type of a stream
    frame: Callable[[bytes], bytes]  # an event of a stream, from its JSON
    error_body: Callable[[ApiError], bytes]
    error_schema: Json  # of that body, for the OpenAPI document
    fields: FieldRules
    end: bytes = b""  # after the last event
    names: Mapping[str, str] = field(default_factory=dict)  # what this API calls fields of a chat request

    def render(self, error: ApiError) -> bytes:
        """The body of an error, with the names of this API."""
        if not self.names:
            return self.error_body(error)
        words = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, self.names))})\b")
        message = words.sub(lambda match: self.names[match[0]], error.message)
        param = None if error.param is None else self.names.get(error.param, error.param)
        return self.error_body(
            ApiError(message, status=error.status, kind=error.kind, param=param, code=error.code, headers=error.headers)
        )


def dialect_of(path: str) -> Dialect:
    return next(dialect for dialect in DIALECTS if path.startswith(dialect.prefix))


# ---------------------------------------------------------------------- framing


def _data(event: bytes) -> bytes:
    # The data of an event is JSON, in which line breaks are always escaped.
    return b"data: %b\n\n" % event


# ---------------------------------------------------------------------- errors


def _openai_error(error: ApiError) -> bytes:
    return error.body()


_OPENAI_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

OPENAI = Dialect("OpenAI", "", _SSE, _data, _openai_error, _OPENAI_ERROR, OPENAI_FIELDS, end=b"data: [DONE]\n\n")
DIALECTS = (OPENAI,)  # the first whose prefix a path has
