"""A ring of bytes in shared memory: one writer sends the same messages to several readers.

    header   written | read by reader 0 | ... | beat of reader 0 | ...          int64 each
    data     ... | size, bytes | size, bytes | ...                              records, each a multiple of ALIGN

A record has a part of a message; a long message has several, so its size is not limited by the ring's. For each record
the writer sends a byte, the doorbell, through a pipe to every reader. The reader blocks on the pipe, so it uses no CPU
while idle, and reads one record per byte: the system calls order the accesses to the memory on every processor. The end
of the pipe means that the writer is gone.

The memory has no name: processes inherit its file descriptor, and nothing is left behind when they are killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

ALIGN = 64
_CAPACITY = 1 << 20
_HEADER = 8  # of a record: size, and whether more records of the message follow, int32 each
_MAX_READERS = 64
_HEADER_BYTES = 8 * (1 + 2 * _MAX_READERS) // ALIGN * ALIGN + ALIGN
_PAUSE_S = 50e-6  # between two looks at a full ring


def create_memory(capacity: int = _CAPACITY) -> int:
    """The file descriptor of memory for a ring, which is empty."""
    size = _HEADER_BYTES + capacity
    if sys.platform == "linux":
        descriptor = os.memfd_create("paceline-ring")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class _Ring:
    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        words = np.frombuffer(self._memory, np.int64, 1 + 2 * _MAX_READERS)
        self._written, self._read, self._beats = words[:1], words[1 : 1 + _MAX_READERS], words[1 + _MAX_READERS :]
        self._data = np.frombuffer(self._memory, np.uint8, offset=_HEADER_BYTES)
        self._capacity = len(self._data)

    def _place(self, at: int, size: int) -> slice:
        first = at % self._capacity
        assert first + size <= self._capacity, "a record does not cross the end of the ring"
        return slice(first, first + size)


class RingWriter(_Ring):
    def __init__(self, descriptor: int, doorbells: Sequence[int], check: Callable[[], None]) -> None:
        """doorbells: the pipe to each reader. check: raises if a reader is gone; called while the ring is full."""
        super().__init__(descriptor)
        assert len(doorbells) <= _MAX_READERS, f"at most {_MAX_READERS} readers"
        self._doorbells, self._check = list(doorbells), check

    def write(self, message: bytes) -> None:
        """Sends a message to all readers. Raises BrokenPipeError if one is gone."""
        data, at = np.frombuffer(message, np.uint8), 0
        while True:
            written = int(self._written[0])
            room = self._capacity - written % self._capacity - _HEADER  # up to the end of the ring
            count = min(len(data) - at, room, self._capacity // 4)
            size = -(-(_HEADER + count) // ALIGN) * ALIGN
            self._wait_for_room(written + size)
            place = self._place(written, size)
            has_more = at + count < len(data)
            self._data[place][:_HEADER] = np.array([count, has_more], np.int32).view(np.uint8)
            self._data[place][_HEADER : _HEADER + count] = data[at : at + count]
            self._written[0] = written + size
            for doorbell in self._doorbells:
                os.write(doorbell, b"!")
            at += count
            if not has_more:
                return

    def beats(self) -> list[int]:
        """How often each reader has called `beat`."""
        return [int(count) for count in self._beats[: len(self._doorbells)]]

    def _wait_for_room(self, end: int) -> None:
        while end - int(self._read[: len(self._doorbells)].min()) > self._capacity:
            self._check()
            time.sleep(_PAUSE_S)


class RingReader(_Ring):
    def __init__(self, descriptor: int, index: int, doorbell: int) -> None:
        super().__init__(descriptor)
        self._index, self._doorbell = index, doorbell

    def read(self) -> bytes | None:
        """The next message; None if the writer is gone."""
        parts = []
        while os.read(self._doorbell, 1):
            at = int(self._read[self._index])
            start = self._place(at, ALIGN).start
            count, has_more = self._data[start : start + _HEADER].view(np.int32).tolist()
            parts.append(self._data[start + _HEADER : start + _HEADER + count].tobytes())
            self._read[self._index] = at + -(-(_HEADER + count) // ALIGN) * ALIGN
            if not has_more:
                return b"".join(parts)
        return None

    def beat(self) -> None:
        """A sign of life."""
        self._beats[self._index] += 1
