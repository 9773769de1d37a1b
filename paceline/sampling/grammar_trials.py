"""Compiles grammars as a trial in processes that can be ended, so that only what passes is compiled in the engine.

A compiled grammar cannot leave its process, and a thread that compiles cannot be stopped: llguidance checks its limits
after its slowest steps. One process has llguidance's tokenizer and forks a child for every trial. A child ends itself
past its limits, or when the other side closes the socket.

    engine ── socket of a trial ──▶ process ── fork ──▶ child ── Passed | Failed ──▶ engine
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from paceline.logs import set_up_child_logs
from paceline.request import InvalidRequest, PacelineError
from paceline.sampling.grammar_source import (
    GrammarText,
    TokenizerArguments,
    TrialTimeout,
    cannot_be_compiled,
    compiled,
    llguidance_source,
    mask,
    next_token,
)
from paceline.sampling.matcher import CompiledGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CPU_S = 1.0  # of the trial; on a busy machine it takes longer
MAX_MEMORY = 1 << 30  # bytes, beyond the tokenizer's
MAX_MASK_S = 0.003  # CPU time of one mask: every row of a pass has one, and all streams wait for it
MAX_S = 30.0  # until the result: then the machine is too busy to tell, or the process hangs and is ended
_NICENESS = 10  # grammars wait for the engine and its streams, not the other way round
_FOLLOWED_TOKENS = 32  # whose masks are tried
_LENGTH_BYTES = 4


class Passed(msgspec.Struct, frozen=True, tag=True):
    source: str  # the grammar in llguidance's notation


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


class GrammarTrials:
    """The engine's side. Methods can be called on any thread."""

    def __init__(self, tokenizer: TokenizerArguments) -> None:
        self._tokenizer = msgspec.msgpack.encode(tokenizer)
        self._lock = threading.Lock()  # guards the process and its socket
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Starts the process, which gets ready in the background."""
        with self._lock:
            self._started()

    def run(self, grammar: GrammarText, began: Callable[[socket.socket], None]) -> str:
        """The grammar in llguidance's notation. Raises InvalidRequest if it cannot be compiled within the limits.
        `began` gets a socket: shutting it down ends the trial."""
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    process = self._hand_over(theirs)
                began(ours)
                ours.settimeout(MAX_S)
                try:
                    _send(ours, msgspec.msgpack.encode(grammar))
                    result = msgspec.msgpack.decode(_receive(ours), type=Passed | Failed)
                except TimeoutError:
                    self._end(process)  # it may be stopped: every later grammar would wait as long
                    raise TrialTimeout(f"grammar was not compiled within {MAX_S:g} s: try again later.") from None
                except (EOFError, OSError):
                    if process.poll() is None:  # the child has ended, not the process that forks
                        raise InvalidRequest(
                            f"grammar takes more than {MAX_CPU_S:g} s of CPU time or "
                            f"{MAX_MEMORY >> 30} GB of memory to compile: simplify it."
                        ) from None
                    continue
            if isinstance(result, Failed):
                raise InvalidRequest(result.message)
            return result.source
        raise TrialTimeout("grammar was not compiled, since the process for it was killed twice: try again later.")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._end_process()

    def _hand_over(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Gives one end of a trial's socket to the process, a new one if the last one was killed."""
        with self._lock:
            for _ in range(2):
                process, control = self._started()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(control, [b"t"], [theirs.fileno()])
                    return process
                self._end_process()
        raise TrialTimeout("grammar was not compiled, since the process for it does not start: see the server's log.")

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._is_closed:
            raise TrialTimeout("grammar was still being compiled when the engine closed.")
        if self._process is not None and self._process.poll() is not None:
            self._end_process()
        if self._process is None or self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs, tempfile.TemporaryFile() as setup:
                setup.write(self._tokenizer)
                setup.seek(0)
                command = [sys.executable, "-m", "paceline.sampling.grammar_trials", str(theirs.fileno())]
                self._process = subprocess.Popen(command, stdin=setup, pass_fds=[theirs.fileno()])
        return self._process, self._socket

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Unless another one has taken its place. Trials of its children go on."""
        with self._lock:
            if process is self._process:
                self._end_process()

    def _end_process(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket) -> bytes:
    return _receive_exactly(connection, int.from_bytes(_receive_exactly(connection, _LENGTH_BYTES), "big"))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


# ---------------------------------------------------------------------- in the process


def main() -> None:
    """Forks a child for every trial, until the engine closes the socket or dies."""
    import llguidance

    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal signals the whole group; the engine ends this process
    set_up_child_logs("grammars")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children need no wait
    control = socket.socket(fileno=int(sys.argv[1]))
    tokenizer = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenizerArguments).create(llguidance)
    while True:
        try:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionResetError:
            fds = []
        if not fds:
            os._exit(0)
        if os.fork() == 0:
            try:
                control.close()
                _try(tokenizer, socket.socket(fileno=fds[0]))
            finally:
                os._exit(1)
        os.close(fds[0])


def _try(tokenizer: LLTokenizer, connection: socket.socket) -> None:
    """In a child: compiles one grammar and ends the process."""
    import llguidance

    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # ends the process
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_MEMORY, used + MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a panic is the result, and no line of the log
    try:
        grammar = msgspec.msgpack.decode(_receive(connection), type=GrammarText)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        result: Passed | Failed
        try:
            source = llguidance_source(llguidance, grammar)
            _check_masks(compiled(llguidance, tokenizer, source, grammar.kind), grammar.kind)
            result = Passed(source)
        except PacelineError as error:
            result = Failed(str(error))
        except BaseException as error:  # includes a panic of llguidance
            result = Failed(str(cannot_be_compiled(error)))
        _send(connection, msgspec.msgpack.encode(result))
    except (EOFError, OSError):  # the engine has closed the socket
        pass
    os._exit(0)


def _check_masks(grammar: CompiledGrammar, kind: str) -> None:
    """Follows the grammar for a few tokens. What is slow behind others, which a request may choose, is not found."""
    state = grammar.matcher.deep_copy()
    new, repeated = [0.0], 0.0
    for _ in range(_FOLLOWED_TOKENS):
        # llguidance keeps much of what it finds for a mask. What it finds anew at most tokens, each request pays; and
        # what it finds again each time, all requests of one grammar pay.
        times = [_mask_s(state.deep_copy(), kind) for _ in range(3)]
        new.append(times[0])
        repeated = max(repeated, min(times))
        seconds = max(repeated, statistics.median(new))
        if seconds > MAX_MASK_S:
            raise InvalidRequest(
                f"grammar takes {seconds * 1e3:.1f} ms of CPU time to find the tokens that may come next, at most "
                f"{MAX_MASK_S * 1e3:g} ms are allowed: give fewer alternatives or optional properties."
            )
        token = next_token(state, mask(state, kind))
        if token is None:
            return
        state.consume_token(token)


def _mask_s(state: LLMatcher, kind: str) -> float:
    began = time.thread_time()
    mask(state, kind)
    return time.thread_time() - began


def _end_with(connection: socket.socket) -> None:
    """Ends the process when the engine closes its end: nobody waits for the result."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(0)


if __name__ == "__main__":
    main()
