"""Which fields a request may have.

A field is supported, unsupported or ignored. An unsupported field is an error that names it, unless its value asks for
what happens anyway, such as `suffix: ""`: some clients send every default. An ignored field cannot change the output.
Nothing else is ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.server.errors import ApiError, clip

Json = dict[str, Any]  # a JSON object

_MAX_SHOWN_NAME = 80
_MAX_EXACT = 2.0**53  # above it a float is no exact integer
# OpenAI's account keeping: who sent the request, what to store, how to bill.
IGNORED_FIELDS = frozenset(
    {"user", "store", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

# Unsupported field -> values accepted because they change nothing. `null` always is.
UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),  # deprecated by OpenAI in favour of tools
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


@dataclass(frozen=True, slots=True)
class FieldRules:
    """What an API does with fields that a request type does not have."""

    ignored: Collection[str]
    unsupported: Mapping[str, tuple[object, ...]]


OPENAI_FIELDS = FieldRules(IGNORED_FIELDS, UNSUPPORTED_FIELDS)

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_FIELDS = ("reasoning_content", "reasoning")  # two names of the same
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", *_REASONING_FIELDS)
_UNSUPPORTED_MESSAGE_FIELDS = ("function_call", "refusal", "audio", "annotations")


def select_supported(
    body: Mapping[str, Any], known: Collection[str], rules: FieldRules = OPENAI_FIELDS
) -> dict[str, object]:
    """The supported fields of a request. Raises ApiError for the first field that cannot be honoured."""
    found: dict[str, object] = {}
    for name, value in body.items():
        if name in known:
            # Some clients write every number as a float.
            is_float = isinstance(value, float)
            found[name] = int(value) if is_float and value.is_integer() and abs(value) < _MAX_EXACT else value
        elif name in rules.unsupported:
            if value is not None and not _is_one_of(value, rules.unsupported[name]):
                raise ApiError(
                    f"{name} is {short(value)}, which is not supported: omit it.",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in rules.ignored:
            raise ApiError(
                f"Unknown parameter: {clip(name, _MAX_SHOWN_NAME)}. {_hint(name, known)}",
                param=name,
                code="unknown_parameter",
            )
    return found


def check_messages(messages: list[Json]) -> list[Json]:
    """Messages with the fields that templates use; the template checks their contents."""
    checked = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(
                f"{path}.role is {short(role)}: choose one of {', '.join(ROLES)}.",
                param="messages",
                code="invalid_value",
            )
        for name, value in message.items():
            if name in _UNSUPPORTED_MESSAGE_FIELDS and value:
                raise ApiError(
                    f"{path}.{name} is {short(value)}, which is not supported: omit it.",
                    param="messages",
                    code="unsupported_parameter",
                )
            if name not in (*_MESSAGE_FIELDS, *_UNSUPPORTED_MESSAGE_FIELDS):
                raise ApiError(
                    f"Unknown parameter: {path}.{clip(name, _MAX_SHOWN_NAME)}. Omit it.",
                    param="messages",
                    code="unknown_parameter",
                )
        kept = {name: value for name, value in message.items() if name not in _UNSUPPORTED_MESSAGE_FIELDS}
        _rename_reasoning(path, kept)
        if role == "developer":  # OpenAI's newer name for system; chat templates do not know it
            kept["role"] = "system"
        if kept.get("tool_calls"):
            kept["tool_calls"] = _check_tool_calls(path, kept["tool_calls"])
        else:
            kept.pop("tool_calls", None)
        for name in ("name", "tool_call_id"):
            if kept.get(name) is None:
                kept.pop(name, None)
            elif not isinstance(kept[name], str):
                raise ApiError(
                    f"{path}.{name} is {short(kept[name])}: give a string.", param="messages", code="invalid_type"
                )
        checked.append(kept)
    return checked


def _rename_reasoning(path: str, message: Json) -> None:
    """Reasoning that a client sends back, under the name that templates use. The template decides what becomes of it:
    most drop it from all turns but the last."""
    given = {name: value for name in _REASONING_FIELDS if (value := message.pop(name, None))}
    for name, value in given.items():
        if message["role"] != "assistant" or not isinstance(value, str) or value != next(iter(given.values())):
            raise ApiError(
                f"{path}.{name} is {short(value)}: give a string, in an assistant message, under one name.",
                param="messages",
                code="invalid_value",
            )
        message["reasoning_content"] = value


def _check_tool_calls(path: str, calls: object) -> list[Json]:
    """Tool calls as templates expect them: arguments are an object, not its JSON text."""
    found = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments", "{}")
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            value = None
        if not isinstance(name, str) or not isinstance(value, dict):
            raise ApiError(
                f"{path}.tool_calls[{index}] is {short(call)}: give id, type and a function with a name and "
                "arguments that are a JSON object.",
                param="messages",
                code="invalid_value",
            )
        found.append({**call, "function": {**function, "arguments": value}})
    return found


def short(value: object) -> str:
    """`value` for an error message."""
    return clip(repr(value), 60)


def _is_one_of(value: object, choices: tuple[object, ...]) -> bool:
    # True equals 1 in Python, and `logprobs: 0` does not mean `logprobs: false`.
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= _MAX_SHOWN_NAME else []
    return f"Did you mean {close[0]}?" if close else "Omit it."
