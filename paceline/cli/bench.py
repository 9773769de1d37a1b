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


@app.command()
def serve(
    url: Annotated[str | None, typer.Option(help="A server that runs already.")] = None,
    start: Annotated[str | None, typer.Option(help="Start one with these options of `paceline serve`.")] = None,
    workload: Annotated[
        Literal["streams", "nano"],
        typer.Option(help="streams: all alike; nano: 256 of 100 to 1,024 tokens in and out."),
    ] = "streams",
    count: Annotated[int, typer.Option(help="Requests.", min=1)] = 256,
    prompt: Annotated[int, typer.Option(help="streams: prompt tokens of each.", min=1)] = 64,
    output: Annotated[int, typer.Option(help="streams: tokens out of each.", min=1)] = 512,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second (Poisson); all at once if not given.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs; the best counts.", min=1)] = 3,
    clients: Annotated[int, typer.Option(help="Processes that send and read.", min=1)] = 1,
    key: Annotated[str | None, typer.Option(help="API key.")] = None,
    late: Annotated[
        bool, typer.Option(help="How late tokens come; needs a server with --virtual-tokens clock.")
    ] = False,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Bounds such as ttft:200, in ms, of ttft, tpot, e2el; may be repeated.")
    ] = None,
    offline: Annotated[
        bool, typer.Option(help="With --start: do the same work without a server afterwards, and compare.")
    ] = False,
) -> None:
    """Many streams at once over HTTP: tokens a second, latencies. The last line is one JSON object."""
    from paceline.bench.serve import bench

    bounds = {}
    for item in goodput or ():
        name, _, most = item.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not most.replace(".", "", 1).isdigit():
            raise ConfigError(f"goodput is {item!r}: give such as ttft:200, of ttft, tpot, e2el.")
        bounds[name] = float(most)
    bench(url=url, start=start, workload=workload, count=count, prompt=prompt, output=output, rate=rate,
          repeats=repeats, clients=clients, key=key, late=late, goodput=bounds or None, offline=offline)  # fmt: skip
