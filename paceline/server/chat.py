"""`/v1/chat/completions`: one conversation, one or several choices of its next message.

`ChatBuilder` is what all chat APIs share: a `ChatRequest` becomes jobs, their output becomes events (content, tool
calls). `ChatResponse` formats the events for OpenAI; the formats of other APIs are in `apis/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.request import MAX_LOGPROBS, Grammar, as_tokens
from paceline.server.errors import ApiError
from paceline.server.fields import short
from paceline.server.prompts import check_messages, encode_prediction, encode_rendered, render_chat
from paceline.server.reasoning import ReasoningSetup
from paceline.server.request_types import ChatRequest, FunctionName, ToolChoice
from paceline.server.response import (
    LogprobFormatter,
    ResponseBuilder,
    clipped_max_tokens,
    encoded,
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
from paceline.server.state import RequestContext
from paceline.text.call_syntax import ArgumentsDelta, Content, Tool, ToolCallStart
from paceline.text.output_parser import OutputEvent, Reasoning, output_parser
from paceline.text.reasoning import ReasoningCounter
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import HERMES
from paceline.text.tools import call_grammar, can_call, make_call_id, markers, style_of

OutputPart = Reasoning | Content | FunctionCall


class ChatBuilder(ResponseBuilder):
    """The jobs of a chat request, and their output as events. A subclass formats the events for one API."""

    request: ChatRequest
    prompt_field = "messages"
    id_prefix = "chatcmpl-"

    def __init__(self, context: RequestContext, request: ChatRequest) -> None:
        tokenizer = context.tokenizer
        self.request = request
        self.id, self.created = make_response_id(self.id_prefix), unix_time()
        tools = _ToolSetup.of(request, tokenizer)
        reasoning = ReasoningSetup.of(context, request, tokenizer.chat_for(tools.shown))
        messages = check_messages(request.messages, context)
        rendered = render_chat(messages, context, tools=tools.shown, **reasoning.variables)
        prompt = rendered.text
        overrides: dict[str, object] = {"logprobs": _num_logprobs(request)}
        grammar = request.grammar()
        if tools.grammar is not None:
            # `response_format` is for the text of a message, and a forced call has none.
            if grammar is not None and request.response_format is None:
                raise ApiError(
                    "tool_choice forces a call and another constraint is given: give one of them.",
                    param="tool_choice",
                )
            grammar = tools.grammar
        if grammar is not None:
            prefix = "" if reasoning.markers is None or tools.grammar is not None else reasoning.markers.prefix
            overrides["grammar"] = replace(grammar, reasoning=reasoning.before_grammar(prompt), prefix=prefix)
        parsed = (*reasoning.texts, *(markers(tools.style) if tools.shown else ()))
        if any(tokenizer.token_id(text) in tokenizer.special_ids for text in parsed):
            overrides["skip_special_tokens"] = False  # the parser needs them
        params = request.sampling_params(_max_tokens(request), **overrides)
        tokens = as_tokens(encode_rendered(rendered, context))
        predicted = as_tokens(encode_prediction(request.prediction, context))
        request.messages, request.tools, request.prediction = [], None, None  # the jobs have them
        each = params.each_choice()
        ids = [self.id] if len(each) == 1 else [f"{self.id}-{index}" for index in range(len(each))]
        self.jobs: Sequence[Job] = [
            Job(tokens, choice, id=name, draft_source=predicted) for name, choice in zip(ids, each, strict=True)
        ]
        self.jobs_per_prompt = len(each)
        self._formatter = LogprobFormatter(tokenizer, params)
        self._style = tools.style
        self._parsers = [
            output_parser(reasoning.markers, prompt, tools.style, tools.shown, separate_reasoning=reasoning.is_separate)
            for _ in each
        ]
        self._counters = [
            ReasoningCounter(reasoning.markers, tokenizer.token_bytes) for _ in each if reasoning.markers is not None
        ]

    def parse(self, index: int, outputs: Sequence[OutputDelta]) -> tuple[list[OutputEvent], str | None]:
        """Events of further outputs of job `index`, and the finish reason with the last one."""
        parser, reason = self._parsers[index], finish_reason_of(outputs[-1])
        text = outputs[0].text if len(outputs) == 1 else text_of(outputs)
        if parser.is_trivial:
            return [Content(text)] if text else [], reason
        events = parser.push(text)
        if self._counters:
            for output in outputs:
                self._counters[index].push(output.token_ids)
        if reason is not None:
            events += parser.close()
        return events, "tool_calls" if reason == "stop" and parser.num_calls else reason

    def make_call_id(self) -> str:
        """An id for a tool call, in a form that the chat template accepts in later messages."""
        return make_call_id(self._style)

    def parts(self, index: int, outputs: Sequence[OutputDelta]) -> tuple[list[OutputPart], str]:
        """The same for the complete output of job `index`, with the events of each call and each text merged."""
        events, reason = self.parse(index, outputs)
        found: list[OutputPart] = []
        for event in events:
            last = found[-1] if found else None
            if isinstance(event, ToolCallStart):
                found.append(FunctionCall(event.name, ""))
            elif isinstance(event, ArgumentsDelta):
                assert isinstance(last, FunctionCall), "arguments follow the start of a call"
                last.arguments += event.arguments
            elif isinstance(last, Content | Reasoning) and type(last) is type(event):
                found[-1] = type(last)(last.text + event.text)
            else:
                found.append(event)
        return found, reason or ""

    def with_reasoning(self, usage: UsageInfo) -> UsageInfo:
        """Usage with the number of reasoning tokens, markers included."""
        if not self._counters:
            return usage
        counts = [
            counter.num_tokens
            for parser, counter in zip(self._parsers, self._counters, strict=True)
            if parser.has_reasoning
        ]
        # A stop string may cut off tokens that were counted.
        num_tokens = min(sum(counts), usage.completion_tokens)
        details = msgspec.structs.replace(usage.completion_tokens_details, reasoning_tokens=num_tokens)
        return msgspec.structs.replace(usage, completion_tokens_details=details)


def arguments_of(call: FunctionCall) -> dict[str, object]:
    """The arguments as an object. Text that is not one, such as that of a call cut off by max_tokens, is kept."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": call.arguments}


