"""JSON bodies to request structs. Every way in which a body can be wrong becomes an `ApiError`."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from paceline.server.errors import ApiError, missing_parameter
from paceline.server.fields import OPENAI_FIELDS, FieldRules, select_supported, short

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
# Escapes of surrogates, in pairs or alone. An escaped backslash is none.
_SURROGATE = re.compile(
    rb"\\\\|\\u[dD][89aAbB]\w\w\\u[dD][c-fC-F]\w\w|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})", re.ASCII
)
# How msgspec words its errors.
_PATH = r"(?: - at `\$\.?(?P<path>.*?)`)?$"
_WRONG_TYPE = re.compile(rf"^Expected `(?P<expected>.+?)`, got `.+?`{_PATH}")
_OUT_OF_RANGE = re.compile(rf"^Expected `(?:int|float)` (?P<expected>[<>]=? \S+){_PATH}")
_INVALID_ENUM = re.compile(rf"^Invalid enum value .*?{_PATH}")
_MISSING = re.compile(rf"^Object missing required field `(?P<name>\w+)`{_PATH}")
_UNKNOWN = re.compile(rf"^Object contains unknown field `(?P<name>.+?)`{_PATH}")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")  # of a path
_prepare_lock = threading.Lock()
_prepared_types: set[type[msgspec.Struct]] = set()
_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def parse(body: bytes | bytearray, kind: type[_Struct], rules: FieldRules = OPENAI_FIELDS) -> _Struct:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid_json(bytes(body), error) from None
    if not isinstance(found, dict):
        raise ApiError(f"The body is {short(found)}: send one JSON object.", code="invalid_json")
    return convert(select_supported(found, kind.__struct_fields__, rules), kind)


def convert(value: object, kind: type[_Struct], path: str = "", *, strict: bool = True) -> _Struct:
    """`value`, which is at `path` of the request, as a struct. Unless `strict`, strings may stand for numbers."""
    if kind not in _prepared_types:
        _prepare_type(kind)
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _to_api_error(str(error), value, path) from None


def _prepare_type(kind: type[msgspec.Struct]) -> None:
    """msgspec 0.22 collects the fields of a struct when it is first used, and crashes if another thread uses it before
    that is done."""
    with _prepare_lock:
        msgspec.json.Decoder(kind)
        _prepared_types.add(kind)


def _invalid_json(body: bytes, error: Exception) -> ApiError:
    # msgspec calls a lone surrogate truncated input, and counts the position of invalid UTF-8 from elsewhere.
    lone = next((found for found in _SURROGATE.finditer(body) if found["lone"]), None)
    if isinstance(error, UnicodeDecodeError):
        return ApiError(
            f"The body is not valid UTF-8 (byte {_first_invalid_byte(body)}): send JSON in UTF-8.", code="invalid_json"
        )
    if lone is not None and not isinstance(error, RecursionError):
        return ApiError(
            f"The body has the lone surrogate {lone[0].decode()} (byte {lone.start()}): send valid Unicode, such as "
            "\\ud83d\\ude00.",
            code="invalid_json",
        )
    return ApiError(f"The body is not valid JSON ({error}): send one JSON object.", code="invalid_json")


def _first_invalid_byte(body: bytes) -> int:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


def convert_tagged(value: dict[str, object], kinds: Mapping[str, type[_Struct]], path: str) -> _Struct:
    """The same for a struct that `type` selects. A type that is not in `kinds` is refused by name."""
    tag = value.get("type")
    if not isinstance(tag, str) or tag not in kinds:
        raise ApiError(
            f"{path}.type is {short(tag)}, which is not supported: give {' or '.join(kinds)}.",
            param=_field_of(path),
            code="unsupported_value",
        )
    return convert({name: item for name, item in value.items() if name != "type"}, kinds[tag], path)


def _to_api_error(message: str, value: object, outer: str) -> ApiError:
    """Rewords msgspec's message: the field, its value, what is expected."""
    known = (_WRONG_TYPE, _OUT_OF_RANGE, _INVALID_ENUM, _MISSING, _UNKNOWN)
    found = next((match for pattern in known if (match := pattern.match(message))), None)
    if found is None:
        return ApiError(f"Invalid request: {message}.")
    inner = found["path"] or ""
    path = f"{outer}.{inner}" if outer and inner else outer or inner
    if found.re in (_MISSING, _UNKNOWN):
        name = f"{path}.{found['name']}" if path else found["name"]
        if found.re is _MISSING:
            return missing_parameter(name, param=_field_of(name))
        return ApiError(f"Unknown parameter: {name}. Omit it.", param=_field_of(name) or None, code="unknown_parameter")
    given = f" is {short(_value_at(value, inner))}"
    if found.re is _INVALID_ENUM:
        return ApiError(
            f"{path}{given}: /openapi.json lists the allowed values.", param=_field_of(path), code="invalid_value"
        )
    if found.re is _OUT_OF_RANGE:
        return ApiError(f"{path}{given}: give {found['expected']}.", param=_field_of(path), code="invalid_value")
    words = found["expected"].split(" | ")
    expected = " or ".join(_TYPE_NAMES.get(word, word) for word in words if word != "null") or "null"
    return ApiError(f"{path}{given}: give {expected}.", param=_field_of(path) or None, code="invalid_type")


def _field_of(path: str) -> str:
    """The field of the request that a path begins with."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _value_at(value: object, path: str) -> object:
    for name, index in _STEP.findall(path):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and index:
            value = value[int(index)]
    return value
