"""The log line of one request."""

from __future__ import annotations

import time

from paceline.engine.output import OutputDelta
from paceline.request import Tokens
from paceline.server.response import ResponseBuilder
from paceline.text.tokenizer import Tokenizer


class RequestLog:
    """Collects what the log line contains while the request is served."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.id = ""
        self.tenant = ""
        self.status: int | None = None
        self.end = ""  # the finish reason, or the code of an error
        self._started = time.monotonic()
        self._prompts: list[Tokens] = []
        self._num_tokens: dict[int, int] = {}  # of each job, so far
        self._first_token_s: float | None = None
        self._queue_s: float | None = None

    def set_response(self, response: ResponseBuilder) -> None:
        self.id = response.id
        self._prompts = [job.prompt for job in response.jobs]

    def add_output(self, index: int, output: OutputDelta) -> None:
        """Adds output of job `index`: a response that is cut off has the tokens until then."""
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(output.token_ids)
        if output.finish_reason is None:
            return
        self.end = output.finish_reason
        if output.usage is not None:
            self._num_tokens[index] = output.usage.completion_tokens
        if output.timings is not None:
            self._first_token_s, self._queue_s = output.timings.first_token_s, output.timings.admitted_s

    @property
    def num_output_tokens(self) -> int:
        return sum(self._num_tokens.values())

    def fields(self, tokenizer: Tokenizer | None) -> dict[str, object]:
        """The fields of the line, with the text of the prompts if a tokenizer is given."""
        found: dict[str, object] = {
            "id": self.id,
            "route": self.route,
            "tenant": self.tenant,
            "status": self.status,
            "end": str(self.end),
            "prompt_tokens": sum(map(len, self._prompts)),
            "completion_tokens": self.num_output_tokens,
            "queue_ms": _ms(self._queue_s),
            "first_token_ms": _ms(self._first_token_s),
            "total_ms": _ms(time.monotonic() - self._started),
        }
        if tokenizer is not None:
            found["prompts"] = [tokenizer.decode(prompt.tolist(), skip_special=False) for prompt in self._prompts]
        return {name: value for name, value in found.items() if value not in (None, "")}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
