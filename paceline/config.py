"""Every option once: name, type, default, bounds and help. Command line and docs are made from here.

An option is a dataclass field declared with `option(...)`; `check_options` enforces what the declaration says,
so a bound is never written twice.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.request import PacelineError


class ConfigError(PacelineError, ValueError):
    """An option with a value it cannot have; the message names option, value and remedy."""


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[str] = (),
) -> Any:
    """A dataclass field that is an option: its bounds are inclusive."""
    metadata = {"help": help, "low": low, "high": high, "choices": tuple(choices)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


POLICIES = ("fair", "fcfs", "lpm", "dfs", "sjf", "lof", "random", "priority", "hrrn")
BATCHING = ("mixed", "prefill-first", "static")
EVICTION = ("lru", "lfu", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may use and how it decides."""

    # Memory
    num_pages: int = option(4096, "pages of KV memory in the pool", low=1)
    page_size: int = option(16, "KV positions in a page; 1 matches prefixes token by token", low=1)
    context_tokens: int = option(32768, "longest prompt plus output the model takes", low=2)
    prefix_cache: bool = option(True, "keep computed prefixes for later requests")
    shared_reads: bool = option(True, "rows below the same cached prefix read its KV together, once")
    eviction: str = option("lru", "which cached prefix goes first when memory is short", choices=EVICTION)
    partial_eviction: bool = option(True, "take only the pages needed, from a cached prefix's tail; else all of it")
    pin_quota_pages: int = option(0, "pages that pinned prefixes may hold at most", low=0)

    # A step
    max_running: int = option(256, "requests that hold a slot at the same time", low=1)
    max_batch_tokens: int = option(8192, "tokens in one forward pass", low=1)
    max_prefill_tokens: int = option(8192, "prompt tokens in one forward pass", low=1)
    chunk_tokens: int = option(2048, "prompt tokens of one request in one forward pass", low=1)
    batching: str = option(
        "mixed", "mixed: decodes always run; prefill-first: prompts alone, when there are any; static: no joining",
        choices=BATCHING,
    )  # fmt: skip
    draft_tokens: int = option(0, "tokens beyond the first that a pass may add to a row", low=0, high=64)
    itl_target: float | None = option(None, "seconds between tokens that a step should stay under", low=1e-6)

    # Order
    policy: str = option("fair", "in which order waiting requests are admitted", choices=POLICIES)
    max_wait: float = option(0.2, "seconds that a better cache order may overtake a request; inf: always", low=0.0)
    lane_share: float = option(0.125, "share of admitted tokens that goes to overdue requests", low=0.001, high=1.0)
    fair_quantum: int = option(8192, "tokens a tenant may be served before the next one's turn", low=1)
    output_weight: float = option(2.0, "what a decoded token costs a tenant, in prompt tokens", low=0.0)
    tenant_weights: Mapping[str, float] = option({}, "share of each tenant against the others; 1 if not given")
    prefix_wait: bool = option(True, "wait one step for a prefix that is being computed instead of computing it again")
    prefix_wait_tokens: int = option(32, "fewest saved tokens worth waiting a step for", low=1)
    look_ahead: int = option(8, "requests that may be tried past one that does not fit, in one step", low=0)
    max_overtakes: int = option(64, "requests admitted past one that does not fit before memory is kept for it", low=0)
    retract_gap: float = option(
        math.inf, "policy priority: a request may retract one whose priority is lower by this much", low=1
    )

    # Limits
    max_waiting: int = option(100_000, "requests that may wait; more are refused", low=1)
    max_waiting_tokens: int = option(2_000_000_000, "prompt tokens that may wait; more are refused", low=1)

    # The rest
    order_seed: int = option(0, "seed of policy random", low=0)
    journal_events: int = option(65_536, "decisions the journal remembers", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_batch_tokens < self.max_running * (1 + self.draft_tokens):
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}, fewer than a decode of all max_running = "
                f"{self.max_running} requests needs: raise it to {self.max_running * (1 + self.draft_tokens)} "
                "or lower max_running."
            )
        if self.pin_quota_pages >= self.num_pages:
            raise ConfigError(
                f"pin_quota_pages is {self.pin_quota_pages}, all of num_pages = {self.num_pages}: "
                "leave pages for requests."
            )
        for tenant, weight in self.tenant_weights.items():
            if not (isinstance(weight, int | float) and weight > 0 and math.isfinite(weight)):
                raise ConfigError(f"tenant_weights[{tenant!r}] is {weight!r}: give a number above 0.")


