"""`/v1/embeddings`: texts in, a vector for each out: the served model's hidden states, pooled, of length 1."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.request import SamplingParams, as_tokens
from paceline.server.completions import encode_prompts
from paceline.server.response import new_id
from paceline.server.types import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, UsageInfo
from paceline.text.tokenizer import Tokenizer

_NOTHING = SamplingParams(temperature=0, max_tokens=1)  # no token is sampled


class EmbeddingResponse:
    prompt_field = "input"
    jobs_per_prompt = 1

    def __init__(self, request: EmbeddingRequest, tokenizer: Tokenizer, max_prompts: int) -> None:
        self.request = request
        self.id = new_id("embd")
        prompts = encode_prompts(request.input, tokenizer, max_prompts, "input")
        self.jobs: Sequence[Job] = [
            Job(as_tokens(prompt), _NOTHING, id=f"{self.id}-{index}", pooling=request.pooling or "mean")
            for index, prompt in enumerate(prompts)
        ]

    def opening(self) -> Iterable[bytes]:
        return ()

    def chunks(self, index: int, piece: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def usage_chunk(self, usage: UsageInfo) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def whole(self, pieces: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        data = [Embedding(index, self._shown(parts[-1].vector or b"")) for index, parts in enumerate(pieces)]
        return msgspec.json.encode(
            EmbeddingList(data, self.request.model, EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens))
        )

    def _shown(self, vector: bytes) -> list[float] | str:
        numbers = np.frombuffer(vector, np.float32).astype("<f4")
        if self.request.encoding_format == "base64":
            return base64.b64encode(numbers.tobytes()).decode()
        found: list[float] = numbers.tolist()
        return found
