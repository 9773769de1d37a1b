"""`/v1/embeddings`: a vector for each text: the model's hidden states, pooled and normalised to length 1."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.request import SamplingParams, as_tokens
from paceline.server.errors import ApiError
from paceline.server.prompts import check_num_prompts, encode_prompts, split_prompts
from paceline.server.request_types import EmbeddingRequest, PoolingRequest
from paceline.server.response import ResponseBuilder, make_response_id, weight_versions
from paceline.server.response_types import Embedding, EmbeddingList, EmbeddingUsage, UsageInfo
from paceline.server.state import RequestContext

_PARAMS = SamplingParams(temperature=0, max_tokens=1)  # unused: no token is sampled


class EmbeddingBuilder(ResponseBuilder):
    """Jobs that embed prompts."""

    request: PoolingRequest
    jobs_per_prompt = 1
    id_prefix = "embd-"

    def __init__(self, request: PoolingRequest, prompts: Sequence[Sequence[int]]) -> None:
        self.request = request
        self.id = make_response_id(self.id_prefix)
        self.jobs: Sequence[Job] = [
            Job(as_tokens(prompt), _PARAMS, id=f"{self.id}-{index}", pooling=request.pooling or "mean")
            for index, prompt in enumerate(prompts)
        ]


def encode_input(given: object, context: RequestContext) -> list[list[int]]:
    """The token ids of the field `input`: one or several texts or lists of token ids."""
    prompts = split_prompts(given, "input")
    check_num_prompts(len(prompts), 1, context.config.max_prompts, "input")
    return encode_prompts(prompts, context, "input")


def vector_of(outputs: Sequence[OutputDelta]) -> npt.NDArray[np.float32]:
    return np.frombuffer(outputs[-1].vector or b"", np.float32)


def check_dimensions(dimensions: int | None) -> None:
    if dimensions is not None and dimensions < 1:
        raise _invalid_dimensions(dimensions, "at least 1")


def shortened(vector: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
    """The first dimensions of a vector, normalised again."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise _invalid_dimensions(dimensions, f"at most {len(vector)}, which this model's embeddings have")
    first = vector[:dimensions]
    return first / max(float(np.linalg.norm(first)), 1e-12)


def _invalid_dimensions(given: int, remedy: str) -> ApiError:
    return ApiError(f"dimensions is {given}: give {remedy}.", param="dimensions", code="invalid_value")


class EmbeddingResponse(EmbeddingBuilder):
    request: EmbeddingRequest
    prompt_field = "input"

    def __init__(self, context: RequestContext, request: EmbeddingRequest) -> None:
        check_dimensions(request.dimensions)
        super().__init__(request, encode_input(request.input, context))
        request.input = None  # the jobs have it

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        vectors = [shortened(vector_of(deltas), self.request.dimensions) for deltas in outputs]
        data = [Embedding(index, self._encode(vector)) for index, vector in enumerate(vectors)]
        return msgspec.json.encode(
            EmbeddingList(
                data,
                self.request.model,
                EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens),
                weight_versions(chain.from_iterable(outputs)),
            )
        )

    def _encode(self, vector: npt.NDArray[np.float32]) -> list[float] | str:
        values = vector.astype("<f4")
        if self.request.encoding_format == "base64":
            return base64.b64encode(values.tobytes()).decode()
        floats: list[float] = values.tolist()
        return floats
