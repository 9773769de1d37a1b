"""`paceline bench router`."""

from __future__ import annotations

import json

import pytest

from paceline.bench import router


def test_the_router_finds_what_is_cached_and_random_routing_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router, "NUM_PAGES", 20_000)
    router.main(num_decisions=50)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [figures[f"hit_rate_{name}"] for name in ("all", "half", "none")] == [1.0, 0.5, 0.0]
    assert all(value > 0 for name, value in figures.items() if "_us" in name)
