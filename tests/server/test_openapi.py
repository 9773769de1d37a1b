"""The OpenAPI document is true: what it allows and what it forbids is sent, and every answer is as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.server.openapi import document
from tests.server.process import Served
from tests.server.virtual import assert_nothing_is_left, virtual

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
          negative_data_rejection]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with virtual("--context-tokens", "256", "--admin-key", "root") as served:
        yield served
        assert_nothing_is_left(served)


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


OPERATIONS = [(path, method) for path, methods in document("virtual", False)["paths"].items() for method in methods]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_the_document_says(
    api: Any, served: Served, path: str, method: str, mode: GenerationMode
) -> None:
    operation = api[path][method.upper()]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.headers):
        return  # there is nothing to get wrong: any text may stand in a path
    headers = {"Authorization": "Bearer root"} if path.startswith("/admin") else None

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=40 if operation.body else 8, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, headers=headers, timeout=60)

    try:
        check()
    finally:
        if path == "/admin/drain":
            httpx.delete(f"{served.url}/admin/drain", headers=headers, timeout=30)
