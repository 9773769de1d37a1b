"""SharedPages: KV pages in memory that several processes map, so that one engine writes what another one reads.

The memory is a file without a name: it is passed on as a file descriptor, and is gone with the last process that has
it, also after kill -9. A page has the cache groups of KV one after the other, each as [2 * layers, page size, KV heads,
head size]; key and value of a layer follow each other. With tensor parallelism there is a file for every rank, with its
KV heads of every page: a page is the parts of all ranks, one after the other.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 4  # of a page, as above, and of the messages that carry pages


class PagePart:
    """One file: the part of one rank in every page, or whole pages."""

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
    def create(cls, num_pages: int, page_bytes: int) -> PagePart:
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


class SharedPages:
    def __init__(self, parts: Sequence[PagePart]) -> None:
        """parts: one for each rank."""
        self.parts = tuple(parts)
        self.num_pages = parts[0].num_pages
        self.page_bytes = sum(part.page_bytes for part in parts)
        assert all(part.num_pages == self.num_pages for part in parts), "every page has a part of every rank"
        # Descriptor of the connection to the process that owns the memory, if that is another. Every rank that writes
        # the memory keeps it open: so the owner sees the end of the connection when no rank is left, and not before.
        self.connection: int | None = None

    @classmethod
    def create(cls, num_pages: int, *page_bytes: int) -> SharedPages:
        """New pages, of which each rank has so many bytes. They take memory when they are written first."""
        return cls([PagePart.create(num_pages, count) for count in page_bytes])

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """[pages, bytes] of an engine without ranks, or of one rank."""
        assert len(self.parts) == 1, f"{len(self.parts)} ranks have a part of the pages"
        return self.parts[0].array

    def of_rank(self, rank: int) -> SharedPages:
        """The same memory, with one part only."""
        return SharedPages([self.parts[rank]])

    def read(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """A copy of whole pages [N, bytes]."""
        return np.concatenate([part.array[pages] for part in self.parts], axis=1)

    def write(self, pages: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> None:
        """The inverse of `read`."""
        first = 0
        for part in self.parts:
            part.array[pages] = data[:, first : first + part.page_bytes]
            first += part.page_bytes

    def close(self) -> None:
        """Closes the descriptors. The memory stays mapped as long as something refers to it."""
        for part in self.parts:
            part.close()
