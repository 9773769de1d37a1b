"""The OpenAPI document, made from the route table and the types of its requests and responses.

This module adds what the types do not express: bounds, and fields of several types. A test sends requests that the
document allows and forbids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline import __version__
from paceline.request import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
)
from paceline.server.apis.dialects import DIALECTS, dialect_of
from paceline.server.fields import OPENAI_FIELDS, ROLES, FieldRules, Json
from paceline.server.limits import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_DEADLINE_MS,
    MAX_FLUSH_TIMEOUT_S,
    MAX_PRIORITY,
    MAX_TOKEN_ID,
)
from paceline.server.routing import Access, AnyRoute, GenerationRoute, Route

_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "name": {"type": "string"},
    },
    "required": ["role"],
}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_DEADLINE = {"exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS}
_BOUNDS: dict[str, Json] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
    "frequency_penalty": {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "seed": {"minimum": MIN_SEED, "maximum": MAX_SEED},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "prompt_logprobs_start": {"minimum": 0},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "deadline_ms": _DEADLINE,
    "queue_timeout_ms": _DEADLINE,
    "running_timeout_ms": _DEADLINE,
    "cache_salt": {"maxLength": MAX_CACHE_SALT_CHARACTERS},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "expires_in_s": {"exclusiveMinimum": 0},
    "timeout_s": {"exclusiveMinimum": 0, "maximum": MAX_FLUSH_TIMEOUT_S},
}


def make_document(routes: Sequence[AnyRoute], model: str, *, has_keys: bool, public_metrics: bool = False) -> Json:
    forms = [route.form for route in routes if isinstance(route, Route) and route.form is not None]
    structs = [kind for route in routes for kind in (route.request, *route.responses) if kind not in (None, dict)]
    structs += forms
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schemas |= {f"{dialect.name}Error": dialect.error_schema for dialect in DIALECTS}
    for route in routes:
        rules = dialect_of(route.path).fields
        if route.request is not None:
            _complete(schemas[route.request.__name__], model, rules)
        if isinstance(route, GenerationRoute) and route.streams:
            # Unsupported fields are accepted with values that change nothing.
            for name, allowed in rules.unsupported.items():
                schemas[route.request.__name__]["properties"].setdefault(name, {"enum": [None, *allowed]})
    paths: dict[str, Json] = {}
    for route in routes:
        path = route.path.replace(":path", "")
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route)
        if route.access is Access.PUBLIC or (route.access is Access.METRICS and public_metrics):
            operation["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__, "description": "OpenAI's interface with extensions."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if has_keys else [],
    }


def _complete(schema: Json, model: str, rules: FieldRules) -> None:
    """Adds to a request's schema what its type does not express."""
    properties = schema["properties"]
    schema["additionalProperties"] = False
    for name in sorted(rules.ignored):
        properties.setdefault(name, {})
    for name, bounds in _BOUNDS.items():
        if name in properties:
            properties[name] = _bounded(properties[name], bounds)
    if "messages" in properties and rules is OPENAI_FIELDS:
        required = "messages" in schema.get("required", ())
        messages: Json = {"type": "array", "items": _MESSAGE, "minItems": 1}
        properties["messages"] = messages if required else {"anyOf": [messages, {"type": "null"}]}
    if properties.get("prompt") == {}:
        properties["prompt"] = _PROMPT
    if "model" in properties:
        properties["model"] = {"enum": [model] if "model" in schema.get("required", ()) else [model, None]}
    if properties.get("input") == {}:
        properties["input"] = _PROMPT
    if "tokens" in properties:
        properties["tokens"] = {"type": "array", "items": _ID}


def _bounded(schema: Json, bounds: Json) -> Json:
    if "anyOf" in schema:
        return {**schema, "anyOf": [one if one.get("type") == "null" else {**one, **bounds} for one in schema["anyOf"]]}
    return {**schema, **bounds}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _operation(route: AnyRoute) -> Json:
    bodies = [{"type": "object"} if kind is dict else _ref(kind.__name__) for kind in route.responses]
    content: Json
    if isinstance(route, Route) and route.binary:
        content = {"application/octet-stream": {"schema": {"type": "string", "contentMediaType": "application/jsonl"}}}
    elif not bodies:
        content = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = _content(bodies[0] if len(bodies) == 1 else {"anyOf": bodies})
    dialect = dialect_of(route.path)
    responses: Json = {"200": {"description": "OK", "content": content}}
    operation: Json = {"summary": route.summary, "responses": responses}
    if isinstance(route, Route):
        for error_status in route.error_statuses:
            responses[str(error_status)] = {"description": "Not available", "content": content}
        names = [part[1:-1].removesuffix(":path") for part in route.path.split("/") if part.startswith("{")]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
        if route.query is not None:
            schema = msgspec.json.schema(route.query)["$defs"][route.query.__name__]
            operation["parameters"] += [
                {"name": name, "in": "query", "required": False, "schema": one}
                for name, one in schema["properties"].items()
            ]
        if route.form is not None:
            form = {"multipart/form-data": {"schema": _ref(route.form.__name__)}}
            operation["requestBody"] = {"required": True, "content": form}
    elif route.streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content[dialect.stream_type] = {"schema": event}
    if isinstance(route, GenerationRoute):
        operation["parameters"] = [
            {
                "name": "X-Deadline-Ms",
                "in": "header",
                "required": False,
                "description": "Milliseconds after which the request is aborted.",
                "schema": {"type": "number", **_DEADLINE},
            }
        ]
    for status in ("4XX", "5XX"):
        responses[status] = {"description": "Error", "content": _content(_ref(f"{dialect.name}Error"))}
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(_ref(route.request.__name__))}
    return operation
