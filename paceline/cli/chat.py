"""`paceline chat`: an interactive conversation in the terminal, or one message per line from a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import Load, Model, Shape, takes
from paceline.cli.sampling import MaxTokens, MinP, RepetitionPenalty, Seed, System, Temperature, TopK, TopP
from paceline.config import EngineConfig
from paceline.request import PacelineError, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_HELP = "Commands: /reset starts a new conversation, /exit (or Ctrl-D) quits; Ctrl-C stops an answer."


@takes(EngineConfig)
def chat(
    options: dict[str, Any],
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.2,
    top_p: TopP = 0.9,
    top_k: TopK = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    load: Load = "weights",
    shape: Shape = None,
) -> None:
    """Chat with a model in the terminal. With piped input, every line is a message."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
    )
    from paceline.cli.loading import load_engine

    interactive = sys.stdin.isatty()
    loaded = load_engine(model, load, shape, options)
    if interactive:
        import readline  # noqa: F401 (enables line editing in input())

        typer.echo(f"{loaded.name}, context of {loaded.context_tokens:,} tokens. {_HELP}\n")
    try:
        _Conversation(loaded.engine, params, system).run(interactive)
    finally:
        loaded.engine.close()


class _Conversation:
    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine, self._params = engine, params
        self._before = [{"role": "system", "content": system}] if system is not None else []
        self._messages: list[dict[str, str]] = []

    def run(self, interactive: bool) -> None:
        while True:
            try:
                message = input("> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    typer.echo()
                return
            if message in ("/exit", "/quit"):
                return
            if message == "/reset":
                self._messages.clear()
                if interactive:
                    typer.echo("(new conversation)")
            elif message.startswith("/"):
                typer.echo(_HELP, err=not interactive)
            elif message:
                self._answer(message)

    def _answer(self, message: str) -> None:
        from paceline.cli.streaming import stream

        messages = [*self._messages, {"role": "user", "content": message}]
        texts: list[str] = []
        try:
            prompt = self._engine.tokenizer.encode_chat([*self._before, *messages])
            with stream(self._engine, prompt, self._params) as deltas:
                for delta in deltas:
                    texts.append(delta.text)
                    typer.echo(delta.text, nl=False)
            typer.echo("\n")
        except KeyboardInterrupt:
            typer.echo(" (stopped)\n")
        except PacelineError as error:  # for example, the conversation exceeds the context
            typer.secho(f"{error} /reset starts a new conversation.", err=True, fg="red")
            if self._engine.failure is not None:
                raise
            return
        self._messages = [*messages, {"role": "assistant", "content": "".join(texts)}]
