"""The scheduler: add, abort, plan, commit.

Before every forward pass it decides which requests run, on which pages, in which order. It is plain Python with no
clock and no device: the time is an argument, and the decision is a Plan that an executor executes. The one thing to
know before changing it: a plan may be requested while the previous one is still in flight, so between two calls the
last sampled tokens of the running rows may be unknown. What is planned (`slots.computed`, `slots.remaining`) is ahead
of what is known (`request.output`). It is ahead by one token at most, with a pipeline too: there more passes are in
flight, and the passes in between have other rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config import SchedulerConfig
from paceline.request import FinishReason, InvalidRequest, Refused, Request, as_tokens
from paceline.scheduler.admission import MIN_CHUNK_TOKENS, NOBODY, Admission, Leaving
from paceline.scheduler.draft_depth import DraftDepth
from paceline.scheduler.explain import explain
from paceline.scheduler.host_tier import Reservation
from paceline.scheduler.invariants import find_faults
from paceline.scheduler.journal import Counters, EventKind, Journal
from paceline.scheduler.kv_events import KvListener
from paceline.scheduler.memory import Memory, PinError
from paceline.scheduler.memory_forecast import Ints, OutputLengths
from paceline.scheduler.node import Node
from paceline.scheduler.now import Now
from paceline.scheduler.plan import NO_TOKENS, Column, Finished, Plan, Updates
from paceline.scheduler.policy import make_policy
from paceline.scheduler.retraction import MAX_RECOMPUTATIONS, choose_victim, victims
from paceline.scheduler.running_set import RunningSet
from paceline.scheduler.service_time import ServiceTime
from paceline.scheduler.step_time import MixedBatchTimes, StepTimeFit
from paceline.scheduler.tracked_request import Phase, TrackedRequest
from paceline.scheduler.validation import QueueLimits, validate

MAX_PREFILL_BATCHES = 8  # batching prefill-first: in a row, while requests could decode


@dataclass(slots=True, eq=False)
class _PassInFlight:
    """A plan that is not committed yet, with what only the scheduler needs to know about it."""

    plan: Plan
    requests: tuple[TrackedRequest, ...]  # of the plan's rows
    sampled: tuple[TrackedRequest, ...]  # of its sampling rows: they get the tokens
    ending: list[TrackedRequest]  # requests known to end by length with this pass
    departures: int  # the scheduler's `_departures` when it was planned
    read: tuple[Node, ...]  # the ends of the prefixes that its sampling prefill rows read: their tokens prove them
    void: set[TrackedRequest] = field(default_factory=set)  # its results for these are not valid: they read dropped KV
    # Requests that released their KV before its tokens are known, by how much of it was free of NaN for certain. Where
    # others computed what follows: it may be evicted by then.
    released: dict[TrackedRequest, int] = field(default_factory=dict)


class _Deadline(NamedTuple):
    at: float
    number: int  # unique, so that a heap compares nothing behind it
    reason: FinishReason  # of the request if it is not void by then
    request: TrackedRequest

    @property
    def is_void(self) -> bool:
        was_in_time = self.reason is FinishReason.QUEUE_TIMEOUT and self.request.was_admitted
        return was_in_time or self.request.is_finished


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.journal = Journal(config.journal_events)
        self.step_time = StepTimeFit()
        self._background = config.background_names
        self._service_time = ServiceTime(config.max_running, config.output_weight)
        self.mixed_batches = MixedBatchTimes(config.chunk_context)
        self.draft_depth = (
            DraftDepth(config.draft_tokens, has_model=config.model_drafts) if config.adaptive_drafts else None
        )
        self.max_in_flight = config.num_stages + 1  # passes that are planned and not committed
        self._due: Column = NO_TOKENS  # slots of the decode rows of the pass being planned
        self._left_out: Column = NO_TOKENS  # slots of decode rows that get no page in the pass being planned
        self._num_drafts = config.draft_tokens  # per decode row of the pass being planned, at most
        self._lengths = OutputLengths()
        self.step = 1  # number of the pass being planned, or of the next one
        self._kv_listeners: list[KvListener] = []
        self._reset_state()
        self.requests: dict[str, TrackedRequest] = {}  # accepted and not finished
        self._arrivals = 0
        self._departures = 0  # finished or retracted: if it changed, rows in flight may have lost their request
        self._in_flight: deque[_PassInFlight] = deque()
        self._num_prefill_batches = 0  # since the last decode batch, while requests could decode
        self._deadlines: list[_Deadline] = []
        self._num_deadlines = 0  # so far
        # Stop ids of all live requests: almost every token is looked up only here.
        self._stop_ids: Counter[int] = Counter()
        self._adapters: Counter[str] = Counter()  # unfinished requests, by LoRA adapter
        self._ended: list[Finished] = []  # outside of a commit: reported with the next one
        # A steady decode step would otherwise build these again each time.
        self._ones: Column = np.ones(config.max_running, np.int32)
        self._trues: npt.NDArray[np.bool_] = np.ones(config.max_running, np.bool_)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def _reset_state(self) -> None:
        """Empty memory and queues."""
        self.memory = Memory(self.config, self.journal)
        self.running = RunningSet(self.memory, shared_reads=self.config.shared_reads, num_stages=self.config.num_stages)
        self.policy = make_policy(self.memory.tree, self.config)
        self.admission = Admission(
            self.config,
            self.memory,
            self.running,
            self.policy,
            self._lengths,
            self._service_time,
            self.journal,
            self._retract_for,
        )
        self._queue_limits = QueueLimits(self.config, self.admission)
        self._below_of: Column = NO_TOKENS  # the running requests, when `_below` was last asked
        self._below_by_rank: dict[tuple[bool, int], Leaving] = {}
        for listener in self._kv_listeners:
            self.memory.tree.listen(listener)

    # ------------------------------------------------------------------ queries

    @property
    def counters(self) -> Counters:
        return self.journal.counters

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def sampled_in_flight(self) -> list[tuple[TrackedRequest, ...]]:
        """The requests that get tokens, by pass in flight."""
        return [one.sampled for one in self._in_flight]

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight)

    @property
    def started(self) -> list[TrackedRequest]:
        """Requests that were admitted and have not finished. They may wait again, after a retraction."""
        return [request for request in self.requests.values() if request.was_admitted]

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0].at if self._deadlines else None

    def requests_of(self, plan: Plan) -> tuple[TrackedRequest, ...]:
        """The requests of the rows of a plan that is not committed yet."""
        return next(one.requests for one in self._in_flight if one.plan.step == plan.step)

    def match(self, request: Request) -> int:
        """Number of tokens of this prompt that are cached now."""
        usable = self.memory.num_cacheable_tokens(TrackedRequest(request))
        return min(usable, self.memory.tree.match(request.namespace, request.keys.tobytes()))

    def expected_remaining(self, generated: Ints, max_remaining: Ints) -> Ints:
        """Expected further tokens of requests that have `generated` so far and can have up to `max_remaining` more."""
        return self._lengths.expected_remaining(generated, max_remaining)

    def explain(self, request_id: str) -> str:
        """One sentence: what this request is doing, or why it waits and what must happen first."""
        request = self.requests.get(request_id)
        if request is None:
            return f"Request {request_id} is unknown: it has finished, or was never added."
        return explain(request, self.config, self.memory, self.admission)

    # ------------------------------------------------------------------ requests

    def add(self, request: Request, now: float) -> TrackedRequest:
        """Adds a request. Raises Refused if it can never run or the queue is full; the state is unchanged then."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is in use by an unfinished request: choose another id.")
        added = TrackedRequest(request, arrival=now, background=request.tenant in self._background)
        try:
            added.max_tokens = validate(added, self.config, self.memory)
            leaving = self._queue_limits.make_room(added)
        except Refused as refusal:
            self.counters.refused += 1
            self.journal.write(Now(self.step, now), EventKind.REFUSE, request.id, str(refusal))
            raise
        for other in leaving:
            self._finish(other, FinishReason.DISPLACED, Now(self.step, now))
        self._arrivals += 1
        added.number = self._arrivals
        self.requests[added.id] = added
        self._stop_ids.update(added.stop_ids)
        if added.adapter:
            self._adapters[added.adapter] += 1
        if request.deadline is not None:
            self._add_deadline(request.deadline, FinishReason.DEADLINE, added)
        # A background request waits, and waits again, for as long as others keep coming: only its own limits end it.
        limit_s = math.inf if added.background else self.config.queue_timeout_s
        timeout_s = min(request.queue_timeout_s, limit_s)
        self._add_deadline(now + timeout_s, FinishReason.QUEUE_TIMEOUT, added)
        self.counters.added += 1
        self.journal.write(Now(self.step, now), EventKind.ADD, added.id, len(added.prompt), added.max_tokens)
        self.admission.enqueue(added)
        self._queue_limits.add(added)
        return added

    def _add_deadline(self, at: float, reason: FinishReason, request: TrackedRequest) -> None:
        if not math.isinf(at):
            self._num_deadlines += 1
            heappush(self._deadlines, _Deadline(at, self._num_deadlines, reason, request))

    def abort(self, request_id: str, now: float) -> bool:
        """Ends a request in any state. Returns whether there was one with this id."""
        return self.finish(request_id, FinishReason.ABORT, now)

    def finish(self, request_id: str, reason: FinishReason, now: float) -> bool:
        """Ends a request for a reason outside the scheduler: a stop string, a client that disconnected. Returns whether
        there was one with this id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, Now(self.step, now))
        return True

    def _finish(self, request: TrackedRequest, reason: FinishReason, now: Now) -> None:
        if request.phase is Phase.WAITING:
            self.admission.dequeue(request)
        elif request.slot is not None:
            # The KV of the last known token is not computed yet, or computed by a pass in flight whose row is
            # discarded. In both cases it is not cached.
            self._release(request, request.num_tokens - 1, now)
        if request.was_admitted:
            self.policy.on_served(request, self._service_time.served(request))
        self._departures += 1
        request.enter(Phase.FINISHED)
        request.finish_reason = reason
        request.finished = now.time
        del self.requests[request.id]
        if request.adapter:
            self._adapters[request.adapter] -= 1
            if not self._adapters[request.adapter]:
                del self._adapters[request.adapter]
        self._stop_ids.subtract(request.stop_ids)
        for token in request.stop_ids:
            if not self._stop_ids[token]:
                del self._stop_ids[token]
        if request.output and reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.ends_by_length:
            self._lengths.record(len(request.output))
        self.counters.finished[reason] += 1
        self.journal.write(now, EventKind.FINISH, request.id, reason, len(request.output))
        self._ended.append(Finished(request, reason))

    def _release(self, request: TrackedRequest, num_known: int, now: Now) -> int:
        """Takes slot and memory from a running request. The computed part of its first `num_known` tokens stays cached.
        Returns the pages that became available."""
        assert request.slot is not None, f"request {request.id} has no slot"
        self.running.discard(request)
        if self.draft_depth is not None:
            self.draft_depth.forget(request)
        num_valid = min(int(self.memory.slots.computed[request.slot]), num_known)
        num_pages = self.memory.release(request, num_valid, now)
        self.policy.on_released(request)
        return num_pages

    # ------------------------------------------------------------------ plan

    def plan(self, now: float) -> Plan | None:
        """The next forward pass, or None: there is nothing to do, or a pass in flight must be committed first."""
        assert len(self._in_flight) < self.max_in_flight, "commit the older pass before planning another"
        return self._plan(Now(self.step, now))

    def _plan(self, now: Now) -> Plan | None:
        running, admission = self.running, self.admission
        self.expire(now.time)
        self._release_ending(now)
        if self.memory.merge_duplicates(now):
            running.rows_remapped()
        admission.begin_step()
        if self.draft_depth is not None:
            self._num_drafts = self.draft_depth.choose(running.decoding)
        self._left_out = NO_TOKENS
        self._due = self._find_due()
        may_admit = self.config.batching != "static" or not running
        prefill_first = self.config.batching == "prefill-first"
        can_decode = len(self._due) > 0
        decodes_are_due = self._num_prefill_batches >= MAX_PREFILL_BATCHES
        if not prefill_first or decodes_are_due:
            self._ensure_decode_pages(now)
        if not (decodes_are_due and len(self._decode_rows)):
            self._plan_prefills(may_admit, now)
        if prefill_first and not admission.chunks:
            self._ensure_decode_pages(now)
            if not len(self._decode_rows):  # they were retracted, so prompts may have memory now
                self._plan_prefills(False, now)
        while not admission.chunks and not running.decoding and running.prefilling and not self._in_flight:
            # Partly computed prompts fill all memory and none can continue: retract one.
            if not self._retract_one(now, "a prompt that cannot continue"):
                break
            self._plan_prefills(False, now)
        decode = len(self._decode_rows) > 0 and not (prefill_first and admission.chunks)
        if self.draft_depth is not None and admission.chunks:
            self._num_drafts = 0
        self._num_prefill_batches = self._num_prefill_batches + 1 if can_decode and not decode else 0
        plan = self._build(decode) if decode or admission.chunks else None
        admission.end_step()
        if plan is not None:
            self.step += 1
            self.counters.steps += 1
            self._lengths.on_step()
        return plan

    def expire(self, now: float) -> None:
        """Ends requests whose deadline has passed, and removes expired pins. `plan` does so too."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0].at <= now or deadlines[0].is_void):
            deadline = heappop(deadlines)
            if not deadline.is_void:
                self._finish(deadline.request, deadline.reason, Now(self.step, now))
        if len(deadlines) > 64 + 4 * len(self.requests):  # mostly void
            self._deadlines = [deadline for deadline in deadlines if not deadline.is_void]
            heapify(self._deadlines)
        for pin in [pin for pin in self.memory.pins.values() if pin.expires <= now]:
            self.unpin(pin.name, now)

    def _release_ending(self, now: Now) -> None:
        """Releases requests that end by length with a pass in flight. Later passes run after it, so their slots and
        pages can be used by this plan. Such a request has no slot when its last token is committed."""
        for one in self._in_flight:
            for request in one.ending:
                if request.slot is not None:
                    self._note_unproven(request)
                    self._release(request, request.num_tokens, now)

    def _find_due(self) -> Column:
        """Slots of the decode rows that this pass can have. A row may be in flight once: in the pass that is as many
        passes ago as there are stages. If it is in a later one, it waits until that one is committed."""
        oldest = self._in_flight[0].plan.step if self._in_flight else self.step
        return self.running.due_slots(max(self.step - self.config.num_stages, oldest - 1))

    @property
    def _decode_rows(self) -> Column:
        """Slots of the decode rows of this pass: of those that are due, and were not retracted for others since."""
        if self.config.num_stages == 1 and not len(self._left_out):
            return self.running.decode_slots
        return self._due[np.isin(self._due, self.running.decode_slots)]

    def _ensure_decode_pages(self, now: Now) -> None:
        """Allocates a page for the next token of every decode row that needs one, and retracts if there are not
        enough. A step retracts a bounded number of requests, so that the others do not wait for it; then the newest
        rows that need a page are left out of this pass."""
        memory, slots, draft = self.memory, self.memory.slots, self._num_drafts
        for_foreground = not slots.is_background[self.running.slots].all()
        to_retract = victims(self.running.slots, memory, for_foreground=for_foreground)
        while True:
            rows = self._find_due()
            if len(self._left_out):
                rows = rows[~np.isin(rows, self._left_out)]
            self._due = rows
            reach = slots.computed[rows]
            if self.config.draft_tokens:
                reach = np.minimum(reach + slots.ahead[rows] + draft, slots.max_lengths[rows] - 1)
            full = rows[reach >= slots.capacity[rows]]
            if not len(full):
                return
            num_missing = len(full) - memory.num_available_pages
            if num_missing <= 0:
                memory.append_page_each(full, now)  # then check again: a draft may need several pages
                continue
            if not self.admission.can_move and num_missing < len(rows):
                newest = full[np.argsort(slots.seniority[full])[-num_missing:]]
                self._left_out = np.concatenate([self._left_out, newest])
                continue
            victim = next(to_retract, None)
            if victim is not None:
                self._retract(victim, now, f"{len(full)} decoding requests", for_foreground=for_foreground)
            else:  # all are protected: the newest request that needs a page waits
                newest_one = slots.requests[full[slots.seniority[full].argmax()]]
                assert newest_one is not None, "decode rows have requests"
                self._retract(newest_one, now, "older requests")
            self._lengths.on_retraction()

    def _plan_prefills(self, may_admit: bool, now: Now) -> None:
        if not self.running.prefilling and not (may_admit and self.admission.could_admit):
            return
        self._free_prompt_page(now)
        self.admission.plan_chunks(self._prefill_budget(), may_admit and self.num_waiting > 0, now)

    def _free_prompt_page(self, now: Now) -> None:
        """If no page is left for a foreground prompt that has begun, retracts background requests until there is. None
        of them has a chunk in the pass being planned yet."""
        running, memory = self.running, self.memory
        while not memory.num_available_pages:
            waits = any(not one.background and memory.needs_page(one) for one in running.prefilling)
            rows = running.slots
            victim = (
                choose_victim(rows[memory.slots.is_background[rows]], memory, for_foreground=True) if waits else None
            )
            if victim is None:
                return
            self._retract(victim, now, "a foreground prompt", for_foreground=True)

    def _prefill_budget(self) -> int:
        """Prompt tokens of this pass: what the token limits and the inter-token latency target leave."""
        config = self.config
        num_decodes = 0 if config.batching == "prefill-first" else len(self._decode_rows)
        # With adaptive drafts, a mixed batch has none.
        decode_tokens = num_decodes * (1 if config.adaptive_drafts else 1 + config.draft_tokens)
        budget = min(config.max_prefill_tokens, config.max_batch_tokens - decode_tokens)
        self.admission.token_cost = 0.0
        if num_decodes and not math.isinf(config.itl_target):
            tokens, weighted = self.mixed_batches.tokens_within(config.itl_target)
            within = max(tokens, MIN_CHUNK_TOKENS)
            budget = min(budget, int(within))
            self.admission.token_cost = budget / within * tokens / weighted
        return budget

    def _build(self, decode: bool) -> Plan:
        slots, chunks = self.memory.slots, self.admission.chunks.values()
        rows: Column = self._decode_rows if decode else NO_TOKENS
        requests = sampled = self._requests_in(rows)
        read: tuple[Node, ...] = ()
        num_decodes = len(requests)
        starts, drafts, num_drafts = slots.computed[rows], None, 0
        slots.computed[rows] = starts + 1
        if self._num_drafts or (self.config.draft_tokens and slots.ahead[rows].any()):
            # The last token of a row is not fed. Where the row is now, so many drafts may be too many: see `Plan`.
            starts = np.minimum(starts + slots.ahead[rows], slots.max_lengths[rows] - 1)
            drafts = np.minimum(self._num_drafts, slots.max_lengths[rows] - 1 - slots.computed[rows])
            slots.ahead[rows] += drafts
            num_drafts = int(drafts.sum())
        remaining = slots.remaining[rows] - 1
        slots.remaining[rows] = remaining
        ending = [requests[row] for row in np.flatnonzero(remaining == 0).tolist()] if not remaining.all() else []
        num_context = int(starts.sum()) + num_decodes
        lengths, samples = self._ones[:num_decodes], self._trues[:num_decodes]
        max_lengths = slots.max_lengths[rows]
        if decode:
            tenants = self.running.decodes_by_tenant
            if num_decodes < len(self.running.decoding):
                tenants = Counter(request.tenant for request in requests)
            for tenant, count in tenants.items():
                self.policy.charge(tenant, count * self.config.output_weight)
        self.counters.decoded_tokens += num_decodes
        if chunks:
            yields = [chunk.is_last and not chunk.request.prefill_only for chunk in chunks]
            rows = np.concatenate([rows, np.array([chunk.slot for chunk in chunks], np.int32)])
            starts = np.concatenate([starts, np.array([chunk.start for chunk in chunks], np.int32)])
            lengths = np.concatenate([lengths, np.array([chunk.length for chunk in chunks], np.int32)])
            max_lengths = slots.max_lengths[rows]
            samples = np.concatenate([samples, np.array(yields, np.bool_)])
            num_context += sum(chunk.start + chunk.length for chunk in chunks)
            requests += tuple(chunk.request for chunk in chunks)
            sampled += tuple(chunk.request for chunk, one in zip(chunks, yields, strict=True) if one)
            read = tuple(self.memory.locked_nodes[request] for request in sampled[num_decodes:])
            ending += self._finish_prefills()
        if chunks:
            sharing = self.running.sharing(requests, rows, starts, self.step)
        else:
            sharing = self.running.decode_sharing(requests, rows, starts, self.step)
        slots.last_step[rows] = self.step
        self.running.stop_decoding(*(request for request in ending if request.phase is Phase.DECODING))
        joins = self.admission.take_joins()
        for join in joins:
            self._limit_running_time(join.request_id)
        plan = Plan(
            step=self.step,
            slots=rows,
            starts=starts,
            lengths=lengths,
            max_lengths=max_lengths,
            samples=samples,
            num_decodes=num_decodes,
            joins=joins,
            page_changes=(slots.take_changes(),),
            num_tokens=num_decodes + num_drafts + sum(chunk.length for chunk in chunks),
            num_context_tokens=num_context,
            sharing=sharing,
            swap=None if self.memory.host is None else self.memory.host.take_swap(),
            drafts=drafts,
            adapter_loads=self.memory.adapters.take_loads(),
        )
        self._in_flight.append(_PassInFlight(plan, requests, sampled, ending, self._departures, read))
        return plan

    def _requests_in(self, rows: Column) -> tuple[TrackedRequest, ...]:
        """The decoding requests in these slots."""
        if len(rows) == len(self.running.decoding):
            return tuple(self.running.decoding)
        found = tuple(self.memory.slots.requests[slot] for slot in rows.tolist())
        return tuple(request for request in found if request is not None)

    def _limit_running_time(self, request_id: str) -> None:
        request = self.requests.get(request_id)  # None: it has ended since it was admitted
        if request is not None and request.first_admitted is not None and not request.retractions:
            limit_s = math.inf if request.background else self.config.running_timeout_s
            timeout_s = min(request.request.running_timeout_s, limit_s)
            self._add_deadline(request.first_admitted + timeout_s, FinishReason.RUNNING_TIMEOUT, request)

    def _finish_prefills(self) -> list[TrackedRequest]:
        """Requests whose prompt is fully planned decode next, or end with this pass. Returns those that end."""
        ending = []
        slots = self.memory.slots
        for chunk in self.admission.chunks.values():
            if not chunk.is_last:
                continue
            request = chunk.request
            self.running.finish_prefill(request)
            if not request.prefill_only:
                slots.remaining[chunk.slot] -= 1
                if slots.remaining[chunk.slot]:
                    self.running.start_decoding(request)
                    continue
            ending.append(request)
        return ending

    # ------------------------------------------------------------------ retraction

    def retract(self, request_id: str, now: float, beneficiary: str) -> None:
        """Retracts a running request, as `plan` does when memory is short; for tests that force it."""
        self._retract(self.requests[request_id], Now(self.step, now), beneficiary)

    def _retract_one(self, now: Now, beneficiary: str) -> bool:
        for_foreground = not self.memory.slots.is_background[self.running.slots].all()
        victim = choose_victim(self.running.slots, self.memory, for_foreground=for_foreground)
        if victim is None:
            return False
        self._retract(victim, now, beneficiary, for_foreground=for_foreground)
        self._lengths.on_retraction()
        return True

    def _retract(self, request: TrackedRequest, now: Now, beneficiary: str, *, for_foreground: bool = False) -> None:
        """Moves a running request back to the queue because memory is short. Its KV stays in the tree until the pages
        are needed."""
        if not (for_foreground and request.background):
            request.retractions += 1
        self.counters.retractions += 1
        request.num_in_flight = sum(request in one.sampled for one in self._in_flight)
        self._note_unproven(request)
        self._requeue(request, now, beneficiary, "memory", request.num_tokens)

    def _requeue(
        self, request: TrackedRequest, now: Now, beneficiary: str, wait_reason: str, num_known: int = 0
    ) -> None:
        """Moves a request that was admitted back to the queue. Its private pages become cached as far as they are of
        its first `num_known` tokens, and are freed from there on."""
        num_pages = 0 if request.slot is None else self._release(request, num_known, now)
        self.policy.on_served(request, self._service_time.served(request))
        self._departures += 1
        request.enter(Phase.WAITING)
        request.wait_reason = wait_reason
        self.journal.write(now, EventKind.RETRACT, request.id, beneficiary, num_pages)
        self.admission.enqueue_retracted(request)

    def _retract_for(self, request: TrackedRequest, now: Now) -> int:
        """Retracts running requests of background tenants for a waiting one of another tenant, or those of much lower
        priority, if that lets it run. Prompts, too: none of them has a chunk in the pass being planned yet. Returns the
        pages that the request lacks, if nothing was retracted and they were counted, else 0."""
        admission, is_foreground = self.admission, not request.background
        below = self._below(request)
        if not len(below.rows) or not admission.can_move:
            return 0
        missing = admission.num_missing_without(request, NOBODY, now)
        if not missing:
            return 0
        if admission.num_missing_without(request, below, now):
            return missing
        rows = below.rows
        in_order = victims(rows, self.memory, for_foreground=is_foreground)
        while len(rows) and missing:
            if not admission.can_move:
                admission.reserve(request, now)  # the next step retracts the others
                break
            candidates = admission.retractable_for(request, rows)
            if candidates is rows:
                victim = next(in_order, None)
            else:
                victim = choose_victim(candidates, self.memory, for_foreground=is_foreground)
            assert victim is not None, "protected requests are not among the candidates"
            assert victim not in admission.chunks, f"request {victim.id} is retracted with a chunk in this pass"
            rows = rows[rows != victim.slot]
            beneficiary = f"request {request.id} of priority {request.priority}"
            # As long as the victims cannot have had what is missing, it need not be counted again.
            missing = max(0, missing - admission.num_pages_at_end(victim))
            self._retract(victim, now, beneficiary, for_foreground=is_foreground)
            missing = missing or admission.num_missing_without(request, NOBODY, now)
        return 0

    def _below(self, request: TrackedRequest) -> Leaving:
        """Running requests that give way to a waiting one. Those of one priority are the same ones for all that wait,
        as long as nobody starts or leaves."""
        gap = self.config.retract_gap if self.config.policy == "priority" else math.inf
        if not (self.config.background_tenants or self.admission.may_give_way(request.priority - gap)):
            return NOBODY
        slots, rows = self.memory.slots, self.running.slots
        if self._below_of is not rows:
            self._below_of = rows
            self._below_by_rank.clear()
        is_foreground = not request.background
        rank = (is_foreground, request.priority)
        found = self._below_by_rank.get(rank)
        if found is None:
            is_background = slots.is_background[rows]
            gives_way = (slots.priority[rows] <= request.priority - gap) & ~slots.is_protected[rows]
            gives_way = (is_background | gives_way) if is_foreground else (is_background & gives_way)
            found = self._below_by_rank[rank] = self.admission.leaving(rows[gives_way])
        return found

    # ------------------------------------------------------------------ commit

    def commit(
        self,
        plan: Plan,
        tokens: Column,
        now: float,
        device_s: float,
        counts: Column | None = None,
        num_drafts: Column | None = None,
    ) -> Updates:
        """Takes the tokens of a pass. Passes are committed in the order they were planned, each exactly once.

        `device_s` is how long the device ran: requests age by it, and predictions learn from it. `tokens` has one token
        per sampling row, or `counts[i]` tokens for row i, concatenated. `num_drafts[i]` drafts of row i were verified.
        """
        assert self._in_flight, "there is no pass to commit"
        one = self._in_flight.popleft()
        assert one.plan.step == plan.step, "passes are committed in the order they were planned"
        at = Now(self.step, now)
        self.counters.device_s += device_s / self.config.num_stages  # of each stage, on average
        self._observe_time(plan, one.requests, device_s)
        self._service_time.observe(plan, one.requests, device_s)
        self.mixed_batches.observe(plan, device_s)
        sampled = one.sampled
        if one.read:
            # Prefill rows come last and yield one token each.
            for node, token in zip(one.read, tokens[len(tokens) - len(one.read) :].tolist(), strict=True):
                if token >= 0:
                    self.memory.tree.prove(node, plan.step)
        if counts is not None:
            assert len(counts) == len(sampled), f"{len(counts)} counts for {len(sampled)} sampling rows"
            self._advance_by(one, counts)
            if num_drafts is not None:
                self.counters.drafted_tokens += int(num_drafts.sum())  # with those accepted, before anybody looks
            sampled = tuple(itertools.chain.from_iterable(map(itertools.repeat, sampled, counts.tolist())))
        assert len(tokens) == len(sampled), f"{len(tokens)} tokens for {len(sampled)} sampling rows"
        values: list[int] = tokens.tolist()
        discarded: set[int] = set()
        failed: list[TrackedRequest] = []
        lengths = [] if num_drafts is None else [len(request.output) for request in one.sampled]
        if self._departures == one.departures and counts is None and min(values, default=0) >= 0:
            # The usual case: no request has left since this pass was planned, so every row gets its token.
            for request, token in zip(sampled, values, strict=True):
                request.output.append(token)
            if self._stop_ids and not self._stop_ids.keys().isdisjoint(values):
                for request, token in zip(sampled, values, strict=True):
                    if self._stops(request, token):
                        self._finish(request, FinishReason.STOP, at)
        else:
            for request in one.sampled:
                if request.phase is Phase.WAITING and request not in one.void:  # it was retracted meanwhile
                    request.num_in_flight -= 1
            discarded, failed = self._append_each(sampled, values, counts is not None, one.void, at)
        if num_drafts is not None:
            self._count_drafts(one, num_drafts, lengths)
        first = plan.num_decodes if counts is None else 0
        for row, request in enumerate(sampled[first:], first):
            if request.first_token is None and row not in discarded:
                request.first_token = now
        for request in one.ending:
            if not request.is_finished and request not in one.void and request not in failed:
                self._finish(request, FinishReason.LENGTH, at)
        if failed:
            self._fail(failed, one.released, at)
        return self._updates(sampled, tokens, discarded)

    def _observe_time(self, plan: Plan, requests: Sequence[TrackedRequest], device_s: float) -> None:
        depth = 0 if plan.drafts is None else int(plan.drafts.max(initial=0))
        if self.draft_depth is None or not depth:
            self.step_time.observe(plan, device_s)
        model = self.step_time.model() if self.draft_depth is not None else None
        if self.draft_depth is not None and model is not None and plan.num_decodes == plan.num_rows:
            self.draft_depth.observe_pass(plan, requests, depth, device_s, model)

    def _append_each(
        self,
        sampled: tuple[TrackedRequest, ...],
        tokens: list[int],
        has_counts: bool,
        void: set[TrackedRequest],
        now: Now,
    ) -> tuple[set[int], list[TrackedRequest]]:
        """Appends each token to its request, if that can still take it. Returns the rows of discarded tokens, and the
        requests whose logits contained NaN."""
        discarded: set[int] = set()
        failed: list[TrackedRequest] = []
        for row, (request, token) in enumerate(zip(sampled, tokens, strict=True)):
            # It finished while this pass was in flight, or earlier in this pass.
            if request.phase is Phase.FINISHED or request in void or request in failed:
                discarded.add(row)
                continue
            if token < 0:  # NO_TOKEN
                discarded.add(row)
                failed.append(request)
                continue
            if request.phase is Phase.WAITING:
                self._keep_late_token(request, token)
            else:
                request.output.append(token)
            if self._stops(request, token):
                self._finish(request, FinishReason.STOP, now)
            elif has_counts and len(request.output) >= request.max_tokens:
                self._finish(request, FinishReason.LENGTH, now)
        return discarded, failed

    def _note_unproven(self, request: TrackedRequest) -> None:
        """A request is about to release its KV, perhaps with a pass in flight that reads it."""
        depth = self.memory.num_proven(request)
        if depth is not None:
            for one in self._in_flight:
                one.released[request] = depth

    def _fail(self, failed: list[TrackedRequest], released: dict[TrackedRequest, int], now: Now) -> None:
        """Ends requests whose logits contained NaN, and drops the KV that may contain it.

        A sampled token proves that all KV it read is free of NaN, so that KV stays: a prompt that always gives NaN
        cannot flush a prefix from which others sample. On the path of a failed request everything goes from the first
        node without that proof, and those who read it without having computed it are computed again instead of failing:
        one faulty pass fails only requests that it computed. A request is computed again at most MAX_RECOMPUTATIONS
        times: then the KV that it holds stays until its own token decides, so nobody can make it start over for ever.
        """
        suspects: dict[Node, list[TrackedRequest]] = {}  # none is below another, which would be the first on that path
        for request in failed:
            node = self.memory.first_unproven(request)
            if node is not None:
                suspects.setdefault(node, []).append(request)
            others_computed = request in released if node is None else node.unproven != request.number
            if not others_computed or request.recomputations >= MAX_RECOMPUTATIONS:
                self._end_failed(request, now)
            elif node is None:
                self._recompute(request, released[request], now)
        for node, suspected_by in suspects.items():
            readers = [request for request in suspected_by if not request.is_finished]
            recomputed = list(dict.fromkeys([*self.memory.holders(node), *readers]))
            if any(request.recomputations >= MAX_RECOMPUTATIONS for request in recomputed):
                for request in readers:
                    self._end_failed(request, now)
                continue
            for request in recomputed:
                self._recompute(request, node.start, now)
            for pin in self.memory.pins_below(node):
                self.unpin(pin.name, now.time)
            num_pages = self.memory.drop(node)
            self.counters.nan_dropped_pages += num_pages
            self.journal.write(now, EventKind.DROP, suspected_by[0].id, num_pages, len(recomputed))
        self.admission.end_step()  # requeued requests are candidates in the next step

    def _end_failed(self, request: TrackedRequest, now: Now) -> None:
        if request.slot is not None:
            self._release(request, 0, now)
        self._finish(request, FinishReason.ERROR, now)

    def _recompute(self, request: TrackedRequest, num_valid: int, now: Now) -> None:
        """Requeues a request that has read KV which is dropped, from position `num_valid` on. Its known tokens remain;
        what passes in flight compute for it is not valid."""
        request.recomputations += 1
        self.counters.nan_recomputations += 1
        for one in self._in_flight:
            one.void.add(request)
        request.num_in_flight = 0
        request.num_cached = min(request.num_cached, num_valid)
        request.num_fetched = min(request.num_fetched, request.num_cached)
        if request.phase is not Phase.WAITING:  # it may have been retracted while this pass was in flight
            reason = "KV that may contain NaN"
            self._requeue(request, now, reason, f"its turn: it had read {reason} and is computed again")

    @staticmethod
    def _stops(request: TrackedRequest, token: int) -> bool:
        return token in request.stop_ids and len(request.output) >= request.params.min_tokens

    def _keep_late_token(self, request: TrackedRequest, token: int) -> None:
        """Keeps a token that was in flight when its request was retracted; it is prefilled with the rest."""
        self.admission.dequeue(request)
        request.output.append(token)
        self.admission.enqueue(request)

    def _count_drafts(self, one: _PassInFlight, num_drafts: Column, lengths: Sequence[int]) -> None:
        """Counts the drafts of requests that took tokens of this pass; before it their outputs had these `lengths`."""
        planned = self._planned_drafts(one).tolist()
        for request, num, most, length in zip(one.sampled, num_drafts.tolist(), planned, lengths, strict=True):
            num_tokens = len(request.output) - length
            assert num_tokens <= 1 + num, f"request {request.id} got {num_tokens} tokens with {num} drafts"
            if num and num_tokens:
                request.num_drafted += num
                request.num_accepted += num_tokens - 1
            if most and num_tokens and self.draft_depth is not None:
                self.draft_depth.observe_drafts(request, num, num_tokens - 1)

    @staticmethod
    def _planned_drafts(one: _PassInFlight) -> Column:
        """By sampling row: how many drafts it may have."""
        drafts = np.zeros(len(one.sampled), np.int32)
        if one.plan.drafts is not None:
            drafts[: one.plan.num_decodes] = one.plan.drafts
        return drafts

    def _advance_by(self, one: _PassInFlight, counts: Column) -> None:
        """Settles how far the rows of a pass with drafts got: planning has counted one token for each of them."""
        slots, drafts = self.memory.slots, self._planned_drafts(one)
        assert ((counts >= 0) & (counts <= 1 + drafts)).all(), "a row yields at most one token and its drafts"
        for request, count, num_drafts in zip(one.sampled, counts.tolist(), drafts.tolist(), strict=True):
            more = max(0, count - 1)
            self.counters.decoded_tokens += more
            self.counters.accepted_tokens += more
            self.policy.charge(request.tenant, more * self.config.output_weight)
            if request.slot is None or request in one.void:
                continue
            slot = request.slot
            slots.ahead[slot] -= num_drafts
            slots.computed[slot] += more
            remaining = int(slots.remaining[slot])
            slots.remaining[slot] = remaining - more
            if 0 < remaining <= more:
                # It ends with the next pass, which is in flight, if not with this one.
                self.running.stop_decoding(request)
                for later in self._in_flight:
                    if request in later.sampled:
                        later.ending.append(request)

    def _updates(self, sampled: Sequence[TrackedRequest], tokens: Column, discarded: set[int]) -> Updates:
        if discarded:
            self.counters.discarded_tokens += len(discarded)
            kept = [row for row in range(len(sampled)) if row not in discarded]
            sampled = [sampled[row] for row in kept]
            tokens = tokens[kept]
        ended, self._ended = self._ended, []
        return Updates(tuple(sampled), tokens, tuple(ended), frozenset(discarded))

    def take_ended(self) -> tuple[Finished, ...]:
        """Requests that ended outside of a commit since the last one: by abort, deadline, `add` or `finish`."""
        ended, self._ended = self._ended, []
        return tuple(ended)

    # ------------------------------------------------------------------ cache operations

    def pin(
        self,
        name: str,
        prompt: Sequence[int],
        now: float,
        *,
        expires: float = math.inf,
        tenant: str = "default",
        cache_salt: str = "",
        adapter: str = "",
    ) -> int:
        """Keeps the cached part of a prompt from eviction until `expires`. Returns its number of tokens."""
        if expires <= now:
            raise PinError(f"pin {name!r} expires at {expires}, but the time is {now}: give a later time.")
        probe = Request(name, as_tokens(prompt), tenant=tenant, cache_salt=cache_salt, adapter=adapter)
        num_tokens = self.memory.pin(name, TrackedRequest(probe), expires, self.step)
        self.journal.write(Now(self.step, now), EventKind.PIN, name, num_tokens)
        return num_tokens

    def unpin(self, name: str, now: float) -> None:
        self.memory.unpin(name)
        self.journal.write(Now(self.step, now), EventKind.UNPIN, name)

    def check_idle(self, now: float) -> list[str]:
        """Checks all invariants if nothing runs or waits. If one is violated, the state is reset: the cache is lost,
        but the process continues. Returns the violations."""
        host = self.memory.host
        if self.has_work or self.memory.holds or (host is not None and host.reserved):
            return []
        faults = find_faults(self)
        if faults:
            self._reset_state()
            self.counters.repairs += 1
            self.journal.write(Now(self.step, now), EventKind.REPAIR, "", *faults)
        return faults

    def forget_history(self) -> None:
        """Counts, learns and serves from now on as if nothing had run. Nothing may run or wait."""
        assert not self.has_work, "history is forgotten while nothing runs or waits"
        self.journal.clear()
        self._lengths = OutputLengths()
        self._reset_state()

    def listen(self, listener: KvListener) -> None:
        """Reports all cached pages to `listener`, and from now on every change. May be called again: the listener then
        hears of all cached pages once more."""
        if listener not in self._kv_listeners:
            self._kv_listeners.append(listener)  # also of the next tree, after a repair
        self.memory.tree.listen(listener)

    def num_missing_tokens(self, request: Request) -> int:
        """Tokens of a prompt that would have to be computed: they are cached neither on the device nor on the host."""
        return self.memory.num_missing_tokens(TrackedRequest(request))

    def reserve_received(self, name: str, request: Request) -> Reservation | None:
        """Reserves host memory for the part of a prompt that another engine computes, as transfer `name`; `request`
        itself is not added. None: there is nothing to send, or no space. The reservation lasts until `place_received`
        or `release_received`."""
        return self.memory.reserve(name, request, self.step)

    def place_received(self, name: str, now: float) -> int:
        """The pages of a transfer are there: they can be fetched from host memory. Returns how many were not cached by
        other means meanwhile."""
        host = self.memory.host
        assert host is not None, "pages are received in host memory"
        request = host.reserved[name].request
        num_pages = host.place(name)
        self.journal.write(Now(self.step, now), EventKind.RECEIVE, request.id, num_pages)
        return num_pages

    def release_received(self, name: str) -> None:
        """The pages of a transfer never came, and nothing writes them any more."""
        assert self.memory.host is not None, "pages are received in host memory"
        self.memory.host.release(name)

    def hold_new_requests(self, hold: bool) -> None:
        """While held, requests that were never admitted wait, whatever memory there is."""
        self.admission.holds_new = hold

    def drop_kv(self, now: float) -> int:
        """Drops all KV: it was computed with other weights. Running requests are requeued with their tokens and
        computed again, pins are removed. No pass may be in flight. Returns the pages freed."""
        assert not self._in_flight, "a pass in flight writes KV"
        at = Now(self.step, now)
        for request in self.running.requests:
            self._requeue(request, at, "new weights", "its turn: its KV is computed again with new weights")
        for request in self.started:
            request.num_cached = request.num_fetched = 0
        for name in list(self.memory.pins):
            self.unpin(name, now)
        count = self.memory.clear(self.step)
        self.admission.end_step()  # requeued requests are candidates in the next step
        return count

    def num_adapter_requests(self, adapter: str) -> int:
        """Requests with this adapter that have not finished."""
        return self._adapters[adapter]

    def forget_adapter(self, adapter: str) -> None:
        """The adapter is unloaded, and no request uses it. KV computed with it stays until it is evicted."""
        self.memory.adapters.forget(adapter)

    def flush_cache(self) -> int:
        """Drops every cached prefix that no running request uses. Returns the pages freed."""
        return self.memory.flush(self.step)
