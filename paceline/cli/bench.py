"""`paceline bench …`: what things cost, measured here and now."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from paceline.cli.options import takes
from paceline.config import OFFLINE_PARTS, ConfigError, EngineConfig, OfflineConfig, SchedulerConfig

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
@takes(OfflineConfig, EngineConfig, SchedulerConfig)
def offline(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to run, in order; nano and sweep if nothing is given. "
            + "; ".join(f"{name}: {what}" for name, what in OFFLINE_PARTS.items())
            + "."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a .gguf file or a hub id; with --against, smollm2-135m-instruct if not given."),
    ] = None,
    load: Annotated[
        Literal["weights", "random"] | None,
        typer.Option(help="weights: of the model; random: of no model; what --model says, if not given."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of random weights; qwen3-0.6b if neither it nor a model is given.")
    ] = None,
    against: Annotated[
        Literal["transformers"] | None,
        typer.Option(help="Instead of the parts: whose speed to compare with, in one run on the CPU."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"With --against: one of {', '.join(_WORKLOADS)}; may be repeated.")
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Offline generation, timed and checked. Figures end in lines that begin with RESULT, checks in PASS or FAIL."""
    if against is None:
        if only:
            raise ConfigError(f"only is {only[0]!r}, which belongs to --against: leave it out.")
        from paceline.bench.offline import run

        raise typer.Exit(run(parts or ["nano", "sweep"], model=model, load=load, shape=shape, options=options))
    _compare(parts, model, load, shape, only, options)


def _compare(
    parts: list[str] | None, model: str | None, load: str | None, shape: str | None, only: list[str] | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Tokens a second of one stream, of 16 prompts and of 64 with a common prefix. The last line is one JSON object."""
    from paceline.cli.loading import fetch

    given = {"parts": parts, "load": load, "shape": shape, **options}
    for name, value in given.items():
        if value and name not in ("threads", "scale", "device"):
            raise ConfigError(f"{name} is {value!r}, which --against does not know: leave it out.")
    if options.get("device", "cpu") != "cpu":
        raise ConfigError(f"device is {options['device']!r}: with --against both run on the cpu.")
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
    from paceline.bench.transformers_baseline import compare_with_transformers

    chosen = {name: value for name, value in options.items() if name in ("threads", "scale")}
    compare_with_transformers(path, only=only or _WORKLOADS, **chosen)


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
