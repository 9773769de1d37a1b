"""Files and batches as the API shows them and as they are stored."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from paceline.server.limits import MAX_LISTED_BATCHES, MAX_LISTED_FILES

FINISHED = ("completed", "failed", "cancelled", "expired")
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class BatchError(msgspec.Struct):
    """What is wrong with the input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def result_ids(self) -> tuple[str, str]:
        """The ids of its output and error file. They follow from its own, so that a restarted server finds them."""
        number = self.id.removeprefix("batch_")
        return f"file-{number}o", f"file-{number}e"


class BatchList(msgspec.Struct, kw_only=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class StoredFile(msgspec.Struct):
    tenant: str
    file: FileObject


class StoredBatch(msgspec.Struct):
    tenant: str
    batch: BatchObject


# ---------------------------------------------------------------------- requests


class BatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class FileForm(msgspec.Struct, kw_only=True):
    """The parts of an upload, for the OpenAPI document; `multipart.py` reads them."""

    file: str
    purpose: Literal["batch"]


class FileQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_BATCHES)] = 20
