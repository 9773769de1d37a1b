import dataclasses
import math

import pytest

from paceline.config import ConfigError, SchedulerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size is 0: give 1 or more."),
        ({"page_size": 1.5}, "page_size is 1.5: give a whole number."),
        ({"page_size": True}, "page_size is True: give a whole number."),
        ({"prefix_cache": 1}, "prefix_cache is 1: give true or false."),
        ({"max_wait": -1}, "max_wait is -1: give 0.0 or more."),
        ({"max_wait": math.nan}, "max_wait is nan: give a number."),
        ({"lane_share": 2}, "lane_share is 2: give 1.0 or less."),
        ({"itl_target": 0}, "itl_target is 0: give 1e-06 or more."),
        (
            {"policy": "fastest"},
            "policy is 'fastest': choose one of fair, fcfs, lpm, dfs, sjf, lof, random, priority, hrrn.",
        ),
        ({"batching": 3}, "batching is 3: give a word."),
        ({"tenant_weights": [1]}, "tenant_weights is [1]: give a mapping."),
        ({"tenant_weights": {"a": 0}}, "tenant_weights['a'] is 0: give a number above 0."),
        (
            {"num_pages": 8, "pin_quota_pages": 8},
            "pin_quota_pages is 8, all of num_pages = 8: leave pages for requests.",
        ),
        (
            {"max_running": 300, "max_batch_tokens": 256},
            "max_batch_tokens is 256, fewer than a decode of all max_running = 300 requests needs: "
            "raise it to 300 or lower max_running.",
        ),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**options)
    assert str(caught.value) == message


def test_every_option_says_what_it_is_for() -> None:
    for item in dataclasses.fields(SchedulerConfig):
        assert len(item.metadata["help"]) > 15, f"{item.name} has no help"


def test_infinity_and_none_are_values_where_they_mean_something() -> None:
    config = SchedulerConfig(max_wait=math.inf, itl_target=None, retract_gap=math.inf)
    assert config.max_wait == math.inf
