"""KV events of one engine: cached pages by their hashes, and the messages that tell routers about them.

`KvEventLog` listens to the scheduler and names pages by `block_hash`. The engine's thread only keeps what the hashes
are made of; they are computed by whoever reads the events, once for each page. The messages have the layout of vLLM's
KV events, which llm-d and Dynamo read: a batch is an array, an event a map with the key `type`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import msgspec
import numpy as np

from paceline.cluster.block_hash import Hashes, block_hashes, root_hash
from paceline.request import adapter_name
from paceline.scheduler.kv_events import Medium
from paceline.scheduler.node import Node
from paceline.scheduler.prefix_tree import TOKEN_BYTES

Namespace = tuple[str, str, str]  # tenant, salt, adapter


class PageRun:
    """Consecutive pages of one prefix. Its hashes may be read by one other thread than the scheduler's."""

    __slots__ = ("_hashes", "above", "first_page", "namespace", "page_size", "tokens")

    def __init__(self, above: PageRun | None, namespace: Namespace, tokens: bytes, page_size: int) -> None:
        self.above = above  # what precedes it in the prefix; None: it begins the prefix
        self.namespace = namespace
        self.tokens = tokens  # 32-bit integers
        self.page_size = page_size
        self.first_page: int = 0 if above is None else above.first_page + above.num_pages
        self._hashes: Hashes | None = None

    @property
    def num_pages(self) -> int:
        return len(self.tokens) // (self.page_size * TOKEN_BYTES)

    @property
    def parent(self) -> int:
        """The hash of the page before the first one, or `root_hash` of the namespace."""
        return root_hash(self.namespace) if self.above is None else int(self.above.hashes[-1])

    @property
    def hashes(self) -> Hashes:
        if self._hashes is None:
            runs = [self]
            while (above := runs[-1].above) is not None and above._hashes is None:
                runs.append(above)
            for run in reversed(runs):
                tokens = np.frombuffer(run.tokens, np.int32)
                run._hashes = block_hashes(tokens, run.page_size, run.parent, run.first_page)
        assert self._hashes is not None, "they were computed"
        return self._hashes

    def split(self, num_upper: int) -> tuple[PageRun, PageRun]:
        at = num_upper * self.page_size * TOKEN_BYTES
        upper = PageRun(self.above, self.namespace, self.tokens[:at], self.page_size)
        lower = PageRun(upper, self.namespace, self.tokens[at:], self.page_size)
        if (hashes := self._hashes) is not None:
            upper._hashes, lower._hashes = hashes[:num_upper], hashes[num_upper:]
        return upper, lower


class StoredPages(NamedTuple):
    """Pages became available on this medium."""

    pages: PageRun
    medium: Medium


class RemovedPages(NamedTuple):
    """Pages are no longer available on this medium."""

    pages: PageRun
    medium: Medium


class ClearedPages(NamedTuple):
    """No page is available on any medium; later events store those that are."""


KvEvent = StoredPages | RemovedPages | ClearedPages


class KvEventLog:
    """The events of a scheduler since they were last taken, in order; a `KvListener`. On the engine's thread."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._events: list[KvEvent] = []

    def take(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def stored(self, node: Node, medium: Medium) -> None:
        self._events.append(StoredPages(self._pages(node), medium))

    def removed(self, node: Node, medium: Medium) -> None:
        self._events.append(RemovedPages(self._pages(node), medium))

    def cleared(self) -> None:
        self._events.append(ClearedPages())

    def _pages(self, node: Node) -> PageRun:
        if node.hashes is None:
            missing, top = [node], node.parent
            while top is not None and top.depth and top.hashes is None:
                missing.append(top)
                top = top.parent
            assert top is not None, "a namespace is above every page"
            above = cast(PageRun | None, top.hashes)
            namespace = _namespace(top) if above is None else above.namespace
            for one in reversed(missing):
                one.hashes = above = PageRun(above, namespace, one.key, self.page_size)
        return cast(PageRun, node.hashes)


def _namespace(node: Node) -> Namespace:
    assert node.parent is not None, "a namespace is below its tenant"
    tenant, name = node.parent.name, node.name
    assert isinstance(tenant, str) and isinstance(name, tuple), "a tenant, then its salt and adapter"
    return tenant, *name


# ---------------------------------------------------------------------- messages, in vLLM's layout


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first block of a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None  # deprecated by vLLM for `lora_name`
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # by block: the cache salt, with the first block of a prompt


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def to_message(event: KvEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case StoredPages(pages, medium):
            _, salt, adapter = pages.namespace
            hashes = pages.hashes.tolist()
            # As vLLM has it: the salt is a key of the first block alone, the hashes of the others follow from it.
            extra_keys = [None if index or pages.first_page else [salt] for index in range(len(hashes))]
            return BlockStored(
                block_hashes=hashes,
                parent_block_hash=pages.parent if pages.first_page else None,
                token_ids=np.frombuffer(pages.tokens, np.int32).tolist(),
                block_size=pages.page_size,
                lora_id=None,
                medium=medium.value,
                lora_name=adapter_name(adapter) or None,
                extra_keys=extra_keys if salt else None,
            )
        case RemovedPages(pages, medium):
            return BlockRemoved(pages.hashes.tolist(), medium.value)
        case ClearedPages():
            return AllBlocksCleared()


def num_pages(events: Iterable[KvEvent]) -> int:
    return sum(0 if isinstance(event, ClearedPages) else event.pages.num_pages for event in events)
