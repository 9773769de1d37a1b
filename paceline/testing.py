"""Test support for the scheduler: an executor with a toy model, its reference implementation, and a driver.

The toy model behaves like the KV cache of a transformer. The KV of a position is a number that depends on its token,
its position and the sum of all KV before it, read through the page table; a token is sampled from that sum. A page
that is freed too early, read by the wrong row, cached under wrong tokens or never computed therefore changes every
later token, as in a real model, and a comparison with `reference_tokens` detects it. A pass can be made faulty, and
tokens can be declared bad: their KV is NaN, and so is everything computed from it. Where the key of a prompt token is
another number, the KV depends on both, as that of an image does on its placeholder and on what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.executor import Executor, Result
from paceline.engine.loop import Loop
from paceline.engine.virtual.executor import VirtualClock
from paceline.request import FinishReason, Request, Tokens
from paceline.scheduler import Plan, Scheduler, StepTime, Swap, Updates
from paceline.scheduler.invariants import check
from paceline.scheduler.plan import Finished
from paceline.scheduler.tracked_request import TrackedRequest

_MASK = (1 << 64) - 1
_NAN = _MASK  # as KV, and as a sum of KV
_NO_TOKEN = -1  # as executors report logits that contain NaN
_FLAT_TIME = StepTime(base=1e-3, per_prefill_token=1e-5, per_decode=1e-5, per_context_token=1e-8)


def _mix(value: int) -> int:
    """Scrambles 64 bits (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _seed(namespace: Iterable[str]) -> int:
    """The initial sum of KV: requests that must not share a cache have different KV for equal tokens."""
    name = "\0".join(namespace)
    return _mix(int.from_bytes(name.encode()[-8:].rjust(8), "little") ^ len(name))


def _kv(token: int, position: int, before: int) -> int:
    return _mix(before ^ _mix(token) ^ (position << 40))


def content_of(prompt: Tokens, keys: Tokens) -> list[int]:
    """What the KV of each prompt token depends on: for text the tokens."""
    pairs = zip(prompt.tolist(), keys.tolist(), strict=True)
    return [token if key == token else key << 32 | token for token, key in pairs]


def _sample(total: int, vocab: int) -> int:
    return _NO_TOKEN if total == _NAN else _mix(total ^ 0x5EED) % vocab


def reference_tokens(request: TrackedRequest, vocab: int) -> tuple[list[int], FinishReason]:
    """The expected output of `request`: the toy model alone, without pages, cache or scheduler.

    `request.max_tokens` must be set, as it is after `Scheduler.add`.
    """
    if request.prefill_only:
        return [], FinishReason.LENGTH
    stops = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        stops |= set(request.request.eos_token_ids)
    total, position, output = _seed(request.namespace), 0, []
    tokens = content_of(request.prompt, request.keys)
    while True:
        for token in tokens:
            total = (total + _kv(token, position, total)) & _MASK
            position += 1
        output.append(_sample(total, vocab))
        if output[-1] in stops and len(output) >= request.params.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens:
            return output, FinishReason.LENGTH
        tokens = output[-1:]


def reference_kv(request: TrackedRequest | Request, num_tokens: int) -> np.ndarray:
    """The KV of the first tokens of a prompt."""
    total, found = _seed(request.namespace), []
    for position, token in enumerate(content_of(request.prompt, request.keys)[:num_tokens]):
        found.append(_kv(token, position, total))
        total = (total + found[-1]) & _MASK
    return np.array(found, np.uint64)


@dataclass(slots=True)
class ScriptedPending:
    executor: ScriptedExecutor
    plan: Plan
    faulty_rows: Collection[int] = ()
    result: Result | None = None

    def wait(self) -> Result:
        result = self.executor._run_through(self)
        self.executor.clock.advance(result.device_s)
        return result


@dataclass
class ScriptedExecutor(Executor):
    """Executes plans on the toy model, in launch order.

    `lazy` runs each pass as late as possible, in `wait`: a plan that is modified after `launch` then computes something
    else. Of the drafts that a plan allows, a number that depends on the position is accepted. The KV of `bad_tokens` is
    NaN.
    """

    num_pages: int
    page_size: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    vocab: int = 64
    lazy: bool = False
    num_host_pages: int = 0
    step_time: StepTime = _FLAT_TIME
    bad_tokens: frozenset[int] = frozenset()
    plans: list[Plan] = field(default_factory=list)
    faulty_ids: set[str] = field(default_factory=set)  # requests for which a faulty pass computed NaN
    contents: dict[str, list[int]] = field(default_factory=dict)  # of prompts with keys that are not their tokens
    _fault: Callable[[int], bool] | None = None
    _memory: np.ndarray = field(init=False)
    _host: np.ndarray = field(init=False)  # [host pages, positions]
    _rows: dict[int, dict[int, int]] = field(default_factory=dict)  # slot -> index -> page
    _tokens: dict[int, list[int]] = field(default_factory=dict)
    _spaces: dict[int, tuple[tuple[str, ...], int | None]] = field(default_factory=dict)  # tenant, salt; adapter slot
    _adapters: dict[int, str] = field(default_factory=dict)  # by adapter slot
    _ids: dict[int, str] = field(default_factory=dict)
    _positions: dict[int, int] = field(default_factory=dict)  # of the next token to feed, by slot
    _queue: list[ScriptedPending] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Random contents: reading memory that was never written must change the output.
        size = self.num_pages + self.num_host_pages, self.page_size
        self._memory, self._host = np.split(
            np.random.default_rng(0).integers(0, 1 << 63, size, dtype=np.uint64), [self.num_pages]
        )
        self._memory = self._memory.reshape(-1)

    def scramble_kv(self) -> None:
        """Makes all KV wrong: whatever is read before it is computed again changes the output."""
        self._memory[:] = self._memory[::-1] ^ np.uint64(0x5EED)
        self._host[:] = self._host[::-1] ^ np.uint64(0x5EED)

    def inject_fault(self, is_faulty: Callable[[int], bool] = lambda row: True) -> None:
        """The next pass that is launched computes NaN in its rows, or in those for which `is_faulty` is true."""
        self._fault = is_faulty

    @classmethod
    def for_scheduler(
        cls, scheduler: Scheduler, *, clock: VirtualClock, lazy: bool, vocab: int, step_time: StepTime
    ) -> ScriptedExecutor:
        config = scheduler.config
        return cls(
            config.num_pages,
            config.page_size,
            num_host_pages=config.num_host_pages,
            clock=clock,
            lazy=lazy,
            vocab=vocab,
            step_time=step_time,
        )

    def launch(self, plan: Plan) -> ScriptedPending:
        fault, self._fault = self._fault, None
        pending = ScriptedPending(self, plan, [] if fault is None else list(filter(fault, range(plan.num_rows))))
        self._queue.append(pending)
        self.plans.append(plan)
        if not self.lazy:
            self._run_through(pending)
        return pending

    def _run_through(self, pending: ScriptedPending) -> Result:
        while pending.result is None:
            first = self._queue.pop(0)
            first.result = self._run(first.plan, first.faulty_rows)
        return pending.result

    def run_launched(self) -> None:
        """Runs everything that was launched."""
        if self._queue:
            self._run_through(self._queue[-1])

    def read_pages(self, pages: Collection[int]) -> np.ndarray:
        """The KV [pages, positions] of pages on the device, after everything launched."""
        self.run_launched()
        return self._memory.reshape(-1, self.page_size)[list(pages)]

    def write_host(self, pages: Collection[int], kv: np.ndarray) -> None:
        """Another engine writes host pages [pages, positions], after everything launched."""
        self.run_launched()
        self._host[list(pages)] = kv

    def _run(self, plan: Plan, faulty_rows: Collection[int]) -> Result:
        if plan.swap is not None:
            self._move(plan.swap)
        for load in plan.adapter_loads:
            self._adapters[load.slot] = load.adapter
        for join in plan.joins:
            self._tokens[join.slot] = join.tokens.tolist()
            self._spaces[join.slot] = (join.namespace[:2], join.adapter_slot)
            self._ids[join.slot] = join.request_id
        for slot, index, page in zip(*plan.page_changes[0], strict=True):
            self._rows.setdefault(int(slot), {})[int(index)] = int(page)
        sampled: list[list[int]] = []
        num_drafts: list[int] = []  # by sampling row
        for row in range(plan.num_rows):
            slot, start, length = int(plan.slots[row]), int(plan.starts[row]), int(plan.lengths[row])
            max_drafts = 0
            if plan.drafts is not None and row < plan.num_decodes:
                position, max_length = self._positions[slot], int(plan.max_lengths[row])
                assert position <= start, f"slot {slot} is at {position}, after the last possible position {start}"
                if position == max_length - 1:  # it has all its tokens
                    sampled.append([])
                    num_drafts.append(0)
                    continue
                start, max_drafts = position, min(int(plan.drafts[row]), max_length - 2 - position)
            is_faulty = row in faulty_rows
            if is_faulty:
                self.faulty_ids.add(self._ids[slot])
            total = self._feed(slot, start, length, is_faulty=is_faulty)
            if plan.samples[row]:
                tokens = [_sample(total, self.vocab)]
                self._put(slot, start + length, tokens[0])
                tokens += self._draft(max_drafts, slot, start + length)
                sampled.append(tokens)
                num_drafts.append(max_drafts)
                length += len(tokens) - 1
            self._positions[slot] = start + length
        flat = np.array([token for tokens in sampled for token in tokens], np.int32)
        if plan.drafts is None:
            return Result(flat, self.step_time.of(plan))
        counts = np.array([len(tokens) for tokens in sampled], np.int32)
        return Result(flat, self.step_time.of(plan), counts, np.array(num_drafts, np.int32))

    def _move(self, swap: Swap) -> None:
        pages = self._memory.reshape(-1, self.page_size)
        assert not set(swap.spill_hosts.tolist()) & set(swap.fetch_hosts.tolist()), "a host page is written and read"
        for written in (swap.spill_hosts, swap.fetch_pages):
            assert len(set(written.tolist())) == len(written), "a page is written twice"
        self._host[swap.spill_hosts] = pages[swap.spill_pages]
        pages[swap.fetch_pages] = self._host[swap.fetch_hosts]

    def _draft(self, max_drafts: int, slot: int, position: int) -> list[int]:
        """The tokens of accepted drafts."""
        tokens: list[int] = []
        for _ in range(position % (max_drafts + 1)):
            total = self._feed(slot, position, 1)
            position += 1
            tokens.append(_sample(total, self.vocab))
            self._put(slot, position, tokens[-1])
        return tokens

    def _put(self, slot: int, position: int, token: int) -> None:
        tokens = self._tokens[slot]
        del tokens[position:]
        assert len(tokens) == position, f"slot {slot} skips from position {len(tokens)} to {position}"
        tokens.append(max(token, 0))  # a row without a token continues with a valid id until the host knows

    def _feed(self, slot: int, start: int, length: int, *, is_faulty: bool = False) -> int:
        """Writes the KV of `length` tokens from `start`, and returns the sum over the row so far."""
        row, size = self._rows.get(slot, {}), self.page_size
        contents = self.contents.get(self._ids[slot], [])
        pages = np.array([row[index] for index in range(-(-(start + length) // size))], np.int64)
        places = (pages[:, None] * size + np.arange(size)).reshape(-1)[: start + length]
        read = self._memory[places[:start]]
        with np.errstate(over="ignore"):
            total = (self._seed_of(slot) + int(read.sum(dtype=np.uint64))) & _MASK
        if is_faulty or (read == _NAN).any():
            total = _NAN
        for position in range(start, start + length):
            token = self._tokens[slot][position]
            is_nan = total == _NAN or token in self.bad_tokens
            if position < len(contents):
                assert contents[position] & 0xFFFFFFFF == token, "an executor gets tokens, not keys"
                token = contents[position]
            value = _NAN if is_nan else _kv(token, position, total)
            self._memory[places[position]] = value
            total = _NAN if is_nan else (total + value) & _MASK
        return total

    def _seed_of(self, slot: int) -> int:
        """With the adapter that is in the request's slot now: another one there would change its tokens."""
        space, adapter_slot = self._spaces[slot]
        return _seed((*space, "" if adapter_slot is None else self._adapters[adapter_slot]))


class Harness:
    """Drives a scheduler on the toy model, step by step.

    Every step checks the invariants; `outputs` is what a client receives, assembled from the updates alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        overlap: bool = False,
        lazy: bool = False,
        vocab: int = 64,
        checked: bool = True,
        step_time: StepTime = _FLAT_TIME,
    ) -> None:
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.executor = ScriptedExecutor.for_scheduler(
            scheduler, clock=self.clock, lazy=lazy, vocab=vocab, step_time=step_time
        )
        self.loop = Loop(scheduler, self.executor, self.clock, overlap=overlap)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.requests: dict[str, TrackedRequest] = {}
        self.on_step: Callable[[Updates], None] | None = None
        self._check = check if checked else None

    def add(self, request: Request) -> TrackedRequest:
        added = self.requests[request.id] = self.scheduler.add(request, self.clock())
        self.outputs[request.id] = []
        if request.keys is not request.prompt:
            self.executor.contents[request.id] = content_of(request.prompt, request.keys)
        return added

    def add_all(self, *requests: Request) -> list[TrackedRequest]:
        return [self.add(request) for request in requests]

    def step(self, *, launch: bool = True) -> Updates | None:
        output = self.loop.step(launch=launch)
        updates = None if output is None else output.updates
        if updates is not None:
            for request, token in zip(updates.requests, updates.tokens.tolist(), strict=True):
                assert request.id not in self.reasons, f"request {request.id} got a token after it finished"
                self.outputs[request.id].append(token)
            self._note(updates.finished)
            if self.on_step is not None:
                self.on_step(updates)
        if self._check is not None:
            self._check(self.scheduler)
        return updates

    def replace_weights(self) -> None:
        """As an engine does it: no pass is in flight, all KV becomes wrong, the scheduler drops it."""
        while self.scheduler.num_in_flight:
            self.step(launch=False)
        self.executor.scramble_kv()
        self.scheduler.drop_kv(self.clock())
        if self._check is not None:
            self._check(self.scheduler)

    def _note(self, finished: Iterable[Finished]) -> None:
        for item in finished:
            request, reason = item.request, item.reason
            assert request.id not in self.reasons, f"request {request.id} finished twice"
            self.reasons[request.id] = reason

    def run(self, max_steps: int = 100_000) -> int:
        """Runs until all requests have finished. Returns the number of steps."""
        steps = 0
        while self.scheduler.has_work:
            assert steps < max_steps, f"requests are left after {steps} steps"
            updates = self.step()
            if updates is None:
                assert not self.scheduler.has_work, "requests are left and none can be planned"
            steps += 1
        self._note(self.scheduler.take_ended())
        return steps

    def assert_reference(self) -> None:
        """Asserts that all outputs equal the reference; aborted requests have a prefix of it."""
        for request_id, request in self.requests.items():
            tokens, reason = reference_tokens(request, self.executor.vocab)
            got = self.outputs[request_id]
            if self.reasons.get(request_id) in (FinishReason.STOP, FinishReason.LENGTH):
                assert (got, self.reasons[request_id]) == (tokens, reason), f"{request_id} differs from the reference"
            else:
                assert got == tokens[: len(got)], f"{request_id} differs from the reference before its abort"
