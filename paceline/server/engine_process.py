"""The engine process: one engine behind ZeroMQ sockets, for any number of front ends.

One thread receives messages (`EngineProcess.listen`); the engine thread sends each front end all outputs of a step in
one message. The supervisor starts the process and reports on its standard input when a front end has exited; the end of
the input means that the server shuts down. The engine does not detokenize: front ends do.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from paceline.codec import encode
from paceline.config import ConfigError, EngineConfig, TenantConfig, split_options
from paceline.engine.adapter_loading import load_adapter
from paceline.engine.engine import Engine, EngineHooks
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, LoadedAdapter, OutputDelta
from paceline.engine.start import start_engine
from paceline.engine.weight_update import update_weights
from paceline.logs import set_up_logs
from paceline.request import FinishReason, InvalidRequest, PacelineError, SamplingParams, as_tokens
from paceline.server.engine_device import choose_device
from paceline.server.engine_kv_events import EngineKvEvents, bind_publisher
from paceline.server.engine_kv_transfer import EngineKvTransfer
from paceline.server.engine_queries import EngineQueries, served_model
from paceline.server.engine_reports import ReplicaReporter
from paceline.server.messages import (
    EngineHealth,
    ErrorReply,
    FinishRequest,
    MessageToEngine,
    MessageToFrontEnd,
    OutputBatch,
    QueryRequest,
    QueryResult,
    RegisterFrontEnd,
    SubmitJob,
    decode_to_engine,
)
from paceline.server.process_messages import (
    AdaptersChanged,
    AdapterSource,
    EngineReady,
    EngineSetup,
    FrontEndGone,
    KvEventsSetup,
    KvTransferSetup,
    LineDecoder,
    LoadingProgress,
    SetPaused,
    StartupFailed,
    ToEngine,
    WeightsReplaced,
    engine_name,
    read_setup,
    send_signs_of_life,
    send_to_supervisor,
)
from paceline.server.queries import PauseEngine, ResumeEngine
from paceline.server.rate_limiter import RateLimiter

log = logging.getLogger("paceline.engine")
_PROGRESS_INTERVAL_S = 0.1  # between two progress messages
_PROMPT_LOGPROBS = 256  # in one message; with 20 alternatives each, decoding takes a millisecond
_CLOSE_TIMEOUT_S = 2.0
_FAILURE_EXIT_DELAY_S = 0.2  # for the last messages to leave the process
_FAILURE_EXIT_STATUS = 70  # EX_SOFTWARE


@dataclass(slots=True, eq=False)
class _FrontEndSink:
    """Receives the output of one request on behalf of its front end."""

    process: EngineProcess
    front_end: str
    number: int
    request_id: str
    tenant: str
    last_token: float | None = None

    def put(self, output: OutputDelta) -> None:
        self.process.outputs.append((self, output))

    def refuse(self, error: PacelineError) -> None:
        self.process.queries.metrics.refused[self.tenant] += 1
        self.process.remove(self)
        self.process.send(self.front_end, ErrorReply.of(self.number, error))


class EngineProcess:
    def __init__(
        self,
        make_engine: Callable[[EngineHooks], Engine],
        address: str,
        *,
        watchdog_s: float,
        tenants: Sequence[TenantConfig] = (),
        on_failure: Callable[[BaseException], None] = lambda _: None,
        on_weights: Callable[[str, str], None] = lambda path, version: None,
        on_adapters: Callable[[Sequence[LoadedAdapter]], None] = lambda adapters: None,
        on_pause: Callable[[bool], None] = lambda paused: None,
        kv_events: KvEventsSetup | None = None,
        kv_transfer: KvTransferSetup | None = None,
        name: str = "",
    ) -> None:
        """`make_engine` builds the engine with these hooks; it must not detokenize. `name`: of the served model."""
        self.outputs: list[tuple[_FrontEndSink, OutputDelta]] = []  # of this step; used by the engine thread alone
        self._kv_events: EngineKvEvents | None = None
        self._reporter: ReplicaReporter | None = None
        self._kv_transfer: EngineKvTransfer | None = None
        publisher = None if kv_events is None else bind_publisher(kv_events)  # fails before a model is loaded
        self.engine = make_engine(EngineHooks(after_step=self._after_step, on_failure=on_failure, on_pause=on_pause))
        self.queries = EngineQueries(self.engine, watchdog_s, on_weights, on_adapters)
        self._address = address
        if publisher is not None:
            self._kv_events = EngineKvEvents(self.engine, publisher)
            self.queries.metrics.kv_events = publisher
        if kv_transfer is not None:
            self._kv_transfer = EngineKvTransfer(self.engine, kv_transfer, name, self._received)
            self.queries.kv_transfer = self.queries.metrics.kv_transfer = self._kv_transfer
        self._limiter = RateLimiter(tenants)
        self._context = zmq.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set_hwm(0)
        self._receiver.bind(address)
        self._listens = False
        # ZeroMQ sockets are not thread-safe, and both the listening thread and the engine thread send.
        self._lock = threading.Lock()
        self._senders: dict[str, zmq.Socket[bytes]] = {}
        self._sinks: dict[str, dict[str, _FrontEndSink]] = {}  # front end -> request id -> sink
        self.queries.metrics.num_open = lambda: self.num_open

    # ------------------------------------------------------------------ messages from front ends

    def listen(self) -> None:
        """Receives messages until `close`."""
        self._listens = True
        while True:
            try:
                data = self._receiver.recv()
            except zmq.ContextTerminated:
                self._receiver.close(linger=0)  # here: a socket must not be closed while another thread receives
                return
            try:
                self._handle(decode_to_engine(data))
            except Exception:  # a bug of ours; it must not affect other messages
                log.exception("cannot handle a message of a front end")

    def _handle(self, message: MessageToEngine) -> None:
        match message:
            case SubmitJob():
                self._submit(message)
            case FinishRequest():
                self._finish(message.id, message.reason)
            case QueryRequest():
                self._query(message)
            case RegisterFrontEnd():
                with self._lock:
                    sender = self._context.socket(zmq.PUSH)
                    sender.set_hwm(0)  # bounded by the requests of the front end
                    sender.linger = 0
                    sender.connect(message.address)
                    self._senders[message.front_end] = sender
                self.send(message.front_end, self._health())
                if message.reports:
                    self._reporter = self._reporter or ReplicaReporter(self.engine, self._address, self.send)
                    self._reporter.subscribe(message.front_end)

    def _submit(self, message: SubmitJob) -> None:
        job = message.job
        self._received(message.front_end)
        sink = _FrontEndSink(self, message.front_end, message.number, job.id, job.tenant)
        try:
            self._limiter.acquire(job.tenant, len(job.prompt), time.monotonic())
        except PacelineError as error:
            self.queries.metrics.refused[job.tenant] += 1
            self.send(message.front_end, ErrorReply.of(message.number, error))
            return
        with self._lock:
            self._sinks.setdefault(message.front_end, {})[job.id] = sink
        try:
            if self._kv_transfer is None:
                self.engine.submit(job, sink)
            else:
                self._kv_transfer.submit(job, sink, message.front_end)
        except PacelineError as error:
            self.remove(sink)
            self.send(message.front_end, ErrorReply.of(message.number, error))

    def _received(self, front_end: str) -> None:
        """A job of a front end, or a prompt of one, was received."""
        if self._reporter is not None:
            self._reporter.received(front_end)

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        if self._kv_transfer is None or not self._kv_transfer.finish(request_id, reason):
            self.engine.finish(request_id, reason)

    def _query(self, message: QueryRequest) -> None:
        def reply(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(message.query, PauseEngine | ResumeEngine):
                self.report_health()  # before the answer: who asks next whether the engine is ready must know
            if error is None:
                result = msgspec.Raw(encode(future.result()))
                self.send(message.front_end, QueryResult(message.number, result))
                return
            if not isinstance(error, PacelineError):
                log.error("query failed: %s", message.query, exc_info=error)
                error = EngineFailed("The query failed: see the server's log.")
            self.send(message.front_end, ErrorReply.of(message.number, error))

        try:
            self.queries.execute(message.query).add_done_callback(reply)
        except PacelineError as error:
            self.send(message.front_end, ErrorReply.of(message.number, error))

    def _health(self) -> EngineHealth:
        return EngineHealth(self._address, self.queries.health())

    def report_health(self) -> str | None:
        """To all front ends. Returns why the engine does no work, if that is so."""
        found = self._health()
        with self._lock:
            front_ends = list(self._senders)
        for front_end in front_ends:
            self.send(front_end, found)
        return found.health.failure

    @property
    def num_open(self) -> int:
        """Requests whose output a front end awaits."""
        with self._lock:
            return sum(map(len, self._sinks.values()))

    def disconnect(self, front_end: str) -> None:
        """Aborts the requests of a front end that has exited."""
        with self._lock:
            sender = self._senders.pop(front_end, None)
            if sender is not None:
                sender.close()
            request_ids = list(self._sinks.get(front_end, ()))
        if self._reporter is not None:
            self._reporter.unsubscribe(front_end)
        for request_id in request_ids:
            self._finish(request_id, FinishReason.ABORT)

    def remove(self, sink: _FrontEndSink, num_output_tokens: int = 0) -> None:
        """Forgets a request that has finished."""
        with self._lock:
            sinks = self._sinks.get(sink.front_end)
            if sinks is not None:
                sinks.pop(sink.request_id, None)
                if not sinks:
                    del self._sinks[sink.front_end]
        self._limiter.release(sink.tenant, num_output_tokens)

    # ------------------------------------------------------------------ messages to front ends

    def _after_step(self) -> None:
        self._send_outputs()
        if self._kv_transfer is not None:
            self._kv_transfer.after_step()
        if self._kv_events is not None:
            self._kv_events.publish()
        if self._reporter is not None:
            self._reporter.after_step()

    def _send_outputs(self) -> None:
        if not self.outputs:
            return
        outputs, self.outputs = self.outputs, []
        now, metrics = time.monotonic(), self.queries.metrics
        batches: dict[str, list[tuple[int, OutputDelta]]] = {}
        for sink, output in outputs:
            *pieces, last = _in_pieces(output)
            for piece in pieces:
                self.send(sink.front_end, OutputBatch([(sink.number, piece)]))
            batches.setdefault(sink.front_end, []).append((sink.number, last))
            count = len(output.token_ids)
            if count:
                metrics.num_tokens += count
                if sink.last_token is not None:
                    metrics.inter_token.observe((now - sink.last_token) / count, count)
                sink.last_token = now
            if output.finish_reason is not None:
                metrics.add_finished(output)
                self.remove(sink, 0 if output.usage is None else output.usage.completion_tokens)
        for front_end, batch in batches.items():
            self.send(front_end, OutputBatch(batch))

    def send(self, front_end: str, message: MessageToFrontEnd) -> None:
        data = encode(message)
        with self._lock:
            sender = self._senders.get(front_end)
            if sender is not None:  # else the front end has exited
                sender.send(data)

    def close(self) -> None:
        if self._kv_transfer is not None:
            self._kv_transfer.close()
        self.engine.close()
        if self._kv_events is not None:
            self._kv_events.close()
        with self._lock:
            for sender in self._senders.values():
                sender.close(linger=200)
            self._senders.clear()
        if not self._listens:
            self._receiver.close(linger=0)
        self._context.term()


def build(setup: EngineSetup, progress: Callable[[int, int], None], hooks: EngineHooks) -> Engine:
    source = setup.source
    options = choose_device(source.options, setup.replica, setup.num_replicas)
    engine_options, scheduler_options = split_options(options)
    if setup.name in engine_options.get("lora", ()):
        raise ConfigError(f"lora has {setup.name!r}, the name of the served model: choose another name.")
    if setup.adapters is not None:
        engine_options.pop("lora", None)  # replaced by those
    weights = {tenant.name: tenant.weight for tenant in setup.tenants}
    if weights:
        scheduler_options["tenant_weights"] = {**weights, **scheduler_options.get("tenant_weights", {})}
    background = [tenant.name for tenant in setup.tenants if tenant.background]
    if background:
        given = scheduler_options.get("background_tenants", "")
        scheduler_options["background_tenants"] = ",".join([given, *background])
    if engine_options.get("executor") == "virtual":
        from paceline.engine.virtual.build import build_virtual

        return build_virtual(EngineConfig(**engine_options), scheduler_options, hooks=hooks, detokenize=False)
    return start_engine(
        source.model,
        load=source.load,
        shape=source.shape,
        progress=progress,
        hooks=hooks,
        detokenize=False,
        role="both" if setup.kv_transfer is None else setup.kv_transfer.role,
        **engine_options,
        **scheduler_options,
    )


def reload_weights(engine: Engine, weights: WeightsReplaced) -> None:
    """Loads the weights that a previous engine process was given. If they are gone, this process exits and the
    supervisor tries again later: the weights of the command line would be another model."""
    try:
        update_weights(engine, weights.path, version=weights.version)
    except PacelineError as error:
        log.error("cannot load version %s of the weights again from %s: %s", weights.version, weights.path, error)
        raise SystemExit(1) from None


def reload_adapters(engine: Engine, changed: AdaptersChanged) -> None:
    """Loads the adapters that a previous engine process had. One that is gone is left out: requests for it get an
    error, and all others are served."""
    for one in changed.adapters:
        try:
            load_adapter(engine, one.name, one.path)
        except PacelineError as error:
            log.error("cannot load the adapter %s again from %s: %s", one.name, one.path, error)


def _in_pieces(output: OutputDelta) -> Iterator[OutputDelta]:
    """`output`, after deltas with the first of its prompt logprobs if it has many. A message is decoded at once, so
    those of a whole prompt would delay the front end's streams."""
    logprobs = output.prompt_logprobs
    end = max(len(logprobs) - 1, 0) // _PROMPT_LOGPROBS * _PROMPT_LOGPROBS
    for first in range(0, end, _PROMPT_LOGPROBS):
        yield OutputDelta("", (), prompt_logprobs=logprobs[first : first + _PROMPT_LOGPROBS])
    yield replace(output, prompt_logprobs=logprobs[end:]) if end else output


