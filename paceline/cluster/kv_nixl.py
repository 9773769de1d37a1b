"""NIXL as the transport of KV between machines: the prefill engine writes into the memory of the decode engine.

By RDMA where both machines have it, else by what UCX finds. The decode engine registers its host memory tier and tells
the prefill engine where it is, once both have proved that they know the token. The prefill engine writes pages out of
its staging buffer and reports them when they have arrived. All messages travel over the TCP connection.

NIXL is optional: `pip install 'paceline[nixl]'`.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.request import PacelineError
from paceline.shared_pages import SharedPages

WRITE_S = 30.0  # a peer that takes longer for one write is lost
_POLL_S = 0.0002


class RemoteMemory(msgspec.Struct, frozen=True, tag=True):
    """The memory of a decode engine, which the prefill engine may write."""

    agent: bytes  # NIXL's metadata: how to reach it, and the keys of its memory
    addresses: tuple[int, ...]  # of each rank's part
    num_pages: int


class MemoryMapped(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RemoteMemory`. With an error, pages are sent over TCP."""

    error: str = ""


class NixlMemory:
    """Pages of this process that are registered with NIXL. Methods may be called on any thread."""

    def __init__(self, pages: SharedPages) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise PacelineError(
                f"kv_transport is 'nixl', which cannot be imported ({error}): pip install 'paceline[nixl]', or set it "
                "to tcp."
            ) from None
        self._pages, self._lock = pages, threading.Lock()
        self._connected: Counter[str] = Counter()  # by name: an engine may connect again before the end is noticed
        self._agent = nixl_agent(f"paceline-{uuid.uuid4()}", nixl_agent_config(backends=["UCX"]))
        areas = [(part.array.ctypes.data, part.array.nbytes, 0, "") for part in pages.parts]
        self._registered = self._agent.register_memory(areas, "DRAM")

    def describe(self) -> RemoteMemory:
        addresses = tuple(part.array.ctypes.data for part in self._pages.parts)
        with self._lock:
            return RemoteMemory(self._agent.get_agent_metadata(), addresses, self._pages.num_pages)

    def connect(self, remote: RemoteMemory) -> RemotePages:
        """The memory of another engine, whose pages have the same size."""
        if len(remote.addresses) != len(self._pages.parts) or remote.num_pages < 1:
            raise PacelineError(f"memory of {len(remote.addresses)} ranks and {remote.num_pages} pages was offered.")
        with self._lock:
            found: bytes | str = self._agent.add_remote_agent(remote.agent)
            name = found.decode() if isinstance(found, bytes) else found
            self._connected[name] += 1
        return RemotePages(self, name, remote)

    def write(self, remote: RemotePages, pages: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copies pages of this memory to others of `remote`, and returns when they are there."""
        here, there = [], []
        for part, address in zip(self._pages.parts, remote.memory.addresses, strict=True):
            size = part.page_bytes
            here += [(part.array.ctypes.data + page * size, size, 0) for page in pages.tolist()]
            there += [(address + page * size, size, 0) for page in targets.tolist()]
        agent, deadline = self._agent, time.monotonic() + WRITE_S
        with self._lock:
            descriptors = [agent.get_xfer_descs(one, "DRAM") for one in (here, there)]
            handle = agent.initialize_xfer("WRITE", *descriptors, remote.name)
            state = agent.transfer(handle)
        try:
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with self._lock:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            what = "did not end in time" if state == "PROC" else "failed"
            raise PacelineError(f"writing {len(pages)} pages with NIXL {what}")

    def disconnect(self, remote: RemotePages) -> None:
        with self._lock:
            self._connected[remote.name] -= 1
            if not self._connected[remote.name]:
                del self._connected[remote.name]
                self._agent.remove_remote_agent(remote.name)

    def close(self) -> None:
        """Nothing may be written any more, here or from here."""
        with self._lock:
            self._agent.deregister_memory(self._registered)
            self._agent = None


class RemotePages:
    """The memory of a connected decode engine."""

    def __init__(self, local: NixlMemory, name: str, memory: RemoteMemory) -> None:
        self._local, self.name, self.memory = local, name, memory

    @property
    def num_pages(self) -> int:
        return self.memory.num_pages

    def write(self, pages: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copies pages of the local memory there."""
        self._local.write(self, pages, targets)

    def close(self) -> None:
        self._local.disconnect(self)
