"""`make_policy`: the scheduling policy that `config.policy` names."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from paceline.config import SchedulerConfig
from paceline.scheduler.aging import with_aging
from paceline.scheduler.background import BackgroundPolicy
from paceline.scheduler.fair import FairPolicy
from paceline.scheduler.policies import (
    DepthFirstPolicy,
    FcfsPolicy,
    KeyPolicy,
    LongestPrefixPolicy,
    Policy,
    ResponseRatioPolicy,
)
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.tracked_request import TrackedRequest

_TOKEN_S = 1e-5  # device time of a prompt token, before any was measured


def make_policy(tree: PrefixTree, config: SchedulerConfig) -> Policy:
    if not config.background_tenants:
        return _make_policy(tree, config)
    without_aging = replace(config, max_wait=math.inf)
    return BackgroundPolicy(
        tree,
        _make_policy(tree, config),
        _make_policy(tree, without_aging),
        config.background_names,
        walks_tree=config.policy in ("dfs", "lpm"),
    )


def _make_policy(tree: PrefixTree, config: SchedulerConfig) -> Policy:
    """Aging applies where requests could otherwise be overtaken forever: not under `fcfs` and `hrrn`, which age by
    themselves, and not under `priority`, where overtaking is what the caller asked for."""
    shuffle = random.Random(config.order_seed)

    def expected(request: TrackedRequest) -> float:
        return request.expected_tokens if request.expected_tokens is not None else request.max_tokens

    def service_s(request: TrackedRequest) -> float:
        tokens = len(request.prompt) + config.output_weight * expected(request)
        return request.predicted_s or tokens * _TOKEN_S

    match config.policy:
        case "fair":
            return FairPolicy(tree, config)
        case "fcfs":
            return FcfsPolicy()
        case "priority":
            return KeyPolicy(lambda request: -request.priority)
        case "hrrn":
            return ResponseRatioPolicy(service_s)
    inner: Policy
    match config.policy:
        case "lpm":
            inner = LongestPrefixPolicy(tree)
        case "dfs":
            inner = DepthFirstPolicy(tree, lambda: tree.root)
        case "sjf":
            inner = KeyPolicy(expected)
        case "lof":
            inner = KeyPolicy(lambda request: -expected(request))
        case "random":
            inner = KeyPolicy(lambda request: shuffle.random())
        case other:
            raise AssertionError(f"config accepts the policy {other!r}, which is not implemented")
    return with_aging(inner, tree, config, lambda: 1.0)
