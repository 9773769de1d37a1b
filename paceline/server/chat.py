"""`/v1/chat/completions`: one conversation, one or several choices of its next message."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.request import Grammar, as_tokens
from paceline.server.errors import ApiError
from paceline.server.fields import check_messages, short
from paceline.server.request_types import ChatRequest
from paceline.server.response import (
    LogprobFormatter,
    clipped_max_tokens,
    finish_reason_of,
    make_response_id,
    text_of,
    unix_time,
    weight_versions,
)
from paceline.server.response_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FunctionCall,
    FunctionDelta,
    Message,
    ToolCall,
    ToolCallDelta,
    UsageInfo,
)
from paceline.server.state import ServerState
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools import Content, ToolCallEvent, ToolCallParser, ToolCallStart, call_grammar, describe, style_of


class ChatResponse:
    prompt_field = "messages"

    def __init__(self, state: ServerState, request: ChatRequest) -> None:
        tokenizer = state.tokenizer
        self.request = request
        self.id, self._created = make_response_id("chatcmpl"), unix_time()
        tools = _ToolSetup.of(request, tokenizer)
        messages = check_messages(request.messages)
        shown = [msgspec.to_builtins(tool) for tool in tools.shown] or None
        if tokenizer.chat is not None and "tools" not in tokenizer.chat.source:
            messages, shown = describe(messages, shown), None
        overrides: dict[str, Any] = {"logprobs": _num_logprobs(request)}
        if tools.grammar is not None:
            if request.grammar() is not None:
                raise ApiError(
                    "tool_choice forces a call and another constraint is given: give one of them.",
                    param="tool_choice",
                )
            overrides["grammar"] = tools.grammar
        if tools.style is not None and tokenizer.token_id("<tool_call>") in tokenizer.special_ids:
            overrides["skip_special_tokens"] = False  # the parser needs them
        params = request.sampling_params(_max_tokens(request), **overrides)
        prompt = tokenizer.encode_chat(messages, **({"tools": shown} if shown else {}))
        each = params.each_choice()
        ids = [self.id] if len(each) == 1 else [f"{self.id}-{index}" for index in range(len(each))]
        tokens = as_tokens(prompt)
        self.jobs: Sequence[Job] = [Job(tokens, choice, id=name) for name, choice in zip(ids, each, strict=True)]
        self.jobs_per_prompt = len(each)
        self._formatter = LogprobFormatter(tokenizer, params)
        self._style = tools.style
        self._parsers = {} if tools.style is None else {i: ToolCallParser(tools.style) for i in range(len(each))}

    def first_chunks(self) -> Iterable[bytes]:
        for index in range(len(self.jobs)):
            yield self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""))])

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        logprobs = self._logprobs([output])
        parser = self._parsers.get(index)
        if parser is None:
            deltas = [Delta(content=output.text)] if output.text else []
        else:
            events = parser.push(output.text)
            events += parser.close() if finish_reason is not None else []
            deltas = list(_deltas(events, parser))
            if finish_reason == "stop" and parser.num_calls:
                finish_reason = "tool_calls"
        if not deltas and (finish_reason is not None or logprobs is not None):
            deltas = [Delta()]
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            reason = finish_reason if is_last else None
            clipped = UNSET if reason is None else clipped_max_tokens(output)
            choice = ChatChunkChoice(index, delta, reason, logprobs if number == 0 else None, clipped)
            yield self._chunk([choice], versions=UNSET if reason is None else weight_versions([output]))

    def usage_chunk(self, usage: UsageInfo) -> bytes:
        return self._chunk([], usage)

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        choices = [self._choice(index, deltas) for index, deltas in enumerate(outputs)]
        versions = weight_versions(chain.from_iterable(outputs))
        return msgspec.json.encode(
            ChatCompletion(self.id, "chat.completion", self._created, self.request.model, choices, usage, versions)
        )

    def _choice(self, index: int, outputs: Sequence[OutputDelta]) -> ChatChoice:
        message, reason = Message("assistant", text_of(outputs)), finish_reason_of(outputs[-1]) or ""
        if self._style is not None:
            parser = ToolCallParser(self._style)
            message = _message(parser.push(text_of(outputs)) + parser.close())
            if parser.num_calls and reason == "stop":
                reason = "tool_calls"
        return ChatChoice(index, message, reason, self._logprobs(outputs), clipped_max_tokens(outputs[-1]))

    def _logprobs(self, outputs: Sequence[OutputDelta]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        formatter = self._formatter
        found = [formatter.format(one) for output in outputs for one in formatter.visible_logprobs(output)]
        return ChatLogprobs(found) if found or outputs[-1].finish_reason is None or len(outputs) > 1 else None

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageInfo | None = None,
        versions: list[str] | UnsetType = UNSET,
    ) -> bytes:
        shown = usage if self.request.include_usage else UNSET
        return msgspec.json.encode(
            ChatChunk(self.id, "chat.completion.chunk", self._created, self.request.model, choices, shown, versions)
        )


@dataclass(frozen=True, slots=True)
class _ToolSetup:
    """The tools the model sees, the syntax of its calls, and the grammar of a forced call."""

    shown: Sequence[Any] = ()
    style: str | None = None
    grammar: Grammar | None = None

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: Tokenizer) -> _ToolSetup:
        tools, choice = request.tools or [], request.tool_choice
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise _invalid_tool_choice(f"tool_choice is {short(choice)}: give none, auto, required or a function.")
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError("tool_choice forces a call, so `tools` is required.", param="tool_choice")
        if not tools or choice == "none":
            return cls()
        for index, tool in enumerate(tools):
            if tool.type != "function":
                raise ApiError(
                    f"tools[{index}].type is {short(tool.type)}: only function is supported.",
                    param="tools",
                    code="invalid_value",
                )
        style = style_of("" if tokenizer.chat is None else tokenizer.chat.source)
        if choice is None or choice == "auto":
            return cls(tools, style)
        allowed = tools
        if not isinstance(choice, str):
            allowed = [tool for tool in tools if tool.function.name == choice.function.name]
            if not allowed or choice.type != "function":
                raise _invalid_tool_choice(
                    f"tool_choice is {choice.function.name!r}, which is not one of the tools: name one of them."
                )
        several = request.parallel_tool_calls is not False and choice == "required"
        return cls(tools, style, call_grammar(msgspec.to_builtins(allowed), style, several=several))


def _invalid_tool_choice(message: str) -> ApiError:
    return ApiError(message, param="tool_choice", code="invalid_value")


def _message(events: Sequence[ToolCallEvent]) -> Message:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, Content):
            texts.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append(ToolCall(_call_id(), FunctionCall(event.name, "")))
        else:
            calls[-1].function.arguments += event.arguments
    return Message("assistant", "".join(texts) or (None if calls else ""), tool_calls=calls or UNSET)


def _deltas(events: Sequence[ToolCallEvent], parser: ToolCallParser) -> Iterator[Delta]:
    number = parser.num_calls - 1 - sum(isinstance(event, ToolCallStart) for event in events)
    for event in events:
        if isinstance(event, Content):
            yield Delta(content=event.text)
        elif isinstance(event, ToolCallStart):
            number += 1
            call = ToolCallDelta(number, _call_id(), "function", FunctionDelta(event.name, ""))
            yield Delta(tool_calls=[call])
        else:
            yield Delta(tool_calls=[ToolCallDelta(number, function=FunctionDelta(arguments=event.arguments))])


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    for name in ("top_logprobs", "logprob_token_ids"):
        if getattr(request, name):
            raise ApiError(f"{name} is given and logprobs is not true: set logprobs, or omit {name}.", param=name)
    return None


def _max_tokens(request: ChatRequest) -> int | None:
    deprecated, current = request.max_tokens, request.max_completion_tokens
    if deprecated is not None and current is not None and deprecated != current:
        raise ApiError(
            f"max_completion_tokens is {current} and max_tokens, its deprecated name, is {deprecated}: "
            "give one of them.",
            param="max_completion_tokens",
        )
    value, name = (deprecated, "max_tokens") if current is None else (current, "max_completion_tokens")
    if value == 0:
        raise ApiError(f"{name} is 0: give at least 1.", param=name, code="invalid_value")
    return value
