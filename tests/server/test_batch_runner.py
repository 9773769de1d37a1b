"""Batches that are interrupted, cancelled or expire, and requests that the server cannot serve: every line has exactly
one result."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from paceline.config import ConfigError, ServerConfig, TenantConfig
from paceline.engine.engine import Engine
from paceline.server.app import App
from paceline.server.batches import results as results_module
from paceline.server.batches import runner as runner_module
from paceline.server.batches.multipart import MultipartParser
from paceline.server.batches.objects import FINISHED
from paceline.server.batches.runner import BatchRunner
from paceline.server.batches.running_batch import RunningBatch
from paceline.server.batches.store import BatchStore
from paceline.server.limits import MAX_UPLOADS
from tests.server.batching import ScriptedApp, all_results, line, results, run_batches, start, wait_for
from tests.server.serving import make_app


@pytest.fixture
def app(engine: Engine, tmp_path: Path) -> App:
    return make_app(engine, batch_folder=str(tmp_path / "batches"))


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batches.running_batch._RETRY_S", 0.01)
    monkeypatch.setattr("paceline.server.batches.runner._RETRY_S", 0.01)
    monkeypatch.setattr("paceline.server.batches.runner._RESCAN_S", 0.01)


def numbered(count: int) -> list[dict[str, Any]]:
    return [line(str(n), body={"number": n}) for n in range(count)]


def ids(found: list[dict[str, Any]]) -> list[int]:
    return sorted(int(one["custom_id"]) for one in found)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("torn", [b"", b'{"id":"batch_req_1","custom_id":"7","resp'])
def test_an_interrupted_batch_continues_where_it_was(app: App, tmp_path: Path, torn: bytes) -> None:
    first = ScriptedApp(holds=lambda body: body["number"] % 3 == 0)

    async def interrupt(client: AsyncOpenAI) -> str:
        batch = await start(client, numbered(60))
        output = tmp_path / "batches" / "files" / f"file-{batch.id.removeprefix('batch_')}o.data"
        await until(lambda: output.exists() and output.read_bytes().count(b"\n") == 40)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        return batch.id

    batch_id = run_batches(app, interrupt, call=first)
    with open(tmp_path / "batches" / "files" / f"file-{batch_id.removeprefix('batch_')}o.data", "ab") as output:
        output.write(torn)
    second = ScriptedApp()

    async def finish(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, batch_id, *FINISHED)
        found = await all_results(client, batch)
        assert ids(found) == list(range(60)) and batch.request_counts and batch.request_counts.completed == 60
        assert all(one["response"]["body"]["echo"]["number"] == int(one["custom_id"]) for one in found)

    run_batches(app, finish, call=second)
    assert sorted(body["number"] for body in second.bodies) == list(range(0, 60, 3)), "completed lines do not run again"


def test_a_batch_that_was_being_finalized_is_completed_after_a_restart(app: App) -> None:
    store = app.state.batches
    assert store is not None

    async def finish(client: AsyncOpenAI) -> str:
        return (await wait_for(client, (await start(client, numbered(3))).id, "completed")).id

    batch_id = run_batches(app, finish, call=ScriptedApp())

    def back(batch: Any) -> None:
        batch.status, batch.completed_at, batch.output_file_id = "finalizing", None, None

    store.update_batch(batch_id, back)
    again = ScriptedApp()

    async def look(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, batch_id, "completed")
        assert ids(await all_results(client, batch)) == [0, 1, 2]

    run_batches(app, look, call=again)
    assert not again.bodies


def test_a_cancelled_batch_keeps_its_results_and_names_the_rest(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedApp(holds=lambda body: body["number"] >= 5)
    start_lines, started = RunningBatch._start_lines, []

    async def starting(self: RunningBatch, tenant: TenantConfig) -> None:
        started.append(self.batch.id)
        await start_lines(self, tenant)

    monkeypatch.setattr(RunningBatch, "_start_lines", starting)
    monkeypatch.setattr(runner_module, "MAX_BATCH_LINES_IN_FLIGHT", 64)

    async def use(client: AsyncOpenAI) -> None:
        waiting = await start(client, numbered(80))
        queued = await start(client, numbered(2))
        await until(lambda: scripted.in_flight == 64)
        assert (await client.batches.cancel(queued.id)).status == "cancelling"
        queued = await wait_for(client, queued.id, "cancelled")  # at once, though another batch runs
        assert started == [waiting.id], "a batch that is cancelled before it began runs no line"
        assert [one["error"]["code"] for one in await all_results(client, queued)] == ["batch_cancelled"] * 2
        with pytest.raises(openai.ConflictError, match="cancel it first"):
            await client.files.delete(waiting.input_file_id)
        assert (await client.batches.cancel(waiting.id)).cancelling_at
        batch = await wait_for(client, waiting.id, "cancelled")
        assert ids(await results(client, batch.output_file_id)) == [0, 1, 2, 3, 4]
        assert ids(await results(client, batch.error_file_id)) == list(range(5, 80))
        assert batch.request_counts and batch.request_counts.failed == 75 and batch.cancelled_at
        assert (await client.files.delete(waiting.input_file_id)).deleted

    run_batches(app, use, call=scripted)
    assert scripted.in_flight == 0 and scripted.most_in_flight == 64, "a bounded number of lines is in flight"


def test_a_batch_expires_with_its_window(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedApp(holds=lambda body: body["number"] >= 2)

    async def use(client: AsyncOpenAI) -> None:
        batch = await start(client, numbered(4))
        await until(lambda: scripted.in_flight == 2)
        assert app.state.batches is not None
        await asyncio.to_thread(app.state.batches.update_batch, batch.id, lambda one: setattr(one, "expires_at", 1))

    run_batches(app, use, call=scripted)  # the server is stopped, and started again after the window

    async def look(client: AsyncOpenAI) -> None:
        (found,) = (await client.batches.list()).data
        batch = await wait_for(client, found.id, "expired")
        assert batch.expired_at and ids(await results(client, batch.output_file_id)) == [0, 1]
        assert {one["error"]["code"] for one in await results(client, batch.error_file_id)} == {"batch_expired"}

    run_batches(app, look, call=ScriptedApp())


@pytest.mark.parametrize(
    ("errors", "calls", "status"),
    [
        ([(503, "engine_failed")] * 2, 3, 200),
        ([(503, "engine_failed")] * 9, 3, 503),
        ([(429, "queue_full")] * 9, 10, 200),
        ([(409, "aborted"), (503, "draining"), (409, "aborted")], 4, 200),
        ([(500, "internal_error")], 1, 500),
    ],
)
def test_a_request_that_the_server_could_not_serve_is_tried_again(
    app: App, errors: list[tuple[int, str]], calls: int, status: int
) -> None:
    scripted = ScriptedApp()
    scripted.errors = list(errors)

    async def use(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, (await start(client, numbered(1))).id, "completed")
        (found,) = await all_results(client, batch)
        assert found["response"]["status_code"] == status
        assert (batch.error_file_id is None) == (status == 200)

    run_batches(app, use, call=scripted)
    assert len(scripted.bodies) == calls


def test_no_line_starts_while_the_server_drains(app: App) -> None:
    scripted = ScriptedApp()

    async def use(client: AsyncOpenAI) -> None:
        app.state.draining = True
        batch = await start(client, numbered(3))
        batch = await wait_for(client, batch.id, "in_progress")
        await asyncio.sleep(0.3)
        assert not scripted.bodies
        app.state.draining = False
        await wait_for(client, batch.id, "completed")

    run_batches(app, use, call=scripted)


def test_batches_of_two_tenants_run_side_by_side(engine: Engine, tmp_path: Path) -> None:
    tenants = [TenantConfig(name=name, keys=(name,)) for name in ("alice", "bob")]
    app = make_app(engine, tenants=tenants, batch_folder=str(tmp_path))
    scripted = ScriptedApp(holds=lambda body: "hold" in body)

    async def use(client: AsyncOpenAI) -> None:
        held = await start(client, [line("a", body={"hold": True})])
        later = await start(client, numbered(1))
        other = client.with_options(api_key="bob")
        await wait_for(other, (await start(other, numbered(1))).id, "completed")
        assert (await client.batches.retrieve(later.id)).status == "validating", "one batch of a tenant after the other"
        scripted.release.set()
        for batch in (held, later):
            await wait_for(client, batch.id, "completed")

    run_batches(app, use, call=scripted, key="alice")


def test_the_batch_of_a_tenant_that_was_removed_fails(engine: Engine, tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = make_app(engine, tenants=[TenantConfig(name="alice", keys=("alice",))], batch_folder=folder)
    before.state.draining = True

    async def create(client: AsyncOpenAI) -> str:
        return (await start(client, numbered(1))).id

    batch_id = run_batches(before, create, key="alice")
    after = make_app(engine, tenants=[TenantConfig(name="bob", keys=("bob",))], admin_key="root", batch_folder=folder)

    async def look(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, batch_id, "failed")
        assert batch.errors and batch.errors.data and batch.errors.data[0].code == "tenant_not_found"

    run_batches(after, look, call=ScriptedApp(), key="root")


def test_a_batch_whose_input_is_gone_from_the_disk_fails(app: App, tmp_path: Path) -> None:
    async def use(client: AsyncOpenAI) -> None:
        app.state.draining = True
        batch = await wait_for(client, (await start(client, numbered(1))).id, "in_progress")
        (tmp_path / "batches" / "files" / f"{batch.input_file_id}.data").unlink()

    run_batches(app, use)
    app.state.draining = False

    async def look(client: AsyncOpenAI) -> None:
        (found,) = (await client.batches.list()).data
        batch = await wait_for(client, found.id, "failed")
        assert batch.errors and batch.errors.data and batch.errors.data[0].code == "input_file_missing"

    run_batches(app, look, call=ScriptedApp())


def test_a_client_that_disconnects_leaves_no_upload(app: App, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = [
        {"type": "http.request", "body": b"--B\r\n" + b"x" * 300_000, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return events.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(f"there is nobody to send {message} to")

    headers = [(b"content-type", b"multipart/form-data; boundary=B")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers, "query_string": b""}
    events[0]["body"] = b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"x" * 300_000
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    assert app.state.counters.disconnects == 1 and app.state.counters.uploads.total() == 0 and not caplog.records
    assert not list((tmp_path / "batches" / "uploads").iterdir())


def test_one_of_two_runners_runs_the_batches_and_the_other_takes_over(app: App) -> None:
    store = app.state.batches
    assert store is not None
    calls = ScriptedApp(holds=lambda body: True), ScriptedApp()

    async def use(client: AsyncOpenAI) -> None:
        second = BatchRunner(app.state, store, calls[1])
        batch = await start(client, numbered(3))
        await until(lambda: calls[0].in_flight == 3)
        task = asyncio.create_task(second.run())
        other = await start(client, numbered(2))
        await asyncio.sleep(0.5)
        assert not calls[1].bodies
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert {batch.id, other.id} == {one.id for one in (await client.batches.list()).data}

    run_batches(app, use, call=calls[0])

    async def finish(client: AsyncOpenAI) -> None:
        for one in (await client.batches.list()).data:
            await wait_for(client, one.id, "completed")

    run_batches(app, finish, call=calls[1])
    assert Counter(body["number"] for body in calls[1].bodies) == {0: 2, 1: 2, 2: 1}


def test_a_full_disk_interrupts_a_batch_and_loses_nothing(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failures = os.write, [5]

    def full(descriptor: int, data: Any) -> int:
        if failures[0]:
            failures[0] -= 1
            write(descriptor, bytes(data)[:20])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(results_module.os, "write", full)

    async def use(client: AsyncOpenAI) -> None:
        batch = await wait_for(client, (await start(client, numbered(200))).id, "completed")
        assert ids(await all_results(client, batch)) == list(range(200))

    run_batches(app, use, call=ScriptedApp())
    assert failures == [0]


def test_outputs_count_towards_the_bytes_of_a_tenant(engine: Engine, tmp_path: Path) -> None:
    app = make_app(engine, batch_folder=str(tmp_path), batch_tenant_bytes=10_000)

    async def use(client: AsyncOpenAI) -> None:
        lines = [line(str(n), body={"text": "x" * 900}) for n in range(6)]
        batch = await wait_for(client, (await start(client, lines)).id, "completed")
        again = await wait_for(
            client,
            (
                await client.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
                )
            ).id,
            "completed",
        )
        assert {one["error"]["code"] for one in await results(client, again.error_file_id)} == {
            "storage_limit_exceeded"
        }

    run_batches(app, use, call=ScriptedApp())


def test_a_disk_error_is_an_error_of_the_server(app: App, tmp_path: Path) -> None:
    async def use(client: AsyncOpenAI) -> None:
        (tmp_path / "batches" / "files").rename(tmp_path / "gone")
        (tmp_path / "batches" / "files").touch()
        with pytest.raises(openai.InternalServerError, match="cannot use its batch_folder") as failed:
            await client.files.create(file=b"{}", purpose="batch")
        assert failed.value.status_code == 507

    run_batches(app, use)


def test_a_folder_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"batch_folder is '.*file/x', which cannot be written"):
        BatchStore(ServerConfig(batch_folder=str(tmp_path / "file" / "x")))


def test_a_tenant_may_not_have_the_name_of_the_batches_of_another() -> None:
    with pytest.raises(ConfigError, match="'alice:batch', but :batch marks batches"):
        TenantConfig(name="alice:batch", keys=("a",))
    with pytest.raises(ConfigError, match="'a,b': commas separate names"):
        TenantConfig(name="a,b")


def test_expired_files_and_old_batches_are_removed(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = app.state.batches
    assert store is not None
    scripted = ScriptedApp(holds=lambda body: "hold" in body)

    async def use(client: AsyncOpenAI) -> None:
        await wait_for(client, (await start(client, numbered(1))).id, "completed")
        held = await start(client, [line("a", body={"hold": True})])
        await until(lambda: scripted.in_flight)
        (tmp_path / "batches" / "uploads" / "abandoned").touch()
        now = time.time()
        monkeypatch.setattr("paceline.server.batches.store.time.time", lambda: now + 40 * 86_400)
        assert not (await client.files.list()).data
        store.remove_expired()
        monkeypatch.undo()
        assert [one.id for one in (await client.batches.list()).data] == [held.id]
        kept = {path.name for path in (tmp_path / "batches" / "files").iterdir()}
        assert kept == {f"{held.input_file_id}.json", f"{held.input_file_id}.data"}
        assert not list((tmp_path / "batches" / "uploads").iterdir())

    run_batches(app, use, call=scripted)


def test_a_tenant_has_a_bounded_number_of_batches(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batches.store.MAX_UNFINISHED_BATCHES", 2)
    monkeypatch.setattr("paceline.server.batches.store.MAX_BATCHES", 3)
    scripted = ScriptedApp(holds=lambda body: True)

    async def use(client: AsyncOpenAI) -> None:
        batches = [await start(client, numbered(1)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 batches are not finished"):
            await start(client, numbered(1))
        scripted.release.set()
        for one in batches:
            await wait_for(client, one.id, "completed")
        for _ in range(4):
            batches.append(await start(client, numbered(1)))
            await wait_for(client, batches[-1].id, "completed")
        assert [one.id for one in (await client.batches.list()).data] == [one.id for one in batches[:2:-1]]

    run_batches(app, use, call=scripted)


def test_a_tenant_has_a_bounded_number_of_uploads_in_progress(engine: Engine, tmp_path: Path) -> None:
    tenants = [TenantConfig(name=name, keys=(name,)) for name in ("alice", "bob")]
    app = make_app(engine, tenants=tenants, batch_folder=str(tmp_path))
    app.state.counters.uploads["alice"] = MAX_UPLOADS

    async def upload(client: AsyncOpenAI) -> None:
        await client.files.create(file=b"{}", purpose="batch")

    with pytest.raises(openai.InternalServerError, match="4 uploads are in progress"):
        run_batches(app, upload, key="alice")
    run_batches(app, upload, key="bob")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_upload_is_the_same_in_pieces_of_any_size(tmp_path: Path, size: int) -> None:
    content = b"\r\n--\r\n-\r\n--Boundar\r\n\r\n" + bytes(range(256))
    body = (
        b'preamble\r\n--Boundary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--Boundary\r\n'
        b'Content-Type: x/y\r\ncontent-disposition: form-data; name="file"; filename="a b.jsonl"\r\n\r\n'
        + content
        + b"\r\n--Boundary--\r\nepilogue"
    )
    with open(tmp_path / "out", "wb") as output:
        parser = MultipartParser(b"Boundary", output, 10_000)
        for at in range(0, len(body), size):
            parser.feed(body[at : at + size])
    assert parser.is_complete and parser.filename == "a b.jsonl" and parser.fields == {"purpose": b"batch"}
    assert (tmp_path / "out").read_bytes() == content and parser.num_bytes == len(content)
