"""`/api/embed` and the older `/api/embeddings`: Ollama's, the same vectors as those of `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.engine.output import OutputDelta
from paceline.server.apis.ollama import check_options, nanoseconds, untagged
from paceline.server.embeddings import (
    EmbeddingBuilder,
    check_dimensions,
    encode_input,
    shortened,
    vector_of,
)
from paceline.server.fields import Json
from paceline.server.prompts import encode_prompt
from paceline.server.request_types import PoolingRequest
from paceline.server.response_types import UsageInfo
from paceline.server.state import RequestContext


class OllamaEmbedRequest(PoolingRequest, kw_only=True):
    input: Any  # a text or a list of texts
    options: Json | None = None
    truncate: bool | None = None  # a text beyond the context is an error either way
    dimensions: int | None = None

    def __post_init__(self) -> None:
        self.model = untagged(self.model)


class OllamaEmbedding(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedResponse(EmbeddingBuilder):
    request: OllamaEmbedRequest
    prompt_field = "input"
    id_prefix = "ollama-"

    def __init__(self, context: RequestContext, request: OllamaEmbedRequest) -> None:
        check_options(request.options, context)  # those of sampling do not change an embedding
        check_dimensions(request.dimensions)
        super().__init__(request, encode_input(request.input, context))
        request.input = None  # the jobs have it

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        vectors = [shortened(vector_of(deltas), self.request.dimensions).tolist() for deltas in outputs]
        seconds = max(deltas[-1].timings.finished_s or 0.0 for deltas in outputs if deltas[-1].timings)
        return msgspec.json.encode(
            OllamaEmbedding(self.request.model, vectors, nanoseconds(seconds), 0, usage.prompt_tokens)
        )


class OllamaEmbeddingsRequest(PoolingRequest, kw_only=True):
    prompt: str
    options: Json | None = None

    def __post_init__(self) -> None:
        self.model = untagged(self.model)


class OllamaEmbeddingsReply(msgspec.Struct):
    embedding: list[float]


class OllamaEmbeddingsResponse(EmbeddingBuilder):
    """Of one text."""

    request: OllamaEmbeddingsRequest
    prompt_field = "prompt"
    id_prefix = "ollama-"

    def __init__(self, context: RequestContext, request: OllamaEmbeddingsRequest) -> None:
        check_options(request.options, context)
        super().__init__(request, [encode_prompt(request.prompt, context, "prompt")])
        request.prompt = ""  # the job has it

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        return msgspec.json.encode(OllamaEmbeddingsReply(vector_of(outputs[0]).tolist()))
