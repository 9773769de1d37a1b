"""Request bodies, OpenAI's and our own, as msgspec structs.

Types and required fields are checked by these structs; ranges are checked once, by `SamplingParams`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from paceline.request import Grammar, SamplingParams
from paceline.server.errors import ApiError, missing_parameter
from paceline.server.fields import Json, short
from paceline.text.json_schema import closed


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's padding against traffic analysis; accepted, never sent


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None  # output always conforms to the schema; strict closes its objects


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Constraints beyond OpenAI's, with the names vLLM uses."""

    json: Json | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark notation


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "skip_special_tokens",
    "logprob_token_ids",
)  # fields of a request that are fields of SamplingParams with the same name


class ScheduledRequest(msgspec.Struct, kw_only=True):
    """Fields of every request that the engine serves."""

    model: str = ""  # "": the served model, where there is no other
    priority: int | None = None
    deadline_ms: float | None = None
    queue_timeout_ms: float | None = None
    running_timeout_ms: float | None = None
    cache_salt: str | None = None

    def scheduling(self) -> dict[str, Any]:
        """These fields, for a request that this one is translated to."""
        return {name: getattr(self, name) for name in ScheduledRequest.__struct_fields__}


class GenerationRequest(ScheduledRequest, kw_only=True):
    """Fields common to chat and completions."""

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
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int | None, **overrides: Any) -> SamplingParams:
        """Fields that are not given take the defaults of `SamplingParams`; `overrides` are the route's own."""
        given: dict[str, Any] = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        if self.include_stop_str_in_output is not None:
            given["include_stop"] = self.include_stop_str_in_output
        return SamplingParams(**{**given, "max_tokens": max_tokens, "grammar": self.grammar(), **overrides})

    def grammar(self) -> Grammar | None:
        """The constraint on the output, if one is given; at most one may be."""
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
            raise ApiError(f"{second} and {first} are both given: give one of them.", param=second.partition(".")[0])
        return next(iter(given.values()), None)


def _token_id(name: str) -> int:
    if not name.isdecimal() or len(name) > 19:  # more digits than 64 bits; int() refuses thousands
        raise ApiError(f"logit_bias has the key {short(name)}: keys are token ids.", param="logit_bias")
    return int(name)


def _json_grammar(schema: Json | str | None) -> Grammar | None:
    return None if schema is None else Grammar.json_schema(schema)


def _response_grammar(format: ResponseFormat | None) -> Grammar | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar.json_object()
    if format.type != "json_schema":
        raise ApiError(
            f"response_format.type is {short(format.type)}: choose one of text, json_object, json_schema.",
            param="response_format",
            code="invalid_value",
        )
    if format.json_schema is None or format.json_schema.schema is None:
        raise missing_parameter("response_format.json_schema.schema", param="response_format")
    schema = format.json_schema.schema
    if format.json_schema.strict:
        schema = closed(schema, "response_format.json_schema.schema")
    return Grammar.json_schema(schema)


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # closes the objects of the parameters of a forced call


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """One function that must be called, or the functions that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class PredictionPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's Predicted Outputs: text that the output is likely to have. It never changes the output."""

    type: str
    content: str | list[PredictionPart]

    def text(self) -> str:
        kinds = [("", self.type, "content")]
        if not isinstance(self.content, str):
            kinds += [(f".content[{index}]", part.type, "text") for index, part in enumerate(self.content)]
        for path, given, expected in kinds:
            if given != expected:
                raise ApiError(
                    f"prediction{path}.type is {short(given)}: give {expected}.",
                    param="prediction",
                    code="invalid_value",
                )
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[Json]
    prediction: Prediction | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: Json | None = None
    separate_reasoning: bool | None = None  # default: the option of the server


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Any  # a string, strings, token ids or lists of token ids: see prompts.py
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    prompt_logprobs_start: int | None = None  # with echo and logprobs: the first prompt position with a logprob


class PoolingRequest(ScheduledRequest, kw_only=True):
    """Fields common to what is computed from embeddings."""

    pooling: Literal["mean", "last"] | None = None  # default: mean

    @property
    def stream(self) -> bool:
        return False


class EmbeddingRequest(PoolingRequest, kw_only=True):
    input: Any  # like the prompt of a completion
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None  # default: all that the model has


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class PauseRequest(msgspec.Struct, kw_only=True):
    """What becomes of running requests: they finish first, are aborted, or continue after the pause."""

    mode: Literal["wait", "abort", "continue"] = "wait"


class WeightsRequest(PauseRequest, kw_only=True):
    """`/admin/weights`: a folder or .gguf file of the same shape, on the server's machine."""

    path: str
    version: str | None = None  # default: the number of the update


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`/v1/load_lora_adapter`: a PEFT folder on the server's machine, below `lora_folder`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # an adapter of this name is replaced for new requests


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str


class TraceRequest(msgspec.Struct, kw_only=True):
    seconds: float = 5.0


class CacheAction(msgspec.Struct, kw_only=True):
    """`/admin/cache`: evict every unused prefix, or pin one."""

    action: Literal["flush", "pin", "unpin"]
    wait: bool = False  # flush: running requests finish first, and new ones wait meanwhile
    timeout_s: float | None = None  # with wait; default: DEFAULT_FLUSH_TIMEOUT_S
    name: str | None = None
    prompt: str | list[int] | None = None
    expires_in_s: float | None = None
    tenant: str = "default"
    cache_salt: str = ""
