"""The streaming APIs that `paceline bench serve` measures: path and body of a request, and the form of its events."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.request import SamplingParams

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class StreamingApi:
    path: str
    make_body: Callable[[Sequence[int], SamplingParams], Body]  # without `model` and `stream`
    output: bytes  # once in every event with output
    end: bytes  # in the last event of a complete stream
    usage: re.Pattern[bytes]  # the number of output tokens, in one of the last events
    separator: bytes = b"\n\n"  # between events

    def body(self, model: str, prompt: Sequence[int], params: SamplingParams) -> Body:
        return {"model": model, "stream": True, **self.make_body(prompt, params)}


def _completions(prompt: Sequence[int], params: SamplingParams) -> Body:
    return {"prompt": list(prompt), "max_tokens": params.max_tokens, **_openai(params)}


def _chat(prompt: Sequence[int], params: SamplingParams) -> Body:
    return {"messages": _messages(prompt), "max_tokens": params.max_tokens, **_openai(params)}


def _openai(params: SamplingParams) -> Body:
    return {
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
        "stream_options": {"include_usage": True},
    }


def _responses(prompt: Sequence[int], params: SamplingParams) -> Body:
    return {
        "input": _text(prompt),
        "max_output_tokens": params.max_tokens,
        "temperature": params.temperature,
        "store": False,
    }


def _anthropic(prompt: Sequence[int], params: SamplingParams) -> Body:
    return {"messages": _messages(prompt), "max_tokens": params.max_tokens, "temperature": params.temperature}


def _ollama_chat(prompt: Sequence[int], params: SamplingParams) -> Body:
    return {"messages": _messages(prompt), "options": _ollama_options(params)}


def _ollama_generate(prompt: Sequence[int], params: SamplingParams) -> Body:
    return {"prompt": _text(prompt), "options": _ollama_options(params)}


def _ollama_options(params: SamplingParams) -> Body:
    return {"num_predict": params.max_tokens, "temperature": params.temperature}


def _messages(prompt: Sequence[int]) -> list[Body]:
    return [{"role": "user", "content": _text(prompt)}]


def _text(prompt: Sequence[int]) -> str:
    """A text that no other prompt has; its length in tokens depends on the model."""
    return " ".join(map(str, prompt))


_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_OUTPUT_TOKENS = re.compile(rb'"output_tokens":(\d+)')
_EVAL_COUNT = re.compile(rb'"eval_count":(\d+)')
_DONE, _LAST_LINE = b"data: [DONE]", b'"done":true'

# Output ends at the EOS token where an API cannot say otherwise: all but the first two.
APIS = {
    "completions": StreamingApi("/v1/completions", _completions, b'"finish_reason":', _DONE, _COMPLETION_TOKENS),
    "chat": StreamingApi("/v1/chat/completions", _chat, b'"finish_reason":', _DONE, _COMPLETION_TOKENS),
    "responses": StreamingApi(
        "/v1/responses", _responses, b"event: response.output_text.delta", b'"usage":{', _OUTPUT_TOKENS
    ),
    "messages": StreamingApi(
        "/v1/messages", _anthropic, b"event: content_block_delta", b"event: message_stop", _OUTPUT_TOKENS
    ),
    "ollama-chat": StreamingApi("/api/chat", _ollama_chat, b'"done":false', _LAST_LINE, _EVAL_COUNT, b"\n"),
    "ollama-generate": StreamingApi("/api/generate", _ollama_generate, b'"done":false', _LAST_LINE, _EVAL_COUNT, b"\n"),
}
