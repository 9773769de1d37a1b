"""RemotePrefill: the decode engine's side of prefill/decode disaggregation.

A job whose prompt another engine computes waits here, outside the scheduler, for a bounded time. Its pages arrive in
the host memory tier, where space is reserved for them; then the request is added and finds them as a prefix. If they do
not come, or come damaged, it is added without them and computed here: a transfer never fails a request.

    submit ─▶ reserve (engine thread) ─▶ StartPrefill ─▶ pages ─▶ place, add (engine thread)
                 │ too short, no space        └─ timeout, error ─▶ add; the memory is released when nothing writes it
                 └─▶ add

The one thing to know before changing this: over a Unix socket, and by NIXL, the prefill engine writes this engine's
memory itself, so reserved pages are given back only when the state machine (kv_transfer.py) says so.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.cluster.breaker import CircuitBreaker
from paceline.cluster.kv_connection import JOIN_S, KvConnection, Waitable, connect, greet
from paceline.cluster.kv_nixl import NixlMemory
from paceline.cluster.kv_protocol import (
    CancelPrefill,
    KvLayout,
    KvMessage,
    KvProtocolError,
    KvRejected,
    PagesSent,
    Pong,
    PrefillDone,
    PrefillFailed,
    StartPrefill,
)
from paceline.cluster.kv_transfer import Cause, IncomingTransfers, Outcome, Settled
from paceline.request import FinishReason, PacelineError, Request
from paceline.scheduler.host_tier import Reservation
from paceline.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.job import Job
    from paceline.engine.output_processor import Sink

log = logging.getLogger("paceline.kv")
_BEAT_S = 1.0  # between two looks at the signs of life of the peers
_MAX_SILENT = 5  # looks without one; counted, since this process may have been stopped itself
_MIN_WAIT_S = 0.001


@dataclass(slots=True, eq=False)
class _WaitingJob:
    """A job that has not been added to the engine."""

    id: str  # of its transfer
    job: Job
    sink: Sink
    peer: str
    began: float
    front_end: str
    reservation: Reservation | None = None
    ended: FinishReason | None = None  # before it was added


class _Peer:
    """A prefill engine: connected when it is first needed, and again after it was lost.

    Prompts wait for the first connection. After a failure they are computed here, and one probe tests the peer: another
    connection, a ping, or, if it answers these and was late, one prompt.
    """

    def __init__(self, owner: RemotePrefill, address: str) -> None:
        self._owner, self.address = owner, address
        self.is_local = address.startswith("unix:")
        self.may_write = self.is_local or owner.memory is not None  # this engine's memory
        self.writes = self.may_write  # as agreed when it was connected; otherwise it sends pages
        self._connection: KvConnection | None = None
        self._connecting = self._is_closed = False
        self._connector: threading.Thread | None = None  # the last one
        self._greeted: socket.socket | None = None  # during the handshake
        self._unsent: list[tuple[StartPrefill, Sequence[Waitable]]] = []  # until it is connected
        self._breaker = CircuitBreaker()
        self._num_silent, self._is_pinged = 0, False
        self._lock = threading.Lock()

    def is_usable(self, now: float) -> bool:
        """Whether it may compute a prompt. If it is to be connected again, that begins."""
        with self._lock:
            if self._connection is not None:
                return self._num_silent < _MAX_SILENT and self._breaker.may_begin(now)
            if self._breaker.is_closed:
                return True
            if not self._connecting and self._breaker.begin(now):
                self._begin_connecting()
            return False

    def begin(self, now: float) -> bool:
        """As `is_usable`, for a prompt that is sent next; `ended` must follow."""
        with self._lock:
            return self._num_silent < _MAX_SILENT and self._breaker.begin(now)

    def ended(self, cause: Cause | None, now: float, *, had_time: bool) -> None:
        """A prompt has ended. `had_time`: all that `prefill_timeout_s` gives."""
        with self._lock:
            if cause is None:
                self._breaker.succeeded()
            elif cause is Cause.SILENT or (cause is Cause.TIMEOUT and had_time):
                self._breaker.failed(now)
            elif cause is not Cause.CONNECTION:  # which `on_closed` counts
                self._breaker.abandoned()

    def check(self) -> bool:
        """Once in `_BEAT_S`. Returns whether the peer has just become silent."""
        with self._lock:
            if self._connection is None:
                return False
            self._num_silent += 1
            if not self._is_pinged:  # one at a time: those of a peer that is stopped would fill the connection
                self._is_pinged = True  # first: the answer may come before the call returns
                if not self._connection.try_to_ping():
                    self._is_pinged = False
            return self._num_silent == _MAX_SILENT

    def send(self, message: KvMessage, *, after: Sequence[Waitable] = ()) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.send(message, after=after)
                return
            if isinstance(message, StartPrefill):
                self._unsent.append((message, after))
                self._begin_connecting()

    def connect(self) -> None:
        with self._lock:
            self._begin_connecting()

    def _begin_connecting(self) -> None:
        if not self._connecting:
            self._connecting = True
            self._connector = threading.Thread(target=self._connect, name="paceline-kv-connect", daemon=True)
            self._connector.start()

    def _connect(self) -> None:
        owner = self._owner
        try:
            peer = connect(self.address)
            with self._lock:
                self._greeted = peer
                is_closed = self._is_closed
            try:
                if is_closed:  # before there was a connection to end
                    raise ConnectionAbortedError("this engine is closed")
                shared = owner.shared if self.is_local else None
                self.writes = greet(peer, owner.token, owner.layout, shared, None if shared else owner.memory)
            except BaseException:
                peer.close()
                raise
        except (OSError, PacelineError) as error:
            with self._lock:
                self._connecting = False
                self._breaker.failed(owner.clock(), for_long=isinstance(error, KvRejected))
                self._unsent.clear()
            if not owner.is_closed:
                log.warning(
                    "cannot use the prefill engine at %s: %s; its prompts are computed here", self.address, error
                )
            owner.lost(self, str(error))
            return
        with self._lock:
            self._connecting, self._num_silent, self._is_pinged = False, 0, False
            self._breaker.succeeded()
            self._connection = KvConnection(peer, self, "paceline-kv")
            for message, after in self._unsent:
                self._connection.send(message, after=after)
            self._unsent.clear()
        log.info("connected to the prefill engine at %s", self.address)

    def on_message(self, message: KvMessage, payload: npt.NDArray[np.uint8]) -> None:
        self._num_silent = 0
        if isinstance(message, Pong):
            self._is_pinged = False
            return
        self._owner.received(self, message, payload)

    def on_closed(self, reason: str) -> None:
        with self._lock:
            self._connection = None
            self._breaker.failed(self._owner.clock())
        if not self._owner.is_closed:
            log.warning("lost the prefill engine at %s: %s", self.address, reason)
        self._owner.lost(self, reason)

    def close(self) -> None:
        """Ends the connection, and the threads of this object."""
        with self._lock:
            self._is_closed = True
            connector, greeted = self._connector, self._greeted if self._connecting else None
        if greeted is not None:
            with contextlib.suppress(OSError):  # the peer may be gone already
                greeted.shutdown(socket.SHUT_RDWR)
        if connector is not None:
            connector.join(JOIN_S)
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close("this engine is closed")
            connection.join()


class RemotePrefill:
    def __init__(
        self,
        engine: Engine,
        layout: KvLayout,
        token: str,
        *,
        peers: Sequence[str] = (),
        min_tokens: int,
        timeout_s: float,
        nixl: bool = False,
    ) -> None:
        """`peers`: prefill engines for jobs that name none. Prompts with fewer than `min_tokens` to compute are
        computed here; so are those whose pages have not come after `timeout_s`. nixl: prefill engines that have it,
        too, write pages by NIXL."""
        shared = engine.executor.host_pages
        assert shared is not None, "pages are received by an engine of role decode"
        self._engine, self.shared = engine, shared
        self.memory = NixlMemory(shared) if nixl else None
        self.layout, self.token, self.clock = layout, token, engine.clock
        self._min_tokens, self._timeout_s = min_tokens, timeout_s
        self._ids = map(str, itertools.count())
        # Below: what several threads use. It is also held while a payload is written, so that no page is released
        # meanwhile.
        self._lock = threading.Condition()
        self._peers: dict[str, _Peer] = {}
        self._own_peers = tuple(peers)
        self._transfers = IncomingTransfers()
        self._jobs: dict[str, _WaitingJob] = {}  # by transfer
        self._reserved: dict[str, Reservation] = {}
        self.is_closed = False
        # Metrics
        self.num_bytes = self.num_started = self.num_recomputed = 0
        self.seconds = 0.0  # from the submission to the last page, of complete transfers
        self._timer = threading.Thread(target=self._expire, name="paceline-kv-timer", daemon=True)
        self._timer.start()
        for address in peers:
            self._peer(address).connect()

    @property
    def failures(self) -> dict[str, int]:
        return {cause.value: count for cause, count in self._transfers.failures.items()}

    @property
    def num_completed(self) -> int:
        return self._transfers.num_completed

    @property
    def num_waiting(self) -> int:
        """Jobs that are not added to the engine yet."""
        return len(self._jobs)

    def waiting_jobs(self) -> list[tuple[Job, float, str]]:
        """Jobs that are not added to the engine yet, when they were submitted, and where their prompt is computed."""
        with self._lock:
            return [(one.job, one.began, one.peer) for one in self._jobs.values()]

    # ------------------------------------------------------------------ any thread

    def submit(self, job: Job, sink: Sink, front_end: str = "") -> None:
        """Adds a job of a front end to the engine, after its prompt was computed elsewhere if that is worth it. Raises
        as `Engine.submit` if it is added at once; later, errors go to the sink."""
        peer = self._choose(job)
        if peer is None:
            self._engine.submit(job, sink)
            return
        waiting = _WaitingJob(next(self._ids), job, sink, peer.address, self.clock(), front_end)
        with self._lock:
            self._jobs[waiting.id] = waiting
        try:
            self._call(lambda scheduler: self._guarded(waiting, lambda: self._reserve(scheduler, waiting, peer)))
        except PacelineError:
            with self._lock:
                del self._jobs[waiting.id]
            raise

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """Ends a request that waits for its pages. Returns whether there is one."""
        with self._lock:
            found = [one for one in self._jobs.values() if one.job.id == request_id]
            outcomes: list[Outcome] = []
            for one in found:
                one.ended = reason
                outcomes += self._transfers.cancel(one.id)
        self._apply(outcomes)
        return bool(found)

    def close(self) -> None:
        """Adds all waiting jobs to the engine, which is closed next."""
        with self._lock:
            self.is_closed = True
            self._lock.notify_all()
            outcomes = [one for id in list(self._jobs) for one in self._transfers.cancel(id)]
            peers = list(self._peers.values())
        self._apply(outcomes)
        for peer in peers:
            peer.close()
        self._timer.join()
        if self.memory is not None:
            self.memory.close()

    def _choose(self, job: Job) -> _Peer | None:
        """A prefill engine that may compute the prompt."""
        if len(job.prompt) < self._min_tokens or job.pooling is not None or job.params.prompt_logprobs is not None:
            return None
        now = self.clock()
        with self._lock:
            if self.is_closed:
                return None
            names = (job.prefill_at,) if job.prefill_at else self._own_peers
            usable = [peer for peer in map(self._peer, names) if peer.is_usable(now)]
            return min(usable, key=lambda peer: self._transfers.waits_for(peer.address), default=None)

    def _peer(self, address: str) -> _Peer:
        return self._peers.setdefault(address, _Peer(self, address))

    # ------------------------------------------------------------------ the engine's thread

    def _reserve(self, scheduler: Scheduler, waiting: _WaitingJob, peer: _Peer) -> None:
        job, size = waiting.job, scheduler.config.page_size
        probe = Request(
            job.id or waiting.id, job.prompt, tenant=job.tenant, cache_salt=job.cache_salt, keys=job.request_keys
        )
        reservation = None
        is_worth_it = waiting.ended is None and scheduler.num_missing_tokens(probe) >= self._min_tokens
        if is_worth_it and not self.is_closed and peer.begin(self.clock()):
            reservation = scheduler.reserve_received(waiting.id, probe)
            if reservation is None:
                peer.ended(Cause.CANCELLED, self.clock(), had_time=False)
        if reservation is None:
            self._add(waiting)
            return
        fence = self._engine.executor.after_launched()  # copies that use these pages, of passes launched before
        weights, count = self._engine.weights.current, len(reservation.pages)
        limit_s = self._timeout_s if job.timeout_s is None else min(self._timeout_s, job.timeout_s)
        with self._lock:
            self._reserved[waiting.id] = waiting.reservation = reservation
            self._transfers.start(
                waiting.id, peer.address, count, self.clock() + limit_s, weights=weights, is_shared=peer.may_write
            )
            self.num_started += 1
            self._lock.notify_all()
            outcomes = [] if waiting.ended is None else self._transfers.cancel(waiting.id)
        message = StartPrefill(
            waiting.id,
            job.prompt[: reservation.end_page * size].tobytes(),
            reservation.first_page,
            count,
            weights,
            targets=reservation.pages.tobytes() if peer.may_write else b"",
            tenant=job.tenant,
            cache_salt=job.cache_salt,
            priority=job.priority,
            timeout_s=limit_s,
            front_end=waiting.front_end,
            keys=job.keys[: reservation.end_page * size].tobytes(),
        )
        peer.send(message, after=(fence,))
        self._apply(outcomes)

    def _settle(self, scheduler: Scheduler, waiting: _WaitingJob, settled: Settled) -> None:
        reservation, size = waiting.reservation, scheduler.config.page_size
        assert reservation is not None, "a transfer has a reservation"
        if settled.cause is None:
            with self._lock:
                del self._reserved[waiting.id]
            num_pages = scheduler.place_received(waiting.id, self.clock())
            found = max(reservation.first_page * size, settled.num_cached_tokens)
            num_prefilled = max(0, reservation.end_page * size - found) if num_pages else 0
            waiting.job = replace(waiting.job, num_prefilled=num_prefilled)
            self.num_bytes += len(reservation.pages) * self.layout.page_bytes
            self.seconds += self.clock() - waiting.began
        else:
            self.num_recomputed += waiting.ended is None
        self._add(waiting)

    def _release(self, scheduler: Scheduler, id: str) -> None:
        with self._lock:
            del self._reserved[id]
        scheduler.release_received(id)

    def _add(self, waiting: _WaitingJob) -> None:
        job = waiting.job
        if job.timeout_s is not None:
            job = replace(job, timeout_s=max(_MIN_WAIT_S, job.timeout_s - (self.clock() - waiting.began)))
        try:
            request_id = self._engine.submit(job, waiting.sink)
        except PacelineError as error:
            waiting.sink.refuse(error)
            request_id = None
        with self._lock:  # after the submission: `finish` must find the request either here or in the engine
            self._jobs.pop(waiting.id, None)
        if waiting.ended is not None and request_id is not None:
            self._engine.finish(request_id, waiting.ended)

    def _guarded(self, waiting: _WaitingJob, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # a bug of ours: the request must still get its answer
            log.exception("a KV transfer failed: request %s is computed here", waiting.job.id)
            self._add(waiting)

    # ------------------------------------------------------------------ connections and time

    def received(self, peer: _Peer, message: KvMessage, payload: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            match message:
                case PagesSent():
                    is_intact = self._write(peer, message, payload)
                    outcomes = self._transfers.on_pages(peer.address, message, is_intact=is_intact)
                case PrefillDone():
                    outcomes = self._transfers.on_done(peer.address, message)
                case PrefillFailed():
                    outcomes = self._transfers.on_failed(peer.address, message)
                case _:
                    raise KvProtocolError(f"a prefill engine sent {type(message).__name__}.")
        self._apply(outcomes)

    def _write(self, peer: _Peer, message: PagesSent, payload: npt.NDArray[np.uint8]) -> bool:
        """Writes pages that were sent, if they are expected. Returns whether they are as they were sent."""
        if peer.writes:
            return message.num_bytes == 0
        if len(payload) != message.count * self.layout.page_bytes or zlib.crc32(payload.data) != message.checksum:
            return False
        if self._transfers.wants(peer.address, message):
            pages = self._reserved[message.id].pages[message.first : message.first + message.count]
            self.shared.write(pages, payload.reshape(message.count, -1))
        return True

    def _check_peers(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for peer in self._peers.values():
            if peer.check():
                reason = f"no sign of life for {_MAX_SILENT * _BEAT_S:g} s"
                log.warning("the prefill engine at %s hangs: %s; its prompts are computed here", peer.address, reason)
                outcomes += self._transfers.on_silence(peer.address, reason)
        return outcomes

    def lost(self, peer: _Peer, reason: str) -> None:
        with self._lock:
            outcomes = self._transfers.on_disconnect(peer.address, self.clock(), reason)
            self._lock.notify_all()
        self._apply(outcomes)

    def _expire(self) -> None:
        beat_at = time.monotonic() + _BEAT_S
        while True:
            with self._lock:
                if self.is_closed:
                    return
                at, left_s = self._transfers.next_time, beat_at - time.monotonic()
                self._lock.wait(max(_MIN_WAIT_S, left_s if at is None else min(left_s, at - self.clock())))
                outcomes = self._transfers.expire(self.clock())
                if time.monotonic() >= beat_at:
                    outcomes += self._check_peers()
                    beat_at = time.monotonic() + _BEAT_S
            self._apply(outcomes)

    def _apply(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            waiting = self._jobs.get(one.id)
            if isinstance(one, Settled):
                assert waiting is not None, f"transfer {one.id} is settled twice"
                self._note(waiting, one)

                def settle(scheduler: Scheduler, waiting: _WaitingJob = waiting, settled: Settled = one) -> None:
                    self._guarded(waiting, lambda: self._settle(scheduler, waiting, settled))

                action: Callable[[Scheduler], None] = settle
            else:

                def release(scheduler: Scheduler, id: str = one.id) -> None:
                    self._release(scheduler, id)

                action = release

            try:
                self._call(action)
            except PacelineError as error:  # the engine has failed or is closed, and its memory with it
                if isinstance(one, Settled) and waiting is not None:
                    with self._lock:
                        self._jobs.pop(one.id, None)
                    waiting.sink.refuse(error)

    def _call(self, action: Callable[[Scheduler], None]) -> None:
        def check(future: Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("a KV transfer failed", exc_info=error)

        self._engine.call(action).add_done_callback(check)

    def _note(self, waiting: _WaitingJob, settled: Settled) -> None:
        timeout_s = waiting.job.timeout_s
        had_time = timeout_s is None or timeout_s >= self._timeout_s
        self._peers[waiting.peer].ended(settled.cause, self.clock(), had_time=had_time)
        if settled.cause is None:
            return
        if settled.cause is not Cause.CANCELLED:
            log.warning(
                "request %s is computed here: its KV did not come from %s (%s: %s)",
                waiting.job.id, waiting.peer, settled.cause.value, settled.detail,
            )  # fmt: skip
        if settled.cause in (Cause.TIMEOUT, Cause.SILENT, Cause.CANCELLED, Cause.DAMAGED) and not self.is_closed:
            self._peers[waiting.peer].send(CancelPrefill(waiting.id))
