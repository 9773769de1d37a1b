"""Runs workloads on a loaded model, times them and prints the results of `paceline bench offline`."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from paceline.bench.first_token import process_age_s
from paceline.bench.metrics import Roofline, RunMetrics, measure_roofline, run_metrics
from paceline.bench.workloads import OfflineWorkload, nano, num_part_tokens, sweep
from paceline.config import OfflineConfig
from paceline.engine.cpu.executor import CpuExecutor, CpuModelRunner
from paceline.engine.cpu.quantized_model import DecoderModel
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.model import CudaModel
from paceline.engine.timeline import Timeline
from paceline.llm import LLM, RequestOutput
from paceline.request import SamplingParams

CPU_SECONDS = 90.0  # how long the timed runs may take on a CPU when no scale is given; loading comes on top


class BenchRun(NamedTuple):
    """One timed generate(), or embed(), which has no outputs."""

    metrics: RunMetrics
    timeline: Timeline
    num_requests: int
    num_tokens: int
    hit_rate: float
    outputs: list[RequestOutput]

    @property
    def seconds(self) -> float:
        return self.metrics.seconds


class BenchRunner:
    """The model under test, and the results so far."""

    def __init__(
        self,
        config: OfflineConfig,
        name: str,
        make: Callable[..., LLM],
        make_online: Callable[[], LLM],
        device: torch.device,
        dtype: torch.dtype,
        parts: Sequence[str] = (),
        *,
        has_draft_model: bool = False,
    ) -> None:
        """`make(**options)` loads the model called `name`, `make_online()` with the defaults of a server; `parts` are
        all that will run, by which a scale is chosen."""
        self.has_draft_model = has_draft_model
        self.config, self.name, self.make, self.make_online = config, name, make, make_online
        self.device, self.dtype = device, dtype
        self.table: list[str] = []
        self.timelines: list[Timeline] = []
        self.startup_s: float | None = None
        self._parts = parts
        self._scale = 1.0 if config.scale is None and device.type == "cuda" else config.scale
        self._llm: LLM | None = None
        self._roofline: Roofline | None = None

    @property
    def roofline(self) -> Roofline:
        if self._roofline is None:
            self._roofline = measure_roofline(self.device, self.dtype)
            print(self._roofline, flush=True)
        return self._roofline

    @property
    def scale(self) -> float:
        """The fraction of each workload that runs: `config.scale`, or on a CPU one that ends within two minutes."""
        if self._scale is None:
            self._scale = self._choose_scale(self.llm)
        return self._scale

    @property
    def llm(self) -> LLM:
        """The model, loaded on first use; from then on the startup time of the process is known."""
        if self._llm is None:
            _ = self.roofline  # measured before the model takes the memory
            self._llm = self.load()
            # Warm-up: prompts of every length and every batch size there will be, with short outputs.
            work = self.fitted(nano().shifted(40_000))
            self._llm.generate(work.prompts, [replace(each, max_tokens=4) for each in work.params])
        return self._llm

    def load_cold(self) -> LLM:
        """The model as it is when it is ready, before its first token: `llm` is this one from now on."""
        self._llm = self.make()
        self.startup_s = process_age_s()
        return self._llm

    def load(self) -> LLM:
        """Loads the model and generates one token."""
        age, began = process_age_s(), time.perf_counter()
        llm = self.make()
        loaded = time.perf_counter()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        self.startup_s = process_age_s()
        pages = llm.engine.scheduler.config.num_pages
        print(
            f"process {age:.1f} s old, then loaded in {loaded - began:.1f} s, first token "
            f"{time.perf_counter() - loaded:.2f} s later, {pages} pages",
            flush=True,
        )
        return llm

    def _choose_scale(self, llm: LLM) -> float:
        """By the speed of a short run: 8 prompts of 32 tokens, 8 output tokens each."""
        sample = sweep(8, 8, seed=99).within(model_of(llm).spec.vocab_size)
        sample = sample._replace(prompts=[prompt[:32] for prompt in sample.prompts])
        began = time.perf_counter()
        llm.generate(sample.prompts, sample.params)
        tokens_per_s = sample.num_tokens / (time.perf_counter() - began)
        total = nano().num_tokens // 2 + sum(num_part_tokens(part, self.config) for part in self._parts)  # with warm-up
        # Both the number of requests and their lengths shrink, so the number of tokens goes with the square.
        exact = min(1.0, math.sqrt(CPU_SECONDS * tokens_per_s / total))
        scale = max(0.001, math.floor(exact * 1000) / 1000)
        print(
            f"scale {scale:g}: chosen to take about two minutes on this CPU; --scale 1 runs the full workload",
            flush=True,
        )
        return scale

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
        # An engine and its thread refer to each other, also one that a part made for itself; their memory is needed.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed(self, work: OfflineWorkload, name: str, overlap: str) -> BenchRun:
        llm = self.llm
        with self.recorded_run(llm, name):
            return self.timed_as_is(llm, self.fitted(work), overlap)

    @contextmanager
    def recorded_run(self, llm: LLM, name: str) -> Iterator[None]:
        """Marks what is generated inside as one run of a recording: the simulator replays it from an empty cache."""
        engine = llm.engine
        if (recorder := engine.recorder) is None:
            yield
            return
        engine.call(lambda _: recorder.mark(name)).result()
        yield
        engine.call(lambda _: recorder.mark(f"end of {name}")).result()

    def timed_as_is(self, llm: LLM, work: OfflineWorkload, overlap: str) -> BenchRun:
        """Times a workload that is `fitted` already."""
        engine, timeline = llm.engine, Timeline()
        device = engine.executor.local if isinstance(engine.executor.local, CudaExecutor) else None

        def begin(_: object) -> None:
            engine.loop.overlap, engine.loop.sync = overlap != "off", overlap == "sync"
            engine.loop.trace = timeline
            if device is not None:
                device.reset_stats()

        def end(_: object) -> None:
            engine.loop.trace = None

        engine.call(begin).result()
        began = time.perf_counter()
        outputs: list[RequestOutput] = []
        if work.pooling is None:
            outputs = llm.generate(work.prompts, work.params)
        else:
            llm.embed(work.prompts, work.pooling)
        seconds = time.perf_counter() - began
        engine.call(end).result()
        num_tokens = sum(len(output.token_ids) for output in outputs)
        assert num_tokens == work.num_output_tokens, f"{num_tokens} output tokens, expected {work.num_output_tokens}"
        cached = sum(output.num_cached_tokens for output in outputs)
        model = model_of(llm)
        metrics = run_metrics(
            timeline,
            seconds,
            model.spec,
            model.dtype.itemsize,
            device.stats.saved_tokens if device else 0,
            device.kv_dtype.itemsize if device else None,
            device.model.saved_weight_bytes if device else 0,
            device.model.saved_expert_bytes if device else 0,
        )
        if self.config.trace is not None:
            self.timelines.append(timeline)
        hit_rate = cached / sum(map(len, work.prompts))
        return BenchRun(metrics, timeline, len(work.prompts), num_tokens, hit_rate, outputs)

    def fitted(self, work: OfflineWorkload) -> OfflineWorkload:
        """`work` at the chosen scale, within the vocabulary of the model."""
        assert self._llm is not None, "the model is loaded"
        return work.scaled(self.scale).within(model_of(self._llm).spec.vocab_size)

    def report(self, workload: str, run: BenchRun, overlap: str, **more: float) -> None:
        """Prints the RESULT line of a timed run."""
        metrics = run.metrics
        self.print_result({
            "workload": workload, "shape": self.name, "seconds": round(run.seconds, 4),
            "tokens_per_s": round(run.num_tokens / run.seconds, 1), "gpu_idle_share": round(metrics.idle_share, 5),
            "host_us_per_step": round(metrics.host_us_per_step, 1), "hit_rate": round(run.hit_rate, 4),
            "startup_s": self.rounded_startup_s, **more,
            "overlap": overlap, "steady_idle_share": round(metrics.steady_idle_share, 5),
            "hidden_share": round(metrics.hidden_share, 4),
            "lanes_us": {name: round(us, 1) for name, us in metrics.lanes_us.items()},
            "kv_addressed_tb_s": round(metrics.kv_addressed / 1e12, 6),
            "kv_read_tb_s": round(metrics.kv_read / 1e12, 6),
            "decode_read_tb_s": round(metrics.decode_read / 1e12, 6),
            "prompt_tflops": round(metrics.prompt_flops / 1e12, 6),
            "tflops": round(metrics.flops / 1e12, 6),
            "ceilings": {
                "copy_tb_s": round(self.roofline.copy / 1e12, 6), "read_tb_s": round(self.roofline.read / 1e12, 6),
                "matmul_tflops": round(self.roofline.matmul / 1e12, 6),
            },
        })  # fmt: skip

    @property
    def rounded_startup_s(self) -> float | None:
        return None if self.startup_s is None else round(self.startup_s, 2)

    def print_result(self, fields: dict[str, object]) -> None:
        more = {} if self._scale in (None, 1) else {"scale": self._scale}
        print("RESULT " + json.dumps({**fields, "device": device_name(self.device), **more}), flush=True)


def model_of(llm: LLM) -> DecoderModel | CudaModel:
    executor = llm.engine.executor.local
    if isinstance(executor, CudaExecutor):
        return executor.model
    assert isinstance(executor, CpuExecutor) and isinstance(executor.runner, CpuModelRunner), (
        "a benchmark runs on the CUDA or the CPU executor"
    )
    return executor.runner.decoder


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
