"""`/v1/messages`: Anthropic's messages. A request is translated to a chat request, its output to content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from paceline.engine.output import OutputDelta
from paceline.server.apis.dialects import named_event
from paceline.server.chat import ChatBuilder, OutputPart, arguments_of
from paceline.server.errors import ApiError
from paceline.server.fields import Json, short
from paceline.server.parsing import convert, convert_tagged
from paceline.server.reasoning import template_variables
from paceline.server.request_types import (
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
from paceline.server.response_types import UsageInfo
from paceline.server.routing import Call, json_response
from paceline.server.state import RequestContext
from paceline.text.call_syntax import Content, ToolCallStart
from paceline.text.output_parser import OutputEvent, Reasoning

# ---------------------------------------------------------------------- requests


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    cache_control: Any = None  # ignored: every prefix is cached


class TextBlock(_Block, kw_only=True):
    text: str
    citations: None = None


class ToolUseBlock(_Block, kw_only=True):
    id: str
    name: str
    input: Json
    caller: Any = None  # who called: always the model


class ToolResultBlock(_Block, kw_only=True):
    tool_use_id: str
    content: str | list[Json] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block, kw_only=True):
    """Reasoning that a client sends back."""

    thinking: str
    signature: str | None = None  # proves to Anthropic that the block is its own


class RedactedThinkingBlock(_Block, kw_only=True):
    data: str


_USER_BLOCKS: dict[str, type[_Block]] = {"text": TextBlock, "tool_result": ToolResultBlock}
_ASSISTANT_BLOCKS: dict[str, type[_Block]] = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    input_schema: Json
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # ignored: input is always streamed as it is generated


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]  # enabled and adaptive: the model decides, as it does by default
    budget_tokens: int | None = None  # a target, not a limit: max_tokens bounds reasoning and answer together
    display: str | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: Json | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # where the chat template has a variable


class CountTokensRequest(ScheduledRequest, kw_only=True):
    """What makes up the prompt."""

    messages: list[AnthropicMessage]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def _to_chat(request: CountTokensRequest, *, has_effort: bool) -> ChatRequest:
    choice = request.tool_choice or AnthropicToolChoice(type="auto")
    chat = ChatRequest(
        messages=list(_messages(request)),
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=_response_format(request.output_config),
        reasoning_effort=_effort(request, has_effort),
        **request.scheduling(),
    )
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stream, chat.stop = request.max_tokens, request.stream, request.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    return chat


def _messages(request: CountTokensRequest) -> Iterator[Json]:
    if request.system:
        yield {"role": "system", "content": _content("system", request.system)}
    for index, message in enumerate(request.messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            yield _assistant_message(path, message.content)
        else:
            yield from _user_messages(path, message)
    if not request.messages or request.messages[-1].role == "assistant":
        raise ApiError(
            "messages must end with a user message: continuing an assistant message (prefill) is not supported.",
            param="messages",
            code="unsupported_value",
        )


def _user_messages(path: str, message: AnthropicMessage) -> Iterator[Json]:
    """The results of tools are messages of their own in a chat."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    parts: list[Json] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        kinds = _USER_BLOCKS if message.role == "user" else {"text": TextBlock}
        found = convert_tagged(block, kinds, where)
        if isinstance(found, TextBlock):
            parts.append(_part(found))
        else:
            assert isinstance(found, ToolResultBlock), "the kinds of blocks of a user"
            result = _content(f"{where}.content", found.content or "")
            if found.is_error and isinstance(result, str):
                result = f"Error: {result}"
            elif found.is_error:
                result = [{"type": "text", "text": "Error: "}, *result]
            yield {"role": "tool", "tool_call_id": found.tool_use_id, "content": result}
    if parts or not message.content:
        yield {"role": message.role, "content": parts}


def _assistant_message(path: str, content: str | list[Json]) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    parts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(content):
        found = convert_tagged(block, _ASSISTANT_BLOCKS, f"{path}[{index}]")
        if isinstance(found, TextBlock):
            parts.append(_part(found))
        elif isinstance(found, ThinkingBlock):
            thoughts.append(found.thinking)
        elif isinstance(found, ToolUseBlock):
            function = {"name": found.name, "arguments": found.input}
            calls.append({"id": found.id, "type": "function", "function": function})
    message: Json = {"role": "assistant", "content": parts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, **({"tool_calls": calls} if calls else {})}


def _content(path: str, content: str | list[Json]) -> str | list[Json]:
    """In the form of a chat, whose template joins the parts."""
    if isinstance(content, str):
        return content
    kinds = {"text": TextBlock}
    return [_part(convert_tagged(block, kinds, f"{path}[{index}]")) for index, block in enumerate(content)]


