"""API keys, tenants, and limits on clients: rates, sizes, times, connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.process import ServerProcess
from tests.server.virtual import (
    assert_nothing_is_left,
    body,
    complete,
    connect,
    expected_text,
    get,
    metric,
    open_stream,
    virtual,
    wait_until,
)

CONFIG = """
[server]
admin_key = "root"
log_format = "json"

[scheduler]
max_waiting = 4
max_running = 8
pin_quota_pages = 100

[[tenants]]
name = "alice"
keys = ["key-alice", "key-alice-2"]
weight = 2.0
max_requests = 4
max_priority = 5

[[tenants]]
name = "bob"
keys = ["key-bob"]
tokens_per_minute = 300
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("config") / "paceline.toml"
    path.write_text(CONFIG)
    with virtual(
        "--config", str(path), "--log-level", "info"
    ) as server:  # JSON logs tell at this level that it is ready
        yield server


def ask(server: ServerProcess, key: str, path: str = "/v1/completions", **payload: Any) -> httpx.Response:
    payload = {**body([5, 6, 7], 4), **payload}
    return httpx.post(server.url + path, json=payload, headers={"Authorization": f"Bearer {key}"}, timeout=120)


@pytest.mark.parametrize("key", ["", "wrong", "key-alic", "key-alice-3", "root", "ключ"])
def test_an_unknown_api_key_is_401(guarded: ServerProcess, key: str) -> None:
    response = httpx.post(
        f"{guarded.url}/v1/completions",
        json=body([5], 1),
        timeout=120,
        headers={"Authorization": f"Bearer {key}".encode()} if key else {},
    )
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert "key-" not in response.text


def test_every_key_of_a_tenant_is_accepted_and_counted_for_it(guarded: ServerProcess) -> None:
    for key in ("key-alice", "key-alice-2"):
        assert ask(guarded, key).status_code == 200
    assert metric(guarded, "tenant_service_tokens_total", key="root", tenant="alice") > 0


def test_openais_client_raises_authentication_error_for_a_wrong_key(guarded: ServerProcess) -> None:
    unknown = pytest.raises(openai.AuthenticationError, match="Missing or invalid API key")
    with OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client, unknown:
        client.models.list()
    with OpenAI(base_url=f"{guarded.url}/v1", api_key="key-alice", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["virtual"]


def test_tenants_and_cache_salts_do_not_share_cached_prefixes(guarded: ServerProcess) -> None:
    prompt = [900 + number for number in range(64)]

    def cached(key: str, **more: Any) -> int:
        usage = ask(guarded, key, prompt=prompt, max_tokens=1, **more).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("key-alice") == 0
    assert cached("key-alice") == 48
    assert cached("key-alice-2") == 48, "the same tenant"
    assert cached("key-bob") == 0, "another tenant"
    assert cached("key-alice", cache_salt="mine") == 0
    assert cached("key-alice", cache_salt="mine") == 48


def test_a_tenant_sees_and_aborts_only_its_own_requests(guarded: ServerProcess) -> None:
    async def main() -> None:
        host, port = guarded.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body([1, 2, 3], 20_000, stream=True)).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-alice\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        request_id = next(line for line in head.decode().split("\r\n") if "x-request-id" in line).split(": ")[1]
        (mine,) = (await asyncio.to_thread(get, guarded, "/v1/requests", "key-alice")).json()["data"]
        assert mine["id"] == f"{request_id}-0" and mine["tenant"] == "alice" and mine["state"] == "decoding"
        assert "decoding" in mine["why"]
        one = (await asyncio.to_thread(get, guarded, f"/v1/requests/{request_id}", "key-alice")).json()
        assert [part["id"] for part in one["parts"]] == [mine["id"]]
        assert (await asyncio.to_thread(get, guarded, "/v1/requests", "key-bob")).json()["data"] == []
        assert (await asyncio.to_thread(get, guarded, f"/v1/requests/{request_id}", "key-bob")).status_code == 404
        assert len((await asyncio.to_thread(get, guarded, "/v1/requests", "root")).json()["data"]) == 1

        def delete(name: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.delete(f"{guarded.url}/v1/requests/{name}", headers=headers, timeout=120).status_code

        assert await asyncio.to_thread(delete, request_id, "key-bob") == 404
        assert await asyncio.to_thread(delete, request_id[:-1], "key-alice") == 404, "ids match exactly"
        assert await asyncio.to_thread(delete, request_id, "key-alice") == 200
        rest = b""
        while b'"code":"aborted"' not in rest[-4096:]:
            data = await asyncio.wait_for(reader.read(65536), 300)
            assert data and b"[DONE]" not in rest, rest[-300:]
            rest += data
        writer.close()

    asyncio.run(main())


def test_more_than_max_requests_of_a_tenant_is_429(guarded: ServerProcess) -> None:
    async def main() -> list[httpx.Response]:
        headers = {"Authorization": "Bearer key-alice"}
        async with httpx.AsyncClient(timeout=300) as client:
            payload = [
                client.post(f"{guarded.url}/v1/completions", json=body([n], 2000), headers=headers) for n in range(1, 9)
            ]
            return list(await asyncio.gather(*payload))

    responses = asyncio.run(main())
    codes = [response.status_code for response in responses]
    assert codes.count(200) == 4 and codes.count(429) == 4
    refused = next(response for response in responses if response.status_code == 429)
    assert "its max_requests" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) >= 1


