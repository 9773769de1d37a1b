"""Dialects: how an API frames a stream, words an error, and which request fields it refuses.

The path decides the dialect, so that an error has the form the client expects even where no route was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from paceline.server.errors import ApiError
from paceline.server.fields import OPENAI_FIELDS, FieldRules, Json

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


def dialect_of(path: str, headers: Mapping[str, str] = MappingProxyType({})) -> Dialect:
    """By the path; routes that two APIs share, by the headers too."""
    if path.startswith("/v1/models") and is_anthropic(headers):
        return ANTHROPIC
    return next(dialect for dialect in DIALECTS if path.startswith(dialect.prefix))


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a client of Anthropic's API sends these headers."""
    return "anthropic-version" in headers


# ---------------------------------------------------------------------- framing


def _data(event: bytes) -> bytes:
    # The data of an event is JSON, in which line breaks are always escaped.
    return b"data: %b\n\n" % event


def named_event(name: str, **fields: object) -> bytes:
    """An event for `_named`."""
    return msgspec.json.encode({"type": name, **fields})


def _named(event: bytes) -> bytes:
    assert event.startswith(b'{"type":"'), "the type of an event is its name and comes first"
    return b"event: %b\ndata: %b\n\n" % (event[9 : event.index(b'"', 9)], event)


def _line(event: bytes) -> bytes:
    return event + b"\n"


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

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def _anthropic_error(error: ApiError) -> bytes:
    kind, message = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error"), error.message
    if error.code == "context_length_exceeded":
        # Anthropic's errors have no code: agents that shorten a conversation look for these words.
        too_much = "input length and `max_tokens` exceed context limit"
        message = f"{too_much if error.param == 'max_tokens' else 'prompt is too long'}: {message}"
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_ANTHROPIC_FIELDS = FieldRules(
    # Accounts and prompt caching, which needs no marks here: every prefix is cached.
    ignored={"metadata", "service_tier", "cache_control", "user_profile_id", "workspace_id", "diagnostics"},
    unsupported={
        "container": (),
        "mcp_servers": ([],),
        "inference_geo": (),
        "speed": ("standard",),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    },
)

ANTHROPIC = Dialect(
    "Anthropic",
    "/v1/messages",
    _SSE,
    _named,
    _anthropic_error,
    _ANTHROPIC_ERROR,
    _ANTHROPIC_FIELDS,
    names={"stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "thinking"},
)
_RESPONSES_FIELDS = FieldRules(
    ignored={"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"},
    unsupported={
        "background": (False,),
        "conversation": (),
        "context_management": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
)

RESPONSES = Dialect(
    "Responses",
    "/v1/responses",
    _SSE,
    _named,
    _openai_error,
    _OPENAI_ERROR,
    _RESPONSES_FIELDS,
    names={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    },
)


def _ollama_error(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message})


_OLLAMA_ERROR: Json = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_OLLAMA_FIELDS = FieldRules(
    ignored={"keep_alive"},  # the model stays loaded
    unsupported={
        "context": ([],),
        "images": ([],),
        "logprobs": (False,),
        "raw": (False,),
        "shift": (True,),
        "suffix": ("",),
        "template": ("",),
        "top_logprobs": (0,),
        "truncate": (True,),
    },
)

OLLAMA = Dialect(
    "Ollama",
    "/api/",
    "application/x-ndjson",
    _line,
    _ollama_error,
    _OLLAMA_ERROR,
    _OLLAMA_FIELDS,
    names={
        "max_tokens": "num_predict",
        "repetition_penalty": "repeat_penalty",
        "response_format": "format",
        "reasoning_effort": "think",
    },
)
OPENAI = Dialect("OpenAI", "", _SSE, _data, _openai_error, _OPENAI_ERROR, OPENAI_FIELDS, end=b"data: [DONE]\n\n")
DIALECTS = (ANTHROPIC, RESPONSES, OLLAMA, OPENAI)  # the first whose prefix a path has
