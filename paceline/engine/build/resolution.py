"""Resolves options: what every `auto` becomes and why, which format every matrix gets, and what is refused.

Pure and fast: it reads no file and asks no device. Nothing is read or allocated before it has returned, and nothing
that it decides is decided again. Rank 0 resolves, and the other ranks receive the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import MAX_PAGES, ConfigError, EngineConfig, SchedulerConfig
from paceline.engine.build.facts import CPU, CUDA, DeviceFacts
from paceline.engine.build.weight_choice import (
    AUTO,
    ITEM_BYTES,
    NONE,
    OptionChoice,
    choose_weights,
    round_like,
)
from paceline.engine.kv_sizing import UnitBytes, check_models_fit
from paceline.engine.precision import FP8_KV, KernelFormat, Precision, check_arch
from paceline.model.files import UnloadedModel
from paceline.model.layout import Shard
from paceline.model.spec import ModelSpec
from paceline.model.weights_plan import WeightsPlan
from paceline.scheduler.plan import DRAFT_DEPTHS

log = logging.getLogger("paceline.engine")

# A prefill batch of 8,192 tokens takes milliseconds on a GPU and half a minute on a CPU.
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    CPU: {
        "max_running": 64,
        "max_batch_tokens": 1024,
        "max_prefill_tokens": 1024,
        "chunk_tokens": 512,
        "itl_target": math.inf,
    },
    CUDA: {"max_running": 512, "max_batch_tokens": 8192},
}


@dataclass(frozen=True, slots=True)
class Resolution:
    config: EngineConfig  # without any `auto` that this decides
    scheduler_options: Mapping[str, object]  # as given, with what follows from others
    scheduler: SchedulerConfig  # with the largest number of pages, unless it is given
    device: DeviceFacts
    spec: ModelSpec
    weights: WeightsPlan
    kv_dtype: str
    choices: tuple[OptionChoice, ...]
    draft_spec: ModelSpec | None = None
    draft_weights: WeightsPlan | None = None

    @property
    def specs(self) -> list[ModelSpec]:
        return [self.spec] if self.draft_spec is None else [self.spec, self.draft_spec]

    @property
    def plans(self) -> list[WeightsPlan]:
        return [self.weights] if self.draft_weights is None else [self.weights, self.draft_weights]

    @property
    def precision(self) -> Precision:
        """What kernels on a GPU depend on."""
        return Precision.of(self.config, self.weights.dtype, tuple(KernelFormat.of(plan) for plan in self.plans))

    @property
    def unit_bytes(self) -> UnitBytes:
        """Over all ranks, where they divide the KV heads."""
        item_bytes = 1 if self.kv_dtype == FP8_KV else ITEM_BYTES[self.kv_dtype]
        return UnitBytes.of(self.scheduler.page_size, [(spec, item_bytes) for spec in self.specs])

    @property
    def kv_bytes_per_token(self) -> int:
        return self.unit_bytes.page // self.scheduler.page_size

    def log_choices(self) -> None:
        """What takes more time or memory than the files suggest, and what differs from them."""
        for choice in self.choices:
            if choice.is_warning:
                log.warning("%s is %s: %s", choice.option, choice.value, choice.reason)


def resolve(
    source: UnloadedModel,
    config: EngineConfig,
    scheduler_options: Mapping[str, object],
    device: DeviceFacts,
    *,
    draft: UnloadedModel | None = None,
    adapter_ranks: tuple[int, ...] = (),
) -> Resolution:
    """Raises ConfigError or ModelError for options, files and devices that do not go together. adapter_ranks: of the
    adapters in `lora`."""
    spec = source.spec
    config = _with_adapters(_with_threads(config, device), adapter_ranks, device)
    weights, choices = choose_weights(source, config, device, tp=config.tp)
    kv_dtype = _kv_dtype(config, device, weights)
    specs = [spec] if draft is None else [spec, draft.spec]
    keeps_states = any(one.keeps_states for one in specs)
    if keeps_states:
        _check_states(config, scheduler_options)
    given_options, drafts = resolve_drafts(config, scheduler_options, device.kind, keeps_states=keeps_states)
    resolved = replace(config, dtype=weights.dtype, quantization=weights.quantization, speculate=drafts.value)
    if device.kind == CUDA:
        check_arch(resolved, device.arch)
        _check_gpu(source, draft)
    # Invalid options are reported before the weights are loaded.
    if config.role != "both" and not given_options.get("prefix_cache", True):
        raise ConfigError(f"role is {config.role!r} and prefix_cache is off: KV is sent and received by prefix.")
    scheduler = scheduler_config(spec, given_options, device.kind)
    config.num_kv_pages(scheduler, given_options)
    draft_weights = None
    if draft is not None:
        if device.kind == CUDA:
            draft_weights = round_like(draft, weights, config, device)
        else:
            draft_weights, found = choose_weights(draft, config, device, tp=1)
            choices += [replace(one, option=f"{one.option} of draft_model") for one in found]
    _check_ranks(config, spec, device)
    num_bytes = weights.loading_bytes
    if draft_weights is not None:
        num_bytes += config.tp * draft_weights.loading_bytes  # every rank has all of it
    if device.free_bytes is not None:
        check_models_fit(specs, num_bytes, free=device.free_bytes * (config.num_ranks if device.kind == CUDA else 1))
    found = [
        OptionChoice("device", device.kind, f"found: {device.name}" if config.device == AUTO else "as given"),
        OptionChoice(
            "dtype", weights.dtype, f"the default of device {device.kind}" if config.dtype == AUTO else "as given"
        ),
        *choices,
        OptionChoice(
            "kv_dtype", kv_dtype, "that of activations" if kv_dtype == weights.dtype else _KV_REASONS[kv_dtype]
        ),
        drafts,
    ]
    if keeps_states:
        found.append(OptionChoice("prefix_cache", "off", f"the model {_KEEPS_STATES}", is_warning=True))
    if config.num_ranks > 1:
        found.append(
            OptionChoice("collectives", backend(config, device.kind), f"{config.num_ranks} ranks on {device.kind}")
        )
    return Resolution(
        resolved,
        given_options,
        scheduler,
        device,
        spec,
        weights,
        kv_dtype,
        tuple(found),
        None if draft is None else draft.spec,
        draft_weights,
    )


_KEEPS_STATES = "has layers with a state, from which no earlier position can be resumed"
_KV_REASONS = {FP8_KV: "as given", "bfloat16": "half the memory, beside weights in 4 or 8 bits on a CPU"}


def _with_adapters(config: EngineConfig, ranks: tuple[int, ...], device: DeviceFacts) -> EngineConfig:
    """With the highest rank of all adapters, for which a GPU allocates memory."""
    highest = max(ranks, default=0)
    if 0 < config.max_lora_rank < highest:
        raise ConfigError(
            f"max_lora_rank is {config.max_lora_rank} and an adapter of lora has rank {highest}: raise it."
        )
    return config if config.max_lora_rank or device.kind == CPU else replace(config, max_lora_rank=highest)


def _with_threads(config: EngineConfig, device: DeviceFacts) -> EngineConfig:
    """On a CPU the ranks share the threads."""
    if config.num_ranks == 1 or config.threads is not None or device.kind != CPU:
        return config
    return replace(config, threads=max(1, device.num_threads // config.num_ranks))


def _kv_dtype(config: EngineConfig, device: DeviceFacts, weights: WeightsPlan) -> str:
    """With weights in 4 or 8 bits on a CPU, KV is in bfloat16 beside activations in float32."""
    is_native = device.kind == CPU and weights.quantization != NONE
    found, given = "bfloat16" if is_native else weights.dtype, config.kv_dtype
    if given == FP8_KV and device.kind != CUDA:
        raise ConfigError(f"kv_dtype is {given!r}, which needs a GPU: leave it out, KV is in {found} on a CPU.")
    if given == "bfloat16" and found != given:
        raise ConfigError(
            f"kv_dtype is {given!r} and dtype is {found!r}: set dtype to bfloat16, or leave kv_dtype out."
        )
    return given if given == FP8_KV else found


def _check_gpu(*sources: UnloadedModel | None) -> None:
    from paceline.engine.cuda.limits import check_supported

    for source in sources:
        if source is not None:
            check_supported(source.spec)


def _check_states(config: EngineConfig, given: Mapping[str, object]) -> None:
    """Raises for options that resume or send a part of a request; `scheduler_config` does for the prefix cache."""
    used = {
        "role": config.role != "both" and config.role,
        "speculate": config.speculate not in (None, "off") and config.speculate,
        "host_kv_tokens": config.host_kv_tokens,
        "num_host_pages": given.get("num_host_pages", 0),
    }
    for name, value in used.items():
        if value:
            raise ConfigError(f"{name} is {value!r} and the model {_KEEPS_STATES}: leave it out.")


def _check_ranks(config: EngineConfig, spec: ModelSpec, device: DeviceFacts) -> None:
    """Raises if the model cannot be divided, or the GPUs do not suffice."""
    Shard(0, config.tp, 0, config.pp).spec(spec)
    if device.kind == CUDA and not device.shares_gpus and device.count < config.num_ranks:
        name, each = ("tp", "rank") if config.pp == 1 else ("pp", "stage")
        raise ConfigError(
            f"{name} is {config.num_ranks} and there are {device.count} GPUs: each {each} needs one; lower {name}."
        )
    if config.collectives in ("nccl", "symmetric") and device.kind == CPU:
        raise ConfigError(f"collectives is {config.collectives!r}, which needs GPUs: set it to auto or gloo.")


def backend(config: EngineConfig, device_kind: str) -> str:
    """Of the collectives: gloo, nccl or symmetric."""
    if device_kind == CPU:
        return "gloo"
    return "nccl" if config.collectives == AUTO else config.collectives


def scheduler_config(spec: ModelSpec, given: Mapping[str, object], device_kind: str) -> SchedulerConfig:
    """The given options on top of the defaults for this device and model."""
    model = {
        "context_tokens": spec.context_tokens,
        "chunk_context": spec.double_cost_context,
        "prefix_cache": not spec.keeps_states,
    }
    options: dict[str, Any] = {
        "num_pages": MAX_PAGES,  # unless it is given, it is known with the executor
        **DEFAULTS[device_kind],
        **model,
        **given,
    }
    # A decode batch of all running requests must fit into a step: the option that was not given is adjusted.
    row_tokens = 1 + options.get("draft_tokens", 0)
    if "max_batch_tokens" not in given and isinstance(options["max_running"], int):
        options["max_batch_tokens"] = max(options["max_batch_tokens"], row_tokens * options["max_running"])
    elif "max_running" not in given and isinstance(options["max_batch_tokens"], int):
        options["max_running"] = max(1, min(options["max_running"], options["max_batch_tokens"] // row_tokens))
    config = SchedulerConfig(**options)
    if config.prefix_cache and spec.keeps_states:
        raise ConfigError(f"prefix_cache is True and the model {_KEEPS_STATES}: leave it out.")
    if config.context_tokens > spec.context_tokens:
        raise ConfigError(
            f"context_tokens is {config.context_tokens}, more than the model's {spec.context_tokens}: lower it or "
            "leave it out."
        )
    return config


def resolve_drafts(
    config: EngineConfig, given: Mapping[str, object], device_kind: str, *, keeps_states: bool = False
) -> tuple[dict[str, object], OptionChoice]:
    """The scheduler's options, with those that follow from `speculate`, and what that is."""
    reason = "as given"
    speculate = config.speculate
    if speculate is None:
        missing = f"the model {_KEEPS_STATES}" if keeps_states else why_no_drafts(config, given, device_kind)
        speculate, reason = ("auto", "there is room for drafts") if missing is None else ("off", missing)
    options = dict(given)
    if speculate != "off":
        options = {
            "draft_tokens": max(DRAFT_DEPTHS),
            "adaptive_drafts": speculate in ("auto", "draft"),
            "model_drafts": speculate == "draft",
            **options,
        }
    return options, OptionChoice("speculate", speculate, reason)


def why_no_drafts(config: EngineConfig, given: Mapping[str, object], device_kind: str) -> str | None:
    """Why drafts are not the default with other options."""
    if device_kind == "virtual":
        return "a virtual GPU has no tokens to draft from"
    if config.pp > 1 or config.role != "both" or (device_kind == CUDA and config.tp > 1):
        return "not the default with several GPUs, or with prefill and decode engines"
    defaults = DEFAULTS[device_kind]
    rows, tokens = given.get("max_running", defaults["max_running"]), given.get("max_batch_tokens", math.inf)
    has_room = isinstance(rows, int) and isinstance(tokens, int | float) and tokens >= rows * (1 + max(DRAFT_DEPTHS))
    return None if has_room else "max_batch_tokens leaves no room for drafts of all running requests"
