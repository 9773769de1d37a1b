"""What is a tuning choice of the CUDA executor worth in a whole run?

    SHAPE=qwen3-0.6b TOKENS=1000000 python benchmarks/executor_variants.py [first letters of a variant ...]

Runs `nano`, `sweep`, `gsp` and `zipf` with one engine per variant, all with the same random weights. Prints seconds,
milliseconds per pass and the time of each kernel in a decode batch. A kernel measured alone may rank differently.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.bench.metrics import Roofline, RunMetrics, measure_roofline, run_metrics
from paceline.bench.workloads import OfflineWorkload, gsp_offline, nano, sweep, zipf
from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.attention import AttentionChoices
from paceline.engine.cuda.build import build_cuda
from paceline.engine.cuda.sharing import ShareRule
from paceline.engine.engine import Engine
from paceline.engine.timeline import Timeline
from paceline.kernels.decode_attention import DecodeTuning, decode_attention_tuning
from paceline.kernels.decode_units import Chunks
from paceline.kernels.linear import decode_tuning
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.model.weights import random_decoder
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer

SHAPE, TOKENS = os.environ.get("SHAPE", "qwen3-0.6b"), int(os.environ.get("TOKENS", "1000000"))
TWICE = ("as shipped", "16,384 tokens per pass")  # the first prefill of a process waits for cuBLAS to load its kernels


Tunings = tuple[DecodeTuning, DecodeTuning]


def tall(rows: int, group: int, shared_block_m: int, short_contexts: bool) -> Tunings:
    """Tiles of 64 keys, with one tile in flight."""
    own, shared = decode_attention_tuning(rows, group, shared_block_m, short_contexts)
    return replace(own, block_n=64, num_warps=4, num_stages=2, max_registers=128), shared


def shared_tuning(**changes: Any) -> AttentionChoices:
    """Another tuning of shared units."""

    def choose(rows: int, group: int, shared_block_m: int, short_contexts: bool) -> Tunings:
        own, shared = decode_attention_tuning(rows, group, shared_block_m, short_contexts)
        return own, replace(shared, **changes)

    return AttentionChoices(tuning=choose)


GSP: dict[str, dict[str, Any]] = {
    "gsp as shipped": {},
    "gsp S 2048": {"share_rule": partial(ShareRule, target_units=16)},
    "gsp S 512": {"share_rule": partial(ShareRule, target_units=64)},
    "gsp shared 32 keys 4 warps 3 stages": {
        "attention": shared_tuning(block_n=32, num_stages=3, max_registers=128),
    },
    "gsp shared 64 keys 4 warps 3 stages": {"attention": shared_tuning(num_stages=3)},
    "gsp shared 64 keys 8 warps": {"attention": shared_tuning(num_warps=8, max_registers=128)},
}
ZIPF: dict[str, dict[str, Any]] = {
    "zipf as shipped": {},
    "zipf segments of 16": {"share_rule": partial(ShareRule, align=16)},
    "zipf S 512": {"share_rule": partial(ShareRule, chunks=(512, 256))},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {},
    "kernels alone": {"timelines": (256, 100, 1)},
    "as shipped": {"timelines": (256, 100)},
    "16,384 tokens per pass": {"step_tokens": 16_384},
    "chunks up to 1,024": {"attention": AttentionChoices(chunks=lambda rows: Chunks())},
    "chunks up to 2,048, 32 units": {"attention": AttentionChoices(chunks=lambda rows: Chunks(64, 2048, 32))},
    "64 keys": {"attention": AttentionChoices(tuning=tall)},
    "fused up to 64 rows": {"tuning": lambda m, n, g: decode_tuning(m, n, g) if m <= 64 else None},
    **GSP,
    **ZIPF,
}


def run(name: str, step_tokens: int = 8192, timelines: Sequence[int] = (), **choices: Any) -> None:
    spec = shape(SHAPE)
    config = SchedulerConfig(
        context_tokens=spec.context_tokens,
        max_wait=math.inf,
        num_pages=TOKENS // 16,
        max_batch_tokens=step_tokens,
        max_prefill_tokens=step_tokens,
    )
    decoder = random_decoder(spec, dtype="bfloat16", device="cuda", max_positions=spec.context_tokens)
    device, config = build_cuda(decoder, EngineConfig(), config, None, **choices)
    if name not in GSP | ZIPF and name not in ("kernels alone", "attention"):
        device.warm_up()
    tokenizer = synthetic_tokenizer(spec.vocab_size)
    with LLM.from_engine(Engine(Scheduler(config), device, tokenizer, vocab_size=spec.vocab_size)) as llm:
        if name in GSP | ZIPF:
            if name in GSP:
                timeline(llm, name, groups())
            found = timed(llm, gsp_offline() if name in GSP else zipf())
            print(f"{name:28} {found.seconds:.3f} s; {found}; {found.against(roofline())}")
            return

        if name == "attention":
            attention_tunings(llm)
            return
        if name == "kernels alone":
            for batch in timelines:
                timeline(llm, f"{batch} rows", some(nano().shifted(20_000), batch))
            return

        work = nano().shifted(40_000)
        llm.generate(work.prompts, [replace(each, max_tokens=4) for each in work.params])
        runs = [timed(llm, nano().shifted(repeat)) for repeat in range(2 if name in TWICE else 1)]
        seconds = [run.seconds for run in runs]
        stats = device.stats
        buckets = "  ".join(f"{b}: {of.device_s / of.passes * 1e3:.2f}" for b, of in sorted(stats.by_bucket.items()))
        print(
            f"{name:28} nano {min(seconds):.3f} s (other {max(seconds):.3f}); {runs[-1]}; "
            f"{runs[-1].against(roofline())}"
        )
        print(f"    ms per pass: {buckets}")
        each = []
        for batch in (64, 256):
            times = [timed(llm, sweep(batch, count, count)).seconds for count in (16, 272)]
            each.append(f"b{batch} {(times[1] - times[0]) / 256 * 1e3:.3f}")
        print(f"    sweep ms: {'  '.join(each)}", flush=True)
        if len(timelines) > 1:
            prompts(llm)
        for batch in timelines:
            timeline(llm, f"{batch} rows", some(nano().shifted(20_000), batch))


@cache
def roofline() -> Roofline:
    return measure_roofline(torch.device("cuda"), torch.bfloat16)


def timed(llm: LLM, work: OfflineWorkload) -> RunMetrics:
    engine, seen = llm.engine, Timeline()
    device: Any = engine.executor
    device.reset_stats()
    engine.call(lambda _: setattr(engine.loop, "trace", seen)).result()
    began = time.perf_counter()
    llm.generate(work.prompts, work.params)
    seconds = time.perf_counter() - began
    engine.call(lambda _: setattr(engine.loop, "trace", None)).result()
    return run_metrics(seen, seconds, device.model.spec, device.model.dtype.itemsize, device.stats.saved_tokens)


def timeline(llm: LLM, name: str, work: OfflineWorkload, show: int = 12) -> None:
    """The time of each kernel in a decode batch, and the kernels of a layer or two in its middle."""
    from torch.profiler import ProfilerActivity, profile

    params = [replace(each, max_tokens=12) for each in work.params]
    llm.generate(work.prompts, params)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(work.prompts, params)  # cache hits: nearly all passes are decode batches
    events = kernels_of(found)
    firsts = [i for i, e in enumerate(events) if "apply_diff" in e["name"]]
    one = events[firsts[-3] : firsts[-2]]
    print(f"    {name}: {len(one)} kernels, {one[-1]['ts'] + one[-1]['dur'] - one[0]['ts']:.0f} us")
    by_name: dict[str, list[float]] = {}
    for e in one:
        by_name.setdefault(f"s{e['args'].get('stream')} {e['name'][:60]}", []).append(e["dur"])
    for what, durs in sorted(by_name.items(), key=lambda x: -sum(x[1]))[:show]:
        print(f"      {sum(durs):8.1f} us in {len(durs):3}  {what}")
    middle = len(one) // 2
    for e in one[middle : middle + show]:
        print(f"      {e['ts'] - one[middle]['ts']:8.1f} {e['dur']:7.1f} s{e['args'].get('stream')} {e['name'][:50]}")


def kernels_of(profile: Any) -> list[dict[str, Any]]:
    """Kernels in the order they began, with times in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: float(event["ts"]))


