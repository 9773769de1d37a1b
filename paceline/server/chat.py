"""`/v1/chat/completions`: one conversation in, the next message out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.request import Grammar, as_tokens
from paceline.server.errors import ApiError
from paceline.server.fields import check_message_fields, short
from paceline.server.response import TokenWords, finish_reason_of, new_id, now, text_of
from paceline.server.types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Delta,
    FunctionCall,
    FunctionDelta,
    Message,
    ToolCall,
    ToolCallDelta,
    UsageInfo,
)
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools import CallBegins, CallParser, Content, Event, call_grammar, describe, style_of


class ChatResponse:
    prompt_field = "messages"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.id, self._created = new_id("chatcmpl"), now()
        tools = _Tools.of(request, tokenizer)
        messages = check_message_fields(request.messages)
        shown = [msgspec.to_builtins(tool) for tool in tools.shown] or None
        if tokenizer.chat is not None and "tools" not in tokenizer.chat.source:
            messages, shown = describe(messages, shown), None
        more: dict[str, Any] = {"logprobs": _num_logprobs(request)}
        if tools.grammar is not None:
            if request.grammar() is not None:
                raise ApiError("tool_choice asks for a call and another constraint is given: give one of them.",
                               param="tool_choice")  # fmt: skip
            more["grammar"] = tools.grammar
        if tools.style is not None and tokenizer.token_id("<tool_call>") in tokenizer.special_ids:
            more["skip_special_tokens"] = False
        params = request.sampling(_max_tokens(request), **more)
        prompt = tokenizer.encode_chat(messages, **({"tools": shown} if shown else {}))
        each = params.each_choice()
        ids = [self.id] if len(each) == 1 else [f"{self.id}-{index}" for index in range(len(each))]
        self.jobs: Sequence[Job] = [Job(as_tokens(prompt), one, id=name) for name, one in zip(ids, each, strict=True)]
        self.jobs_per_prompt = len(each)
        self._words = TokenWords(tokenizer, params)
        self._style = tools.style
        self._parsers = {} if tools.style is None else {i: CallParser(tools.style) for i in range(len(each))}

    def opening(self) -> Iterable[bytes]:
        for index in range(len(self.jobs)):
            yield self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""))])

    def chunks(self, index: int, piece: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        logprobs = self._logprobs([piece])
        parser = self._parsers.get(index)
        if parser is None:
            deltas = [Delta(content=piece.text)] if piece.text else []
        else:
            events = parser.push(piece.text)
            events += parser.close() if finish_reason is not None else []
            deltas = list(_deltas(events, parser))
            if finish_reason == "stop" and parser.num_calls:
                finish_reason = "tool_calls"
        if not deltas and (finish_reason is not None or logprobs is not None):
            deltas = [Delta()]
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            reason = finish_reason if is_last else None
            yield self._chunk([ChatChunkChoice(index, delta, reason, logprobs if number == 0 else None)])

    def usage_chunk(self, usage: UsageInfo) -> bytes:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        choices = [self._choice(index, parts) for index, parts in enumerate(pieces)]
        return msgspec.json.encode(
            ChatCompletion(self.id, "chat.completion", self._created, self.request.model, choices, usage)
        )

    def _choice(self, index: int, parts: Sequence[OutputDelta]) -> ChatChoice:
        message, reason = Message("assistant", text_of(parts)), finish_reason_of(parts[-1]) or ""
        if self._style is not None:
            parser = CallParser(self._style)
            message = _message(parser.push(text_of(parts)) + parser.close())
            if parser.num_calls and reason == "stop":
                reason = "tool_calls"
        return ChatChoice(index, message, reason, self._logprobs(parts))

    def _logprobs(self, parts: Sequence[OutputDelta]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        told = [self._words.of(one) for piece in parts for one in self._words.shown(piece)]
        return ChatLogprobs(told) if told or parts[-1].finish_reason is None or len(parts) > 1 else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageInfo | None = None) -> bytes:
        shown = usage if self.request.include_usage else UNSET
        return msgspec.json.encode(
            ChatChunk(self.id, "chat.completion.chunk", self._created, self.request.model, choices, shown)
        )


@dataclass(frozen=True, slots=True)
class _Tools:
    """What a request says of tools: which are shown, how calls are written, and what a forced one must be."""

    shown: Sequence[Any] = ()
    style: str | None = None
    grammar: Grammar | None = None

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: Tokenizer) -> _Tools:
        tools, choice = request.tools or [], request.tool_choice
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise ApiError(f"tool_choice is {short(choice)}: give none, auto, required or a function.",
                           param="tool_choice", code="invalid_value")  # fmt: skip
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError("tool_choice asks for a call and tools is missing: give tools.", param="tool_choice")
        if not tools or choice == "none":
            return cls()
        for index, tool in enumerate(tools):
            if tool.type != "function":
                raise ApiError(f"tools[{index}].type is {short(tool.type)}: only function is supported.",
                               param="tools", code="invalid_value")  # fmt: skip
        style = style_of("" if tokenizer.chat is None else tokenizer.chat.source)
        if choice is None or choice == "auto":
            return cls(tools, style)
        called = tools
        if not isinstance(choice, str):
            called = [tool for tool in tools if tool.function.name == choice.function.name]
            if not called or choice.type != "function":
                raise ApiError(f"tool_choice is {choice.function.name!r}, which is not among the tools: name one.",
                               param="tool_choice", code="invalid_value")  # fmt: skip
        several = request.parallel_tool_calls is not False and choice == "required"
        return cls(tools, style, call_grammar(msgspec.to_builtins(called), style, several=several))


def _message(events: Sequence[Event]) -> Message:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, Content):
            texts.append(event.text)
        elif isinstance(event, CallBegins):
            calls.append(ToolCall(_call_id(), FunctionCall(event.name, "")))
        else:
            calls[-1].function.arguments += event.arguments
    return Message("assistant", "".join(texts) or (None if calls else ""), tool_calls=calls or UNSET)


def _deltas(events: Sequence[Event], parser: CallParser) -> Iterator[Delta]:
    number = parser.num_calls - 1 - sum(isinstance(event, CallBegins) for event in events)
    for event in events:
        if isinstance(event, Content):
            yield Delta(content=event.text)
        elif isinstance(event, CallBegins):
            number += 1
            call = ToolCallDelta(number, _call_id(), "function", FunctionDelta(event.name, ""))
            yield Delta(tool_calls=[call])
        else:
            yield Delta(tool_calls=[ToolCallDelta(number, function=FunctionDelta(arguments=event.arguments))])


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _num_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise ApiError("top_logprobs is given and logprobs is not true: set it, or leave top_logprobs out.",
                           param="top_logprobs")  # fmt: skip
        if request.logprob_token_ids:
            raise ApiError("logprob_token_ids is given and logprobs is not true: set it, or leave it out.",
                           param="logprob_token_ids")  # fmt: skip
        return None
    return request.top_logprobs or 0


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_completion_tokens is {new} and max_tokens, its older name, is {old}: give one of them.",
            param="max_completion_tokens",
        )
    most, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    if most == 0:
        raise ApiError(f"{name} is 0: ask for at least 1 token.", param=name, code="invalid_value")
    return most
