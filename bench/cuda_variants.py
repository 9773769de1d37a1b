"""nano and sweep under different settings of the CUDA device, in one process: `python bench/cuda_variants.py`.

Each variant is a whole engine with the same random weights. Shows what a choice is worth in a real run, where a kernel
alone may say something else.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.bench.offline import describe, device_of
from paceline.bench.workloads import Offline, nano, sweep
from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda_build import build_cuda
from paceline.engine.engine import Engine
from paceline.kernels.decode_attention import DecodeTuning, decode_attention_tuning
from paceline.kernels.decode_units import Chunks
from paceline.kernels.linear import decode_tuning
from paceline.llm import LLM
from paceline.model.registry import shape
from paceline.model.weights import random_decoder
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer

SHAPE, TOKENS = "qwen3-0.6b", 1_000_000
TWICE = ("as shipped", "16,384 tokens a pass")  # the first prompts of a process wait for cuBLAS to load its kernels


def narrow(rows: int, group: int, tile: int, short: bool) -> DecodeTuning:
    """32 keys and 2 warps from 33 rows on."""
    found = decode_attention_tuning(rows, group, tile)
    return replace(found, block_n=32, num_warps=2, num_stages=4) if rows > 32 else found


def more_registers(rows: int, group: int, tile: int, short: bool) -> DecodeTuning:
    return replace(decode_attention_tuning(rows, group, tile), max_registers=168)


VARIANTS: dict[str, dict[str, Any]] = {
    "as shipped": {"timelines": (256, 100)},
    "16,384 tokens a pass": {"step_tokens": 16_384},
    "chunks up to 1,024": {"chunks": lambda rows: Chunks()},
    "chunks up to 2,048, 32 units": {"chunks": lambda rows: Chunks(64, 2048, 32)},
    "32 keys, 2 warps": {"attention_tuning": narrow},
    "168 registers": {"attention_tuning": more_registers},
    "fused up to 64 rows": {"tuning": lambda m, n, g: decode_tuning(m, n, g) if m <= 64 else None},
}


def run(name: str, step_tokens: int = 8192, timelines: Sequence[int] = (), **choices: Any) -> None:
    spec = shape(SHAPE)
    config = SchedulerConfig(
        context_tokens=spec.context_tokens, max_wait=math.inf, num_pages=TOKENS // 16, max_batch_tokens=step_tokens,
        max_prefill_tokens=step_tokens,
    )  # fmt: skip
    decoder = random_decoder(spec, dtype="bfloat16", device="cuda", max_positions=spec.context_tokens)
    device, config = build_cuda(decoder, EngineConfig(), config, None, **choices)
    device.warm_up()
    tokenizer = synthetic_tokenizer(spec.vocab_size)
    with LLM.from_engine(Engine(Scheduler(config), device, tokenizer, vocab_size=spec.vocab_size)) as llm:

        def timed(work: Offline) -> float:
            device_of(llm).reset_stats()
            began = time.perf_counter()
            llm.generate(work.prompts, work.params)
            return time.perf_counter() - began

        work = nano().shifted(40_000)
        llm.generate(work.prompts, [replace(each, max_tokens=4) for each in work.params])
        seconds = [timed(nano().shifted(repeat)) for repeat in range(2 if name in TWICE else 1)]
        stats = device.stats
        buckets = "  ".join(f"{b}: {of.device_s / of.passes * 1e3:.2f}" for b, of in sorted(stats.by_bucket.items()))
        print(f"{name:28} nano {min(seconds):.3f} s (other {max(seconds):.3f}); {describe(llm, seconds[-1], stats)}")
        print(f"    ms a pass: {buckets}")
        each = []
        for batch in (64, 256):
            times = [timed(sweep(batch, count, count)) for count in (16, 272)]
            each.append(f"b{batch} {(times[1] - times[0]) / 256 * 1e3:.3f}")
        print(f"    sweep ms: {'  '.join(each)}", flush=True)
        if len(timelines) > 1:
            prompts(llm)
        for batch in timelines:
            timeline(llm, batch)


def timeline(llm: LLM, batch: int) -> None:
    """The kernels of about two layers in the middle of a decode pass: when, how long, on which stream."""
    from torch.profiler import ProfilerActivity, profile

    work = nano().shifted(20_000)
    params = [replace(each, max_tokens=12) for each in work.params[:batch]]
    llm.generate(work.prompts[:batch], params)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(work.prompts[:batch], params)  # a cache hit: nearly all passes decode
    path = "/tmp/timeline.json"
    found.export_chrome_trace(path)
    events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("cat") == "kernel"]
    events.sort(key=lambda e: e["ts"])
    firsts = [i for i, e in enumerate(events) if "gather_tokens" in e["name"]]
    begin, end = firsts[-3], firsts[-2]
    pas = events[begin:end]
    print(f"    timeline, {batch} rows: {len(pas)} kernels, {pas[-1]['ts'] + pas[-1]['dur'] - pas[0]['ts']:.0f} us")
    by_name: dict[str, list[float]] = {}
    for e in pas:
        by_name.setdefault(e["name"][:60], []).append(e["dur"])
    for name, durs in sorted(by_name.items(), key=lambda x: -sum(x[1])):
        print(f"      {sum(durs):8.1f} us in {len(durs):3}  {name}")
    middle = len(pas) // 2
    for e in pas[middle : middle + 24]:
        print(f"      {e['ts'] - pas[middle]['ts']:8.1f} {e['dur']:7.1f} s{e['args'].get('stream')} {e['name'][:50]}")


def prompts(llm: LLM) -> None:
    """Which kernels the passes with prompts go to, all of nano's."""
    from torch.profiler import ProfilerActivity, profile

    work = nano().shifted(21_000)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(work.prompts, [replace(each, max_tokens=100) for each in work.params])
    found.export_chrome_trace("/tmp/timeline.json")
    events = [e for e in json.loads(Path("/tmp/timeline.json").read_text())["traceEvents"] if e.get("cat") == "kernel"]
    last = max(e["ts"] for e in events if "extend" in e["name"])
    by_name: dict[str, list[float]] = {}
    for e in events:
        if e["ts"] <= last:
            by_name.setdefault(e["name"][:60], []).append(e["dur"])
    print(f"    prompts: {last - min(e['ts'] for e in events):.0f} us")
    for name, durs in sorted(by_name.items(), key=lambda x: -sum(x[1]))[:14]:
        print(f"      {sum(durs):8.1f} us in {len(durs):4}  {name}")


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or VARIANTS:
        began = time.perf_counter()
        try:
            run(name, **VARIANTS[name])
        except Exception:  # the other variants still have something to say
            traceback.print_exc()
            failed = 1
        gc.collect()
        torch.cuda.empty_cache()
        print(f"    [{time.perf_counter() - began:.1f} s]", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
