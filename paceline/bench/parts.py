"""The timed parts of `paceline bench offline`: one function each, by name in `PARTS`."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.runner import BenchRun, BenchRunner, model_of
from paceline.bench.speculation import run_speculate
from paceline.bench.workloads import (
    CHAT_TURNS,
    SWEEP_OUTPUTS,
    OfflineWorkload,
    TimedRequest,
    chats,
    gsp_offline,
    long_prompts,
    nano,
    prefill_overload,
    sampled,
    shared_sweep,
    short_texts,
    small_behind_large,
    structured,
    sweep,
    with_logprobs,
    zipf,
)
from paceline.checks.harness import TimedSink, greedy, wait_for
from paceline.config import ConfigError
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.job import Job
from paceline.engine.timeline import Timeline
from paceline.llm import LLM
from paceline.request import POOLING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

MakeWorkload = Callable[[int], OfflineWorkload]


def run_nano(runner: BenchRunner) -> None:
    _throughput(runner, "nano", nano())


def run_gsp(runner: BenchRunner) -> None:
    _throughput(runner, "gsp", gsp_offline())


def run_zipf(runner: BenchRunner) -> None:
    _throughput(runner, "zipf", zipf())


def run_prompts(runner: BenchRunner) -> None:
    _throughput(runner, "prompts", long_prompts())


def _throughput(runner: BenchRunner, name: str, work: OfflineWorkload) -> None:
    best: dict[str, BenchRun] = {}
    shift = 0
    for _ in range(runner.config.repeats):
        for mode in runner.config.overlap_modes:  # alternating, so that both see the same machine
            run = runner.timed(work.shifted(shift), f"{name} {shift}", mode)
            print(f"{name} run {shift}, overlap {mode}: {run.seconds:.3f} s; {run.metrics}", flush=True)
            shift += 1
            if mode not in best or run.seconds < best[mode].seconds:
                best[mode] = run
    for mode, run in best.items():
        print(f"{name}, overlap {mode}: {run.metrics.against(runner.roofline)}")
        if isinstance(device := runner.llm.engine.executor.local, CudaExecutor):
            _print_buckets(run.timeline, device)
        runner.report(name, run, mode)
        runner.table.append(
            f"{name:10} overlap {mode:4} {run.seconds:8.3f} s {run.num_tokens / run.seconds:10.0f} tok/s  "
            f"{run.metrics.summary}"
        )


def _print_buckets(timeline: Timeline, device: CudaExecutor) -> None:
    """Device time by CUDA graph size."""
    by_bucket: dict[int, list[float]] = {}
    for one in timeline.passes:
        bucket = 0 if one.num_prompts else next(size for size in device.graphs.sizes if size >= one.num_decodes)
        by_bucket.setdefault(bucket, []).append(one.device_s)
    for bucket, times in sorted(by_bucket.items()):
        what, each = f"decode, graph {bucket}" if bucket else "prefill, mixed", sum(times) / len(times)
        print(f"  {what:18} {len(times):5} passes {sum(times) * 1e3:9.1f} ms in total {each * 1e3:8.3f} ms each")


def run_chats(runner: BenchRunner) -> None:
    """A turn starts when all conversations have finished the one before; by then others may have taken their memory."""
    for mode in runner.config.overlap_modes:
        for repeat in range(runner.config.repeats):
            _chats(runner, f"chats {repeat}", 7 * repeat + (mode == "off"), mode)


def _chats(runner: BenchRunner, name: str, shift: int, overlap: str) -> None:
    llm, rng = runner.llm, random.Random(shift)
    device = llm.engine.executor.local if isinstance(llm.engine.executor.local, CudaExecutor) else None
    work = runner.fitted(chats().shifted(shift))
    turns: list[BenchRun] = []
    link_bytes, link_s, found = 0, 0.0, Counter[str]()
    with runner.recorded_run(llm, name):  # all turns: the later ones read what the first ones cached
        for _ in range(CHAT_TURNS):
            turns.append(run := runner.timed_as_is(llm, work, overlap))
            for prompt, output in zip(work.prompts, run.outputs, strict=True):
                found["prompt"] += len(prompt)
                found["cached"] += output.num_cached_tokens
                found["fetched"] += output.num_fetched_tokens
            if device is not None:
                link_bytes += device.stats.fetched_pages * sum(one[:, 0].nbytes for one in device.kv)
                link_s += device.stats.fetch_s
            question = max(1, round(400 * runner.scale))
            prompts = [
                [*prompt, *output.token_ids, *(rng.choice(prompt) for _ in range(question))]
                for prompt, output in zip(work.prompts, run.outputs, strict=True)
            ]
            work = work._replace(prompts=prompts)
    seconds, tokens = sum(run.seconds for run in turns), sum(run.num_tokens for run in turns)
    hits, computed = found["cached"] - found["fetched"], found["prompt"] - found["cached"]
    rate = round(link_bytes / link_s / 1e9, 2) if link_s else None
    runner.print_result({
        "workload": "chats", "shape": runner.name, "seconds": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "gpu_idle_share": round(sum(run.metrics.idle_share * run.seconds for run in turns) / seconds, 5),
        "host_us_per_step": round(sum(run.metrics.host_us_per_step * run.seconds for run in turns) / seconds, 1),
        "hit_rate": round(hits / found["prompt"], 4), "startup_s": runner.rounded_startup_s, "overlap": overlap,
        "fetch_rate": round(found["fetched"] / found["prompt"], 4), "fetched_tokens": found["fetched"],
        "computed_tokens": computed, "fetch_gb_s": rate,
        "num_host_pages": llm.engine.scheduler.config.num_host_pages,
    })  # fmt: skip
    at = f" at {rate} GB/s" if rate else ""
    runner.table.append(
        f"{name:10} overlap {overlap:4} {seconds:8.3f} s; of {found['prompt']:,} prompt tokens {hits:,} cached, "
        f"{found['fetched']:,} fetched{at}, {computed:,} computed"
    )
    print(runner.table[-1], flush=True)


def run_sampling(runner: BenchRunner) -> None:
    _compare(runner, "nano-sampled", lambda by: nano().shifted(by), lambda by: sampled(nano().shifted(by)))


def run_grammar(runner: BenchRunner) -> None:
    _compare(runner, "grammar-64", lambda by: sweep(64, 256, 500 + by), lambda by: structured(64, 256, 500 + by))


def run_logprobs(runner: BenchRunner) -> None:
    for batch in (64, 256):
        _logprobs(runner, partial(sweep, batch, 256), f"logprobs-{batch}")


def _logprobs(runner: BenchRunner, plain: MakeWorkload, name: str) -> None:
    _compare(runner, name, plain, lambda by: with_logprobs(plain(by)))


def run_embed(runner: BenchRunner) -> None:
    for seed, pooling in enumerate(POOLING):
        texts = short_texts(seed=seed)  # others for each kind: the prefix cache would serve those of the first
        _compare(runner, f"embed-{pooling}", texts.shifted, texts._replace(pooling=pooling).shifted)


def _compare(runner: BenchRunner, name: str, plain: MakeWorkload, full: MakeWorkload) -> None:
    """The best run of each, alternating, after a first one that compiles and captures what each needs."""
    mode = runner.config.overlap_modes[0]
    first = runner.timed(full(9_000), f"{name}, first", mode)
    print(f"{name}: the first run took {first.seconds:.2f} s", flush=True)
    runner.timed(plain(9_001), f"{name} plain, first", mode)
    fast: BenchRun | None = None
    slow: BenchRun | None = None
    for repeat in range(2 * runner.config.repeats):
        runs = [runner.timed(plain(2 * repeat), f"{name} plain", mode), runner.timed(full(2 * repeat + 1), name, mode)]
        fast = runs[0] if fast is None or runs[0].seconds < fast.seconds else fast
        slow = runs[1] if slow is None or runs[1].seconds < slow.seconds else slow
        print(f"{name} run {repeat}: best so far {slow.seconds:.3f} s, plain {fast.seconds:.3f} s", flush=True)
    assert fast is not None and slow is not None, "there is at least one repeat"
    ratio = round(slow.seconds / fast.seconds, 4)  # the same digits in the table and in the JSON line
    rate = round(slow.num_requests / slow.seconds, 1)
    plain_seconds = round(fast.seconds, 4)
    runner.report(name, slow, mode, ratio=ratio, plain_seconds=plain_seconds, requests_per_s=rate)
    runner.table.append(
        f"{name:12} {slow.seconds:8.3f} s, plain {fast.seconds:.3f} s: {ratio:.3f}x; {slow.metrics.summary}; "
        f"plain {fast.metrics.summary}"
    )


def run_sweep(runner: BenchRunner) -> None:
    _sweep(runner, "sweep", sweep)


def run_shared_sweep(runner: BenchRunner) -> None:
    _sweep(runner, "shared-sweep", shared_sweep)


def _sweep(runner: BenchRunner, name: str, make: Callable[[int, int, int], OfflineWorkload]) -> None:
    """The time per token is the difference between a long and a short run, so that prefill does not count."""
    for batch in runner.config.batch_sizes:
        for mode in runner.config.overlap_modes:
            # The best of each: subtracting a slow short run would make the time per token too small.
            short, long = (_best_sweep(runner, f"{name} {batch}", make, batch, count, mode) for count in SWEEP_OUTPUTS)
            more = (long.num_tokens - short.num_tokens) / long.num_requests  # 256 at full scale
            each = (long.seconds - short.seconds) / more
            runner.report(f"{name}-{batch}", long, mode, ms_per_token=round(each * 1e3, 4))
            runner.table.append(
                f"{name} b{batch:<4} overlap {mode:4} {each * 1e3:7.3f} ms/token  {long.metrics.summary}; "
                f"{long.metrics.against(runner.roofline)}"
            )


def _best_sweep(
    runner: BenchRunner,
    name: str,
    make: Callable[[int, int, int], OfflineWorkload],
    batch: int,
    count: int,
    overlap: str,
) -> BenchRun:
    seed = 1000 * batch + 500 * (overlap == "off") + count
    length = " short" if count == SWEEP_OUTPUTS[0] else ""
    runs = [runner.timed(make(batch, count, seed + i), f"{name} {i}{length}", overlap) for i in range(2)]
    return min(runs, key=lambda run: run.seconds)


def run_prefill_overload(runner: BenchRunner) -> None:
    _served(runner, "prefill-overload", prefill_overload)


def run_small_behind_large(runner: BenchRunner) -> None:
    _served(runner, "small-behind-large", small_behind_large)


def _served(runner: BenchRunner, name: str, make: Callable[[float], list[TimedRequest]]) -> None:
    """Requests that arrive over time, in an engine with the defaults of a server: ITL, and TTFT by kind of request.

    Every run has other tokens. The first one compiles and loads kernels; the others count.
    """
    work = make(runner.scale)
    runner.close()
    with runner.make_online() as llm:
        for repeat in range(1 + runner.config.repeats):
            seconds, sinks, ttft = _serve(llm, work, seed=repeat)
            itl = [after - before for sink in sinks for before, after in itertools.pairwise(sink.times)]
            found = {f"itl_{what}_ms": value for what, value in _percentiles_ms(itl).items()}
            for kind, values in ttft.items():
                found |= {f"ttft_{kind}_{what}_ms": value for what, value in _percentiles_ms(values).items()}
            if repeat:
                runner.print_result({
                    "workload": name, "shape": runner.name, "seconds": round(seconds, 4),
                    "tokens_per_s": round(sum(len(sink.tokens) for sink in sinks) / seconds, 1),
                    "gpu_idle_share": None, "host_us_per_step": None, "hit_rate": None,
                    "startup_s": runner.rounded_startup_s, **found,
                    "itl_target": str(llm.engine.scheduler.config.itl_target),
                })  # fmt: skip
            figures = ", ".join(f"{what} {value:g}" for what, value in found.items())
            runner.table.append(f"{name}, {f'run {repeat}' if repeat else 'first run'}: {seconds:.2f} s; {figures}")
            print(runner.table[-1], flush=True)


def _serve(
    llm: LLM, work: Sequence[TimedRequest], *, seed: int
) -> tuple[float, list[TimedSink], dict[str, list[float]]]:
    """Sends the requests when they are due. Returns the seconds until the last token, and TTFT by kind of request."""
    engine, rng = llm.engine, np.random.default_rng(seed)
    vocab_size = model_of(llm).spec.vocab_size
    # Made before the run: meanwhile this thread would hold the GIL for as long as several passes take.
    jobs = [
        Job(rng.integers(0, vocab_size, one.num_prompt_tokens, np.int32), greedy([one.num_output_tokens])[0])
        for one in work
    ]
    sinks = [TimedSink() for _ in work]
    sent = []
    began = time.perf_counter()
    for one, job, sink in zip(work, jobs, sinks, strict=True):
        time.sleep(max(0.0, began + one.at - time.perf_counter()))
        sent.append(time.perf_counter())
        engine.submit(job, sink)
    wait_for(engine, lambda: all(sink.ended.is_set() for sink in sinks))
    seconds = time.perf_counter() - began
    ttft: dict[str, list[float]] = {}
    for one, sink, at in zip(work, sinks, sent, strict=True):
        if sink.refused is not None:
            raise sink.refused
        ttft.setdefault(one.kind, []).append(sink.times[0] - at)
    return seconds, sinks, ttft


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds or [0.0]) * 1e3
    found = {"p50": np.percentile(values, 50), "p99": np.percentile(values, 99), "max": values.max()}
    return {name: round(float(value), 1) for name, value in found.items()}


def run_profile(runner: BenchRunner) -> None:
    """GPU time of decode batches by kernel, with 256 rows and with 16."""
    from torch.profiler import ProfilerActivity, profile

    if runner.device.type != "cuda":
        raise ConfigError("part profile needs a GPU, and this run is on a CPU: remove it.")
    for batch in (256, 16):
        llm = runner.llm
        work = runner.fitted(sweep(batch, 24, 77))
        llm.generate(work.prompts, work.params)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            llm.generate(work.prompts, work.params)  # a cache hit: nearly all are decode batches
        print(f"profile, {batch} rows, 24 tokens")
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=40))
        print(f"inside decode batches of {batch} rows no kernel runs for {_gap_share(found.events()):.2%} of the time")


def _gap_share(events: Iterable[FunctionEvent]) -> float:
    """The share of the last five decode batches of a profile during which no kernel ran, from the first kernel of a
    batch to its last. Idle time between batches does not count."""
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


PARTS: dict[str, Callable[[BenchRunner], None]] = {
    "nano": run_nano,
    "gsp": run_gsp,
    "zipf": run_zipf,
    "prompts": run_prompts,
    "chats": run_chats,
    "sweep": run_sweep,
    "shared-sweep": run_shared_sweep,
    "sampling": run_sampling,
    "logprobs": run_logprobs,
    "grammar": run_grammar,
    "embed": run_embed,
    "speculate": run_speculate,
    "prefill-overload": run_prefill_overload,
    "small-behind-large": run_small_behind_large,
    "profile": run_profile,
}
