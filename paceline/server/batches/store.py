"""Files and batches on disk: the folder is the truth, and all processes that use it see the same.

    files/ID.json     a file: its tenant and what the API shows
    files/ID.data     its content; without ID.json it is an output that is still being written
    batches/ID.json   a batch
    uploads/          uploads in progress
    store.lock        locked while a record is changed
    runner.lock       locked by the process that runs batches

Records are replaced by an atomic rename. Ids begin with the time of creation, so they sort by it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.config import ConfigError, ServerConfig
from paceline.request import Unavailable, short
from paceline.server.batches.objects import BatchObject, FileObject, StoredBatch, StoredFile
from paceline.server.errors import ApiError
from paceline.server.limits import MAX_BATCHES, MAX_UNFINISHED_BATCHES

log = logging.getLogger("paceline.server")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}[oe]?")
_DAY_S = 86_400
_ABANDONED_S = 86_400  # after which an upload or a content without a record is deleted
T = TypeVar("T", StoredFile, StoredBatch)
# Made here: msgspec must not see a type for the first time in two threads at once.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (StoredFile, StoredBatch)
}


def make_id(prefix: str) -> str:
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


class BatchStore:
    """Its methods read and write the disk: call them in a thread."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.batch_folder is not None, "a store needs a folder"
        self._config = config
        self.root = Path(config.batch_folder)
        try:
            for name in ("files", "batches", "uploads"):
                (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                _write(self.root / "uploads" / "probe", b"")
                (self.root / "uploads" / "probe").unlink()
        except OSError as error:
            is_wrong = isinstance(error, PermissionError | NotADirectoryError | FileExistsError)
            kind = ConfigError if is_wrong else Unavailable  # its disk may not be mounted yet
            raise kind(f"batch_folder is {str(self.root)!r}, which cannot be written: {error}.") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread of one process at a time: every opened file has its own lock."""
        descriptor = os.open(self.root / "store.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------ files

    def data_path(self, file_id: str) -> Path:
        return self.root / "files" / f"{file_id}.data"

    def new_upload(self) -> Path:
        return self.root / "uploads" / secrets.token_hex(16)

    def file(self, file_id: str, tenant: str | None) -> StoredFile:
        found = self._read("files", file_id, StoredFile)
        if found is None or tenant not in (None, found.tenant) or found.file.expires_at <= time.time():
            raise not_found("File", file_id)
        return found

    def files(self, tenant: str | None) -> list[FileObject]:
        """Oldest first."""
        stored = [one.file for one in self._all("files", StoredFile) if tenant in (None, one.tenant)]
        return [one for one in stored if one.expires_at > time.time()]

    def add_file(self, upload: Path, filename: str, tenant: str, expires_after_s: float | None) -> FileObject:
        """Keeps what was uploaded, if the limits of the tenant allow it."""
        num_bytes, now = upload.stat().st_size, int(time.time())
        lifetime_s = min(self._lifetime_s, expires_after_s or self._lifetime_s)
        file = FileObject(
            id=make_id("file-"),
            bytes=num_bytes,
            created_at=now,
            filename=filename,
            purpose="batch",
            expires_at=now + int(lifetime_s),
        )
        with self._locked():
            self._check_room(tenant, num_bytes)
            upload.rename(self.data_path(file.id))
            self._save("files", file.id, StoredFile(tenant, file))
        return file

    def add_result(self, file_id: str, batch: StoredBatch, filename: str) -> str | None:
        """Publishes an output that was written for a batch. Returns its id, None if it is empty."""
        path = self.data_path(file_id)
        num_bytes = path.stat().st_size if path.exists() else 0
        if not num_bytes:
            path.unlink(missing_ok=True)
            return None
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=num_bytes,
            created_at=now,
            filename=filename,
            purpose="batch_output",
            expires_at=now + int(self._lifetime_s),
        )
        self._save("files", file_id, StoredFile(batch.tenant, file))
        return file_id

    def delete_file(self, file_id: str, tenant: str | None) -> None:
        with self._locked():
            self.file(file_id, tenant)
            for one in self._unfinished():
                if file_id == one.batch.input_file_id:
                    raise ApiError(
                        f"File {file_id} is the input of {one.batch.id}, which is {one.batch.status}: cancel it first.",
                        status=409,
                        code="file_in_use",
                    )
            self._remove_file(file_id)

    def num_bytes_left(self, tenant: str) -> int:
        """What the tenant may still store, with the outputs of its unfinished batches."""
        used = sum(one.file.bytes for one in self._all("files", StoredFile) if one.tenant == tenant)
        for one in self._unfinished():
            if one.tenant == tenant:
                used += sum(p.stat().st_size for p in map(self.data_path, one.batch.result_ids) if p.exists())
        return self._config.batch_tenant_bytes - used

    def _check_room(self, tenant: str, num_bytes: int) -> None:
        count = sum(one.tenant == tenant for one in self._all("files", StoredFile))
        if count >= self._config.batch_tenant_files:
            raise _full(f"{count} files are stored, the server's batch_tenant_files")
        if num_bytes > self.num_bytes_left(tenant):
            limit = self._config.batch_tenant_bytes
            raise _full(f"With {num_bytes} bytes more, the files exceed {limit}, the server's batch_tenant_bytes")

    # ------------------------------------------------------------------ batches

    def batch(self, batch_id: str, tenant: str | None) -> StoredBatch:
        found = self._read("batches", batch_id, StoredBatch)
        if found is None or tenant not in (None, found.tenant):
            raise not_found("Batch", batch_id)
        return found

    def batches(self, tenant: str | None) -> list[StoredBatch]:
        """Oldest first."""
        return [one for one in self._all("batches", StoredBatch) if tenant in (None, one.tenant)]

    def add_batch(self, batch: BatchObject, tenant: str) -> None:
        with self._locked():
            self.file(batch.input_file_id, tenant)
            known = self.batches(tenant)
            finished = [one for one in known if one.batch.is_finished]
            if len(known) - len(finished) >= MAX_UNFINISHED_BATCHES:
                raise ApiError(
                    f"{MAX_UNFINISHED_BATCHES} batches are not finished: wait for one, or cancel one.",
                    status=429,
                    kind="rate_limit_error",
                    code="too_many_batches",
                )
            for old in finished[: max(0, len(known) - MAX_BATCHES + 1)]:
                self._record("batches", old.batch.id).unlink()
            self._save("batches", batch.id, StoredBatch(tenant, batch))

    def update_batch(self, batch_id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """Changes a batch that nobody else changes meanwhile. Returns the new state."""
        with self._locked():
            found = self.batch(batch_id, None)
            change(found.batch)
            self._save("batches", batch_id, found)
            return found.batch

    def _unfinished(self) -> list[StoredBatch]:
        return [one for one in self._all("batches", StoredBatch) if not one.batch.is_finished]

    # ------------------------------------------------------------------ expiry

    @property
    def _lifetime_s(self) -> float:
        return self._config.batch_expiry_days * _DAY_S

    def remove_expired(self) -> None:
        now = time.time()
        with self._locked():
            unfinished = self._unfinished()
            in_use = {name for one in unfinished for name in (one.batch.input_file_id, *one.batch.result_ids)}
            known = set()
            for stored in self._all("files", StoredFile):
                known.add(stored.file.id)
                if stored.file.expires_at <= now and stored.file.id not in in_use:
                    self._remove_file(stored.file.id)
            for one in self._all("batches", StoredBatch):
                if one.batch.is_finished and one.batch.created_at + _DAY_S + self._lifetime_s <= now:
                    self._record("batches", one.batch.id).unlink()
            contents = [path for path in (self.root / "files").glob("*.data") if path.stem not in known | in_use]
            for path in [*contents, *(self.root / "uploads").iterdir()]:
                with suppress(FileNotFoundError):  # an upload that has just ended
                    if path.stat().st_mtime + _ABANDONED_S <= now:
                        path.unlink()

    # ------------------------------------------------------------------ records

    def _record(self, kind: str, record_id: str) -> Path:
        return self.root / kind / f"{record_id}.json"

    def _read(self, kind: str, record_id: str, type_: type[T]) -> T | None:
        if not _ID.fullmatch(record_id):
            return None
        try:
            found: T = _DECODERS[type_].decode(self._record(kind, record_id).read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            log.error("%s is damaged and ignored: %s", self._record(kind, record_id), error)
            return None
        return found

    def _all(self, kind: str, type_: type[T]) -> list[T]:
        names = sorted(path.stem for path in (self.root / kind).glob("*.json"))
        found = [self._read(kind, name, type_) for name in names]
        return [one for one in found if one is not None]

    def _save(self, kind: str, record_id: str, value: StoredFile | StoredBatch) -> None:
        _write(self._record(kind, record_id), msgspec.json.encode(value))

    def _remove_file(self, file_id: str) -> None:
        self._record("files", file_id).unlink()  # first: a record without content would be an error
        self.data_path(file_id).unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    """Replaces a file, so that after a crash it has the old content or the new."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def not_found(kind: str, record_id: str) -> ApiError:
    return ApiError(
        f"{kind} {short(record_id)} not found: it does not exist, was deleted or has expired.",
        status=404,
        code="not_found",
    )


def _full(why: str) -> ApiError:
    return ApiError(f"{why}: delete some.", status=413, code="storage_limit_exceeded")
