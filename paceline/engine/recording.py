"""A recording: every request and every forward pass of a run, one JSON line each, for `paceline sim`.

The first line is a header. Requests follow as they finish, passes as their results are read, and marks name what comes
after them. Requests contain no text and no token ids: tokens are stored as keyed, chained hashes of blocks, so equal
hashes mean equal prefixes and reveal nothing else. Times are seconds since the recording began.
"""

from __future__ import annotations

import gzip
import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from paceline.config import ConfigError, SchedulerConfig
from paceline.engine.executor import DelayedPending, Executor, Pending, Result
from paceline.engine.pass_features import PassFeatures, read_features
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.journal import Event, EventKind
from paceline.scheduler.memory import prefix_key
from paceline.scheduler.plan import Plan
from paceline.scheduler.tracked_request import TrackedRequest

if TYPE_CHECKING:
    from paceline.scheduler.scheduler import Scheduler

VERSION = 1
DEFAULTS: dict[str, Any] = {"itl_target": float("inf")}  # of options that had no default when recordings began
_HASH_BYTES = 6  # per block: every JSON reader represents such a number exactly


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="line"):
    version: int
    device: str
    model: str
    overlap: str
    page_size: int  # also the tokens per block
    num_pages: int
    max_running: int
    buckets: list[int]  # rows of the decode CUDA graphs; empty where there are none
    options: dict[str, Any]  # scheduler options that differ from their defaults, or from DEFAULTS


class Mark(msgspec.Struct, frozen=True, tag="mark", tag_field="line"):
    at: float
    name: str


class RecordedRequest(msgspec.Struct, frozen=True, tag="request", tag_field="line"):
    """One finished request. Latencies are seconds since its arrival; None for what never happened."""

    id: str
    at: float
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int  # the limit; fewer are produced if it ends earlier
    reason: str
    blocks: list[int]  # hashes of the full blocks of prompt and output
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float | None
    cached_tokens: int
    retractions: int
    known_length: bool = True  # only its length could end it, and the scheduler knew that
    fetched_tokens: int = 0  # cached tokens that were copied from host memory
    # Speculative decoding, for each forward pass that yielded tokens: drafts that were verified and accepted. The pass
    # yielded one token more than were accepted.
    drafted: list[int] = []
    accepted: list[int] = []


class RecordedPass(msgspec.Struct, frozen=True, tag="pass", tag_field="line"):
    """One forward pass. It costs the host `host_s` + `launch_s`; with overlap this runs concurrently with the
    device."""

    step: int
    at: float  # when it was launched
    num_in_flight: int  # earlier passes that were not waited for yet
    host_s: float  # since the last launch or wait returned: outputs, planning
    launch_s: float
    wait_s: float  # host blocked on the result
    device_s: float | None
    idle_s: float | None  # device idle time before this pass
    features: PassFeatures
    fetch_s: float | None = None  # time to copy the fetched pages from host memory
    drafted_tokens: int = 0  # drafts that were verified; `features` has the number that was planned
    accepted_tokens: int = 0


Line = Header | Mark | RecordedRequest | RecordedPass


class _LiveRequest(NamedTuple):
    request: TrackedRequest
    drafted: list[int]  # as in `RecordedRequest`
    accepted: list[int]


