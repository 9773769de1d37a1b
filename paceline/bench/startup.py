"""The parts of `paceline bench offline` that start processes: `startup` and `cold`."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.first_token import FOUND
from paceline.bench.runner import BenchRunner
from paceline.bench.workloads import OfflineWorkload, gsp_offline, long_prompts, nano, structured, sweep, zipf
from paceline.engine.timeline import Timeline
from paceline.llm import LLM
from paceline.model.fetch import cache_folder
from paceline.request import Grammar

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


def run_startup(runner: BenchRunner, options: Mapping[str, Any]) -> None:
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


def run_cold(runner: BenchRunner, command: Sequence[str], options: Mapping[str, Any]) -> None:
    """A process with empty caches of our own, a second one, and one with a folder of compiled kernels. command: starts
    another process with these options, the arguments of `LLM`."""
    runner.close()
    with tempfile.TemporaryDirectory(prefix="paceline-cold-") as folder:
        caches = [_empty_caches(Path(folder, name)) for name in ("bare", "prepared", "fetch")]
        mix = f"--mix-seconds={runner.config.mix_seconds}"
        scale = [] if runner.config.scale is None else [f"--scale={runner.config.scale}"]
        torch_s = _child([sys.executable, "-c", _TORCH])["torch_s"]
        bare = _child([*command, *scale, mix, "first-uses"], caches[0])
        later_torch_s = _child([sys.executable, "-c", _TORCH])["torch_s"]
        second = _child(_first_token(options), caches[0])
        kernels = f"{caches[0]['PACELINE_HOME']}/kernels"
        prepared = _child(_first_token({**options, "kernel_folder": kernels}), caches[1])
        uses = bare.pop("uses")
        if runner.device.type == "cuda":  # on a CPU nothing is compiled or loaded for it
            uses |= _child([*command, *_FETCH, "first-fetch"], caches[2])["uses"]
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
    slow = ", ".join(f"{count} {cause}" for cause, count in bare["slow_launches"].items()) or "none"
    lines.append(
        f"mix of all features: {bare['mix_requests']} requests, longest launch {bare['mix_launch_ms']:.1f} ms; "
        f"launches of more than 50 ms since the process was ready: {slow}"
    )
    runner.print_result({
        "workload": "cold", "shape": runner.name, "seconds": bare["ready_s"], "torch_s": torch_s,
        "later_torch_s": later_torch_s,
        "second_ready_s": second["ready_s"], "prepared_ready_s": prepared["ready_s"],
        **bare, "uses": uses,
    })  # fmt: skip
    runner.table += lines
    print("\n".join(lines), flush=True)


def _empty_caches(folder: Path) -> dict[str, str]:
    """The environment of a process with caches of its own; models are shared."""
    home = folder / "home"
    home.mkdir(parents=True)
    (home / "models").symlink_to(cache_folder() / "models")
    return {"PACELINE_HOME": str(home), "TRITON_CACHE_DIR": str(folder / "triton")}


def _first_token(options: Mapping[str, Any]) -> list[str]:
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
    for name, change in _features(llm).items():
        uses[name] = _uses([_timed(runner, change(sweep(8, 32, 31 * number)), name) for number in range(3)])
    num_requests, mix_s = _mix(runner, llm)
    _tell(
        ready_s=runner.startup_s,
        uses=uses,
        mix_requests=num_requests,
        mix_launch_ms=round(mix_s * 1e3, 1),
        slow_launches=dict(llm.engine.executor.slow_launches),
    )


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


def _features(llm: LLM) -> dict[str, Callable[[OfflineWorkload], OfflineWorkload]]:
    """Every feature of sampling, and what else a request can ask for."""
    numbers = itertools.count()

    def with_params(**changes: Any) -> Callable[[OfflineWorkload], OfflineWorkload]:
        return lambda work: work._replace(params=[replace(each, **changes) for each in work.params])

    found = {
        "top-k, top-p": with_params(top_k=50, top_p=0.9),
        "min-p": with_params(min_p=0.05),
        "penalties": with_params(repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.3),
        "bias": with_params(logit_bias={5: 1.0, 7: -1.0}),
        "logprobs": with_params(logprobs=5),
        "prompt logprobs": with_params(prompt_logprobs=5),
        "everything at once": with_params(top_p=0.9, presence_penalty=0.3, logprobs=5, prompt_logprobs=1),
        "n = 4": with_params(n=4),
        "embeddings": lambda work: work._replace(pooling="mean"),
    }
    if llm.engine.executor.capabilities.logits:
        found["grammar"] = lambda work: structured(len(work.prompts), 32, 7000 + next(numbers))
    return found


def _timed(runner: BenchRunner, work: OfflineWorkload, name: str) -> tuple[float, float]:
    """Seconds of the run, and of its longest launch."""
    run = runner.timed(work, name, runner.config.overlap_modes[0])
    return run.seconds, _longest_launch(run.timeline)


def _uses(runs: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        "first_s": round(runs[0][0], 4),
        "later_s": round(runs[-1][0], 4),
        "launch_ms": round(1e3 * max(launch_s for _, launch_s in runs), 1),
    }


def _mix(runner: BenchRunner, llm: LLM) -> tuple[int, float]:
    """Requests with random features in batches of random sizes. Their number, and the longest launch in seconds."""
    rng, until = random.Random(1), time.perf_counter() + runner.config.mix_seconds
    features = [change for name, change in _features(llm).items() if name not in ("embeddings", "grammar")]
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 64})
    has_grammars, number, longest = llm.engine.executor.capabilities.logits, 0, 0.0
    while time.perf_counter() < until:
        prompts, params = [], []
        for _ in range(rng.choice((1, 4, 20, 60, 200))):
            one = rng.choice(features)(runner.fitted(sweep(1, rng.randint(1, 64), rng.randrange(10_000))))
            prompts.append(one.prompts[0] * rng.choice((1, 1, 2, 8)))
            is_json = has_grammars and rng.random() < 0.1
            params.append(replace(one.params[0], ignore_eos=False, grammar=grammar) if is_json else one.params[0])
        _set_trace(llm, timeline := Timeline())
        llm.generate(prompts, params)
        llm.embed(prompts[:8])
        _set_trace(llm, None)
        longest = max(longest, _longest_launch(timeline))
        number += len(prompts)
    return number, longest


def _set_trace(llm: LLM, timeline: Timeline | None) -> None:
    llm.engine.call(lambda _: setattr(llm.engine.loop, "trace", timeline)).result()


def _longest_launch(timeline: Timeline) -> float:
    return max((span.ended - span.began for span in timeline.spans if span.what == "launch"), default=0.0)


def _tell(**found: Any) -> None:
    print(FOUND + json.dumps(found), flush=True)


CHILD_PARTS: dict[str, Callable[[BenchRunner], None]] = {
    "first-uses": run_first_uses,
    "first-fetch": run_first_fetch,
}
