"""`/v1/rerank` and `/score`: how similar texts are, by the cosine of their embeddings.

Any model can be asked, since every model has embeddings; scores are only as good as these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.output import OutputDelta
from paceline.server.embeddings import EmbeddingBuilder, vector_of
from paceline.server.errors import ApiError
from paceline.server.prompts import check_num_prompts, encode_prompts
from paceline.server.request_types import PoolingRequest
from paceline.server.response import unix_time
from paceline.server.response_types import EmbeddingUsage, UsageInfo
from paceline.server.state import RequestContext


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None  # default: all
    return_documents: bool | None = None  # default: true


class ScoredDocument(msgspec.Struct):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankResult(msgspec.Struct):
    id: str
    model: str
    results: list[ScoredDocument]  # the best first
    usage: EmbeddingUsage


class RerankResponse(EmbeddingBuilder):
    request: RerankRequest
    id_prefix = "rerank-"
    prompt_field = "documents"

    def __init__(self, context: RequestContext, request: RerankRequest) -> None:
        self._texts = [one if isinstance(one, str) else one.text for one in request.documents]
        if not self._texts:
            raise ApiError("documents is []: give at least one document.", param="documents", code="invalid_value")
        if request.top_n is not None and request.top_n < 1:
            raise ApiError(f"top_n is {request.top_n}: give at least 1.", param="top_n", code="invalid_value")
        check_num_prompts(len(self._texts), 1, context.config.max_prompts, "documents")
        super().__init__(
            request,
            [
                *encode_prompts([request.query], context, "query"),
                *encode_prompts(list(self._texts), context, "documents"),
            ],
        )
        request.documents = []  # the jobs have them
        if request.return_documents is False:
            self._texts = []

    def prompt_name(self, index: int) -> str:
        return "query" if index == 0 else f"documents[{index - 1}]"

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        query, *documents = (vector_of(deltas) for deltas in outputs)
        scores = [float(query @ document) for document in documents]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.request.top_n]
        shown = self.request.return_documents is not False
        results = [
            ScoredDocument(index, scores[index], RerankDocument(self._texts[index]) if shown else UNSET)
            for index in best
        ]
        total = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        return msgspec.json.encode(RerankResult(self.id, self.request.model, results, total))


class ScoreRequest(PoolingRequest, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class ScoreResponse(EmbeddingBuilder):
    """Pairs of texts of the same number, or one text with each of several."""

    id_prefix = "score-"
    prompt_field = "text_2"

    def __init__(self, context: RequestContext, request: ScoreRequest) -> None:
        first = [request.text_1] if isinstance(request.text_1, str) else request.text_1
        second = [request.text_2] if isinstance(request.text_2, str) else request.text_2
        if not first or not second or (len(first) != 1 and len(first) != len(second)):
            raise ApiError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}: give one in text_1, or as many as in "
                "text_2.",
                param="text_1",
                code="invalid_value",
            )
        check_num_prompts(len(second), 1, context.config.max_prompts, "text_2")
        self._num_first = len(first)
        super().__init__(
            request,
            [
                *encode_prompts(list(first), context, "text_1"),
                *encode_prompts(list(second), context, "text_2"),
            ],
        )
        request.text_1 = request.text_2 = []  # the jobs have them

    def prompt_name(self, index: int) -> str:
        return f"text_1[{index}]" if index < self._num_first else f"text_2[{index - self._num_first}]"

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        vectors = [vector_of(deltas) for deltas in outputs]
        first, second = vectors[: self._num_first], vectors[self._num_first :]
        pairs = zip(first * (len(second) // len(first)), second, strict=True)
        data = [Score(index, float(left @ right)) for index, (left, right) in enumerate(pairs)]
        total = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        return msgspec.json.encode(ScoreList(self.id, unix_time(), self.request.model, data, total))
