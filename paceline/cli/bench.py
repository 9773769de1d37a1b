"""`paceline bench …`: what things cost, measured here and now."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from paceline.cli.options import Model
from paceline.config import ConfigError

app = typer.Typer(help="Measure Paceline on this machine.", no_args_is_help=True)

_WORKLOADS = ("single", "batch", "prefix")


@app.callback()
def _callback() -> None:
    """Measure Paceline on this machine."""


@app.command()
def scheduler() -> None:
    """The scheduler alone: plan + commit, prefix matching, cache hits. The last line is one JSON object."""
    from paceline.bench import scheduler as bench

    bench.main()


@app.command()
def offline(
    against: Annotated[Literal["transformers"], typer.Option(help="Whose speed to compare with, in the same run.")],
    device: Annotated[Literal["cpu"], typer.Option(help="Where both run.")] = "cpu",
    model: Model = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each of them (default: 1).", min=1)] = None,
    scale: Annotated[
        float, typer.Option(help="Below 1: shorter outputs and fewer requests, to try it.", min=0.01)
    ] = 1.0,
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(_WORKLOADS)}; may be repeated.")] = None,
) -> None:
    """Tokens a second of one stream, of 16 prompts and of 64 with a common prefix. The last line is one JSON object."""
    from paceline.cli.loading import fetch

    for name in only or ():
        if name not in _WORKLOADS:
            raise ConfigError(f"only is {name!r}: choose of {', '.join(_WORKLOADS)}.")
    path = fetch(model)
    try:
        import transformers  # noqa: F401 (asked for here: without it the comparison cannot begin)
    except ImportError:
        raise ConfigError(
            "against is 'transformers', which is not installed: pip install transformers accelerate."
        ) from None
    from paceline.bench.against import compare_with_transformers

    chosen: dict[str, Any] = {} if threads is None else {"threads": threads}
    compare_with_transformers(path, scale=scale, only=only or _WORKLOADS, **chosen)
