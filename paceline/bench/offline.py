"""Offline generation, timed and checked: `paceline bench offline`, or `python -m paceline.bench.offline` on a host that
has nothing but what the engine itself needs.

Every timed run ends in a line that begins with `RESULT ` and holds one JSON object, every check in one that begins with
PASS, FAIL or NOT RUN; a short table comes last. One part that fails prints why, the others still run, and the exit
status says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import time
import traceback
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import checks
from paceline.bench.figures import Ceilings, Figures, figures, measure_ceilings
from paceline.bench.workloads import (
    Offline,
    chats,
    gsp_offline,
    long_prompts,
    nano,
    sampled,
    structured,
    sweep,
    with_logprobs,
)
from paceline.config import OFFLINE_PARTS, ConfigError, EngineConfig, OfflineConfig, SchedulerConfig, split_options
from paceline.engine.build import choose_device
from paceline.engine.cpu.executor import CpuExecutor, CpuModelRunner, DecoderModel
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.timeline import Timeline, write_trace
from paceline.llm import LLM, RequestOutput
from paceline.request import PacelineError, SamplingParams

Make = Callable[..., LLM]
_SAID = {True: "PASS", False: "FAIL", None: "NOT RUN"}
_CONFIGS = (OfflineConfig, EngineConfig, SchedulerConfig)


class BenchRun(NamedTuple):
    """One timed generate()."""

    figures: Figures
    timeline: Timeline
    num_requests: int
    num_tokens: int
    hit_rate: float
    outputs: list[RequestOutput]

    @property
    def seconds(self) -> float:
        return self.figures.seconds


class Bench:
    def __init__(self, config: OfflineConfig, name: str, make: Make, device: torch.device, dtype: torch.dtype) -> None:
        """`make()` loads the model that is called `name`."""
        self.config, self.name, self.make = config, name, make
        self.device, self.dtype = device, dtype
        self.table: list[str] = []
        self.timelines: list[Timeline] = []
        self.startup_s: float | None = None
        self._llm: LLM | None = None
        self._ceilings: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        if self._ceilings is None:
            self._ceilings = measure_ceilings(self.device, self.dtype)
            print(self._ceilings, flush=True)
        return self._ceilings

    @property
    def llm(self) -> LLM:
        """The model, loaded at first use; from then on the process's startup time is known."""
        if self._llm is None:
            _ = self.ceilings  # while there is memory
            self._llm = self.load()
            # Everything once, briefly: prompts of every length, and every batch there will be.
            work = self._fitted(nano().shifted(40_000))
            self._llm.generate(work.prompts, [replace(each, max_tokens=4) for each in work.params])
        return self._llm

    def load(self) -> LLM:
        """A model that has said its first token."""
        age, began = process_age_s(), time.perf_counter()
        llm = self.make()
        loaded = time.perf_counter()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        self.startup_s = process_age_s()
        pages = llm.engine.scheduler.config.num_pages
        print(f"process {age:.1f} s old, then loaded in {loaded - began:.1f} s, first token "
              f"{time.perf_counter() - loaded:.2f} s later, {pages} pages", flush=True)  # fmt: skip
        return llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
            gc.collect()  # the engine and its thread refer to each other; their memory may be needed
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed(self, work: Offline, name: str, overlap: str) -> BenchRun:
        llm = self.llm
        return self._timed(llm, self._fitted(work), name, overlap)

    def _timed(self, llm: LLM, work: Offline, name: str, overlap: str) -> BenchRun:
        engine, timeline = llm.engine, Timeline()
        device = engine.executor if isinstance(engine.executor, CudaExecutor) else None

        def begin(_: object) -> None:
            engine.loop.overlap, engine.loop.sync = overlap != "off", overlap == "sync"
            engine.loop.trace = timeline
            if device is not None:
                device.reset_stats()
            if engine.recorder is not None:
                engine.recorder.mark(name)

        def end(_: object) -> None:
            engine.loop.trace = None
            if engine.recorder is not None:
                engine.recorder.mark(f"end of {name}")

        engine.call(begin).result()
        began = time.perf_counter()
        outputs = llm.generate(work.prompts, work.params)
        seconds = time.perf_counter() - began
        engine.call(end).result()
        found = sum(len(output.token_ids) for output in outputs)
        assert found == work.num_output_tokens, f"{found} tokens came out, {work.num_output_tokens} were asked for"
        cached = sum(output.num_cached_tokens for output in outputs)
        model = model_of(llm)
        achieved = figures(
            timeline, seconds, model.spec, model.dtype.itemsize, device.stats.saved_tokens if device else 0
        )
        if self.config.trace is not None:
            self.timelines.append(timeline)
        return BenchRun(achieved, timeline, len(outputs), found, cached / sum(map(len, work.prompts)), outputs)

    def _fitted(self, work: Offline) -> Offline:
        """For this model, and as small as was asked for."""
        assert self._llm is not None, "the model is loaded"
        return work.scaled(self.config.scale).within(model_of(self._llm).spec.vocab_size)

    # ------------------------------------------------------------------ timed parts

    def nano(self) -> None:
        self._throughput("nano", nano())

    def gsp(self) -> None:
        self._throughput("gsp", gsp_offline())

    def prompts(self) -> None:
        self._throughput("prompts", long_prompts())

    def chats(self) -> None:
        """Every turn begins when all chats have had the one before; by then others may have taken their memory."""
        for mode in self.config.overlap_modes:
            for repeat in range(self.config.repeats):
                self._chats(f"chats {repeat}", 7 * repeat + (mode == "off"), mode)

    def _chats(self, name: str, shift: int, overlap: str) -> None:
        llm, rng = self.llm, random.Random(shift)
        device = llm.engine.executor if isinstance(llm.engine.executor, CudaExecutor) else None
        work = self._fitted(chats().shifted(shift))
        turns: list[BenchRun] = []
        link_bytes, link_s, found = 0, 0.0, Counter[str]()
        for turn in range(6):
            turns.append(run := self._timed(llm, work, f"{name} turn {turn}", overlap))
            for prompt, output in zip(work.prompts, run.outputs, strict=True):
                found["prompt"] += len(prompt)
                found["cached"] += output.num_cached_tokens
                found["fetched"] += output.num_fetched_tokens
            if device is not None:
                link_bytes += device.stats.fetched_pages * device.kv[:, 0].nbytes
                link_s += device.stats.fetch_s
            asked = max(1, round(400 * self.config.scale))
            work = work._replace(prompts=[
                [*prompt, *output.token_ids, *(rng.choice(prompt) for _ in range(asked))]
                for prompt, output in zip(work.prompts, run.outputs, strict=True)
            ])  # fmt: skip
        seconds, tokens = sum(run.seconds for run in turns), sum(run.num_tokens for run in turns)
        hits = found["cached"] - found["fetched"]
        rate = round(link_bytes / link_s / 1e9, 2) if link_s else None
        self.print_result({
            "workload": "chats", "shape": self.name, "seconds": round(seconds, 4),
            "tokens_per_s": round(tokens / seconds, 1),
            "gpu_idle_share": round(sum(run.figures.idle_share * run.seconds for run in turns) / seconds, 5),
            "host_us_per_step": round(sum(run.figures.host_us_per_step * run.seconds for run in turns) / seconds, 1),
            "hit_rate": round(hits / found["prompt"], 4),
            "startup_s": None if self.startup_s is None else round(self.startup_s, 2), "overlap": overlap,
            "fetch_rate": round(found["fetched"] / found["prompt"], 4), "fetched_tokens": found["fetched"],
            "computed_tokens": found["prompt"] - found["cached"], "fetch_gb_s": rate,
            "num_host_pages": llm.engine.scheduler.config.num_host_pages,
        })  # fmt: skip
        at = f" at {rate} GB/s" if rate else ""
        self.table.append(
            f"{name:10} overlap {overlap:4} {seconds:8.3f} s; of {found['prompt']:,} prompt tokens {hits:,} found, "
            f"{found['fetched']:,} fetched{at}, {found['prompt'] - found['cached']:,} computed"
        )
        print(self.table[-1], flush=True)

    def sampling(self) -> None:
        """nano with top-k, top-p and penalties on all rows, against plain."""
        self._against("nano-sampled", lambda by: nano().shifted(by), lambda by: sampled(nano().shifted(by)))

    def grammar(self) -> None:
        """64 prompts that obey a schema each, against the same unconstrained."""
        self._against(
            "grammar-64", lambda by: sweep(64, 256, 500 + by), lambda by: structured(64, 256, 500 + by)
        )  # fmt: skip

    def logprobs(self) -> None:
        """Prompts whose every token comes with five alternatives, against the same without."""
        for batch in (64, 256):
            self._logprobs(partial(sweep, batch, 256), f"logprobs-{batch}")

    def _logprobs(self, plain: Callable[[int], Offline], name: str) -> None:
        self._against(name, plain, lambda by: with_logprobs(plain(by)))

    def _against(self, name: str, plain: Callable[[int], Offline], full: Callable[[int], Offline]) -> None:
        """The best of both, run in turn, after a first time that compiles and captures what each needs."""
        mode = self.config.overlap_modes[0]
        first = self.timed(full(9_000), f"{name}, first", mode)
        print(f"{name}: the first time took {first.seconds:.2f} s", flush=True)
        self.timed(plain(9_001), f"{name} plain, first", mode)
        fast: BenchRun | None = None
        slow: BenchRun | None = None
        for repeat in range(2 * self.config.repeats):
            runs = [self.timed(plain(2 * repeat), f"{name} plain", mode), self.timed(full(2 * repeat + 1), name, mode)]
            fast = runs[0] if fast is None or runs[0].seconds < fast.seconds else fast
            slow = runs[1] if slow is None or runs[1].seconds < slow.seconds else slow
            print(f"{name} run {repeat}: best so far {slow.seconds:.3f} s, plain {fast.seconds:.3f} s", flush=True)
        assert fast is not None and slow is not None, "there is at least one repeat"
        ratio = slow.seconds / fast.seconds
        self.result(name, slow, mode, ratio=round(ratio, 4), plain_seconds=round(fast.seconds, 4))
        self.table.append(
            f"{name:12} {slow.seconds:8.3f} s, plain {fast.seconds:.3f} s: {ratio:.3f}x; {summary(slow.figures)}; "
            f"plain {summary(fast.figures)}"
        )

    def _throughput(self, name: str, work: Offline) -> None:
        best: dict[str, BenchRun] = {}
        shift = 0
        for _ in range(self.config.repeats):
            for mode in self.config.overlap_modes:  # in turns: side by side
                run = self.timed(work.shifted(shift), f"{name} {shift}", mode)
                print(f"{name} run {shift}, overlap {mode}: {run.seconds:.3f} s; {run.figures}", flush=True)
                shift += 1
                if mode not in best or run.seconds < best[mode].seconds:
                    best[mode] = run
        for mode, run in best.items():
            print(f"{name}, overlap {mode}: {run.figures.against(self.ceilings)}")
            if isinstance(device := self.llm.engine.executor, CudaExecutor):
                print_buckets(run.timeline, device)
            self.result(name, run, mode)
            self.table.append(
                f"{name:10} overlap {mode:4} {run.seconds:8.3f} s {run.num_tokens / run.seconds:10.0f} tok/s  "
                f"{summary(run.figures)}"
            )

    def sweep(self) -> None:
        for batch in self.config.batch_sizes:
            for mode in self.config.overlap_modes:
                # The best of each: the difference between a long run and a slow short one would flatter.
                short, long = (self._best_sweep(batch, count, mode) for count in (16, 272))
                more = (long.num_tokens - short.num_tokens) / long.num_requests  # 256, at full scale
                each = (long.seconds - short.seconds) / more
                self.result(f"sweep-{batch}", long, mode, ms_per_token=round(each * 1e3, 4))
                self.table.append(
                    f"sweep b{batch:<4} overlap {mode:4} {each * 1e3:7.3f} ms/token  {summary(long.figures)}; "
                    f"{long.figures.against(self.ceilings)}"
                )

    def _best_sweep(self, batch: int, count: int, overlap: str) -> BenchRun:
        seed, length = 1000 * batch + 500 * (overlap == "off") + count, " short" if count == 16 else ""
        runs = [self.timed(sweep(batch, count, seed + i), f"sweep {batch} {i}{length}", overlap) for i in range(2)]
        return min(runs, key=lambda run: run.seconds)

    def startup(self, command: Sequence[str]) -> None:
        """The second of two processes that each say one token: then disk and compiled kernels are warm."""
        self.close()
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
            ) as child:
                assert child.stdout is not None, "it was asked for"
                lines = []
                for line in child.stdout:
                    lines.append(line)
                    if line.startswith("process "):
                        print(line, end="")  # what it took the time for
                    if line.startswith("FIRST TOKEN"):
                        seconds.append(time.perf_counter() - began)
            assert child.returncode == 0, f"the process ended with {child.returncode}: {''.join(lines)}"
        self.startup_s = seconds[-1]
        print(f"startup: first {seconds[0]:.2f} s, second {seconds[1]:.2f} s from process start to first token")
        self.print_result({
            "workload": "startup", "shape": self.name, "seconds": round(seconds[1], 3),
            "tokens_per_s": round(1 / seconds[1], 3), "gpu_idle_share": None, "host_us_per_step": None,
            "hit_rate": None, "startup_s": round(seconds[1], 3), "first_start_s": round(seconds[0], 3),
        })  # fmt: skip
        self.table.append(f"startup    {seconds[1]:8.2f} s (the start before: {seconds[0]:.2f} s)")

    def first_token(self) -> None:
        llm = self.load()
        print("FIRST TOKEN", flush=True)
        llm.close()

    def result(self, workload: str, run: BenchRun, overlap: str, **more: float) -> None:
        made = run.figures
        self.print_result({
            "workload": workload, "shape": self.name, "seconds": round(run.seconds, 4),
            "tokens_per_s": round(run.num_tokens / run.seconds, 1), "gpu_idle_share": round(made.idle_share, 5),
            "host_us_per_step": round(made.host_us_per_step, 1), "hit_rate": round(run.hit_rate, 4),
            "startup_s": None if self.startup_s is None else round(self.startup_s, 2), **more,
            "overlap": overlap, "steady_idle_share": round(made.steady_idle_share, 5),
            "hidden_share": round(made.hidden_share, 4),
            "lanes_us": {name: round(us, 1) for name, us in made.lanes_us.items()},
            "kv_addressed_tb_s": round(made.kv_addressed / 1e12, 6), "kv_read_tb_s": round(made.kv_read / 1e12, 6),
            "decode_read_tb_s": round(made.decode_read / 1e12, 6), "prompt_tflops": round(made.prompt_flops / 1e12, 6),
            "tflops": round(made.flops / 1e12, 6),
            "ceilings": {
                "copy_tb_s": round(self.ceilings.copy / 1e12, 6), "read_tb_s": round(self.ceilings.read / 1e12, 6),
                "matmul_tflops": round(self.ceilings.matmul / 1e12, 6),
            },
        })  # fmt: skip

    def print_result(self, found: dict[str, Any]) -> None:
        more = {"scale": self.config.scale} if self.config.scale != 1 else {}
        print("RESULT " + json.dumps({**found, "device": device_name(self.device), **more}), flush=True)

    def profile(self) -> None:
        """Which kernels the time of decode passes goes to, with 256 rows and with 16."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type != "cuda":
            raise ConfigError("profile looks at a GPU's kernels, and there is none: leave it out.")
        for batch in (256, 16):
            llm = self.llm
            work = self._fitted(sweep(batch, 24, 77))
            llm.generate(work.prompts, work.params)
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                llm.generate(work.prompts, work.params)  # a cache hit: nearly all passes decode
            print(f"profile, {batch} rows, 24 tokens")
            print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=40))
            print(
                f"inside decode passes of {batch} rows no kernel runs for {gap_share(found.events()):.2%} of the time"
            )


def gap_share(events: Any) -> float:
    """Share of the passes' time in which no kernel ran, from the first of a pass to its last; the idle time between
    passes is not in it. The last five passes of a profile."""
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if "CUDA" in str(event.device_type) and not event.name.lower().startswith("mem")
    )
    firsts = [index for index, kernel in enumerate(kernels) if "apply_diff" in kernel[2]][-6:]
    gaps = whole = 0.0
    for first, after in itertools.pairwise(firsts):
        until = kernels[first][0]
        for start, end, _ in kernels[first:after]:
            gaps += max(start - until, 0.0)
            until = max(until, end)
        whole += until - kernels[first][0]
    return gaps / whole if whole else 0.0


def print_buckets(timeline: Timeline, device: CudaExecutor) -> None:
    """Time of the passes by the size of their graph."""
    by_bucket: dict[int, list[float]] = {}
    for one in timeline.passes:
        bucket = 0 if one.num_prompts else next(size for size in device.graphs.sizes if size >= one.num_decodes)
        by_bucket.setdefault(bucket, []).append(one.device_s)
    for bucket, times in sorted(by_bucket.items()):
        what, each = f"graph of {bucket}" if bucket else "with prompts", sum(times) / len(times)
        print(f"  {what:14} {len(times):5} passes {sum(times) * 1e3:9.1f} ms in all {each * 1e3:8.3f} each")


def summary(made: Figures) -> str:
    return (
        f"idle {made.idle_share:6.2%} (steady {made.steady_idle_share:6.2%})  "
        f"host {made.host_us_per_step:7.0f} µs/step, {made.hidden_share:6.1%} hidden"
    )


def model_of(llm: LLM) -> DecoderModel | Any:
    executor = llm.engine.executor
    if isinstance(executor, CudaExecutor):
        return executor.model
    assert isinstance(executor, CpuExecutor) and isinstance(executor.runner, CpuModelRunner), (
        "there is no third executor"
    )
    return executor.runner.decoder


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def process_age_s() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat", encoding="ascii") as stat, open("/proc/uptime", encoding="ascii") as uptime:
        began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - began


# ------------------------------------------------------------------ from options to parts


def run(
    parts: Sequence[str],
    *,
    model: str | Path | None = None,
    load: str | None = None,
    shape: str | None = None,
    options: Mapping[str, Any],
) -> int:
    """Runs the parts in order. `options` are those of `OfflineConfig`, `EngineConfig` and `SchedulerConfig`. Without a
    model there are random weights, in the shape of Qwen3-0.6B if none is given. Returns the exit status."""
    for part in parts:
        if part not in OFFLINE_PARTS:
            raise ConfigError(f"part is {part!r}: choose of {', '.join(OFFLINE_PARTS)}.")
    own = {item.name for item in dataclasses.fields(OfflineConfig)}
    config = OfflineConfig(**{name: value for name, value in options.items() if name in own})
    rest = {name: value for name, value in options.items() if name not in own}
    load = load or ("random" if model is None else "weights")
    if load == "random" and model is None:
        shape = shape or "qwen3-0.6b"
    engine_options, _ = split_options(rest)
    wanted = EngineConfig(**engine_options)
    device = torch.device(choose_device(wanted))
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    dtype = dtype if wanted.dtype == "auto" else wanted.dtype
    name = shape or str(model or "default")
    if config.trace is not None:
        _check_writable(Path(config.trace))

    def make() -> LLM:
        return LLM(model, load=load, shape=shape, overlap=config.overlap_modes[0], **rest)

    bench = Bench(config, name, make, device, getattr(torch, dtype))
    lab = checks.Lab(shape or "", device, dtype, rest)
    command = _child(model, load, shape, rest)
    special: dict[str, Callable[[], checks.Verdict | None]] = {
        "startup": lambda: bench.startup([*command, "first-token"]),
        "first-token": bench.first_token,
        "long": lambda: checks.check_inter_token_latency(lab, config.running),
        "soak": lambda: checks.check_soak(lab, config.soak_seconds),
        "sanitizer": lambda: checks.run_sanitizer([*command, "tiny"]),
    }
    failed = []
    for part in parts:
        began = time.perf_counter()
        action: Callable[[], checks.Verdict | None] | None = special.get(part)
        try:
            if part in checks.CHECKS:
                bench.close()  # a check makes engines of its own
                action = action or partial(checks.CHECKS[part], lab)
            passed, text = (action or getattr(bench, part))() or (True, "")
        except PacelineError:
            raise  # a user's mistake: no part after it would do better
        except Exception as error:  # the other parts still have something to say
            traceback.print_exc()
            passed, text = False, f"{type(error).__name__}: {error}"
            bench.close()
        if text:
            bench.table.append(f"{_SAID[passed]} {part}: {text}")
            print(bench.table[-1])
        if passed is False:
            failed.append(part)
        print(f"[{part}: {time.perf_counter() - began:.1f} s]", flush=True)
    bench.close()
    if config.trace is not None:
        write_trace(Path(config.trace), bench.timelines)
        print(f"trace of {len(bench.timelines)} runs: {config.trace}; open it at ui.perfetto.dev")
    print(f"{name}, {device_name(device)}, torch {torch.__version__}, overlap {config.overlap}")
    print("\n".join(bench.table))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def _check_writable(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"trace is {str(path)!r}, which cannot be written: {error.strerror}.") from None


def _child(model: str | Path | None, load: str, shape: str | None, options: Mapping[str, Any]) -> list[str]:
    """The command that starts another process with the same model and options."""
    given: dict[str, Any] = {"model": model, "load": load, "shape": shape, **options}
    command = [sys.executable, "-m", "paceline.bench.offline"]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, str | int | float | Path) and name != "record":
            command.append(f"--{flag}={value}")
    return command


def _parser() -> argparse.ArgumentParser:
    """Options as `paceline bench offline` has them, out of the same declarations, without its packages."""
    parts = "; ".join(f"{name}: {what}" for name, what in OFFLINE_PARTS.items())
    parser = argparse.ArgumentParser(prog="paceline.bench.offline", description="Offline generation, timed.")
    parser.add_argument("parts", nargs="*", default=["nano", "sweep"], help=f"what to run, in order. {parts}")
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--load", choices=("weights", "random"))
    parser.add_argument("--shape", help="of random weights; qwen3-0.6b if neither it nor a model is given")
    seen = set()
    for config in _CONFIGS:
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            kinds = typing.get_args(hints[item.name])
            kind = kinds[0] if isinstance(hints[item.name], types.UnionType) else hints[item.name]
            if item.name in seen or kind not in (str, int, float, bool):
                continue
            seen.add(item.name)
            more: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
            if item.metadata["choices"]:
                more["choices"] = item.metadata["choices"]
            text = item.metadata["help"].replace("%", "%%")
            parser.add_argument(f"--{item.name.replace('_', '-')}", default=None, help=text, **more)
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
