"""`paceline sim`: the real scheduler on a virtual GPU."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from paceline.cli.options import takes
from paceline.config import (
    POLICIES,
    ConfigError,
    SchedulerConfig,
    SimulatedReplicaConfig,
    SpeculationConfig,
    WorkloadConfig,
    config_from,
)

if TYPE_CHECKING:
    from paceline.simulator.fit import Recording
    from paceline.simulator.profile import Profile
    from paceline.simulator.run import SimulationResult
    from paceline.simulator.workloads import Arrival

app = typer.Typer(help="Simulate workloads, policies and KV cache sizes on a virtual GPU.", no_args_is_help=True)

_SHOWN = {
    "prefix cache hit rate": ("hit_rate", 1, 4), "TTFT p50, s": ("ttft_p50_ms", 1e-3, 3),
    "TTFT p99, s": ("ttft_p99_ms", 1e-3, 3), "waiting time mean, s": ("wait_mean_ms", 1e-3, 3),
    "waiting time p50, s": ("wait_p50_ms", 1e-3, 3), "waiting time p99, s": ("wait_p99_ms", 1e-3, 3),
    "TPOT p50, ms": ("tpot_p50_ms", 1, 2), "TPOT p99, ms": ("tpot_p99_ms", 1, 2),
    "output tokens/s": ("tokens_per_s", 1, 0), "finished requests/s": ("requests_per_s", 1, 1),
    "GPU utilization": ("busy", 1, 3), "waiting requests, mean": ("mean_waiting", 1, 1),
    "retractions": ("retractions", 1, 0), "fairness (Jain)": ("fairness", 1, 3), "total time, s": ("seconds", 1, 1),
}  # fmt: skip

Workload = Annotated[
    str,
    typer.Argument(
        help="prefixes, chat, agents, tenants, one-long, nano, gsp, or a trace file: Azure's CSV, Mooncake's JSON "
        "lines, or a recording made with --record."
    ),
]
Gpu = Annotated[str, typer.Option(help="Profile of the virtual GPU: a name, or a file written by `sim fit`.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Write a plot to this .png or .svg file; needs matplotlib.")
]
Speed = Annotated[float, typer.Option(help="Traces: factor by which requests arrive faster than recorded.")]
Limit = Annotated[int | None, typer.Option(help="Traces: maximum number of requests.", min=1)]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Plan the next forward pass while one runs.")]
_H200 = "h200-qwen3-0.6b"


def load_arrivals(
    workload: str, options: Mapping[str, object], *, speed: float = 1.0, limit: int | None = None
) -> list[Arrival]:
    from paceline.simulator.traces import read_trace
    from paceline.simulator.workloads import DEFAULTS, SIZES, WORKLOADS, make_workload

    given = {name: value for name, value in options.items() if name in WorkloadConfig.__dataclass_fields__}
    if workload in WORKLOADS:
        if limit is not None or speed != 1.0:
            raise ConfigError(f"speed and limit are for traces: use --rate and --requests for workload {workload!r}.")
        if workload in SIZES and set(given) - {"requests"}:
            raise ConfigError(f"workload {workload!r} is fixed: remove {', '.join(sorted(given))}.")
        defaults = {"requests": SIZES[workload]} if workload in SIZES else DEFAULTS.get(workload, {})
        return make_workload(workload, config_from(WorkloadConfig, {**defaults, **given}))
    if given:
        raise ConfigError(f"workload is a trace, which has its own requests: remove {', '.join(sorted(given))}.")
    path = Path(workload).expanduser()
    if not path.exists():
        raise ConfigError(f"workload is {workload!r}: choose one of {', '.join(WORKLOADS)}, or give a trace file.")
    return read_trace(path, limit=limit, speed=speed)


def split_options(options: Mapping[str, object]) -> tuple[float | None, dict[str, object]]:
    """The acceptance of drafts, and the options of the scheduler."""
    speculation, scheduler = SpeculationConfig.split(options)
    if speculation.acceptance is not None and not speculation.drafts:
        raise ConfigError(f"acceptance is {speculation.acceptance}, but there are no drafts: give drafts, too.")
    return speculation.acceptance, scheduler


def replica_config(options: Mapping[str, object]) -> SimulatedReplicaConfig:
    names = SimulatedReplicaConfig.__dataclass_fields__
    if "router" in options and options.get("replicas", 1) == 1:
        raise ConfigError(f"router is {options['router']!r}, but there is one replica: give replicas, too.")
    return config_from(SimulatedReplicaConfig, {name: value for name, value in options.items() if name in names})


def _profile(gpu: str, replicas: SimulatedReplicaConfig) -> Profile:
    from paceline.simulator.profile import load_profile
    from paceline.simulator.tensor_parallel import shard_profile

    return shard_profile(load_profile(gpu), replicas.tp)


def _caption(replicas: SimulatedReplicaConfig) -> str | None:
    from paceline.engine.virtual.tensor_parallel import PREDICTED

    return None if replicas.tp == 1 else f"Tensor parallelism on {replicas.tp} GPUs is {PREDICTED}."


@app.command()
@takes(WorkloadConfig, SimulatedReplicaConfig, SpeculationConfig, SchedulerConfig)
def run(
    options: dict[str, object],
    workload: Workload = "prefixes",
    gpu: Gpu = _H200,
    speed: Speed = 1.0,
    limit: Limit = None,
    overlap: Overlap = True,
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """Simulate a workload or a trace, and print its metrics."""
    from paceline.simulator.compare import scheduler_config
    from paceline.simulator.run import simulate

    replicas = replica_config(options)
    profile = _profile(gpu, replicas)
    arrivals = load_arrivals(workload, options, speed=speed, limit=limit)
    acceptance, given = split_options(options)
    config = scheduler_config(arrivals, profile, given)
    found = simulate(arrivals, config, profile, overlap=overlap, acceptance=acceptance, replicas=replicas)
    where = gpu if replicas.replicas == 1 else f"{replicas.replicas} {gpu}, router {replicas.router}"
    title = f"{workload} on {where}, policy {config.policy}, {config.num_pages:,} pages of {config.page_size}"
    table = Table(title=title, show_header=False, caption=_caption(replicas))
    for name, value in found.summary().items():
        table.add_row(name, f"{value:,.4f}".rstrip("0").rstrip("."))
    console = Console()
    console.print(table)
    console.print(_simulation_speed(found))
    _write(json_file, plot, workload, profile, replicas, {config.policy: found})


@app.command()
@takes(WorkloadConfig, SimulatedReplicaConfig, SpeculationConfig, SchedulerConfig)
def compare(
    options: dict[str, object],
    workload: Workload = "prefixes",
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to compare, separated by commas. "
            + "; ".join(f"{name}: {sentence}" for name, sentence in POLICIES.items())
            + "."
        ),
    ] = "fcfs,lpm,dfs,fair",
    gpu: Gpu = _H200,
    speed: Speed = 1.0,
    limit: Limit = None,
    queue: Annotated[
        float | None,
        typer.Option(help="Speed up arrivals until policy fcfs has this many requests waiting on average."),
    ] = None,
    overlap: Overlap = True,
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """Simulate the same arrivals under several policies, and compare hit rate, TTFT and waiting time."""
    from paceline.simulator.compare import Comparison, scheduler_config

    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"policies is empty: choose from {', '.join(POLICIES)}.")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policies has {name!r}: choose from {', '.join(POLICIES)}.")
    if "policy" in options:
        raise ConfigError("policy is an option of `sim run`: use --policies here.")
    console = Console()
    replicas = replica_config(options)
    profile = _profile(gpu, replicas)
    arrivals = load_arrivals(workload, options, speed=speed, limit=limit)
    acceptance, given = split_options(options)
    config = scheduler_config(arrivals, profile, given)
    configs = {name: dataclasses.replace(config, policy=name) for name in names}
    with Comparison(arrivals, profile, overlap=overlap, acceptance=acceptance, replicas=replicas) as comparison:
        faster = 1.0
        if queue is not None:
            faster = comparison.speed_for(
                queue,
                config,
                lambda at, waiting: console.print(f"arrivals x{at:.2f}: {waiting:.1f} requests wait under fcfs"),
            )
        runs = dict(comparison.runs(configs, faster))
    table = Table(
        title=f"{workload}, {len(arrivals):,} requests on {gpu}, {config.num_pages:,} pages of {config.page_size}",
        caption=_caption(replicas),
    )
    table.add_column("policy")
    for name in runs:
        table.add_column(name, justify="right")
    summaries = [found.summary() for found in runs.values()]
    for title, (key, scale, digits) in _SHOWN.items():
        table.add_row(title, *(f"{summary[key] * scale:,.{digits}f}" for summary in summaries))
    waits = [found.tenant_waits() for found in runs.values()]
    tenants = list(waits[0])
    if len(tenants) > 1:
        # The heaviest and the lightest, if there are many
        for tenant in tenants if len(tenants) <= 8 else tenants[:4] + tenants[-4:]:
            table.add_row(f"mean wait of {tenant}, s", *(f"{found.get(tenant, 0.0):,.3f}" for found in waits))
    console.print(table)
    console.print(_simulation_speed(*runs.values()))
    _write(json_file, plot, workload, profile, replicas, runs)


@app.command()
def experiment(
    names: Annotated[list[str] | None, typer.Argument(help="Names of experiments (default: all).")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder to write a plot of each experiment to; needs matplotlib.")
    ] = None,
    form: Annotated[str, typer.Option(help="Format of the plots: svg or png.")] = "svg",
    json_file: Json = None,
) -> None:
    """Reproduce published effects: continuous batching, cache-aware order, overlap, retraction, KV offloading."""
    from paceline.simulator.experiments import EXPERIMENTS, run_experiments
    from paceline.simulator.plots import check_plots, plot_experiment

    chosen = list(EXPERIMENTS) if not names or names == ["all"] else names
    for name in chosen:
        if name not in EXPERIMENTS:
            raise ConfigError(f"experiment is {name!r}: choose from {', '.join(EXPERIMENTS)}, or all.")
    if plots is not None:
        check_plots(plots / f"experiment.{form}")
    console, written = Console(), {}
    for name, report in run_experiments(chosen):
        console.print(f"\n[bold]{name}[/bold]: {EXPERIMENTS[name].title}", highlight=False)
        console.print(f"Compare with {EXPERIMENTS[name].answers}", highlight=False)
        table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
        for index, column in enumerate(report.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in report.rows:
            table.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else cell for cell in row))
        console.print(table)
        console.print(report.note, style="dim", highlight=False)
        written[name] = dataclasses.asdict(report)
        if plots is not None:
            plot_experiment(EXPERIMENTS[name], report.panels, plots / f"experiment-{name}.{form}")
    if json_file is not None:
        json_file.write_text(json.dumps(written, indent=1) + "\n")


@app.command()
def fit(
    recordings: Annotated[list[Path], typer.Argument(help="Recordings of one device and model, made with --record.")],
    source: Annotated[
        str | None, typer.Option(help="Source to note in the profile (default: the names of the files).")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the profile to this file, for use with --gpu.")] = None,
    drafts_of: Annotated[
        str | None, typer.Option(help="Fit only the times of drafts; the rest is that of this profile.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Fit a virtual GPU to recordings, and print its error on held-out passes and runs."""
    from paceline.simulator.fit import Recording, fit_drafts
    from paceline.simulator.fit import fit as fit_to
    from paceline.simulator.profile import keep_measured, load_profile

    every = [Recording.read(path) for path in recordings]
    read = [one.warm() for one in every]
    name = source or ", ".join(path.name for path in recordings)
    fitted = fit_to(read, name) if drafts_of is None else fit_drafts(read, load_profile(drafts_of), name)
    console = Console()
    table = Table(title=f"{fitted.profile.device}, {fitted.profile.model}: held-out passes")
    for title in ("batch", "passes", "measured s", "predicted s", "total error", "mean error per pass"):
        table.add_column(title, justify="left" if title == "batch" else "right")
    for name, error in fitted.held_out.items():
        table.add_row(
            name,
            f"{error.count:,}",
            f"{error.measured_s:.3f}",
            f"{error.predicted_s:.3f}",
            f"{error.total:+.2%}",
            f"{error.mean_absolute:.2%}",
        )
    console.print(table)
    runs = _replayed(read, recordings, fitted.profile, console)
    if cold := [run.name for one, kept in zip(every, read, strict=True) for run in one.runs if run not in kept.runs]:
        console.print(f"Skipped, because kernels were compiled during the run: {', '.join(cold)}.")
    if cut := [name for one, kept in zip(every, read, strict=True) if kept is not one for name in one.cut_off]:
        console.print(f"Skipped, because the recording ends before the run: {', '.join(cut)}.")
    if save is not None:
        keep_measured(fitted.profile, save).save(save)
    if json_file is not None:
        errors = {name: dataclasses.asdict(error) | {"total": error.total} for name, error in fitted.held_out.items()}
        json_file.write_text(json.dumps({"held_out": errors, "runs": runs}, indent=1) + "\n")


