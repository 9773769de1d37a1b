"""The configuration file of `paceline serve --config`: TOML with the options of config.py.

`[server]`, `[engine]` and `[scheduler]` hold their options, `[[tenants]]` one table per tenant, and `model`, `load` and
`shape` at the top name the model. Unknown names are errors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import (
    ConfigError,
    ConfigUnavailable,
    EngineConfig,
    SchedulerConfig,
    ServerConfig,
    TenantConfig,
    config_from,
    public_options,
    suggest_option,
)

_TABLES = {"server": ServerConfig, "engine": EngineConfig, "scheduler": SchedulerConfig}
_STRINGS = ("model", "load", "shape")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The contents of a configuration file. `options` holds those of server, engine and scheduler by name."""

    model: str | None
    load: str | None
    shape: str | None
    options: dict[str, object]
    tenants: tuple[TenantConfig, ...]


def read_file(path: Path) -> ConfigFile:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        may_pass = isinstance(error, FileNotFoundError) and path.is_absolute()
        raise (ConfigUnavailable if may_pass else ConfigError)(
            f"config is {str(path)!r}, which cannot be read: {error}."
        ) from None
    _check_names(content, [*_STRINGS, *_TABLES, "tenants"], path.name)
    options: dict[str, object] = {}
    for name, kind in _TABLES.items():
        table = _table(content.get(name, {}), name, path)
        _check_names(table, _names(kind), f"{path.name}: [{name}]")
        options |= table
    for name in _STRINGS:
        if not isinstance(content.get(name, ""), str):
            raise ConfigError(f"{path.name}: {name} is {content[name]!r}: expected a string.")
    tenants = _read_tenants(content.get("tenants", []), path)
    return ConfigFile(content.get("model"), content.get("load"), content.get("shape"), options, tenants)


def _read_tenants(tables: object, path: Path) -> tuple[TenantConfig, ...]:
    if not isinstance(tables, list):
        raise ConfigError(f"{path.name}: tenants is {tables!r}: expected [[tenants]] tables.")
    tenants = []
    for value in tables:
        table = _table(value, "tenants", path)
        _check_names(table, _names(TenantConfig), f"{path.name}: [[tenants]]")
        keys = table.get("keys", [])
        tenants.append(config_from(TenantConfig, {**table, "keys": tuple(keys) if isinstance(keys, list) else keys}))
    if len({tenant.name for tenant in tenants}) < len(tenants):
        raise ConfigError(f"{path.name}: two tenants have the same name: names must be unique.")
    for tenant in tenants:
        if not tenant.keys:
            raise ConfigError(
                f"{path.name}: tenant {tenant.name!r} has no keys, so no request could belong to it: give it keys."
            )
    if len({key for tenant in tenants for key in tenant.keys}) < sum(len(tenant.keys) for tenant in tenants):
        raise ConfigError(f"{path.name}: two tenants have the same API key: keys must be unique.")
    return tuple(tenants)


def _names(config: type) -> list[str]:
    return [item.name for item in public_options(config)]


def _table(value: object, name: str, path: Path) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name}: {name} is {value!r}: expected a table.")
    return dict(value)


def _check_names(given: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            hint = suggest_option(name, known) or f"options are: {', '.join(known)}."
            raise ConfigError(f"{where} has an unknown option {name!r}: {hint}")
