"""`paceline chat`: a conversation in the terminal, or one line after the other from a pipe."""

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

_HELP = "Commands: /reset forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer."


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
    """Talk with a model. Works with piped input too: every line is a message."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed, max_tokens=max_tokens,
    )  # fmt: skip
    from paceline.cli.loading import load_engine

    interactive = sys.stdin.isatty()
    loaded = load_engine(model, load, shape, options)
    if interactive:
        import readline  # noqa: F401 (gives input() its line editing)

        typer.echo(f"{loaded.name}, {loaded.context_tokens:,} tokens of context. {_HELP}\n")
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
                said = input("> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    typer.echo()
                return
            if said in ("/exit", "/quit"):
                return
            if said == "/reset":
                self._messages.clear()
                if interactive:
                    typer.echo("(forgotten)")
            elif said.startswith("/"):
                typer.echo(_HELP, err=not interactive)
            elif said:
                self._answer(said)

    def _answer(self, said: str) -> None:
        from paceline.cli.streaming import stream

        messages = [*self._messages, {"role": "user", "content": said}]
        texts: list[str] = []
        try:
            prompt = self._engine.tokenizer.encode_chat([*self._before, *messages])
            with stream(self._engine, prompt, self._params) as pieces:
                for piece in pieces:
                    texts.append(piece.text)
                    typer.echo(piece.text, nl=False)
            typer.echo("\n")
        except KeyboardInterrupt:
            typer.echo(" (stopped)\n")
        except PacelineError as error:  # such as a conversation that has outgrown the context
            typer.secho(f"{error} /reset begins anew.", err=True, fg="red")
            if self._engine.failure is not None:
                raise
            return
        self._messages = [*messages, {"role": "assistant", "content": "".join(texts)}]