def attention_tunings(llm: LLM) -> None:
    """Microseconds of decode attention per layer by tuning, in whole passes with the contexts of nano."""
    from torch.profiler import ProfilerActivity, profile

    device: Any = llm.engine.executor
    layers = len(device.model.layers)
    work = nano().shifted(20_000)
    llm.generate(work.prompts, [replace(each, max_tokens=2) for each in work.params])
    batches, kept = (256, 100, 40), []
    print(f"    {'tile keys warps stages registers':36}" + "".join(f"{batch:>10}" for batch in batches))
    for given in TUNINGS:

        def choose(rows: int, group: int, shared_block_m: int, short_contexts: bool, given: Any = given) -> Tunings:
            own, shared = decode_attention_tuning(rows, group, shared_block_m)
            names = ("block_m", "block_n", "num_warps", "num_stages", "max_registers")
            return (replace(own, **dict(zip(names, given, strict=True))) if given else own), shared

        device.attention._tuning = choose
        kept.append(device.graphs._graphs)  # keeps the graphs' memory pool alive
        device.graphs._graphs = {}
        each = []
        for batch in batches:
            params = [replace(one, max_tokens=8) for one in work.params[:batch]]
            llm.generate(work.prompts[:batch], params)
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                llm.generate(work.prompts[:batch], params)
            times = [e["dur"] for e in kernels_of(found) if "decode_attention" in e["name"]]
            each.append(sum(times[-3 * layers : -layers]) / layers / 2)
        print(f"    {given or 'as shipped'!s:36}" + "".join(f"{one:10.1f}" for one in each), flush=True)


