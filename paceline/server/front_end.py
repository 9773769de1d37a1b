"""The front-end process: HTTP on one side, the engine process on the other.

The supervisor starts it and sends it messages (`process_messages.py`): where the engine is, that the engine is gone,
that it is time to shut down. When its input ends, the supervisor is gone and the process exits.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys

from paceline.logs import set_up_logs
from paceline.request import PacelineError
from paceline.server.app import App
from paceline.server.auth import ApiKeys
from paceline.server.batches.runner import BatchRunner
from paceline.server.batches.store import BatchStore
from paceline.server.body_workers import BodyWorkers
from paceline.server.connection import is_loopback, listen
from paceline.server.engine_client import EngineGone
from paceline.server.errors import shutting_down
from paceline.server.metrics import ServerCounters
from paceline.server.process_messages import (
    EngineDown,
    EngineLoading,
    EngineUp,
    FrontEndListening,
    FrontEndSetup,
    LineDecoder,
    SetDraining,
    Shutdown,
    StartupFailed,
    ToFrontEnd,
    read_setup,
    send_signs_of_life,
    send_to_supervisor,
)
from paceline.server.replica_client import ReplicaClient
from paceline.server.state import ServerState
from paceline.text.load import load_tokenizer
from paceline.text.tokenizer import Tokenizer

_COLLECT_INTERVAL_S = 5.0
_MAX_BUSY_S = 60.0  # garbage is collected at least this often, even under load
_FINAL_ERRORS_S = 2.0  # for clients to read the error of a request that did not finish in time
_MAX_LINE_BYTES = 1 << 20
# While a thread handles a body, the event loop waits this long for the GIL after every system call. Python's default of
# 5 ms would delay 64 streams by a third of a second.
_SWITCH_INTERVAL_S = 0.0002


class _FrontEnd:
    def __init__(
        self, setup: FrontEndSetup, tokenizer: Tokenizer, store: BatchStore | None, listening_socket: socket.socket
    ) -> None:
        self._setup, self._listening_socket = setup, listening_socket
        self._client = ReplicaClient(setup.name, setup.address, tokenizer, setup.config, setup.tenants)
        self._counters = ServerCounters()
        self._state = ServerState(
            client=self._client,
            tokenizer=tokenizer,
            workers=BodyWorkers(tokenizer, setup.tokenizer),
            config=setup.config,
            model_name=setup.model,
            api_keys=ApiKeys(setup.tenants, setup.config.admin_key),
            batches=store,
            counters=self._counters,
            worker=setup.name,
            on_draining=lambda draining: send_to_supervisor(SetDraining(draining)),
        )
        self._app = App(self._state, is_local=is_loopback(listening_socket))
        self._batches = None if store is None else BatchRunner(self._state, store, self._app)
        self._shutdown_done = asyncio.Event()
        self._shutdown: asyncio.Task[None] | None = None  # a reference: the event loop holds none

    async def serve(self) -> None:
        server = await listen(self._app, self._setup.config, self._listening_socket, self._counters)
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(self._read_messages())]
        gc.collect()
        gc.freeze()
        gc.disable()  # `_collect_garbage` does it
        tasks += [asyncio.create_task(self._collect_garbage()), asyncio.create_task(self._shutdown_done.wait())]
        if self._batches is not None:
            tasks.append(asyncio.create_task(self._run_batches(self._batches)))
        send_to_supervisor(FrontEndListening())
        self._state.workers.start()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # an exception ends the process, and the supervisor starts another one
        server.close()
        self._state.workers.close()
        await self._client.close()

    async def _run_batches(self, runner: BatchRunner) -> None:
        await runner.run()
        await self._shutdown_done.wait()  # it was stopped first: clients may still have requests in progress

    async def _collect_garbage(self) -> None:
        """Collects when no request is in progress, and once a minute if one always is.

        Everything loaded at start is frozen, so a collection is short. Python's own schedule would keep closed
        connections for hours.
        """
        num_collected = num_busy = 0
        while True:
            await asyncio.sleep(_COLLECT_INTERVAL_S)
            num_responses = sum(self._counters.responses.values()) + self._counters.disconnects
            num_busy = num_busy + 1 if self._counters.in_progress else 0
            if num_responses != num_collected and (not num_busy or num_busy * _COLLECT_INTERVAL_S >= _MAX_BUSY_S):
                gc.collect()
                num_collected, num_busy = num_responses, 0

    async def _read_messages(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        decoder: LineDecoder[ToFrontEnd] = LineDecoder(ToFrontEnd)
        while line := await reader.readline():
            match message := decoder.decode(line):
                case EngineUp():
                    self._client.connect(message.replica, message.address, message.model, message.kv_address)
                case EngineDown():
                    self._client.disconnect(message.replica, EngineGone(message.reason))
                case EngineLoading():
                    self._client.set_loading(message.replica)
                case SetDraining():
                    self._state.set_draining(message.draining)
                case Shutdown():
                    self._shutdown = asyncio.create_task(self._shut_down(message.timeout_s))
        os._exit(1)  # the supervisor has exited, and the engine exits with it

    async def _shut_down(self, timeout_s: float) -> None:
        self._state.shutting_down = True
        self._state.set_draining(True)
        if self._batches is not None:
            await self._batches.stop()
        await self._wait_for_requests(timeout_s)
        self._client.fail_all(shutting_down())
        await self._wait_for_requests(_FINAL_ERRORS_S)
        self._shutdown_done.set()

    async def _wait_for_requests(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._counters.in_progress and loop.time() < deadline:
            await asyncio.sleep(0.02)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal signals the whole group; only the supervisor acts on it
    setup = read_setup(FrontEndSetup)
    set_up_logs(setup.config.log_level, setup.config.log_format, setup.name)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    send_signs_of_life()
    try:
        tokenizer = load_tokenizer(setup.tokenizer)
        store = None if setup.config.batch_folder is None else BatchStore(setup.config)
    except PacelineError as error:
        send_to_supervisor(StartupFailed.of(error))
        sys.exit(1)
    with socket.socket(fileno=setup.socket) as listening_socket:

        async def serve() -> None:
            await _FrontEnd(setup, tokenizer, store, listening_socket).serve()

        asyncio.run(serve())


if __name__ == "__main__":
    main()
