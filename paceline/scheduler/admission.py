"""Admission: which requests join the pass being planned, and with how many prompt tokens.

Partly computed prompts continue first, then waiting requests are admitted in the policy's order while tokens, slots and
memory last. Prompts of more than one chunk leave room for short ones and share what these do not use. Under policy
`priority` this is done for one priority after the other, so that a lower one gets only what the higher ones leave. A
request of a background tenant is not tried, and nothing is kept for it, while another waits (`is_eligible`).

A request that does not fit is skipped for this step and may be overtaken a bounded number of times (`max_overtakes`);
then freed memory is reserved for it, as it is for a retracted request at once. Others are admitted beside a reservation
only if they do not put it off (`_pages_beside`); under `priority` a higher priority goes first. A slot for an adapter
is reserved with the memory (`_has_adapter_slot`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config import SchedulerConfig
from paceline.scheduler.journal import EventKind, Journal
from paceline.scheduler.memory import Memory, prefix_key
from paceline.scheduler.memory_forecast import MemoryForecast, OutputLengths
from paceline.scheduler.node import Node
from paceline.scheduler.now import Now
from paceline.scheduler.plan import NO_TOKENS, Column, Join
from paceline.scheduler.policies import Policy
from paceline.scheduler.retraction import is_protected
from paceline.scheduler.running_set import RunningSet
from paceline.scheduler.service_time import ServiceTime
from paceline.scheduler.tracked_request import TrackedRequest

MIN_CHUNK_TOKENS = 16  # prompt tokens per pass whatever itl_target allows
# Requests that a step admits or retracts, a retraction counted twice: so much more of the host's time it takes. More
# would delay the next token of all running requests, a few would leave passes with short prompts half empty, and half
# as many where memory is short would lower hit rates (docs/log/scheduler.md).
MAX_MOVES_PER_STEP = 32
_TILE_TOKENS = 64  # query tile of GPU attention: a few tokens more than a multiple cost as much as another tile


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Prompt tokens start .. start + length of one request, in the pass being planned."""

    request: TrackedRequest
    slot: int
    start: int
    length: int
    is_last: bool