def _part(block: TextBlock) -> Json:
    return {"type": "text", "text": block.text}


def _tool(path: str, tool: Json) -> Tool:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise ApiError(
            f"{path}.type is {short(kind)}, which is not supported: tools run by the server are not available; give "
            "tools with an input_schema.",
            param="tools",
            code="unsupported_value",
        )
    found = convert({name: value for name, value in tool.items() if name != "type"}, AnthropicTool, path)
    return Tool("function", Function(found.name, found.description, found.input_schema, found.strict))


def _tool_choice(choice: AnthropicToolChoice) -> str | ToolChoice:
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(
            f"tool_choice.name is {short(choice.name)} and type is {choice.type!r}: give a name with type tool alone.",
            param="tool_choice",
            code="invalid_value",
        )
    if choice.name is not None:
        return ToolChoice("function", FunctionName(choice.name))
    return "required" if choice.type == "any" else choice.type


def _effort(request: CountTokensRequest, has_effort: bool) -> ReasoningEffort | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    effort = None if request.output_config is None or not has_effort else request.output_config.effort
    return "xhigh" if effort == "max" else effort


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    found = convert_tagged(config.format, {"json_schema": _OutputSchema}, "output_config.format")
    return ResponseFormat("json_schema", JsonSchema("output", found.schema))


class _OutputSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: Json


# ---------------------------------------------------------------------- responses


class MessageUsage(msgspec.Struct):
    input_tokens: int  # without those that were cached
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Json


AnthropicContent = TextContent | ThinkingContent | ToolUse


class MessagesReply(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[AnthropicContent]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessagesResponse(ChatBuilder):
    id_prefix = "msg_"

    def __init__(self, context: RequestContext, request: CountTokensRequest) -> None:
        super().__init__(context, _to_chat(request, has_effort="reasoning_effort" in template_variables(context)))
        self._block: AnthropicContent | None = None  # the one being streamed
        self._num_blocks = 0
        self._stop: Json = {}  # why it stopped, once it did

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.jobs[0].prompt)

    def first_chunks(self) -> Iterable[bytes]:
        reply = MessagesReply(self.id, self.request.model, [], MessageUsage(self.num_prompt_tokens, 0))
        yield named_event("message_start", message=reply)

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        events, reason = self.parse(index, [output])
        for event in events:
            yield from self._event_chunks(event)
        if reason is not None:
            self._stop = _stop(reason, output)

    def last_chunks(self, usage: UsageInfo) -> Iterable[bytes]:
        yield from self._end_block()
        yield named_event("message_delta", delta=self._stop, usage=_usage(usage))
        yield named_event("message_stop")

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        parts, reason = self.parts(0, outputs[0])
        content = [self._content(part) for part in parts]
        stop = _stop(reason, outputs[0][-1])
        return msgspec.json.encode(MessagesReply(self.id, self.request.model, content, _usage(usage), **stop))

    def _content(self, part: OutputPart) -> AnthropicContent:
        if isinstance(part, Content):
            return TextContent(part.text)
        if isinstance(part, Reasoning):
            return ThinkingContent(part.text)
        return ToolUse(self.make_call_id(), part.name, arguments_of(part))

    def _event_chunks(self, event: OutputEvent) -> Iterator[bytes]:
        if isinstance(event, Content):
            if not isinstance(self._block, TextContent):
                yield from self._begin_block(TextContent(""))
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, Reasoning):
            if not isinstance(self._block, ThinkingContent):
                yield from self._begin_block(ThinkingContent(""))
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolCallStart):
            yield from self._begin_block(ToolUse(self.make_call_id(), event.name, {}))
        else:
            yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})

    def _begin_block(self, block: AnthropicContent) -> Iterator[bytes]:
        yield from self._end_block()
        self._block = block
        self._num_blocks += 1
        yield named_event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _end_block(self) -> Iterator[bytes]:
        if self._block is not None:
            self._block = None
            yield named_event("content_block_stop", index=self._num_blocks - 1)

    def _delta(self, delta: Json) -> bytes:
        return named_event("content_block_delta", index=self._num_blocks - 1, delta=delta)


def count_tokens(context: RequestContext, request: CountTokensRequest) -> TokenCount:
    request.model = context.model_of(request.model)
    return TokenCount(MessagesResponse(context, request).num_prompt_tokens)


async def send_count(call: Call) -> Response:
    return json_response(call.body)


def _stop(reason: str, output: OutputDelta) -> Json:
    if reason == "stop" and output.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": output.matched_stop}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[reason], "stop_sequence": None}


def _usage(usage: UsageInfo) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
