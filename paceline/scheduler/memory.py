"""KV memory: who owns which page (pool, tree or a row), and every way a page changes hands.

    pool.free ──allocate──▶ private to a row ──insert──▶ tree, locked ──unlock──▶ tree, evictable ──evict──▶ pool.free
                                  │                        ▲
                                  │ release (last, partly  │ lock_prefix: a later request hits it
                                  ▼ filled page)           │
                              pool.free               tree, evictable

Evicted KV may be kept in host memory and fetched from there, and KV that another engine computed comes the same way:
host_tier.py.
A page id stands for a page in every cache group that keeps KV, and a slot for a state in every group that keeps states.
A state begins with its slot. So of a model with states nothing comes from the tree: its prefix cache is off.
A row reads tree pages up to `locked_nodes[request].depth` and private pages from there on. Freed pages may be given to
a later pass although a pass in flight still writes them: passes run in order, so whatever that pass writes is
overwritten before anything reads it. What a discarded row wrote is never inserted into the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import SchedulerConfig
from paceline.request import PacelineError, Request
from paceline.scheduler.adapter_slots import AdapterSlots
from paceline.scheduler.host_tier import HostTier, Reservation
from paceline.scheduler.journal import EventKind, Journal
from paceline.scheduler.node import Node
from paceline.scheduler.now import Now
from paceline.scheduler.page_pool import NO_PAGES, PagePool, Pages
from paceline.scheduler.plan import Column
from paceline.scheduler.prefix_tree import PrefixTree
from paceline.scheduler.slots import Slots
from paceline.scheduler.tracked_request import TrackedRequest


class PinError(PacelineError, ValueError):
    """A prefix cannot be pinned or unpinned; the message says why."""


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
        self.tree.has_frontier = config.policy == "lpm"
        longest = min(config.context_tokens + config.draft_tokens, config.num_pages * config.page_size)
        self.slots = Slots(config.max_running, self.pages_for(longest), config.page_size)
        self.tree.exclusive_pages = self.slots.exclusive_pages
        self.adapters = AdapterSlots(config.adapter_slots)
        self.pins: dict[str, Pin] = {}
        # The deepest node that each running request has locked; its private pages begin below.
        self.locked_nodes: dict[TrackedRequest, Node] = {}
        # Prompts of requests that left before all pages were copied to another engine: locked until `release_hold`.
        self.holds: dict[str, Node] = {}
        self.num_promised_pages = 0  # of all running requests at full length, as if they shared nothing
        self._duplicates: list[TrackedRequest] = []  # rows that computed what the tree already had

    # ------------------------------------------------------------------ queries

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def full_pages(self, request: TrackedRequest) -> int:
        """Pages of a request that runs to its full length."""
        return self.pages_for(len(request.prompt) + request.max_tokens)

    @property
    def num_usable_pages(self) -> int:
        """Pages that one request can use at most: the rest may be pinned."""
        return self._config.num_pages - self._config.pin_quota_pages

    @property
    def num_available_pages(self) -> int:
        return self.pool.num_free + self.tree.num_evictable_pages

    def num_cacheable_pages(self, request: TrackedRequest) -> int:
        """Pages of a request that may come from the tree: its last token must be fed to get logits."""
        if not self._config.prefix_cache:
            return 0
        end = request.num_tokens - 1
        if request.compute_from is not None:
            end = min(end, request.compute_from)
        return end // self.page_size

    def num_cacheable_tokens(self, request: TrackedRequest) -> int:
        return self.num_cacheable_pages(request) * self.page_size

    # ------------------------------------------------------------------ pages change hands

    def allocate(self, count: int, now: Now) -> Pages:
        short = count - self.pool.num_free
        if short > 0:
            counters = self._journal.counters
            before = counters.spilled_pages, counters.forgotten_pages
            evicted = self.tree.evict(short, now.step)
            self.pool.free(evicted)
            counters.evicted_pages += len(evicted)
            self._journal.write(now, EventKind.EVICT, "", len(evicted))
            if spilled := counters.spilled_pages - before[0]:
                forgotten = counters.forgotten_pages - before[1]
                self._journal.write(now, EventKind.SPILL, "", spilled, forgotten)
        return self.pool.allocate(count)

    def lock_prefix(self, request: TrackedRequest, node: Node) -> None:
        """Locks the cached prefix of `request`. Its pages are no longer evictable, so count available pages after."""
        self.tree.lock(request, node)
        self.locked_nodes[request] = node

    def unlock_prefix(self, request: TrackedRequest) -> None:
        self.tree.unlock(request, self.locked_nodes.pop(request))

    def start_row(self, request: TrackedRequest) -> int:
        """Gives `request` a slot whose row begins with the pages of its locked prefix."""
        node = self.locked_nodes[request]
        slot = self.slots.acquire(request)
        request.key = prefix_key(request)
        self.num_promised_pages += self.full_pages(request)
        self.slots.append_pages(slot, self.tree.path_pages(node))
        self.slots.computed[slot] = node.depth
        self.slots.num_prefix_pages[slot] = self.slots.num_pages[slot]
        return slot

    def extend_cached_prefix(self, request: TrackedRequest, now: Now) -> int:
        """Skips what other requests have computed of a partly computed prompt since. Returns the tokens skipped."""

        def cached(node: Node, end: int) -> tuple[Node, Pages] | None:
            child = self.tree.match_child(node, request.key, end, now.step)
            return None if child is None else (child, child.pages)

        return self._extend_prefix(request, cached)

    def fetch(self, request: TrackedRequest, host: HostTier, now: Now) -> int:
        """Fetches what follows the locked prefix of a partly computed prompt from host memory. Returns the tokens."""

        def fetched(node: Node, end: int) -> tuple[Node, Pages] | None:
            max_pages = min(host.num_fetchable, self.num_available_pages)
            child = host.match_child(node, request.key, end, max_pages, now.step) if max_pages > 0 else None
            if child is None:
                return None
            pages = self.allocate(len(child.host_pages), now)
            host.fetch(child, pages, now.step)
            return child, pages

        count = self._extend_prefix(request, fetched)
        if count:
            self._journal.write(now, EventKind.FETCH, request.id, count)
        return count

    def _extend_prefix(
        self, request: TrackedRequest, next_child: Callable[[Node, int], tuple[Node, Pages] | None]
    ) -> int:
        """Extends the locked prefix of a prompt by `next_child` until it returns None. Returns the tokens."""
        slot, node = request.slot, self.locked_nodes[request]
        assert slot is not None, f"request {request.id} is not running"
        if self.slots.computed[slot] != node.depth:  # it has begun a private page
            return 0
        before = node.depth
        end = self.num_cacheable_tokens(request)
        while (found := next_child(node, end)) is not None:
            child, pages = found
            self.tree.lock(request, child, above=node)
            self.slots.append_pages(slot, pages)
            node = child
        if node.depth > before:
            self._set_locked_node(request, node)
            self.slots.computed[slot] = node.depth
        return node.depth - before

    def tokens_before_fetch(self, request: TrackedRequest, host: HostTier) -> int:
        """Prompt tokens to compute before host memory again has enough to wait for the next plan."""
        slot = request.slot
        assert slot is not None, f"request {request.id} is not running"
        start, end = int(self.slots.computed[slot]), self.num_cacheable_tokens(request)
        at = host.next_fetch(self.locked_nodes[request], request.key, start, end)
        return request.num_tokens if at is None else at - start

    def ensure_pages(self, request: TrackedRequest, num_tokens: int, now: Now) -> None:
        """Makes the row of `request` long enough for `num_tokens` positions."""
        slot = request.slot
        assert slot is not None, f"request {request.id} is not running"
        missing = self.pages_for(num_tokens) - int(self.slots.num_pages[slot])
        if missing > 0:
            self.slots.append_pages(slot, self.allocate(missing, now))

    def needs_page(self, request: TrackedRequest) -> bool:
        """Whether the next token of a running request needs another page."""
        return bool(self.slots.computed[request.slot] >= self.slots.capacity[request.slot])

    def append_page_each(self, slots: Column, now: Now) -> None:
        """Adds one page to each of `slots`."""
        self.slots.append_page_each(slots, self.allocate(len(slots), now))

    def insert_prompt(self, request: TrackedRequest, now: Now) -> Node:
        """Inserts the prompt pages that the pass being planned completes into the tree. Returns the node above them."""
        slot, node = request.slot, self.locked_nodes[request]
        assert slot is not None, f"request {request.id} is not running"
        if self._config.prefix_cache:
            end = int(self.slots.computed[slot]) // self.page_size * self.page_size
            deepest = self.tree.insert(request, node, request.key, end, self.slots.row(slot), now.step)
            self._set_locked_node(request, deepest)
            if deepest.depth < end:
                self._duplicates.append(request)
        return node

    def merge_duplicates(self, now: Now) -> bool:
        """After a pass that computed the same prefix twice: keeps the tree's copy and remaps the other row to it.
        Returns whether there was any.

        The page table change is part of the plan in which the freed pages can first be used again.
        """
        duplicates, self._duplicates = self._duplicates, []
        for request in duplicates:
            if request.slot is not None:
                end = int(self.slots.computed[request.slot])
                end = min(end, len(request.prompt)) // self.page_size * self.page_size
                self._insert_computed(request, end, now)
        return bool(duplicates)

    def release(self, request: TrackedRequest, num_valid: int, now: Now) -> int:
        """Frees the row. Whole pages of its first `num_valid` positions stay in the tree, evictable.

        Returns how many pages became free or evictable.
        """
        slot = request.slot
        assert slot is not None, f"request {request.id} released its memory twice"
        before = self.num_available_pages
        if self._config.prefix_cache:
            request.key = prefix_key(request)
            self._insert_computed(request, num_valid // self.page_size * self.page_size, now)
        self.pool.free(self.slots.row(slot)[self.locked_nodes[request].depth // self.page_size :])
        if request.is_exported:
            self.release_hold(request.id)
            self.holds[request.id] = node = self.locked_nodes[request]
            self.tree.lock(None, node)
        self.unlock_prefix(request)
        assert request.exclusive_pages == 0, f"request {request.id} left and still owns {request.exclusive_pages} pages"
        self.slots.release(request)
        if request.adapter:
            self.adapters.release(request.adapter)
        self.num_promised_pages -= self.full_pages(request)
        request.key = b""
        return self.num_available_pages - before

    def _insert_computed(self, request: TrackedRequest, end: int, now: Now) -> None:
        """Inserts the computed pages of a row up to token `end`; where the tree has a copy, remaps the row to it."""
        slot, node = request.slot, self.locked_nodes[request]
        assert slot is not None, f"request {request.id} is not running"
        while node.depth < end:
            child = self.tree.match_child(node, request.key, end, now.step)
            if child is None:
                deeper = self.tree.insert(request, node, request.key, end, self.slots.row(slot), now.step - 1)
                if deeper is node:  # the pass being planned computes it too: that copy survives
                    break
                node = deeper
                continue
            # The pages of this row from node.depth to child.depth are a second copy. Point the row at the tree's copy
            # first, then free them: in the other order the row would read what another request writes.
            start, stop = node.depth // self.page_size, child.depth // self.page_size
            copies = self.slots.row(slot)[start:stop].copy()
            self.slots.write_pages(slot, start, child.pages)
            self.tree.lock(request, child, above=node)
            self.pool.free(copies)
            self._journal.counters.duplicate_pages += len(copies)
            self._journal.write(now, EventKind.DUPLICATE, request.id, len(copies))
            node = child
        self._set_locked_node(request, node)

    def release_hold(self, request_id: str) -> None:
        """The pages of a request that has left need not be kept any more."""
        node = self.holds.pop(request_id, None)
        if node is not None:
            self.tree.unlock(None, node)

    def exported_pages(self, request: TrackedRequest) -> Pages:
        """The pages, from the first on, of what has been planned of the prompt of a request. Its slot, or a hold, keeps
        them; without either there are none."""
        if request.slot is not None:
            return self.slots.row(request.slot)[: int(self.slots.computed[request.slot]) // self.page_size]
        node = self.holds.get(request.id)
        return NO_PAGES if node is None else self.tree.path_pages(node)

    # ------------------------------------------------------------------ pages of another engine

    def num_missing_tokens(self, request: TrackedRequest) -> int:
        """Tokens that may come from the tree or from host memory, and are in neither."""
        end = self.num_cacheable_tokens(request)
        return end - self.tree.match_held(request.namespace, prefix_key(request), end)

    def reserve(self, name: str, request: Request, step: int) -> Reservation | None:
        """Reserves host pages for what is not cached here of a prompt. None: there is nothing to send, or no space."""
        probe = TrackedRequest(request)
        end = self.num_cacheable_pages(probe)
        held = end - self.num_missing_tokens(probe) // self.page_size
        if self.host is None or held >= end:
            return None
        return self.host.reserve(name, request, held, end, step)

    def _set_locked_node(self, request: TrackedRequest, node: Node) -> None:
        self.locked_nodes[request] = node
        self.slots.num_prefix_pages[request.slot] = node.depth // self.page_size

    # ------------------------------------------------------------------ pins

    @property
    def num_pinned_pages(self) -> int:
        return sum(pin.num_pages for pin in self.pins.values())

    def pin(self, name: str, probe: TrackedRequest, expires: float, step: int) -> int:
        """Keeps the resident prefix of `probe.prompt` from eviction until `expires`. Returns its number of tokens."""
        if name in self.pins:
            raise PinError(f"a pin named {name!r} exists: unpin it first or choose another name.")
        node, key = self.tree.namespace(probe.namespace), prefix_key(probe)
        end = len(probe.prompt) // self.page_size * self.page_size
        while (child := self.tree.match_child(node, key, end, step)) is not None:
            node = child
        if not node.depth:
            self.tree.prune(node)
            raise PinError(f"no part of the prompt of pin {name!r} is cached: run the prompt once, then pin it.")
        # A page under two pins counts twice: simple, and the error is on the side of the requests.
        num_pages = node.depth // self.page_size
        num_left = self._config.pin_quota_pages - self.num_pinned_pages
        if num_pages > num_left:
            raise PinError(
                f"pin {name!r} takes {num_pages} pages and {num_left} are left of pin_quota_pages: "
                "unpin another prefix or raise pin_quota_pages."
            )
        self.tree.lock(None, node)
        self.pins[name] = Pin(name, node, num_pages, expires)
        return node.depth

    def unpin(self, name: str) -> None:
        pin = self.pins.pop(name, None)
        if pin is None:
            raise PinError(f"there is no pin named {name!r}; existing pins: {', '.join(self.pins) or 'none'}.")
        self.tree.unlock(None, pin.node)

    # ------------------------------------------------------------------ NaN

    def first_unproven(self, request: TrackedRequest) -> Node | None:
        """The first node that `request` has read, or computed, and from which no token was sampled yet."""
        locked = self.locked_nodes.get(request)  # none if it was released while its last token was in flight
        end = request.num_tokens if locked is None else locked.depth
        node, key = self.tree.namespace(request.namespace), prefix_key(request)
        while (found := self.tree.find_child(node, key, end)) is not None:
            node, common = found
            if node.unproven and (node.resident or len(node.host_pages)):
                return node
            if common < len(node.key):
                break
        self.tree.prune(node)
        return None

    def num_proven(self, request: TrackedRequest) -> int | None:
        """How much of what a running request has read is free of NaN for certain, if others computed what follows."""
        node: Node | None = self.locked_nodes[request]
        first = None
        while node is not None:
            if node.unproven:
                first = node
            node = node.parent
        return None if first is None or first.unproven == request.number else first.start

    def holders(self, top: Node) -> list[TrackedRequest]:
        """Running requests that read `top`, or something below it."""
        return [request for request, node in self.locked_nodes.items() if self.tree.is_below(node, top)]

    def pins_below(self, top: Node) -> list[Pin]:
        return [pin for pin in self.pins.values() if self.tree.is_below(pin.node, top)]

    def drop(self, top: Node) -> int:
        """Drops `top` and everything below it; no request and no pin uses it. Returns the pages freed, with those in
        host memory."""
        before = self._num_free_pages
        for request_id in [one for one, node in self.holds.items() if self.tree.is_below(node, top)]:
            self.release_hold(request_id)
        self.pool.free(self.tree.drop(top))
        return self._num_free_pages - before

    @property
    def _num_free_pages(self) -> int:
        return self.pool.num_free + (0 if self.host is None else self.host.pool.num_free)

    # ------------------------------------------------------------------ everything

    def flush(self, step: int) -> int:
        """Drops every cached prefix that is not locked, in host memory too. Returns the pages freed."""
        count = self.tree.num_evictable_pages
        self.pool.free(self.tree.evict(count, step, spill=False) if count else NO_PAGES)
        if self.host is not None:
            self.host.forget_all(step)
        return count

    def clear(self, step: int) -> int:
        """Drops all KV, in host memory too, while no request runs and nothing is pinned. Returns the pages freed."""
        assert not self.locked_nodes and not self.pins, "running requests and pins use their KV"
        for request_id in list(self.holds):
            self.release_hold(request_id)
        count = self.flush(step)
        if self.host is not None:
            self.host.clear()
        return count


def prefix_key(request: TrackedRequest) -> bytes:
    """The keys of prompt and known output as the bytes that the tree compares: four for each token."""
    return request.keys.tobytes() + request.output.tobytes()
