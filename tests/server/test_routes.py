"""The app, `GET /`, the OpenAPI document and the docs are made from the route table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.request import MAX_CHOICES, MAX_STOPS, MAX_TEMPERATURE
from paceline.server.limits import MAX_CACHE_SALT_CHARACTERS
from paceline.server.openapi import make_document
from paceline.server.routes import ROUTES, documentation
from paceline.server.routing import Access, AnyRoute, GenerationRoute
from tests.server.serving import COMPLETIONS, TEXT, Caller, make_app

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def path_of(route: AnyRoute) -> str:
    return route.path.replace("{name:path}", "tiny").replace("{id}", "cmpl-1")


@pytest.fixture
def guarded(engine: Engine) -> Caller:
    return Caller(make_app(engine, admin_key="root", tenants=[TenantConfig(name="team", keys=("key",))]))


def test_the_docs_have_the_table() -> None:
    assert documentation() in DOCS.read_text(), f"replace the table of routes in docs/serving.md by:\n{documentation()}"


def test_a_row_is_unique() -> None:
    rows = [(route.method, route.path) for route in ROUTES]
    assert len(set(rows)) == len(rows)


def test_get_root_lists_every_path_once(caller: Caller) -> None:
    listed = caller.request("GET", "/").json()["routes"]
    assert sorted(listed) == sorted({route.path for route in ROUTES})


def test_the_openapi_document_has_every_row_and_nothing_else(caller: Caller) -> None:
    paths = caller.request("GET", "/openapi.json").json()["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found == {(route.method, route.path.replace(":path", "")) for route in ROUTES}


@pytest.mark.usefixtures("short_traces")
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_row_is_served_to_those_who_may_call_it_alone(guarded: Caller, route: AnyRoute) -> None:
    allowed = {
        Access.PUBLIC: {None, "wrong", "key", "root"},
        Access.TENANT: {"key"} if isinstance(route, GenerationRoute) else {"key", "root"},
        Access.ADMIN: {"root"},
        Access.METRICS: {"root"},
    }[route.access]
    for key in (None, "wrong", "key", "root"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        response = guarded.request(route.method, path_of(route), headers=headers, content=b"{}")
        if key in allowed:
            assert response.status_code not in (401, 403, 405, 500), response.text
            assert "Unknown route" not in response.text
        else:
            assert response.status_code == 401 and "Missing or invalid" in response.text
    for method, path in (("DELETE", "/admin/drain"), ("POST", "/admin/resume")):
        assert guarded.request(method, path, headers={"Authorization": "Bearer root"}).status_code == 200


def test_metrics_name_tenants_to_the_admin_alone_unless_they_are_public(engine: Engine) -> None:
    tenants = [TenantConfig(name="team", keys=("key",))]

    def status(key: str, **options: Any) -> int:
        caller = Caller(make_app(engine, **options))
        return caller.request("GET", "/metrics", headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status(key, tenants=tenants, admin_key="root") for key in ("", "key", "root")] == [401, 401, 200]
    assert [status(key, tenants=tenants) for key in ("", "key")] == [403, 403], "there is no key that could open it"
    assert status("", tenants=tenants, public_metrics=True) == 200
    assert status("", admin_key="root") == 200, "without tenants there are no names"


@pytest.mark.parametrize("options", [{}, {"admin_key": "root"}, {"admin_key": "root", "public_metrics": True}])
def test_the_document_says_which_routes_need_a_key(engine: Engine, options: dict[str, Any]) -> None:
    caller = Caller(make_app(engine, tenants=[TenantConfig(name="team", keys=("key",))], **options))
    document = caller.request("GET", "/openapi.json").json()
    for route in ROUTES:
        operation = document["paths"][route.path.replace(":path", "")][route.method.lower()]
        status = caller.request(route.method, path_of(route), content=b"{}").status_code
        assert bool(operation.get("security", document["security"])) == (status in (401, 403)), route.path


def test_an_unknown_route_says_where_routes_are_listed(caller: Caller) -> None:
    error = caller.request("POST", "/v1/x").json()["error"]
    assert error["message"] == "Unknown route: POST /v1/x. Routes are listed at GET /."


def test_the_document_states_the_bounds_that_are_enforced(caller: Caller) -> None:
    schema = make_document(ROUTES, "tiny", has_keys=False)["components"]["schemas"]["CompletionRequest"]["properties"]

    def bounds(name: str) -> dict[str, float]:
        return next(one for one in schema[name]["anyOf"] if one.get("type") != "null")

    assert bounds("temperature")["maximum"] == MAX_TEMPERATURE and bounds("n")["maximum"] == MAX_CHOICES
    assert bounds("cache_salt")["maxLength"] == MAX_CACHE_SALT_CHARACTERS
    for field, largest, too_large in (
        ("temperature", MAX_TEMPERATURE, MAX_TEMPERATURE + 1),
        ("cache_salt", "s" * MAX_CACHE_SALT_CHARACTERS, "s" * (MAX_CACHE_SALT_CHARACTERS + 1)),
        ("stop", ["never"] * MAX_STOPS, ["never"] * (MAX_STOPS + 1)),
        ("n", MAX_CHOICES, MAX_CHOICES + 1),
    ):
        assert caller.post(COMPLETIONS, {**TEXT, "max_tokens": 1}, **{field: largest}).status_code == 200
        assert caller.post(COMPLETIONS, {**TEXT, "max_tokens": 1}, **{field: too_large}).status_code == 400
