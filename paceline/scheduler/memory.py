"""Who owns which page: the pool, the tree and the rows, and every way a page changes hands.

    pool.free ──allocate──▶ private to a row ──claim──▶ tree, locked ──unlock──▶ tree, evictable ──evict──▶ pool.free
                                  │                        ▲
                                  │ release (last, partly  │ hold: a later request hits it
                                  ▼ filled page)           │
                              pool.free               tree, evictable

What is evicted may be kept in host memory and come back from there: host_tier.py.
A row reads tree pages up to `request.held.depth` and private pages from there on. Pages may be handed to a later
pass as soon as they are free, although a pass in flight still writes them: passes run in order, so whatever that
one writes is overwritten before anybody reads it. What a discarded row wrote is never claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import SchedulerConfig
from paceline.request import PacelineError, Request
from paceline.scheduler.host_tier import HostTier
from paceline.scheduler.journal import EventKind, Journal
from paceline.scheduler.node import Node
from paceline.scheduler.page_pool import NO_PAGES, PagePool, Pages
from paceline.scheduler.plan import Column
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.slots import Slots


class PinError(PacelineError, ValueError):
    """A prefix that cannot be pinned, and why."""


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    node: Node
    num_pages: int
    expires: float


class Memory:
    def __init__(self, config: SchedulerConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self.page_size = config.page_size
        self.pool = PagePool(config.num_pages)
        self.tree = PrefixTree(config.page_size, config.eviction, config.partial_eviction)
        self.host = HostTier(config, self.tree, journal.counters) if config.num_host_pages else None
        self.tree.host = self.host
        longest = min(config.context_tokens + config.draft_tokens, config.num_pages * config.page_size)
        self.slots = Slots(config.max_running, self.pages_for(longest), config.page_size)
        self.pins: dict[str, Pin] = {}
        self.num_promised_pages = 0  # of all running requests at full length, as if they shared nothing
        self.now = 0.0  # of the step being planned: what evictions are journaled under
        self._duplicates: list[Request] = []  # rows that computed what the tree already held

    # ------------------------------------------------------------------ asking

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def full_pages(self, request: Request) -> int:
        """Pages of a request that runs to its full length."""
        return self.pages_for(len(request.prompt) + request.max_tokens)

    @property
    def num_usable_pages(self) -> int:
        """What one request can have at the very most: the rest may be pinned."""
        return self._config.num_pages - self._config.pin_quota_pages

    @property
    def num_available_pages(self) -> int:
        return self.pool.num_free + self.tree.num_evictable_pages

    def num_cacheable_pages(self, request: Request) -> int:
        """Pages of a request that may come from the tree: its last token must be fed to get logits."""
        if not self._config.prefix_cache:
            return 0
        end = request.num_tokens - 1
        if request.compute_from is not None:
            end = min(end, request.compute_from)
        return end // self.page_size

    # ------------------------------------------------------------------ pages change hands

    def allocate(self, count: int) -> Pages:
        short = count - self.pool.num_free
        if short > 0:
            counters = self._journal.counters
            before = counters.spilled_pages, counters.forgotten_pages
            evicted = self.tree.evict(short)
            self.pool.free(evicted)
            counters.evicted_pages += len(evicted)
            self._journal.write(self.now, self.tree.step, EventKind.EVICT, "", len(evicted))
            if spilled := counters.spilled_pages - before[0]:
                forgotten = counters.forgotten_pages - before[1]
                self._journal.write(self.now, self.tree.step, EventKind.SPILL, "", spilled, forgotten)
        return self.pool.allocate(count)

    def hold(self, request: Request, node: Node) -> None:
        """Locks what `request` hits. Its pages stop being evictable: whoever counted on them must count again."""
        self.tree.lock(request, node)
        request.held = node

    def let_go(self, request: Request) -> None:
        assert request.held is not None, f"request {request.id} holds nothing"
        self.tree.unlock(request, request.held)
        request.held = None

    def start_row(self, request: Request) -> int:
        """Gives `request` a slot whose row begins with the pages it holds."""
        assert request.held is not None, f"request {request.id} got a slot before it held its prefix"
        slot = self.slots.acquire(request)
        request.key = token_key(request)
        self.num_promised_pages += self.full_pages(request)
        self.slots.append_pages(slot, self.tree.path_pages(request.held))
        self.slots.computed[slot] = request.held.depth
        self.slots.held_pages[slot] = self.slots.num_pages[slot]
        return slot

    def skip_computed(self, request: Request) -> int:
        """Moves a partly computed prompt forward over what others have computed meanwhile. Returns the tokens."""

        def computed(held: Node, end: int) -> tuple[Node, Pages] | None:
            child = self.tree.follow(held, request.key, end)
            return None if child is None else (child, child.pages)

        return self._go_on(request, computed)

    def fetch(self, request: Request, host: HostTier) -> int:
        """Brings back what the host has of a partly computed prompt right behind what it holds. Returns the tokens."""

        def fetched(held: Node, end: int) -> tuple[Node, Pages] | None:
            room = min(host.num_fetchable, self.num_available_pages)
            node = host.follow(held, request.key, end, room) if room > 0 else None
            if node is None:
                return None
            pages = self.allocate(len(node.hosts))
            host.fetch(node, pages)
            return node, pages

        count = self._go_on(request, fetched)
        if count:
            self._journal.write(self.now, self.tree.step, EventKind.FETCH, request.id, count)
        return count

    def _go_on(self, request: Request, below: Callable[[Node, int], tuple[Node, Pages] | None]) -> int:
        """Takes what is `below` the node a prompt holds, as far as its pages may be shared, until there is no more.
        Returns the tokens."""
        slot, held = request.slot, request.held
        assert slot is not None and held is not None, f"request {request.id} is not running"
        if self.slots.computed[slot] != held.depth:  # it has begun a page of its own
            return 0
        before = held.depth
        end = self.num_cacheable_pages(request) * self.page_size
        while (found := below(held, end)) is not None:
            node, pages = found
            self.tree.lock(request, node, above=held)
            self.slots.append_pages(slot, pages)
            held = node
        if held.depth > before:
            self._set_held(request, held)
            self.slots.computed[slot] = held.depth
        return held.depth - before

    def most_to_compute(self, request: Request, host: HostTier) -> int:
        """Tokens of a prompt to compute before the host has enough of it again to wait for the next plan; a page of
        what it has, where no more may be fetched with this one."""
        slot, held = request.slot, request.held
        assert slot is not None and held is not None, f"request {request.id} is not running"
        start, end = int(self.slots.computed[slot]), self.num_cacheable_pages(request) * self.page_size
        at = host.begins_at(held, request.key, start, end)
        return request.num_tokens if at is None else at - start or self.page_size

    def cover(self, request: Request, num_tokens: int) -> None:
        """Makes the row of `request` long enough for `num_tokens` positions."""
        slot = request.slot
        assert slot is not None, f"request {request.id} is not running"
        missing = self.pages_for(num_tokens) - int(self.slots.num_pages[slot])
        if missing > 0:
            self.slots.append_pages(slot, self.allocate(missing))

    def cover_each(self, slots: Column) -> None:
        """One more page for each of `slots`."""
        self.slots.append_page_each(slots, self.allocate(len(slots)))

    def claim(self, request: Request) -> Node:
        """Shows the prompt pages that the pass being planned completes to the others. Returns the first new node."""
        slot, held = request.slot, request.held
        assert slot is not None and held is not None, f"request {request.id} is not running"
        if self._config.prefix_cache:
            end = int(self.slots.computed[slot]) // self.page_size * self.page_size
            deepest = self.tree.claim(request, held, request.key, end, self.slots.row(slot), self.tree.step)
            self._set_held(request, deepest)
            if deepest.depth < end:
                self._duplicates.append(request)
        return held

    def settle_duplicates(self) -> bool:
        """After the pass that computed the same prefix twice: the tree's copy survives, the other's row is remapped.
        Whether there was any.

        The change of the row is part of the plan in which the freed pages can first be used again.
        """
        duplicates, self._duplicates = self._duplicates, []
        for request in duplicates:
            if request.slot is not None:
                end = int(self.slots.computed[request.slot])
                end = min(end, len(request.prompt)) // self.page_size * self.page_size
                self._give_to_tree(request, end)
        return bool(duplicates)

    def release(self, request: Request, num_valid: int) -> int:
        """Takes the row away. Whole pages of its first `num_valid` positions stay in the tree, evictable.

        Returns how many pages came free or evictable.
        """
        slot = request.slot
        assert slot is not None and request.held is not None, f"request {request.id} gave its memory back twice"
        before = self.num_available_pages
        if self._config.prefix_cache:
            request.key = token_key(request)
            self._give_to_tree(request, num_valid // self.page_size * self.page_size)
        self.pool.free(self.slots.row(slot)[request.held.depth // self.page_size :])
        self.let_go(request)
        assert request.sole_pages == 0, f"request {request.id} left and still owns {request.sole_pages} pages"
        self.slots.release(request)
        self.num_promised_pages -= self.full_pages(request)
        request.key = b""
        return self.num_available_pages - before

    def _give_to_tree(self, request: Request, end: int) -> None:
        slot, held = request.slot, request.held
        assert slot is not None and held is not None, f"request {request.id} is not running"
        while held.depth < end:
            child = self.tree.follow(held, request.key, end)
            if child is None:
                deeper = self.tree.claim(request, held, request.key, end, self.slots.row(slot), self.tree.step - 1)
                if deeper is held:  # the pass now being planned computes it too: that copy survives
                    break
                held = deeper
                continue
            # The pages of this row from held.depth to child.depth are a second copy: point the row at the tree's
            # copy first, then free them. In the other order the row would read what somebody else writes.
            start, stop = held.depth // self.page_size, child.depth // self.page_size
            copies = self.slots.row(slot)[start:stop].copy()
            self.slots.write_pages(slot, start, child.pages)
            self.tree.lock(request, child, above=held)
            self.pool.free(copies)
            self._journal.counters.duplicate_pages += len(copies)
            self._journal.write(self.now, self.tree.step, EventKind.DUPLICATE, request.id, len(copies))
            held = child
        self._set_held(request, held)

    def _set_held(self, request: Request, node: Node) -> None:
        request.held = node
        self.slots.held_pages[request.slot] = node.depth // self.page_size

    # ------------------------------------------------------------------ pinning

    @property
    def num_pinned_pages(self) -> int:
        return sum(pin.num_pages for pin in self.pins.values())

    def pin(self, name: str, probe: Request, expires: float) -> int:
        """Keeps the resident prefix of `probe.prompt` from eviction until `expires`. Returns its tokens."""
        if name in self.pins:
            raise PinError(f"a pin named {name!r} exists: unpin it first or choose another name.")
        node, key = self.tree.namespace(probe), token_key(probe)
        end = len(probe.prompt) // self.page_size * self.page_size
        while (child := self.tree.follow(node, key, end)) is not None:
            node = child
        if not node.depth:
            self.tree.prune(node)
            raise PinError(f"nothing of the prompt of pin {name!r} is cached: run it once, then pin it.")
        # A page under two pins counts twice: simple, and it errs on the side of the requests.
        num_pages = node.depth // self.page_size
        room = self._config.pin_quota_pages - self.num_pinned_pages
        if num_pages > room:
            raise PinError(
                f"pin {name!r} takes {num_pages} pages and {room} are left of pin_quota_pages: "
                "unpin another prefix or raise the quota."
            )
        self.tree.lock(None, node)
        self.pins[name] = Pin(name, node, num_pages, expires)
        return node.depth

    def unpin(self, name: str) -> None:
        pin = self.pins.pop(name, None)
        if pin is None:
            raise PinError(f"there is no pin named {name!r}: these exist: {', '.join(self.pins) or 'none'}.")
        self.tree.unlock(None, pin.node)

    def flush(self) -> int:
        """Forgets every cached prefix that nobody uses, on the host too. Returns the pages that came free."""
        count = self.tree.num_evictable_pages
        self.pool.free(self.tree.evict(count, spill=False) if count else NO_PAGES)
        if self.host is not None:
            self.host.forget_all()
        return count


def token_key(request: Request) -> bytes:
    """Prompt and known output as the bytes the tree compares."""
    return request.prompt.tobytes() + request.output.tobytes()
