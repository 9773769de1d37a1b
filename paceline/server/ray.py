"""Paceline as an application of Ray Serve: `serve run paceline.server.ray:build_app model=... replicas=2`.

An ingress deployment (HTTP, `ray_ingress.py`) in front of an engine deployment (`ray_engine.py`), whose replicas are
chosen by our router (`ray_router.py`, `ray_client.py`). Needs `pip install 'paceline[ray]'`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import (
    ConfigError,
    EngineConfig,
    RayConfig,
    SchedulerConfig,
    ServerConfig,
    TenantConfig,
    config_from,
    split_options,
)
from paceline.config_file import read_file
from paceline.server.auth import ApiKeys
from paceline.server.process_messages import EngineSetup, ModelSource
from paceline.text.load import model_name

_MODEL_OPTIONS = ("model", "load", "shape", "config")
_HEALTH_PERIOD_S = 2.0
_MAX_ONGOING = 100_000  # calls of one replica: the engine has its own queue, and refuses what exceeds it
_LOGS = {"enable_access_log": False}  # the ingress has a line per request already
# Options of `paceline serve` that have no meaning here, and what to do instead.
_NOT_HERE = {
    "host": "set http_options of Ray Serve",
    "port": "set http_options of Ray Serve",
    "header_s": "Ray's proxy receives headers",
    "keep_alive_s": "set http_options of Ray Serve",
    "slow_reader_s": "Ray's proxy sends responses",
    "max_header_bytes": "Ray's proxy receives headers",
    "max_headers": "Ray's proxy receives headers",
    "max_connections": "Ray's proxy accepts connections",
    "shutdown_s": "set drain_s",
    "kv_events": "the replicas would publish at one address",
    "kv_events_replay": "the replicas would publish at one address",
    "kv_events_topic": "the replicas would publish at one address",
    "record": "the replicas would write one file",
    "lora_folder": "replicas that start later would lack what was loaded; set lora",
    **dict.fromkeys(
        (
            "role",
            "kv_listen",
            "kv_transport",
            "kv_token",
            "prefill_peers",
            "prefill_replicas",
            "prefill_from_tokens",
            "prefill_timeout_s",
        ),
        "its engines compute prompts and outputs",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class RaySetup:
    """What is deployed."""

    name: str  # of the served model
    source: ModelSource
    config: ServerConfig
    ray: RayConfig
    tenants: tuple[TenantConfig, ...]
    num_gpus: int  # of each engine

    @property
    def max_replicas(self) -> int:
        return max(self.config.replicas, self.ray.max_replicas or 0)


def read_args(args: Mapping[str, object], cluster_gpus: float = 0) -> RaySetup:
    """Checks the arguments of `build_app`, whose values may be text, as on a command line."""
    kinds = (ServerConfig, RayConfig, EngineConfig, SchedulerConfig)
    types = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    given = {name: _convert(name, value, types.get(name, str)) for name, value in args.items()}
    tenants: tuple[TenantConfig, ...] = ()
    if (path := given.pop("config", None)) is not None:
        file = read_file(Path(path))
        found = {"model": file.model, "load": file.load, "shape": file.shape, **file.options}
        given, tenants = {**{name: value for name, value in found.items() if value is not None}, **given}, file.tenants
    for name in given:
        if name in _NOT_HERE or name.startswith("batch_"):
            remedy = _NOT_HERE.get(name, "batches need `paceline serve`")
            raise ConfigError(f"{name} is {given[name]!r}, which Ray Serve does not use ({remedy}): remove it.")
    model, load, shape = given.pop("model", None), given.pop("load", "weights"), given.pop("shape", None)
    config = config_from(ServerConfig, _take(given, ServerConfig))
    ray = config_from(RayConfig, _take(given, RayConfig))
    engine_options, _ = split_options(given, (*_MODEL_OPTIONS, *(name for kind in kinds[:2] for name in _names(kind))))
    engine = EngineConfig(**engine_options)
    ApiKeys(tenants, config.admin_key)
    limited = [one.name for one in tenants if one.max_requests is not None or one.tokens_per_minute is not None]
    if limited and config.workers > 1:
        raise ConfigError(
            f"workers is {config.workers} and tenant {limited[0]!r} has max_requests or tokens_per_minute, which one "
            "ingress has to count: set workers to 1, or remove the limits."
        )
    if ray.max_replicas is not None and ray.max_replicas < config.replicas:
        raise ConfigError(f"max_replicas is {ray.max_replicas} and replicas is {config.replicas}: raise max_replicas.")
    if load not in ("weights", "random"):
        raise ConfigError(f"load is {load!r}: expected weights or random.")
    if engine.executor == "virtual":
        if model is not None or load != "weights" or shape is not None:
            raise ConfigError("executor is 'virtual', which runs no model: remove model, load and shape.")
        name = "virtual"
    elif load == "random":
        if model is not None or shape is None:
            raise ConfigError("load is 'random': give a shape, such as smollm2-135m, and no model.")
        name = shape
    else:
        if shape is not None:
            raise ConfigError(f"shape is {shape!r}, which needs load='random': remove it.")
        name = model_name(model)
    num_gpus = ray.num_gpus
    if num_gpus is None:
        uses_gpu = engine.executor != "virtual" and (
            engine.device == "cuda" or (engine.device == "auto" and cluster_gpus)
        )
        # Ranks and stages of one engine are processes on one machine, so they need their GPUs in one node.
        num_gpus = engine.num_ranks if uses_gpu else 0
    if not num_gpus and engine.device == "auto" and engine.executor != "virtual":
        given["device"] = "cpu"
    source = ModelSource(model, load, shape, given)
    return RaySetup(config.served_name or name, source, config, ray, tenants, num_gpus)


def _convert(name: str, value: object, hint: object) -> Any:
    if not isinstance(value, str) or hint is str:
        return value
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        return value  # the check of the option says what is expected


def _names(kind: type) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def _take(options: dict[str, object], kind: type) -> dict[str, object]:
    return {name: options.pop(name) for name in _names(kind) if name in options}


def engine_setup(setup: RaySetup) -> EngineSetup:
    tenants = [dataclasses.replace(one, keys=(), max_requests=None, tokens_per_minute=None) for one in setup.tenants]
    return EngineSetup(
        name=setup.name,
        address="",
        source=setup.source,
        watchdog_s=setup.config.watchdog_s,
        tenants=tuple(tenants),
        log_level=setup.config.log_level,
        log_format=setup.config.log_format,
    )


def engine_options(setup: RaySetup) -> dict[str, object]:
    """Options of the engine deployment: its resources, its router, and how it scales."""
    ray, num_gpus = setup.ray, setup.num_gpus
    options: dict[str, object] = {
        "max_ongoing_requests": _MAX_ONGOING,
        "logging_config": _LOGS,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": ray.drain_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "ray_actor_options": {"num_cpus": ray.num_cpus, "num_gpus": num_gpus},
    }
    if num_gpus > 1:  # all on one node, where the replica starts the ranks
        bundle = {"CPU": ray.num_cpus, "GPU": num_gpus}
        options |= {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    if ray.max_replicas is None:
        return options | {"num_replicas": setup.config.replicas}
    scaling = {
        "min_replicas": setup.config.replicas,
        "max_replicas": ray.max_replicas,
        "upscale_delay_s": ray.scale_up_s,
        "downscale_delay_s": ray.scale_down_s,
        "look_back_period_s": max(1.0, min(ray.scale_up_s, 30.0)),
        "policy": {"policy_function": "paceline.server.ray_scaling:scale_by_queue_time"},
    }
    return options | {"autoscaling_config": scaling}


def build_app(args: dict[str, object]) -> object:
    """The application. `args` has options of `paceline serve` and of `RayConfig`, model, load, shape and config."""
    try:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise ConfigError(f"Ray Serve is not installed ({error}): pip install 'paceline[ray]'.") from None
    from paceline.server.ray_engine import EngineReplica
    from paceline.server.ray_ingress import Ingress, IngressSetup, app_of_this_process

    setup = read_args(args, ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0)
    router = RequestRouterConfig(request_router_class="paceline.server.ray_router:PrefixRouter")
    engines = serve.deployment(EngineReplica).options(
        name="engines", request_router_config=router, **engine_options(setup)
    )
    num_cpus = 0.0 if setup.num_gpus or setup.source.options.get("executor") == "virtual" else setup.ray.num_cpus
    bound = engines.bind(engine_setup(setup), num_cpus, setup.ray.target_queue_s, setup.ray.drain_s)
    source = setup.source
    has_model = source.load == "weights" and source.options.get("executor") != "virtual"
    ingress = serve.deployment(serve.ingress(app_of_this_process)(Ingress)).options(
        name="ingress",
        num_replicas=setup.config.workers,
        max_ongoing_requests=_MAX_ONGOING,
        logging_config=_LOGS,
        graceful_shutdown_timeout_s=setup.ray.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},  # else two engines and the ingress would not fit on two cores
    )
    return ingress.bind(
        bound,
        IngressSetup(
            name=setup.name,
            tokenizer=(source.model or model_name(None)) if has_model else None,
            weights=source.weights_id,
            config=setup.config,
            tenants=setup.tenants,
            num_slots=2 * setup.max_replicas,  # in an update old ones stop while new ones serve
        ),
    )
