"""The requests of `/v1/responses`, and their translation to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from paceline.server.errors import ApiError
from paceline.server.fields import Json, short
from paceline.server.parsing import convert_tagged
from paceline.server.request_types import (
    AllowedTool,
    AllowedTools,
    ChatRequest,
    Function,
    FunctionName,
    JsonSchema,
    ReasoningEffort,
    ResponseFormat,
    ScheduledRequest,
    Tool,
    ToolChoice,
)


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False  # accepted, never sent


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: Json | None = None
    verbosity: Literal["medium"] | None = None  # OpenAI's default


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None  # there is none: the reasoning itself is returned
    generate_summary: None = None  # the deprecated name of summary


class ResponsesRequest(ScheduledRequest, kw_only=True):
    input: str | list[Json]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # default: as the server's option stored_responses allows
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str | None = None
    status: str | None = None


class _MessageItem(_Item, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Json]
    phase: str | None = None


class _CallItem(_Item, kw_only=True):
    call_id: str
    name: str
    arguments: str


class _CallOutputItem(_Item, kw_only=True):
    call_id: str
    output: str | list[Json]


class _ReasoningItem(_Item, kw_only=True):
    summary: list[Json] | None = None
    content: list[Json] | None = None
    encrypted_content: str | None = None


class _TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _PlainFormat(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _ForcedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[Json]


_TOOL_CHOICES: dict[str, type[msgspec.Struct]] = {"function": _ForcedFunction, "allowed_tools": _AllowedTools}
_ITEMS: dict[str, type[_Item]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _CallOutputItem,
    "reasoning": _ReasoningItem,
}
_PARTS = {"input_text": _TextPart, "output_text": _TextPart}
_REASONING_PARTS = {"reasoning_text": _TextPart}
_FORMATS: dict[str, type[msgspec.Struct]] = {
    "text": _PlainFormat,
    "json_object": _PlainFormat,
    "json_schema": JsonSchema,
}


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat request without instructions and history."""
    tools = [
        convert_tagged(tool, {"function": _FunctionTool}, f"tools[{index}]")
        for index, tool in enumerate(request.tools or ())
    ]
    return ChatRequest(
        messages=_messages(request.input),
        stream=request.stream,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=_response_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        tools=[Tool("function", Function(one.name, one.description, one.parameters, one.strict)) for one in tools]
        or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        **request.scheduling(),
    )


def _tool_choice(choice: str | Json | None) -> str | ToolChoice | None:
    if not isinstance(choice, dict):
        return choice
    found = convert_tagged(choice, _TOOL_CHOICES, "tool_choice")
    if isinstance(found, _AllowedTools):
        tools = [
            convert_tagged(tool, {"function": _ForcedFunction}, f"tool_choice.tools[{index}]")
            for index, tool in enumerate(found.tools)
        ]
        allowed = [AllowedTool("function", FunctionName(tool.name)) for tool in tools]
        return ToolChoice("allowed_tools", allowed_tools=AllowedTools(found.mode, allowed))
    assert isinstance(found, _ForcedFunction), "one of the two"
    return ToolChoice("function", FunctionName(found.name))


def _messages(value: str | list[Json]) -> list[Json]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found: list[Json] = []
    thoughts = ""  # of the item that follows
    for index, given in enumerate(value):
        path, already = f"input[{index}]", len(found)
        item = convert_tagged({"type": "message", **given}, _ITEMS, path)
        if isinstance(item, _ReasoningItem):
            parts = _parts(f"{path}.content", item.content or [], _REASONING_PARTS)
            thoughts += "\n".join(part.text for part in parts)
            continue
        if isinstance(item, _MessageItem):
            found.append({"role": item.role, "content": _content(f"{path}.content", item.content)})
        elif isinstance(item, _CallItem):
            add_call(found, item.call_id, item.name, _arguments(path, item.arguments))
        elif isinstance(item, _CallOutputItem):
            output = _content(f"{path}.output", item.output)
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        if thoughts and found[-1]["role"] == "assistant" and len(found) > already:
            found[-1]["reasoning_content"], thoughts = thoughts, ""
    if thoughts:
        raise ApiError(
            "input has a reasoning item without the message or function_call that followed it: send both or neither.",
            param="input",
            code="invalid_value",
        )
    return found


def input_items(messages: Iterable[Json], name: str) -> Iterator[Json]:
    """The messages of an input as items again. Their ids are made from `name`."""
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if thoughts := message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": thoughts}
            yield {"type": "reasoning", "id": f"rs_{name}_{number}", "summary": [], "content": [part]}
        if role == "tool":
            call_id = message["tool_call_id"]
            output = content if isinstance(content, str) else [{"type": "input_text", "text": text} for text in texts]
            yield {"type": "function_call_output", "id": f"fco_{name}_{number}", "call_id": call_id, "output": output}
        elif content or not message.get("tool_calls"):
            kind: Json = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
            item = {"type": "message", "id": f"msg_{name}_{number}", "status": "completed"}
            yield {**item, "role": role, "content": [{**kind, "text": text} for text in texts]}
        for index, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            yield {
                "type": "function_call",
                "id": f"fc_{name}_{number}_{index}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"], ensure_ascii=False),
                "status": "completed",
            }


def add_call(messages: list[Json], call_id: str, name: str, arguments: Json) -> None:
    """The text and the calls of one turn are one message of a chat."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def _arguments(path: str, text: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(f"{path}.arguments is {short(text)}: give a JSON object.", param="input", code="invalid_value")
    return value


def _content(path: str, content: str | list[Json]) -> str | list[Json]:
    """In the form of a chat, whose template joins the parts."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in _parts(path, content, _PARTS)]


def _parts(path: str, content: list[Json], kinds: dict[str, type[_TextPart]]) -> list[_TextPart]:
    return [convert_tagged(part, kinds, f"{path}[{index}]") for index, part in enumerate(content)]


def _response_format(config: TextConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    found = convert_tagged(config.format, _FORMATS, "text.format")
    return ResponseFormat(config.format["type"], found if isinstance(found, JsonSchema) else None)
