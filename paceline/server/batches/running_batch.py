"""One batch from validation to its result files.

Everything that matters is on the disk: a batch that is interrupted anywhere starts again with `run`, which skips the
lines that have a result. An interrupted line has none, and runs again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from paceline.config import TenantConfig
from paceline.engine.output import EngineFailed
from paceline.server.batches.lines import (
    Done,
    InputLine,
    ResultLine,
    not_run,
    parse_line,
    read_lines,
    read_results,
    responded,
    validate,
)
from paceline.server.batches.objects import BatchError, BatchErrors, BatchObject, StoredBatch
from paceline.server.batches.results import ResultWriter
from paceline.server.batches.store import BatchStore
from paceline.server.http import AsgiEvent, Receive, Scope, Send
from paceline.server.limits import MAX_BATCH_ATTEMPTS, MAX_BATCH_BYTES_IN_FLIGHT
from paceline.server.state import ServerState

log = logging.getLogger("paceline.server")
_Ended = Literal["completed", "cancelled", "expired"]
_READ_LINES = 64  # of the input file, at a time
_POLL_S = 0.1
_RETRY_S = 1.0
_PROGRESS_S = 2.0  # between two updates of request_counts
_BUSY = ("queue_full", "too_many_bodies", "draining", "shutting_down")  # not counted as attempts
_FAILED = ("engine_failed", "body_process_died", "aborted")
_UNFINISHED = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was completed."),
    "expired": ("batch_expired", "This request was not completed before the completion window of the batch ended."),
}


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorCode


_error_decoder = msgspec.json.Decoder(_ErrorBody)


def _error_code(body: bytes) -> str:
    return _error_decoder.decode(body).error.code or ""


class RunningBatch:
    def __init__(
        self,
        stored: StoredBatch,
        store: BatchStore,
        state: ServerState,
        call: Callable[[Scope, Receive, Send], Awaitable[None]],
        max_in_flight: Callable[[], int],
    ) -> None:
        """`call` is the app; `max_in_flight` says how many lines this batch may have in flight now."""
        self._stored, self._store, self._state, self._call = stored, store, state, call
        self._max_in_flight = max_in_flight
        self.batch = stored.batch
        self.cancelled = asyncio.Event()
        output, errors = map(store.data_path, self.batch.result_ids)
        self._paths = output, errors
        self._writer = ResultWriter(output, errors)
        self._done = Done()
        self._num_bytes_left = 0
        self._in_flight = 0
        self._bytes_in_flight = 0
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        tenant = self._state.api_keys.tenant_named(self._stored.tenant)
        if tenant is None:
            error = BatchError("tenant_not_found", f"The tenant {self._stored.tenant} does not exist any more.")
            await self._fail([error])
            return
        if not await asyncio.to_thread(self._store.data_path(self.batch.input_file_id).exists):
            await self._fail([BatchError("input_file_missing", "The input file is not in the server's folder.")])
            return
        if self.batch.in_progress_at is None and not await self._validate():
            return
        self._done = await asyncio.to_thread(read_results, *self._paths)
        self._num_bytes_left = await asyncio.to_thread(self._store.num_bytes_left, self._stored.tenant)
        status: _Ended = "completed"
        if self.batch.status != "finalizing":
            status = await self._run_lines(tenant)
        await self._finalize(status)

    # ------------------------------------------------------------------ before and after

    async def _validate(self) -> bool:
        path = self._store.data_path(self.batch.input_file_id)
        total, errors = await asyncio.to_thread(validate, path, self.batch.endpoint)
        if errors:
            await self._fail(errors)
            return False

        def begin(batch: BatchObject) -> None:
            batch.request_counts.total, batch.in_progress_at = total, int(time.time())
            if batch.status == "validating":  # it may have been cancelled meanwhile
                batch.status = "in_progress"

        await self._update(begin)
        return True

    async def _fail(self, errors: Sequence[BatchError]) -> None:
        def fail(batch: BatchObject) -> None:
            batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(list(errors))

        await self._update(fail)
        self._log()

    async def _finalize(self, status: _Ended) -> None:
        def finalizing(batch: BatchObject) -> None:
            self._count(batch)
            if status == "completed":
                batch.status, batch.finalizing_at = "finalizing", int(time.time())

        def finished(batch: BatchObject) -> None:
            output_id, errors_id = batch.result_ids
            batch.output_file_id = self._store.add_result(output_id, self._stored, f"{batch.id}_output.jsonl")
            batch.error_file_id = self._store.add_result(errors_id, self._stored, f"{batch.id}_error.jsonl")
            batch.status = status
            setattr(batch, f"{status}_at", int(time.time()))

        await self._update(finalizing)
        await self._update(finished)
        self._log()

    async def _update(self, change: Callable[[BatchObject], None]) -> None:
        self.batch = await asyncio.to_thread(self._store.update_batch, self.batch.id, change)

    def _count(self, batch: BatchObject) -> None:
        batch.request_counts.completed = self._done.num_completed
        batch.request_counts.failed = self._done.num_failed

    def _log(self) -> None:
        batch, counts = self.batch, self.batch.request_counts
        fields = {
            "id": batch.id,
            "tenant": self._stored.tenant,
            "status": batch.status,
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
            "seconds": int(time.time()) - batch.created_at,
        }
        log.info("batch", extra={"fields": fields})

    # ------------------------------------------------------------------ lines

    async def _run_lines(self, tenant: TenantConfig) -> _Ended:
        """Runs the lines without a result. Returns the status that the batch ends with."""
        if self.batch.status == "cancelling":
            self.cancelled.set()
        left_s = self.batch.expires_at - time.time()
        if left_s > 0 and not self.cancelled.is_set() and await self._run_for(left_s, tenant):
            return "completed"
        status: _Ended = "cancelled" if self.cancelled.is_set() else "expired"
        # A line that was interrupted while its result was written may have one.
        self._done = await asyncio.to_thread(read_results, *self._paths)
        async for group in self._lines_left():
            await asyncio.gather(*(self._keep(not_run(line.custom_id, *_UNFINISHED[status])) for line in group))
        return status

    async def _run_for(self, seconds: float, tenant: TenantConfig) -> bool:
        """Runs lines until the time is over or the batch is cancelled. Returns whether all have run."""
        running = asyncio.create_task(self._start_lines(tenant))
        cancelling = asyncio.create_task(self.cancelled.wait())
        try:
            await asyncio.wait({running, cancelling}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                return True
        finally:
            for task in (running, cancelling):
                task.cancel()
            await asyncio.gather(running, cancelling, return_exceptions=True)
            await self._writer.close()
        return False

    async def _lines_left(self) -> AsyncIterator[list[InputLine]]:
        """The lines without a result, in groups."""
        lines = read_lines(self._store.data_path(self.batch.input_file_id))

        def read() -> list[InputLine]:
            return [parse_line(line) for _, line in itertools.islice(lines, _READ_LINES)]

        while group := await asyncio.to_thread(read):
            yield [line for line in group if line.custom_id not in self._done.custom_ids]

    async def _start_lines(self, tenant: TenantConfig) -> None:
        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self._report_progress())
            tasks: set[asyncio.Task[None]] = set()
            async for lines in self._lines_left():
                for line in lines:
                    await self._wait_for_room()
                    self._in_flight += 1
                    self._bytes_in_flight += len(bytes(line.body))
                    task = group.create_task(self._run_line(line, tenant))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
            progress.cancel()

    async def _wait_for_room(self) -> None:
        while not self._can_start():
            self._has_room.clear()
            try:
                await asyncio.wait_for(self._has_room.wait(), _POLL_S)
            except TimeoutError:
                continue

    def _can_start(self) -> bool:
        if self._in_flight >= self._max_in_flight() or self._bytes_in_flight >= MAX_BATCH_BYTES_IN_FLIGHT:
            return False
        return not self._state.draining and self._engine_is_up()

    def _engine_is_up(self) -> bool:
        try:
            return self._state.client.model is not None
        except EngineFailed:
            return False

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await self._update(self._count)

    async def _run_line(self, line: InputLine, tenant: TenantConfig) -> None:
        try:
            if self._num_bytes_left - self._writer.num_bytes <= 0:
                message = "The files of the tenant have reached the server's batch_tenant_bytes: delete some."
                await self._keep(not_run(line.custom_id, "storage_limit_exceeded", message))
            else:
                await self._keep(await self._respond(line, tenant))
        finally:
            self._in_flight -= 1
            self._bytes_in_flight -= len(bytes(line.body))
            self._has_room.set()

    async def _keep(self, result: ResultLine) -> None:
        await self._writer.write(result)
        self._done.custom_ids.add(result.custom_id)
        self._done.num_completed += result.is_ok
        self._done.num_failed += not result.is_ok
        self._state.counters.batch_requests["completed" if result.is_ok else "failed"] += 1

    async def _respond(self, line: InputLine, tenant: TenantConfig) -> ResultLine:
        """Calls the app. A request that the server could not serve is tried again, a bounded number of times if it may
        be the reason."""
        attempts = 0
        while True:
            status, headers, body = await self._post(line, tenant)
            code = "" if status == 200 else _error_code(body)
            attempts += code in _FAILED
            if code not in (*_BUSY, *_FAILED) or attempts >= MAX_BATCH_ATTEMPTS:
                return responded(line.custom_id, status, headers.get("x-request-id", ""), body)
            await asyncio.sleep(_RETRY_S)
            while self._state.draining or not self._engine_is_up():
                await asyncio.sleep(_POLL_S)

    async def _post(self, line: InputLine, tenant: TenantConfig) -> tuple[int, dict[str, str], bytes]:
        unread = [bytes(line.body)]
        status, headers, parts = 0, dict[str, str](), list[bytes]()

        async def receive() -> AsgiEvent:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # the caller stays connected until it is cancelled
            raise AssertionError("never set")

        async def send(message: AsgiEvent) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update({name.decode(): value.decode() for name, value in message["headers"]})
            else:
                parts.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": line.url, "headers": [], "batch_tenant": tenant}
        await self._call(scope, receive, send)
        return status, headers, b"".join(parts)
