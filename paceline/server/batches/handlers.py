"""Handlers of `/v1/files` and `/v1/batches`. A tenant sees its own; admins see all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import BinaryIO, Generic, TypedDict, TypeVar

from starlette.responses import Response, StreamingResponse

from paceline.request import short
from paceline.server.auth import DEFAULT_TENANT
from paceline.server.batches.multipart import MultipartParser, receive_upload
from paceline.server.batches.objects import (
    BatchList,
    BatchObject,
    BatchQuery,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FileQuery,
)
from paceline.server.batches.store import BatchStore, make_id
from paceline.server.errors import ApiError, missing_parameter
from paceline.server.limits import (
    BATCH_ENDPOINTS,
    COMPLETION_WINDOW_S,
    MAX_METADATA_CHARACTERS,
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_UPLOADS,
    MIN_FILE_EXPIRY_S,
)
from paceline.server.routing import Call, json_response

T = TypeVar("T")
Item = TypeVar("Item", FileObject, BatchObject)
_PIECE_BYTES = 1 << 18


def _store(call: Call) -> BatchStore:
    if call.state.batches is None:
        raise ApiError(
            "Files and batches need a folder, and the server has none: start it with `batch_folder`.",
            status=404,
            code="no_batch_folder",
        )
    return call.state.batches


async def _on_disk(function: Callable[..., T], *args: object) -> T:
    """Runs in a thread. An error of the disk is the server's, and not the end of it."""
    try:
        return await asyncio.to_thread(function, *args)
    except OSError as error:
        raise ApiError(
            f"The server cannot use its batch_folder ({error.strerror}): tell its operator.",
            status=507,
            kind="server_error",
            code="storage_failed",
        ) from error


class _Page(TypedDict, Generic[Item]):
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None


