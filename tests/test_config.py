"""Declarations of options: bounds, help texts, choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest

from paceline.config import (
    BATCHING,
    EVICTION,
    POLICIES,
    ConfigError,
    EngineConfig,
    OfflineConfig,
    QualityConfig,
    RayConfig,
    SchedulerConfig,
    ServerConfig,
    TenantConfig,
    WorkloadConfig,
    full_help,
    public_options,
    split_options,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size is 0: must be at least 1."),
        ({"page_size": 1.5}, "page_size is 1.5: expected an integer."),
        ({"page_size": True}, "page_size is True: expected an integer."),
        ({"prefix_cache": 1}, "prefix_cache is 1: expected true or false."),
        ({"max_wait": -1}, "max_wait is -1: must be at least 0.0."),
        ({"max_wait": math.nan}, "max_wait is nan: expected a number."),
        ({"draft_tokens": 65}, "draft_tokens is 65: must be at most 64."),
        ({"itl_target": 0}, "itl_target is 0: must be at least 1e-06."),
        (
            {"policy": "fastest"},
            "policy is 'fastest': choose one of fair, fcfs, lpm, dfs, sjf, lof, random, priority, hrrn.",
        ),
        ({"batching": 3}, "batching is 3: expected a string."),
        ({"tenant_weights": [1]}, "tenant_weights is [1]: expected a mapping."),
        ({"tenant_weights": {"a": 0}}, "tenant_weights['a'] is 0: must be a number above 0."),
        (
            {"num_pages": 8, "pin_quota_pages": 8},
            "pin_quota_pages is 8: must be less than num_pages = 8.",
        ),
        (
            {"max_running": 300, "max_batch_tokens": 256},
            "max_batch_tokens is 256, too small for a decode batch of max_running = 300 requests: "
            "raise it to 300 or lower max_running.",
        ),
    ],
)
def test_an_invalid_value_is_reported_with_its_remedy(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**options)
    assert str(caught.value) == message


CONFIGS = (
    SchedulerConfig,
    EngineConfig,
    ServerConfig,
    RayConfig,
    OfflineConfig,
    QualityConfig,
    TenantConfig,
    WorkloadConfig,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_events": "5557"},
            "kv_events is '5557': expected tcp://<host>:<port> or ipc://<path>; host *: all.",
        ),
        (
            {"kv_events": "tcp://*"},
            "kv_events is 'tcp://*': expected tcp://<host>:<port> or ipc://<path>; host *: all.",
        ),
        (
            {"kv_events_replay": "tcp://*:5558"},
            "kv_events_replay is given without kv_events: give the address of kv_events too.",
        ),
        (
            {"replicas": 2, "prefill_replicas": 2},
            "prefill_replicas is 2 and replicas is 2: at least one replica must decode; raise replicas.",
        ),
        (
            {"replicas": 2, "role": "decode"},
            "role is 'decode' and replicas is 2: give prefill_replicas instead of role, or one replica.",
        ),
        (
            {"role": "prefill", "kv_token": "secret"},
            "role is 'prefill' and kv_listen is None: role prefill and kv_listen belong together.",
        ),
        (
            {"kv_transport": "nixl", "replicas": 2, "prefill_replicas": 1},
            "kv_transport is 'nixl' and role is 'both': it is for servers of role prefill and decode; replicas of one "
            "server share memory.",
        ),
        (
            {"prefill_peers": "tcp://10.0.0.1:5600"},
            "role is 'both' and prefill_peers is 'tcp://10.0.0.1:5600': role decode and prefill_peers belong together.",
        ),
        (
            {"role": "decode", "prefill_peers": "10.0.0.1", "kv_token": "secret"},
            "prefill_peers has '10.0.0.1': expected tcp://<host>:<port>.",
        ),
        (
            {"role": "decode", "prefill_peers": "tcp://10.0.0.1:5600"},
            "role is 'decode' and kv_token is not given: engines of role prefill and decode need the same secret, such "
            "as the output of `openssl rand -hex 32`.",
        ),
        (
            {"kv_events_topic": "kv@"},
            "kv_events_topic is given without kv_events: give the address of kv_events too.",
        ),
        (
            {"kv_events": "tcp://*:1", "kv_events_replay": "tcp://*:1"},
            "kv_events is 'tcp://*:1' and kv_events_replay is 'tcp://*:1', which both use 'tcp://*:1': give different "
            "ports.",
        ),
    ],
)
def test_an_invalid_option_of_the_server_is_reported_with_its_remedy(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("config", CONFIGS)
def test_every_option_has_a_help_text(config: type) -> None:
    for item in dataclasses.fields(config):
        assert len(item.metadata["help"]) > 15 or item.metadata["choice_help"], f"{item.name} has no help"
        assert not item.metadata["help"].endswith("."), f"{item.name}: the help text continues with the default"


@pytest.mark.parametrize(("name", "choices"), [("policy", POLICIES), ("batching", BATCHING), ("eviction", EVICTION)])
def test_every_choice_has_a_sentence_in_the_help_text(name: str, choices: Mapping[str, str]) -> None:
    (item,) = (item for item in dataclasses.fields(SchedulerConfig) if item.name == name)
    assert item.metadata["choices"] == tuple(choices)
    text = full_help(item)
    for choice, sentence in choices.items():
        assert len(sentence) > 15 and f"{choice}: {sentence}" in text


def test_infinity_and_none_are_valid_where_documented() -> None:
    config = SchedulerConfig(max_wait=math.inf, itl_target=math.inf, retract_gap=math.inf)
    assert config.max_wait == math.inf


def test_a_hidden_option_is_refused_from_users_and_accepted_from_code() -> None:
    assert SchedulerConfig(draft_tokens=2).draft_tokens == 2
    assert "draft_tokens" not in [item.name for item in public_options(SchedulerConfig)]
    with pytest.raises(ConfigError, match="draft_tokens is 2, which is not supported: set speculate instead"):
        split_options({"draft_tokens": 2})
    with pytest.raises(ConfigError, match="adaptive_drafts is True, which is not supported: set speculate instead"):
        split_options({"adaptive_drafts": True})
