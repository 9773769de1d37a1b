"""Simulated workloads: requests with arrival times and outputs, by name.

A workload depends on its parameters and seed only. An arrival carries the output of the request, since a virtual GPU
computes none; the scheduler gets it token by token, as from a real one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.bench.workloads import gsp as bench_gsp
from paceline.bench.workloads import nano as bench_nano
from paceline.config import ConfigError, WorkloadConfig
from paceline.request import Request, SamplingParams

Tokens = npt.NDArray[np.int32]
VOCAB = 50_000
EOS = VOCAB  # in no prompt


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A future request. `output` ends with EOS unless the request runs to its `max_tokens`."""

    at: float
    id: str
    prompt: Tokens
    output: Tokens
    max_tokens: int | None = None  # None: the length of the output, known to the scheduler
    tenant: str = "default"
    priority: int = 0
    # Speculative decoding: drafts verified and accepted by each pass, as in `RecordedRequest`; empty: not recorded
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()

    def later(self, seconds: float) -> Arrival:
        return dataclasses.replace(self, at=self.at + seconds)

    def request(self) -> Request:
        """What the scheduler is asked."""
        if self.max_tokens is None:
            params = SamplingParams(max_tokens=len(self.output), ignore_eos=True)
            return Request(self.id, self.prompt, params, tenant=self.tenant, priority=self.priority)
        params = SamplingParams(max_tokens=self.max_tokens)
        return Request(self.id, self.prompt, params, tenant=self.tenant, priority=self.priority, eos_token_ids=(EOS,))


