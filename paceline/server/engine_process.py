"""The engine's process: an engine behind sockets, for as many front ends as there are.

One thread takes what comes (`_listen`), the engine's own thread sends each front end what a step has for it, in one
message. The process is started by the supervisor, which talks to it through its standard input: a line when a front
end is gone, and the end of the input when the server is. Text is not made here: a piece's text are ids (`TokenText`).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from paceline.config import EngineConfig, TenantConfig, split_options
from paceline.engine.engine import Engine
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import InvalidRequest, PacelineError, SamplingParams
from paceline.server.engine_queries import EngineQueries, served_model
from paceline.server.logs import set_up_logs
from paceline.server.messages import (
    End,
    Hello,
    OutputBatch,
    QueryMessage,
    Refusal,
    Reply,
    Submit,
    decode_to_engine,
    encode,
)
from paceline.server.process_messages import (
    EngineReady,
    EngineSetup,
    LineDecoder,
    LoadingProgress,
    StartupFailed,
    ToEngine,
    read_setup,
    send_to_supervisor,
)
from paceline.server.rate_limiter import RateLimiter
from paceline.text.stop import TokenText

log = logging.getLogger("paceline.engine")
_PROGRESS_S = 0.1  # between two words of how far loading is


@dataclass(slots=True, eq=False)
class _FrontEndSink:
    """One request's way to its front end."""

    process: EngineProcess
    front_end: str
    number: int
    request_id: str
    tenant: str
    wants_all_at_once: bool
    last_token: float | None = None

    def put(self, piece: OutputDelta) -> None:
        self.process.pieces.append((self, piece))

    def refuse(self, error: PacelineError) -> None:
        self.process.queries.metrics.refused[self.tenant] += 1
        self.process.forget(self)
        self.process.send(self.front_end, Refusal.of(self.number, error))


class EngineProcess:
    def __init__(self, engine: Engine, address: str, *, stall_s: float, tenants: Sequence[TenantConfig] = ()) -> None:
        self._engine = engine
        self.queries = EngineQueries(engine, stall_s)
        self.pieces: list[tuple[_FrontEndSink, OutputDelta]] = []  # of this step; the engine's thread alone
        self.on_failure: Callable[[], None] = lambda: None
        self._limiter = RateLimiter(tenants)
        self._context = zmq.Context()
        self._inlet = self._context.socket(zmq.PULL)
        self._inlet.set_hwm(0)
        self._inlet.bind(address)
        # Sockets are no thread's own: answers leave from the listening thread and from the engine's.
        self._lock = threading.Lock()
        self._outlets: dict[str, zmq.Socket[bytes]] = {}
        self._sinks: dict[str, dict[str, _FrontEndSink]] = {}  # front end -> request id -> sink
        engine.text_of = _no_text
        engine.after_step = self._send_pieces
        self.queries.metrics.num_open = lambda: self.num_open

    # ------------------------------------------------------------------ what comes

    def listen(self) -> None:
        """Takes messages until the socket is closed."""
        while True:
            try:
                data = self._inlet.recv()
            except zmq.ContextTerminated:
                return
            try:
                self._take(decode_to_engine(data))
            except Exception:  # a message that makes no sense is our own bug; the others still count
                log.exception("a message from a front end could not be read")

    def _take(self, message: Hello | Submit | End | QueryMessage) -> None:
        match message:
            case Submit():
                self._submit(message)
            case End():
                self._engine.finish(message.id, message.reason)
            case QueryMessage():
                self._ask(message)
            case Hello():
                with self._lock:
                    outlet = self._context.socket(zmq.PUSH)
                    outlet.set_hwm(0)  # bounded by what the front end asked for
                    outlet.linger = 0
                    outlet.connect(message.address)
                    self._outlets[message.front_end] = outlet

    def _submit(self, message: Submit) -> None:
        job = message.job
        prompt = np.frombuffer(message.prompt, np.int32)
        sink = _FrontEndSink(self, message.front_end, message.number, job.id, job.tenant, job.at_once)
        try:
            self._limiter.acquire(job.tenant, len(prompt), time.monotonic())
        except PacelineError as error:
            self.queries.metrics.refused[job.tenant] += 1
            self.send(message.front_end, Refusal.of(message.number, error))
            return
        with self._lock:
            self._sinks.setdefault(message.front_end, {})[job.id] = sink
        try:
            self._engine.submit(
                prompt, job.params, sink=sink, request_id=job.id, tenant=job.tenant, priority=job.priority,
                timeout=job.timeout_s, cache_salt=job.cache_salt, pooling=job.pooling,
            )  # fmt: skip
        except PacelineError as error:
            self.forget(sink)
            self.send(message.front_end, Refusal.of(message.number, error))

    def _ask(self, message: QueryMessage) -> None:
        def reply(answered: Any) -> None:
            error = answered.exception()
            if error is None:
                answer = msgspec.Raw(encode(answered.result()))
                self.send(message.front_end, Reply(message.number, answer))
            else:
                if not isinstance(error, PacelineError):
                    log.error("a question was not answered: %s", message.question, exc_info=error)
                    error = EngineFailed("the question was not answered: the log says more.")
                self.send(message.front_end, Refusal.of(message.number, error))

        try:
            self.queries.execute(message.question).add_done_callback(reply)
        except PacelineError as error:
            self.send(message.front_end, Refusal.of(message.number, error))

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""
        with self._lock:
            return sum(map(len, self._sinks.values()))

    def disconnect(self, front_end: str) -> None:
        """A front end is gone: nobody reads what it asked for."""
        with self._lock:
            outlet = self._outlets.pop(front_end, None)
            if outlet is not None:
                outlet.close()
            requests = list(self._sinks.get(front_end, ()))
        for request_id in requests:
            self._engine.abort(request_id)

    def forget(self, sink: _FrontEndSink, num_output_tokens: int = 0) -> None:
        with self._lock:
            of = self._sinks.get(sink.front_end)
            if of is not None:
                of.pop(sink.request_id, None)
                if not of:
                    del self._sinks[sink.front_end]
        self._limiter.release(sink.tenant, num_output_tokens)

    # ------------------------------------------------------------------ what goes

    def _send_pieces(self) -> None:
        if self.pieces:
            self._send_each()
        if self._engine.failure is not None:
            self.on_failure()

    def _send_each(self) -> None:
        pieces, self.pieces = self.pieces, []
        now, metrics = time.monotonic(), self.queries.metrics
        messages: dict[str, list[tuple[int, OutputDelta]]] = {}
        for sink, piece in pieces:
            messages.setdefault(sink.front_end, []).append((sink.number, piece))
            count = len(piece.token_ids)
            if count:
                metrics.num_tokens += count
                if sink.last_token is not None:
                    metrics.inter_token.observe((now - sink.last_token) / count)
                sink.last_token = now
            if piece.finish_reason is not None:
                metrics.add_finished(piece)
                self.forget(sink, 0 if piece.usage is None else piece.usage.completion_tokens)
        for front_end, content in messages.items():
            self.send(front_end, OutputBatch(content))

    def send(self, front_end: str, message: OutputBatch | Reply | Refusal) -> None:
        data = encode(message)
        with self._lock:
            outlet = self._outlets.get(front_end)
            if outlet is not None:  # else it is gone, and with it whoever asked
                outlet.send(data)

    def close(self) -> None:
        self._engine.close()
        with self._lock:
            for outlet in self._outlets.values():
                outlet.close(linger=200)
            self._outlets.clear()
        self._inlet.close(linger=0)
        self._context.term()


