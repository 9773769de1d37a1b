"""Strict schemas: objects are closed wherever they are, and what cannot be closed is refused with its path."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.request import InvalidRequest
from paceline.text.json_schema import closed, with_options

OPEN = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": ["object", "null"], "properties": {}},
         {"type": ["object", "null"], "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [OPEN, {"type": "null"}]}, {"prefixItems": [CLOSED, {"type": "null"}]}),
        ({"anyOf": [OPEN, {"$ref": "#/$defs/a"}], "$defs": {"a": OPEN}},
         {"anyOf": [CLOSED, {"$ref": "#/$defs/a"}], "$defs": {"a": CLOSED}}),
        ({"definitions": {"a": {"items": OPEN}}}, {"definitions": {"a": {"items": CLOSED}}}),
        ({"type": "object", "additionalProperties": OPEN}, {"type": "object", "additionalProperties": CLOSED}),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({"allOf": [{"$ref": "#/$defs/a"}], "description": "d"},
         {"allOf": [{"$ref": "#/$defs/a"}], "description": "d"}),
        ({"type": "object", "anyOf": [OPEN, OPEN]}, {"type": "object", "anyOf": [CLOSED, CLOSED]}),
        # Values and names that only look like schemas
        ({"const": OPEN, "enum": [OPEN], "default": OPEN}, {"const": OPEN, "enum": [OPEN], "default": OPEN}),
        ({"properties": {"properties": {"type": "integer"}, "items": OPEN}},
         {"properties": {"properties": {"type": "integer"}, "items": CLOSED}, "additionalProperties": False}),
        ({"not": OPEN, "items": True}, {"not": OPEN, "items": True}),
    ],
)  # fmt: skip
def test_objects_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(schema)
    assert closed(schema, "schema") == expected
    assert repr(schema) == before, "the caller's schema is not changed"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"meta": {"type": "object"}}}, r"^schema\.properties\.meta is an object without properties"),
        ({"items": {"allOf": [OPEN, OPEN]}}, r"^schema\.items has several schemas for one value"),
        ({**OPEN, "anyOf": [OPEN, {"required": ["x"]}]}, r"^schema has several schemas"),
    ],
)
def test_what_cannot_be_closed_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        closed(schema, "schema")


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match=r"^schema is nested too deeply"):
        closed(schema, "schema")


def test_unique_items_that_are_not_asked_for_are_dropped() -> None:
    part = {"type": "array", "items": {"type": "integer"}}
    kept = {"properties": {"uniqueItems": {"type": "boolean"}}, "const": {"uniqueItems": False}}
    schema = {"uniqueItems": False, "items": {**part, "uniqueItems": False}, **kept}
    assert with_options({**schema, "x-guidance": {}}) == {
        "items": part,
        **kept,
        "x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"},
    }


@pytest.mark.parametrize("key", ["items", "not", "additionalProperties", "if"])
def test_unique_items_are_refused_with_their_path(key: str) -> None:
    schema = {"properties": {"a": {key: {"anyOf": [{"uniqueItems": True}]}}}}
    with pytest.raises(InvalidRequest) as caught:
        with_options(schema)
    path = f"properties.a.{key}.anyOf[0].uniqueItems"
    assert (
        str(caught.value) == f"grammar has {path}, which is True and cannot be enforced: omit it, and check the output."
    )
    assert with_options({**schema, "x-guidance": {"lenient": True}})["properties"] == schema["properties"]
