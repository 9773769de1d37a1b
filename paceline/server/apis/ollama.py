"""`/api/…`: Ollama's API. Chat and generate are translated to chat requests; a stream is lines of JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from paceline import __version__
from paceline.engine.output import OutputDelta, Timings
from paceline.request import InvalidRequest
from paceline.server.chat import ChatBuilder, OutputPart, arguments_of
from paceline.server.errors import ApiError
from paceline.server.fields import FieldRules, Json, select_supported, short
from paceline.server.parsing import convert
from paceline.server.request_types import (
    ChatRequest,
    JsonSchema,
    ReasoningEffort,
    ResponseFormat,
    ScheduledRequest,
    Tool,
)
from paceline.server.response import make_response_id
from paceline.server.response_types import FunctionCall, UsageInfo
from paceline.server.routing import Call, json_response
from paceline.server.state import RequestContext, ServerState
from paceline.text.call_syntax import ArgumentsDelta, Content, ToolCallStart
from paceline.text.output_parser import Reasoning, reasoning_markers_of
from paceline.text.tools import style_of

_NS = 1_000_000_000
_NEVER = "2318-01-01T00:00:00Z"  # about what Ollama shows for a model that stays loaded
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "8-bit": 1, "4- and 8-bit": 0.75, "4-bit": 0.625}

# ---------------------------------------------------------------------- requests


class InputFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: Json
    index: int | None = None


class InputCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    function: InputFunction
    id: str | None = None
    type: str | None = None


class OllamaInputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[InputCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def untagged(model: str) -> str:
    return model.removesuffix(":latest")  # a tag that Ollama adds


def nanoseconds(seconds: float) -> int:
    return int(seconds * _NS)


class OllamaRequest(ScheduledRequest, kw_only=True):
    stream: bool | None = None  # default: true
    options: Json | None = None
    format: str | Json | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def __post_init__(self) -> None:
        self.model = untagged(self.model)


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaInputMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None  # the deprecated name of model
    verbose: bool | None = None


class OllamaOptions(msgspec.Struct, kw_only=True):
    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_EFFORTS: dict[bool | str | None, ReasoningEffort | None] = {
    None: None, False: "none", True: "medium", "low": "low", "medium": "medium", "high": "high",
}  # fmt: skip
_OPTION_RULES = FieldRules(
    # How to run the model, which the server decides.
    ignored={
        "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread",
        "num_keep", "vocab_only", "logits_all", "embedding_only",
    },
    unsupported={
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "mirostat": (0,),
        "mirostat_tau": (),
        "mirostat_eta": (),
        "penalize_newline": (),
        "repeat_last_n": (-1,),  # penalties count the whole prompt and output
    },
)  # fmt: skip


def check_options(given: Json | None, context: RequestContext) -> OllamaOptions:
    known = select_supported(given or {}, OllamaOptions.__struct_fields__, _OPTION_RULES)
    options = convert(known, OllamaOptions, "options")
    limit = context.model.max_tokens
    if options.num_ctx is not None and options.num_ctx > limit:
        raise ApiError(
            f"num_ctx is {options.num_ctx}: the context of this server is {limit} tokens; give at most that.",
            param="options",
            code="invalid_value",
        )
    return options


def _to_chat(
    request: OllamaRequest, messages: list[Json], tools: list[Tool] | None, context: RequestContext
) -> ChatRequest:
    options = check_options(request.options, context)
    return ChatRequest(
        messages=messages,
        tools=tools,
        stream=request.stream is not False,
        response_format=_response_format(request.format),
        reasoning_effort=_EFFORTS[request.think],
        # Ollama writes "no limit" and "at random" as negative numbers, and "all tokens" as 0.
        max_tokens=None if options.num_predict in (-1, -2) else options.num_predict,
        seed=None if options.seed == -1 else options.seed,
        top_k=None if options.top_k in (-1, 0) else options.top_k,
        temperature=options.temperature,
        top_p=options.top_p,
        min_p=options.min_p,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        **request.scheduling(),
    )


def _chat_message(index: int, message: OllamaInputMessage) -> Json:
    if message.images:
        raise ApiError(
            f"messages[{index}].images is given, which is not supported: send text alone.",
            param="messages",
            code="unsupported_parameter",
        )
    found: Json = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or f"call_{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_name is not None:
        found["name"] = message.tool_name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _response_format(format: str | Json | None) -> ResponseFormat | None:
    if not format:
        return None
    if isinstance(format, dict):
        return ResponseFormat("json_schema", JsonSchema("format", format))
    if format != "json":
        raise ApiError(f"format is {short(format)}: give json or a JSON schema.", param="format", code="invalid_value")
    return ResponseFormat("json_object")


# ---------------------------------------------------------------------- responses


class CalledFunction(msgspec.Struct):
    name: str
    arguments: Json


class OllamaCall(msgspec.Struct):
    function: CalledFunction


class OllamaMessage(msgspec.Struct):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    """A response, or a line of a streamed one."""

    model: str
    created_at: datetime
    done: bool
    done_reason: str | UnsetType = UNSET
    # Nanoseconds, and numbers of tokens; in the last line
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatReply(OllamaReply, kw_only=True):
    message: OllamaMessage


class OllamaGenerateReply(OllamaReply, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaChatResponse(ChatBuilder):
    """A request without messages asks to load the model; it has no jobs, since the model is always loaded."""

    id_prefix = "ollama-"

    def __init__(self, context: RequestContext, request: OllamaChatRequest) -> None:
        messages = [_chat_message(index, message) for index, message in enumerate(request.messages or ())]
        self._start(context, _to_chat(request, messages, request.tools, context))

    def _start(self, context: RequestContext, chat: ChatRequest) -> None:
        self._call: FunctionCall | None = None  # being streamed; it is sent when it is complete
        self._reason, self._timings = "load", Timings(0.0, 0.0, 0.0, 0)
        if chat.messages:
            super().__init__(context, chat)
        else:
            self.id, self.request, self.jobs, self.jobs_per_prompt = make_response_id(self.id_prefix), chat, (), 1

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        events, reason = self.parse(index, [output])
        for event in events:
            if isinstance(event, ArgumentsDelta):
                assert self._call is not None, "arguments follow the start of a call"
                self._call.arguments += event.arguments
                continue
            yield from self._send_call()
            if isinstance(event, ToolCallStart):
                self._call = FunctionCall(event.name, "")
            elif isinstance(event, Content):
                yield self._encode(event.text, done=False)
            else:
                yield self._encode("", event.text, done=False)
        if reason is not None:
            yield from self._send_call()
            self._end(reason, output)

    def last_chunks(self, usage: UsageInfo) -> Iterable[bytes]:
        yield self._encode("", done=True, **self._statistics(usage))

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        parts: Sequence[OutputPart] = []
        if outputs:
            parts, reason = self.parts(0, outputs[0])
            self._end(reason, outputs[0][-1])
        calls = [part for part in parts if isinstance(part, FunctionCall)]
        text, thoughts = (_text(parts, kind) for kind in (Content, Reasoning))
        return self._encode(text, thoughts, calls, done=True, **self._statistics(usage))

    def _reply(self, fields: Json, text: str, thoughts: str, calls: Sequence[FunctionCall]) -> OllamaReply:
        found = [OllamaCall(CalledFunction(call.name, arguments_of(call))) for call in calls] if calls else UNSET
        return OllamaChatReply(message=OllamaMessage("assistant", text, thoughts or UNSET, found), **fields)

    def _encode(self, text: str, thoughts: str = "", calls: Sequence[FunctionCall] = (), **fields: object) -> bytes:
        fields["model"], fields["created_at"] = self.request.model, datetime.now(UTC)
        return msgspec.json.encode(self._reply(fields, text, thoughts, calls))

    def _send_call(self) -> Iterator[bytes]:
        if self._call is not None:
            yield self._encode("", calls=[self._call], done=False)
            self._call = None

    def _end(self, reason: str, output: OutputDelta) -> None:
        self._reason = "length" if reason == "length" else "stop"
        self._timings = output.timings or self._timings

    def _statistics(self, usage: UsageInfo) -> Json:
        times = self._timings
        admitted, first, finished = (
            nanoseconds(time or 0.0) for time in (times.admitted_s, times.first_token_s, times.finished_s)
        )
        return {
            "done_reason": self._reason,
            "total_duration": finished,
            "load_duration": 0,  # the model is always loaded
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(first - admitted, 0),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(finished - first, 0),
        }


class OllamaGenerateResponse(OllamaChatResponse):
    """The prompt as a message of the user, through the chat template."""

    prompt_field = "prompt"

    def __init__(self, context: RequestContext, request: OllamaGenerateRequest) -> None:
        messages = [{"role": "user", "content": request.prompt}] if request.prompt else []
        if request.system and messages:
            messages.insert(0, {"role": "system", "content": request.system})
        self._start(context, _to_chat(request, messages, None, context))

    def _reply(self, fields: Json, text: str, thoughts: str, calls: Sequence[FunctionCall]) -> OllamaReply:
        return OllamaGenerateReply(response=text, thinking=thoughts or UNSET, **fields)


def _text(parts: Sequence[OutputPart], kind: type[Content | Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


# ---------------------------------------------------------------------- models


class OllamaDetails(msgspec.Struct):
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    format: str = "safetensors"
    parent_model: str = ""


class OllamaModel(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModelList(msgspec.Struct):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningList(msgspec.Struct):
    models: list[OllamaRunningModel]


class OllamaModelInfo(msgspec.Struct):
    modified_at: str
    template: str
    details: OllamaDetails
    model_info: Json
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""


class OllamaVersion(msgspec.Struct):
    version: str


async def list_tags(call: Call) -> Response:
    return json_response(OllamaModelList(await _models(call.state)))


async def list_running(call: Call) -> Response:
    """All models of the list: they stay loaded."""
    model = call.state.client.model
    return json_response(
        OllamaRunningList(
            [
                OllamaRunningModel(
                    **msgspec.structs.asdict(one),
                    expires_at=_NEVER,
                    size_vram=0 if model.device.startswith("cpu") else one.size,
                    context_length=model.max_tokens,
                )
                for one in await _models(call.state)
            ]
        )
    )


async def _models(state: ServerState) -> list[OllamaModel]:
    model, details = state.client.model, _details(state)
    size = int(model.num_parameters * _DTYPE_BYTES.get(model.dtype, 2))
    await state.refresh_adapters()
    # Clients use the digest as an identifier.
    return [
        OllamaModel(name, name, _time(state.created), size, hashlib.sha256(name.encode()).hexdigest(), details)
        for name in (state.model_name, *state.adapters)
    ]


async def show_model(call: Call) -> Response:
    state, body = call.state, call.body
    assert isinstance(body, ShowRequest), "the route's request type"
    await state.refresh_adapters()
    state.context.model_of(untagged(body.model or body.name or ""))
    model, template = state.client.model, "" if state.tokenizer.chat is None else state.tokenizer.chat.source
    info = {
        "general.architecture": model.family,
        "general.parameter_count": model.num_parameters,
        f"{model.family}.context_length": model.max_tokens,
    }
    capabilities = ["completion"]
    capabilities += ["tools"] if _has_tools(template) else []
    capabilities += ["thinking"] if reasoning_markers_of(template) is not None else []
    return json_response(OllamaModelInfo(_time(state.created), template, _details(state), info, capabilities))


async def get_version(call: Call) -> Response:
    return json_response(OllamaVersion(__version__))


def _details(state: ServerState) -> OllamaDetails:
    model = state.client.model
    count = model.num_parameters
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return OllamaDetails(model.family, [model.family], size, model.dtype)


def _has_tools(template: str) -> bool:
    try:
        return bool(style_of(template))
    except InvalidRequest:  # it has a style of its own, which requests with tools are told
        return False


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
