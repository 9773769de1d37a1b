"""`paceline bench offline`: offline generation, timed and checked.

`python -m paceline.bench.offline` is the same command for hosts that have only the packages of the engine itself.
Every timed run ends in a line `RESULT {json}`, every check in one that begins with PASS, FAIL or NOT RUN; a summary
table comes last. A part that fails prints its error, the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline import checks
from paceline.bench.parts import PARTS
from paceline.bench.runner import BenchRunner, device_name
from paceline.bench.startup import CHILD_PARTS, run_cold, run_startup
from paceline.checks import CheckResult
from paceline.config import (
    OFFLINE_PARTS,
    ConfigError,
    EngineConfig,
    OfflineConfig,
    SchedulerConfig,
    config_from,
    full_help,
    public_options,
    split_options,
)
from paceline.engine.build import build_engine
from paceline.engine.build.facts import choose_device
from paceline.engine.timeline import write_trace
from paceline.llm import LLM
from paceline.request import PacelineError

_PRINTED = {True: "PASS", False: "FAIL", None: "NOT RUN"}
_CONFIGS = (OfflineConfig, EngineConfig, SchedulerConfig)
_DEFAULT_SHAPES = {"cuda": "qwen3-0.6b", "cpu": "smollm2-135m"}


def run(
    parts: Sequence[str],
    *,
    model: str | Path | None = None,
    load: str | None = None,
    shape: str | None = None,
    options: Mapping[str, Any],
) -> int:
    """Runs the parts in order and returns the exit status.

    `options` are those of `OfflineConfig`, `EngineConfig` and `SchedulerConfig`. Without a model, weights are random,
    in the shape of Qwen3-0.6B on a GPU and of SmolLM2-135M on a CPU unless `shape` is given.
    """
    for part in parts:
        if part not in OFFLINE_PARTS:
            raise ConfigError(f"part is {part!r}: choose from {', '.join(OFFLINE_PARTS)}.")
    own = {item.name for item in dataclasses.fields(OfflineConfig)}
    config = config_from(OfflineConfig, {name: value for name, value in options.items() if name in own})
    rest = {name: value for name, value in options.items() if name not in own}
    engine_options, _ = split_options(rest)
    engine_config = EngineConfig(**engine_options)
    if engine_config.lora:
        raise ConfigError(
            f"lora is {dict(engine_config.lora)!r}, which these workloads do not use: see benchmarks/lora.py."
        )
    device = torch.device(choose_device(engine_config))
    load = load or ("random" if model is None else "weights")
    if load == "random" and model is None:
        shape = shape or _DEFAULT_SHAPES[device.type]
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    dtype = dtype if engine_config.dtype == "auto" else engine_config.dtype
    name = shape or str(model or "default")
    if config.trace is not None:
        _check_writable(Path(config.trace))

    def make(**more: object) -> LLM:
        return LLM(model, load=load, shape=shape, overlap=config.overlap_modes[0], **{**rest, **more})

    def make_online() -> LLM:
        return LLM.from_engine(build_engine(model, load=load, shape=shape, overlap=config.overlap_modes[0], **rest))

    has_draft_model = engine_config.draft_model is not None
    runner = BenchRunner(
        config, name, make, make_online, device, getattr(torch, dtype), parts, has_draft_model=has_draft_model
    )
    setup = checks.CheckSetup(shape or "", device, dtype, rest)
    given: dict[str, object] = {"model": model, "load": load, "shape": shape, **rest}
    given = {name: value for name, value in given.items() if value is not None and name != "record"}
    actions = _actions(runner, setup, given)
    failed = [part for part in parts if not _run_part(part, actions[part], runner)]
    runner.close()
    if config.trace is not None:
        write_trace(Path(config.trace), runner.timelines)
        print(f"trace of {len(runner.timelines)} runs: {config.trace}; open it at ui.perfetto.dev")
    print(f"{name}, {device_name(device)}, torch {torch.__version__}, overlap {config.overlap}")
    print("\n".join(runner.table))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def _actions(
    runner: BenchRunner, setup: checks.CheckSetup, given: Mapping[str, object]
) -> dict[str, Callable[[], CheckResult | None]]:
    """Every part by name. given: the model and its options, for other processes."""
    config, command = runner.config, _child(given)
    return {
        **{name: partial(part, runner) for name, part in {**PARTS, **CHILD_PARTS}.items()},
        **{name: partial(check, setup) for name, check in checks.CHECKS.items()},
        "pd": lambda: _run_pd(runner, command, setup.shape or None),
        "pd-prefill": lambda: _run_pd_prefill(runner),
        "startup": lambda: run_startup(runner, given),
        "cold": lambda: run_cold(runner, command, given),
        "long": lambda: checks.check_inter_token_latency(setup, config.running),
        "soak": lambda: checks.check_soak(setup, config.soak_seconds),
        "sanitizer": lambda: checks.run_sanitizer([*command, "tiny"]),
    }


def _run_pd(runner: BenchRunner, command: Sequence[str], shape: str | None) -> CheckResult:
    try:
        from paceline.bench.disaggregation import run_pd
    except ModuleNotFoundError as error:  # msgspec, which a minimal GPU host may lack
        return CheckResult(None, f"{error.name} is not installed, which KV transfers need: pip install {error.name}.")
    return run_pd(runner, command, shape)


def _run_pd_prefill(runner: BenchRunner) -> None:
    from paceline.bench.disaggregation import run_pd_prefill  # the same

    run_pd_prefill(runner)


def _run_part(part: str, action: Callable[[], CheckResult | None], runner: BenchRunner) -> bool:
    """Runs one part and prints what it found. Returns whether it did not fail."""
    began = time.perf_counter()
    if part in checks.CHECKS:
        runner.close()  # a check makes engines of its own
    try:
        passed, text = action() or (True, "")
    except PacelineError:
        raise  # a user's mistake applies to all parts
    except Exception as error:  # the other parts still run
        traceback.print_exc()
        passed, text = False, f"{type(error).__name__}: {error}"
        runner.close()
    if text:
        runner.table.append(f"{_PRINTED[passed]} {part}: {text}")
        print(runner.table[-1])
    print(f"[{part}: {time.perf_counter() - began:.1f} s]", flush=True)
    return passed is not False


def _check_writable(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"trace is {str(path)!r}, which cannot be written: {error.strerror}.") from None


def _child(given: Mapping[str, object]) -> list[str]:
    """The command that starts another process with the same model and options."""
    command = [sys.executable, "-m", "paceline.bench.offline"]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, str | int | float | Path):
            command.append(f"--{flag}={value}")
    return command


def _parser() -> argparse.ArgumentParser:
    """The options of `paceline bench offline`, from the same declarations, without typer."""
    parts = "; ".join(f"{name}: {what}" for name, what in OFFLINE_PARTS.items())
    parser = argparse.ArgumentParser(
        prog="paceline.bench.offline", description="Offline generation, timed and checked."
    )
    parser.add_argument("parts", nargs="*", default=["nano", "sweep"], help=f"parts to run, in order. {parts}")
    parser.add_argument("--model", help="model folder, .gguf file or Hugging Face id")
    parser.add_argument("--load", choices=("weights", "random"))
    parser.add_argument(
        "--shape", help="architecture of random weights (default: qwen3-0.6b on a GPU, smollm2-135m on a CPU)"
    )
    seen = set()
    for config in _CONFIGS:
        hints = typing.get_type_hints(config)
        for item in public_options(config):
            kinds = typing.get_args(hints[item.name])
            kind = kinds[0] if isinstance(hints[item.name], types.UnionType) else hints[item.name]
            if item.name in seen or kind not in (str, int, float, bool):
                continue
            seen.add(item.name)
            flag, text = f"--{item.name.replace('_', '-')}", full_help(item).replace("%", "%%")
            if kind is bool:
                parser.add_argument(flag, default=None, help=text, action=argparse.BooleanOptionalAction)
            else:
                choices = item.metadata["choices"] or None
                parser.add_argument(flag, default=None, help=text, type=kind, choices=choices)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(_parser().parse_args(arguments))
    parts, model, load, shape = (given.pop(name) for name in ("parts", "model", "load", "shape"))
    options = {name: value for name, value in given.items() if value is not None}
    try:
        return run(parts, model=model, load=load, shape=shape, options=options)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
