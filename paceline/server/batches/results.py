"""Appends results to the output and the error file of a batch. A result counts once it is on the disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.server.batches.lines import ResultLine


class ResultWriter:
    """Many results that arrive at once are written and synchronised together, in a thread."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._output, self._errors = output, errors
        self._waiting: list[tuple[ResultLine, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._error: OSError | None = None  # the last line may be cut, so nothing is appended to it
        self.num_bytes = 0

    async def write(self, result: ResultLine) -> None:
        """Returns when the result is on the disk."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, future))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await future

    async def close(self) -> None:
        """Waits for what is being written. Its errors are those of `write`."""
        if self._flushing is not None:
            await self._flushing

    async def _flush(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            if self._error is None:
                try:
                    self.num_bytes += await asyncio.to_thread(self._append, [result for result, _ in group])
                except OSError as error:
                    self._error = error
            for _, future in group:
                if future.cancelled():
                    continue
                if self._error is None:
                    future.set_result(None)
                else:
                    future.set_exception(self._error)
        self._flushing = None

    def _append(self, results: Sequence[ResultLine]) -> int:
        num_bytes = 0
        for path, is_ok in ((self._output, True), (self._errors, False)):
            data = b"".join(result.encode() for result in results if result.is_ok is is_ok)
            num_bytes += len(data)
            if data:
                append(path, data)
        return num_bytes


def append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
