"""The interface as an OpenAPI document, made from the types that requests are read into. What types cannot say, bounds
and shapes of what is told apart by hand, stands here; a test sends what the document allows and what it does not."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline import __version__
from paceline.server.engine_client import PinState, RequestState
from paceline.server.fields import HARMLESS, NOT_YET, ROLES
from paceline.server.types import (
    CacheAction,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingList,
    EmbeddingRequest,
    ModelList,
    TextCompletion,
    TokenizeRequest,
)
from paceline.server.types import ModelCard as ModelType

Json = dict[str, Any]

_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PART = {
    "type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}  # fmt: skip
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "name": {"type": "string"},
    },
    "required": ["role"],
}
_PROMPT = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT, "minItems": 1},
                     {"type": "array", "items": _IDS, "minItems": 1}]}  # fmt: skip
_BOUNDS: dict[str, Json] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 10_000},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "deadline_ms": {"exclusiveMinimum": 0, "maximum": 1e10},
    "cache_salt": {"maxLength": 256},
    "priority": {"minimum": -(2**31) + 1, "maximum": 2**31 - 1},
    "expires_in_s": {"exclusiveMinimum": 0},
}
_ERROR = {
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


def document(model: str, has_keys: bool) -> Json:
    kinds = [
        ChatRequest, ChatCompletion, CompletionRequest, TextCompletion, EmbeddingRequest, EmbeddingList,
        TokenizeRequest, DetokenizeRequest, CacheAction, ModelList, ModelType, RequestState, PinState,
    ]  # fmt: skip
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["Error"] = _ERROR
    for name in (
        "ChatRequest",
        "CompletionRequest",
        "EmbeddingRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
        "CacheAction",
    ):
        _complete(schemas[name], model)
    # Accepted because they say what happens anyway, or change nothing.
    for name in ("ChatRequest", "CompletionRequest"):
        for extra, allowed in NOT_YET.items():
            schemas[name]["properties"].setdefault(extra, {"enum": [None, *allowed]})
    requests = {"type": "object", "properties": {"data": {"type": "array", "items": _ref("RequestState")}}}
    paths = {
        "/v1/chat/completions": {"post": _generates("ChatRequest", "ChatCompletion", "The next message of a chat.")},
        "/v1/completions": {"post": _generates("CompletionRequest", "TextCompletion", "Continuations of prompts.")},
        "/v1/embeddings": {"post": _operation("A vector for each text.", _ref("EmbeddingList"), "EmbeddingRequest")},
        "/v1/models": {"get": _operation("What is served.", _ref("ModelList"))},
        "/v1/models/{name}": {"get": _operation("One of them.", _ref("ModelCard"), path="name")},
        "/tokenize": {"post": _operation("Text to token ids.", _object("count", "tokens"), "TokenizeRequest")},
        "/detokenize": {"post": _operation("Token ids to text.", _object("prompt"), "DetokenizeRequest")},
        "/v1/requests": {"get": _operation("Requests that have not ended, and why they wait.", requests)},
        "/v1/requests/{id}": {
            "get": _operation("One of them.", _object("id", "parts"), path="id"),
            "delete": _operation("Aborts it.", _object("id", "deleted"), path="id"),
        },
        "/health": {"get": _operation("Whether it lives and makes progress.", _object("status"), free=True, also=503)},
        "/ready": {
            "get": _operation("Whether a request would be answered.", _object("ready"), free=True, also=503),
        },
        "/metrics": {"get": _text("Metrics for Prometheus.")},
        "/": {"get": _operation("Version, model and routes.", _object("paceline", "routes"), free=True)},
        "/openapi.json": {"get": _operation("This document.", _object("openapi"), free=True)},
        "/admin/cache": {
            "get": _operation("Cached prefixes that are pinned.", _object("pins")),
            "post": _operation("Flushes the cache, pins or unpins a prefix.", {"type": "object"}, "CacheAction"),
        },
        "/admin/drain": {
            method: _operation(summary, _object("draining"))
            for method, summary in (("get", "Whether new requests are refused."), ("post", "Refuses new requests."),
                                    ("delete", "Accepts them again."))
        },
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__, "description": "OpenAI's interface, and some more."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if has_keys else [],
    }


def _complete(schema: Json, model: str) -> None:
    """What the types do not say."""
    properties = schema["properties"]
    schema["additionalProperties"] = False
    for name in sorted(HARMLESS):
        properties.setdefault(name, {})
    for name, bounds in _BOUNDS.items():
        if name in properties:
            properties[name] = _bounded(properties[name], bounds)
    if "messages" in properties:
        required = "messages" in schema.get("required", ())
        messages: Json = {"type": "array", "items": _MESSAGE, "minItems": 1}
        properties["messages"] = messages if required else {"anyOf": [messages, {"type": "null"}]}
    if "prompt" in properties and "model" in schema.get("required", ()):
        properties["prompt"] = _PROMPT
    if "model" in properties:
        properties["model"] = {"enum": [model] if "model" in schema.get("required", ()) else [model, None]}
    if "input" in properties:
        properties["input"] = _PROMPT
    if "tokens" in properties:
        properties["tokens"] = {"type": "array", "items": _ID}


def _bounded(schema: Json, bounds: Json) -> Json:
    if "anyOf" in schema:
        return {**schema, "anyOf": [one if one.get("type") == "null" else {**one, **bounds} for one in schema["anyOf"]]}
    return {**schema, **bounds}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(*required: str) -> Json:
    return {"type": "object", "required": list(required)}


def _content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _operation(summary: str, response: Json, body: str | None = None, *, path: str | None = None, free: bool = False,
               also: int | None = None) -> Json:  # fmt: skip
    responses: Json = {"200": {"description": "Done.", "content": _content(response)}}
    if also is not None:
        responses[str(also)] = {"description": "No.", "content": _content(response)}
    for status in ("4XX", "5XX"):
        responses[status] = {"description": "An error.", "content": _content(_ref("Error"))}
    found: Json = {"summary": summary, "responses": responses}
    if body is not None:
        found["requestBody"] = {"required": True, "content": _content(_ref(body))}
    if path is not None:
        found["parameters"] = [{"name": path, "in": "path", "required": True, "schema": _TEXT}]
    if free:
        found["security"] = []
    return found


def _generates(body: str, response: str, summary: str) -> Json:
    found = _operation(summary, _ref(response), body)
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    found["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    found["parameters"] = [
        {"name": "X-Deadline-Ms", "in": "header", "required": False,
         "description": "Milliseconds after which the request ends, wherever it is.",
         "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e10}}
    ]  # fmt: skip
    return found


def _text(summary: str) -> Json:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"summary": summary, "security": [], "responses": {"200": {"description": "Done.", "content": content}}}
