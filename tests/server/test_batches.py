"""`/v1/files` and `/v1/batches` with OpenAI's client: what a user does, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from paceline.config import TenantConfig
from paceline.engine.engine import Engine
from paceline.server.app import App
from paceline.server.batches.lines import validate
from tests.server.batching import all_results, jsonl, line, results, run_batches, start, wait_for
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app

MakeApp = Callable[..., App]


@pytest.fixture
def make(engine: Engine, tmp_path: Path) -> MakeApp:
    def with_folder(**options: Any) -> App:
        return make_app(engine, **{"batch_folder": str(tmp_path / "batches")} | options)

    return with_folder


# ---------------------------------------------------------------------- what a user does


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, HELLO),
        (COMPLETIONS, TEXT),
        ("/v1/embeddings", {"model": "tiny", "input": "a b c"}),
        ("/v1/responses", {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 6}),
    ],
)
def test_a_batch_has_the_responses_of_its_endpoint(make: MakeApp, endpoint: str, body: Any) -> None:
    app = make()
    direct = Caller(app).ok(endpoint, body)

    async def use(client: AsyncOpenAI) -> None:
        batch = await start(client, [line(f"r{n}", endpoint, body) for n in range(5)], endpoint, metadata={"a": "b"})
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"a": "b"})
        batch = await wait_for(client, batch.id, "completed", "failed")
        assert batch.status == "completed" and batch.error_file_id is None, batch.errors
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 5, 0)
        assert (
            batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
        )
        found = await results(client, batch.output_file_id)
        assert sorted(one["custom_id"] for one in found) == [f"r{n}" for n in range(5)]
        for one in found:
            assert one["error"] is None and one["response"]["status_code"] == 200 and one["response"]["request_id"]
            assert one["response"]["body"].keys() == direct.keys()
            for name in ("choices", "data"):
                assert one["response"]["body"].get(name) == direct.get(name)
        file = await client.files.retrieve(batch.output_file_id or "")
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")

    run_batches(app, use)


def test_requests_that_fail_are_in_the_error_file(make: MakeApp) -> None:
    async def use(client: AsyncOpenAI) -> None:
        lines = [
            line("good"),
            line("bad", body={**TEXT, "temperature": -1}),
            line("model", body={**TEXT, "model": "x"}),
        ]
        batch = await wait_for(client, (await start(client, lines)).id, "completed")
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
        failed = {one["custom_id"]: one for one in await results(client, batch.error_file_id)}
        assert failed.keys() == {"bad", "model"} and failed["bad"]["error"] is None
        assert failed["bad"]["response"]["status_code"] == 400
        assert failed["bad"]["response"]["body"]["error"]["param"] == "temperature"
        assert failed["model"]["response"]["body"]["error"]["code"] == "model_not_found"

    run_batches(make(), use)


def test_files_are_listed_read_and_deleted(make: MakeApp) -> None:
    async def use(client: AsyncOpenAI) -> None:
        data = b"x" * 300_000 + b"\r\n--not a boundary\r\n" + bytes(range(256)) * 2000
        files = [await client.files.create(file=(f"{n}.jsonl", data), purpose="batch") for n in range(5)]
        assert files[0].bytes == len(data) and files[0].status == "processed" and files[0].expires_at
        assert (await client.files.content(files[0].id)).content == data
        page = await client.files.list(limit=2)
        assert [one.id for one in page.data] == [files[4].id, files[3].id] and page.has_more
        assert [one.id async for one in client.files.list(limit=2)] == [one.id for one in reversed(files)]
        assert [one.id async for one in client.files.list(limit=2, order="asc")] == [one.id for one in files]
        assert not (await client.files.list(purpose="batch_output")).data
        assert (await client.files.delete(files[0].id)).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="does not exist, was deleted or has expired"):
                await call(files[0].id)
        assert [one.id async for one in client.files.list(after=files[0].id, order="asc")] == [f.id for f in files[1:]]

    run_batches(make(), use)


def test_batches_are_listed_the_newest_first_in_pages(make: MakeApp) -> None:
    async def use(client: AsyncOpenAI) -> None:
        batches = [await start(client, [line("a")]) for _ in range(5)]
        page = await client.batches.list(limit=3)
        assert [one.id for one in page.data] == [one.id for one in batches[:1:-1]] and page.has_more
        assert [one.id async for one in client.batches.list(limit=3)] == [one.id for one in reversed(batches)]
        for one in batches:
            await wait_for(client, one.id, "completed")

    run_batches(make(), use)


def test_a_tenant_sees_its_own_files_and_batches_alone(make: MakeApp) -> None:
    app = make(tenants=[TenantConfig(name=name, keys=(name,)) for name in ("alice", "bob")], admin_key="root")

    async def create(client: AsyncOpenAI) -> Any:
        return await wait_for(client, (await start(client, [line("a")])).id, "completed")

    batch = run_batches(app, create, key="alice")

    async def look(client: AsyncOpenAI) -> None:
        assert not (await client.files.list()).data and not (await client.batches.list()).data
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            for file_id in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    await call(file_id)
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        with pytest.raises(openai.NotFoundError, match=batch.input_file_id):
            await client.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )

    run_batches(app, look, key="bob")

    async def see_all(client: AsyncOpenAI) -> None:
        assert len((await client.files.list()).data) == 2 and len((await client.batches.list()).data) == 1

    run_batches(app, see_all, key="root")


def test_without_a_folder_the_routes_name_the_option(caller: Caller) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/x")):
        response = caller.request(method, path)
        assert response.status_code == 404 and "start it with `batch_folder`" in response.text


# ---------------------------------------------------------------------- invalid uploads

BOUNDARY = {"Content-Type": "multipart/form-data; boundary=B"}


def form(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    head = b'--B\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return b"".join(head % (name.encode(), value) for name, value in parts) + end


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ({}, b"", "Content-Type is not"),
        ({"Content-Type": "multipart/form-data"}, b"x", "Content-Type is not"),
        ({"Content-Type": "application/json"}, b"{}", "Content-Type is not"),
        (BOUNDARY, b"", "ends before the closing boundary"),
        (BOUNDARY, form(("file", b"{}"), end=b""), "ends before the closing boundary"),
        (BOUNDARY, form(("purpose", b"batch")), "`file` is required"),
        (BOUNDARY, form(("file", b"{}")), "`purpose` is required"),
        (BOUNDARY, form(("file", b"{}"), ("purpose", b"fine-tune")), "purpose is 'fine-tune': give batch"),
        (BOUNDARY, form(("file", b""), ("purpose", b"batch")), "The file is empty"),
        (BOUNDARY, form(("file", b"{}"), ("file", b"{}"), ("purpose", b"batch")), "two parts named 'file'"),
        (BOUNDARY, form(("file", b"{}"), ("purpose", b"batch"), ("x", b"")), "Unknown part 'x'"),
        (BOUNDARY, form(("file", b"{}"), ("purpose", b"x" * 2000)), "longer than 1024 bytes"),
        (BOUNDARY, form(*((f"p{n}", b"") for n in range(20))), "more than 8 parts"),
        (BOUNDARY, b"--B\r\nX: " + b"y" * 10_000, "the headers of a part are longer"),
        (BOUNDARY, b"--B\r\nX: y\r\n\r\n--B--\r\n", "a part has no name"),
        (BOUNDARY, b"--Bx\r\n", "not followed by a line break"),
        (BOUNDARY, form(("file", b"{}"), ("purpose", b"batch"), ("expires_after[seconds]", b"1")), "expires_after"),
    ],
)
def test_an_invalid_upload_is_refused_and_leaves_nothing(
    make: MakeApp, tmp_path: Path, headers: dict[str, str], body: bytes, message: str
) -> None:
    response = Caller(make()).request("POST", "/v1/files", headers=headers, content=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
    assert not list((tmp_path / "batches" / "uploads").iterdir()) and not list(
        (tmp_path / "batches" / "files").iterdir()
    )


def test_the_filename_is_never_a_path(make: MakeApp, tmp_path: Path) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="../../..\\\\etc/pass\x07wd"\r\n\r\n{}\r\n'
        + form(("purpose", b"batch"))
    )
    found = Caller(make()).request("POST", "/v1/files", headers=BOUNDARY, content=body)
    assert found.json()["filename"] == "passwd"
    assert not list(tmp_path.rglob("*passwd*"))
    for path in ("/v1/files/..%2f..%2fx", "/v1/files/file-..", f"/v1/files/{'x' * 500}", "/v1/batches/..%2fx"):
        assert Caller(make()).request("GET", path).status_code == 404


def test_the_limits_of_files_hold(make: MakeApp, tmp_path: Path) -> None:
    async def use(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match="longer than 2000 bytes") as large:
            await client.files.create(file=b"x" * 2001, purpose="batch")
        assert large.value.status_code == 413
        await client.files.create(file=b"x" * 1500, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="batch_tenant_bytes") as many:
            await client.files.create(file=b"x" * 1600, purpose="batch")
        assert many.value.status_code == 413
        await client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.APIStatusError, match="2 files are stored"):
            await client.files.create(file=b"x", purpose="batch")

    run_batches(make(batch_file_bytes=2000, batch_tenant_bytes=3000, batch_tenant_files=2), use)
    assert not list((tmp_path / "batches" / "uploads").iterdir())


# ---------------------------------------------------------------------- invalid batches


def test_an_invalid_file_fails_the_batch_with_line_numbers(make: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batches.lines.MAX_BATCH_LINE_BYTES", 2000)
    lines = [
        line("1"),
        b"",
        b'{"custom_id": "3", "method"',
        line("1"),
        line("5", url="/v1/files"),
        line("6", method="GET"),
        line("7", body=[1]),
        line("8", body={**TEXT, "stream": True}),
        line("9", body={**TEXT, "prompt": "x" * 5000}),
        {"custom_id": "10"},
        line("x" * 600),
        b"\xff\xfe",
        line("13"),
    ]

    async def use(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, (await start(client, lines)).id, "failed", "completed")
        assert batch.status == "failed" and batch.failed_at and batch.errors and batch.errors.data
        assert [(one.line, one.code) for one in batch.errors.data] == [
            (3, "invalid_json_line"),
            (4, "duplicate_custom_id"),
            (5, "invalid_url"),
            (6, "invalid_method"),
            (7, "invalid_body"),
            (8, "stream_not_supported"),
            (9, "line_too_long"),
            (10, "invalid_request"),
            (11, "invalid_custom_id"),
            (12, "invalid_json_line"),
        ]
        assert batch.output_file_id is None and batch.error_file_id is None

    run_batches(make(), use)


DEEP = b"[" * 5000 + b"]" * 5000
BODY = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %b}'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"a":' * 2000, "invalid_json_line"),
        (DEEP, "invalid_request"),
        (BODY % (b'{"x": %b}' % DEEP), "invalid_json_line"),
        (BODY % b'{"stream": 1e400}', "invalid_request"),
        (BODY % b'{"stream": "yes"}', "stream_not_supported"),
        (BODY % b'{"user": "\\ud800"}', "invalid_json_line"),
    ],
)
def test_no_line_stops_the_validation(tmp_path: Path, text: bytes, code: str) -> None:
    """A batch whose validation ends with an exception would be validated forever."""
    path = tmp_path / "lines"
    path.write_bytes(text)
    total, errors = validate(path, "/v1/completions")
    assert total == 1 and [error.code for error in errors] == [code]


@pytest.mark.parametrize(
    ("lines", "code"), [([b"", b" "], "empty_file"), ([line(str(n)) for n in range(7)], "too_many_requests")]
)
def test_a_file_with_too_few_or_too_many_requests_fails(
    make: MakeApp, monkeypatch: pytest.MonkeyPatch, lines: list[Any], code: str
) -> None:
    monkeypatch.setattr("paceline.server.batches.lines.MAX_BATCH_LINES", 6)

    async def use(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, (await start(client, lines)).id, "failed", "completed")
        assert batch.errors and batch.errors.data and [one.code for one in batch.errors.data] == [code]

    run_batches(make(), use)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/images"}, "endpoint is '/v1/images': give one of /v1/chat/completions"),
        ({"completion_window": "1h"}, "completion_window is '1h': give 24h"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata has 17 pairs"),
        ({"metadata": {"a": "x" * 600}}, "metadata has a key of more"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input_file_id": "file-1"}, "File 'file-1' not found"),
        ({"input_file_id": "../../etc/passwd"}, "not found"),
        ({"extra_body": {"urgent": True}}, "Unknown parameter: urgent"),
    ],
)
def test_an_invalid_batch_is_refused(make: MakeApp, fields: dict[str, Any], message: str) -> None:
    async def use(client: AsyncOpenAI) -> None:
        file = await client.files.create(file=jsonl([line("a")]), purpose="batch")
        given: Any = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"} | fields
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            await client.batches.create(**given)
        assert refused.value.status_code in (400, 404)
        assert not (await client.batches.list()).data

    run_batches(make(), use)


def test_an_output_file_is_no_input_file(make: MakeApp) -> None:
    async def use(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, (await start(client, [line("a")])).id, "completed")
        with pytest.raises(openai.BadRequestError, match="has the purpose batch_output"):
            await client.batches.create(
                input_file_id=batch.output_file_id or "", endpoint=COMPLETIONS, completion_window="24h"
            )
        with pytest.raises(openai.ConflictError, match="is completed"):
            await client.batches.cancel(batch.id)

    run_batches(make(), use)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "before=1"])
def test_invalid_query_parameters_are_refused(make: MakeApp, query: str) -> None:
    response = Caller(make()).request("GET", f"/v1/batches?{query}")
    assert response.status_code == 400 and query.split("=")[0] in response.json()["error"]["message"]


def test_requests_of_a_batch_are_shown_to_their_owner(engine: Engine, tmp_path: Path) -> None:
    tenants = [TenantConfig(name=name, keys=(name,)) for name in ("alice", "bob")]
    app = make_app(engine, tenants=tenants, batch_folder=str(tmp_path))

    async def use(client: AsyncOpenAI) -> None:
        long = {**TEXT, "max_tokens": app.state.client.model.max_tokens - 100, "ignore_eos": True}
        batch = await start(client, [line(str(n), body=long) for n in range(100)])
        async with asyncio.timeout(60):
            while not (found := (await client.get("/requests", cast_to=dict[str, Any]))["data"]):
                await asyncio.sleep(0.01)
        assert found[0]["tenant"] == "alice:batch"
        other = client.with_options(api_key="bob")
        assert (await other.get("/requests", cast_to=dict[str, Any]))["data"] == []
        await client.batches.cancel(batch.id)
        batch = await wait_for(client, batch.id, "cancelled")
        found = await all_results(client, batch)
        assert sorted(int(one["custom_id"]) for one in found) == list(range(100))
        last = found[-1]
        assert last["error"]["code"] == "batch_cancelled" and last["response"] is None

    run_batches(app, use, key="alice")
