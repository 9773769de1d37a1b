"""Every option, declared once: name, type, default, bounds and help text.

An option is a dataclass field declared with `option(...)`. `check_options` enforces the declaration; the command line,
the environment variables, the configuration file, the simulator page and the tables of the docs are made from it, so
a bound or a sentence is never written twice.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from paceline.peer_flags import peer_hint
from paceline.request import PacelineError, Unavailable, suggest
from paceline.weight_formats import GGUF, WEIGHT_FORMATS

T = TypeVar("T")
if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class ConfigError(PacelineError, ValueError):
    """An option has an invalid value. The message names the option, the value and the remedy."""


class ConfigUnavailable(ConfigError, Unavailable):
    """The configuration file is not there now: the disk with it may be mounted later."""


def option(
    default: T,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[str] | Mapping[str, str] = (),
    hidden: str = "",
) -> T:
    """A dataclass field that is an option. Bounds are inclusive.

    `choices` may map each value to a sentence about it, for help texts and docs. `hidden` gives the reason why users
    cannot set the option yet: it is not in the command line, environment, configuration file or docs.
    """
    about = dict(choices) if isinstance(choices, Mapping) else {}
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "choice_help": about,
        "hidden": hidden,
    }
    if isinstance(default, dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def public_options(config: type) -> list[dataclasses.Field[object]]:
    """The options of a config class that users can set, in order of declaration."""
    return [item for item in dataclasses.fields(config) if not item.metadata["hidden"]]


def suggest_option(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """As `suggest`; an option of vLLM, SGLang or llama.cpp is translated."""
    known = set(known)
    return peer_hint(name, known, show) or suggest(name, known, show)


def full_help(item: dataclasses.Field[object]) -> str:
    """The help text of an option, with a sentence about each of its choices."""
    text: str = item.metadata["help"]
    about = "; ".join(f"{name}: {sentence}" for name, sentence in item.metadata["choice_help"].items())
    return f"{text}. {about}" if about else text


# The three tables below are shown by `--help`, by the simulator page and in docs/concepts.md.
POLICIES: Mapping[str, str] = {
    "fair": "token-weighted fair queueing between tenants, depth-first over shared prefixes within each",
    "fcfs": "first come, first served",
    "lpm": "longest prefix match: the request with the longest cached prefix first",
    "dfs": "depth-first search over the prefix tree: requests that share a prefix run together",
    "sjf": "shortest job first: fewest expected output tokens (over HTTP: max_tokens)",
    "lof": "longest output first: most expected output tokens (over HTTP: max_tokens)",
    "random": "random order, from order_seed",
    "priority": "highest priority first, then first come, first served",
    "hrrn": "highest response ratio next: (waiting time + service time) / service time; every 16th the oldest",
}
BATCHING: Mapping[str, str] = {
    "mixed": "prefill chunks and decodes share every forward pass (chunked prefill)",
    "prefill-first": "prefill batches run before decode batches, at most 8 in a row, and are never mixed with them",
    "static": "no request joins until all requests of the batch have finished",
}
EVICTION: Mapping[str, str] = {
    "lru": "the least recently used prefix first",
    "lfu": "the least frequently used prefix first, then the least recently used",
    "cost": "the prefix that is cheapest to recompute, weighted by its uses, first (GreedyDual)",
    "priority": "the prefix with the lowest priority first, then the least recently used; a prefix has the highest "
    "priority of the requests that used it since it was cached",
}
FULL_QUEUE: Mapping[str, str] = {
    "refuse": "it is refused",
    "yield": "if a waiting request has a lower priority, that with the lowest, and of these the youngest, is refused "
    "instead",
}


MAX_PAGES = 2**31 - 1  # page ids have 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Memory, batch limits, order and queue limits of the scheduler."""

    # Memory
    num_pages: int = option(
        4096,
        "number of pages in the KV cache (vLLM: num_gpu_blocks_override); an engine derives it from kv_tokens or "
        "kv_memory_fraction",
        low=1,
        high=MAX_PAGES,
    )
    page_size: int = option(16, "tokens per KV cache page (vLLM: block_size); 1 matches prefixes token by token", low=1)
    context_tokens: int = option(
        32768,
        "maximum number of prompt plus output tokens of a request (vLLM: max_model_len); default of an engine: the "
        "context length of the model",
        low=2,
    )
    prefix_cache: bool = option(
        True, "keep the KV of computed prefixes for later requests (vLLM: enable_prefix_caching; SGLang: radix cache)"
    )
    shared_reads: bool = option(
        True, "decode rows with a common cached prefix read its KV once, together (cascade attention)"
    )
    eviction: str = option("lru", "which cached prefix is evicted first when the KV cache is full", choices=EVICTION)
    partial_eviction: bool = option(
        True, "evict only as many pages as needed, from the end of a cached prefix; otherwise the whole tree node"
    )
    num_host_pages: int = option(
        0, "number of pages in host memory for evicted KV, fetched back when needed; 0 discards evicted KV", low=0
    )
    max_swap_pages: int = option(
        256, "maximum number of pages spilled to host memory, and fetched from it, per forward pass", low=1
    )
    host_page_cost: float = option(
        0.0,
        "time to fetch a page from host memory, in prompt tokens computed meanwhile; pages that are cheaper to "
        "recompute are not kept there; default on a GPU: estimated for PCIe 5 and an H200; on a CPU 0, every page is "
        "kept",
        low=0.0,
    )
    pin_quota_pages: int = option(0, "maximum number of pages that pinned prefixes may hold", low=0)

    # A step
    max_running: int = option(
        256,
        "maximum number of running requests (vLLM: max_num_seqs; SGLang: max_running_requests); default: 512 "
        "on a GPU, 64 on a CPU",
        low=1,
    )
    max_batch_tokens: int = option(
        8192,
        "maximum number of tokens in a forward pass (vLLM: max_num_batched_tokens); default: 8,192 on a GPU, "
        "1,024 on a CPU",
        low=1,
    )
    max_prefill_tokens: int = option(
        8192, "maximum number of prompt tokens in a forward pass; default: 8,192 on a GPU, 1,024 on a CPU", low=1
    )
    chunk_tokens: int = option(
        2048,
        "maximum number of prompt tokens of one request in a forward pass (SGLang: chunked_prefill_size); default: "
        "2,048 on a GPU, 512 on a CPU",
        low=1,
    )
    chunk_context: int = option(
        2048,
        "context length, in tokens, at which a prompt token takes twice as long to compute; while other requests "
        "decode and none waits, chunks are half as long and shrink as the context grows; default of an engine: "
        "computed from the sizes of the model",
        low=1,
    )
    batching: str = option("mixed", "how prefill and decode share forward passes", choices=BATCHING)
    draft_tokens: int = option(
        0,
        "draft tokens per row that a forward pass verifies (speculative decoding)",
        low=0,
        high=64,
        hidden="set speculate instead",
    )
    adaptive_drafts: bool = option(
        False,
        "give a forward pass only as many draft tokens as make it profitable, up to draft_tokens per row",
        hidden="set speculate instead",
    )
    model_drafts: bool = option(
        False,
        "with adaptive_drafts: drafts come from a draft model, not from the text of a request",
        hidden="set speculate instead",
    )
    num_stages: int = option(
        1,
        "stages of the pipeline that executes passes: decode rows are divided among so many passes, which alternate",
        low=1,
        high=64,
        hidden="set pp instead",
    )
    adapter_slots: int = option(
        8,
        "LoRA adapters that running requests can use at the same time",
        low=1,
        high=1024,
        hidden="set max_loras instead",
    )
    itl_target: float = option(
        0.125,
        "target inter-token latency in seconds: while requests decode, a forward pass has only as many prompt tokens "
        "as keep it below, or below twice the time of its decodes if that is longer; inf: no target; default: 0.125 on "
        "a GPU, inf on a CPU and for the Python class LLM",
        low=1e-6,
    )

    # Order
    policy: str = option(
        "fair",
        "order in which waiting requests are admitted (vLLM: scheduling_policy; SGLang: schedule_policy)",
        choices=POLICIES,
    )
    max_wait: float = option(
        0.2,
        "aging: seconds of device time that younger requests may get ahead of a waiting one, beyond half as much as "
        "older ones get; after that it is overdue and admitted before them; 0: first come, first served; inf: no aging",
        low=0.0,
    )
    fair_quantum: int = option(
        8192, "policy fair: tokens that a tenant is served before the scheduler switches to another tenant", low=1
    )
    output_weight: float = option(
        2.0, "cost of an output token, in prompt tokens (policy fair; hrrn until step times are known)", low=0.0
    )
    tenant_weights: Mapping[str, float] = option(
        {}, "policy fair: weight of each tenant; 1 if not given; a server sets it from the weight of its tenants"
    )
    background_tenants: str = option(
        "",
        "names of tenants, separated by commas, whose requests are admitted only while no request of another tenant "
        "waits, under any policy; a server adds its tenants with background and those of batches",
    )
    prefix_wait: bool = option(
        True, "in-batch prefix caching: wait for a prefix that is being computed instead of computing it twice"
    )
    prefix_wait_tokens: int = option(
        32, "minimum number of tokens saved, by prefix_wait or by a fetch from host memory, to wait for", low=1
    )
    look_ahead: int = option(
        8, "maximum number of requests tried in a step after one that does not fit into memory", low=0
    )
    max_overtakes: int = option(
        64, "number of requests admitted ahead of one that does not fit before memory is reserved for it", low=0
    )
    retract_gap: float = option(
        math.inf,
        "policy priority: a waiting request may retract (preempt) a running one whose priority is lower by this much",
        low=1,
    )

    # Limits
    max_waiting: int = option(
        100_000, "maximum number of waiting requests (SGLang: max_queued_requests); more are refused", low=1
    )
    max_waiting_tokens: int = option(
        2_000_000_000, "maximum number of waiting prompt tokens; requests beyond that are refused", low=1
    )
    clip_max_tokens: bool = option(
        False,
        "lower max_tokens of a request to what fits into the context and the KV cache, and say so in the response, "
        "instead of refusing the request",
    )
    queue_timeout_s: float = option(
        math.inf,
        "seconds after which a request that was not admitted ends (SGLang: SGLANG_REQ_WAITING_TIMEOUT); a request can "
        "set less",
        low=1e-3,
    )
    running_timeout_s: float = option(
        math.inf,
        "seconds after its admission after which a request ends, waiting again after a retraction included (SGLang: "
        "SGLANG_REQ_RUNNING_TIMEOUT); a request can set less",
        low=1e-3,
    )
    full_queue: str = option(
        "refuse",
        "what becomes of a request when max_waiting or max_waiting_tokens is reached",
        choices=FULL_QUEUE,
    )

    # Other
    order_seed: int = option(0, "random seed of policy random", low=0)
    journal_events: int = option(65_536, "number of recent decisions that the journal keeps", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        decode_tokens = self.max_running * (1 + self.draft_tokens)
        if self.max_batch_tokens < decode_tokens:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}, too small for a decode batch of max_running = "
                f"{self.max_running} requests: raise it to {decode_tokens} or lower max_running."
            )
        if self.num_stages > 1 and self.draft_tokens:
            raise ConfigError(
                f"num_stages is {self.num_stages} and draft_tokens is {self.draft_tokens}: a pipeline has no drafts."
            )
        if self.pin_quota_pages >= self.num_pages:
            raise ConfigError(
                f"pin_quota_pages is {self.pin_quota_pages}: must be less than num_pages = {self.num_pages}."
            )
        if self.num_host_pages and not self.prefix_cache:
            raise ConfigError(
                f"num_host_pages is {self.num_host_pages} and prefix_cache is off: host memory needs the prefix cache; "
                "remove one of the two."
            )
        if self.num_host_pages and self.host_from_token >= self.context_tokens:
            raise ConfigError(
                f"num_host_pages is {self.num_host_pages}, but with host_page_cost = {self.host_page_cost:g} all "
                f"of a context of {self.context_tokens} tokens is faster to recompute than to fetch: remove it."
            )
        for tenant, weight in self.tenant_weights.items():
            if not (isinstance(weight, int | float) and weight > 0 and math.isfinite(weight)):
                raise ConfigError(f"tenant_weights[{tenant!r}] is {weight!r}: must be a number above 0.")

    @property
    def background_names(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.background_tenants.split(",") if name.strip())

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output tokens that a request can have at most, by context and memory."""
        return min(self.context_tokens, (self.num_pages - self.pin_quota_pages) * self.page_size)

    @property
    def host_from_token(self) -> int:
        """The position in a prompt from which fetching a page is faster than recomputing it: the cost of computing a
        page grows with the context it attends to."""
        first = self.chunk_context * (self.host_page_cost / self.page_size - 1)
        return max(0, math.ceil(first / self.page_size)) * self.page_size


def check_options(config: DataclassInstance) -> None:
    """Raises ConfigError for the first option of `config` whose value does not match its declaration."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        _check(item.name, getattr(config, item.name), hints[item.name], item.metadata)


