"""JSON schemas for grammars: closed objects for `strict`, and bounded whitespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.request import InvalidRequest

# For llguidance. Without a bound a weak model writes whitespace forever.
_WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}

# Keywords whose value is a schema, a list of schemas, or schemas by name. Conditions (`not`, `if`) are left as they
# are: a closed object in a condition would change which values it holds for.
_SCHEMA = ("items", "contains", "then", "else")
_CONDITIONS = ("additionalProperties", "not", "if")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def with_options(schema: Mapping[str, object] | bool) -> dict[str, object]:
    """`schema` with the options of llguidance; those that it has itself (`x-guidance`) take precedence."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"x-guidance is {own!r}: give an object of llguidance's options.")
    plain: Mapping[str, object] = schema
    if not own.get("lenient"):  # else llguidance ignores what it does not know
        try:
            plain = _without_unique_items(schema, "")
        except RecursionError:
            raise InvalidRequest("grammar is nested too deeply: simplify it.") from None
    is_own = any(name.startswith("whitespace_") for name in own)
    return {**plain, "x-guidance": {**({} if is_own else _WHITESPACE), **own}}


def _without_unique_items(schema: object, path: str) -> Any:
    """`schema` without `uniqueItems: false`, which llguidance does not know and which is the default."""
    if not isinstance(schema, Mapping):
        return schema
    unique = schema.get("uniqueItems", False)
    if unique is not False:
        raise InvalidRequest(
            f"grammar has {path}uniqueItems, which is {unique!r} and cannot be enforced: omit it, and check the output."
        )
    found: dict[str, object] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _without_unique_items(one, f"{path}{key}.{name}.") for name, one in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            found[key] = [_without_unique_items(one, f"{path}{key}[{index}].") for index, one in enumerate(value)]
        elif key in (*_SCHEMA, *_CONDITIONS):
            found[key] = _without_unique_items(value, f"{path}{key}.")
        elif key != "uniqueItems":
            found[key] = value
    return found


def closed(schema: Mapping[str, object], path: str) -> dict[str, object]:
    """`schema` with all objects closed, as OpenAI defines `strict`: an object has no properties beyond those named.

    OpenAI wants `additionalProperties: false` to be given; here it is the default, and another value that is given
    stays. What cannot be closed is refused, with its path.
    """
    try:
        found: dict[str, object] = _closed(schema, path)
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply: simplify it.") from None
    return found


def _closed(schema: object, path: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, object] = {}
    for key, value in schema.items():
        where = f"{path}.{key}"
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _closed(one, f"{where}.{name}") for name, one in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            found[key] = [_closed(one, f"{where}[{index}]") for index, one in enumerate(value)]
        else:
            found[key] = _closed(value, where) if key in _SCHEMA or key == "additionalProperties" else value
    _check_combination(schema, path)
    kind = schema.get("type")
    if "additionalProperties" not in schema and (kind == "object" or "properties" in schema or _lists(kind, "object")):
        if "properties" in schema or "patternProperties" in schema:
            found["additionalProperties"] = False
        elif not any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf")):
            raise InvalidRequest(
                f"{path} is an object without properties and strict is true: give properties or additionalProperties."
            )
    return found


def _check_combination(schema: Mapping[str, object], path: str) -> None:
    """Closed objects cannot be combined: each would forbid the properties of the other."""
    all_of = schema.get("allOf")
    several = isinstance(all_of, list) and len(all_of) > 1
    lists = [found for key in ("allOf", "anyOf", "oneOf") if isinstance(found := schema.get(key), list)]
    extended = "properties" in schema and any(
        isinstance(one, Mapping) and ("properties" in one or "$ref" in one) for found in lists for one in found
    )
    if several or extended:
        raise InvalidRequest(
            f"{path} has several schemas for one value and strict is true: write them as one, or omit strict."
        )


def _lists(kind: object, name: str) -> bool:
    return isinstance(kind, list) and name in kind