def _no_text(_: SamplingParams) -> TokenText:
    return TokenText()


def build(setup: EngineSetup, progress: Callable[[int, int], None]) -> Engine:
    engine_options, scheduler_options = split_options(setup.source.options)
    weights = {tenant.name: tenant.weight for tenant in setup.tenants}
    if weights:
        scheduler_options["tenant_weights"] = {**weights, **scheduler_options.get("tenant_weights", {})}
    if engine_options.get("executor") == "virtual":
        from paceline.engine.virtual.build import build_virtual

        return build_virtual(EngineConfig(**engine_options), scheduler_options)
    from paceline.engine.build import build_engine

    return build_engine(
        setup.source.model,
        load=setup.source.load,
        shape=setup.source.shape,
        progress=progress,
        **engine_options,
        **scheduler_options,
    )


def make_a_token(engine: Engine) -> None:
    """The proof that tokens can be made, before anybody is told so."""
    done = threading.Event()
    errors: list[str] = []

    class _Wait:
        wants_all_at_once = True

        def put(self, piece: OutputDelta) -> None:
            if piece.finish_reason is not None:
                errors.extend([piece.error] if piece.error else [])
                done.set()

        def refuse(self, error: PacelineError) -> None:
            errors.append(str(error))
            done.set()

    engine.submit([0], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), sink=_Wait(), request_id="first")
    done.wait()
    if errors:
        raise EngineFailed(f"the first token could not be made: {errors[0]}")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the supervisor decides
    setup = read_setup(EngineSetup)
    set_up_logs(setup.log_level, setup.log_format, "engine")
    said = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > _PROGRESS_S or done == total:
            said = time.monotonic()
            send_to_supervisor(LoadingProgress(done, total))

    try:
        engine = build(setup, progress)
        make_a_token(engine)
    except PacelineError as error:
        send_to_supervisor(StartupFailed(str(error)))
        raise SystemExit(2) from None
    process = EngineProcess(engine, setup.address, stall_s=setup.stall_s, tenants=setup.tenants)
    process.on_failure = _end_after_last_words
    threading.Thread(target=process.listen, name="paceline-inlet", daemon=True).start()
    # Everything loaded so far stays. From here on the engine collects garbage itself, when it is idle.
    gc.collect()
    gc.freeze()
    gc.disable()
    send_to_supervisor(EngineReady(served_model(engine, setup.name)))
    if hasattr(engine.executor, "launch_delayed"):
        try:
            engine.grammars.set_up()
        except InvalidRequest as error:
            log.info("requests with a grammar will be refused: %s", error)
    decoder: LineDecoder[ToEngine] = LineDecoder(ToEngine)
    for line in sys.stdin.buffer:
        process.disconnect(decoder.decode(line).name)
    # The supervisor is gone, or wants this to end. Streams have been told by then, or there is nobody to tell.
    closing = threading.Thread(target=process.close, daemon=True)
    closing.start()
    closing.join(2)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # a device may hold threads that never end


def _end_after_last_words() -> None:
    """The engine has failed and everybody was told: another process will do better."""
    threading.Timer(0.2, os._exit, (70,)).start()


if __name__ == "__main__":
    main()