class Rank(NamedTuple):
    """Requests of a higher rank are planned before others, and may retract them."""

    is_foreground: bool
    priority: int  # 0 for all unless the policy is priority


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a candidate is not admitted in this step, as the end of the sentence 'it waits for …'."""

    text: str
    num_missing_pages: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """Running requests that might be retracted."""

    rows: Column
    num_full_pages: int = 0  # at full length, as if they shared nothing


NOBODY = Leaving(NO_TOKENS)
_NO_ADAPTER_SLOT = WaitReason("a slot for its adapter")
_ROOM_FOR_SHORT = WaitReason("other long prompts to be prefilled")
_NO_SLOT = WaitReason("a free slot")


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        running: RunningSet,
        policy: Policy,
        lengths: OutputLengths,
        service_time: ServiceTime,
        journal: Journal,
        retract_for: Callable[[TrackedRequest, Now], int],
    ) -> None:
        """`retract_for` may retract running requests of a lower rank to make space for a waiting one. It returns the
        pages that the waiting one lacks, if it retracts nothing and has counted them, else 0."""
        self._config = config
        self._memory = memory
        self._running = running
        self._policy = policy
        self._lengths = lengths
        self._service_time = service_time
        self._journal = journal
        self._retract_for = retract_for
        self._by_priority = config.policy == "priority"
        self._retracts_by_priority = self._by_priority and not math.isinf(config.retract_gap)
        self._prefix_wait_tokens = memory.pages_for(config.prefix_wait_tokens) * config.page_size
        self.retracted: list[TrackedRequest] = []  # waiting again, most senior first: tried before all others
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._reserved: TrackedRequest | None = None
        self._num_foreground_started = 0  # waiting foreground requests that were admitted before
        self._beside: set[TrackedRequest] = set()  # requests admitted since then
        # Those whose adapter had no slot when they were tried, in this step or before.
        self._without_adapter: dict[TrackedRequest, None] = {}
        self.holds_new = False  # while the engine pauses: only requests that were admitted before are candidates
        self._num_admitted = 0
        # Of the pass being planned
        self.chunks: dict[TrackedRequest, Chunk] = {}
        self.max_moves = MAX_MOVES_PER_STEP
        self._num_moves = 0  # requests admitted, and twice those retracted
        self._budget = 0  # prompt tokens that it may still get
        self.token_cost = 0.0  # what a token without context takes of a budget that follows from a latency target
        self._room = 0  # of these, tokens that long prompts leave to short ones
        self._may_admit = False
        self._may_retract = False  # running requests, for a waiting one
        self._deferred: list[TrackedRequest] = []  # long prompts that would have taken that room
        self._num_deferred = Counter[str]()  # how many of each tenant
        self._passed_over: list[Node] = []  # tenants of which no more are tried
        self._joins: list[Join] = []
        self._skipped: list[TrackedRequest] = []
        self._out_of_memory: list[TrackedRequest] = []  # of the skipped, those that lacked memory
        self._forecast: MemoryForecast | None = None
        self._forecast_is_current = True
        self._pages_at_end: npt.NDArray[np.int64] = np.zeros(config.max_running, np.int64)  # by slot
        self._num_shared_pages = 0
        self._num_pages_beside: dict[Leaving, int] = {}  # the reserved request, by who leaves: as far as counted
        self._forecasts_without: dict[Leaving, MemoryForecast] = {}  # derived from the forecast
        # No running request that may be retracted has a lower one. None: not looked at yet.
        self._lowest_priority: float | None = None

    # ------------------------------------------------------------------ the queue

    def enqueue(self, request: TrackedRequest) -> None:
        """A new or retracted request begins to wait."""
        self.num_waiting += 1
        self._num_foreground_started += request.was_admitted and not request.background
        self.num_waiting_tokens += request.num_tokens
        num_known = self._memory.tree.enqueue(request, prefix_key(request), self._memory.num_cacheable_pages(request))
        if request.was_admitted and not self._by_priority:
            insort(self.retracted, request, key=lambda waiting: (waiting.background, waiting.seniority))
        else:
            self._service_time.predict(request, request.num_tokens - num_known, self._expected_growth(request))
            request.queued = True
            self._policy.add(request)

    def dequeue(self, request: TrackedRequest) -> None:
        """It is admitted, or has ended. Call it while the request has the length with which it began to wait."""
        self.num_waiting -= 1
        self._num_foreground_started -= request.was_admitted and not request.background
        self.num_waiting_tokens -= request.num_tokens
        self._memory.tree.dequeue(request)
        if request.queued:
            request.queued = False
            self._policy.remove(request)
        else:
            self.retracted.remove(request)
        if self._reserved is request:
            self._reserved = None
        self._without_adapter.pop(request, None)

    def enqueue_retracted(self, request: TrackedRequest) -> None:
        """Not a candidate in the step that took its memory: it would take the memory back."""
        self.enqueue(request)
        self._memory.tree.skip(request)
        self._skipped.append(request)
        self._num_pages_beside.clear()
        self._forecast_is_current = False
        self._num_moves += 2

    @property
    def foreground_waits(self) -> bool:
        """Whether a request of a foreground tenant waits, and not only for the engine to resume."""
        return (self._num_foreground_started if self.holds_new else self._memory.tree.num_foreground) > 0

    def is_eligible(self, request: TrackedRequest) -> bool:
        """Whether a waiting request may be admitted, whatever space there is. One of a background tenant may not while
        a foreground one waits: so it is not tried, and nothing is kept for it."""
        return (request.was_admitted or not self.holds_new) and not (request.background and self.foreground_waits)

    # ------------------------------------------------------------------ one step

    def begin_step(self) -> None:
        self.chunks = {}
        self._num_moves = 0
        self._num_deferred.clear()
        self._forecast = None
        self._num_pages_beside.clear()
        self._forecasts_without.clear()
        self._lowest_priority = None
        self._may_retract = self._find_may_retract(self._background_runs())

    def end_step(self) -> None:
        """The pass is planned: skipped and hidden requests are candidates again."""
        tree = self._memory.tree
        for request in self._skipped:
            tree.unskip(request)
        self._skipped.clear()
        self._out_of_memory.clear()
        tree.unhide_all()
        self._policy.end_step()

    def take_joins(self) -> tuple[Join, ...]:
        """Requests that took a slot since the last plan that was returned."""
        joins, self._joins = self._joins, []
        return tuple(joins)

    def plan_chunks(self, budget: int, may_admit: bool, now: Now) -> None:
        """Plans up to `budget` prompt tokens: first of partly computed prompts, then of waiting requests."""
        self._may_admit = may_admit
        num_foreground, background_runs = self._memory.tree.num_foreground, self._background_runs()
        self._may_retract = self._find_may_retract(background_runs)
        # While every slot decodes there may be no token left. A retraction frees at least one.
        self._budget = max(budget, 1) if self._may_retract else budget
        if not (self._by_priority or background_runs or self.num_waiting > num_foreground):
            self._plan_level(None, now)
            return
        # A level is done before a lower one gets a token. So no request of a lower rank has a chunk in this pass
        # while a waiting one is tried, and each may be retracted for it.
        level: Rank | None = None
        while self._budget > 0 and (level := self._next_level(level, now)) is not None:
            self._plan_level(level, now)

    def _find_may_retract(self, background_runs: bool) -> bool:
        """Whether running requests may be retracted for a waiting one of a higher rank."""
        return self._retracts_by_priority or (self.foreground_waits and background_runs)

    def _background_runs(self) -> bool:
        return bool(self._config.background_tenants) and any(one.background for one in self._running.requests)

    def _rank(self, request: TrackedRequest) -> Rank:
        return Rank(not request.background, request.priority if self._by_priority else 0)

    def _next_level(self, above: Rank | None, now: Now) -> Rank | None:
        """The highest rank, lower than `above`, of partly computed prompts and waiting requests."""
        waiting = self.candidate(now) if self._can_try() else None
        ranks = [rank for rank in map(self._rank, self._running.prefilling) if above is None or rank < above]
        return max([*ranks, *([] if waiting is None else [self._rank(waiting)])], default=None)

    def _plan_level(self, level: Rank | None, now: Now) -> None:
        """Plans chunks of the requests with this rank, or of all."""
        # One prompt never takes the whole pass while others wait, and long ones leave room for a chunk of short ones,
        # of a small pass three quarters, so that a short prompt behind them is not delayed.
        others_wait = self._may_admit and self._waits_at(level, now)
        self._room = min(self._config.chunk_tokens, self._budget * 3 // 4) if others_wait else 0
        share = min(self._config.chunk_tokens, self._budget - self._room)
        for request in self._prefilling_at(level):
            if self._leaves_room(self._num_missing_tokens(request), share):
                self._plan_chunk(request, share, now)
        self._admit_waiting(level, share, now)
        # No short prompt can use what is left now: it goes to prompts that have begun, then to other long ones.
        self._room = 0
        for request in self._prefilling_at(level):
            if request not in self.chunks or not self.chunks[request].is_last:
                self._plan_chunk(request, self._config.chunk_tokens, now)
        self._admit_deferred(now)

    def _prefilling_at(self, level: Rank | None) -> list[TrackedRequest]:
        prefilling = self._running.prefilling
        return prefilling if level is None else [request for request in prefilling if self._rank(request) == level]

    def _waits_at(self, level: Rank | None, now: Now) -> bool:
        if level is None:
            return self._memory.tree.root.num_waiting > 0
        request = self.candidate(now)
        return request is not None and self._rank(request) >= level

    @property
    def can_move(self) -> bool:
        """Whether this step may admit or retract more requests."""
        return self._num_moves < self.max_moves

    @property
    def could_admit(self) -> bool:
        """Whether a request waits and there is a slot for it, or one might be made free."""
        return self.num_waiting > 0 and (self._memory.slots.num_free > 0 or self._may_retract)

    def _leaves_room(self, to_compute: int, share: int) -> bool:
        """Whether a prompt with that many tokens to compute may take `share` of them now: short ones always may."""
        return not self._room or to_compute <= self._config.chunk_tokens or self._budget - share >= self._room

    def _can_admit(self) -> bool:
        return self._may_admit and self.can_move and self._budget > 0 and self.could_admit

    def _can_try(self) -> bool:
        """Whether to look for another candidate: a bounded number of them is skipped in a step."""
        return self._can_admit() and len(self._skipped) <= 4 * self._config.look_ahead + 16

    def _admit_waiting(self, level: Rank | None, share: int, now: Now) -> None:
        """Admits waiting requests of this rank, or of any, while tokens, slots and memory last."""
        while self._can_try():
            request = self.candidate(now)
            if request is None or (level is not None and self._rank(request) < level):
                break
            self._may_admit = self._admit_or_skip(request, share, now)

    def _admit_deferred(self, now: Now) -> None:
        """The same for the long prompts that were deferred, in the same order."""
        deferred, self._deferred = self._deferred, []
        while self._passed_over:
            self._memory.tree.unhide(self._passed_over.pop())
        for request in deferred:
            if self._can_admit():
                self._may_admit = self._admit_or_skip(request, self._config.chunk_tokens, now)
            else:
                self._note_wait(request, _ROOM_FOR_SHORT, now)

    def _admit_or_skip(self, request: TrackedRequest, share: int, now: Now) -> bool:
        """Admits `request` with up to `share` tokens, or skips it. Returns whether others may still be tried."""
        reason = self._try_admit(request, share, now)
        if reason is None:
            if request in self._out_of_memory:
                self._out_of_memory.remove(request)
            self._plan_chunk(request, share, now)
            self._count_overtakes(request, now)
            return True
        if reason is _NO_SLOT:
            return False
        if not request.skipped:
            self._memory.tree.skip(request)
            self._skipped.append(request)
        if reason is _ROOM_FOR_SHORT:
            self._deferred.append(request)
            if request.num_missing_pages:  # the memory that it lacked may be taken by short prompts, counted
                self._out_of_memory.append(request)
            self._pass_over(request.tenant)
            return True
        self._note_wait(request, reason, now)
        if reason is _NO_ADAPTER_SLOT:
            self._wait_for_adapter(request, now)
            return True
        if not reason.num_missing_pages:
            return True
        if not request.queued or request.overtaken >= self._config.max_overtakes:
            self.reserve(request, now)
        if request is not self.reserved and request not in self._out_of_memory:
            self._out_of_memory.append(request)
        return len(self._out_of_memory) <= self._config.look_ahead

    def _pass_over(self, tenant: str) -> None:
        """A long prompt of this tenant leaves room for a short one. After some, the short prompts of other tenants are
        looked for: whose turn it is does not matter for what it cannot use."""
        tree = self._memory.tree
        self._num_deferred[tenant] += 1
        node = tree.root.children.get(tenant)
        if node is None or node.hidden or self._num_deferred[tenant] <= self._config.look_ahead:
            return
        if 0 < node.num_waiting < tree.root.num_waiting:
            tree.hide(node)
            self._passed_over.append(node)

    def _wait_for_adapter(self, request: TrackedRequest, now: Now) -> None:
        """All slots have adapters of running requests. Requests with adapters may overtake it a bounded number of
        times, also in steps in which it is not tried; then a slot is reserved for it."""
        if len(self._without_adapter) < self._config.max_running:
            self._without_adapter[request] = None
        if not request.queued or request.overtaken >= self._config.max_overtakes:
            self.reserve(request, now)
        # No other request of this namespace can be admitted in this step: they are not tried one by one.
        self._memory.tree.hide(self._memory.tree.namespace(request.namespace))

    def _note_wait(self, request: TrackedRequest, reason: WaitReason, now: Now) -> None:
        if request.wait_reason != reason.text:
            request.wait_reason = reason.text
            self._journal.write(now, EventKind.WAIT, request.id, reason.text)
        request.num_missing_pages = reason.num_missing_pages

    def candidate(self, now: Now) -> TrackedRequest | None:
        """The next waiting request to be tried."""
        if self.holds_new:
            started = [one for one in self._memory.tree.waiting_nodes if not one.skipped and self.is_eligible(one)]
            by_priority, reserved = self._by_priority, self.reserved
            first = min(started, key=lambda one: (by_priority and -one.priority, one.seniority), default=None)
            return (
                reserved if first is not None and reserved in started and not self._outranks_reserved(first) else first
            )
        if self.reserved is not None and not self.reserved.skipped:
            first = self._policy.next(now) if self._by_priority else None
            return first if first is not None and self._outranks_reserved(first) else self.reserved
        for request in self.retracted:
            if not self.is_eligible(request):
                break  # foreground requests come first in the list
            if not request.skipped:
                return request
        return self._policy.next(now)

    def _count_overtakes(self, admitted: TrackedRequest, now: Now) -> None:
        for request in [*self._out_of_memory, *(self._without_adapter if admitted.adapter else ())]:
            if self._rank(admitted) > self._rank(request):
                continue  # it is admitted first anyway
            request.overtaken += 1
            self._journal.counters.overtakes += 1
            if request.overtaken >= self._config.max_overtakes:
                self.reserve(request, now)

    # ------------------------------------------------------------------ reservation

    @property
    def reserved(self) -> TrackedRequest | None:
        """The request that freed memory is kept for, as long as it may be admitted."""
        return self._reserved if self._reserved is not None and self.is_eligible(self._reserved) else None

    def _outranks_reserved(self, request: TrackedRequest) -> bool:
        """Whether `request` may take freed memory, whoever it is reserved for."""
        return self.reserved is None or self._rank(request) > self._rank(self.reserved)

    def reserve(self, request: TrackedRequest, now: Now) -> None:
        """Keeps freed memory for `request`, unless it is kept for another: that one starts first."""
        if self._outranks_reserved(request):
            self._reserved = request
            self._beside.clear()
            self._num_pages_beside.clear()
            self._journal.write(now, EventKind.RESERVE, request.id)

    def _pages_beside(self, reserved: TrackedRequest, leaving: Leaving) -> int:
        """Pages that others may take, at full length, while `reserved` waits, if `leaving` were gone.

        It starts at the latest when it and everything running fit at full length. Let running requests end in the order
        of their remaining output: then those that run longest and fit beside it still run, and it waits for the rest.
        Requests admitted meanwhile are counted as if they never ended. One more of them that fits beside all these
        adds none to those it waits for, and each of these ends by its full length, so `reserved` starts: no later
        than it would for sure if no other request were admitted.
        """
        if leaving in self._num_pages_beside:
            return self._num_pages_beside[leaving]
        memory, slots = self._memory, self._memory.slots
        self._beside = {request for request in self._beside if request.slot is not None}
        stays = np.ones(len(slots.requests), np.bool_)
        stays[leaving.rows] = False
        beside = np.array([request.slot for request in self._beside], np.int32)
        left = self._config.num_pages - self._config.pin_quota_pages - memory.full_pages(reserved)
        left -= int(self._full_pages(beside[stays[beside]]).sum())
        stays[beside] = False
        rows = self._running.slots
        rows = rows[stays[rows]]
        rows = rows[np.argsort(-slots.remaining[rows], kind="stable")]
        pages = np.cumsum(self._full_pages(rows))
        num_pages = self._num_pages_beside[leaving] = left - int(pages[pages <= left].max(initial=0))
        return num_pages

    def _has_adapter_slot(self, request: TrackedRequest, leaving: Leaving = NOBODY) -> bool:
        """Whether the adapter of `request` is in a slot or could get one if `leaving` were gone, without delaying the
        reserved request.

        If that one lacks a slot, one is kept for it as soon as it is available. Until then the adapter whose running
        requests end first, at their full length, gets no new ones. Its last one therefore ends after a bounded number
        of tokens: another adapter is chosen instead only if its requests end sooner.
        """
        adapters, reserved = self._memory.adapters, self.reserved
        if not request.adapter:
            return True
        users = adapters.num_users
        if len(leaving.rows):
            users = users - Counter(one.adapter for one in self._requests_in(leaving.rows))
        num_available = adapters.num_slots - len(users)
        is_kept = (
            reserved is not None
            and reserved is not request
            and reserved.adapter not in ("", request.adapter)
            and not adapters.is_loaded(reserved.adapter)
            and not self._outranks_reserved(request)
        )
        if not adapters.is_loaded(request.adapter):
            return num_available > is_kept
        if not is_kept or num_available > (request.adapter not in users):
            return True
        return num_available == 0 and request.adapter != self._draining_adapter(users, leaving)

    def _draining_adapter(self, users: Iterable[str], leaving: Leaving) -> str:
        """The adapter, of those in use, whose running requests end first, if each runs to its full length."""
        slots, remaining = self._memory.slots, dict.fromkeys(sorted(users), 0)
        gone = set(leaving.rows.tolist())
        for slot, request in enumerate(slots.requests):
            if request is not None and request.adapter and slot not in gone:
                remaining[request.adapter] = max(remaining[request.adapter], int(slots.remaining[slot]))
        return min(remaining, key=remaining.__getitem__)

    # ------------------------------------------------------------------ one request

    def _try_admit(self, request: TrackedRequest, share: int, now: Now) -> WaitReason | None:
        """Admits `request`, which may get up to `share` tokens, or returns why it must wait."""
        memory = self._memory
        if request.num_in_flight:
            return WaitReason("the token it was computing when it was retracted")
        is_hidden = memory.tree.is_hidden(request)
        if (is_hidden or not self._may_retract) and not self._has_adapter_slot(request):
            return _NO_ADAPTER_SLOT
        if is_hidden:
            return WaitReason("a prefix that is being computed")
        hit, to_compute = self._match(request, now)
        if request is not self.reserved and not self._leaves_room(to_compute, share):
            return _ROOM_FOR_SHORT
        missing = 0
        if self._may_retract:
            missing = self._retract_for(request, now)
            hit, to_compute = self._match(request, now)  # the KV of a retracted request is cached
        if (lack := self._find_lack(request)) is not None:
            return lack
        if missing:
            return WaitReason("memory", num_missing_pages=missing)
        # Locking the prefix takes its pages out of the evictable count. So lock first and count afterwards: otherwise
        # they would be promised twice, as its prefix and as pages to evict.
        memory.lock_prefix(request, hit)
        missing = self._missing_pages(request)
        if missing > 0:
            memory.unlock_prefix(request)
            return WaitReason("memory", num_missing_pages=missing)
        if self._is_beside(request):
            self._beside.add(request)
        self._num_pages_beside.clear()
        self._admit(request, hit, to_compute, now)
        return None

    def _match(self, request: TrackedRequest, now: Now) -> tuple[Node, int]:
        """Where the cached prefix of a waiting request ends, and the tokens that must be computed."""
        tree, host = self._memory.tree, self._memory.host
        node = tree.waiting_nodes[request]
        hit = tree.hit(node, now.step)
        return hit, request.num_tokens - hit.depth - (0 if host is None else host.tokens_below(hit, node))

    def _is_beside(self, request: TrackedRequest) -> bool:
        """Whether memory and a slot are kept for another request, which `request` must not delay."""
        return self.reserved not in (None, request) and not self._outranks_reserved(request)

    def _find_lack(self, request: TrackedRequest, leaving: Leaving = NOBODY) -> WaitReason | None:
        """What a waiting request would lack if `leaving` were gone, besides memory that running requests will need."""
        if not self._has_adapter_slot(request, leaving):
            return _NO_ADAPTER_SLOT
        is_beside = self._is_beside(request)
        if (
            self._memory.slots.num_free + len(leaving.rows) <= is_beside
        ):  # the last one is kept for the reserved request
            return _NO_SLOT
        if is_beside and self.reserved is not None:
            missing = self._memory.full_pages(request) - self._pages_beside(self.reserved, leaving)
            if missing > 0:
                return WaitReason("memory", num_missing_pages=missing)
        return None

    def may_give_way(self, priority: float) -> bool:
        """Whether running requests up to this priority may have to give way. False: there is none for certain."""
        if self._lowest_priority is None:
            slots, rows = self._memory.slots, self._running.slots
            self._lowest_priority = float(slots.priority[rows[~slots.is_protected[rows]]].min(initial=2**62))
        return self._lowest_priority <= priority

    def leaving(self, rows: Column) -> Leaving:
        """The running requests in these slots, should they be retracted."""
        return Leaving(rows, int(self._full_pages(rows).sum()))

    def retractable_for(self, request: TrackedRequest, among: Column) -> Column:
        """The slots of `among` to retract first for `request`. If its adapter has no slot: the users of another adapter
        that only they use, of the one with the fewest."""
        if self._has_adapter_slot(request):
            return among
        adapters = [one.adapter for one in self._requests_in(among)]
        counts = Counter(name for name in adapters if name != request.adapter)
        counts = Counter({name: n for name, n in counts.items() if n == self._memory.adapters.num_users[name]})
        if not counts:
            return among
        adapter = min(counts, key=counts.__getitem__)
        first: Column = among[np.array([name == adapter for name in adapters])]
        return first

    def _requests_in(self, rows: Column) -> list[TrackedRequest]:
        found = map(self._memory.slots.requests.__getitem__, rows.tolist())
        return [request for request in found if request is not None]

    def num_missing_without(self, request: TrackedRequest, leaving: Leaving, now: Now) -> int:
        """Pages that a waiting request would lack if `leaving` were gone; 1 if it would lack a slot, or one for its
        adapter, or memory beside a reserved request."""
        memory = self._memory
        if self._find_lack(request, leaving) is not None:
            return 1
        memory.lock_prefix(request, memory.tree.hit(memory.tree.waiting_nodes[request], now.step))
        missing = self._missing_pages(request, leaving)
        memory.unlock_prefix(request)
        return max(0, missing)

    def num_pages_at_end(self, request: TrackedRequest) -> int:
        """Pages of a running request when it ends, as the last forecast has it: retracting it gives no more."""
        return int(self._pages_at_end[request.slot])

    def _missing_pages(self, request: TrackedRequest, leaving: Leaving = NOBODY) -> int:
        """Number of pages that `request`, whose prefix is locked, lacks beside everything running."""
        if len(self._running) == len(leaving.rows):
            return 0  # it fits alone, or it would have been refused
        limit = self._config.num_pages - self._config.pin_quota_pages
        promised = self._memory.num_promised_pages - leaving.num_full_pages
        if promised + self._memory.full_pages(request) <= limit:
            return 0  # everything fits at full length: no forecast is needed
        limit = self._config.num_pages - self._unused_pin_pages()
        if is_protected(request):
            rows = self._staying(leaving)
            protected = rows[self._memory.slots.is_protected[rows]]
            full_pages = self._memory.full_pages(request) + int(self._full_pages(protected).sum())
            own_pages = self._worst_case_pages(request) + self._worst_case_pages_of(protected)
            shared = self._count_shared_pages() + own_pages
            alone = full_pages + self._config.pin_quota_pages
            missing = min(shared - limit, alone - self._config.num_pages)
            if missing > 0:
                return missing
        own, growth = self._own_tokens(request), self._expected_growth(request)
        forecast = self._update_forecast()
        if forecast is None:
            forecast = self._forecast = self._make_forecast(self._running.slots)
            self._num_shared_pages = self._count_shared_pages()
        if len(leaving.rows):
            without = self._forecasts_without.get(leaving)
            if without is None:
                without = self._forecasts_without[leaving] = forecast.among(self._staying(leaving))
            return without.missing_with(own, growth, limit - self._num_shared_pages + self._count_left_pages(leaving))
        missing = forecast.missing_with(own, growth, limit - self._num_shared_pages)
        # Fitting by forecast is not enough: its first page must be available now.
        return missing if missing > 0 else 1 - self._memory.num_available_pages

    def _staying(self, leaving: Leaving) -> Column:
        """Slots of the running requests without those that leave."""
        rows = self._running.slots
        if not len(leaving.rows):
            return rows
        stays = np.ones(len(self._memory.slots.requests), np.bool_)
        stays[leaving.rows] = False
        return rows[stays[rows]]

    def _update_forecast(self) -> MemoryForecast | None:
        """The forecast of this step, if there is one, without requests that were retracted since."""
        if self._forecast is not None and not self._forecast_is_current:
            self._forecast = self._forecast.among(self._running.slots)
            self._forecasts_without.clear()
            self._num_shared_pages = self._count_shared_pages()
        self._forecast_is_current = True
        return self._forecast

    def _count_shared_pages(self) -> int:
        """Locked pages that no single request accounts for: counted once, however many requests share them."""
        return self._memory.tree.num_locked_pages - self._memory.tree.num_exclusive_pages

    def _count_left_pages(self, leaving: Leaving) -> int:
        """Of the pages that no single request accounts for, those that only `leaving` hold."""
        slots, rows = self._memory.slots, leaving.rows
        holders: Counter[Node] = Counter()
        for request in self._requests_in(rows[slots.num_prefix_pages[rows] > slots.exclusive_pages[rows]]):
            node: Node | None = self._memory.locked_nodes[request]
            while node is not None:
                holders[node] += 1
                node = node.parent
        return sum(len(node.pages) for node, n in holders.items() if n == node.locks and node.holder is None)

    def _own_tokens(self, request: TrackedRequest) -> int:
        """Tokens in pages that only `request`, whose prefix is locked, holds once its prompt is computed."""
        depth = self._memory.locked_nodes[request].depth
        return request.num_tokens - depth + request.exclusive_pages * self._memory.page_size

    def _unused_pin_pages(self) -> int:
        """Pages that may still be pinned, so admission cannot use them."""
        return self._config.pin_quota_pages - self._memory.num_pinned_pages

    def _worst_case_pages(self, request: TrackedRequest) -> int:
        """Pages that only `request` holds if it runs to its full length."""
        prefix_pages = self._memory.locked_nodes[request].depth // self._memory.page_size
        return self._memory.full_pages(request) - prefix_pages + request.exclusive_pages

    def _expected_growth(self, request: TrackedRequest) -> int:
        """Positions that a waiting request is expected to write after its prompt. Its last token is never fed."""
        max_remaining = request.max_tokens - len(request.output)
        expected = max_remaining
        if not (request.ends_by_length or is_protected(request)):
            if request.expected_tokens is not None:
                expected = max(1, min(max_remaining, request.expected_tokens - len(request.output)))
            else:
                expected = self._lengths.expected_remaining_of_one(len(request.output), max_remaining)
        return max(0, expected - 1) + self._config.draft_tokens

    def _full_pages(self, rows: Column) -> Column:
        """Pages of each of these rows at full length."""
        return -(-self._memory.slots.max_lengths[rows] // self._memory.page_size)

    def _worst_case_pages_of(self, rows: Column) -> int:
        """Pages that only one of these rows holds, if all run to their full length."""
        slots = self._memory.slots
        own = self._full_pages(rows) - slots.num_prefix_pages[rows] + slots.exclusive_pages[rows]
        return int(own.sum())

    def _make_forecast(self, rows: Column) -> MemoryForecast:
        """The predicted peak of these rows. In columns: it is needed in every step that could admit."""
        slots, size = self._memory.slots, self._memory.page_size
        known = np.maximum(slots.computed[rows] + slots.ahead[rows], slots.prompt_tokens[rows])
        own = known + (slots.exclusive_pages[rows] - slots.num_prefix_pages[rows]) * size
        max_remaining = slots.remaining[rows].astype(np.int64)
        generated = slots.max_outputs[rows] - max_remaining
        given = slots.expected[rows]
        learned = self._lengths.expected_remaining(generated, max_remaining)
        expected = np.where(given > 0, np.clip(given - generated, 1, max_remaining), learned)
        growth = np.where(slots.runs_full_length[rows], max_remaining, expected)
        # The prefill yields the first token, so a prompt grows by one position less than its remaining tokens.
        growth = np.maximum(growth - slots.is_prefill[rows], 0) + self._config.draft_tokens
        self._pages_at_end[rows] = -(-(known + growth) // size)
        return MemoryForecast(size, rows, own, growth)

    def _admit(self, request: TrackedRequest, hit: Node, to_compute: int, now: Now) -> None:
        memory, counters = self._memory, self._journal.counters
        self._num_moves += 1
        growth = self._expected_growth(request)
        own_tokens = self._own_tokens(request)
        self._service_time.predict(request, to_compute, growth)
        self._policy.on_admitted(request, to_compute, now)
        self.dequeue(request)
        forecast = self._update_forecast()  # before the slot of one that was retracted is used again
        slot = memory.start_row(request)
        if forecast is not None:
            forecast.add(slot, own_tokens, growth)
            self._forecasts_without.clear()
        self._pages_at_end[slot] = memory.pages_for(request.num_tokens + growth)
        adapter_slot = memory.adapters.acquire(request.adapter) if request.adapter else None
        memory.slots.max_outputs[slot] = request.max_tokens
        memory.slots.expected[slot] = min(request.expected_tokens or 0, request.max_tokens)
        memory.slots.remaining[slot] = request.max_tokens - len(request.output)
        memory.slots.max_lengths[slot] = len(request.prompt) + request.max_tokens
        memory.slots.prompt_tokens[slot] = request.num_tokens
        memory.slots.is_protected[slot] = is_protected(request)
        memory.slots.runs_full_length[slot] = request.ends_by_length or is_protected(request)
        memory.slots.priority[slot] = request.priority
        if self._lowest_priority is not None:
            self._lowest_priority = min(self._lowest_priority, request.priority)
        memory.slots.is_background[slot] = request.background
        if not request.was_admitted:
            self._num_admitted += 1
            request.first_admitted = now.time
            request.seniority = self._num_admitted
            request.num_cached = hit.depth
        memory.slots.seniority[slot] = request.seniority
        request.wait_reason, request.num_missing_pages = "", 0
        self._running.start_prefill(request)
        self._joins.append(Join.of(request, slot, adapter_slot))
        counters.admitted += 1
        counters.prompt_tokens += request.num_tokens
        counters.hit_tokens += hit.depth
        self._journal.write(now, EventKind.ADMIT, request.id, hit.depth, to_compute)

    def _num_missing_tokens(self, request: TrackedRequest) -> int:
        """Tokens of an admitted prompt that no pass computes yet."""
        return request.num_tokens - int(self._memory.slots.computed[request.slot])

    def _plan_chunk(self, request: TrackedRequest, limit: int, now: Now) -> None:
        """Adds tokens of an admitted prompt to the pass until it has `limit` of them there; fewer if the budget or
        memory is short."""
        memory, slots, slot = self._memory, self._memory.slots, request.slot
        assert slot is not None, f"request {request.id} is not running"
        planned = self.chunks.get(request)
        if self._budget <= 0 or (planned is not None and planned.is_last):
            return
        if planned is None:
            self._skip_cached(request, now)
            if self._config.prefix_wait and self._is_in_flight(request, now):
                return
        done = int(slots.computed[slot])
        start = done if planned is None else planned.start
        length = min(limit, self._max_chunk(start)) - (done - start)
        if memory.host is not None:
            before_fetch = memory.tokens_before_fetch(request, memory.host)
            # The next tokens are in host memory and this plan may fetch no more: compute at least a page.
            length = min(length, before_fetch or (memory.page_size if planned is None else 0))
        available = (int(slots.num_pages[slot]) + memory.num_available_pages) * memory.page_size - done
        # If the budget stands for time, a token after a long context takes as much of it as several.
        cost = max(1.0, self.token_cost * (1 + done / self._config.chunk_context))
        length = min(length, math.ceil(self._budget / cost), request.num_tokens - done, available)
        if length <= 0:
            return
        memory.ensure_pages(request, done + length, now)
        slots.computed[slot] = done + length
        self.chunks[request] = Chunk(request, slot, start, done + length - start, done + length == request.num_tokens)
        self._budget -= math.ceil(length * cost)
        self._journal.counters.computed_tokens += length
        self._policy.charge(request.tenant, length)
        above = memory.insert_prompt(request, now)
        if self._config.prefix_wait and planned is None:
            self._hide_sharers(request, above, start, now)

    def _skip_cached(self, request: TrackedRequest, now: Now) -> None:
        """Skips what others have computed of an admitted prompt since its last chunk, and fetches from host memory."""
        memory = self._memory
        skipped = memory.extend_cached_prefix(request, now)
        self._journal.counters.hit_tokens += skipped
        fetched = 0 if memory.host is None else memory.fetch(request, memory.host, now)
        if not request.retractions:  # after a retraction it finds what it computed itself
            request.num_cached = min(request.num_cached + skipped + fetched, len(request.prompt))
            request.num_fetched = min(request.num_fetched + fetched, request.num_cached)

    def _max_chunk(self, start: int) -> int:
        """Tokens of one prompt in one pass. While other requests decode it is half of chunk_tokens, so that their
        tokens do not take twice as long; and since each token attends to all the context before it, chunks get shorter
        towards the end of a long prompt. While requests wait for admission, finishing prompts matters more."""
        max_tokens, context = self._config.chunk_tokens, self._config.chunk_context
        if not self._running.decoding or self.num_waiting:
            return max_tokens
        shorter = max(max_tokens * context // (2 * (context + start)), 1)
        return min(max_tokens, -(-shorter // _TILE_TOKENS) * _TILE_TOKENS)

    def _is_in_flight(self, request: TrackedRequest, now: Now) -> bool:
        """Whether the pass being planned computes the next tokens of an admitted prompt for another request, enough of
        them to wait a step for."""
        memory, node = self._memory, self._memory.locked_nodes[request]
        end = node.depth + self._prefix_wait_tokens
        if memory.slots.computed[request.slot] != node.depth or end > memory.num_cacheable_tokens(request):
            return False
        ahead = memory.tree.find_end(node, request.key, end)
        return ahead is not None and ahead.resident and ahead.computed_step == now.step

    def _hide_sharers(self, request: TrackedRequest, above: Node, start: int, now: Now) -> None:
        """Requests that share enough of what `request` computes from token `start` on, in this pass or later, wait.

        Only in passes in which it gets a chunk: then no other request could compute the prefix sooner, since each may
        have one share of the pass, and long prompts that would get less leave the room to short ones first. A prompt
        that gets no tokens, or is of lower priority and so not planned yet, holds nobody back: a sharer computes the
        prefix, and that prompt continues behind it.
        """
        tree, size = self._memory.tree, self._memory.page_size
        node = tree.find_end(above, request.key, start // size * size + self._prefix_wait_tokens)
        if node is not None and (not node.resident or node.computed_step == now.step):
            tree.hide(node)