def _replayed(
    read: Sequence[Recording], paths: Sequence[Path], profile: Profile, console: Console
) -> list[dict[str, object]]:
    """Replays whole runs on the virtual GPU, from their requests alone, and prints the errors."""
    from paceline.simulator.replay import replay, replay_held_out

    found = [(path.stem, item) for path, one in zip(paths, read, strict=True) for item in replay(path, one, profile)]
    if not found:
        return []
    held_out = replay_held_out(paths, read)
    table = Table(
        title="Recorded runs, simulated from their requests alone",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        caption="Seconds from the arrivals before the first pass to the last token, and device time per pass in ms. "
        "Held out: the error of a profile fitted to every second run of each workload, without this one.",
    )
    # Seven columns fit into a terminal of 80 characters.
    for title in ("run", "s", "simulated", "error (held out)", "ms/pass", "error (held out)", "passes"):
        table.add_column(title, justify="left" if title == "run" else "right")
    names = Counter(item.name for _, item in found)
    rows = []
    for index, (stem, item) in enumerate(found):
        other = held_out[index] if held_out else None
        held_total, held_pass = (f" ({by:+.1%})" for by in (other.total_error, other.pass_error)) if other else ("", "")
        passes = f"{item.measured_passes:,}"
        if item.simulated_passes != item.measured_passes:
            passes += f", {item.simulated_passes:,}"
        table.add_row(
            item.name if names[item.name] == 1 else f"{item.name}, {stem}",
            f"{item.measured_s:.2f}",
            f"{item.simulated_s:.2f}",
            f"{item.total_error:+.1%}{held_total}",
            f"{item.measured_pass_s * 1e3:.2f}",
            f"{item.pass_error:+.1%}{held_pass}",
            passes,
        )
        held = dataclasses.asdict(other) if other else None
        rows.append({"recording": stem, **dataclasses.asdict(item), "held_out": held})
    console.print(table)
    return rows