def test_exceeding_tokens_per_minute_is_429_with_retry_after(guarded: ServerProcess) -> None:
    codes = []
    for number in range(6):
        response = ask(guarded, "key-bob", prompt=[number + 1] * 100, max_tokens=50)
        codes.append(response.status_code)
    assert codes[0] == 200 and codes[-1] == 429
    assert "tokens_per_minute" in response.json()["error"]["message"]
    assert 1 <= int(response.headers["retry-after"]) <= 120


def test_priority_is_limited_by_the_tenants_max_priority(guarded: ServerProcess) -> None:
    assert ask(guarded, "key-alice", priority=5).status_code == 200
    assert ask(guarded, "key-alice", priority=-3).status_code == 200
    error = ask(guarded, "key-alice", priority=6).json()["error"]
    assert (
        error["message"] == "priority is 6: give at most 5, the max_priority of tenant alice."
        and error["param"] == "priority"
    )


def test_admin_routes_require_the_admin_key(guarded: ServerProcess) -> None:
    for path in ("/admin/cache", "/admin/drain"):
        assert get(guarded, path).status_code == 401
        assert get(guarded, path, "key-alice").status_code == 401
        assert get(guarded, path, "root").status_code == 200


def test_without_an_admin_key_admin_routes_are_403() -> None:
    with virtual() as server:
        for key in (None, "", "root", "None"):
            response = get(server, "/admin/drain", key)
            assert response.status_code == 403 and response.json()["error"]["code"] == "no_admin_key"


def admin(server: ServerProcess, method: str, path: str, **payload: Any) -> httpx.Response:
    return httpx.request(
        method, server.url + path, json=payload or None, headers={"Authorization": "Bearer root"}, timeout=120
    )


def test_a_pinned_prefix_survives_a_flush_until_it_is_unpinned(guarded: ServerProcess) -> None:
    prompt = [2000 + number for number in range(64)]

    def cached() -> int:
        usage = ask(guarded, "key-alice", prompt=[*prompt, 1, 2], max_tokens=1).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    pinned = admin(guarded, "POST", "/admin/cache", action="pin", name="system", prompt=prompt, tenant="alice")
    assert pinned.json() == {"pinned": "system", "num_tokens": 64}
    again = admin(guarded, "POST", "/admin/cache", action="pin", name="system", prompt=prompt, tenant="alice")
    assert again.status_code == 400 and "exists" in again.json()["error"]["message"]
    assert [pin["name"] for pin in admin(guarded, "GET", "/admin/cache").json()["pins"]] == ["system"]
    assert admin(guarded, "POST", "/admin/cache", action="flush").json()["flushed_tokens"] >= 0
    assert cached() == 64
    assert admin(guarded, "POST", "/admin/cache", action="unpin", name="system").status_code == 200
    admin(guarded, "POST", "/admin/cache", action="flush")
    assert cached() == 0
    assert admin(guarded, "POST", "/admin/cache", action="unpin", name="system").status_code == 400
    assert admin(guarded, "POST", "/admin/cache", action="dance").status_code == 400


