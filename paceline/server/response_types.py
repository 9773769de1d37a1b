"""Response bodies, OpenAI's and our own, as msgspec structs."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from paceline.server.queries import PinState, RequestState


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0  # drafts of speculative decoding, from `prediction` or not
    rejected_prediction_tokens: int = 0  # not part of completion_tokens


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


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
    reasoning_content: str | UnsetType = UNSET
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
    clipped_max_tokens: int | UnsetType = UNSET  # max_tokens, if it was lowered to what fits


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    weight_versions: list[str]  # that computed it, see /admin/weights


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
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    clipped_max_tokens: int | UnsetType = UNSET  # max_tokens, if it was lowered to what fits


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET  # null in all chunks but the last, if requested
    weight_versions: list[str] | UnsetType = UNSET  # in the last chunk of a choice


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
    clipped_max_tokens: int | UnsetType = UNSET  # max_tokens, if it was lowered to what fits


class TextCompletion(msgspec.Struct):
    """A completion, or a chunk of a streamed one: OpenAI uses one type for both."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    weight_versions: list[str] | UnsetType = UNSET  # streamed: in the last chunk of a choice


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "paceline"
    parent: str | None = None  # of a LoRA adapter: the model that it adapts


class AnthropicModel(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: str = "model"


class AnthropicModelList(msgspec.Struct):
    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


class AdapterLoaded(msgspec.Struct):
    lora_name: str
    rank: int
    num_bytes: int


class AdapterUnloaded(msgspec.Struct):
    lora_name: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


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
    weight_versions: list[str]
    object: str = "list"


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class RequestList(msgspec.Struct):
    data: list[RequestState]
    object: str = "list"


class RequestParts(msgspec.Struct):
    """One request; it has a part for each prompt and choice."""

    id: str
    parts: list[RequestState]
    object: str = "request"


class RequestDeleted(msgspec.Struct):
    id: str
    object: str = "request.deleted"
    deleted: bool = True


class CacheState(msgspec.Struct):
    kv_tokens: int
    kv_tokens_free: int
    host_kv_tokens: int
    host_kv_tokens_free: int
    pins: list[PinState]


class CacheFlushed(msgspec.Struct):
    flushed_tokens: int


class PrefixPinned(msgspec.Struct):
    pinned: str
    num_tokens: int


class PrefixUnpinned(msgspec.Struct):
    unpinned: str


class PauseState(msgspec.Struct):
    paused: bool
    num_running: int
    num_waiting: int


class WeightsState(msgspec.Struct):
    version: str


class WeightsUpdated(msgspec.Struct):
    version: str
    load_s: float  # while requests were served
    pause_s: float  # until no forward pass was in flight
    copy_s: float
    dropped_kv_tokens: int


class DrainState(msgspec.Struct):
    draining: bool
    requests_in_progress: int


class HealthReport(msgspec.Struct):
    """The fields of every report; a server with an engine adds `num_passes` and those of `EngineStats`."""

    status: str
    model: str
    failure: str | None


class EngineCount(msgspec.Struct):
    up: int
    total: int


class Readiness(msgspec.Struct):
    ready: bool
    why: str | None  # it is not ready
    engines: dict[str, EngineCount]  # by role: both, prefill or decode


class ServerInfo(msgspec.Struct):
    paceline: str  # version
    model: str
    routes: list[str]