def times(config: WorkloadConfig, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """When each request arrives, in seconds."""
    count, mean = config.requests, 1 / config.rate
    if config.arrivals == "once":
        return np.zeros(count)
    if config.arrivals == "poisson":
        gaps = rng.exponential(mean, count)
    elif config.arrivals == "gamma":
        shape = 1 / config.burstiness
        gaps = rng.gamma(shape, mean / shape, count)
    else:
        # Bursts of 32 requests at `burstiness` times the rate, then a pause that restores the mean rate.
        gaps = rng.exponential(mean / config.burstiness, count)
        length = 32
        gaps[length::length] += length * mean * (1 - 1 / config.burstiness)
    arrivals: npt.NDArray[np.float64] = np.cumsum(gaps) - gaps[0]
    return arrivals


def _length(rng: np.random.Generator, mean: int) -> int:
    """Log-normal, as real prompts and outputs: most are shorter than the mean, a few much longer."""
    return max(1, int(rng.lognormal(math.log(mean) - 0.125, 0.5)))


def random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def _prefixes(config: WorkloadConfig) -> Iterator[Arrival]:
    """Groups with a system prompt each; the popularity of groups follows Zipf's law."""
    rng = np.random.default_rng(config.seed)
    common = round(config.prompt_tokens * config.shared)
    systems = [random_tokens(rng, common) for _ in range(config.groups)]
    weights = 1 / np.arange(1, config.groups + 1)
    chosen = rng.choice(config.groups, config.requests, p=weights / weights.sum())
    for number, at in enumerate(times(config, rng)):
        own = random_tokens(rng, _length(rng, max(1, config.prompt_tokens - common)))
        prompt = np.concatenate([systems[chosen[number]], own])
        tenant = f"tenant-{number % config.tenants}" if config.tenants > 1 else "default"
        yield Arrival(
            float(at), f"r{number}", prompt, random_tokens(rng, _length(rng, config.output_tokens)), tenant=tenant
        )


def _chat(config: WorkloadConfig) -> Iterator[Arrival]:
    """Multi-turn conversations: a prompt is the previous prompt, its output and a new question."""
    rng = np.random.default_rng(config.seed)
    system = random_tokens(rng, round(config.prompt_tokens * config.shared))
    question = max(1, round(config.prompt_tokens * (1 - config.shared) / 3))
    starts = times(config, rng)
    found: list[Arrival] = []
    chat = 0
    while len(found) < config.requests:
        at, prompt = float(starts[chat]), system
        for turn in range(int(rng.integers(1, 7))):
            prompt = np.concatenate([prompt, random_tokens(rng, _length(rng, question))])
            output = random_tokens(rng, _length(rng, config.output_tokens))
            tenant = f"tenant-{chat % config.tenants}" if config.tenants > 1 else "default"
            found.append(Arrival(at, f"chat{chat}-{turn}", prompt, output, tenant=tenant))
            prompt = np.concatenate([prompt, output])
            at += 0.02 * len(output) + rng.exponential(5.0)  # reading and thinking time of the user
        chat += 1
    yield from sorted(found[: config.requests], key=lambda arrival: arrival.at)


def _agents(config: WorkloadConfig) -> Iterator[Arrival]:
    """Agents: a common tool description, a prompt per kind of task, many short steps that append a tool result."""
    rng = np.random.default_rng(config.seed)
    tools = random_tokens(rng, round(config.prompt_tokens * config.shared))
    kinds = [random_tokens(rng, max(1, config.prompt_tokens // 8)) for _ in range(config.groups)]
    starts = times(config, rng)
    found: list[Arrival] = []
    agent = 0
    while len(found) < config.requests:
        prompt = np.concatenate([tools, kinds[agent % config.groups], random_tokens(rng, _length(rng, 32))])
        at = float(starts[agent])
        for step in range(int(rng.integers(3, 12))):
            output = random_tokens(rng, _length(rng, max(1, config.output_tokens // 4)))
            tenant = f"tenant-{agent % config.tenants}" if config.tenants > 1 else "default"
            found.append(Arrival(at, f"agent{agent}-{step}", prompt, output, tenant=tenant))
            result = random_tokens(rng, _length(rng, max(1, round(config.prompt_tokens * (1 - config.shared) / 4))))
            prompt = np.concatenate([prompt, output, result])
            at += 0.01 * len(output) + rng.exponential(0.5)  # run time of the tool
        agent += 1
    yield from sorted(found[: config.requests], key=lambda arrival: arrival.at)


def _tenants(config: WorkloadConfig) -> Iterator[Arrival]:
    """Tenants with unequal load: the first sends half of the requests, each further one half of the rest."""
    rng = np.random.default_rng(config.seed)
    count = max(2, config.tenants)
    shares = 0.5 ** np.arange(1, count + 1)
    chosen = rng.choice(count, config.requests, p=shares / shares.sum())
    for one, tenant in zip(_prefixes(config), chosen.tolist(), strict=True):
        yield dataclasses.replace(one, tenant=f"tenant-{tenant}")


def _one_long(config: WorkloadConfig) -> Iterator[Arrival]:
    """One request with 50 times the output of the others, which arrives first; all lengths are exact."""
    rng = np.random.default_rng(config.seed)
    for number, at in enumerate(times(config, rng)):
        output = np.zeros(config.output_tokens * (1 if number else 50), np.int32)
        yield Arrival(float(at), f"r{number}", random_tokens(rng, config.prompt_tokens), output)


def _nano(config: WorkloadConfig) -> Iterator[Arrival]:
    work = bench_nano(config.requests)
    sizes = [params.max_tokens or 0 for params in work.params]
    for number in sorted(
        range(len(sizes)), key=lambda index: -sizes[index]
    ):  # the order in which `LLM.generate` submits them
        tokens = np.array(work.prompts[number], np.int32)
        yield Arrival(0.0, f"nano-{number}", tokens, np.zeros(sizes[number], np.int32))


def _gsp(config: WorkloadConfig) -> Iterator[Arrival]:
    for request in bench_gsp(max(1, config.requests // 16)):
        yield Arrival(0.0, request.id, request.prompt, np.zeros(request.params.max_tokens or 0, np.int32))


WORKLOADS: dict[str, Callable[[WorkloadConfig], Iterator[Arrival]]] = {
    "prefixes": _prefixes,
    "chat": _chat,
    "agents": _agents,
    "tenants": _tenants,
    "one-long": _one_long,
    "nano": _nano,
    "gsp": _gsp,
}
# Options that differ from those of WorkloadConfig by default. `tenants` overloads an H200 with Qwen3-0.6B, since a
# policy decides nothing while no request waits; `one-long` is the example by which continuous batching is explained:
# one request of 500 tokens and seven of 10 in eight slots, and more of 10 that wait.
DEFAULTS: dict[str, dict[str, object]] = {
    "tenants": {"requests": 800, "rate": 800.0, "tenants": 4},
    "one-long": {"requests": 351, "arrivals": "once", "prompt_tokens": 16, "output_tokens": 10},
}
# Number of requests of the published benchmarks, which have no other option
SIZES = {"nano": 256, "gsp": 1024}


def make_workload(name: str, config: WorkloadConfig) -> list[Arrival]:
    if name not in WORKLOADS:
        raise ConfigError(f"workload is {name!r}: choose one of {', '.join(WORKLOADS)}, or give a trace file.")
    return list(WORKLOADS[name](config))


def unique_ids(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same with a number in front of repeated ids."""
    seen: dict[str, object] = {}
    found = []
    for number, one in enumerate(arrivals):
        found.append(dataclasses.replace(one, id=f"{number}-{one.id}") if one.id in seen else one)
        seen[one.id] = True
    return found
