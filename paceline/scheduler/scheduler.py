"""The scheduler: add, abort, plan, commit.

Before every forward pass it decides which requests run, on which pages, in which order. It is plain Python with no
clock and no device: the time is an argument, and what it decides is a Plan that somebody else carries out. The
one thing to know before changing it: a plan may be asked for while the one before is still in flight, so between
two calls the last sampled tokens of the running rows may be unknown here; what is planned (`slots.computed`,
`slots.remaining`) runs ahead of what is known (`request.output`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from paceline.config import SchedulerConfig
from paceline.request import FinishReason, InvalidRequest, Phase, Refused, Request, as_tokens
from paceline.scheduler.acceptance import accept
from paceline.scheduler.admission import LEAST_CHUNK, Admission
from paceline.scheduler.budget import Ints, OutputLengths
from paceline.scheduler.explain import explain
from paceline.scheduler.invariants import find_faults
from paceline.scheduler.journal import Counters, EventKind, Journal
from paceline.scheduler.memory import Memory, PinError
from paceline.scheduler.plan import NO_TOKENS, Column, Finished, Plan, Sharing, Updates
from paceline.scheduler.policy import make_order
from paceline.scheduler.retraction import choose_victim, is_protected
from paceline.scheduler.sharing import find_sharing
from paceline.scheduler.step_time import StepTimeFit

MAX_IN_FLIGHT = 2  # passes planned and not committed


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A plan that is not committed yet, with what only the scheduler needs of it."""

    plan: Plan
    requests: tuple[Request, ...]  # of the plan's rows
    sampled: tuple[Request, ...]  # of its sampling rows: they get the tokens
    ending: tuple[Request, ...]  # known to end with this pass, by length
    departures: int  # how many had left when it was planned


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.journal = Journal(config.journal_events)
        self.step_time = StepTimeFit()
        self._lengths = OutputLengths()
        self._reset_state()
        self.requests: dict[str, Request] = {}  # accepted and not finished
        self._arrivals = 0
        self._departures = 0  # finished or retracted: rows in flight may belong to nobody any more
        self._passes: deque[_Pass] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._stop_ids: Counter[int] = (
            Counter()
        )  # of all live requests: most tokens are looked up here and nowhere else
        self._ended: list[Finished] = []  # outside of a commit: reported with the next one
        # What a steady decode step would otherwise build again each time
        self._decode_slots: Column | None = None
        self._sharing: Sharing | None = None  # of the decodes alone
        self._sharing_is_known = False
        self._sharing_version = 0
        self._ones: Column = np.ones(config.max_running, np.int32)
        self._trues: npt.NDArray[np.bool_] = np.ones(config.max_running, np.bool_)
        self._ones.flags.writeable = self._trues.flags.writeable = False
        self._decodes_of: Counter[str] = Counter()  # tenant -> rows

    def _reset_state(self, step: int = 1) -> None:
        """Empty memory and queues. Passes go on being numbered from `step`."""
        self.memory = Memory(self.config, self.journal)
        self.memory.tree.step = step
        self.order = make_order(self.memory.tree, self.config)
        self.admission = Admission(self.config, self.memory, self.order, self._lengths, self.journal)

    # ------------------------------------------------------------------ asking

    @property
    def counters(self) -> Counters:
        return self.journal.counters

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.admission.decoding) + len(self.admission.prefilling)

    @property
    def num_in_flight(self) -> int:
        return len(self._passes)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._passes)

    def requests_of(self, plan: Plan) -> tuple[Request, ...]:
        """The requests of a plan's rows, in row order; of a plan that is not committed yet."""
        return next(one.requests for one in self._passes if one.plan.step == plan.step)

    def match(self, request: Request) -> int:
        """How many tokens of this prompt are cached now."""
        namespace = request.namespace
        usable = self.memory.num_cacheable_pages(request) * self.config.page_size
        return min(usable, self.memory.tree.match(namespace, request.prompt.tobytes()))

    def expected_remaining(self, generated: Ints, most: Ints) -> Ints:
        """Further tokens of requests that have `generated` so far and can have `most` more, as the last ones went."""
        return self._lengths.expected_remaining(generated, most)

    def explain(self, request_id: str) -> str:
        """In a sentence: what this request is doing, and what would have to happen for it to go on."""
        return explain(self, request_id)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request, now: float) -> None:
        """Takes a request. Raises Refused if it can never run or the queue is full; nothing else changes then."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is taken by one that has not finished: choose another.")
        if request.phase is not Phase.WAITING or request.number:
            raise InvalidRequest(f"request {request.id!r} was added before: make a new Request.")
        try:
            request.max_tokens = accept(request, self.config, self.memory, self.admission)
        except Refused as refusal:
            self.counters.refused += 1
            self.journal.write(now, self.memory.tree.step, EventKind.REFUSE, request.id, str(refusal))
            raise
        self._arrivals += 1
        request.number = self._arrivals
        request.arrival = now
        request.stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            request.stop_ids |= frozenset(request.eos_token_ids)
        self.requests[request.id] = request
        self._stop_ids.update(request.stop_ids)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.number, request))
        self.counters.added += 1
        self.journal.write(
            now, self.memory.tree.step, EventKind.ADD, request.id, len(request.prompt), request.max_tokens
        )
        self.admission.enqueue(request)

    def abort(self, request_id: str, now: float) -> bool:
        """Ends a request in whatever state it is. Whether there was one with exactly this id."""
        return self.finish(request_id, FinishReason.ABORT, now)

    def finish(self, request_id: str, reason: FinishReason, now: float) -> bool:
        """Ends a request for a reason found outside: a stop string was seen, the client has gone."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, now)
        return True

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        if request.phase is Phase.WAITING:
            self.admission.dequeue(request)
        elif request.slot is not None:
            # The KV of the last known token is not computed yet, or by a pass in flight whose row is discarded:
            # either way it is not cached.
            self._leave(request, request.num_tokens - 1)
        self._departures += 1
        request.enter(Phase.FINISHED)
        request.finish_reason = reason
        request.finished = now
        del self.requests[request.id]
        self._stop_ids.subtract(request.stop_ids)
        for token in request.stop_ids:
            if not self._stop_ids[token]:
                del self._stop_ids[token]
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.ends_by_length:
            self._lengths.record(len(request.output))
        self.counters.finished[reason] += 1
        self.journal.write(now, self.memory.tree.step, EventKind.FINISH, request.id, reason, len(request.output))
        self._ended.append(Finished(request, reason))

    def _leave(self, request: Request, num_known: int) -> int:
        """Takes slot and memory of a running request; what is computed of its first `num_known` tokens stays cached."""
        assert request.slot is not None, f"request {request.id} holds no slot"
        admission = self.admission
        if request in admission.prefilling:
            admission.prefilling.remove(request)
        elif request in admission.decoding:
            self._stop_decoding(request)
        num_valid = min(int(self.memory.slots.computed[request.slot]), num_known)
        num_pages = self.memory.release(request, num_valid)
        self.order.running_ended(request)
        return num_pages

    # ------------------------------------------------------------------ plan

    def plan(self, now: float) -> Plan | None:
        """The next forward pass, or None: there is nothing to do, or the pass in flight must be committed first."""
        assert len(self._passes) < MAX_IN_FLIGHT, "commit the older pass before planning another"
        if self._passes and self.config.draft_tokens:
            return None  # how far its rows got is known only when it is committed
        memory, admission = self.memory, self.admission
        memory.now = now
        self._expire(now)
        self._release_ending()
        if memory.settle_duplicates():
            self._sharing_is_known = False
        admission.begin()
        may_admit = self.config.batching != "static" or not self.num_running
        prefill_first = self.config.batching == "prefill-first"
        if not prefill_first:
            self._make_room(now)
        self._fill(may_admit, now)
        if prefill_first and not admission.chunks:
            self._make_room(now)
        while not admission.chunks and not admission.decoding and admission.prefilling and not self._passes:
            # Prompts fill all memory and none can go on: one has to leave.
            if not self._retract_one(now, "a prompt that cannot go on"):
                break
            self._fill(False, now)
        decode = bool(admission.decoding) and not (prefill_first and admission.chunks)
        plan = self._build(decode) if decode or admission.chunks else None
        admission.end()
        if plan is not None:
            memory.tree.step += 1
            self.counters.steps += 1
            self._lengths.step_went_well()
        return plan

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].is_finished):
            request = heappop(deadlines)[2]
            if not request.is_finished:
                self._finish(request, FinishReason.DEADLINE, now)
        if len(deadlines) > 64 + 2 * len(self.requests):  # mostly of requests that ended long before
            self._deadlines = [entry for entry in deadlines if not entry[2].is_finished]
            heapify(self._deadlines)
        for pin in [pin for pin in self.memory.pins.values() if pin.expires <= now]:
            self.unpin(pin.name, now)

    def _release_ending(self) -> None:
        """Requests that end by length with a pass in flight need nothing after it: later passes run later, so slot
        and pages can serve this very plan. Their last token finds them without a slot."""
        for one in self._passes:
            for request in one.ending:
                if request.slot is not None:
                    self._leave(request, request.num_tokens)

    def _make_room(self, now: float) -> None:
        """A place for the next token of every decoding request; short of it, somebody leaves."""
        memory, slots, draft = self.memory, self.memory.slots, self.config.draft_tokens
        while True:
            rows = self._decoding_slots()
            reach = slots.computed[rows]
            if draft:
                reach = np.minimum(reach + draft, slots.limits[rows] - 1)
            needy = rows[reach >= slots.covered[rows]]
            if not len(needy):
                return
            if len(needy) <= memory.num_available_pages:
                memory.cover_each(needy)  # and look again: a draft may reach over several pages
            elif not self._retract_one(now, f"{len(needy)} decoding requests"):
                # Nobody may be taken: the newest row that has no place gives its slot up for now.
                homeless = set(needy.tolist())
                juniors = [request for request in self.admission.decoding if request.slot in homeless]
                self._retract(max(juniors, key=lambda request: request.seniority), now, "older requests")

    def _fill(self, may_admit: bool, now: float) -> None:
        budget = self.admission.continue_prefills(self._prefill_budget())
        if may_admit and self.num_waiting:
            if self.config.policy == "priority" and not math.isinf(self.config.retract_gap):
                self._retract_for_priority(now)
            self.admission.admit_waiting(budget, now)

    def _prefill_budget(self) -> int:
        config, decoding = self.config, self.admission.decoding
        num_decodes = 0 if config.batching == "prefill-first" else len(decoding)
        decode_tokens = num_decodes * (1 + config.draft_tokens)
        budget = min(config.max_prefill_tokens, config.max_batch_tokens - decode_tokens)
        model = self.step_time.model() if config.itl_target is not None and num_decodes else None
        if model is not None and config.itl_target is not None:
            context = int(self.memory.slots.computed[self._decoding_slots()].sum()) + num_decodes
            within = model.prefill_tokens_within(config.itl_target, num_decodes, context)
            if within is not None:
                budget = min(budget, max(within, LEAST_CHUNK))
        return budget

    def _decoding_slots(self) -> Column:
        if self._decode_slots is None:
            self._decode_slots = np.array([request.slot for request in self.admission.decoding], np.int32)
            self._decode_slots.flags.writeable = False  # plans keep it
        return self._decode_slots

    def _start_decoding(self, request: Request) -> None:
        request.enter(Phase.DECODING)
        self.admission.decoding.append(request)
        self._decodes_of[request.tenant] += 1
        self._decode_slots, self._sharing_is_known = None, False

    def _stop_decoding(self, request: Request) -> None:
        self.admission.decoding.remove(request)
        self._decodes_of[request.tenant] -= 1
        if not self._decodes_of[request.tenant]:
            del self._decodes_of[request.tenant]
        self._decode_slots, self._sharing_is_known = None, False

    def _build(self, decode: bool) -> Plan:
        slots, chunks = self.memory.slots, self.admission.chunks
        rows: Column = self._decoding_slots() if decode else NO_TOKENS
        requests = sampled = tuple(self.admission.decoding) if decode else ()
        num_decodes = len(requests)
        starts = slots.computed[rows]
        slots.computed[rows] = starts + 1
        remaining = slots.remaining[rows] - 1
        slots.remaining[rows] = remaining
        ending = [requests[row] for row in np.flatnonzero(remaining == 0).tolist()] if not remaining.all() else []
        num_context = int(starts.sum()) + num_decodes
        lengths, samples = self._ones[:num_decodes], self._trues[:num_decodes]
        max_lengths = slots.limits[rows]
        if decode:
            for tenant, count in self._decodes_of.items():
                self.order.charge(tenant, count * self.config.output_weight)
        self.counters.decoded_tokens += num_decodes
        if chunks:
            yields = [chunk.is_last and not chunk.request.prefill_only for chunk in chunks]
            rows = np.concatenate([rows, np.array([chunk.slot for chunk in chunks], np.int32)])
            starts = np.concatenate([starts, np.array([chunk.start for chunk in chunks], np.int32)])
            lengths = np.concatenate([lengths, np.array([chunk.length for chunk in chunks], np.int32)])
            max_lengths = slots.limits[rows]
            samples = np.concatenate([samples, np.array(yields, np.bool_)])
            num_context += sum(chunk.start + chunk.length for chunk in chunks)
            requests += tuple(chunk.request for chunk in chunks)
            sampled += tuple(chunk.request for chunk, one in zip(chunks, yields, strict=True) if one)
            ending += self._finish_prefills()
        sharing = self._find_sharing(requests, starts, bool(chunks))
        for request in ending:
            if request.phase is Phase.DECODING:
                self._stop_decoding(request)
        page_slots, page_indices, page_ids = slots.take_changes()
        plan = Plan(
            step=self.memory.tree.step,
            slots=rows,
            starts=starts,
            lengths=lengths,
            max_lengths=max_lengths,
            samples=samples,
            num_decodes=num_decodes,
            joins=self.admission.take_joins(),
            page_slots=page_slots,
            page_indices=page_indices,
            page_ids=page_ids,
            num_tokens=num_decodes + sum(chunk.length for chunk in chunks),
            num_context_tokens=num_context,
            sharing=sharing,
            swap=None if self.memory.host is None else self.memory.host.take_swap(),
        )
        self._passes.append(_Pass(plan, requests, sampled, tuple(ending), self._departures))
        return plan

    def _find_sharing(self, requests: tuple[Request, ...], starts: Column, with_prompts: bool) -> Sharing | None:
        if not self.config.shared_reads:
            return None
        if not with_prompts and self._sharing_is_known:
            return self._sharing
        self._sharing_version += 1
        sharing = find_sharing(requests, starts, self._sharing_version)
        if not with_prompts:
            self._sharing, self._sharing_is_known = sharing, True
        return sharing

    def _finish_prefills(self) -> list[Request]:
        """Requests whose prompt is all planned go on to decode, or end here. Returns those that end."""
        ending = []
        slots = self.memory.slots
        for chunk in self.admission.chunks:
            if not chunk.is_last:
                continue
            request = chunk.request
            self.admission.prefilling.remove(request)
            if not request.prefill_only:
                slots.remaining[chunk.slot] -= 1
                if slots.remaining[chunk.slot]:
                    self._start_decoding(request)
                    continue
            ending.append(request)
        return ending

    # ------------------------------------------------------------------ retraction

    def _retract_one(self, now: float, beneficiary: str) -> bool:
        victim = choose_victim(self.admission.running, self.memory.slots, self.config.page_size)
        if victim is None:
            return False
        self._retract(victim, now, beneficiary)
        return True

    def _retract(self, request: Request, now: float, beneficiary: str) -> None:
        """Back to the queue. Its tokens are kept, its KV stays in the tree until the room is really needed."""
        request.num_in_flight = sum(request in one.sampled for one in self._passes)
        num_pages = self._leave(request, request.num_tokens)
        self._departures += 1
        request.retractions += 1
        request.enter(Phase.WAITING)
        request.waits_for = "memory: it was retracted"
        self._lengths.had_to_retract()
        self.counters.retractions += 1
        self.journal.write(now, self.memory.tree.step, EventKind.RETRACT, request.id, beneficiary, num_pages)
        self.admission.enqueue_retracted(request)

    def _retract_for_priority(self, now: float) -> None:
        """Makes room for the best waiting request at the cost of running ones of much lower priority."""
        admission, gap = self.admission, self.config.retract_gap
        request = admission.candidate(now)
        if request is None:
            return
        planned = {chunk.request.id for chunk in admission.chunks}
        below = [
            running
            for running in admission.running
            if running.priority <= request.priority - gap and not is_protected(running) and running.id not in planned
        ]
        if not below or not admission.would_fit_without(request, below):
            return  # their leaving would not help
        while below and not admission.would_fit_without(request, []):
            victim = choose_victim(below, self.memory.slots, self.config.page_size)
            assert victim is not None, "those who are protected are not among them"
            below.remove(victim)
            self._retract(victim, now, f"request {request.id} of priority {request.priority}")

    # ------------------------------------------------------------------ commit

    def commit(
        self,
        plan: Plan,
        tokens: Column,
        now: float,
        device_s: float | None = None,
        counts: npt.NDArray[np.int32] | None = None,
    ) -> Updates:
        """Takes the tokens of a pass, in the order the passes were planned; each plan exactly once.

        One token for each sampling row, or `counts[i]` >= 1 of them for row i, laid end to end.
        """
        assert self._passes, "there is no pass to commit"
        one = self._passes.popleft()
        assert one.plan.step == plan.step, "passes are committed in the order they were planned"
        if device_s is not None:
            self.counters.device_s += device_s
            self.step_time.observe(plan, device_s)
        sampled = one.sampled
        if counts is not None:
            assert len(counts) == len(sampled), f"{len(counts)} counts for {len(sampled)} sampling rows"
            sampled, tokens = self._advance_by(sampled, tokens, counts)
        assert len(tokens) == len(sampled), f"{len(tokens)} tokens for {len(sampled)} sampling rows"
        values: list[int] = tokens.tolist()
        discarded: set[int] = set()
        if self._departures == one.departures and counts is None and min(values, default=0) >= 0:
            # The usual case: nobody has left since this pass was planned, so every row takes its token.
            for request, token in zip(sampled, values, strict=True):
                request.output.append(token)
            if self._stop_ids and not self._stop_ids.keys().isdisjoint(values):
                for request, token in zip(sampled, values, strict=True):
                    if self._stops(request, token):
                        self._finish(request, FinishReason.STOP, now)
        else:
            for row, (request, token) in enumerate(zip(sampled, values, strict=True)):
                if request.phase is Phase.FINISHED:  # while this pass was in flight, or earlier in this pass
                    discarded.add(row)
                    continue
                if token < 0:  # NO_TOKEN: there is nothing to go on with
                    discarded.add(row)
                    self._finish(request, FinishReason.ERROR, now)
                    continue
                if request.phase is Phase.WAITING:
                    self._keep_late_token(request, token)
                else:
                    request.output.append(token)
                if self._stops(request, token):
                    self._finish(request, FinishReason.STOP, now)
                elif counts is not None and len(request.output) >= request.max_tokens:
                    self._finish(request, FinishReason.LENGTH, now)
        for request in sampled[plan.num_decodes :] if counts is None else sampled:
            if request.first_token is None:
                request.first_token = now
        for request in one.ending:
            if not request.is_finished:
                self._finish(request, FinishReason.LENGTH, now)
        return self._updates(sampled, tokens, discarded)

    @staticmethod
    def _stops(request: Request, token: int) -> bool:
        return token in request.stop_ids and len(request.output) >= request.params.min_tokens

    def _keep_late_token(self, request: Request, token: int) -> None:
        """The token of a pass that was in flight when its request was retracted: kept, and prefilled with the rest."""
        self.admission.dequeue(request)
        request.num_in_flight -= 1
        request.output.append(token)
        self.admission.enqueue(request)

    def _advance_by(
        self, sampled: tuple[Request, ...], tokens: Column, counts: npt.NDArray[np.int32]
    ) -> tuple[tuple[Request, ...], Column]:
        """Several tokens a row: the pass has computed the KV of all but the last of each row's tokens."""
        most = 1 + self.config.draft_tokens
        assert ((counts >= 1) & (counts <= most)).all(), f"a row yields 1 to {most} tokens"
        repeated: list[Request] = []
        kept: list[int] = []
        offset = 0
        for request, count in zip(sampled, counts.tolist(), strict=True):
            taken = count
            if request.slot is not None:
                slots, slot = self.memory.slots, request.slot
                taken = min(count, int(slots.remaining[slot]) + 1)
                slots.computed[slot] += taken - 1
                slots.remaining[slot] -= taken - 1
            repeated += [request] * taken
            kept += range(offset, offset + taken)
            offset += count
        return tuple(repeated), tokens[np.array(kept, dtype=np.int64)]

    def _updates(self, sampled: Sequence[Request], tokens: Column, discarded: set[int]) -> Updates:
        if discarded:
            self.counters.discarded_tokens += len(discarded)
            kept = [row for row in range(len(sampled)) if row not in discarded]
            sampled = [sampled[row] for row in kept]
            tokens = tokens[kept]
        ended, self._ended = self._ended, []
        return Updates(tuple(sampled), tokens, tuple(ended), frozenset(discarded))

    def take_ended(self) -> tuple[Finished, ...]:
        """Requests that ended outside of a commit since the last one: by abort, deadline or from outside."""
        ended, self._ended = self._ended, []
        return tuple(ended)

    # ------------------------------------------------------------------ the cache, for operators

    def pin(self, name: str, prompt: Sequence[int], now: float, *, expires: float = math.inf, tenant: str = "default",
            cache_salt: str = "", adapter: str = "") -> int:  # fmt: skip
        """Keeps the cached part of a prompt from eviction until `expires`. Returns how many tokens that is."""
        if expires <= now:
            raise PinError(f"pin {name!r} expires at {expires}, and it is {now} already: give a later time.")
        probe = Request(name, as_tokens(prompt), tenant=tenant, cache_salt=cache_salt, adapter=adapter)
        num_tokens = self.memory.pin(name, probe, expires)
        self.journal.write(now, self.memory.tree.step, EventKind.PIN, name, num_tokens)
        return num_tokens

    def unpin(self, name: str, now: float) -> None:
        self.memory.unpin(name)
        self.journal.write(now, self.memory.tree.step, EventKind.UNPIN, name)

    def check_idle(self, now: float) -> list[str]:
        """When nothing runs or waits: counts everything again. What does not add up is reported and repaired, at the
        price of the cache; it never ends the process. Returns what was wrong."""
        if self.has_work:
            return []
        faults = find_faults(self)
        if faults:
            self._reset_state(self.memory.tree.step)
            self._decode_slots, self._sharing_is_known = None, False
            self._decodes_of.clear()
            self.counters.repairs += 1
            self.journal.write(now, self.memory.tree.step, EventKind.REPAIR, "", *faults)
        return faults

    def flush_cache(self) -> int:
        """Forgets every cached prefix that no running request uses. Returns the pages that came free."""
        return self.memory.flush()
