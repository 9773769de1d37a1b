"""OpenAI's types: what comes in and what goes out, as msgspec structs.

Types and presence are checked here; ranges are checked where the values are used (`SamplingParams`), once.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from paceline.request import Grammar, SamplingParams
from paceline.server.errors import ApiError
from paceline.server.fields import short, supported

MAX_STOPS = 16


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers, of OpenAI's: we send none


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # output obeys the schema in any case


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Constraints OpenAI has no words for, as other servers spell them."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark's notation


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprob_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """What is common to both routes; `more` is what they say in their own ways."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise ApiError(f"stop has {len(stop)} strings: give at most {MAX_STOPS}.", param="stop")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias={_token_id(name): bias for name, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            n=1 if self.n is None else self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=tuple(stop),
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            bad_words=tuple(self.bad_words or ()),
            skip_special_tokens=self.skip_special_tokens is not False,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            **{"grammar": self.grammar(), **more},
        )

    def grammar(self) -> Grammar | None:
        """The one constraint that is given, if one is."""
        more = self.structured_outputs or StructuredOutputs()
        found = {
            "response_format": _response_grammar(self.response_format),
            "structured_outputs.json": _json_grammar(more.json),
            "structured_outputs.json_object": Grammar.json_object() if more.json_object else None,
            "structured_outputs.regex": None if more.regex is None else Grammar.regex(more.regex),
            "structured_outputs.choice": None if more.choice is None else Grammar.choice(more.choice),
            "structured_outputs.grammar": None if more.grammar is None else Grammar.lark(more.grammar),
            "guided_json": _json_grammar(self.guided_json),
            "guided_regex": None if self.guided_regex is None else Grammar.regex(self.guided_regex),
            "guided_choice": None if self.guided_choice is None else Grammar.choice(self.guided_choice),
            "guided_grammar": None if self.guided_grammar is None else Grammar.lark(self.guided_grammar),
        }
        given = {name: grammar for name, grammar in found.items() if grammar is not None}
        if len(given) > 1:
            first, second = list(given)[:2]
            raise ApiError(f"{second} is given beside {first}: give one of them.", param=second.partition(".")[0])
        return next(iter(given.values()), None)


def _token_id(name: str) -> int:
    if not name.isdecimal():
        raise ApiError(f"logit_bias has the key {short(name)}: give token ids.", param="logit_bias")
    return int(name)


def _json_grammar(schema: dict[str, Any] | str | None) -> Grammar | None:
    return None if schema is None else Grammar.json_schema(schema)


def _response_grammar(format: ResponseFormat | None) -> Grammar | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar.json_object()
    if format.type != "json_schema":
        raise ApiError(f"response_format.type is {short(format.type)}: give text, json_object or json_schema.",
                       param="response_format", code="invalid_value")  # fmt: skip
    if format.json_schema is None or format.json_schema.schema is None:
        raise ApiError("response_format.json_schema.schema is missing: give it.", param="response_format",
                       code="missing_parameter")  # fmt: skip
    return Grammar.json_schema(format.json_schema.schema)


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments of a forced call obey the schema in any case


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: FunctionName


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Any  # a string, strings, token ids or lists of them: told apart in completions.py
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobs]
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET  # null in every chunk but the last, if usage was asked for


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class TextCompletion(msgspec.Struct):
    """A whole completion, or a chunk of one: OpenAI gives both the same type."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageInfo | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "paceline"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    model: str
    input: Any  # as a completion's prompt
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None  # mean if not given
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None

    @property
    def stream(self) -> bool:
        return False

    @property
    def include_usage(self) -> bool:
        return False


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class CacheAction(msgspec.Struct, kw_only=True):
    """`/admin/cache`: forget what nobody uses, or keep a prefix from eviction."""

    action: Literal["flush", "pin", "unpin"]
    name: str | None = None
    prompt: str | list[int] | None = None
    expires_in_s: float | None = None
    tenant: str = "default"
    cache_salt: str = ""


_Request = TypeVar("_Request", bound=GenerationRequest)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_WRONG_TYPE = re.compile(r"^Expected `(?P<wanted>.+?)`, got `.+?`(?: - at `\$\.?(?P<path>.*?)`)?$")
_NO_CHOICE = re.compile(r"^Invalid enum value .* - at `\$\.(?P<name>\w+)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`")
_WORDS = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false",
          "array": "a list", "object": "an object"}  # fmt: skip


def read_request(body: bytes, kind: type[_Request]) -> _Request:
    """A request to generate, out of its JSON; an ApiError says what is wrong with it."""
    request = read_struct(body, kind)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options is given and stream is not true: leave it out, or stream.",
                       param="stream_options")  # fmt: skip
    return request


def read_struct(body: bytes, kind: type[_Struct]) -> _Struct:
    """As above, for any struct."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error}): send one JSON object.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(f"the body is {short(found)}: send one JSON object.", code="invalid_json")
    fields = supported(found, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), fields) from None


def _explained(message: str, fields: dict[str, Any]) -> ApiError:
    """msgspec's message in our words: the field, its value, what would be right."""
    if missing := _MISSING.match(message):
        name = missing["name"]
        return ApiError(f"{name} is missing: give it.", param=name, code="missing_parameter")
    if choice := _NO_CHOICE.match(message):
        name = choice["name"]
        return ApiError(f"{name} is {short(fields.get(name))}: /openapi.json lists what it may be.", param=name,
                        code="invalid_value")  # fmt: skip
    if not (wrong := _WRONG_TYPE.match(message)):
        return ApiError(f"the request cannot be read: {message}.")
    path = wrong["path"] or ""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    wanted = " or ".join(_WORDS.get(word, word) for word in wrong["wanted"].split(" | ") if word != "null")
    value = f" is {short(fields[name])}" if name == path and name in fields else " has the wrong type"
    return ApiError(f"{path}{value}: give {wanted}.", param=name or None, code="invalid_type")
