"""Checks the `PACELINE_*` environment variables: a misspelled one would otherwise be ignored in silence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from paceline.cli.options import ENVIRONMENT
from paceline.config import (
    ConfigError,
    EngineConfig,
    OfflineConfig,
    QualityConfig,
    ReplicaConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
    WorkloadConfig,
    public_options,
    suggest_option,
)

_CONFIGS = (
    ServerConfig,
    EngineConfig,
    SchedulerConfig,
    OfflineConfig,
    QualityConfig,
    ReplicaConfig,
    SpeculationConfig,
    WorkloadConfig,
)
# Variables that are no option of config.py: the folder of models, and what names the model.
_OTHERS = ("home", "model", "load", "shape", "config")
# A Kubernetes Service named `paceline` sets these in the containers of its namespace.
_OF_KUBERNETES = re.compile(r"PACELINE_(SERVICE_(HOST|PORT)|PORT_\d)")


def warnings(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A sentence for each unknown variable. Raises ConfigError where Kubernetes has overwritten an option."""
    known = {*_OTHERS, *(item.name for config in _CONFIGS for item in public_options(config))}
    if environment.get("PACELINE_PORT", "").startswith("tcp://"):
        raise ConfigError(
            f"PACELINE_PORT is {environment['PACELINE_PORT']!r}, as Kubernetes sets it for a Service named paceline: "
            "rename the Service, or set enableServiceLinks to false."
        )
    for variable in sorted(environment):
        name = variable.removeprefix(ENVIRONMENT).lower()
        if variable.startswith(ENVIRONMENT) and name not in known and not _OF_KUBERNETES.match(variable):
            hint = suggest_option(name, known, lambda one: ENVIRONMENT + one.upper())
            yield f"{variable} is set, but there is no such option: {hint or '`paceline serve --help` lists them.'}"
