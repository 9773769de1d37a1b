"""The parts of `paceline bench offline` that start processes: `startup` and `cold`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.first_token import FOUND
from paceline.bench.mix import features, longest_launch, mix, mix_line
from paceline.bench.runner import BenchRunner
from paceline.bench.workloads import OfflineWorkload, gsp_offline, long_prompts, nano, sweep, zipf
from paceline.model.fetch import cache_folder

_FETCH = ("--kv-tokens=65536", "--host-kv-tokens=262144", "--context-tokens=2048", "--max-running=64")
# Prints how long importing torch and making a CUDA context take: nothing that uses a GPU starts earlier.
_TORCH = """
import time
began = time.perf_counter()
import torch
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
print("FOUND", '{"torch_s": %.3f}' % (time.perf_counter() - began))
"""


def run_startup(runner: BenchRunner, options: Mapping[str, object]) -> None:
    """The second of two processes that generate one token: disk cache and compiled kernels are warm then. options:
    arguments of `LLM`."""
    runner.close()
    first, second = (_child(_first_token(options))["first_token_s"] for _ in range(2))
    runner.startup_s = second
    print(f"startup: first {first:.2f} s, second {second:.2f} s from process start to first token")
    runner.print_result({
        "workload": "startup", "shape": runner.name, "seconds": round(second, 3),
        "tokens_per_s": round(1 / second, 3), "gpu_idle_share": None, "host_us_per_step": None,
        "hit_rate": None, "startup_s": round(second, 3), "first_start_s": round(first, 3),
    })  # fmt: skip
    runner.table.append(f"startup    {second:8.2f} s (first start: {first:.2f} s)")


def run_cold(runner: BenchRunner, command: Sequence[str], options: Mapping[str, object]) -> None:
    """A process with empty caches of our own, a second one, and one with a folder of compiled kernels. command: starts
    another process with these options, the arguments of `LLM`."""
    runner.close()
    with tempfile.TemporaryDirectory(prefix="paceline-cold-") as folder:
        caches = [_empty_caches(Path(folder, name)) for name in ("bare", "prepared", "mix", "fetch")]
        seconds = f"--mix-seconds={runner.config.mix_seconds}"
        scale = [] if runner.config.scale is None else [f"--scale={runner.config.scale}"]
        torch_s = _child([sys.executable, "-c", _TORCH])["torch_s"]
        bare = _child([*command, *scale, "first-uses"], caches[0])
        later_torch_s = _child([sys.executable, "-c", _TORCH])["torch_s"]
        second = _child(_first_token(options), caches[0])
        kernels = f"{caches[0]['PACELINE_HOME']}/kernels"
        prepared = _child(_first_token({**options, "kernel_folder": kernels}), caches[1])
        uses = bare.pop("uses")
        mixed = _child([*command, *scale, seconds, "mix"], caches[2])
        if runner.device.type == "cuda":  # on a CPU nothing is compiled or loaded for it
            uses |= _child([*command, *_FETCH, "first-fetch"], caches[3])["uses"]
    lines = [
        f"ready after {bare['ready_s']:.2f} s without compiled kernels, {prepared['ready_s']:.2f} s with a folder of "
        f"them, {second['ready_s']:.2f} s in a second process; import torch and CUDA context: {torch_s:.2f} s before "
        f"all of them, {later_torch_s:.2f} s before the second",
        "first use               first s  later s   ratio   longest launch",
    ]
    for name, use in uses.items():
        lines.append(
            f"{name:22} {use['first_s']:8.3f} {use['later_s']:8.3f} {use['first_s'] / use['later_s']:7.3f} "
            f"{use['launch_ms']:9.1f} ms"
        )
    lines.append(mix_line(mixed))
    runner.print_result({
        "workload": "cold", "shape": runner.name, "seconds": bare["ready_s"], "torch_s": torch_s,
        "later_torch_s": later_torch_s,
        "second_ready_s": second["ready_s"], "prepared_ready_s": prepared["ready_s"],
        **bare, **mixed, "uses": uses,
    })  # fmt: skip
    runner.table += lines
    print("\n".join(lines), flush=True)


def _empty_caches(folder: Path) -> dict[str, str]:
    """The environment of a process with caches of its own; models are shared."""
    home = folder / "home"
    home.mkdir(parents=True)
    (home / "models").symlink_to(cache_folder() / "models")
    return {"PACELINE_HOME": str(home), "TRITON_CACHE_DIR": str(folder / "triton")}


def _first_token(options: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-m", "paceline.bench.first_token", json.dumps(options, default=str)]


def _child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs a process and returns what it found."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # A second process finds bytecode, as that of an installed package does.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**inherited, **(environment or {}), "PYTHONPATH": paths},
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(FOUND)]
    assert done.returncode == 0 and found, f"the process ended with {done.returncode}: {done.stdout}"
    result: dict[str, Any] = json.loads(found[-1].removeprefix(FOUND))
    return result


# ---------------------------------------------------------------------- in the child process


def run_first_uses(runner: BenchRunner) -> None:
    """Every use is timed three times, with other tokens each time. The last one counts as the later one, after which
    nothing is new."""
    llm = runner.load_cold()
    uses = {
        name: _uses([_timed(runner, work.shifted(17 * number), name) for number in range(3)])
        for name, work in {"nano": nano(), "gsp": gsp_offline(), "zipf": zipf(), "prompts": long_prompts()}.items()
    }
    for name, change in features(llm).items():
        uses[name] = _uses([_timed(runner, change(sweep(8, 32, 31 * number)), name) for number in range(3)])
    _tell(ready_s=runner.startup_s, uses=uses)


def run_mix(runner: BenchRunner) -> None:
    found = mix(runner, runner.load_cold())
    runner.print_result({
        "workload": "mix", "shape": runner.name, "seconds": runner.config.mix_seconds,
        "startup_s": runner.rounded_startup_s, **found,
    })  # fmt: skip
    runner.table.append(mix_line(found))
    _tell(**found)


def run_first_fetch(runner: BenchRunner) -> None:
    """Prompts whose KV was evicted to host memory by others."""
    runner.load_cold()
    prompts = [sweep(40, 8, seed)._replace(prompts=_long(seed)) for seed in range(3)]
    for work in prompts:
        _timed(runner, work, "fill")
    _tell(uses={"host memory": _uses([_timed(runner, work, "fetch") for work in prompts])})


def _long(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10_000) for _ in range(1000)] for _ in range(40)]


def _timed(runner: BenchRunner, work: OfflineWorkload, name: str) -> tuple[float, float]:
    """Seconds of the run, and of its longest launch."""
    run = runner.timed(work, name, runner.config.overlap_modes[0])
    return run.seconds, longest_launch(run.timeline)


def _uses(runs: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        "first_s": round(runs[0][0], 4),
        "later_s": round(runs[-1][0], 4),
        "launch_ms": round(1e3 * max(launch_s for _, launch_s in runs), 1),
    }


def _tell(**found: object) -> None:
    print(FOUND + json.dumps(found), flush=True)


CHILD_PARTS: dict[str, Callable[[BenchRunner], None]] = {
    "first-uses": run_first_uses,
    "mix": run_mix,
    "first-fetch": run_first_fetch,
}
