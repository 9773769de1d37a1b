"""Command line options generated from the dataclasses of config.py, which declare name, type, choices and help once.

An option that is not given is not passed on, so that its default is decided where it is known: some defaults depend on
the device and the model.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypedDict

import typer

from paceline.config import ConfigError, full_help, public_options

# Headings of `--help`: a group begins with this option and ends before the next group, in order of declaration.
_GROUPS = {
    "host": "Server",
    "max_body_bytes": "HTTP limits",
    "log_level": "Logs",
    "executor": "Engine",
    "virtual_slowdown": "Virtual GPU",
    "num_pages": "Memory",
    "max_running": "Batching",
    "policy": "Scheduling policy",
    "max_waiting": "Queue limits",
    "order_seed": "Other",
    "requests": "Workload",
    "replicas": "Replicas",
    "drafts": "Speculative decoding",
    "repeats": "Benchmark",
}
ENVIRONMENT = "PACELINE_"

# The engine chooses these by model, device and free memory; the default of the dataclass does not apply.
COMPUTED = frozenset(
    {
        "num_pages",
        "context_tokens",
        "max_running",
        "max_batch_tokens",
        "max_prefill_tokens",
        "chunk_tokens",
        "itl_target",
    }
)


class _FromEnvironment(TypedDict):
    envvar: str
    show_envvar: bool


def from_environment(name: str) -> _FromEnvironment:
    """Makes an option readable from its environment variable."""
    return {"envvar": ENVIRONMENT + name.upper(), "show_envvar": False}


Model = Annotated[
    str | None,
    typer.Option(
        **from_environment("model"),
        help="Model folder, .gguf file or Hugging Face id (default: smollm2-135m-instruct, downloaded on first use).",
    ),
]
Load = Annotated[
    Literal["weights", "random"],
    typer.Option(
        **from_environment("load"), help="weights: load the model's weights; random: random weights, for benchmarks."
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        **from_environment("shape"), help="With --load random: name of the model architecture; see `paceline models`."
    ),
]


def takes(*configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options of these configs to a command. Those that are given are passed as its argument `options`."""
    by_name: dict[str, inspect.Parameter] = {}
    for config in configs:
        for parameter in _parameters(config):
            by_name.setdefault(parameter.name, parameter)  # the first config that declares an option wins
    generated, names = list(by_name.values()), by_name.keys()

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]

        def with_options(**given: object) -> None:
            options = {
                name: _value(name, value) for name, value in given.items() if name in names and value is not None
            }
            command(**{name: value for name, value in given.items() if name not in names}, options=options)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *generated]]
        vars(with_options)["__signature__"] = inspect.Signature(parameters)
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        with_options.__doc__, with_options.__name__ = command.__doc__, command.__name__
        return with_options

    return decorate


def _parameters(config: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(config)
    group = ""
    found = []
    for item in public_options(config):
        group = _GROUPS.get(item.name, group)
        choices = item.metadata["choices"]
        kind = Literal[choices] if choices else _kind(hints[item.name])
        found.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, _option(item, group)],
            )
        )
    return found


def _option(item: dataclasses.Field[object], group: str) -> object:
    return typer.Option(help=_help(item), rich_help_panel=group, **from_environment(item.name))


def _kind(hint: object) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return str if typing.get_origin(kind) in (Mapping, typing.get_origin(Mapping[str, float])) else kind


def _help(item: dataclasses.Field[object]) -> str:
    text, default = full_help(item), item.default
    if "default: " in text:
        return text
    if item.name in COMPUTED:
        return f"{text} (default: depends on model and device)"
    if isinstance(default, bool):
        return f"{text} (default: {'yes' if default else 'no'})"
    return f"{text} (default: {default})" if isinstance(default, str | int | float) else text


def _value(name: str, value: Any) -> object:
    match name:
        case "tenant_weights":
            return parse_weights(value)
        case "lora":
            return parse_adapters(value)
        case _:
            return value


def one_adapter(options: Mapping[str, object]) -> str:
    """The adapter that all output of a command uses; "": the base model."""
    lora = options.get("lora")
    names = list(lora) if isinstance(lora, Mapping) else []
    if len(names) > 1:
        raise ConfigError(f"lora has {', '.join(names)}: give one, which the output uses.")
    return names[0] if names else ""


def parse_adapters(text: str) -> dict[str, str]:
    """Parses `sql=/adapters/sql,chat=/adapters/chat`."""
    found: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, separator, path = (part.strip() for part in item.partition("="))
        if not separator or not name or not path:
            raise ConfigError(f"lora has {item!r}: expected pairs such as sql=/adapters/sql,chat=/adapters/chat.")
        if name in found:
            raise ConfigError(f"lora has {name!r} twice: give each adapter a name of its own.")
        found[name] = path
    return found


def parse_weights(text: str) -> dict[str, float]:
    """Parses `a=2,b=1`."""
    weights = {}
    for item in filter(None, text.split(",")):
        tenant, _, weight = item.partition("=")
        try:
            weights[tenant.strip()] = float(weight)
        except ValueError:
            raise ConfigError(f"tenant_weights has {item!r}: expected pairs such as alice=2,bob=1.") from None
    return weights
