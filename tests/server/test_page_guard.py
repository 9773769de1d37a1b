"""A server without keys is not open to every web page: which origins, and which names of the server, are accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.config import ConfigError, ServerConfig, TenantConfig
from paceline.engine.engine import Engine
from tests.server.process import serving
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app
from tests.server.virtual import body

OWN = "http://127.0.0.1:8000"
EVIL = "https://evil.example"


def local(engine: Engine, **config: Any) -> Caller:
    """A server without keys on a loopback address."""
    return Caller(make_app(engine, is_local=True, **config))


def call(caller: Caller, method: str, path: str, host: str, content: bytes = b"", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return caller.request(method, path, headers={"Host": host, **named}, content=content)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


ADDRESSES = ("127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[fe80::1]", "192.168.1.7:80", "0.0.0.0:8000")
LOCAL_NAMES = ("localhost:1234", "LocalHost", "localhost.", "app.localhost:8000", "host.docker.internal:8000")
FOREIGN_NAMES = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "notlocalhost",
)
MALFORMED = ("", "[evil]", "evil@127.0.0.1", "127.0.0.1:8000:9")


@pytest.mark.parametrize("host", [*ADDRESSES, *LOCAL_NAMES])
def test_programs_on_this_machine_and_behind_its_ports_are_served(engine: Engine, host: str) -> None:
    assert call(local(engine), "GET", "/v1/models", host).status_code == 200


@pytest.mark.parametrize("host", [*FOREIGN_NAMES, *MALFORMED])
@pytest.mark.parametrize("route", ["GET /v1/models", "GET /", "GET /live/state", "POST /v1/files", "OPTIONS /health"])
def test_a_name_that_was_made_to_resolve_to_this_machine_reads_nothing(engine: Engine, host: str, route: str) -> None:
    response = call(local(engine), *route.split(), host, Accept="text/html")  # type: ignore[arg-type]
    assert code_of(response) == (403, "host_not_allowed")
    assert "allowed_hosts" in response.json()["error"]["message"]


def test_a_request_without_host_is_served(engine: Engine) -> None:
    """HTTP/1.0, and the requests of batches."""
    caller, statuses = local(engine), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def run(_: httpx.AsyncClient) -> None:
        scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b""}
        await caller.app(scope, receive, send)

    caller.run(run)
    assert statuses[0] == 200


@pytest.mark.parametrize(
    "origin", [EVIL, "http://127.0.0.1:9999", "http://localhost:8000", "null", "http://[::1]:8000"]
)
@pytest.mark.parametrize(
    "route", [f"POST {CHAT}", "POST /v1/files", "GET /health", f"OPTIONS {CHAT}", "POST /tokenize"]
)
def test_pages_of_other_origins_are_refused(engine: Engine, origin: str, route: str) -> None:
    response = call(local(engine), *route.split(), "127.0.0.1:8000", Origin=origin)  # type: ignore[arg-type]
    assert code_of(response) == (403, "origin_not_allowed")
    assert "cors_origins" in response.json()["error"]["message"]
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", [OWN, "vscode-webview://abc", "app://obsidian.md", "chrome-extension://abc"])
def test_the_servers_own_pages_and_apps_may_call_it(engine: Engine, origin: str) -> None:
    json_type = {"Content_Type": "application/json; charset=utf-8"}
    content = json.dumps(HELLO).encode()
    assert call(local(engine), "POST", CHAT, "127.0.0.1:8000", content, Origin=origin, **json_type).status_code == 200


def test_options_allow_pages_and_names(engine: Engine) -> None:
    page = local(engine, cors_origins=EVIL)
    response = call(page, "GET", "/health", "127.0.0.1:8000", Origin=EVIL)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == EVIL
    assert code_of(call(page, "GET", "/health", "evil.example")) == (403, "host_not_allowed")
    assert call(local(engine, cors_origins="*"), "GET", "/health", "localhost", Origin="null").status_code == 200
    proxied = local(engine, allowed_hosts="LLM.example, other")
    for host in ("llm.example", "llm.example:8443", "other", "localhost"):
        assert call(proxied, "GET", "/health", host, Origin="https://llm.example").status_code == 200
    assert code_of(call(proxied, "GET", "/health", "evil.example")) == (403, "host_not_allowed")
    anything = call(local(engine, allowed_hosts="*"), "GET", "/health", "evil.example", Origin="https://other.example")
    assert anything.status_code == 200


def test_a_name_that_the_server_listens_on_is_known(engine: Engine) -> None:
    caller = local(engine, host="myhost")
    assert call(caller, "GET", "/health", "myhost:8000").status_code == 200
    assert code_of(call(caller, "GET", "/health", "myhost:8000", Origin="http://myhost:3000"))[0] == 403


def test_keys_and_other_addresses_leave_it_to_cors_unless_names_are_given(engine: Engine) -> None:
    tenants = [TenantConfig(name="team", keys=("key",))]
    for is_local, keys in ((True, tenants), (False, tenants), (False, [])):
        free = Caller(make_app(engine, is_local=is_local, tenants=keys))
        assert call(free, "GET", "/health", "evil.example", Origin=EVIL).status_code == 200
        strict = Caller(make_app(engine, is_local=is_local, tenants=keys, allowed_hosts="llm.example"))
        assert code_of(call(strict, "GET", "/health", "evil.example")) == (403, "host_not_allowed")
        assert call(strict, "GET", "/health", "10.0.0.7:8000").status_code == 200  # a probe of Kubernetes


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/api/generate"])
def test_only_browsers_must_send_json_as_json(engine: Engine, kind: str, path: str) -> None:
    sent = {"/tokenize": {"prompt": "a"}, "/api/generate": {"model": "tiny", "prompt": "a", "stream": False}}
    caller, content = local(engine), json.dumps(sent.get(path, TEXT)).encode()
    given = {"Content_Type": kind} if kind else {}
    assert call(caller, "POST", path, "localhost", content, **given).status_code == 200
    for browser in ({"Origin": "http://localhost"}, {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "none"}):
        refused = call(caller, "POST", path, "localhost", content, **given, **browser)
        message = refused.json()["error"] if path.startswith("/api") else refused.json()["error"]["message"]
        assert refused.status_code == 415 and "application/json" in message


def test_a_browser_needs_no_type_without_a_body_and_multipart_for_files(engine: Engine, tmp_path: Path) -> None:
    caller = local(engine, batch_folder=str(tmp_path))
    assert call(caller, "GET", "/health", "localhost", Sec_Fetch_Site="none").status_code == 200
    own = {"Host": "localhost", "Origin": "http://localhost"}
    options: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    assert caller.request("POST", "/v1/files", headers=own, **options).status_code == 200
    refused = caller.request("POST", "/v1/files", headers={**own, "Origin": EVIL}, **options)
    assert refused.status_code == 403
    assert len(caller.request("GET", "/v1/files", headers=own).json()["data"]) == 1


@pytest.mark.parametrize("names", ["https://llm.example", "llm.example:8000", "a b", "[::1]"])
def test_an_invalid_name_ends_the_start(names: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_hosts has .*: expected \* or names such as llm"):
        ServerConfig(allowed_hosts=f"localhost,{names}")


def test_a_server_without_keys_is_guarded_on_loopback_and_warns_elsewhere() -> None:
    for host, is_open in (("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)):
        with serving("--executor", "virtual", "--log-level", "warning", "--host", host) as server:
            url = re.sub(r"0\.0\.0\.0", "127.0.0.1", server.url)
            headers = {"Host": "evil.example"}
            asked = httpx.post(f"{url}{COMPLETIONS}", json=body([5], 1), headers=headers, timeout=120)
            assert asked.status_code == (200 if is_open else 403)
            assert httpx.get(f"{url}/health", timeout=120).status_code == 200
            assert ("host is 0.0.0.0 and there are no API keys" in server.output) == is_open
