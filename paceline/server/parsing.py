"""JSON bodies to request structs. Every way in which a body can be wrong becomes an `ApiError`."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from paceline.server.errors import ApiError, missing_parameter
from paceline.server.fields import OPENAI_FIELDS, FieldRules, select_supported, short

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
# How msgspec words its errors.
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>.+?)`, got `.+?`(?: - at `\$\.?(?P<path>.*?)`)?$")
_INVALID_ENUM = re.compile(r"^Invalid enum value .* - at `\$\.(?P<name>\w+)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`")
_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def parse(body: bytes, kind: type[_Struct], rules: FieldRules = OPENAI_FIELDS) -> _Struct:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON ({error}): send one JSON object.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(f"The body is {short(found)}: send one JSON object.", code="invalid_json")
    fields = select_supported(found, kind.__struct_fields__, rules)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error), fields) from None


def _to_api_error(message: str, fields: dict[str, Any]) -> ApiError:
    """Rewords msgspec's message: the field, its value, what is expected."""
    if missing := _MISSING.match(message):
        return missing_parameter(missing["name"])
    if invalid := _INVALID_ENUM.match(message):
        name = invalid["name"]
        return ApiError(
            f"{name} is {short(fields.get(name))}: /openapi.json lists the allowed values.",
            param=name,
            code="invalid_value",
        )
    if not (wrong := _WRONG_TYPE.match(message)):
        return ApiError(f"Invalid request: {message}.")
    path = wrong["path"] or ""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    expected = " or ".join(_TYPE_NAMES.get(word, word) for word in wrong["expected"].split(" | ") if word != "null")
    value = f" is {short(fields[name])}" if name == path and name in fields else " has the wrong type"
    return ApiError(f"{path}{value}: give {expected}.", param=name or None, code="invalid_type")
