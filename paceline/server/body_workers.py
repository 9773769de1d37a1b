"""Runs what depends on a request body off the event loop: JSON, checks, chat template, tokenizing.

A body of any size and content must not delay the streams of other clients. Bodies that take under a millisecond are
handled in threads. All others are handled in another process, of low priority: encoding 100 KB takes 0.1 to 0.3 s of a
core, decoding 16 MB of JSON alone holds the GIL for up to two seconds, and bodies with many objects run much Python
code. In both, the tenants take turns (`fair_threads.py`). A process that dies is started again with the next body; one
that hangs is killed (`process_watch.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import IO, Any, TypeVar, cast

from paceline.logs import set_up_child_logs
from paceline.server.errors import ApiError, api_error
from paceline.server.fair_threads import FairThreads
from paceline.server.limits import (
    LONG_BODY_BYTES,
    LONG_BODY_OBJECTS,
    MAX_QUEUED_BODY_BYTES,
    MAX_TENANT_QUEUED_BODY_BYTES,
)
from paceline.server.process_watch import ProcessWatch
from paceline.text.load import load_tokenizer
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")
_NUM_THREADS, _NUM_PROCESSES = 3, 2
_LENGTH = struct.Struct("<Q")
_OBJECT = re.compile(rb'\{\s*"')  # starts one that is not empty; in a string, the quote would be escaped
_NICENESS = 10  # long bodies wait for the front end and the engine, not the other way round


def is_long(body: bytes | bytearray) -> bool:
    """Whether a body may take a millisecond: it has many bytes or many JSON objects."""
    return len(body) > LONG_BODY_BYTES or any(islice(_OBJECT.finditer(body), LONG_BODY_OBJECTS, None))


class BodyWorkers:
    """The threads and the processes of one front end."""

    def __init__(self, tokenizer: Tokenizer, source: str | int) -> None:
        """`source` is where the process loads the same tokenizer from: see `load_tokenizer`."""
        self._tokenizer, self._source = tokenizer, source
        # A tenant leaves a thread to the others. Without API keys all clients are one tenant: two of them are served.
        self._threads = FairThreads(_NUM_THREADS, "paceline-body", max_per_tenant=_NUM_THREADS - 1)
        # A second process is started when two tenants have long bodies at a time: one body may take seconds, and a
        # tenant uses one process only.
        self._long = FairThreads(
            _NUM_PROCESSES, "paceline-long-body", max_per_tenant=1, initializer=self._start_process
        )
        self._local = threading.local()  # `process`, which each thread of `_long` starts, uses and replaces
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watch = ProcessWatch("that reads long request bodies")
        self._num_bytes: Counter[str | None] = Counter()  # of bodies that wait or are handled, by tenant

    def start(self) -> None:
        """Starts a process now, so that the first long body does not wait for it."""
        self._long.start()

    async def run(
        self, function: Callable[..., T], body: bytes | bytearray, *args: object, tenant: str | None = None
    ) -> T:
        """Returns `function(body, *args)`. Function, arguments and result must be picklable; the tokenizer is passed
        by name. `tenant` is whose body it is; None: the admin's, or that of a server without tenants. A body whose
        caller is cancelled while it waits is not handled."""
        with self._counted(tenant, len(body)):
            if not is_long(body):
                return await self.run_in_thread(function, body, *args, tenant=tenant)
            call = partial(self._run_in_process, function, body, args)
            return cast("T", await asyncio.wrap_future(self._long.submit(tenant, call)))

    @contextlib.contextmanager
    def _counted(self, tenant: str | None, num_bytes: int) -> Iterator[None]:
        """A tenant may have few bytes in work: those of a flood are refused, not kept in memory for minutes."""
        whose = "" if tenant is None else f" of tenant {tenant}"
        for known, limit, name in (
            (self._num_bytes[tenant], MAX_TENANT_QUEUED_BODY_BYTES, whose),
            (self._num_bytes.total(), MAX_QUEUED_BODY_BYTES, " of all tenants"),
        ):
            if known and known + num_bytes > limit:
                raise ApiError(
                    f"Request bodies{name} with {known} bytes wait to be read, and this one has {num_bytes}: at most "
                    f"{limit} bytes may wait; retry later, or send fewer at a time.",
                    status=429,
                    kind="rate_limit_error",
                    code="too_many_bodies",
                    headers={"Retry-After": "1"},
                )
        self._num_bytes[tenant] += num_bytes
        try:
            yield
        finally:
            self._num_bytes[tenant] -= num_bytes

    async def run_in_thread(self, function: Callable[..., T], *args: object, tenant: str | None = None) -> T:
        """Returns `function(*args)`; for Python code that may take long."""
        return await asyncio.wrap_future(self._threads.submit(tenant, partial(function, *args)))

    def close(self) -> None:
        """Bodies in work fail."""
        self._watch.close()
        for threads in (self._long, self._threads):
            threads.close()
        for process in list(self._processes):
            process.kill()  # so the thread that waits for its reply ends now
        for threads in (self._long, self._threads):
            threads.join()
        for process in self._processes:
            _stop(process)

    def _start_process(self) -> None:
        """If there is none yet. One that cannot be started fails the body that needs it."""
        with contextlib.suppress(OSError):
            self._running_process()

    def _running_process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._local, "process", None)
        if process is None:
            process = self._local.process = _start(self._source)
            self._processes.append(process)
        return process

    def _run_in_process(
        self, function: Callable[..., object], body: bytes | bytearray, args: tuple[object, ...]
    ) -> object:
        process = self._running_process()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            with self._watch.busy(process):  # kills one that hangs, which ends the wait for its pipe
                _write(process.stdin, _dumps((function, args)))
                _write(process.stdin, body)
                reply = _read(process.stdout)
            result = _loads(reply, self._tokenizer)
        except (EOFError, OSError):
            _stop(process)
            self._processes.remove(process)
            self._local.process = None
            raise ApiError(
                "The process that reads long request bodies died or hung: retry the request.",
                status=503,
                kind="server_error",
                code="body_process_died",
                headers={"Retry-After": "1"},
            ) from None
        if isinstance(result, ApiError):
            raise result
        return result


def _start(source: str | int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.server.body_workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None, "a pipe"
    _write(process.stdin, pickle.dumps(source))
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unsent bytes of a body: its request has failed
                pipe.close()


# ---------------------------------------------------------------------- frames


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> str | None:
        return "tokenizer" if isinstance(value, Tokenizer) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tokenizer: Tokenizer) -> None:
        super().__init__(io.BytesIO(data))
        self._tokenizer = tokenizer

    def persistent_load(self, pid: str) -> Tokenizer:
        return self._tokenizer


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _loads(data: bytes, tokenizer: Tokenizer) -> Any:
    return _Unpickler(data, tokenizer).load()


def _write(pipe: IO[bytes], data: bytes | bytearray) -> None:
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    (length,) = _LENGTH.unpack(_read_exactly(pipe, _LENGTH.size))
    return _read_exactly(pipe, length)


def _read_exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data


# ---------------------------------------------------------------------- in the process


def main() -> None:
    """Handles bodies until the front end closes the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal signals the whole group; the front end ends this process
    set_up_child_logs("bodies")
    os.nice(_NICENESS)
    requests = sys.stdin.buffer
    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # nothing else may write to the pipe
    try:
        tokenizer = load_tokenizer(pickle.loads(_read(requests)))
        while True:
            function, args = _loads(_read(requests), tokenizer)
            body = _read(requests)
            try:
                result = function(body, *args)
            except Exception as error:
                result = api_error(error)
            _write(replies, _dumps(result))
            del result, body, args
    except (EOFError, BrokenPipeError):
        os._exit(0)


if __name__ == "__main__":
    main()
