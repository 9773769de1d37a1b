"""`paceline bench offline pd`: prefill/decode disaggregation on one device, two engines in two processes.

The rate of KV is measured with prompts that the prefill engine has cached, so that nothing but copies takes time: from
its KV cache to shared memory and from there into the KV cache of the decode engine, both at once. It is compared with a
pinned copy of the same size, made in the same run.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.bench.runner import BenchRunner
from paceline.checks.harness import ROUNDING, CheckResult, TimedSink, margin
from paceline.cluster.kv_protocol import layout_of
from paceline.cluster.kv_receiver import RemotePrefill
from paceline.cluster.kv_sender import PrefillServer
from paceline.engine.engine import EngineHooks
from paceline.engine.job import Job
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.shapes import shape as named_shape
from paceline.model.weights import random_weights
from paceline.request import SamplingParams

_TOKEN = "benchmark"
_MODEL = "benchmark"
_READY = "READY"
_ROUNDS = 3
_GOAL = 0.7  # of the rate of a pinned copy
_NUM_OUTPUT = 16


def run_pd_prefill(runner: BenchRunner) -> None:
    """The prefill engine of `run_pd`, in a process of its own: the first line of its input is the address."""
    address = sys.stdin.readline().strip()
    server: PrefillServer | None = None

    def after_step() -> None:
        if server is not None:
            server.after_step()

    with runner.make(role="prefill", hooks=EngineHooks(after_step=after_step)) as llm:
        server = PrefillServer(llm.engine, layout_of(llm.engine, _MODEL), _TOKEN, address)
        print(_READY, flush=True)
        sys.stdin.read()  # until the parent ends
        server.close()


def run_pd(runner: BenchRunner, command: Sequence[str], shape: str | None) -> CheckResult:
    """`command` starts another process with the same model and options."""
    runner.close()
    is_cuda = runner.device.type == "cuda"
    count, length = (16, 8192) if is_cuda else (4, 512)
    kv_tokens = 2 * count * length
    with tempfile.TemporaryDirectory(prefix="paceline-pd-") as folder:
        address = f"unix:{Path(folder, 'kv')}"
        child = subprocess.Popen(
            [*command, f"--kv-tokens={kv_tokens}", "pd-prefill"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        try:
            child.stdin.write(address + "\n")
            child.stdin.flush()
            with runner.make(role="decode", kv_tokens=kv_tokens, host_kv_tokens=count * length) as llm:
                while (line := child.stdout.readline()).strip() != _READY:
                    assert line, "the prefill engine did not start: see its errors above"
                return _Measurement(llm, address, count, length).run(runner, shape)
        finally:
            child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


class _Measurement:
    def __init__(self, llm: LLM, address: str, count: int, length: int) -> None:
        self._llm, self._engine = llm, llm.engine
        layout = layout_of(llm.engine, _MODEL)
        self._remote = RemotePrefill(llm.engine, layout, _TOKEN, peers=[address], min_tokens=64, timeout_s=60)
        self._rng = random.Random(0)
        self._vocab = llm.engine.vocab_size
        self._prompts = [self._prompt(length) for _ in range(count)]
        self._page_bytes, self._page_size = layout.page_bytes, layout.page_size
        self._first_s = 0.0  # from the first submission of a round until one prompt has its first token
        self._num_bytes = count * ((length - 1) // layout.page_size) * layout.page_bytes

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab) for _ in range(length)]

    def run(self, runner: BenchRunner, shape: str | None) -> CheckResult:
        single = [self._ask(self._prompt(len(self._prompts[0])), remote=remote) for remote in (False, True)]  # warm up
        alone_s = self._round(remote=False)
        self._flush()
        first_s = self._round()
        rounds, firsts = [], []
        for _ in range(_ROUNDS):
            self._flush()
            rounds.append(self._round())
            firsts.append(self._first_s)
        # On the engine's thread: it captures CUDA graphs when it is idle, and meanwhile nobody may synchronise.
        num_bytes = self._num_bytes // len(self._prompts)
        copied = self._engine.call(lambda _: _pinned_rates(runner.device, num_bytes)).result()
        failures, completed = dict(self._remote.failures), self._remote.num_completed
        check = self._check_tokens(runner, shape)
        self._remote.close()
        rate, pinned = self._num_bytes / min(rounds), min(copied[0], copied[1])
        gb, count, length = 1e-9, len(self._prompts), len(self._prompts[0])
        lines = [
            f"KV of {count} prompts of {length} tokens: {self._num_bytes * gb:.2f} GB, {completed} transfers, "
            f"failures: {failures or 'none'}",
            f"{'':34}{'seconds':>10}{'GB/s':>9}",
            f"{'one engine computes them':34}{alone_s:10.3f}{'':>9}",
            f"{'prefill engine computes them':34}{first_s:10.3f}{self._num_bytes / first_s * gb:9.1f}",
            f"{'prefill engine has them cached':34}{min(rounds):10.3f}{rate * gb:9.1f}   rounds: "
            + ", ".join(f"{seconds:.3f}" for seconds in rounds)
            + "; first prompts: "
            + ", ".join(f"{seconds:.3f}" for seconds in firsts),
            f"{'pinned copy to the host':34}{'':10}{copied[0] * gb:9.1f}",
            f"{'pinned copy from the host':34}{'':10}{copied[1] * gb:9.1f}",
            f"{'both at once, each':34}{'':10}{copied[2] * gb:9.1f}",
            f"one prompt after the other: {single[0]:.3f} s computed here, {single[1]:.3f} s by the prefill engine",
        ]
        runner.table.extend(lines)
        print("\n".join(lines))
        runner.print_result({
            "workload": "pd", "shape": runner.name, "seconds": round(min(rounds), 4), "bytes": self._num_bytes,
            "bytes_per_s": round(rate), "pinned_bytes_per_s": round(pinned), "both_bytes_per_s": round(copied[2]),
            "first_s": round(first_s, 4), "alone_s": round(alone_s, 4), "rounds_s": [round(one, 4) for one in rounds],
        })  # fmt: skip
        # Ranks on one GPU take turns, and exchange every pass by way of the host.
        has_ranks = self._engine.executor.local is not self._engine.executor
        is_fast = rate >= _GOAL * pinned or runner.device.type != "cuda" or has_ranks
        is_right = check.passed is not False and not failures
        return CheckResult(is_fast and is_right, f"KV at {rate / pinned:.0%} of a pinned copy; {check.text}")

    def _flush(self) -> None:
        self._engine.call(self._engine.flush_cache).result()

    def _submit(self, prompt: list[int], num_tokens: int, *, remote: bool = True) -> TimedSink:
        sink = TimedSink()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        job = Job(np.array(prompt, np.int32), params)
        if remote:
            self._remote.submit(job, sink)
        else:
            self._engine.submit(job, sink)
        return sink

    def _wait(self, sinks: Sequence[TimedSink]) -> list[list[int]]:
        for sink in sinks:
            assert sink.ended.wait(120), "a request did not end"
            if sink.refused is not None:
                raise sink.refused
        return [sink.tokens for sink in sinks]

    def _round(self, *, remote: bool = True) -> float:
        """Seconds from the first submission until every prompt has its first token."""
        began = time.perf_counter()
        sinks = [self._submit(prompt, 1, remote=remote) for prompt in self._prompts]
        self._wait(sinks)
        times = [sink.times[0] - began for sink in sinks]
        self._first_s = min(times)
        return max(times)

    def _ask(self, prompt: list[int], *, remote: bool) -> float:
        began = time.perf_counter()
        self._wait([self._submit(prompt, 2, remote=remote)])
        return time.perf_counter() - began

    def _check_tokens(self, runner: BenchRunner, shape: str | None) -> CheckResult:
        """Greedy tokens of both ways to compute a prompt, by their margin in float32 where weights are random."""
        prompts = [self._prompt(length) for length in (900, 500, 260, 130)]
        found = []
        for remote in (True, False):
            self._flush()
            found.append(self._wait([self._submit(prompt, _NUM_OUTPUT, remote=remote) for prompt in prompts]))
        same = sum(a == b for a, b in zip(*found, strict=True))
        text = f"{same} of {len(prompts)} outputs equal those of one engine"
        if shape is None:
            return CheckResult(same == len(prompts), text)
        spec, dtype = named_shape(shape), str(runner.dtype).removeprefix("torch.")
        weights = random_weights(spec, dtype=dtype, device=runner.device)  # of the same seed as those of the engines
        plain, reference = (
            Decoder(spec, {name: weight.to(kind) for name, weight in weights.items()}, max_positions=2048)
            for kind in (runner.dtype, torch.float32)
        )
        ours, theirs = margin(reference, prompts, found[0]), margin(reference, prompts, found[0], plain)
        bound = 1.5 * theirs.worst + ROUNDING
        return CheckResult(
            ours.worst < bound,
            f"{text}; {ours.judged} greedy tokens, worst margin {ours.worst:.3f} (plain torch in {dtype}: "
            f"{theirs.worst:.3f}; bound {bound:.3f})",
        )


def _pinned_rates(device: torch.device, num_bytes: int) -> tuple[float, float, float]:
    """Bytes per second of a copy to the host, from the host, and of each when both run at once."""
    is_cuda = device.type == "cuda"
    ours = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
    make_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    streams = [make_stream(device) if is_cuda else None for _ in range(2)]

    def seconds(directions: Sequence[int]) -> float:
        found = []
        for _ in range(5):
            if is_cuda:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for direction in directions:
                source, target = (ours, hosts) if direction == 0 else (hosts, ours)
                with torch.cuda.stream(streams[direction]):
                    target[direction].copy_(source[direction], non_blocking=True)
            if is_cuda:
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    return num_bytes / seconds([0]), num_bytes / seconds([1]), num_bytes / seconds([0, 1])
