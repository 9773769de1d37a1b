"""Who joins the pass being planned, and with how many tokens.

Partly computed prompts go on first, then waiting requests come in the policy's order as long as tokens, slots and
memory last. One that does not fit is set aside for this step and may be passed a bounded number of times; after
that nothing passes it any more.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.config import SchedulerConfig
from paceline.request import Phase, Request
from paceline.scheduler.budget import MemoryForecast, OutputLengths
from paceline.scheduler.journal import EventKind, Journal
from paceline.scheduler.memory import Memory, token_key
from paceline.scheduler.orders import Order
from paceline.scheduler.plan import Join
from paceline.scheduler.retraction import is_protected

LEAST_CHUNK = 16  # prompt tokens that go on however long it takes
_TILE = 64  # queries that attention on a GPU takes at once: a few more than a multiple cost as much as another tile


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Prompt tokens start .. start + length of one request, in the pass being planned."""

    request: Request
    slot: int
    start: int
    length: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a candidate is not admitted in this step, as the end of the sentence 'it waits for …'."""

    reason: str
    num_pages: int = 0  # that are missing


class Admission:
    def __init__(
        self, config: SchedulerConfig, memory: Memory, order: Order, lengths: OutputLengths, journal: Journal
    ) -> None:
        self._config = config
        self._memory = memory
        self._order = order
        self._lengths = lengths
        self._journal = journal
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []  # admitted, prompt not all planned; most senior first
        self.returning: list[Request] = []  # retracted, most senior first: they come before everybody else
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.reserved: Request | None = None  # overtaken too often: nothing passes it
        self._admissions = 0
        # Of the pass being planned
        self.chunks: list[Chunk] = []
        self._joins: list[Join] = []
        self._aside: list[Request] = []
        self._did_not_fit: list[Request] = []
        self._outlook: MemoryForecast | None = None
        self._shared_pages = 0

    @property
    def running(self) -> list[Request]:
        """Who holds a slot, and will go on to hold it."""
        return self.decoding + self.prefilling

    # ------------------------------------------------------------------ the queue

    def enqueue(self, request: Request) -> None:
        """A new or retracted request begins to wait."""
        self.num_waiting += 1
        self.num_waiting_tokens += request.num_tokens
        self._memory.tree.enqueue(request, token_key(request), self._memory.num_cacheable_pages(request))
        if request.retractions and self._config.policy != "priority":
            insort(self.returning, request, key=lambda waiting: waiting.seniority)
        else:
            request.queued = True
            self._order.add(request)

    def dequeue(self, request: Request) -> None:
        """It is admitted, or has ended. Called while it has the length with which it began to wait."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= request.num_tokens
        self._memory.tree.dequeue(request)
        if request.queued:
            request.queued = False
            self._order.remove(request)
        else:
            self.returning.remove(request)
        if self.reserved is request:
            self.reserved = None

    def enqueue_retracted(self, request: Request) -> None:
        """Not a candidate in the step that took its memory: it would take it back."""
        self.enqueue(request)
        self._memory.tree.set_aside(request)
        self._aside.append(request)
        self._outlook = None

    # ------------------------------------------------------------------ one step

    def begin(self) -> None:
        self.chunks = []
        self._outlook = None

    def end(self) -> None:
        """The pass is planned: what was set aside or hidden counts again."""
        tree = self._memory.tree
        for request in self._aside:
            tree.bring_back(request)
        self._aside.clear()
        self._did_not_fit.clear()
        tree.show_hidden()
        self._order.restore()

    def take_joins(self) -> tuple[Join, ...]:
        """Who took a slot since the last plan that was returned."""
        joins, self._joins = self._joins, []
        return tuple(joins)

    def continue_prefills(self, budget: int) -> int:
        """Gives each partly computed prompt its next chunk. Returns what is left of the budget."""
        others_wait = bool(self._memory.tree.root.num_waiting)
        # One prompt never takes the whole step while others wait: a short one behind it gets its turn.
        most = min(self._config.chunk_tokens, -(-budget // 2) if others_wait else budget)
        for request in self.prefilling:
            if budget <= 0:
                break
            budget -= self.plan_chunk(request, min(most, budget))
        return budget

    def admit_waiting(self, budget: int, now: float) -> None:
        """Admits waiting requests while tokens, slots and memory last."""
        while budget > 0 and self._memory.slots.num_free:
            request = self.candidate(now)
            if request is None:
                break
            obstacle = self._try(request, now)
            if obstacle is None:
                most = min(self._config.chunk_tokens, budget)
                budget -= self.plan_chunk(request, most)
                self._note_overtaking(request, now)
            elif not self.put_aside(request, obstacle, now):
                break

    def candidate(self, now: float) -> Request | None:
        if self.reserved is not None:
            return None if self.reserved.set_aside else self.reserved
        for request in self.returning:
            if not request.set_aside:
                return request
        return self._order.next(now)

    def put_aside(self, request: Request, obstacle: Obstacle, now: float) -> bool:
        """Takes a candidate out of this step. Whether others may still be tried."""
        self._memory.tree.set_aside(request)
        self._aside.append(request)
        if request.waits_for != obstacle.reason:
            request.waits_for = obstacle.reason
            self._journal.write(now, self._memory.tree.step, EventKind.WAIT, request.id, obstacle.reason)
        request.waits_for_pages = obstacle.num_pages
        if not obstacle.num_pages:
            return len(self._aside) <= 4 * self._config.look_ahead + 16
        if request is self.reserved or not request.queued:
            return False  # pages that come free are kept for it
        self._did_not_fit.append(request)
        if request.overtaken >= self._config.max_overtakes:
            self._reserve(request, now)
            return False
        return len(self._did_not_fit) <= self._config.look_ahead

    def _note_overtaking(self, admitted: Request, now: float) -> None:
        for request in self._did_not_fit:
            if self._config.policy == "priority" and admitted.priority > request.priority:
                continue  # that is its right, not an overtaking
            request.overtaken += 1
            self._journal.counters.overtakes += 1
            if request.overtaken >= self._config.max_overtakes and self.reserved is None:
                self._reserve(request, now)

    def _reserve(self, request: Request, now: float) -> None:
        self.reserved = request
        self._journal.write(now, self._memory.tree.step, EventKind.RESERVE, request.id)

    # ------------------------------------------------------------------ one request

    def _try(self, request: Request, now: float) -> Obstacle | None:
        """Admits `request`, or says what stands in the way."""
        memory, tree, config = self._memory, self._memory.tree, self._config
        assert request.node is not None, f"request {request.id} is a candidate and does not wait"
        if request.num_in_flight:
            return Obstacle("the token it was computing when it was retracted")
        hit = tree.hit(request.node)
        coming = tree.in_flight_depth(request.node) - hit.depth
        if config.prefix_wait and coming >= config.prefix_wait_tokens:
            return Obstacle("a prefix that is being computed")
        to_compute = request.num_tokens - hit.depth
        if memory.host is not None:
            to_compute -= memory.host.tokens_below(hit, request.node)
        if to_compute > config.chunk_tokens and len(self.prefilling) >= self._max_long_prompts():
            return Obstacle("longer prompts to be computed")
        # Locking its prefix takes those pages out of the evictable ones. So lock first and count afterwards:
        # otherwise they would be promised twice, as its prefix and as room to be evicted.
        memory.hold(request, hit)
        missing = self._missing_pages(request)
        if missing > 0:
            memory.let_go(request)
            return Obstacle("memory", num_pages=missing)
        self._admit(request, to_compute, now)
        return None

    def _max_long_prompts(self) -> int:
        """Prompts of more than one chunk that may be under way: one chunk of the budget is left to short ones."""
        return max(1, self._config.max_prefill_tokens // self._config.chunk_tokens - 1)

    def would_fit_without(self, request: Request, leaving: list[Request]) -> bool:
        """Whether a waiting request had a slot and memory if `leaving` were gone."""
        assert request.node is not None, f"request {request.id} does not wait"
        if not self._memory.slots.num_free and not leaving:
            return False
        self._memory.hold(request, self._memory.tree.hit(request.node))
        missing = self._missing_pages(request, leaving)
        self._memory.let_go(request)
        return missing <= 0

    def _missing_pages(self, request: Request, leaving: Sequence[Request] = ()) -> int:
        """How many pages short `request`, which holds its prefix, is beside everything running."""
        running = [other for other in self.running if other not in leaving] if leaving else self.running
        if not running:
            return 0  # alone it fits, or it would have been refused
        limit = self._config.num_pages - self._config.pin_quota_pages
        if self._memory.num_promised_pages + self._memory.full_pages(request) <= limit:
            return 0  # there is room for everything in full: nothing needs to be predicted
        limit = self._config.num_pages - self._unused_pin_pages()
        if leaving:
            self._outlook = None
        if is_protected(request):
            shared = self._num_shared_pages(request)
            return shared + sum(map(self._worst_pages, running)) + self._worst_pages(request) - limit
        if self._outlook is None:
            self._outlook = self._look_out(running)
            self._shared_pages = self._num_shared_pages(request)
        peak = self._outlook.peak_with(self._own_tokens(request), self._expected_growth(request))
        missing = self._shared_pages + peak - limit
        if leaving:
            self._outlook = None
            return missing
        # What is predicted to fit some day must also have room for a first page today.
        return missing if missing > 0 else 1 - self._memory.num_available_pages

    def _num_shared_pages(self, request: Request) -> int:
        """Locked pages that no single request accounts for: counted once, however many share them."""
        accounted = sum(other.sole_pages for other in self.running) + request.sole_pages
        return self._memory.tree.num_locked_pages - accounted

    def _own_tokens(self, request: Request) -> int:
        """Tokens in pages that only `request` will hold when its prompt is computed; it holds its prefix."""
        assert request.held is not None, f"request {request.id} holds nothing"
        return request.num_tokens - request.held.depth + request.sole_pages * self._memory.page_size

    def _unused_pin_pages(self) -> int:
        """Pages that may still be pinned and must not be counted on."""
        return self._config.pin_quota_pages - self._memory.num_pinned_pages

    def _worst_pages(self, request: Request) -> int:
        """Pages only `request` holds if it runs to its full length."""
        assert request.held is not None, f"request {request.id} is not running"
        return self._memory.full_pages(request) - request.held.depth // self._memory.page_size + request.sole_pages

    def _expected_growth(self, request: Request) -> int:
        """Positions a waiting request is expected to write after its prompt. Its last token is never fed."""
        most = request.max_tokens - len(request.output)
        expected = most
        if not (request.ends_by_length or is_protected(request)):
            if request.expected_tokens is not None:
                expected = max(1, min(most, request.expected_tokens - len(request.output)))
            else:
                generated = np.array([len(request.output)])
                expected = int(self._lengths.expected_remaining(generated, np.array([most]))[0])
        return max(0, expected - 1) + self._config.draft_tokens

    def _look_out(self, running: list[Request]) -> MemoryForecast:
        """The predicted peak of everything running. In columns: this is asked in every step somebody could join."""
        slots, size = self._memory.slots, self._memory.page_size
        rows = np.array([request.slot for request in running])
        sole_pages = np.array([request.sole_pages for request in running])
        own = np.maximum(slots.computed[rows], slots.prompt_tokens[rows]) + (sole_pages - slots.held_pages[rows]) * size
        most = slots.remaining[rows].astype(np.int64)
        generated = slots.max_outputs[rows] - most
        guessed = slots.expected[rows]
        learned = self._lengths.expected_remaining(generated, most)
        expected = np.where(guessed > 0, np.clip(guessed - generated, 1, most), learned)
        growth = np.where(slots.runs_full_length[rows], most, expected)
        # The prefill itself yields the first token, so a prompt grows by one position less than it has tokens to come.
        is_prefill = np.array([request.phase is Phase.PREFILL for request in running])
        return MemoryForecast(size, own, np.maximum(growth - is_prefill, 0) + self._config.draft_tokens)

    def _admit(self, request: Request, to_compute: int, now: float) -> None:
        memory, counters = self._memory, self._journal.counters
        assert request.held is not None, "its prefix is held"
        if self._outlook is not None:
            self._outlook.add(self._own_tokens(request), self._expected_growth(request))
        self._order.admitted(request, to_compute, now)
        self.dequeue(request)
        slot = memory.start_row(request)
        memory.slots.max_outputs[slot] = request.max_tokens
        memory.slots.expected[slot] = request.expected_tokens or 0
        memory.slots.remaining[slot] = request.max_tokens - len(request.output)
        memory.slots.limits[slot] = len(request.prompt) + request.max_tokens
        memory.slots.prompt_tokens[slot] = request.num_tokens
        memory.slots.runs_full_length[slot] = request.ends_by_length or is_protected(request)
        if request.first_admitted is None:
            self._admissions += 1
            request.first_admitted = now
            request.seniority = self._admissions
            request.num_cached = request.held.depth
        request.enter(Phase.PREFILL)
        request.waits_for = ""
        insort(self.prefilling, request, key=lambda running: running.seniority)
        self._joins.append(Join.of(request, slot))
        counters.admitted += 1
        counters.prompt_tokens += request.num_tokens
        counters.hit_tokens += request.held.depth
        self._journal.write(now, memory.tree.step, EventKind.ADMIT, request.id, request.held.depth, to_compute)

    def plan_chunk(self, request: Request, limit: int) -> int:
        """Adds up to `limit` tokens of an admitted prompt to the pass. Returns how many: fewer if memory is short."""
        memory, slots = self._memory, self._memory.slots
        skipped = memory.skip_computed(request)
        self._journal.counters.hit_tokens += skipped
        request.num_cached += skipped
        if memory.host is not None:
            fetched = memory.fetch(request, memory.host)
            if not request.retractions:  # what comes back then was its own
                request.num_cached += fetched
                request.num_fetched += fetched
            limit = min(limit, memory.most_to_compute(request, memory.host))
        slot = request.slot
        assert slot is not None, f"request {request.id} is not running"
        start = int(slots.computed[slot])
        room = (int(slots.num_pages[slot]) + memory.num_available_pages) * memory.page_size - start
        length = min(limit, self._longest_chunk(start), request.num_tokens - start, room)
        if length <= 0:
            return 0
        memory.cover(request, start + length)
        slots.computed[slot] = start + length
        self.chunks.append(Chunk(request, slot, start, length, start + length == request.num_tokens))
        self._journal.counters.computed_tokens += length
        self._order.charge(request.tenant, length)
        above = memory.claim(request)
        if self._config.prefix_wait:
            self._hide_sharers(request, above.depth)
        return length

    def _longest_chunk(self, start: int) -> int:
        """Tokens of one prompt in one pass. While others decode it is half as many as else, so that their tokens do not
        take twice as long; and since a token reads all the context before it, chunks get shorter towards the end of a
        long prompt. Where requests wait for admission, it is more urgent that prompts get done."""
        most, context = self._config.chunk_tokens, self._config.chunk_context
        if not self.decoding or self._memory.tree.root.num_waiting:
            return most
        shorter = max(most * context // (2 * (context + start)), 1)
        return min(most, -(-shorter // _TILE) * _TILE)

    def _hide_sharers(self, request: Request, depth_before: int) -> None:
        """Whoever shares enough of what this chunk computes waits the one step it takes."""
        node = request.held
        top = None
        while node is not None and node.depth - depth_before >= self._config.prefix_wait_tokens:
            top, node = node, node.parent
        if top is not None:
            self._memory.tree.hide(top)
