"""What a run achieved, and what the device can do at all, measured on it."""

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
class Ceilings:
    """The most of each that plain torch gets out of the device."""

    copy: float  # bytes a second, read and written
    read: float  # bytes a second, of a reduction
    matmul: float  # floating point operations a second, in the model's dtype

    def __str__(self) -> str:
        return (
            f"measured ceilings: copy {self.copy / 1e12:.3g} TB/s, read {self.read / 1e12:.3g} TB/s, "
            f"matmul {self.matmul / 1e12:.3g} TFLOP/s"
        )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A few milliseconds each on a GPU. To be called while there is memory: it takes 4 GiB of a GPU's."""
    on_gpu = device.type == "cuda"
    count, side, runs = (1 << 29, 8192, 10) if on_gpu else (1 << 24, 768, 3)
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # Random numbers: equal ones are multiplied with less power, and faster than a model's ever are.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best(work: Callable[[], object]) -> float:
        seconds = math.inf
        for _ in range(runs + 1):  # the first loads what it needs
            _wait(device)
            began = time.perf_counter()
            work()
            _wait(device)
            seconds = min(seconds, time.perf_counter() - began)
        return seconds

    num_bytes = count * source.itemsize
    reductions: Iterable[Callable[[], object]] = (source.sum, source.amax)
    return Ceilings(
        copy=2 * num_bytes / best(lambda: target.copy_(source)),
        read=num_bytes / min(best(work) for work in reductions),
        matmul=2 * side**3 / best(lambda: torch.mm(a, b)),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. The device idles from the end of a pass to the beginning of the next."""

    seconds: float
    passes: int
    device_s: float
    decoding_s: float  # of that, passes with no prompt in them
    idle_share: float
    steady_idle_share: float  # between two passes of decodes
    host_us_per_step: float  # all the host's time but waiting for results
    lanes_us: dict[str, float]  # a step, by what it went to
    hidden_share: float  # of the host's time, behind passes that run meanwhile
    kv_addressed: float  # bytes a second of decoding time, every row for itself
    kv_read: float  # of them, once for rows that read the same together
    decode_read: float  # with the weights, once a pass
    prompt_flops: float  # operations a second of passes with prompts
    flops: float  # of all passes

    def against(self, ceilings: Ceilings) -> str:
        return (
            f"decoding addresses KV at {self.kv_addressed / 1e12:.3g} TB/s and reads it at {self.kv_read / 1e12:.3g} "
            f"({self.kv_read / ceilings.read:.0%} of what can be read), with weights {self.decode_read / 1e12:.3g} "
            f"({self.decode_read / ceilings.read:.0%}); prompts run at {self.prompt_flops / 1e12:.3g} TFLOP/s "
            f"({self.prompt_flops / ceilings.matmul:.0%} of a matmul), all passes at {self.flops / 1e12:.3g}"
        )

    def __str__(self) -> str:
        lanes = ", ".join(f"{name} {us:.0f}" for name, us in self.lanes_us.items())
        return (
            f"{self.passes} passes, device {self.device_s:.3f} s, decoding {self.decoding_s:.3f} s; idle "
            f"{self.idle_share:.2%}, in steady decode {self.steady_idle_share:.2%}; host {self.host_us_per_step:.0f} "
            f"µs a step ({lanes}), {self.hidden_share:.1%} of it hidden"
        )


def figures(timeline: Timeline, seconds: float, spec: ModelSpec, dtype_bytes: int, saved_tokens: int = 0) -> Figures:
    """`saved_tokens`: KV positions that decode rows address and that another row's reading serves."""
    passes = timeline.passes
    decodes = [one for one in passes if not one.num_prompts]
    prompts = [one for one in passes if one.num_prompts]
    device_s, decoding_s = (sum(one.device_s for one in some) for some in (passes, decodes))
    idle_s = sum(one.idle_s for one in passes)
    steady = [b for a, b in itertools.pairwise(passes) if not (a.num_prompts or b.num_prompts)]
    count, wait_s = max(len(passes), 1), timeline.host_s("wait")
    host_s = max(seconds - wait_s, 1e-9)
    kv_bytes = spec.kv_bytes_per_token(dtype_bytes)
    addressed = sum(one.context_tokens for one in decodes)
    weight_bytes = (spec.num_parameters - (0 if spec.tied else spec.vocab_size * spec.hidden_size)) * dtype_bytes
    read = (addressed - saved_tokens) * kv_bytes
    return Figures(
        seconds=seconds,
        passes=len(passes),
        device_s=device_s,
        decoding_s=decoding_s,
        idle_share=_share(idle_s, idle_s + device_s),
        steady_idle_share=_share(sum(one.idle_s for one in steady), sum(one.idle_s + one.device_s for one in steady)),
        host_us_per_step=host_s / count * 1e6,
        lanes_us={lane: timeline.host_s(lane) / count * 1e6 for lane in HOST_LANES if lane != "wait"},
        hidden_share=max(0.0, 1 - max(seconds - device_s, 0.0) / host_s),
        kv_addressed=_share(addressed * kv_bytes, decoding_s),
        kv_read=_share(read, decoding_s),
        decode_read=_share(read + weight_bytes * len(decodes), decoding_s),
        prompt_flops=_share(sum(num_operations(spec, one) for one in prompts), device_s - decoding_s),
        flops=_share(sum(num_operations(spec, one) for one in passes), device_s),
    )


def num_operations(spec: ModelSpec, one: Pass) -> int:
    """Floating point operations that a pass needs: matrix products and attention (as if no layer had a window)."""
    per_token = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.ffn_size)
    head = one.num_sampled * spec.vocab_size * spec.hidden_size
    return 2 * (spec.num_layers * (one.num_tokens * per_token + 2 * one.pairs * spec.q_size) + head)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