def _check(name: str, value: object, hint: object, metadata: Mapping[str, Any]) -> None:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return
    if float in kinds:
        valid = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        expected = "a number"
    elif bool in kinds:
        valid, expected = isinstance(value, bool), "true or false"
    elif int in kinds:
        valid, expected = isinstance(value, int) and not isinstance(value, bool), "an integer"
    elif str in kinds:
        valid, expected = isinstance(value, str), "a string"
    elif typing.get_origin(hint) is tuple:
        valid = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        expected = "a list of strings"
    else:
        valid, expected = isinstance(value, Mapping), "a mapping"
    if not valid:
        raise ConfigError(f"{name} is {value!r}: expected {expected}.")
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(metadata['choices'])}.")
    low, high = metadata["low"], metadata["high"]
    if low is not None and value < low:
        raise ConfigError(f"{name} is {value!r}: must be at least {low}.")
    if high is not None and value > high:
        raise ConfigError(f"{name} is {value!r}: must be at most {high}.")


OVERLAP = ("on", "off", "sync")
EXECUTORS = ("torch", "virtual")
SPECULATE: Mapping[str, str] = {
    "off": "one token per row and forward pass",
    "auto": "as ngram, with as many drafts as make a forward pass profitable by measured acceptance and time, or none",
    "ngram": "what followed the last tokens of a request when they occurred before in it (prompt lookup)",
    "draft": "what a draft model predicts (draft_model), with as many drafts as make a pass profitable, or none",
}
ROLES: Mapping[str, str] = {
    "both": "prompts and outputs",
    "prefill": "prompts, whose KV it sends to decode engines, beside requests of its own",
    "decode": "outputs, and prompts that no prefill engine computes for it; KV arrives in its host memory "
    "(host_kv_tokens)",
}
KV_TRANSPORTS: Mapping[str, str] = {
    "tcp": "pages follow their message on the connection, with a checksum",
    "nixl": "pages are written into the memory of the decode engine, by RDMA if there is; on both sides, with "
    "`pip install 'paceline[nixl]'`",
}
DRAFT_ACCEPTANCE = 0.7  # of a virtual GPU, where nothing else is given or recorded
VIRTUAL_TOKENS = ("prompt", "clock")
DEVICES = ("auto", "cpu", "cuda")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATION: Mapping[str, str] = {
    "auto": "weights of a quantized GGUF file and of a 4-bit checkpoint, on a GPU also of an FP8 or MXFP4 checkpoint, "
    "stay as they are stored, except those of small GGUF files on a GPU; `paceline models --plan` says what becomes of "
    "a model",
    "none": "weights are expanded to dtype",
    **{one.name: one.help for one in WEIGHT_FORMATS.values()},
    GGUF: "weights of a quantized GGUF file stay as they are stored",
}
KV_DTYPES: Mapping[str, str] = {
    "auto": "that of dtype",
    "bfloat16": "that of dtype, which must be bfloat16",
    "fp8_e4m3": "8 bits, half the memory and bandwidth of bfloat16, with a scale per layer and KV head (GPU only)",
}
OVERLAP_VARIABLE = "PACELINE_OVERLAP"  # read when the option is not given