@app.command()
def ui(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8001,
) -> None:
    """Serve a page that plays simulations step by step: queue, KV cache, prefix tree, and every decision."""
    from paceline.simulator.ui import serve

    serve(host, port, lambda url: Console().print(f"Simulator at {url} (Ctrl-C to stop)", highlight=False))


def _simulation_speed(*runs: SimulationResult) -> str:
    virtual, wall = sum(run.seconds for run in runs), sum(run.wall_s for run in runs)
    passes, factor = sum(run.passes for run in runs), virtual / max(wall, 1e-9)
    return f"simulated {virtual:,.1f} s of GPU time in {wall:,.1f} s ({factor:,.1f}x), {passes:,} forward passes"


def _write(
    json_file: Path | None,
    plot: Path | None,
    workload: str,
    profile: Profile,
    replicas: SimulatedReplicaConfig,
    runs: Mapping[str, SimulationResult],
) -> None:
    if json_file is not None:
        found = {
            name: {"summary": one.summary(), "series": dataclasses.asdict(one.series), "journal": one.journal}
            for name, one in runs.items()
        }
        about: dict[str, object] = {"workload": workload, "device": profile.device, "model": profile.model}
        about |= {"tp": replicas.tp, "note": _caption(replicas)} if replicas.tp > 1 else {}
        json_file.write_text(json.dumps({**about, "runs": found}) + "\n")
    if plot is not None:
        from paceline.simulator.plots import plot_runs

        plot_runs(runs, plot)