class ChatResponse(ChatBuilder):
    def __init__(self, context: RequestContext, request: ChatRequest) -> None:
        super().__init__(context, request)
        self._num_calls = [0] * len(self.jobs)  # streamed so far, of each choice

    def first_chunks(self) -> Iterable[bytes]:
        for index in range(len(self.jobs)):
            yield self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""))])

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        logprobs = self._logprobs([output])
        if self._parsers[index].is_trivial:  # half the cost, for every token
            deltas = [Delta(content=output.text)] if output.text else []
        else:
            events, finish_reason = self.parse(index, [output])
            deltas = list(self._deltas(index, events))
        if not deltas and (finish_reason is not None or logprobs is not None):
            deltas = [Delta()]
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            reason = finish_reason if is_last else None
            clipped = UNSET if reason is None else clipped_max_tokens(output)
            choice = ChatChunkChoice(index, delta, reason, logprobs if number == 0 else None, clipped)
            yield self._chunk([choice], versions=UNSET if reason is None else weight_versions([output]))

    def last_chunks(self, usage: UsageInfo) -> Iterable[bytes]:
        return [self._chunk([], self.with_reasoning(usage))] if self.request.include_usage else []

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        choices = [self._choice(index, deltas) for index, deltas in enumerate(outputs)]
        versions, usage = weight_versions(chain.from_iterable(outputs)), self.with_reasoning(usage)
        return msgspec.json.encode(
            ChatCompletion(self.id, "chat.completion", self.created, self.request.model, choices, usage, versions)
        )

    def _choice(self, index: int, outputs: Sequence[OutputDelta]) -> ChatChoice:
        parts, reason = self.parts(index, outputs)
        text = "".join(part.text for part in parts if isinstance(part, Content))
        thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [ToolCall(self.make_call_id(), part) for part in parts if isinstance(part, FunctionCall)]
        message = Message("assistant", text or (None if calls else ""), None, thoughts or UNSET, calls or UNSET)
        return ChatChoice(index, message, reason, self._logprobs(outputs), clipped_max_tokens(outputs[-1]))

    def _deltas(self, index: int, events: Sequence[OutputEvent]) -> Iterator[Delta]:
        for event in events:
            if isinstance(event, Content):
                yield Delta(content=event.text)
            elif isinstance(event, Reasoning):
                yield Delta(reasoning_content=event.text)
            elif isinstance(event, ToolCallStart):
                self._num_calls[index] += 1
                number, function = self._num_calls[index] - 1, FunctionDelta(event.name, "")
                yield Delta(tool_calls=[ToolCallDelta(number, self.make_call_id(), "function", function)])
            else:
                function = FunctionDelta(arguments=event.arguments)
                yield Delta(tool_calls=[ToolCallDelta(self._num_calls[index] - 1, function=function)])

    def _logprobs(self, outputs: Sequence[OutputDelta]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        formatter = self._formatter
        found = [encoded(formatter.format(one)) for output in outputs for one in formatter.visible_logprobs(output)]
        return ChatLogprobs(found) if found or outputs[-1].finish_reason is None or len(outputs) > 1 else None

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageInfo | None = None,
        versions: list[str] | UnsetType = UNSET,
    ) -> bytes:
        shown = usage if self.request.include_usage else UNSET
        return msgspec.json.encode(
            ChatChunk(self.id, "chat.completion.chunk", self.created, self.request.model, choices, shown, versions)
        )


