"""CORS, OPTIONS, sizes of headers and bodies: what clients see at the edges of HTTP."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from paceline.config import ConfigError, ServerConfig, TenantConfig
from paceline.engine.engine import Engine
from paceline.server.connection import Connection, _UvicornState, listen
from paceline.server.metrics import ServerCounters
from paceline.server.routes import ROUTES
from tests.server.process import ServerProcess
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app
from tests.server.virtual import body, connect, virtual

PAGE, OTHER = "https://chat.example", "https://other.example"
MAX_HEADER, MAX_BODY = 4096, 100_000
ALLOW_ORIGIN = "access-control-allow-origin"


def with_origin(origin: str, **more: str) -> dict[str, str]:
    return {"Origin": origin, **more}


@pytest.fixture
def guarded(engine: Engine) -> Caller:
    tenants = [TenantConfig(name="team", keys=("key",))]
    return Caller(make_app(engine, tenants=tenants, cors_origins=f"{PAGE}, http://localhost:3000", max_body_bytes=2000))


PATHS = sorted({route.path.replace("{name:path}", "tiny").replace("{id}", "x") for route in ROUTES})


def methods_of(path: str) -> set[str]:
    pattern = path.replace("/v1/models/tiny", "/v1/models/{name:path}").replace("/x", "/{id}")
    found = {route.method for route in ROUTES if route.path == pattern}
    return found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set())


@pytest.mark.parametrize("path", PATHS)
def test_a_preflight_request_is_answered_on_every_route_without_a_key(guarded: Caller, path: str) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-lang",
    }
    response = guarded.request("OPTIONS", path, headers=with_origin(PAGE, **asked))
    assert response.status_code == 204 and response.content == b""
    assert response.headers[ALLOW_ORIGIN] == PAGE and response.headers["vary"] == "Origin"
    assert set(response.headers["access-control-allow-methods"].split(", ")) == methods_of(path)
    assert response.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
    assert int(response.headers["access-control-max-age"]) > 0
    refused = guarded.request("OPTIONS", path, headers=with_origin(OTHER, **asked))
    assert not [name for name in refused.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", PATHS)
def test_options_without_cors_lists_the_methods(engine: Engine, path: str) -> None:
    response = Caller(make_app(engine)).request("OPTIONS", path, headers=with_origin(PAGE))
    assert response.status_code == 204 and set(response.headers["allow"].split(", ")) == methods_of(path)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_options_of_an_unknown_path_is_404(caller: Caller) -> None:
    response = caller.request("OPTIONS", "/v1/nothing")
    assert response.status_code == 404 and response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(("method", "path"), [("GET", COMPLETIONS), ("POST", "/health"), ("PUT", "/admin/drain")])
def test_a_wrong_method_lists_the_same_methods_as_options(caller: Caller, method: str, path: str) -> None:
    response = caller.request(method, path)
    assert response.status_code == 405 and set(response.headers["allow"].split(", ")) == methods_of(path)


def test_every_response_to_an_allowed_origin_has_the_headers(guarded: Caller) -> None:
    key = {"Authorization": "Bearer key"}

    def post(origin: str, headers: dict[str, str], **changes: Any) -> httpx.Response:
        return guarded.request("POST", COMPLETIONS, headers=with_origin(origin, **headers), json={**TEXT, **changes})

    for status, response in (
        (200, post(PAGE, key)),
        (200, post(PAGE, key, stream=True)),
        (401, post(PAGE, {})),
        (400, post(PAGE, key, temperature=-1)),
        (413, post(PAGE, key, user="x" * 3000)),
        (404, guarded.request("GET", "/nothing", headers=with_origin(PAGE))),
        (405, guarded.request("PUT", "/health", headers=with_origin(PAGE))),
        (200, guarded.request("GET", "/health", headers=with_origin(PAGE))),
        (200, guarded.request("GET", "/live/live.js", headers=with_origin(PAGE))),
    ):
        assert response.status_code == status, response.text
        assert response.headers[ALLOW_ORIGIN] == PAGE and response.headers["vary"] == "Origin"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    assert "x-request-id" in post(PAGE, key).headers
    other = post(OTHER, key)
    assert other.status_code == 200 and ALLOW_ORIGIN not in other.headers and other.headers["vary"] == "Origin"


def test_cors_is_off_by_default_and_a_star_allows_every_origin(engine: Engine) -> None:
    off = Caller(make_app(engine)).request("GET", "/health", headers=with_origin(PAGE))
    assert ALLOW_ORIGIN not in off.headers and "vary" not in off.headers
    anywhere = Caller(make_app(engine, cors_origins="*"))
    assert anywhere.request("GET", "/health", headers=with_origin(OTHER)).headers[ALLOW_ORIGIN] == "*"
    assert ALLOW_ORIGIN not in anywhere.request("GET", "/health").headers


@pytest.mark.parametrize("origins", ["chat.example", "https://chat.example/", "ftp://x", "https://", "https://a@b"])
def test_an_invalid_origin_ends_the_start(origins: str) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins has .* expected \* or origins such as"):
        ServerConfig(cors_origins=f"http://localhost:3000,{origins}")


# ---------------------------------------------------------------------- sizes


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with virtual("--max-header-bytes", str(MAX_HEADER), "--max-body-bytes", str(MAX_BODY)) as server:
        yield server


def exchange(server: ServerProcess, *parts: bytes) -> bytes:
    """What the server sends until it closes the connection."""
    with connect(server) as one:
        for part in parts:
            one.sendall(part)
        found = b""
        while data := one.recv(65536):
            found += data
    return found


@pytest.mark.parametrize(("size", "status"), [(MAX_HEADER, 200), (MAX_HEADER + 1, 431), (20 * MAX_HEADER, 431)])
def test_headers_up_to_the_limit_are_accepted_and_longer_ones_are_431(
    server: ServerProcess, size: int, status: int
) -> None:
    head, end = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: ", b"\r\n\r\n"
    found = exchange(server, head + b"x" * (size - len(head) - len(end)) + end)
    assert found.startswith(b"HTTP/1.1 %d " % status)
    if status == 431:
        error = json.loads(found.split(b"\r\n\r\n", 1)[1])["error"]
        assert error["code"] == "headers_too_large" and "max_header_bytes" in error["message"]


def test_what_is_not_http_gets_an_error_in_json(server: ServerProcess) -> None:
    found = exchange(server, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(found.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_a_content_length_beyond_the_limit_is_413_before_the_body_is_sent(
    server: ServerProcess, path: str, expect: bytes
) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), expect, MAX_BODY + 1)
    with connect(server) as one:
        one.sendall(head)
        found = b""
        while b"body_too_large" not in found:
            data = one.recv(65536)
            assert data, found
            found += data
        assert found.startswith(b"HTTP/1.1 413 ") and b"connection: close" in found.lower()


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_chunked_body_beyond_the_limit_is_413_although_the_client_goes_on(server: ServerProcess, path: str) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    found = exchange(server, head, chunk * 60, b"0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in found


def chunked(data: bytes, size: int) -> bytes:
    pieces = [data[index : index + size] for index in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("num_chunks", "chunk_bytes", "is_refused"),
    [(5000, 1, True), (4096, 1, False), (5000, 15, True), (5000, 16, False)],
)
@pytest.mark.parametrize("route", ["POST /v1/completions", "POST /tokenize"])
def test_a_body_of_many_small_chunks_is_refused(
    server: ServerProcess, route: str, num_chunks: int, chunk_bytes: int, is_refused: bool
) -> None:
    data = json.dumps(body([5], 1) if "completions" in route else {"prompt": "x"}).encode()
    head = b"%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" % route.encode()
    found = exchange(server, head, chunked(data.ljust(num_chunks * chunk_bytes), chunk_bytes))
    if is_refused:
        assert found.startswith(b"HTTP/1.1 400 ")
        error = json.loads(found.split(b"\r\n\r\n", 1)[1])["error"]
        assert error["code"] == "chunks_too_small" and "send larger chunks, or a Content-Length." in error["message"]
    else:
        assert found.startswith(b"HTTP/1.1 200 "), found


def test_small_chunks_after_the_response_close_the_connection(server: ServerProcess) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as one:
        one.sendall(head)
        found = one.recv(65536)
        assert found.startswith(b"HTTP/1.1 200 ")
        one.sendall(b"1\r\nx\r\n" * 5000)  # the end of the body never comes
        while data := one.recv(65536):
            found += data
    assert b"HTTP/1.1 400 " in found and b"chunks_too_small" in found


def test_small_chunks_are_counted_per_request(server: ServerProcess) -> None:
    data = json.dumps(body([5], 1)).encode().ljust(3000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n"
    request = chunked(data, 1)
    found = exchange(server, head % b"" + request, head % b"Connection: close\r\n" + request)
    assert found.count(b"HTTP/1.1 200 ") == 2


def test_connections_whose_data_takes_long_to_parse_share_one_part_of_the_time() -> None:
    state = _UvicornState()
    ends = [10 + state.pause_s(0.002, 10.0) for _ in range(100)]
    assert ends == pytest.approx([10 + 0.008 * (index + 1) for index in range(100)])
    assert state.pause_s(0.002, 20.0) == pytest.approx(0.008)


def test_ordinary_clients_see_the_413(server: ServerProcess, tmp_path: Any) -> None:
    large = {**body([5], 1), "user": "x" * 5_000_000}
    for _ in range(3):
        response = httpx.post(f"{server.url}{COMPLETIONS}", json=large, timeout=120)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIStatusError, match="longer than 100000 bytes") as caught,
    ):
        client.completions.create(model="virtual", prompt="x" * 5_000_000)
    assert caught.value.status_code == 413
    assert httpx.post(f"{server.url}{COMPLETIONS}", json=body([5], 1), timeout=120).status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("more", [[], ["-H", "Expect:"], ["-H", "Transfer-Encoding: chunked"]])
def test_curl_sees_the_413(server: ServerProcess, tmp_path: Any, more: list[str]) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps({**body([5], 1), "user": "x" * 5_000_000}))
    command = ["curl", "-sS", "-w", " %{http_code}", *more, "--data-binary", f"@{file}", f"{server.url}{COMPLETIONS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.endswith(" 413") and "body_too_large" in done.stdout, done.stderr


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/messages", "/api/chat"])
def test_a_compressed_body_is_refused_by_name(caller: Caller, path: str) -> None:
    """It would be JSON that is malformed at its first byte, whatever the client does about it."""
    body = gzip.compress(json.dumps(HELLO).encode())
    reply = caller.request("POST", path, content=body, headers={"Content-Encoding": "gzip"})
    assert reply.status_code == 415 and "Content-Encoding is 'gzip': send the body uncompressed." in reply.text
    plain = caller.request("POST", CHAT, content=json.dumps(HELLO).encode(), headers={"Content-Encoding": "Identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("stays", [True, False], ids=["reads all", "leaves"])
def test_a_closed_connection_is_freed_without_the_garbage_collector(engine: Engine, stays: bool) -> None:
    app, text = make_app(engine), json.dumps({**TEXT, "stream": True, "max_tokens": 40}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"

    async def run() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        server = await listen(app, ServerConfig(), listening, ServerCounters())
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(head.encode() + text)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        if stays:
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        while app.state.counters.in_progress:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        server.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert not [one for one in gc.get_objects() if type(one) is Connection]  # some objects warn of `isinstance`
    finally:
        gc.enable()
