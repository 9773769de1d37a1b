"""`paceline bench`: benchmarks of this machine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from paceline.bench.apis import APIS
from paceline.cli.options import Model, takes
from paceline.config import (
    OFFLINE_PARTS,
    ConfigError,
    EngineConfig,
    OfflineConfig,
    QualityConfig,
    SchedulerConfig,
    config_from,
)

app = typer.Typer(help="Run benchmarks and checks on this machine.", no_args_is_help=True)

_WORKLOADS = ("single", "batch", "prefix")
_SERVE_APIS = tuple(APIS)


@app.command()
def scheduler() -> None:
    """Time the scheduler alone: plan + commit, prefix matching, hit rates. The last line is one JSON object."""
    from paceline.bench import scheduler as bench

    bench.main()


@app.command()
def router() -> None:
    """Time the router of replicas alone: 64 replicas, a million cached pages. The last line is one JSON object."""
    from paceline.bench import router as bench

    bench.main()


@app.command()
@takes(OfflineConfig, EngineConfig, SchedulerConfig)
def offline(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parts to run, in order (default: nano sweep). "
            + "; ".join(f"{name}: {what}" for name, what in OFFLINE_PARTS.items())
            + "."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, .gguf file or Hugging Face id (default with --against: smollm2-135m-instruct)."
        ),
    ] = None,
    load: Annotated[
        Literal["weights", "random"] | None,
        typer.Option(help="Load the weights of --model, or random ones (default: random without --model)."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Architecture of random weights (default: qwen3-0.6b on a GPU, smollm2-135m on a CPU)."),
    ] = None,
    against: Annotated[
        Literal["transformers"] | None,
        typer.Option(help="Compare with this library in one run on the CPU, instead of running parts."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"With --against: workload {', '.join(_WORKLOADS)}; may be repeated.")
    ] = None,
    *,
    options: dict[str, object],
) -> None:
    """Time and check offline generation. Timed parts print RESULT lines with JSON, checks print PASS or FAIL."""
    if against is None:
        if only:
            raise ConfigError(f"only is {only[0]!r}, which needs --against: remove it.")
        from paceline.bench.offline import run

        raise typer.Exit(run(parts or ["nano", "sweep"], model=model, load=load, shape=shape, options=options))
    _compare(parts, model, load, shape, only, options)


def _compare(
    parts: list[str] | None,
    model: str | None,
    load: str | None,
    shape: str | None,
    only: list[str] | None,
    options: dict[str, Any],
) -> None:
    """Throughput of one stream, of 16 prompts and of 64 with a shared prefix. The last line is one JSON object."""
    from paceline.cli.loading import fetch

    given = {"parts": parts, "load": load, "shape": shape, **options}
    for name, value in given.items():
        if value and name not in ("threads", "scale", "device"):
            raise ConfigError(f"{name} is {value!r}, which --against does not support: remove it.")
    if options.get("device", "cpu") != "cpu":
        raise ConfigError(f"device is {options['device']!r}: --against runs on the CPU.")
    for name in only or ():
        if name not in _WORKLOADS:
            raise ConfigError(f"only is {name!r}: choose from {', '.join(_WORKLOADS)}.")
    path = fetch(model)
    try:
        import transformers  # noqa: F401 (fails early if it is not installed)
    except ImportError:
        raise ConfigError(
            "against is 'transformers', which is not installed: pip install transformers accelerate."
        ) from None
    from paceline.bench.transformers_baseline import compare_with_transformers

    chosen = {name: value for name, value in options.items() if name in ("threads", "scale")}
    compare_with_transformers(path, only=only or _WORKLOADS, **chosen)


@app.command()
@takes(QualityConfig)
def quality(model: Model = None, *, options: dict[str, object]) -> None:
    """Compare the next-token distributions of two models, or of one in two precisions, on the CPU. The last line is one
    JSON object."""
    from paceline.bench.quality import bench
    from paceline.cli.loading import fetch

    config = config_from(QualityConfig, options)
    bench(config, fetch(model), fetch(model if config.against is None else config.against))


@app.command()
def serve(
    url: Annotated[str | None, typer.Option(help="URL of a running server.")] = None,
    start: Annotated[str | None, typer.Option(help="Start a server with these options of `paceline serve`.")] = None,
    api: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Streaming API: {', '.join(_SERVE_APIS)}, or all; may be repeated. Several are measured in turns "
            "and compared with the first (default: completions)."
        ),
    ] = None,
    workload: Annotated[
        Literal["streams", "nano"],
        typer.Option(help="streams: equal requests; nano: prompts and outputs of 100 to 1,024 tokens."),
    ] = "streams",
    count: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 256,
    prompt: Annotated[int, typer.Option(help="Workload streams: tokens per prompt.", min=1)] = 64,
    output: Annotated[int, typer.Option(help="Workload streams: tokens per output.", min=1)] = 512,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, Poisson arrivals (default: all at once).")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of runs; the best counts.", min=1)] = 3,
    clients: Annotated[int, typer.Option(help="Number of client processes.", min=1)] = 1,
    key: Annotated[str | None, typer.Option(help="API key.")] = None,
    late: Annotated[
        bool, typer.Option(help="Report the age of tokens on arrival; needs a server with --virtual-tokens clock.")
    ] = False,
    goodput: Annotated[
        list[str] | None, typer.Option(help="SLO such as ttft:200, in ms, for ttft, tpot or e2el; may be repeated.")
    ] = None,
    offline: Annotated[
        bool, typer.Option(help="With --start: run the same workload offline afterwards, and compare.")
    ] = False,
) -> None:
    """Measure throughput and latency of a server over HTTP. The last line is one JSON object."""
    from paceline.bench.serve import ServeBenchConfig, bench
    from paceline.bench.target import ServerUnavailable

    for name in api or ():
        if name != "all" and name not in _SERVE_APIS:
            raise ConfigError(f"api is {name!r}: choose from all, {', '.join(_SERVE_APIS)}.")
    apis = _SERVE_APIS if "all" in (api or ()) else tuple(dict.fromkeys(api or _SERVE_APIS[:1]))
    if late and apis != _SERVE_APIS[:1]:
        raise ConfigError(f"late needs the API completions and api is {', '.join(apis)}: remove one of them.")
    if offline and len(apis) > 1:
        raise ConfigError(f"offline is compared with one API and api is {', '.join(apis)}: give one.")
    bounds = {}
    for item in goodput or ():
        name, _, most = item.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not most.replace(".", "", 1).isdigit():
            raise ConfigError(f"goodput is {item!r}: expected ttft, tpot or e2el with a bound in ms, such as ttft:200.")
        bounds[name] = float(most)
    config = ServeBenchConfig(
        apis=apis,
        workload=workload,
        count=count,
        prompt=prompt,
        output=output,
        rate=rate,
        repeats=repeats,
        clients=clients,
        key=key,
        late=late,
        goodput=bounds,
    )
    try:
        bench(config, url=url, start=start, offline=offline)
    except ServerUnavailable as error:
        typer.echo(f"paceline: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def stall(
    url: Annotated[str | None, typer.Option(help="URL of a running server.")] = None,
    start: Annotated[
        str | None, typer.Option(help="Start a server with these options of `paceline serve` (default: a virtual GPU).")
    ] = None,
    streams: Annotated[int, typer.Option(help="Number of streams.", min=1)] = 64,
    only: Annotated[str, typer.Option(help="Only the rows that have this in their name.")] = "",
    key: Annotated[str | None, typer.Option(help="API key of the streams.")] = None,
    hostile_key: Annotated[
        str | None, typer.Option(help="API key of the attacks (default: that of the streams).")
    ] = None,
) -> None:
    """Measure how long attacks of one tenant delay the tokens and requests of another. The last line is one JSON
    object."""
    from paceline.bench.stall import bench

    bench(url=url, start=start, streams=streams, key=key, hostile_key=hostile_key, only=only)