TUNINGS: list[tuple[int, ...]] = [
    (),
    (16, 32, 4, 3, 128),
    (16, 32, 2, 3, 168),
    (16, 64, 4, 2, 128),
    (16, 64, 2, 3, 255),
    (16, 128, 4, 2, 168),
]


def some(work: OfflineWorkload, count: int) -> OfflineWorkload:
    return OfflineWorkload(work.prompts[:count], work.params[:count])


def groups(count: int = 16) -> OfflineWorkload:
    """The requests of `count` groups of gsp."""
    work = gsp_offline()
    by_prefix: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(work.prompts):
        by_prefix.setdefault(tuple(prompt[:64]), []).append(index)
    chosen = [index for members in list(by_prefix.values())[:count] for index in members]
    return OfflineWorkload([work.prompts[i] for i in chosen], [work.params[i] for i in chosen])


def prompts(llm: LLM) -> None:
    """The time of each kernel in all prefill and mixed batches of nano."""
    from torch.profiler import ProfilerActivity, profile

    work = nano().shifted(21_000)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(work.prompts, [replace(each, max_tokens=100) for each in work.params])
    events = kernels_of(found)
    last = max(e["ts"] for e in events if "extend" in e["name"])
    by_name: dict[str, list[float]] = {}
    for e in events:
        if e["ts"] <= last:
            by_name.setdefault(e["name"][:60], []).append(e["dur"])
    print(f"    prefill: {last - min(e['ts'] for e in events):.0f} us")
    for name, durs in sorted(by_name.items(), key=lambda x: -sum(x[1]))[:14]:
        print(f"      {sum(durs):8.1f} us in {len(durs):4}  {name}")


def main() -> int:
    failed = 0
    print(roofline())  # now, while memory is free
    given = sys.argv[1:]
    for name in [name for name in VARIANTS if not given or name.startswith(tuple(given))]:
        began = time.perf_counter()
        try:
            run(name, **VARIANTS[name])
        except Exception:  # continue with the other variants
            traceback.print_exc()
            failed = 1
        gc.collect()
        torch.cuda.empty_cache()
        print(f"    [{time.perf_counter() - began:.1f} s]", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