COLLECTIVES: Mapping[str, str] = {
    "auto": "gloo on a CPU, nccl on GPUs",
    "gloo": "through host memory, without CUDA graphs; ranks may share a GPU, for tests",
    "nccl": "NCCL, in CUDA graphs",
    "symmetric": "messages of up to 512 KiB through symmetric memory, others by NCCL, in CUDA graphs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Device, precision and memory of the engine."""

    executor: str = option(
        "torch",
        "torch: run the model; virtual: run no model, each forward pass takes the time it takes on a GPU and tokens "
        "are synthetic",
        choices=EXECUTORS,
    )
    device: str = option("auto", "device to run the model on; auto: a GPU if there is one", choices=DEVICES)
    tp: int = option(
        1,
        "tensor parallelism: number of GPUs, or of processes on a CPU, among which every layer is divided (vLLM: "
        "tensor_parallel_size; SGLang: tp_size)",
        low=1,
        high=64,
    )
    pp: int = option(
        1,
        "pipeline parallelism: number of GPUs, or of processes on a CPU, among which the layers are divided (vLLM: "
        "pipeline_parallel_size; SGLang: pp_size)",
        low=1,
        high=64,
    )
    collectives: str = option("auto", "how the ranks of tp, or the stages of pp, exchange tensors", choices=COLLECTIVES)
    speculate: str | None = option(
        None,
        "speculative decoding: draft tokens that are verified in the same forward pass, with the same output; default: "
        "auto; off with pp, and on GPUs with tp (vLLM: speculative_config; SGLang: speculative_algorithm)",
        choices=SPECULATE,
    )
    draft_model: str | None = option(
        None,
        "speculate draft: a smaller model with the same tokenizer: a folder, a .gguf file or a Hugging Face id; with "
        "load random, the name of a shape (vLLM: speculative_config; SGLang: speculative_draft_model_path)",
    )
    lora: Mapping[str, str] = option(
        {},
        "LoRA adapters to load at the start, as name=folder, separated by commas; a request uses one by its name as "
        "model (vLLM: lora_modules; SGLang: lora_paths)",
    )
    max_loras: int = option(
        8,
        "LoRA adapters that running requests can use at the same time (vLLM: max_loras; SGLang: max_loras_per_batch); "
        "more can be loaded, and wait in host memory",
        low=1,
        high=1024,
    )
    max_lora_rank: int = option(
        0,
        "highest rank of LoRA adapters (vLLM: max_lora_rank); on a GPU, memory for max_loras adapters of this rank is "
        "allocated at the start; 0: the highest of lora, on a CPU any",
        low=0,
        high=128,
    )
    dtype: str = option(
        "auto", "data type of weights and KV cache; auto: float32 on a CPU, bfloat16 on a GPU", choices=DTYPE_NAMES
    )
    quantization: str = option("auto", "weights with fewer bits than dtype", choices=QUANTIZATION)
    kv_dtype: str = option(
        "auto",
        "data type of the KV cache (vLLM, SGLang: kv_cache_dtype, where fp8 is fp8_e4m3); auto: dtype, or bfloat16 "
        "with quantized weights on a CPU",
        choices=KV_DTYPES,
    )
    threads: int | None = option(None, "number of CPU threads for compute; default: one per core", low=1, high=1024)
    overlap: str | None = option(
        None,
        "on: plan the next forward pass while one runs (SGLang: overlap schedule; vLLM: async_scheduling); off: one "
        "after the other; sync: as on, with a full synchronization before each pass, to find race conditions; "
        f"default: ${OVERLAP_VARIABLE}, or on",
        choices=OVERLAP,
    )
    kv_tokens: int | None = option(
        None,
        "size of the KV cache in tokens (SGLang: max_total_tokens); default: kv_memory_fraction of the free memory",
        low=1,
    )
    host_kv_tokens: int = option(
        0,
        "size in tokens of the host memory for evicted KV, which is fetched back where that is faster than recomputing "
        "it (vLLM: KV offloading connector; SGLang: HiCache); 0: none, but role decode then has 4 GiB, or an eighth of "
        "the free memory if that is less",
        low=0,
    )
    role: str = option(
        "both",
        "prefill/decode disaggregation: prefill exports pages, decode has host memory that others write",
        choices=ROLES,
        hidden="set the role of the server instead",
    )
    kv_memory_fraction: float | None = option(
        None,
        "fraction of the memory that is free after loading the model, for the KV cache; default: 0.3 on a CPU, 0.9 on "
        "a GPU (vLLM's gpu_memory_utilization and SGLang's mem_fraction_static are fractions of all memory)",
        low=0.001,
        high=0.95,
    )

    recent_output_tokens: int = option(
        262_144,
        "with speculate: tokens of finished outputs that are kept for each tenant, up to 1,024 outputs, and drafted "
        "when a prompt or its end comes again; 0: none",
        low=0,
    )
    kernel_folder: str | None = option(
        None,
        "device cuda: folder of compiled kernels, written by `paceline compile`; what it lacks is compiled at start",
    )
    record: str | None = option(
        None,
        "file to record every request (token hashes, no text) and every forward pass to, for `paceline sim`; replicas, "
        "and engines that are restarted, have files of their own",
    )
    virtual_slowdown: float = option(
        1.0, "executor virtual: slowdown factor relative to an H200 running a 0.6B model", low=1e-6
    )
    virtual_tokens: str = option(
        "prompt",
        "executor virtual: prompt: tokens depend on the prompt only; clock: tokens encode the time they were made at",
        choices=VIRTUAL_TOKENS,
    )
    virtual_acceptance: float = option(
        DRAFT_ACCEPTANCE,
        "executor virtual with speculate: probability that a draft token is right if those before it are",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.draft_model is not None and self.speculate != "draft":
            raise ConfigError(
                f"draft_model is {self.draft_model!r} and speculate is {self.speculate!r}: set speculate to draft, or "
                "remove draft_model."
            )
        if self.draft_model is not None and self.executor == "virtual":
            raise ConfigError(
                f"draft_model is {self.draft_model!r} and executor is 'virtual', which runs no model: remove one."
            )
        if self.quantization not in ("auto", "none") and self.executor == "virtual":
            raise ConfigError(
                f"quantization is {self.quantization!r} and executor is 'virtual', which has no weights: remove one."
            )
        if self.kv_dtype != "auto" and self.executor == "virtual":
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r} and executor is 'virtual', which has no KV: remove one.")
        if self.collectives != "auto" and self.executor == "virtual":
            raise ConfigError(
                f"collectives is {self.collectives!r} and executor is 'virtual', which sends no tensors: remove one."
            )
        self._check_pipeline()
        self._check_lora()
        if self.collectives != "auto" and self.num_ranks == 1:
            raise ConfigError(f"collectives is {self.collectives!r} and tp is 1: give tp or pp, too.")
        if self.speculate == "draft" and not self.draft_model:
            raise ConfigError(f"speculate is 'draft' and draft_model is {self.draft_model!r}: name a draft model.")

    def _check_lora(self) -> None:
        default = next(item.default for item in dataclasses.fields(self) if item.name == "max_loras")
        for name, value, is_given in (
            ("lora", dict(self.lora), bool(self.lora)),
            ("max_loras", self.max_loras, self.max_loras != default),
            ("max_lora_rank", self.max_lora_rank, self.max_lora_rank > 0),
        ):
            if is_given and self.executor == "virtual":
                raise ConfigError(f"{name} is {value!r} and executor is 'virtual', which runs no model: remove one.")
            if is_given and self.role != "both":
                raise ConfigError(
                    f"{name} is {value!r} and role is {self.role!r}: KV of adapters is not sent between engines yet; "
                    "remove one."
                )
        for adapter, path in self.lora.items():
            if not isinstance(adapter, str) or not adapter or not isinstance(path, str) or not path:
                raise ConfigError(f"lora has {adapter!r}: {path!r}: expected pairs such as name=folder.")

    @property
    def num_ranks(self) -> int:
        """Processes that have a part of the model."""
        return self.tp * self.pp

    def _check_pipeline(self) -> None:
        if self.pp == 1:
            return
        if self.speculate not in (None, "off"):
            raise ConfigError(
                f"pp is {self.pp} and speculate is {self.speculate!r}: a pipeline has no speculative decoding; set it "
                "to off."
            )
        if self.collectives == "symmetric":
            raise ConfigError(
                f"pp is {self.pp} and collectives is 'symmetric', which only tp uses: set it to auto, nccl or gloo."
            )
        for name, remedy in (
            ("tp", "tensor and pipeline parallelism cannot be combined yet; set one of them to 1"),
            ("executor", "it runs no model; remove one"),
            ("record", "passes of a pipeline cannot be recorded; remove one"),
            ("role", "stages cannot send their KV yet; remove one"),
        ):
            value = getattr(self, name)
            default = next(item.default for item in dataclasses.fields(self) if item.name == name)
            if value != default:
                raise ConfigError(f"pp is {self.pp} and {name} is {value!r}: {remedy}.")

    def num_kv_pages(self, scheduler: SchedulerConfig, given: Mapping[str, Any]) -> int | None:
        """`kv_tokens` in pages, or `num_pages` of `given`, the scheduler options; None if neither is given."""
        if self.kv_tokens is None:
            return given.get("num_pages")
        if "num_pages" in given:
            raise ConfigError(f"kv_tokens is {self.kv_tokens} and num_pages is {given['num_pages']}: give one of them.")
        least = (scheduler.pin_quota_pages + 1) * scheduler.page_size
        if self.kv_tokens < least:
            pins = f" beside pin_quota_pages = {scheduler.pin_quota_pages}" if scheduler.pin_quota_pages else ""
            raise ConfigError(
                f"kv_tokens is {self.kv_tokens}, less than a page of {scheduler.page_size} tokens{pins}: give at least "
                f"{least}, and more than the longest request."
            )
        most = MAX_PAGES * scheduler.page_size
        if self.kv_tokens > most:
            raise ConfigError(f"kv_tokens is {self.kv_tokens}: must be at most {most}.")
        return self.kv_tokens // scheduler.page_size

    def num_host_pages(self, page_size: int, given: Mapping[str, Any]) -> int:
        """`host_kv_tokens` in pages, or `num_host_pages` of `given`, the scheduler options."""
        if self.host_kv_tokens and "num_host_pages" in given:
            raise ConfigError(
                f"host_kv_tokens is {self.host_kv_tokens} and num_host_pages is {given['num_host_pages']}: "
                "set only one of them."
            )
        if 0 < self.host_kv_tokens < page_size:
            raise ConfigError(
                f"host_kv_tokens is {self.host_kv_tokens}, less than a page of {page_size} tokens: raise or remove it."
            )
        pages: int = given.get("num_host_pages", 0)
        return self.host_kv_tokens // page_size or pages

    @property
    def overlap_mode(self) -> str:
        """on, off or sync: the option, or the environment variable, or on."""
        mode = self.overlap or os.environ.get(OVERLAP_VARIABLE) or "on"
        if mode not in OVERLAP:
            raise ConfigError(f"{OVERLAP_VARIABLE} is {mode!r}: choose one of {', '.join(OVERLAP)}.")
        return mode


OFFLINE_PARTS: Mapping[str, str] = {
    "nano": "256 prompts of 100 to 1,024 tokens, outputs of 100 to 1,024 tokens",
    "gsp": "1,024 prompts in 64 groups with a shared prefix (SGLang: generated-shared-prefix)",
    "zipf": "1,024 prompts with 64 prefixes of 256 to 4,096 tokens, the n-th chosen with a probability of 1/n",
    "prompts": "32 prompts of 256 to 24,000 tokens, 32 output tokens each",
    "chats": "64 conversations of 6 turns that do not fit into the KV cache: what host_kv_tokens is worth",
    "sweep": "time per output token at several batch sizes",
    "shared-sweep": "sweep with prompts that begin with the same 2,048 tokens",
    "sampling": "nano with top-k, top-p and penalties on all rows, compared with temperature alone",
    "logprobs": "64 and 256 prompts with top-5 logprobs, compared with none",
    "grammar": "64 prompts with a JSON schema each, compared with unconstrained output",
    "embed": "1,000 texts of 200 tokens embedded (mean, then last), compared with one output token of each",
    "speculate": "speculate auto compared with off, by task: what drafts gain, how many are accepted",
    "prefill-overload": "inter-token latency of 250 streams while 360 prompts a minute of 3,000 to 6,000 tokens arrive",
    "small-behind-large": "TTFT of 11 prompts of 256 tokens that arrive right after 18 of 2,560",
    "startup": "time from the start of a process to its first token",
    "cold": "a new process without compiled kernels: time until it is ready, and what first uses cost",
    "mix": "all features, long prompts and long contexts at random in a new process: the longest launch",
    "profile": "GPU time by kernel",
    "check": "greedy tokens within tolerance of float32, and equal in all overlap modes",
    "logits": "logits compared with transformers, same weights",
    "alone": "the same request alone and in a full batch",
    "cosine": "embeddings of the GPU compared with float32 on the CPU, same weights",
    "long": "inter-token latency while prompts of 32,000 tokens arrive",
    "soak": "random joins, aborts and retractions, with invariants checked at every step",
    "swap": "KV pages fetched from host memory are bitwise equal to those spilled",
    "tp": "tensor parallelism with two ranks on one device: greedy tokens within tolerance of float32",
    "pp": "pipeline parallelism with two and three stages on one device: greedy tokens within tolerance of float32",
    "weights": "weights replaced in a running engine, compared with an engine that loaded them; and how long it takes",
    "pd": "prefill/decode disaggregation, two engines on one device: rate of the KV against a pinned copy, and tokens",
    "sanitizer": "a short run under compute-sanitizer, if installed",
    "tiny": "that short run without compute-sanitizer",
    "first-uses": "the first runs of nano, gsp and zipf, and of every feature (used by cold)",
    "first-fetch": "the first fetches from host memory (used by cold)",
    "pd-prefill": "the prefill engine of pd (used by pd)",
}  # what `paceline bench offline` runs; from `check` on, a part prints PASS or FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """Options of `paceline bench offline`."""

    repeats: int = option(3, "runs of each workload, with different tokens each time; the best run counts", low=1)
    overlap: str = option(
        "on", "overlap mode: on, off or sync; both: every run with on and with off", choices=(*OVERLAP, "both")
    )
    batches: str = option(
        "1,256",
        "batch sizes of sweep, shared-sweep and speculate, separated by commas; speculate on a CPU: those up to 16",
    )
    questions: str | None = option(
        None, "part speculate: file of further tasks, JSON Lines with category and turns, as the questions of MT-Bench"
    )
    scale: float | None = option(
        None,
        "fraction of the number of requests and of the prompt and output lengths; default: 1 on a GPU, on a CPU as "
        "much as takes about two minutes",
        low=0.001,
        high=1.0,
    )
    trace: str | None = option(None, "file to write a timeline of all runs (host and device) to, for Perfetto")
    running: int = option(240, "part long: number of running requests while the long prompts arrive", low=1)
    soak_seconds: float = option(300.0, "part soak: duration in seconds", low=0.1)
    mix_seconds: float = option(60.0, "parts mix and cold: duration of the mix in seconds", low=0.1)

    def __post_init__(self) -> None:
        check_options(self)
        if not all(one.strip().isdecimal() and int(one) for one in self.batches.split(",")):
            raise ConfigError(f"batches is {self.batches!r}: expected positive integers such as 1,16,256.")

    @property
    def overlap_modes(self) -> tuple[str, ...]:
        return ("on", "off") if self.overlap == "both" else (self.overlap,)

    @property
    def batch_sizes(self) -> list[int]:
        return [int(one) for one in self.batches.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """Options of `paceline bench quality`."""

    dtype: str = option("auto", "data type of the weights of model", choices=DTYPE_NAMES)
    quantization: str = option("auto", "weights of model with fewer bits than dtype", choices=QUANTIZATION)
    kv_dtype: str = option("auto", "data type of the KV cache of model", choices=KV_DTYPES)
    against: str | None = option(None, "model to compare with; default: the same")
    against_dtype: str = option("float32", "data type of the weights of against", choices=DTYPE_NAMES)
    against_quantization: str = option(
        "auto", "weights of against with fewer bits than against_dtype", choices=QUANTIZATION
    )
    text: str | None = option(None, "UTF-8 text file; default: a text of Paceline's documentation")
    text_tokens: int = option(1024, "number of tokens of the text that are compared", low=2)
    window: int = option(256, "tokens of the text that are computed together; the first has no context", low=2)
    needle_lengths: str = option(
        "128,256,512", "prompt lengths in tokens of the needle-in-a-haystack test, separated by commas; none: no test"
    )
    needle_seed: int = option(0, "seed of the facts that the prompts hide", low=0)
    threads: int | None = option(None, "number of CPU threads for compute; default: one per core", low=1, high=1024)

    def __post_init__(self) -> None:
        check_options(self)
        if self.needle_lengths != "none" and not all(
            one.strip().isdecimal() and int(one) for one in self.needle_lengths.split(",")
        ):
            raise ConfigError(
                f"needle_lengths is {self.needle_lengths!r}: expected positive integers such as 128,256, or none."
            )

    @property
    def lengths(self) -> list[int]:
        return [] if self.needle_lengths == "none" else [int(one) for one in self.needle_lengths.split(",")]


BATCH_SUFFIX = ":batch"  # of the background tenant that the batches of a tenant run as


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant of a shared server: a `[[tenants]]` table of the configuration file."""

    name: str = option("", "name in metrics and logs; tenants do not share cached prefixes")
    keys: tuple[str, ...] = option((), "API keys of the tenant")
    weight: float = option(1.0, "weight relative to other tenants under policy fair", low=1e-6)
    max_requests: int | None = option(None, "maximum number of concurrent requests, running or waiting", low=1)
    tokens_per_minute: int | None = option(None, "maximum number of prompt and output tokens per minute", low=1)
    max_priority: int = option(0, "highest priority that a request of the tenant may set", low=0)
    background: bool = option(
        False, "admit requests of the tenant only while no request of another tenant waits, under any policy"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.name:
            raise ConfigError("name of a tenant is missing: every [[tenants]] table needs one.")
        if "," in self.name:
            raise ConfigError(f"name of a tenant is {self.name!r}: commas separate names in options; choose another.")
        if self.name.endswith(BATCH_SUFFIX) and self.keys:
            raise ConfigError(f"name of a tenant is {self.name!r}, but {BATCH_SUFFIX} marks batches: choose another.")
        for key in self.keys:
            check_key(f"keys of tenant {self.name!r}", key)
        if len(set(self.keys)) < len(self.keys):
            raise ConfigError(f"keys of tenant {self.name!r}: a key is given twice; remove one.")


def check_key(name: str, key: str) -> None:
    """Raises ConfigError for an API key that everyone has (an empty one) or that no client can send."""
    if not key:
        raise ConfigError(f"{name}: a key is empty, perhaps from an unset variable; give a key, or remove it.")
    if key.startswith("$"):
        raise ConfigError(
            f"{name}: a key begins with $, and variables are not expanded here; write the key itself, or give it as an "
            "environment variable such as PACELINE_ADMIN_KEY."
        )
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"{name}: a key has a space or another character that a header cannot carry; use ASCII.")


METRIC_NAMES: Mapping[str, str] = {
    "paceline": "such as paceline_num_requests_waiting",
    "vllm": "as in vLLM, such as vllm:num_requests_waiting",
    "both": "each of them twice",
}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


ROUTERS: Mapping[str, str] = {
    "cache": "least predicted time, given the prefix that each replica has cached",
    "least-loaded": "fewest unfinished requests",
    "round-robin": "in turn",
    "random": "at random",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Several engines with the same model."""

    replicas: int = option(1, "number of engines with the same model, each with a KV cache of its own", low=1, high=64)
    router: str = option("cache", "how the replica of a request is chosen", choices=ROUTERS)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ReplicaConfig):
    """Replicas, address, processes, limits and logs of the HTTP server."""

    prefill_replicas: int = option(
        0,
        "of the replicas, how many compute prompts for the others, which decode (prefill/decode disaggregation); 0: "
        "every replica does both",
        low=0,
        high=63,
    )

    # Server
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = option(8000, "port to listen on; 0: any free port", low=0, high=65535)
    served_name: str | None = option(
        None, "model name in the API (vLLM: served_model_name); default: the name of the model"
    )
    workers: int = option(
        1, "number of HTTP processes; each needs a core and streams 20,000 to 50,000 tokens per second", low=1, high=64
    )
    admin_key: str | None = option(None, "API key of the /admin routes; without one they are disabled")
    public_metrics: bool = option(
        False,
        "serve /metrics without a key also where there are API keys: it has the names of tenants and totals of all; "
        "without this option it then needs the admin key",
    )
    metric_names: str = option(
        "paceline", "names of the metrics that routers read; all others begin with paceline_", choices=METRIC_NAMES
    )
    cors_origins: str = option(
        "",
        "origins of web pages that may call the server from a browser, separated by commas, such as "
        "https://chat.example; *: all (vLLM: allowed_origins)",
    )
    allowed_hosts: str = option(
        "",
        "names by which clients may call the server (header Host), separated by commas, such as llm.example; *: all; "
        "default: all, but without API keys on a loopback address only localhost and addresses, and no web pages of "
        "other origins",
    )
    live_page: bool = option(True, "serve a page at / that shows the engine's state; with API keys, to the admin only")
    shutdown_s: float = option(3.0, "seconds that running requests get to finish after SIGTERM or SIGINT", low=0.0)
    stall_s: float = option(
        10.0,
        "seconds without a sign of life after which an engine or an HTTP process is ended and started again; six times "
        "as long while it loads",
        low=1.0,
    )
    watchdog_s: float = option(
        60.0,
        "seconds in which an engine has work and finishes no forward pass, after which it is ended and started again "
        "(SGLang: watchdog_timeout); more than the longest pass takes on a GPU; 20 times as long for a CPU that "
        "computes",
        low=0.1,
    )

    separate_reasoning: bool = option(
        True,
        "return the reasoning of a model in reasoning_content, not in content (vLLM, SGLang: reasoning_parser); a "
        "request can override it",
    )
    allow_control_tokens: bool = option(
        False,
        "a control token that a message spells, such as <|im_end|>, is that token; otherwise it is text, except "
        "where the chat template itself searches for it, such as </think>. Prompts without a template are not affected",
    )

    role: str = option(
        "both",
        "prefill/decode disaggregation: which part of requests this server computes (SGLang: disaggregation_mode; "
        "vLLM: kv_transfer_config)",
        choices=ROLES,
    )
    kv_listen: str | None = option(
        None, "role prefill: address for the decode engines of other servers, such as tcp://10.0.0.1:5600"
    )
    prefill_peers: str = option("", "role decode: addresses of prefill engines (their kv_listen), separated by commas")
    kv_transport: str = option(
        "tcp",
        "role prefill and decode: how KV travels between servers (vLLM: NixlConnector; SGLang: "
        "disaggregation_transfer_backend)",
        choices=KV_TRANSPORTS,
    )
    kv_token: str | None = option(
        None, "secret that prefill and decode engines of several servers share: only who knows it can connect"
    )
    prefill_from_tokens: int = option(
        512,
        "prefill/decode disaggregation: prompts with fewer tokens to compute are computed by the decode engine, since "
        "a transfer would take longer",
        low=1,
    )
    prefill_timeout_s: float = option(
        30.0,
        "prefill/decode disaggregation: seconds to wait for the KV of a prompt; then the decode engine computes it",
        low=0.001,
    )

    kv_events: str | None = option(
        None,
        "ZeroMQ address to publish KV events on, such as tcp://*:5557, for routers that send a request where its "
        "prefix is cached (vLLM: kv_events_config); they have the token ids of all prompts; each of several replicas "
        "has a port of its own, from this one on",
    )
    kv_events_replay: str | None = option(
        None,
        "ZeroMQ address, such as tcp://*:5558, where subscribers ask for KV events that they missed; with replicas, as "
        "kv_events",
    )
    kv_events_topic: str = option("", "topic of KV events; llm-d expects kv@<pod address>@<model>")

    lora_folder: str | None = option(
        None,
        "folder below which POST /v1/load_lora_adapter may load LoRA adapters; without it none can be loaded over HTTP",
    )
    batch_folder: str | None = option(
        None,
        "folder for the files of /v1/files and the state of /v1/batches; without it these routes are disabled; several "
        "servers may share one",
    )

    # Limits
    max_body_bytes: int = option(16_777_216, "maximum size of a request body in bytes", low=1024)
    max_header_bytes: int = option(32_768, "maximum size of the request line and headers in bytes", low=1024)
    max_headers: int = option(100, "maximum number of headers of a request", low=10)
    max_connections: int = option(
        4096,
        "maximum number of concurrent connections per worker; beyond it idle ones are closed, then new ones are "
        "answered with 503; lowered to what `ulimit -Hn` allows",
        low=1,
    )
    max_prompts: int = option(128, "maximum number of prompts in a completions request", low=1)
    stored_responses: int = option(
        1000, "maximum number of responses of /v1/responses that are kept for each tenant; 0: none", low=0
    )
    stored_response_bytes: int = option(
        67_108_864, "maximum memory in bytes of the stored responses of a tenant", low=0
    )
    batch_file_bytes: int = option(209_715_200, "maximum size of a file of /v1/files in bytes", low=1024)
    batch_tenant_files: int = option(
        1000, "maximum number of files of /v1/files that are kept for each tenant; more are refused", low=1
    )
    batch_tenant_bytes: int = option(
        10_737_418_240,
        "maximum size in bytes of all files of a tenant, outputs included: more are refused, and a batch fails the "
        "requests that it has not run",
        low=1024,
    )
    batch_expiry_days: float = option(
        30.0, "days after which files, and batches that have finished, are deleted", low=0.0
    )
    header_s: float = option(10.0, "timeout in seconds for receiving the headers of a request", low=0.01)
    body_s: float = option(60.0, "timeout in seconds for receiving the body of a request", low=0.01)
    keep_alive_s: float = option(30.0, "seconds that an idle connection stays open between requests", low=0.01)
    slow_reader_s: float = option(
        30.0, "seconds that a client may leave a response unread before it is disconnected", low=0.01
    )

    # Logs
    log_level: str = option("info", "minimum level of log messages", choices=LOG_LEVELS)
    log_format: str = option(
        "text", "format of log messages; json: one object per line, and nothing else is written", choices=LOG_FORMATS
    )
    log_prompts: bool = option(False, "include the text of prompts in the log")

    def __post_init__(self) -> None:
        check_options(self)
        if self.admin_key is not None:
            check_key("admin_key", self.admin_key)
        self._check_roles()
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and not re.fullmatch(r"tcp://.+:(\d+|\*)|ipc://.+", address):
                raise ConfigError(f"{name} is {address!r}: expected tcp://<host>:<port> or ipc://<path>; host *: all.")
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(self, name) and self.kv_events is None:
                raise ConfigError(f"{name} is given without kv_events: give the address of kv_events too.")
        self._check_event_addresses()
        for origin in self.allowed_origins:
            parts = urlsplit(origin)
            is_origin = parts.scheme in ("http", "https") and origin == f"{parts.scheme}://{parts.netloc}"
            if origin != "*" and not (is_origin and parts.hostname and "@" not in origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}: expected * or origins such as https://chat.example:8443, "
                    "without a path."
                )

        for name in self.allowed_host_names:
            if not re.fullmatch(r"\*|[\w.-]+", name):
                raise ConfigError(
                    f"allowed_hosts has {name!r}: expected * or names such as llm.example, without a scheme or port."
                )

    def kv_event_addresses(self, replica: int) -> tuple[str | None, str | None]:
        """Where a replica publishes and replays KV events."""
        given = self.kv_events, self.kv_events_replay
        events, replay = (None if one is None else _replica_address(one, replica) for one in given)
        return events, replay

    def _check_event_addresses(self) -> None:
        used: set[str] = set()
        for replica in range(self.replicas):
            for address in self.kv_event_addresses(replica):
                if address in used and not address.endswith("*"):  # *: any free one
                    apart = "" if self.replicas == 1 else f", at least {self.replicas} apart: one for each replica"
                    raise ConfigError(
                        f"kv_events is {self.kv_events!r} and kv_events_replay is {self.kv_events_replay!r}, which "
                        f"both use {address!r}: give different ports{apart}."
                    )
                if address is not None:
                    used.add(address)

    def _check_roles(self) -> None:
        """Prefill/decode disaggregation."""
        if self.prefill_replicas and self.prefill_replicas >= self.replicas:
            raise ConfigError(
                f"prefill_replicas is {self.prefill_replicas} and replicas is {self.replicas}: at least one replica "
                "must decode; raise replicas."
            )
        if self.role != "both" and self.replicas > 1:
            raise ConfigError(
                f"role is {self.role!r} and replicas is {self.replicas}: give prefill_replicas instead of role, or one "
                "replica."
            )
        for name, role in (("kv_listen", "prefill"), ("prefill_peers", "decode")):
            value = getattr(self, name)
            if (self.role == role) != bool(value):
                raise ConfigError(
                    f"role is {self.role!r} and {name} is {value!r}: role {role} and {name} belong together."
                )
            for address in filter(None, (one.strip() for one in (value or "").split(","))):
                if not re.fullmatch(r"tcp://.+:\d+", address):
                    raise ConfigError(f"{name} has {address!r}: expected tcp://<host>:<port>.")
        if self.kv_transport != "tcp" and self.role == "both":
            raise ConfigError(
                f"kv_transport is {self.kv_transport!r} and role is 'both': it is for servers of role prefill and "
                "decode; replicas of one server share memory."
            )
        if (self.role != "both") != (self.kv_token is not None):
            raise ConfigError(
                f"role is {self.role!r} and kv_token is {'given' if self.kv_token else 'not given'}: engines of role "
                "prefill and decode need the same secret, such as the output of `openssl rand -hex 32`."
            )
        if self.kv_token is not None:
            check_key("kv_token", self.kv_token)

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        return tuple(one.strip() for one in self.prefill_peers.split(",") if one.strip())

    @property
    def allowed_host_names(self) -> list[str]:
        return [name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()]

    @property
    def allowed_origins(self) -> list[str]:
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]


