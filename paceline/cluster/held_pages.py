"""HeldPages: turns the KV events of an engine into what the router needs, pages that it holds and no longer holds.

A page counts as held while it is on any medium: fetching it from host memory is faster than computing it. A replica
may tell several routers, so the changes are values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.cluster.kv_events import ClearedPages, KvEvent, StoredPages
from paceline.cluster.router import Router


@dataclass(frozen=True, slots=True)
class PageChanges:
    """What changed, in this order."""

    cleared: bool
    removed: list[int]
    stored: list[int]

    def apply(self, router: Router, replica: int) -> None:
        if self.cleared:
            router.cleared(replica)
        router.removed(replica, self.removed)
        router.stored(replica, self.stored)


class HeldPages:
    def __init__(self) -> None:
        self._media: dict[int, int] = {}  # on how many each page is

    def changes(self, events: Iterable[KvEvent]) -> PageChanges:
        """Of these events together: a page that comes and goes is not mentioned."""
        cleared, before, media = False, dict[int, int](), self._media
        for event in events:
            if isinstance(event, ClearedPages):
                cleared = True
                media.clear()
                before.clear()
                continue
            change = 1 if isinstance(event, StoredPages) else -1
            for page in event.pages.hashes.tolist():
                count = media.get(page, 0)
                before.setdefault(page, count)
                if count + change > 0:
                    media[page] = count + change
                else:
                    media.pop(page, None)
        return PageChanges(
            cleared,
            [page for page, count in before.items() if count and page not in media],
            [page for page, count in before.items() if not count and page in media],
        )

    def everything(self) -> PageChanges:
        """For a router that knows nothing yet."""
        return PageChanges(True, [], list(self._media))
