"""The request with which an engine is tested at its start is nobody's."""

from __future__ import annotations

from paceline.server.engine_process import generate_one_token
from tests.server.serving import COMPLETIONS, TEXT, Caller, make_app, tiny_engine


def counts(caller: Caller) -> dict[str, str]:
    """The metrics that count something."""
    lines = caller.request("GET", "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {
        name: value for name, value in values.items() if "_total" in name and float(value) and "/metrics" not in name
    }


def test_the_request_that_tests_the_engine_is_not_counted() -> None:
    engine = tiny_engine()
    try:
        caller = Caller(make_app(engine))
        generate_one_token(engine)
        assert counts(caller) == {}
        assert caller.request("GET", "/v1/requests").json()["data"] == []
        caller.ok(COMPLETIONS, TEXT)
        assert counts(caller)['paceline_request_success_total{finished_reason="length"}'] == "1.0"
    finally:
        engine.close()