def test_a_flush_that_waits_drops_the_kv_of_running_requests_too(guarded: ServerProcess) -> None:
    prompt, key = [3000 + number for number in range(64)], {"Authorization": "Bearer key-alice"}
    flush = {"action": "flush", "wait": True}
    with httpx.stream(
        "POST", f"{guarded.url}/v1/completions", json=body(prompt, 30_000, stream=True), headers=key, timeout=120
    ) as running:
        lines = running.iter_lines()  # the stream is closed with it
        next(lines)
        late = admin(guarded, "POST", "/admin/cache", **flush, timeout_s=0.05)
        assert late.status_code == 409 and "requests still run after timeout_s = 0.05" in late.text
        with pytest.raises(httpx.ReadTimeout):  # this client does not wait for the result
            httpx.post(f"{guarded.url}/admin/cache", json=flush, headers={"Authorization": "Bearer root"}, timeout=0.2)
    # The stream has ended, so that flush has nothing to wait for any more, and neither has another.
    assert admin(guarded, "POST", "/admin/cache", **flush).json().keys() == {"flushed_tokens"}
    answer = ask(guarded, "key-alice", prompt=[*prompt, 1, 2], max_tokens=1)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for wrong in ({"timeout_s": 0}, {"timeout_s": 1e9}, {"timeout_s": 1, "wait": False}, {"wait": "later"}):
        refused = admin(guarded, "POST", "/admin/cache", **flush | wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in wrong, refused.text


def test_a_draining_server_refuses_requests_until_it_is_resumed(guarded: ServerProcess) -> None:
    assert admin(guarded, "POST", "/admin/drain").json()["draining"] is True
    refused = ask(guarded, "key-alice").json()["error"]
    assert refused["code"] == "draining" and "The server is draining" in refused["message"]
    ready = get(guarded, "/ready")
    assert ready.status_code == 503 and "draining" in ready.json()["why"]
    health = get(guarded, "/health")
    assert health.status_code == 200 and health.json()["status"] == "draining", "it is alive"
    wait_until(lambda: "draining: new requests are refused" in guarded.output)
    assert admin(guarded, "DELETE", "/admin/drain").json()["draining"] is False
    assert get(guarded, "/health").json()["status"] == "ok"
    assert ask(guarded, "key-alice").status_code == 200


def test_retry_after_of_a_full_queue_lets_most_clients_in() -> None:
    with virtual("--max-running", "4", "--max-waiting", "4", "--virtual-slowdown", "12") as server:

        async def main() -> tuple[list[int], list[int]]:
            async with httpx.AsyncClient(timeout=300) as client:

                async def one(number: int) -> tuple[int, int]:
                    for attempt in range(60):
                        response = await client.post(f"{server.url}/v1/completions", json=body([number + 1], 40))
                        if response.status_code == 200:
                            return attempt, 200
                        assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
                        await asyncio.sleep(int(response.headers["retry-after"]))
                    return 60, 429

                found = await asyncio.gather(*(one(number) for number in range(24)))
                return [attempts for attempts, _ in found], [status for _, status in found]

        attempts, statuses = asyncio.run(main())
        assert set(statuses) == {200}, "every client was served in the end"
        assert sum(attempts) / len(attempts) < 5, "few clients retried in vain"
        assert_nothing_is_left(server)


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerProcess]:
    with virtual(
        "--header-s", "1", "--body-s", "1", "--slow-reader-s", "1", "--keep-alive-s", "1", "--max-header-bytes", "4096"
    ) as server:
        yield server


def closes(one: socket.socket) -> bytes:
    """What the server sends before it closes the connection."""
    found = b""
    while data := one.recv(65536):
        found += data
    return found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"POST /v1/comp", b"408"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n", b"408"),
        (b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model":', b"408"),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"408"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 8000, b"431"),
    ],
)
def test_a_slow_or_invalid_request_is_closed_with_a_status(strict: ServerProcess, sent: bytes, status: bytes) -> None:
    with connect(strict) as one:
        one.sendall(sent)
        assert closes(one).startswith(b"HTTP/1.1 " + status)


def test_a_front_end_starts_the_process_of_long_bodies_before_the_first_one(strict: ServerProcess) -> None:
    def is_running() -> bool:
        (front_end,) = strict.children["front_end"]
        children = psutil.Process(front_end).children()
        return any("paceline.server.body_workers" in child.cmdline() for child in children)

    wait_until(is_running)