def generate_one_token(engine: Engine) -> None:
    """Proves that the engine works before it is reported as ready. No metric counts this request."""
    done = threading.Event()
    errors: list[str] = []

    class _FirstTokenSink:
        def put(self, output: OutputDelta) -> None:
            if output.finish_reason is not None:
                errors.extend([output.error] if output.error else [])
                done.set()

        def refuse(self, error: PacelineError) -> None:
            errors.append(str(error))
            done.set()

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.submit(Job(as_tokens([0]), params, id="first"), _FirstTokenSink())
    done.wait()
    if errors:
        raise EngineFailed(f"The engine failed to generate its first token: {errors[0]}")
    while not engine.call(engine.forget_history).result():
        time.sleep(0.001)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the supervisor acts on signals
    setup = read_setup(EngineSetup)
    set_up_logs(setup.log_level, setup.log_format, engine_name(setup.replica, setup.num_replicas))
    reported = 0.0
    built: list[EngineProcess] = []
    send_signs_of_life(lambda: next((process.report_health() for process in built), None))

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _PROGRESS_INTERVAL_S or done == total:
            reported = time.monotonic()
            send_to_supervisor(LoadingProgress(done, total))

    def make_engine(hooks: EngineHooks) -> Engine:
        engine = build(setup, progress, hooks)
        if setup.weights is not None:
            reload_weights(engine, setup.weights)
        if setup.adapters is not None:
            reload_adapters(engine, setup.adapters)
        generate_one_token(engine)
        return engine

    started = threading.Event()  # an earlier failure is reported as StartupFailed

    def on_failure(_: BaseException) -> None:
        if started.is_set():
            _exit_after_failure()

    try:
        process = EngineProcess(
            make_engine,
            setup.address,
            watchdog_s=setup.watchdog_s,
            tenants=setup.tenants,
            on_failure=on_failure,
            on_weights=lambda path, version: send_to_supervisor(WeightsReplaced(str(Path(path).resolve()), version)),
            on_adapters=lambda adapters: send_to_supervisor(
                AdaptersChanged(tuple(AdapterSource(one.name, one.path) for one in adapters))
            ),
            on_pause=lambda paused: send_to_supervisor(SetPaused(paused)),
            kv_events=setup.kv_events,
            kv_transfer=setup.kv_transfer,
            name=setup.name,
        )
    except PacelineError as error:
        send_to_supervisor(StartupFailed.of(error))
        raise SystemExit(2) from None
    built.append(process)
    started.set()
    threading.Thread(target=process.listen, name="paceline-listen", daemon=True).start()
    # Everything loaded so far is permanent. From here on the engine collects garbage itself, when it is idle.
    gc.collect()
    gc.freeze()
    gc.disable()
    if process.engine.executor.capabilities.logits:
        try:
            # Before requests can come: its set-up holds the GIL. Without API keys all clients are one tenant.
            has_keys = any(tenant.keys for tenant in setup.tenants)
            process.engine.grammars.try_before_compiling(max_per_tenant=1 if has_keys else 2)
        except InvalidRequest as error:
            log.info("requests with a grammar are refused: %s", error)
    ready = EngineReady(served_model(process.engine, setup.name))
    send_to_supervisor(ready)
    decoder: LineDecoder[ToEngine] = LineDecoder(ToEngine)
    for line in sys.stdin.buffer:
        match decoder.decode(line):
            case FrontEndGone(name):
                process.disconnect(name)
            case SetPaused(paused):
                if paused:
                    process.engine.pause().result()  # at once: no front end knows this engine yet
                else:
                    process.engine.resume()
                send_to_supervisor(msgspec.structs.replace(ready, paused=paused))
    # The supervisor has exited or is shutting down. Open streams have got their error by then.
    closing = threading.Thread(target=process.close, daemon=True)
    closing.start()
    closing.join(_CLOSE_TIMEOUT_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # device libraries may have threads that never end


def _exit_after_failure() -> None:
    """The engine has failed and every request got its error: the supervisor starts a new process."""
    threading.Timer(_FAILURE_EXIT_DELAY_S, os._exit, (_FAILURE_EXIT_STATUS,)).start()


if __name__ == "__main__":
    main()
