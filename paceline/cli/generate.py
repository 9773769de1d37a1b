"""`paceline generate`: answers prompts and exits."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import Load, Model, Shape, one_adapter, takes
from paceline.cli.sampling import (
    JsonSchema,
    MaxTokens,
    MinP,
    Regex,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
)
from paceline.config import EngineConfig
from paceline.request import DEFAULT_MAX_TOKENS, Grammar, SamplingParams

Prompts = Annotated[list[str], typer.Argument(help="One or more prompts, answered in parallel.", show_default=False)]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the raw text, without the chat template.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Generate max_tokens tokens, past EOS.", rich_help_panel="Sampling")
]


@takes(EngineConfig)
def generate(
    options: dict[str, object],
    prompts: Prompts,
    model: Model = None,
    system: System = None,
    raw: Raw = False,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    regex: Regex = None,
    json_schema: JsonSchema = None,
    ignore_eos: IgnoreEos = False,
    load: Load = "weights",
    shape: Shape = None,
) -> None:
    """Answer prompts and exit. One answer is streamed, several are printed when all are complete."""
    if regex is not None and json_schema is not None:
        raise typer.BadParameter("--regex and --json-schema exclude each other: give one of them.")
    grammar = Grammar.regex(regex) if regex is not None else None
    if json_schema is not None:
        grammar = Grammar.json_schema(json_schema.read_text(encoding="utf-8"))
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        grammar=grammar,
    )
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw disables.")
    if any(not prompt for prompt in prompts):
        raise typer.BadParameter("a prompt is empty.", param_hint="PROMPTS")
    from paceline.cli.loading import load_engine
    from paceline.cli.streaming import stream
    from paceline.llm import LLM

    adapter = one_adapter(options)
    loaded = load_engine(model, load, shape, options)
    before = [{"role": "system", "content": system}] if system is not None else []
    with LLM.from_engine(loaded.engine) as llm:
        encoded = [
            llm.tokenizer.encode(prompt)
            if raw
            else llm.tokenizer.encode_chat([*before, {"role": "user", "content": prompt}])
            for prompt in prompts
        ]
        if len(prompts) > 1:
            outputs = llm.generate(encoded, params, lora=adapter)
            for prompt, output in zip(prompts, outputs, strict=True):
                typer.secho(f"> {prompt}", bold=True)
                typer.echo(f"{output.text}\n")
            return
        with stream(llm.engine, encoded[0], params, adapter) as deltas:
            for delta in deltas:
                typer.echo(delta.text, nl=False)
        typer.echo()
