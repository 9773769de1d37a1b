"""OpenAI's types: what comes in and what goes out, as msgspec structs.

Types and presence are checked here; ranges are checked where the values are used (`SamplingParams`), once.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from paceline.request import SamplingParams
from paceline.server.errors import ApiError
from paceline.server.fields import short, supported

MAX_STOPS = 16


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers, of OpenAI's: we send none


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise ApiError(f"stop has {len(stop)} strings: give at most {MAX_STOPS}.", param="stop")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Any  # a string, strings, token ids or lists of them: told apart in completions.py


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str
    logprobs: None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET  # null in every chunk but the last, if usage was asked for


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: None = None


class TextCompletion(msgspec.Struct):
    """A whole completion, or a chunk of one: OpenAI gives both the same type."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "paceline"


class ModelList(msgspec.Struct):
    data: list[Model]
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
