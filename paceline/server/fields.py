"""Which fields a request may have, and what becomes of each.

A field is supported, or it is refused with its name, or it is harmless: it cannot change the answer, so it is accepted
and has no effect. Nothing else is ever ignored. A field that is not supported yet passes while it says what happens
anyway, such as `n: 1`: some clients write out every default.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from paceline.server.errors import ApiError

# Bookkeeping of OpenAI's own: who asked, what to keep, what to pay for.
HARMLESS = frozenset({"user", "store", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})

# Known, not supported yet -> what it may say because it changes nothing. `null` always may.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),  # the older way to say tools
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

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_NOT_YET = ("function_call", "refusal", "audio", "annotations", "reasoning")


def supported(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of a request that are to be read; an ApiError names the first that cannot be honoured."""
    found = {}
    for name, value in body.items():
        if name in known:
            found[name] = value
        elif name in NOT_YET:
            if value is not None and not _is_one_of(value, NOT_YET[name]):
                raise ApiError(
                    f"{name} is {short(value)}, which is not supported yet: leave it out.",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip
        elif name not in HARMLESS:
            raise ApiError(f"{name} is not a parameter of this request: {_hint(name, known)}",
                           param=name, code="unknown_parameter")  # fmt: skip
    return found


def check_message_fields(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with what a template shows and nothing else; their contents are checked by the template's room."""
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(f"{where}.role is {short(role)}: choose one of {', '.join(ROLES)}.",
                           param="messages", code="invalid_value")  # fmt: skip
        for name, value in message.items():
            if name in _MESSAGE_NOT_YET and value:
                raise ApiError(f"{where}.{name} is {short(value)}, which is not supported yet: leave it out.",
                               param="messages", code="unsupported_parameter")  # fmt: skip
            if name not in ("role", "content", "name", "tool_calls", "tool_call_id", *_MESSAGE_NOT_YET):
                raise ApiError(f"{where}.{name} is not a field of a message: leave it out.",
                               param="messages", code="unknown_parameter")  # fmt: skip
        kept = {name: value for name, value in message.items() if name not in _MESSAGE_NOT_YET}
        if role == "developer":  # OpenAI's newer word for system, which templates do not know
            kept["role"] = "system"
        if kept.get("tool_calls"):
            kept["tool_calls"] = _check_calls(where, kept["tool_calls"])
        else:
            kept.pop("tool_calls", None)
        if kept.get("tool_call_id") is None:
            kept.pop("tool_call_id", None)
        checked.append(kept)
    return checked


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls as templates want them: with their arguments as an object, not as its text."""
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
                f"{where}.tool_calls[{index}] is {short(call)}: give id, type and a function with a name and its "
                "arguments as a JSON object.",
                param="messages", code="invalid_value",
            )  # fmt: skip
        found.append({**call, "function": {**function, "arguments": value}})
    return found


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    # True equals 1 in Python, and `logprobs: 0` does not mean `logprobs: false`.
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "leave it out."