def _replica_address(address: str, replica: int) -> str:
    """As vLLM offsets an address by the data parallel rank: the next ports."""
    if replica == 0 or address.endswith("*"):
        return address
    if address.startswith("ipc:"):
        return f"{address}_dp{replica}"
    host, port = address.rsplit(":", 1)
    return f"{host}:{int(port) + replica}"


def check_replicas(config: ServerConfig, engine: EngineConfig, tenants: Iterable[TenantConfig]) -> None:
    """Raises ConfigError for what several engines cannot do together, or the engine cannot do for a server."""
    if config.lora_folder is not None:
        for name, value, default, reason in (
            ("executor", engine.executor, "torch", "which runs no model"),
            ("role", config.role, "both", "which has no adapters yet"),
            ("prefill_replicas", config.prefill_replicas, 0, "which have no adapters yet"),
        ):
            if value != default:
                raise ConfigError(
                    f"lora_folder is {config.lora_folder!r} and {name} is {value!r}, {reason}: remove one of them."
                )
    if config.role != "both" or config.prefill_replicas:
        name = "role" if config.role != "both" else "prefill_replicas"
        value = getattr(config, name)
        if engine.executor == "virtual":
            raise ConfigError(
                f"{name} is {value!r} and executor is 'virtual', which computes no KV to send: remove one."
            )
        if engine.pp > 1:
            raise ConfigError(
                f"{name} is {value!r} and pp is {engine.pp}: stages cannot send their KV yet; remove one."
            )
    if config.replicas == 1:
        if config.router != "cache":
            raise ConfigError(f"router is {config.router!r}, but there is one replica: give replicas, too.")
        return
    limited = [one.name for one in tenants if one.max_requests is not None or one.tokens_per_minute is not None]
    if limited and config.workers > 1:
        raise ConfigError(
            f"workers is {config.workers}, replicas is {config.replicas}, and tenant {limited[0]!r} has max_requests "
            "or tokens_per_minute, which one worker has to count: set workers to 1, or remove the limits."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Engines as replicas of a Ray Serve deployment."""

    max_replicas: int | None = option(
        None,
        "scale between `replicas` and this number of engines, by predicted queue time; default: always `replicas`",
        low=1,
        high=64,
    )
    target_queue_s: float = option(
        2.0, "autoscaling: predicted queue time in seconds above which engines are started", low=1e-3
    )
    scale_up_s: float = option(
        10.0, "autoscaling: seconds that more engines must have been needed before they are started", low=0.0
    )
    scale_down_s: float = option(
        300.0, "autoscaling: seconds that one engine less must have been enough before one is stopped", low=0.0
    )
    num_cpus: float = option(
        1.0, "CPUs that Ray reserves for an engine; on device cpu it has that many threads", low=0.0, high=1024
    )
    num_gpus: int | None = option(
        None,
        "GPUs that Ray reserves for an engine; default: as many as it uses, or none where the cluster has none",
        low=0,
        high=64,
    )
    drain_s: float = option(
        600.0, "seconds that the requests of an engine get to finish when Ray stops it, such as in an update", low=0.0
    )

    def __post_init__(self) -> None:
        check_options(self)


def split_options(options: Mapping[str, object], others: Iterable[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits options into those of the engine and those of the scheduler. Unknown and hidden options are errors, which
    may suggest one of `others` too: the arguments of the caller."""
    fields = {item.name: (kind, item) for kind in (SchedulerConfig, EngineConfig) for item in dataclasses.fields(kind)}
    known = [name for name, (_, item) in fields.items() if not item.metadata["hidden"]]
    for name, value in options.items():
        if name not in fields:
            hint = suggest_option(name, [*known, *others]) or f"options are: {', '.join(sorted(known))}."
            raise ConfigError(f"unknown option {name!r}: {hint}")
        if reason := fields[name][1].metadata["hidden"]:
            raise ConfigError(f"{name} is {value!r}, which is not supported: {reason}.")
    engine = {name: value for name, value in options.items() if fields[name][0] is EngineConfig}
    return engine, {name: value for name, value in options.items() if fields[name][0] is SchedulerConfig}


def config_from(kind: Callable[..., T], options: Mapping[str, object], **others: object) -> T:
    """A config of a class that checks its options: `check_options` refuses a value of another type."""
    return kind(**others, **options)


ARRIVALS: Mapping[str, str] = {
    "once": "all requests at the start",
    "poisson": "independent arrivals",
    "gamma": "clustered arrivals",
    "onoff": "bursts, then pauses",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReplicaConfig(ReplicaConfig):
    """The virtual GPUs of a simulation."""

    tp: int = option(
        1,
        "tensor parallelism: number of virtual GPUs of each replica, among which every layer is divided; predicted "
        "from the profile of one GPU, not measured",
        low=1,
        high=8,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding in a simulation."""

    drafts: int = option(
        0,
        "speculative decoding: draft tokens per row that a forward pass verifies; 0: off",
        low=0,
        high=64,
    )
    acceptance: float | None = option(
        None,
        "probability that a draft token is right if those before it are; default: as recorded in a recording made with "
        f"speculate, else {DRAFT_ACCEPTANCE}",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def split(cls, options: Mapping[str, object]) -> tuple[SpeculationConfig, dict[str, object]]:
        """These options, and those of the scheduler, with what follows for it from these."""
        config = config_from(cls, {name: value for name, value in options.items() if name in cls.__dataclass_fields__})
        scheduler = {name: value for name, value in options.items() if name in SchedulerConfig.__dataclass_fields__}
        return config, scheduler | ({"draft_tokens": config.drafts} if config.drafts else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Requests of a simulated workload: arrival times, lengths and shared prefixes."""

    requests: int = option(200, "number of requests", low=1, high=1_000_000)
    arrivals: str = option("poisson", "arrival process", choices=ARRIVALS)
    rate: float = option(20.0, "mean arrival rate in requests per second", low=1e-6)
    burstiness: float = option(
        4.0,
        "gamma: squared coefficient of variation of the time between arrivals, 1 is poisson; onoff: rate of a burst "
        "over the mean rate",
        low=1,
    )
    prompt_tokens: int = option(512, "mean prompt length in tokens", low=2)
    output_tokens: int = option(128, "mean output length in tokens", low=1)
    shared: float = option(0.6, "fraction of a prompt that is the shared prefix of its group", low=0.0, high=0.99)
    groups: int = option(8, "number of groups of requests with a shared prefix", low=1)
    tenants: int = option(1, "number of tenants that send requests", low=1, high=1024)
    seed: int = option(0, "random seed of the workload", low=0)

    def __post_init__(self) -> None:
        check_options(self)
