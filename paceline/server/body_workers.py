"""Runs what depends on a request body off the event loop: JSON, checks, chat template, tokenizing.

A body of any size and content must not delay the streams of other clients. Short bodies are handled in threads. Long
ones are handled in another process, one at a time, the tenants in turn: decoding 16 MB of JSON alone holds the GIL for
up to two seconds, and bodies with thousands of objects run much Python code. The process starts with
the first long body and is started again if it dies.
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
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import IO, Any, TypeVar, cast

from paceline.server.errors import ApiError, api_error
from paceline.server.limits import LONG_BODY_BYTES, LONG_BODY_OBJECTS, MAX_LONG_BODIES, MAX_TENANT_LONG_BODIES
from paceline.text.load import load_tokenizer
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")
_NUM_THREADS = 2
_LENGTH = struct.Struct("<Q")
_OBJECT = re.compile(rb'\{\s*"')  # starts one that is not empty; in a string, the quote would be escaped
_NICENESS = 10  # long bodies wait for the front end and the engine, not the other way round


def is_long(body: bytes | bytearray) -> bool:
    """Whether a body has many bytes or many JSON objects."""
    return len(body) > LONG_BODY_BYTES or any(islice(_OBJECT.finditer(body), LONG_BODY_OBJECTS, None))


class BodyWorkers:
    """The threads and the process of one front end."""

    def __init__(self, tokenizer: Tokenizer, source: str | int) -> None:
        """`source` is where the process loads the same tokenizer from: see `load_tokenizer`."""
        self._tokenizer, self._source = tokenizer, source
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "paceline-body")
        self._long = ThreadPoolExecutor(1, "paceline-long-body")
        self._num_long: Counter[str | None] = Counter()  # by tenant
        self._turns = _Turns()
        self._process: subprocess.Popen[bytes] | None = None  # started, used and replaced by the thread of `_long`

    async def run(
        self, function: Callable[..., T], body: bytes | bytearray, *args: Any, tenant: str | None = None
    ) -> T:
        """Returns `function(body, *args)`. Function, arguments and result must be picklable; the tokenizer is passed
        by name. `tenant` is whose body it is; None: the admin's, or that of a server without tenants."""
        loop = asyncio.get_running_loop()
        if not is_long(body):
            return await loop.run_in_executor(self._threads, partial(function, body, *args))
        self._check_num_long(tenant)
        self._num_long[tenant] += 1
        try:
            await self._turns.wait_turn(tenant)
            try:
                found = await loop.run_in_executor(self._long, self._run_in_process, function, body, args)
            finally:
                self._turns.end_turn()
        finally:
            self._num_long[tenant] -= 1
        return cast("T", found)

    def _check_num_long(self, tenant: str | None) -> None:
        if self._num_long.total() >= MAX_LONG_BODIES:
            most, whose = MAX_LONG_BODIES, ""
        elif self._num_long[tenant] >= MAX_TENANT_LONG_BODIES:
            most, whose = MAX_TENANT_LONG_BODIES, "" if tenant is None else f" of tenant {tenant}"
        else:
            return
        raise ApiError(
            f"{most} request bodies{whose} of more than {LONG_BODY_BYTES} bytes or {LONG_BODY_OBJECTS} JSON objects "
            "are being read: retry later.",
            status=503,
            kind="server_error",
            code="too_many_long_bodies",
            headers={"Retry-After": "1"},
        )

    async def run_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Returns `function(*args)`; for Python code that may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    def close(self) -> None:
        """Bodies in work fail."""
        self._turns.cancel_waiting()
        process = self._process
        if process is not None:
            process.kill()  # so the thread that waits for its reply ends now
        for pool in (self._threads, self._long):
            pool.shutdown(cancel_futures=True)
        if process is not None:
            _stop(process)

    def _run_in_process(self, function: Callable[..., Any], body: bytes | bytearray, args: tuple[Any, ...]) -> Any:
        if self._process is None:
            self._process = _start(self._source)
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            _write(process.stdin, _dumps((function, args)))
            _write(process.stdin, body)
            result = _loads(_read(process.stdout), self._tokenizer)
        except (EOFError, OSError):
            _stop(process)
            self._process = None
            raise ApiError(
                "The process that reads long request bodies died: retry the request.",
                status=503,
                kind="server_error",
                code="body_process_died",
                headers={"Retry-After": "1"},
            ) from None
        if isinstance(result, ApiError):
            raise result
        return result


class _Turns:
    """One turn at a time, of the tenants that wait in round-robin order: a tenant with many long bodies delays those of
    another by one."""

    def __init__(self) -> None:
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # in the order of the tenants' next turns
        self._is_taken = False

    async def wait_turn(self, tenant: str | None) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end_turn()  # it was given to a task that was cancelled at the same time
            raise

    def end_turn(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False

    def cancel_waiting(self) -> None:
        for turn in (turn for turns in self._waiting.values() for turn in turns):
            turn.cancel()
        self._waiting.clear()


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