def check_options(config: Any) -> None:
    """Raises ConfigError for the first option of `config` whose value breaks its declaration."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        _check(item.name, getattr(config, item.name), hints[item.name], item.metadata)


def _check(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> None:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return
    if float in kinds:
        right = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        wanted = "a number"
    elif bool in kinds:
        right, wanted = isinstance(value, bool), "true or false"
    elif int in kinds:
        right, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif str in kinds:
        right, wanted = isinstance(value, str), "a word"
    else:
        right, wanted = isinstance(value, Mapping), "a mapping"
    if not right:
        raise ConfigError(f"{name} is {value!r}: give {wanted}.")
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(metadata['choices'])}.")
    low, high = metadata["low"], metadata["high"]
    if low is not None and value < low:
        raise ConfigError(f"{name} is {value!r}: give {low} or more.")
    if high is not None and value > high:
        raise ConfigError(f"{name} is {value!r}: give {high} or less.")


OVERLAP = ("on", "off", "sync")
DEVICES = ("auto", "cpu", "cuda")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
OVERLAP_VARIABLE = "PACELINE_OVERLAP"  # the environment's word, where the option is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs on."""

    device: str = option("auto", "where the model runs; auto: on a GPU if there is one", choices=DEVICES)
    dtype: str = option(
        "auto", "of weights and KV memory; auto: float32 on a CPU, bfloat16 on a GPU", choices=DTYPE_NAMES
    )
    threads: int | None = option(None, "CPU threads for computing; one for each core if not given", low=1, high=1024)
    overlap: str | None = option(
        None, "on: the next pass is planned while one runs; off: one after the other; sync: on, with a full "
        f"synchronisation before each pass, to find races; ${OVERLAP_VARIABLE} or on if not given",
        choices=OVERLAP,
    )  # fmt: skip
    kv_tokens: int | None = option(None, "tokens of KV memory; a share of the free memory if not given", low=1)
    kv_memory_fraction: float | None = option(
        None, "share of the free memory that becomes KV memory; 0.3 on a CPU and 0.9 on a GPU if not given",
        low=0.001, high=0.95,
    )  # fmt: skip

    record: str | None = option(
        None, "file to write every request (as hashes of its tokens, no text) and every pass to, for `paceline sim`"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def overlap_mode(self) -> str:
        """on, off or sync: the option, else the environment, else on."""
        mode = self.overlap or os.environ.get(OVERLAP_VARIABLE) or "on"
        if mode not in OVERLAP:
            raise ConfigError(f"{OVERLAP_VARIABLE} is {mode!r}: choose one of {', '.join(OVERLAP)}.")
        return mode


OFFLINE_PARTS = {
    "nano": "256 prompts of 100 to 1,024 tokens, as many tokens out",
    "gsp": "1,024 prompts in 64 groups with a common beginning",
    "sweep": "time per token at several batch sizes",
    "startup": "from the start of a process to its first token",
    "profile": "which kernels a GPU's time goes to",
    "check": "greedy tokens against float32, and the same ones however passes overlap",
    "logits": "logits against transformers with the same weights",
    "alone": "the same request alone and in a full batch",
    "long": "time between tokens while prompts of 32,000 tokens arrive",
    "soak": "random joins, aborts and retractions, every step checked",
    "sanitizer": "a short run under compute-sanitizer, where there is one",
    "tiny": "that short run",
    "first-token": "one token, and how old the process is",
}  # what `paceline bench offline` can run; from check on they say PASS or FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """How `paceline bench offline` runs its parts."""

    overlap: str = option(
        "on", "on, off or sync: how passes overlap; both: everything with on, then with off",
        choices=(*OVERLAP, "both"),
    )  # fmt: skip
    repeats: int = option(3, "times that nano and gsp run, with other tokens each time; the best counts", low=1)
    batches: str = option("1,256", "batch sizes of sweep")
    scale: float = option(1.0, "below 1: fewer requests, shorter prompts and outputs, to try it", low=0.001, high=1.0)
    trace: str | None = option(None, "file for a timeline of all runs, host and device, that Perfetto opens")
    running: int = option(256, "requests that run while the long prompts of `long` arrive", low=1)
    soak_seconds: float = option(300.0, "seconds that soak lasts", low=0.1)

    def __post_init__(self) -> None:
        check_options(self)
        if not all(one.strip().isdecimal() and int(one) for one in self.batches.split(",")):
            raise ConfigError(f"batches is {self.batches!r}: give numbers from 1 up, such as 1,16,256.")

    @property
    def overlap_modes(self) -> tuple[str, ...]:
        return ("on", "off") if self.overlap == "both" else (self.overlap,)

    @property
    def batch_sizes(self) -> list[int]:
        return [int(one) for one in self.batches.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens and what it takes."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = option(8000, "port to listen on; 0: any free one", low=0, high=65535)
    served_name: str | None = option(None, "name that requests call the model by; the model's own if not given")
    max_body_bytes: int = option(16_777_216, "longest request body", low=1024)
    max_prompts: int = option(128, "prompts in one completions request", low=1)
    shutdown_s: float = option(3.0, "seconds that running requests get to finish after a signal to end", low=0.0)

    def __post_init__(self) -> None:
        check_options(self)


ARRIVALS = ("once", "poisson", "gamma", "onoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What arrives at a simulated server, how often, and how much of it is alike."""

    requests: int = option(200, "requests in all", low=1, high=1_000_000)
    arrivals: str = option(
        "poisson",
        "once: all at the beginning; poisson: independent of each other; gamma: in clumps; onoff: floods, then quiet",
        choices=ARRIVALS,
    )
    rate: float = option(20.0, "requests a second, on average", low=1e-6)
    burstiness: float = option(
        4.0, "gamma: variance of the time between two, 1 is poisson; onoff: flood over mean", low=1
    )
    prompt_tokens: int = option(512, "tokens of a prompt, on average", low=2)
    output_tokens: int = option(128, "tokens of an answer, on average", low=1)
    shared: float = option(0.6, "share of a prompt that it has in common with its group", low=0.0, high=0.99)
    groups: int = option(8, "groups of requests with a common beginning", low=1)
    tenants: int = option(1, "tenants that send them", low=1, high=1024)
    seed: int = option(0, "of everything random here", low=0)

    def __post_init__(self) -> None:
        check_options(self)
