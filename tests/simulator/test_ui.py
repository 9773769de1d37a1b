"""The options and simulations that the simulator page requests."""

from __future__ import annotations

import pytest

from paceline.config import BATCHING, EVICTION, POLICIES, ConfigError
from paceline.simulator.ui import DEFAULTS, describe, run_frames


@pytest.mark.parametrize(("name", "choices"), [("policy", POLICIES), ("batching", BATCHING), ("eviction", EVICTION)])
def test_the_page_gets_a_sentence_for_every_choice(name: str, choices: dict[str, str]) -> None:
    option = describe()[name]
    assert option["choices"] == tuple(choices)
    assert option["choice_help"] == choices


def test_the_page_gets_a_help_text_for_every_option_and_no_hidden_ones() -> None:
    options = describe()
    assert options.keys() >= DEFAULTS.keys()
    assert all(option["help"] for option in options.values())
    assert "draft_tokens" not in options


def test_frames_cover_the_run_and_unknown_parameters_are_refused() -> None:
    run = run_frames({"requests": "8", "policy": "lpm"})
    assert run["policy"] == "lpm" and run["summary"]["requests"] == 8
    assert len(run["frames"]) == len(run["lanes"]) == run["summary"]["passes"]
    with pytest.raises(ConfigError, match="unknown parameter 'tenant_weights'"):
        run_frames({"tenant_weights": "a=1"})
