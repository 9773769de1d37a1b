"""`paceline chat`: an interactive conversation in the terminal, or one message per line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import Load, Model, Shape, one_adapter, takes
from paceline.cli.sampling import (
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    SeparateReasoning,
    System,
    Temperature,
    TopK,
    TopP,
)
from paceline.config import EngineConfig
from paceline.request import PacelineError, SamplingParams
from paceline.text.output_parser import reasoning_markers_of
from paceline.text.reasoning import PieceParser, ReasoningPiece

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_HELP = "Commands: /reset starts a new conversation, /exit (or Ctrl-D) quits; Ctrl-C stops an answer."


@takes(EngineConfig)
def chat(
    options: dict[str, object],
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
    separate_reasoning: SeparateReasoning = True,
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

    interactive, adapter = sys.stdin.isatty(), one_adapter(options)
    loaded = load_engine(model, load, shape, options)
    if interactive:
        import readline  # noqa: F401 (enables line editing in input())

        typer.echo(f"{loaded.name}, context of {loaded.context_tokens:,} tokens. {_HELP}\n")
    try:
        conversation = _Conversation(
            loaded.engine, params, system, separate_reasoning=separate_reasoning, adapter=adapter
        )
        conversation.run(interactive)
    finally:
        loaded.engine.close()


class _Conversation:
    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: str | None,
        *,
        separate_reasoning: bool = True,
        adapter: str = "",
    ) -> None:
        self._engine, self._params, self._adapter = engine, params, adapter
        chat = engine.tokenizer.chat
        self._markers = reasoning_markers_of(chat.source) if separate_reasoning and chat is not None else None
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
        output = _Output()
        try:
            tokenizer = self._engine.tokenizer
            rendered, params = tokenizer.render_chat([*self._before, *messages]), self._params
            if self._markers is not None:
                output.parser = self._markers.parser(rendered.text)
                params = self._markers.sampling_params(params, rendered.text, tokenizer)
            encoded = tokenizer.encode_rendered(rendered)
            with stream(self._engine, encoded, params, self._adapter) as deltas:
                for delta in deltas:
                    output.push(delta.text)
            output.close()
            typer.echo("\n")
        except KeyboardInterrupt:
            typer.echo(" (stopped)\n")
        except PacelineError as error:  # for example, the conversation exceeds the context
            typer.secho(f"{error} /reset starts a new conversation.", err=True, fg="red")
            if self._engine.failure is not None:
                raise
            return
        self._messages = [*messages, output.message]


class _Output:
    """Prints an output: the reasoning dimmed, and only to a terminal; a pipe receives the answer."""

    def __init__(self) -> None:
        self.parser: PieceParser | None = None
        self._answer, self._reasoning = "", ""
        self._shows_reasoning = sys.stdout.isatty()

    @property
    def message(self) -> dict[str, str]:
        """The message for the chat template; it decides whether the reasoning is shown to the model again."""
        found = {"role": "assistant", "content": self._answer}
        return {**found, "reasoning_content": self._reasoning} if self._reasoning else found

    def push(self, text: str) -> None:
        self._print([ReasoningPiece(text, is_reasoning=False)] if self.parser is None else self.parser.push(text))

    def close(self) -> None:
        if self.parser is not None:
            self._print(self.parser.close())

    def _print(self, pieces: Sequence[ReasoningPiece]) -> None:
        for piece in pieces:
            if not piece.is_reasoning:
                if self._shows_reasoning and self._reasoning and not self._answer:
                    typer.echo("\n")
                self._answer += piece.text
                typer.echo(piece.text, nl=False)
            else:
                self._reasoning += piece.text
                if self._shows_reasoning:
                    typer.secho(piece.text, dim=True, nl=False)
