"""A server whose model writes a given text: for what becomes of the text of an output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from tokenizers import AddedToken

from paceline.config import ServerConfig
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, TokenUsage
from paceline.request import FinishReason
from paceline.server.app import App
from paceline.server.auth import ApiKeys
from paceline.server.body_workers import BodyWorkers
from paceline.server.engine_client import ServedModel
from paceline.server.state import ServerState
from paceline.text.stop import TextStream
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer
from tests.server.serving import Caller

MODEL = ServedModel("tiny", "qwen3", 1, "float32", "cpu", 600, 4096, 4096, 8, 8192, 0, 1)


def tokenizer_with(template: str, special: Sequence[str] = ()) -> Tokenizer:
    core = synthetic_tokenizer(600)._core
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(core, eos_ids=(2,), bos_id=1, chat_template=template)


class ScriptedClient:
    """Answers every job with `text`, token by token if it is streamed."""

    loading = False
    model = MODEL

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.jobs: list[Job] = []

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(self.jobs[-1].prompt.tolist(), skip_special=False)

    async def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        self.jobs += jobs
        ids = self.tokenizer.encode(self.text, add_special=False)
        for index, job in enumerate(jobs):
            text = TextStream.of(self.tokenizer, job.params)
            usage = TokenUsage(len(job.prompt), 0, len(ids) + 1)
            if job.stream:
                for token in ids:
                    yield index, OutputDelta(text.push((token,)), (token,))
                yield index, OutputDelta(text.close(), (2,), FinishReason.STOP, usage)
            else:
                yield index, OutputDelta(text.push(ids) + text.close(), (*ids, 2), FinishReason.STOP, usage)

    async def query(self, query: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def scripted(template: str, text: str, special: Sequence[str] = (), **config: Any) -> tuple[Caller, ScriptedClient]:
    tokenizer = tokenizer_with(template, special)
    client = ScriptedClient(tokenizer, text)
    state = ServerState(
        client=client,
        tokenizer=tokenizer,
        workers=BodyWorkers(tokenizer, tokenizer.vocab_size),
        config=ServerConfig(**config),
        model_name="tiny",
        api_keys=ApiKeys((), None),
    )
    return Caller(App(state)), client


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, with the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message
