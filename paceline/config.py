"""Every option once: name, type, default, bounds and help. Command line and docs are made from here.

An option is a dataclass field declared with `option(...)`; `check_options` enforces what the declaration says,
so a bound is never written twice.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
    num_host_pages: int = option(
        0, "pages of host memory that keep what is evicted, to be fetched when it is needed again; 0: it is dropped",
        low=0,
    )  # fmt: skip
    max_swap_pages: int = option(256, "pages that go to host memory, and that come back, with one pass at most", low=1)
    host_page_cost: float = option(
        0.0, "prompt tokens that are computed in the time a page takes to come back from host memory: what is cheaper "
        "to compute is not kept there", low=0.0,
    )  # fmt: skip
    pin_quota_pages: int = option(0, "pages that pinned prefixes may hold at most", low=0)

    # A step
    max_running: int = option(256, "requests that hold a slot at the same time", low=1)
    max_batch_tokens: int = option(8192, "tokens in one forward pass", low=1)
    max_prefill_tokens: int = option(8192, "prompt tokens in one forward pass", low=1)
    chunk_tokens: int = option(2048, "prompt tokens of one request in one forward pass", low=1)
    chunk_context: int = option(
        2048,
        "context at which a prompt token takes twice its time: where others decode and nobody waits, chunks are half "
        "as long, and shrink by it",
        low=1,
    )
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
    prefix_wait_tokens: int = option(
        32, "fewest saved tokens worth waiting a step for, be they computed or in host memory", low=1
    )
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
        if self.num_host_pages and not self.prefix_cache:
            raise ConfigError(
                f"num_host_pages is {self.num_host_pages} and prefix_cache is off: nothing is kept then; leave one out."
            )
        if self.num_host_pages and self.host_from_token >= self.context_tokens:
            raise ConfigError(
                f"num_host_pages is {self.num_host_pages}, and with a host_page_cost of {self.host_page_cost:g} tokens "
                f"all of a context of {self.context_tokens} is quicker to compute than to fetch: leave it out."
            )
        for tenant, weight in self.tenant_weights.items():
            if not (isinstance(weight, int | float) and weight > 0 and math.isfinite(weight)):
                raise ConfigError(f"tenant_weights[{tenant!r}] is {weight!r}: give a number above 0.")

    @property
    def host_from_token(self) -> int:
        """Where in a prompt fetching a page begins to be cheaper than computing it, which takes the longer the more
        context it reads."""
        first = self.chunk_context * (self.host_page_cost / self.page_size - 1)
        return max(0, math.ceil(first / self.page_size)) * self.page_size


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
    elif typing.get_origin(hint) is tuple:
        right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        wanted = "a list of words"
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
EXECUTORS = ("torch", "virtual")
VIRTUAL_TOKENS = ("prompt", "clock")
DEVICES = ("auto", "cpu", "cuda")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
OVERLAP_VARIABLE = "PACELINE_OVERLAP"  # the environment's word, where the option is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs on."""

    executor: str = option(
        "torch", "torch: the model runs; virtual: nothing runs, passes only take as long as on a GPU, and answers are "
        "made up", choices=EXECUTORS,
    )  # fmt: skip
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
    host_kv_tokens: int = option(
        0, "tokens of host memory for KV that is evicted, which is fetched from there instead of computed again where "
        "that is quicker; 0: none", low=0,
    )  # fmt: skip
    kv_memory_fraction: float | None = option(
        None, "share of the free memory that becomes KV memory; 0.3 on a CPU and 0.9 on a GPU if not given",
        low=0.001, high=0.95,
    )  # fmt: skip

    record: str | None = option(
        None, "file to write every request (as hashes of its tokens, no text) and every pass to, for `paceline sim`"
    )
    virtual_slowdown: float = option(
        1.0, "executor virtual: how many times slower than an H200 with a model of 0.6B", low=1e-6
    )
    virtual_tokens: str = option(
        "prompt", "executor virtual: prompt: tokens depend on the prompt alone; clock: they tell when they were made",
        choices=VIRTUAL_TOKENS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    def num_host_pages(self, page_size: int, given: Mapping[str, Any]) -> int:
        """`host_kv_tokens` in pages; else what `given`, the scheduler's options, say."""
        if self.host_kv_tokens and "num_host_pages" in given:
            raise ConfigError(
                f"host_kv_tokens is {self.host_kv_tokens} and num_host_pages is {given['num_host_pages']}: "
                "give one of them."
            )
        if 0 < self.host_kv_tokens < page_size:
            raise ConfigError(
                f"host_kv_tokens is {self.host_kv_tokens}, less than a page of {page_size}: raise it, or leave it out."
            )
        pages: int = given.get("num_host_pages", 0)
        return self.host_kv_tokens // page_size or pages

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
    "prompts": "32 prompts of 256 to 24,000 tokens, 32 tokens out",
    "chats": "64 chats of 6 turns, one turn of all of them after the other: what host_kv_tokens is worth",
    "sweep": "time per token at several batch sizes",
    "sampling": "nano with top-k, top-p and penalties on all rows, against plain",
    "logprobs": "64 and 256 prompts with five alternatives to every token, against the same without",
    "grammar": "64 prompts that obey a schema each, against the same unconstrained",
    "startup": "from the start of a process to its first token",
    "profile": "which kernels a GPU's time goes to",
    "check": "greedy tokens against float32, and the same ones however passes overlap",
    "logits": "logits against transformers with the same weights",
    "alone": "the same request alone and in a full batch",
    "long": "time between tokens while prompts of 32,000 tokens arrive",
    "soak": "random joins, aborts and retractions, every step checked",
    "swap": "chats that do not fit: pages that come back from host memory, bit for bit",
    "sanitizer": "a short run under compute-sanitizer, where there is one",
    "tiny": "that short run",
    "first-token": "one token, and how old the process is",
}  # what `paceline bench offline` can run; from check on they say PASS or FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """How `paceline bench offline` runs its parts."""

    repeats: int = option(3, "times that nano and gsp run, with other tokens each time; the best counts", low=1)
    overlap: str = option(
        "on", "on, off or sync: how passes overlap; both: everything with on, then with off",
        choices=(*OVERLAP, "both"),
    )  # fmt: skip
    batches: str = option("1,256", "batch sizes of sweep")
    scale: float = option(1.0, "below 1: fewer requests, shorter prompts and outputs, to try it", low=0.001, high=1.0)
    trace: str | None = option(None, "file for a timeline of all runs, host and device, that Perfetto opens")
    running: int = option(240, "requests that run while the long prompts of `long` arrive", low=1)
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
class TenantConfig:
    """One of those who share a server: a `[[tenants]]` table of the configuration file."""

    name: str = option("", "by which metrics and logs call it; tenants share no cached prefixes")
    keys: tuple[str, ...] = option((), "API keys that speak for it")
    weight: float = option(1.0, "its share against the others under policy fair", low=1e-6)
    max_requests: int | None = option(None, "requests at once, running or waiting", low=1)
    tokens_per_minute: int | None = option(None, "prompt and output tokens in a minute", low=1)
    max_priority: int = option(0, "highest priority that its requests may ask for", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.name:
            raise ConfigError("a tenant has no name: give it one.")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file: `[server]`, `[engine]`, `[scheduler]` with their options, `[[tenants]]`, and the model."""

    model: str | None
    load: str | None
    shape: str | None
    options: dict[str, Any]
    tenants: tuple[TenantConfig, ...]


def read_file(path: Path) -> ConfigFile:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config is {str(path)!r}, which cannot be read ({error}): correct it.") from None
    options: dict[str, Any] = {}
    for table, kind in (("server", ServerConfig), ("engine", EngineConfig), ("scheduler", SchedulerConfig)):
        given = _table(found.pop(table, {}), table, path)
        _check_names(given, [item.name for item in dataclasses.fields(kind)], f"{path.name}: [{table}]")
        options |= given
    rows = found.pop("tenants", [])
    if not isinstance(rows, list):
        raise ConfigError(f"{path.name}: tenants is {rows!r}: write [[tenants]] tables.")
    tenants = []
    for row in rows:
        given = _table(row, "tenants", path)
        _check_names(given, [item.name for item in dataclasses.fields(TenantConfig)], f"{path.name}: [[tenants]]")
        keys = given.get("keys", [])
        tenants.append(TenantConfig(**{**given, "keys": tuple(keys) if isinstance(keys, list) else keys}))
    if len({tenant.name for tenant in tenants}) < len(tenants):
        raise ConfigError(f"{path.name}: two tenants have the same name: give each its own.")
    if len({key for tenant in tenants for key in tenant.keys}) < sum(len(tenant.keys) for tenant in tenants):
        raise ConfigError(f"{path.name}: two tenants have the same key: give each its own.")
    _check_names(found, ["model", "load", "shape", "server", "engine", "scheduler", "tenants"], path.name)
    for name, value in found.items():
        if not isinstance(value, str):
            raise ConfigError(f"{path.name}: {name} is {value!r}: give a word.")
    return ConfigFile(found.get("model"), found.get("load"), found.get("shape"), options, tuple(tenants))


def _table(value: Any, name: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name}: {name} is {value!r}: write a table.")
    return dict(value)


def _check_names(given: Mapping[str, Any], known: list[str], where: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"these exist: {', '.join(known)}."
            raise ConfigError(f"{where} has {name!r}, which is not known: {hint}")


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, what it takes and what it tells."""

    # Server
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = option(8000, "port to listen on; 0: any free one", low=0, high=65535)
    served_name: str | None = option(None, "name that requests call the model by; the model's own if not given")
    workers: int = option(1, "processes that speak HTTP; one carries some 20,000 tokens a second", low=1, high=64)
    admin_key: str | None = option(None, "key of the /admin routes; without one nobody may use them")
    live_page: bool = option(True, "a page at / that shows browsers the engine at work; with API keys, to the admin")
    shutdown_s: float = option(3.0, "seconds that running requests get to finish after a signal to end", low=0.0)
    stall_s: float = option(60.0, "seconds without progress after which /health fails", low=0.1)

    # Limits
    max_body_bytes: int = option(16_777_216, "longest request body", low=1024)
    max_header_bytes: int = option(32_768, "longest request line and headers", low=1024)
    max_connections: int = option(4096, "connections at once, for each worker; more are answered 503", low=1)
    max_prompts: int = option(128, "prompts in one completions request", low=1)
    header_s: float = option(10.0, "seconds for a request's headers to arrive", low=0.01)
    body_s: float = option(60.0, "seconds for a request's body to arrive", low=0.01)
    keep_alive_s: float = option(30.0, "seconds that a connection may stay open between requests", low=0.01)
    slow_reader_s: float = option(30.0, "seconds that a client may leave its answer unread", low=0.01)

    # Logs
    log_level: str = option("info", "what is worth a line", choices=LOG_LEVELS)
    log_format: str = option("text", "json: one object a line", choices=LOG_FORMATS)
    log_prompts: bool = option(False, "write the text of prompts into the log, too")

    def __post_init__(self) -> None:
        check_options(self)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the engine and of the scheduler; one that is neither is an error that names its likely meaning."""
    known = {item.name: kind for kind in (SchedulerConfig, EngineConfig) for item in dataclasses.fields(kind)}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"these exist: {', '.join(sorted(known))}."
            raise ConfigError(f"option {name!r} is not known: {hint}")
    engine = {name: value for name, value in options.items() if known[name] is EngineConfig}
    return engine, {name: value for name, value in options.items() if known[name] is SchedulerConfig}


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
