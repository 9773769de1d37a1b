"""A server whose model writes a given text: for formats that a random model never produces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx2
from tokenizers import AddedToken

from paceline.config import ServerConfig, TenantConfig
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta, Timings, TokenUsage
from paceline.request import FinishReason
from paceline.server.app import App
from paceline.server.auth import ApiKeys
from paceline.server.body_workers import BodyWorkers
from paceline.server.engine_client import EngineClient, EngineState, OnAborted, ServedModel
from paceline.server.state import ServerState
from paceline.text.stop import TextStream
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer
from tests.server.serving import Caller, make_app

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
MODEL = ServedModel("tiny", "qwen3", 1, "float32", "cpu", 600, 4096, 4096, 8, 8192, 0, 1)


def tokenizer_with(template: str, special: Sequence[str] = ()) -> Tokenizer:
    core = synthetic_tokenizer(600)._core
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(core, eos_ids=(2,), bos_id=1, chat_template=template)


class ScriptedClient:
    """Answers every job with `text`, then finishes or raises. Keeps the jobs it was given.

    The text comes in pieces of `size` characters, or else token by token if the job is streamed.
    """

    loading = False
    model = MODEL
    size: int | None = None
    reason = FinishReason.STOP
    error: Exception | None = None
    cached_tokens = 4

    def __init__(self, tokenizer: Tokenizer, text: str = "", engine: EngineClient | None = None) -> None:
        """`engine` answers queries."""
        self.tokenizer, self.text, self.engine = tokenizer, text, engine
        self.jobs: list[Job] = []

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(self.jobs[-1].prompt.tolist(), skip_special=False)

    @property
    def engines(self) -> Sequence[EngineState]:
        assert self.engine is not None, "a client without an engine"
        return self.engine.engines

    async def stream(
        self, jobs: Sequence[Job], on_aborted: OnAborted | None = None
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        self.jobs += jobs
        for index, job in enumerate(jobs):
            num_tokens = 0
            for text, ids in self._pieces(job):
                num_tokens += len(ids)
                yield index, OutputDelta(text, ids)
            if self.error is not None:
                raise self.error
            usage = TokenUsage(len(job.prompt), self.cached_tokens, num_tokens)
            yield index, OutputDelta("", (), self.reason, usage, Timings(0.25, 0.75, 1.75, 0))

    def _pieces(self, job: Job) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.size is not None:
            for start in range(0, len(self.text), self.size):
                yield self.text[start : start + self.size], (7,)
            return
        text, ids = TextStream.of(self.tokenizer, job.params), self.tokenizer.encode(self.text, add_special=False)
        for piece in [(token,) for token in ids] if job.stream else [tuple(ids)]:
            yield text.push(piece), piece
        yield text.close(), (2,)

    async def query(self, query: Any) -> Any:
        assert self.engine is not None, "a client without an engine"
        return await self.engine.query(query)

    async def close(self) -> None:
        pass


class ScriptedCaller(Caller):
    """An app with the tokenizer of `engine`, which answers queries. Its output comes in pieces of five characters."""

    def __init__(self, engine: Engine, tenants: Sequence[TenantConfig] = (), **config: object) -> None:
        super().__init__(make_app(engine, tenants=tenants, **config))
        state = self.app.state
        self.client = state.client = ScriptedClient(state.tokenizer, engine=state.client)
        self.client.size = 5


def scripted(template: str, text: str, special: Sequence[str] = (), **config: Any) -> tuple[Caller, ScriptedClient]:
    """An app with a chat template and special tokens."""
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


def run_package(caller: Caller, use: Callable[[Any], Awaitable[Any]], package: type, **options: Any) -> Any:
    """Calls the app with the asynchronous client of Anthropic's or OpenAI's package."""

    async def main() -> Any:
        transport = httpx2.ASGITransport(caller.app, raise_app_exceptions=False)
        async with (
            httpx2.AsyncClient(transport=transport, timeout=300) as http,
            package(**options, max_retries=0, http_client=http) as client,
        ):
            return await use(client)

    return asyncio.run(main())
