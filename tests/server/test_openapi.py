"""The OpenAPI document is accurate: requests that it allows and forbids are sent, and every response conforms."""

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

from paceline.server.openapi import make_document
from paceline.server.routes import ROUTES
from tests.server.process import ServerProcess
from tests.server.virtual import assert_nothing_is_left, virtual

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = str(tmp_path_factory.mktemp("batches"))
    with virtual("--context-tokens", "256", "--admin-key", "root", "--batch-folder", folder) as server:
        yield server
        assert_nothing_is_left(server)


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


PATHS = make_document(ROUTES, "virtual", has_keys=False)["paths"]
OPERATIONS = [(path, method) for path, methods in PATHS.items() for method in methods]


@pytest.mark.parametrize("factor", [1, pytest.param(8, marks=pytest.mark.slow, id="many")])
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_response_conforms_to_the_document(
    api: Any, server: ServerProcess, path: str, method: str, mode: GenerationMode, factor: int
) -> None:
    operation = api[path][method.upper()]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.headers):
        return  # nothing can be invalid: a path parameter is any text
    headers = {"Authorization": "Bearer root"} if path.startswith("/admin") else None

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=factor * (8 if operation.body else 4), suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        if path == "/admin/trace" and mode is GenerationMode.POSITIVE:
            case.body["seconds"] = 0.01  # a response takes as long
        case.call_and_validate(checks=CHECKS, headers=headers, timeout=1200)

    try:
        check()
    finally:
        if path == "/admin/drain":
            httpx.delete(f"{server.url}/admin/drain", headers=headers, timeout=120)
        if path == "/admin/pause":
            httpx.post(f"{server.url}/admin/resume", headers=headers, timeout=120)
