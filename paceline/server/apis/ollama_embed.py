"""`/api/embed`: Ollama's embeddings, the same vectors as those of `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.engine.output import OutputDelta
from paceline.server.apis.dialects import Json
from paceline.server.apis.ollama import check_options, nanoseconds, untagged
from paceline.server.embeddings import EmbeddingBuilder, encode_input, vector_of
from paceline.server.request_types import PoolingRequest
from paceline.server.response_types import UsageInfo
from paceline.server.state import RequestContext


class OllamaEmbedRequest(PoolingRequest, kw_only=True):
    input: Any  # a text or a list of texts
    options: Json | None = None
    truncate: bool | None = None  # a text beyond the context is an error either way

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
        super().__init__(request, encode_input(request.input, context))
        request.input = None  # the jobs have it

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        vectors = [vector_of(deltas).tolist() for deltas in outputs]
        seconds = max(deltas[-1].timings.finished_s or 0.0 for deltas in outputs if deltas[-1].timings)
        return msgspec.json.encode(
            OllamaEmbedding(self.request.model, vectors, nanoseconds(seconds), 0, usage.prompt_tokens)
        )
