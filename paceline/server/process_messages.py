"""Messages between the supervisor and its child processes: one JSON object per line.

The supervisor writes to a child's standard input and reads its standard output. The first line to a child is its setup;
every later line is one of the tagged structs below. A line that is none of them is an error.

The end of a pipe is an event, not an error: a child whose input ends, or that cannot write its output, has lost its
supervisor and exits.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from paceline.config import ConfigError, ServerConfig, TenantConfig
from paceline.request import PacelineError, Unavailable
from paceline.server.engine_client import ServedModel

BEAT_S = 0.5  # between two signs of life
_Setup = TypeVar("_Setup", bound=msgspec.Struct)
_Line = TypeVar("_Line")


class ModelSource(msgspec.Struct, frozen=True):
    """Which model the engine loads, and how."""

    model: str | None = None  # a path; None for random weights and for the virtual executor
    load: str = "weights"
    shape: str | None = None
    options: dict[str, Any] = {}  # of EngineConfig and SchedulerConfig

    @property
    def weights_id(self) -> str:
        """Equal for engines whose requests have the same tokens."""
        return ":".join(map(str, (self.model, self.load, self.shape, self.options.get("executor"))))


class WeightsReplaced(msgspec.Struct, frozen=True, tag=True):
    """From the engine: its weights were replaced. A restarted engine loads them again."""

    path: str
    version: str


class AdapterSource(msgspec.Struct, frozen=True):
    """A LoRA adapter that an engine has loaded."""

    name: str
    path: str


class AdaptersChanged(msgspec.Struct, frozen=True, tag=True):
    """From the engine: these adapters are loaded now. A restarted engine loads them again."""

    adapters: tuple[AdapterSource, ...]


class KvEventsSetup(msgspec.Struct, frozen=True):
    """Where the engine publishes KV events."""

    address: str
    replay_address: str | None
    topic: str
    rank: int = 0  # data parallel rank: of the replica


class KvTransferSetup(msgspec.Struct, frozen=True):
    """Prefill/decode disaggregation: the role of an engine, and how it meets the others."""

    role: str
    token: str
    listen: str = ""  # prefill: the address it binds
    peers: tuple[str, ...] = ()  # decode: prefill engines for jobs that name none
    from_tokens: int = 0  # decode: shorter prompts are computed there
    timeout_s: float = 0.0
    nixl: bool = False  # KV travels by NIXL between servers


class EngineSetup(msgspec.Struct, frozen=True):
    """The first line to the engine process."""

    name: str  # of the served model
    address: str  # the ZeroMQ address it binds
    source: ModelSource
    watchdog_s: float
    tenants: tuple[TenantConfig, ...]
    log_level: str
    log_format: str
    weights: WeightsReplaced | None = None  # since the server was started
    adapters: AdaptersChanged | None = None  # since then; None: those of the options
    replica: int = 0
    num_replicas: int = 1
    kv_events: KvEventsSetup | None = None
    kv_transfer: KvTransferSetup | None = None


def engine_name(replica: int, num_replicas: int) -> str:
    """In logs and messages."""
    return "engine" if num_replicas == 1 else f"engine {replica}"


class FrontEndSetup(msgspec.Struct, frozen=True):
    """The first line to a front-end process."""

    name: str
    address: str  # the ZeroMQ address it binds; the engine connects to it
    socket: int  # file descriptor of the listening socket
    model: str
    tokenizer: str | int  # a model's path, or the size of a synthetic vocabulary
    config: ServerConfig
    tenants: tuple[TenantConfig, ...]


# ---------------------------------------------------------------------- supervisor -> front end


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    address: str
    model: ServedModel
    replica: int = 0
    kv_address: str = ""  # of a prefill engine: where decode engines connect


class EngineDown(msgspec.Struct, frozen=True, tag=True):
    reason: str
    replica: int = 0


class EngineLoading(msgspec.Struct, frozen=True, tag=True):
    replica: int = 0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests, give running ones `timeout_s` to finish, fail the rest, exit."""

    timeout_s: float


class SetDraining(msgspec.Struct, frozen=True, tag=True):
    """Also sent by a front end, whose admin route was called; the supervisor forwards it to all of them."""

    draining: bool


# ---------------------------------------------------------------------- supervisor <-> engine


class SetPaused(msgspec.Struct, frozen=True, tag=True):
    """From an engine: the operator has paused or resumed it. To an engine that is ready: the others are paused, or not;
    it does the same and is ready again."""

    paused: bool


# ---------------------------------------------------------------------- engine, front end -> supervisor


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, from a thread that does nothing else."""

    failure: str | None = None  # why the process does no work all the same


# ---------------------------------------------------------------------- front end -> supervisor


class FrontEndListening(msgspec.Struct, frozen=True, tag=True):
    """The front end accepts connections and reads messages."""


# ---------------------------------------------------------------------- supervisor -> engine


class FrontEndGone(msgspec.Struct, frozen=True, tag=True):
    name: str


# ---------------------------------------------------------------------- engine -> supervisor


class LoadingProgress(msgspec.Struct, frozen=True, tag=True):
    done: int
    total: int


class StartupFailed(msgspec.Struct, frozen=True, tag=True):
    """The configuration cannot work; a restart of this process alone would not help."""

    message: str
    may_pass: bool = False  # a later start of the server may succeed

    @classmethod
    def of(cls, error: PacelineError) -> StartupFailed:
        return cls(str(error), isinstance(error, Unavailable))

    def error(self) -> PacelineError:
        return Unavailable(self.message) if self.may_pass else ConfigError(self.message)


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine has generated a token and accepts requests."""

    model: ServedModel
    paused: bool = False


ToFrontEnd = EngineUp | EngineDown | EngineLoading | Shutdown | SetDraining
FromFrontEnd = FrontEndListening | StartupFailed | SetDraining | Alive
ToEngine = FrontEndGone | SetPaused
FromEngine = LoadingProgress | StartupFailed | EngineReady | WeightsReplaced | AdaptersChanged | SetPaused | Alive


class ProtocolError(PacelineError):
    """A line between two processes is not one of the messages above."""


class LineDecoder(Generic[_Line]):
    def __init__(self, messages: object) -> None:
        self._decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(messages)

    def decode(self, line: bytes) -> _Line:
        try:
            return self._decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"Cannot read the message {line[:200]!r}: {error}.") from None


def encode_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


# ---------------------------------------------------------------------- in a child process


def read_setup(kind: type[_Setup]) -> _Setup:
    """Reads the first line of standard input, byte by byte: the lines after it belong to another reader."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)  # the supervisor has exited
        line += byte
    return msgspec.json.decode(line, type=kind)


_writing = threading.Lock()  # threads write whole lines


def send_to_supervisor(message: msgspec.Struct) -> None:
    """Writes one line to standard output. Exits the process if the supervisor has exited."""
    line = encode_line(message)
    try:
        with _writing:
            while line:
                line = line[os.write(1, line) :]
    except BrokenPipeError:
        # A child that is still loading notices here, before it reads its standard input, that the supervisor is gone.
        # Nothing is left to report or to clean up.
        os._exit(1)


def send_signs_of_life(failure: Callable[[], str | None] = lambda: None) -> None:
    """Until the process ends, on a thread of its own. `failure`: why the process does no work, if that is so."""

    def send() -> None:
        while True:
            found = failure()
            if select.select([], [1], [], 0)[1]:  # else the supervisor is stopped, and other lines need the space
                send_to_supervisor(Alive(found))
            time.sleep(BEAT_S)

    threading.Thread(target=send, name="paceline-alive", daemon=True).start()