def _page(items: Sequence[Item], query: FileQuery | BatchQuery, *, ascending: bool = False) -> _Page[Item]:
    """The items, given oldest first, that follow `after` in the wanted order. It may be gone: ids sort by time."""
    after = query.after
    if after is not None:
        items = [one for one in items if (one.id > after if ascending else one.id < after)]
    page = (items if ascending else items[::-1])[: query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return {"data": list(page), "has_more": len(items) > len(page), "first_id": first, "last_id": last}


# ---------------------------------------------------------------------- files


async def upload_file(call: Call) -> Response:
    store, uploads, tenant = _store(call), call.state.counters.uploads, call.tenant or DEFAULT_TENANT.name
    if uploads[tenant] >= MAX_UPLOADS:
        raise ApiError(
            f"{MAX_UPLOADS} uploads are in progress: retry later.",
            status=503,
            kind="server_error",
            code="too_many_uploads",
            headers={"Retry-After": "5", "Connection": "close"},
        )
    path = store.new_upload()
    uploads[tenant] += 1
    try:
        form = await receive_upload(call.http.receive, call.http.headers, path, call.state.config)
        expires_after_s = _check_form(form)
        assert form.filename is not None, "checked"
        return json_response(await _on_disk(store.add_file, path, form.filename, tenant, expires_after_s))
    except OSError as error:
        raise ApiError(
            f"The server cannot store the file ({error.strerror}): tell its operator.",
            status=507,
            kind="server_error",
            code="storage_failed",
            headers={"Connection": "close"},
        ) from error
    finally:
        uploads[tenant] -= 1
        with contextlib.suppress(OSError):  # it was kept under another name, or could not be written at all
            await asyncio.to_thread(path.unlink)


def _check_form(form: MultipartParser) -> float | None:
    """Returns the seconds after which the file expires, if given."""
    fields = {name: value.decode("utf-8", "replace") for name, value in form.fields.items()}
    if form.filename is None:
        raise missing_parameter("file", "send a part of this name with the content")
    if "purpose" not in fields:
        raise missing_parameter("purpose", "send a part of this name with the value batch")
    if fields["purpose"] != "batch":
        raise ApiError(f"purpose is {short(fields['purpose'])}: give batch.", param="purpose", code="invalid_value")
    if not form.num_bytes:
        raise ApiError("The file is empty: give one JSON object per line.", param="file", code="empty_file")
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    unknown = sorted(fields.keys() - {"purpose"})
    if unknown:
        raise ApiError(f"Unknown part {short(unknown[0])}: give file and purpose.", param=unknown[0][:80])
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None or not seconds.isdecimal() or int(seconds) < MIN_FILE_EXPIRY_S:
        raise ApiError(
            f"expires_after is invalid: give the anchor created_at and at least {MIN_FILE_EXPIRY_S} seconds.",
            param="expires_after",
            code="invalid_value",
        )
    return float(min(int(seconds), 1 << 40))


async def list_files(call: Call) -> Response:
    query: FileQuery = call.query
    found = await _on_disk(_store(call).files, call.tenant)
    found = [one for one in found if query.purpose in (None, one.purpose)]
    return json_response(FileList(**_page(found, query, ascending=query.order == "asc")))


async def get_file(call: Call) -> Response:
    return json_response((await _on_disk(_store(call).file, call.path_params["id"], call.tenant)).file)


async def delete_file(call: Call) -> Response:
    await _on_disk(_store(call).delete_file, call.path_params["id"], call.tenant)
    return json_response(FileDeleted(call.path_params["id"]))


async def get_content(call: Call) -> Response:
    store = _store(call)
    found = (await _on_disk(store.file, call.path_params["id"], call.tenant)).file
    content: BinaryIO = await _on_disk(open, store.data_path(found.id), "rb")  # open: it may be deleted meanwhile

    async def pieces() -> AsyncIterator[bytes]:
        with content:
            while data := await asyncio.to_thread(content.read, _PIECE_BYTES):
                yield data

    headers = {"content-length": str(found.bytes), "content-type": "application/octet-stream"}
    return StreamingResponse(pieces(), headers=headers)


# ---------------------------------------------------------------------- batches


async def create_batch(call: Call) -> Response:
    store, request = _store(call), call.body
    assert isinstance(request, BatchRequest), "what the route accepts"
    _check_request(request)
    now = int(time.time())
    batch = BatchObject(
        id=make_id("batch_"),
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        created_at=now,
        expires_at=now + COMPLETION_WINDOW_S,
        metadata=request.metadata,
    )
    tenant = call.tenant or DEFAULT_TENANT.name
    file = (await _on_disk(store.file, request.input_file_id, tenant)).file
    if file.purpose != "batch":
        raise ApiError(
            f"File {file.id} has the purpose {file.purpose}: give one that was uploaded with the purpose batch.",
            param="input_file_id",
            code="invalid_value",
        )
    await _on_disk(store.add_batch, batch, tenant)
    return json_response(batch)


def _check_request(request: BatchRequest) -> None:
    if request.endpoint not in BATCH_ENDPOINTS:
        raise ApiError(
            f"endpoint is {short(request.endpoint)}: give one of {', '.join(BATCH_ENDPOINTS)}.",
            param="endpoint",
            code="invalid_value",
        )
    if request.completion_window != "24h":
        raise ApiError(
            f"completion_window is {short(request.completion_window)}: give 24h.",
            param="completion_window",
            code="invalid_value",
        )
    pairs = request.metadata or {}
    for key, value in pairs.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or len(value) > MAX_METADATA_CHARACTERS:
            raise ApiError(
                f"metadata has a key of more than {MAX_METADATA_KEY_CHARACTERS} characters, or a value of more than "
                f"{MAX_METADATA_CHARACTERS}: shorten it.",
                param="metadata",
                code="invalid_value",
            )
    if len(pairs) > MAX_METADATA_PAIRS:
        raise ApiError(
            f"metadata has {len(pairs)} pairs: give at most {MAX_METADATA_PAIRS}.",
            param="metadata",
            code="invalid_value",
        )


async def list_batches(call: Call) -> Response:
    query: BatchQuery = call.query
    found = [one.batch for one in await _on_disk(_store(call).batches, call.tenant)]
    return json_response(BatchList(**_page(found, query)))


async def get_batch(call: Call) -> Response:
    return json_response((await _on_disk(_store(call).batch, call.path_params["id"], call.tenant)).batch)


async def cancel_batch(call: Call) -> Response:
    store, batch_id = _store(call), call.path_params["id"]
    await _on_disk(store.batch, batch_id, call.tenant)

    def cancel(batch: BatchObject) -> None:
        if batch.is_finished or batch.status == "finalizing":
            raise ApiError(
                f"Batch {batch.id} is {batch.status}: only a batch that is validating or in progress can be cancelled.",
                status=409,
                code="conflict",
            )
        batch.cancelling_at = batch.cancelling_at or int(time.time())
        batch.status = "cancelling"

    return json_response(await _on_disk(store.update_batch, batch_id, cancel))
