"""In which order waiting requests are admitted: the name of a policy, and the order it stands for."""

from __future__ import annotations

import random

from paceline.config import SchedulerConfig
from paceline.request import Request
from paceline.scheduler.aging import aged
from paceline.scheduler.fair import Fair
from paceline.scheduler.orders import DepthFirst, KeyOrder, LongestPrefix, Order, ResponseRatio
from paceline.scheduler.prefix_tree import PrefixTree


def make_order(tree: PrefixTree, config: SchedulerConfig) -> Order:
    """The order `config.policy` names. Aging applies where requests could otherwise be overtaken for ever; under
    `priority` that is what the caller asked for, and `fcfs` and `hrrn` age by themselves."""
    shuffle = random.Random(config.order_seed)

    def expected(request: Request) -> float:
        return request.expected_tokens if request.expected_tokens is not None else request.max_tokens

    match config.policy:
        case "fair":
            return Fair(tree, config)
        case "fcfs":
            return KeyOrder(lambda request: request.number)
        case "priority":
            return KeyOrder(lambda request: -request.priority)
        case "hrrn":
            return ResponseRatio(lambda request: len(request.prompt) + config.output_weight * expected(request))
    inner: Order
    match config.policy:
        case "lpm":
            inner = LongestPrefix(tree)
        case "dfs":
            inner = DepthFirst(tree, lambda: tree.root)
        case "sjf":
            inner = KeyOrder(expected)
        case "lof":
            inner = KeyOrder(lambda request: -expected(request))
        case "random":
            inner = KeyOrder(lambda request: shuffle.random())
        case other:
            raise AssertionError(f"policy {other} passed the config and has no order")
    return aged(inner, tree, config)