@dataclass(frozen=True, slots=True)
class _ToolSetup:
    """The tools the model sees, the syntax of its calls, and the grammar of a forced call."""

    shown: Sequence[Tool] = ()
    style: str = HERMES
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
        chat = tokenizer.chat_for(tools)
        style = style_of("" if chat is None else chat.source)
        for index, tool in enumerate(tools):
            if not can_call(style, tool.function.name):
                raise ApiError(
                    f"tools[{index}].function.name is {short(tool.function.name)}: give a name of letters, digits, "
                    "`_`, `.` and `-`, which this model can call.",
                    param="tools",
                    code="invalid_value",
                )
        allowed = shown = msgspec.to_builtins(tools)
        mode = choice or "auto"
        if isinstance(mode, ToolChoice):
            mode, names = _allowed_names(mode)
            unknown = names - {tool["function"]["name"] for tool in shown}
            if unknown:
                raise _invalid_tool_choice(
                    f"tool_choice is {short(min(unknown))}, which is not one of the tools: name one of them."
                )
            allowed = [tool for tool in shown if tool["function"]["name"] in names]
        if mode == "auto":  # the output is free, so that the model is shown what it may call
            return cls(allowed, style)
        several = request.parallel_tool_calls is not False and mode == "required"
        return cls(shown, style, call_grammar(allowed, style, several=several, literal=tokenizer.lark_literal))


def _allowed_names(choice: ToolChoice) -> tuple[str, set[str]]:
    """`auto`, `required` or `function`: one call, and the functions that may be called."""
    given = choice.function if choice.type == "function" else choice.allowed_tools
    if given is None or (choice.function is not None) == (choice.allowed_tools is not None):
        raise _invalid_tool_choice(f"tool_choice has the type {choice.type}: give {choice.type}, and nothing else.")
    if isinstance(given, FunctionName):
        return "function", {given.name}
    if not given.tools:
        raise _invalid_tool_choice("tool_choice.allowed_tools.tools is empty: name a tool, or set tool_choice to none.")
    return given.mode, {tool.function.name for tool in given.tools}


def _invalid_tool_choice(message: str) -> ApiError:
    return ApiError(message, param="tool_choice", code="invalid_value")


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        count = request.top_logprobs or 0
        if not 0 <= count <= MAX_LOGPROBS:
            raise ApiError(
                f"top_logprobs is {count}: give 0 to {MAX_LOGPROBS}.", param="top_logprobs", code="invalid_value"
            )
        return count
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
    if value is not None and value < 1:
        raise ApiError(f"{name} is {value}: give at least 1.", param=name, code="invalid_value")
    return value