class Recorder:
    """Writes a recording of one scheduler and executor. Called on the engine's thread only; hashing, encoding and
    writing happen on a separate thread, so that recording does not slow down what is recorded."""

    def __init__(
        self,
        path: Path,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        device: str,
        model: str,
        overlap: str,
        buckets: list[int],
    ) -> None:
        config = scheduler.config
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"record is {str(path)!r}, which cannot be written: {error.strerror}.") from None
        self._clock, self._scheduler = clock, scheduler
        self._began = clock()
        self._encoder = msgspec.json.Encoder()
        self._key = secrets.token_bytes(16)
        self._queue: SimpleQueue[Line | _LiveRequest | None] = SimpleQueue()
        self._writer = Thread(target=self._write, name="paceline-recorder", daemon=True)
        self._writer.start()
        self._live: dict[str, _LiveRequest] = {}
        self._slots: dict[int, str] = {}  # request of each slot, with speculative decoding
        self._hashed: tuple[bytes, bytes, list[int]] = (b"", b"", [])  # of the last request: namespace, tokens, blocks
        self._buckets = buckets
        self._returned = self._began
        self._in_flight = 0
        self._prepared_s = 0.0  # time already spent preparing the next launch
        defaults = SchedulerConfig(**DEFAULTS)
        names = set(SchedulerConfig.__dataclass_fields__) - {"page_size", "num_pages", "max_running"}
        given = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)}
        # JSON has no infinity
        options = {name: str(value) if value == float("inf") else value for name, value in sorted(given.items())}
        self._queue.put(Header(VERSION, device, model, overlap, config.page_size, config.num_pages, config.max_running,
                          buckets, options))  # fmt: skip
        scheduler.journal.listeners.append(self._on_event)

    def watch(self, executor: Executor) -> Executor:
        """Wraps an executor so that its passes are recorded."""
        return _Recorded(self, executor)

    def mark(self, name: str) -> None:
        """Names what follows in the recording."""
        self._queue.put(Mark(round(self._clock() - self._began, 7), name))

    def close(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self._file.close()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            line = self._recorded(*item) if isinstance(item, _LiveRequest) else item
            self._file.write(self._encoder.encode(line) + b"\n")
            if self._queue.empty():
                self._file.flush()

    # ------------------------------------------------------------------ requests

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.ADD:
            self._live[event.request_id] = _LiveRequest(self._scheduler.requests[event.request_id], [], [])
        elif event.kind is EventKind.FINISH and (live := self._live.pop(event.request_id, None)) is not None:
            self._queue.put(live)  # it has finished and does not change any more

    def _recorded(self, request: TrackedRequest, drafted: list[int], accepted: list[int]) -> RecordedRequest:
        def since(time: float | None) -> float | None:
            return None if time is None else round(time - request.arrival, 6)

        return RecordedRequest(
            id=request.id,
            at=round(request.arrival - self._began, 6),
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output),
            max_tokens=request.max_tokens,
            reason=str(request.finish_reason),
            blocks=self._blocks(request),
            admitted_s=since(request.first_admitted),
            first_token_s=since(request.first_token),
            finished_s=since(request.finished),
            cached_tokens=request.num_cached,
            retractions=request.retractions,
            known_length=request.ends_by_length,
            fetched_tokens=request.num_fetched,
            drafted=drafted,
            accepted=accepted,
        )

    def _blocks(self, request: TrackedRequest) -> list[int]:
        # Each namespace has its own cache, so equal tokens in two namespaces are not an equal prefix.
        last = "\0".join(request.namespace).encode()
        data = prefix_key(request)
        size = 4 * self._scheduler.config.page_size
        # Requests with a common prefix often finish one after the other. Their prefix is hashed once: hashing holds the
        # GIL, which the engine's thread waits for.
        owner, before, known = self._hashed
        same = _common(before, data) if owner == last else 0
        found = known[: same // size]
        self._hashed = (last, data, found)
        if found:
            last = found[-1].to_bytes(_HASH_BYTES, "little")
        for start in range(len(found) * size, len(data) - size + 1, size):
            hasher = hashlib.blake2b(last, digest_size=_HASH_BYTES, key=self._key)
            hasher.update(data[start : start + size])
            last = hasher.digest()
            found.append(int.from_bytes(last, "little"))
        return found

    # ------------------------------------------------------------------ passes

    def prepare(self, prepare: Callable[[Plan], None], plan: Plan) -> None:
        began = self._clock()
        prepare(plan)
        self._prepared_s = self._clock() - began

    def launch(self, launch: Callable[[Plan], Pending], plan: Plan) -> _RecordedPending:
        began = self._clock()
        pending = launch(plan)
        launched = self._clock()
        ahead, self._prepared_s = self._prepared_s, 0.0
        recorded = _RecordedPending(
            self, pending, plan.step, began - self._began, self._in_flight, began - self._returned - ahead,
            launched - began + ahead, read_features(plan, self._buckets), self._sampled(plan),
        )  # fmt: skip
        self._in_flight += 1
        self._returned = self._clock()  # time spent recording does not count as host time
        return recorded

    def waited(self, one: _RecordedPending, seconds: float, result: Result) -> None:
        self._in_flight -= 1
        self._note_drafts(one.sampled, result)
        self._queue.put(
            RecordedPass(one.step, round(one.at, 7), one.num_in_flight, round(one.host_s, 7), round(one.launch_s, 7),
                         round(seconds, 7), result.device_s, result.idle_s, one.features, result.fetch_s,
                         result.num_drafted, result.num_accepted)
        )  # fmt: skip
        self._returned = self._clock()

    def _sampled(self, plan: Plan) -> list[str]:
        """Requests of the sampling rows, with speculative decoding. Before the pass is waited for, the next launch may
        give their slots to others."""
        if not self._scheduler.config.draft_tokens:
            return []
        self._slots.update((join.slot, join.request_id) for join in plan.joins)
        return [self._slots[slot] for slot in plan.slots[plan.samples].tolist()]

    def _note_drafts(self, sampled: list[str], result: Result) -> None:
        counts = [1] * len(sampled) if result.counts is None else result.counts.tolist()
        drafts = [0] * len(sampled) if result.num_drafts is None else result.num_drafts.tolist()
        for request_id, count, num_drafts in zip(sampled, counts, drafts, strict=True):
            live = self._live.get(request_id)  # None: it ended while the pass was in flight
            if live is not None and count:
                live.drafted.append(num_drafts)
                live.accepted.append(count - 1)

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock


class _Recorded(Executor):
    def __init__(self, recorder: Recorder, executor: Executor) -> None:
        self._recorder, self._executor = recorder, executor
        self.capabilities = executor.capabilities

    def launch(self, plan: Plan) -> Pending:
        return self._recorder.launch(self._executor.launch, plan)

    def prepare(self, plan: Plan) -> None:
        self._recorder.prepare(self._executor.prepare, plan)

    def launch_delayed(self, plan: Plan) -> DelayedPending:
        return self._recorder.launch(self._executor.launch_delayed, plan)


class _RecordedPending:
    __slots__ = ("_pending", "_recorder", "at", "features", "host_s", "launch_s", "num_in_flight", "sampled", "step")

    def __init__(self, recorder: Recorder, pending: Pending, step: int, at: float, num_in_flight: int, host_s: float,
                 launch_s: float, features: PassFeatures, sampled: list[str]) -> None:  # fmt: skip
        self._recorder, self._pending = recorder, pending
        self.step, self.at, self.num_in_flight, self.features = step, at, num_in_flight, features
        self.host_s, self.launch_s, self.sampled = host_s, launch_s, sampled

    def drafts(self) -> Drafts:
        return cast(DelayedPending, self._pending).drafts()

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        return cast(DelayedPending, self._pending).mask_buffer(num_masks, num_words)

    def sample(self, masks: Masks) -> None:
        cast(DelayedPending, self._pending).sample(masks)

    def wait(self) -> Result:
        began = self._recorder.clock()
        result = self._pending.wait()
        self._recorder.waited(self, self._recorder.clock() - began, result)
        return result


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix in bytes."""
    count = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, count) != np.frombuffer(other, np.uint8, count)
    return int(differs.argmax()) if differs.any() else count


def read_recording(path: Path) -> Iterator[Line]:
    """The lines of a recording, compressed or not. A last line that is cut off, as by a crash, is skipped."""
    decoder = msgspec.json.Decoder(Line)
    with open_packed(path) as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigError(f"{path.name}, line {number} is not a line of a recording: {error}.") from None
            if number == 1 and not (isinstance(line, Header) and line.version == VERSION):
                raise ConfigError(f"{path.name} is not a recording of version {VERSION}: create one with --record.")
            yield line


@contextmanager
def open_packed(path: Path) -> Iterator[BinaryIO]:
    """Opens a text file, compressed by gzip or not. One that cannot be read raises ConfigError."""
    try:
        file = cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    with file:
        yield file
