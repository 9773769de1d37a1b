"""SharedPages: KV pages in memory that several processes map, so that one engine writes what another one reads.

The memory is a file without a name: it is passed on as a file descriptor, and is gone with the last process that has
it, also after kill -9. A page is [2 * layers, page size, KV heads, head size]; key and value of a layer follow each
other.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 1  # of a page, as above


class SharedPages:
    def __init__(self, descriptor: int, num_pages: int, page_bytes: int) -> None:
        """Maps a file of that size, and owns the descriptor from then on."""
        self.descriptor = -1  # if it cannot be mapped, it stays the caller's
        self.num_pages, self.page_bytes = num_pages, page_bytes
        size = num_pages * page_bytes
        if os.fstat(descriptor).st_size < size:  # reading behind the end of a file would crash the process
            raise ValueError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, not {size}")
        self._map = mmap.mmap(descriptor, size)
        self.descriptor = descriptor
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(num_pages, page_bytes)

    @classmethod
    def create(cls, num_pages: int, page_bytes: int) -> SharedPages:
        """New pages. They take memory when they are written first."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("paceline-kv")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, num_pages * page_bytes)
        return cls(descriptor, num_pages, page_bytes)

    def close(self) -> None:
        """Closes the descriptor. The memory stays mapped as long as something refers to `array`."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()
