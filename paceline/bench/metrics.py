"""Metrics of a benchmark run, and the peak bandwidth and FLOP/s of the device, measured on it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paceline.engine.timeline import HOST_LANES, Pass, Timeline
from paceline.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Roofline:
    """The peak rates that plain torch reaches on the device."""

    copy: float  # bytes per second, read plus written
    read: float  # bytes per second of a reduction
    matmul: float  # FLOP/s in the dtype of the model

    def __str__(self) -> str:
        return (
            f"measured roofline: copy {self.copy / 1e12:.3g} TB/s, read {self.read / 1e12:.3g} TB/s, "
            f"matmul {self.matmul / 1e12:.3g} TFLOP/s"
        )


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Takes a few milliseconds per rate on a GPU, and 4 GiB of its memory: call it before the model is loaded."""
    on_gpu = device.type == "cuda"
    count, side, runs = (1 << 29, 8192, 10) if on_gpu else (1 << 24, 768, 3)
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # Random values: a GEMM of equal ones draws less power and runs faster than a model's GEMMs ever do.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best(work: Callable[[], object]) -> float:
        seconds = math.inf
        for _ in range(runs + 1):  # the first run loads kernels
            _synchronize(device)
            began = time.perf_counter()
            work()
            _synchronize(device)
            seconds = min(seconds, time.perf_counter() - began)
        return seconds

    num_bytes = count * source.itemsize
    reductions: Iterable[Callable[[], object]] = (source.sum, source.amax)
    return Roofline(
        copy=2 * num_bytes / best(lambda: target.copy_(source)),
        read=num_bytes / min(best(work) for work in reductions),
        matmul=2 * side**3 / best(lambda: torch.mm(a, b)),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of one run. The device is idle from the end of a forward pass to the start of the next."""

    seconds: float
    passes: int
    device_s: float
    decoding_s: float  # part of device_s: decode batches
    idle_share: float
    steady_idle_share: float  # between two decode batches
    host_us_per_step: float  # host time per step, without waiting for results
    lanes_us: dict[str, float]  # host time per step by activity
    hidden_share: float  # fraction of the host time that overlaps with forward passes
    kv_addressed: float  # bytes of KV per second of decoding time that rows attend to
    kv_read: float  # of these, shared prefixes counted once
    decode_read: float  # kv_read plus the weights, once per pass
    prompt_flops: float  # FLOP/s of prefill and mixed batches
    flops: float  # FLOP/s of all batches

    def against(self, roofline: Roofline) -> str:
        return (
            f"decode addresses KV at {self.kv_addressed / 1e12:.3g} TB/s and reads {self.kv_read / 1e12:.3g} TB/s "
            f"({self.kv_read / roofline.read:.0%} of peak), with weights {self.decode_read / 1e12:.3g} TB/s "
            f"({self.decode_read / roofline.read:.0%}); prefill runs at {self.prompt_flops / 1e12:.3g} TFLOP/s "
            f"({self.prompt_flops / roofline.matmul:.0%} of peak), all batches at {self.flops / 1e12:.3g} TFLOP/s"
        )

    def __str__(self) -> str:
        lanes = ", ".join(f"{name} {us:.0f}" for name, us in self.lanes_us.items())
        return (
            f"{self.passes} passes, device {self.device_s:.3f} s, decoding {self.decoding_s:.3f} s; idle "
            f"{self.idle_share:.2%}, in steady decode {self.steady_idle_share:.2%}; host {self.host_us_per_step:.0f} "
            f"µs per step ({lanes}), {self.hidden_share:.1%} of it overlapped"
        )

    @property
    def summary(self) -> str:
        return (
            f"idle {self.idle_share:6.2%} (steady {self.steady_idle_share:6.2%})  "
            f"host {self.host_us_per_step:7.0f} µs/step, {self.hidden_share:6.1%} overlapped"
        )


def run_metrics(
    timeline: Timeline,
    seconds: float,
    spec: ModelSpec,
    dtype_bytes: int,
    saved_tokens: int = 0,
    kv_dtype_bytes: int | None = None,
    saved_weight_bytes: int = 0,
    saved_expert_bytes: int = 0,
) -> RunMetrics:
    """`saved_tokens`: KV positions that decode rows attend to and that were read once for several rows.
    `kv_dtype_bytes`: if it is not `dtype_bytes`. `saved_weight_bytes`: how much smaller quantized weights are;
    `saved_expert_bytes`: those of experts, of which a pass reads some."""
    passes = timeline.passes
    decodes = [one for one in passes if not one.num_prompts]
    prefills = [one for one in passes if one.num_prompts]
    device_s, decoding_s = (sum(one.device_s for one in some) for some in (passes, decodes))
    idle_s = sum(one.idle_s for one in passes)
    steady = [b for a, b in itertools.pairwise(passes) if not (a.num_prompts or b.num_prompts)]
    count, wait_s = max(len(passes), 1), timeline.host_s("wait")
    host_s = max(seconds - wait_s, 1e-9)
    kv_bytes = spec.kv_bytes_per_token(dtype_bytes if kv_dtype_bytes is None else kv_dtype_bytes)
    addressed = sum(one.context_tokens for one in decodes)
    head = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    weight_bytes = sum(spec.num_read_parameters(one.num_tokens) - head for one in decodes) * dtype_bytes
    weight_bytes -= saved_weight_bytes * len(decodes)
    weight_bytes -= int(saved_expert_bytes * sum(spec.read_share_of_experts(one.num_tokens) for one in decodes))
    read = (addressed - saved_tokens) * kv_bytes
    return RunMetrics(
        seconds=seconds,
        passes=len(passes),
        device_s=device_s,
        decoding_s=decoding_s,
        idle_share=_ratio(idle_s, idle_s + device_s),
        steady_idle_share=_ratio(sum(one.idle_s for one in steady), sum(one.idle_s + one.device_s for one in steady)),
        host_us_per_step=host_s / count * 1e6,
        lanes_us={lane: timeline.host_s(lane) / count * 1e6 for lane in HOST_LANES if lane != "wait"},
        hidden_share=max(0.0, 1 - max(seconds - device_s, 0.0) / host_s),
        kv_addressed=_ratio(addressed * kv_bytes, decoding_s),
        kv_read=_ratio(read, decoding_s),
        decode_read=_ratio(read + weight_bytes, decoding_s),
        prompt_flops=_ratio(sum(num_operations(spec, one) for one in prefills), device_s - decoding_s),
        flops=_ratio(sum(num_operations(spec, one) for one in passes), device_s),
    )


def num_operations(spec: ModelSpec, one: Pass) -> int:
    """Floating point operations of a forward pass: GEMMs and attention (as if no layer had a sliding window)."""
    head = one.num_sampled * spec.vocab_size * spec.hidden_size
    return 2 * (one.num_tokens * spec.layer_macs + one.pairs * spec.position_macs + head)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