def test_slow_senders_do_not_block_other_clients(strict: ServerProcess) -> None:
    sockets = []
    for _ in range(200):
        sockets.append(connect(strict))
        sockets[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    assert complete(strict, [7, 8], 10).json()["choices"][0]["text"] == expected_text([7, 8], 10)
    for one in sockets:
        assert closes(one).startswith(b"HTTP/1.1 408")
        one.close()


def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted(strict: ServerProcess) -> None:
    before = metric(strict, "http_slow_clients_total")
    with connect(strict) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        prompts = [[number] for number in range(1, 65)]
        data = json.dumps({**body([9], 4000, stream=True), "prompt": prompts}).encode()
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        wait_until(lambda: metric(strict, "http_slow_clients_total") == before + 1)
    assert_nothing_is_left(strict)


def test_a_disconnect_in_any_phase_leaves_nothing_behind(strict: ServerProcess) -> None:
    full = json.dumps(body([5] * 500, 3000, stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(full)
    request = head + full
    cuts = [0, 1, 20, len(head) - 1, len(head), len(head) + 1, len(request) // 2, len(request) - 1, len(request)]
    for cut in cuts:
        with connect(strict) as one:
            one.sendall(request[:cut])
    for wanted in (1, 100, 2000, 50_000):  # during waiting or prefill; after some tokens
        with connect(strict) as one:
            one.sendall(request)
            while wanted > 0:
                wanted -= len(one.recv(min(wanted, 65536)))
    assert complete(strict, [7, 8], 10).json()["choices"][0]["text"] == expected_text([7, 8], 10)
    assert_nothing_is_left(strict)


@pytest.mark.cluster
def test_a_flood_of_two_thousand_connections_is_served() -> None:
    async def main() -> int:
        async def one(number: int) -> bool:
            reader, writer = await open_stream(server, body([number + 1], 5))
            try:
                raw = b""
                while b"data: [DONE]" not in raw[-64:]:
                    data = await asyncio.wait_for(reader.read(65536), 300)
                    assert data, raw
                    raw += data
            finally:
                writer.close()
            return raw.count(b'"text"') == 5

        return sum(await asyncio.gather(*(one(number) for number in range(2000))))

    with virtual("--header-s=600") as server:  # this process connects all of them before it sends the first headers
        assert asyncio.run(main()) == 2000
        assert_nothing_is_left(server)


def test_connections_beyond_the_limit_get_503_while_all_others_have_requests() -> None:
    data = json.dumps({**body([5], 20_000), "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    with virtual("--max-connections", "20", "--virtual-slowdown", "12") as server:
        sockets = [connect(server) for _ in range(20)]
        for one in sockets:
            one.sendall(request)
        for one in sockets:  # one whose request has not arrived yet would be idle, and closed for the next connection
            assert one.recv(12) == b"HTTP/1.1 200"
        with connect(server) as extra:
            extra.sendall(request)
            assert b"too_many_connections" in closes(extra)
        assert get(server, "/health").status_code == 200
        for one in sockets:
            one.close()
        wait_until(lambda: complete(server, [7, 8], 3).status_code == 200)


def test_a_deadline_in_the_header_or_body_ends_the_request_with_408(strict: ServerProcess) -> None:
    slow = body([3], 30_000)
    for payload, headers in (({**slow, "deadline_ms": 50}, {}), (slow, {"X-Deadline-Ms": "50"})):
        response = httpx.post(f"{strict.url}/v1/completions", json=payload, headers=headers, timeout=120)
        assert response.status_code == 408 and response.json()["error"]["code"] == "deadline"
    for value in ("0", "-1", "soon", "nan", "inf"):
        response = httpx.post(f"{strict.url}/v1/completions", json=slow, headers={"X-Deadline-Ms": value}, timeout=120)
        assert response.status_code == 400 and "X-Deadline-Ms" in response.json()["error"]["message"]
        both = httpx.post(
            f"{strict.url}/v1/completions",
            json={**slow, "deadline_ms": 50},
            headers={"X-Deadline-Ms": value},
            timeout=120,
        )
        assert both.status_code == 400, "an invalid header is not ignored"
    assert_nothing_is_left(strict)


def test_waiting_and_running_times_end_a_request_with_408() -> None:
    with virtual("--max-running", "1", "--queue-timeout-s", "0.2", "--running-timeout-s", "600") as server:
        slow = body([3], 30_000)

        def error(**changes: Any) -> tuple[int, str]:
            response = complete(server, **{"prompt": [3], "max_tokens": 30_000, **changes})
            return response.status_code, response.json()["error"]["code"]

        assert error(running_timeout_ms=50) == (408, "running_timeout")
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**slow, "stream": True}, timeout=120
        ) as running:
            lines = running.iter_lines()  # the stream is closed with it
            next(lines)
            assert error(queue_timeout_ms=20) == (408, "queue_timeout")
            assert error() == (408, "queue_timeout"), "the limit of the server"
            assert error(queue_timeout_ms=60_000) == (408, "queue_timeout"), "which a request cannot raise"
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={**slow, "stream": True, "running_timeout_ms": 100},
            timeout=120,
        ) as running:
            assert running.status_code == 200
            assert [line for line in running.iter_lines() if '"code":"running_timeout"' in line], "an error event"
        assert_nothing_is_left(server)


def test_max_tokens_is_clipped_with_an_engine_process_too() -> None:
    with virtual("--clip-max-tokens", "--kv-tokens", "64") as server:
        assert complete(server, [3] * 40, 10**9).json()["choices"][0]["clipped_max_tokens"] == 24
        assert complete(server, [3] * 64, 10**9).status_code == 400


def test_openais_client_sync_async_streaming_and_raw(strict: ServerProcess) -> None:
    payload: dict[str, Any] = {
        "model": "virtual",
        "prompt": [11, 12, 13],
        "max_tokens": 20,
        "extra_body": {"ignore_eos": True},
    }
    output = expected_text([11, 12, 13], 20)
    with OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(**payload).choices[0].text == output
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**payload, stream=True)) == output
        raw = client.completions.with_raw_response.create(**payload)
        assert raw.headers["x-request-id"] == raw.parse().id and raw.parse().choices[0].text == output
        chat = client.chat.completions.create(model="virtual", messages=[{"role": "user", "content": "hello"}])
        assert chat.choices[0].finish_reason == "stop", "a virtual response ends by itself"

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as client:
            assert (await client.completions.create(**payload)).choices[0].text == output
            stream = await client.completions.create(**payload, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == output
            leaving = await client.completions.create(**{**payload, "max_tokens": 30_000}, stream=True)
            async for _ in leaving:
                break
            await leaving.close()

    asyncio.run(main())
    assert_nothing_is_left(strict)


def test_json_logs_have_request_ids_and_prompts_only_on_request(tmp_path: Path) -> None:
    for more, has_prompts in (((), False), (("--log-prompts",), True)):
        with virtual("--log-level", "info", "--log-format", "json", *more) as server:
            reply = complete(server, [2500, 2501], 3).json()
            wait_until(lambda server=server: any('"request"' in line for line in server.lines))
            line = json.loads(next(line for line in server.lines if '"message": "request"' in line))
        assert line["id"] == reply["id"] and line["tenant"] == "default" and line["status"] == 200
        assert line["prompt_tokens"] == 2 and line["completion_tokens"] == 3 and line["end"] == "length"
        assert ("prompts" in line) == has_prompts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_front_end_ends_the_request_in_the_engine(strict: ServerProcess, stream: bool) -> None:
    """Text is decoded in the front end, so the front end finds the stop string and tells the engine."""
    prompt = [31, 32, 33]
    text = expected_text(prompt, 200)
    stop = text[150:157]
    before = metric(strict, "request_success_total", finished_reason="stop")
    with OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as client:
        payload: dict[str, Any] = {
            "model": "virtual",
            "prompt": prompt,
            "max_tokens": 20_000,
            "stop": [stop, "never"],
            "extra_body": {"ignore_eos": True},
        }
        if stream:
            chunks = list(client.completions.create(**payload, stream=True, stream_options={"include_usage": True}))
            output, reason = (
                "".join(chunk.choices[0].text for chunk in chunks[:-1]),
                chunks[-2].choices[0].finish_reason,
            )
            usage = chunks[-1].usage
        else:
            reply = client.completions.create(**payload)
            output, reason, usage = reply.choices[0].text, reply.choices[0].finish_reason, reply.usage
    assert output == text[: text.index(stop)] and reason == "stop"
    needed = next(count for count in range(1, 200) if stop in expected_text(prompt, count))
    assert usage is not None and usage.completion_tokens == needed, "tokens after the stop string do not count"
    wait_until(lambda: metric(strict, "request_success_total", finished_reason="stop") == before + 1)
    assert_nothing_is_left(strict)


def test_a_body_in_chunks_of_one_byte_is_served_and_does_not_block_others(strict: ServerProcess) -> None:
    data = json.dumps(body([7, 8], 10)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"
    with connect(strict) as one:
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunks
        )
        assert expected_text([7, 8], 10) in json.loads(closes(one).split(b"\r\n\r\n", 1)[1])["choices"][0]["text"]
    with connect(strict) as endless:
        endless.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        endless.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                endless.send(b"1\r\n \r\n" * 10_000)
        assert complete(strict, [7, 8], 10).json()["choices"][0]["text"] == expected_text([7, 8], 10)
