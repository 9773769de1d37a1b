"""Constrained output: bit masks of the tokens that a grammar allows next.

llguidance parses. A grammar is compiled on a worker thread, in turns of tenants (`turns.py`), and cached: a request
gets a copy of the compiled grammar, which then follows its tokens (`matcher.py`). A server tries a grammar in another
process first, within limits on its cost (`grammar_trials.py`). The masks of a pass are computed on several cores, on
other threads than the engine's, while the device computes the logits (`engine/loop.py`). Between `start_masks` and
`wait_masks` nothing else may use the matchers of that pass.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from paceline.request import GRAMMAR_LIMIT, Grammar, InvalidRequest
from paceline.sampling.grammar_source import (
    GrammarText,
    TokenizerArguments,
    TrialTimeout,
    cannot_be_compiled,
    compiled,
    llguidance_source,
    one_line_error,
)
from paceline.sampling.mask_worker import MaskWorker
from paceline.sampling.matcher import CompiledGrammar, GrammarMatcher, MaskRow, consume, fill_draft_masks, fill_masks
from paceline.sampling.turns import Turns
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Updates
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLTokenizer

    from paceline.sampling.grammar_trials import GrammarTrials

_MAX_COMPILED = 512  # cached grammars
_NUM_COMPILERS = 4  # most of the time they wait for the processes of trials

# Classes of tokens that a mask allows as a whole if all of a class is allowed; it checks other tokens byte by byte. A
# string with few characters left can use no class of longer tokens, so there are several lengths: llguidance's own
# classes begin at 10 characters, and every mask near the end of a string then walks through the whole vocabulary. Twice
# as many lengths save a tenth of a mask and cost 0.2 s at the start (docs/log).
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 4, 8, 16)),
    r'[^"\\\x00-\x1F\x7F]+',
]
_MAX_THREADS = 8  # more gain little (docs/log)

MaskBufferOf = Callable[[int, int], Bits]  # masks, words -> where the bits are written


class Compiling(Future[CompiledGrammar]):
    """A grammar that is compiled for the requests that wait for it."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__()
        self.grammar = grammar
        self.num_waiting = 0
        self.tenants: set[str] = set()
        self.is_begun = False
        self.trial: socket.socket | None = None  # shutting it down ends the trial


class Grammars:
    """Compiles grammars and follows those of running requests. `compile` can be called on any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # of _compiled, and of the fields of what is in it
        self._compiled: OrderedDict[Grammar, Compiling] = OrderedDict()
        self._turns = Turns(self._run, _NUM_COMPILERS, "paceline-grammar")
        self._trials: GrammarTrials | None = None
        self._setup_lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor  # from `set_up` on
        self._eos_mask = np.zeros(-(-vocab_size // 32), np.int32)  # allows EOS only
        # Used by the engine's thread only:
        self._matchers: dict[TrackedRequest, GrammarMatcher] = {}
        self._workers: list[MaskWorker] = []  # started on first use
        self._started: tuple[Masks, list[MaskWorker]] | None = None

    # ------------------------------------------------------------------ compiling, on any thread

    def compile(self, grammar: Grammar, tenant: str = "default") -> Compiling:
        """A future of the compiled grammar, for one request. Its error is an InvalidRequest."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = Compiling(grammar)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            if not found.done():
                found.num_waiting += 1
                if tenant not in found.tenants:  # it runs when the first of them has its turn
                    found.tenants.add(tenant)
                    self._turns.add(tenant, found)
        return found

    def abandon(self, compiling: Compiling) -> None:
        """A request does not need its grammar any more. If no other one waits for it, it is not compiled."""
        with self._lock:
            compiling.num_waiting -= 1
            if compiling.num_waiting or compiling.done():
                return
            self._forget(compiling)
            trial = compiling.trial
            if trial is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    trial.shutdown(socket.SHUT_RDWR)
        compiling.cancel()

    def try_before_compiling(self, *, max_per_tenant: int = 1) -> None:
        """From now on grammars are compiled in another process first, for grammars of clients that are not trusted.
        `max_per_tenant`: how many of one tenant at a time. Raises InvalidRequest if llguidance cannot use this
        tokenizer."""
        from paceline.sampling.grammar_trials import GrammarTrials  # needs msgspec, which a minimal GPU host may lack

        self.set_up()
        self._turns.max_per_tenant = max_per_tenant
        self._trials = GrammarTrials(self._arguments())
        self._trials.start()

    def close(self) -> None:
        self._turns.close()
        if self._trials is not None:
            self._trials.close()
        while self._workers:
            # Masks are written to the executor's memory, so their computation must end before the executor is closed.
            self._workers.pop().close()
        with self._lock:
            for compiling in self._compiled.values():
                _settle(compiling, error=InvalidRequest("grammar was still being compiled when the engine closed."))

    def _run(self, compiling: Compiling) -> None:
        """Compiles, in the turn of one of the tenants that wait for it."""
        with self._lock:
            if compiling.is_begun or compiling.done():
                return
            compiling.is_begun = True
        try:
            _settle(compiling, self._compile(compiling))
        except InvalidRequest as error:
            if isinstance(error, TrialTimeout):
                with self._lock:
                    self._forget(compiling)
            _settle(compiling, error=error)

    def _forget(self, compiling: Compiling) -> None:
        """With the lock: a new request tries again."""
        if self._compiled.get(compiling.grammar) is compiling:
            del self._compiled[compiling.grammar]

    def _compile(self, compiling: Compiling) -> CompiledGrammar:
        llguidance = self.set_up()
        text = GrammarText.of(compiling.grammar, self._tokenizer)

        def began(trial: socket.socket) -> None:
            with self._lock:
                compiling.trial = trial
                if compiling.cancelled():
                    trial.shutdown(socket.SHUT_RDWR)

        try:
            if self._trials is None:
                source = llguidance_source(llguidance, text)
            else:
                source = self._trials.run(text, began)
            assert self._ll_tokenizer is not None, "set_up has created it"
            return compiled(llguidance, self._ll_tokenizer, source, text.kind)
        except InvalidRequest:
            raise
        except BaseException as error:  # includes a panic of llguidance
            raise cannot_be_compiled(error) from error
        finally:
            with self._lock:
                compiling.trial = None

    def _arguments(self) -> TokenizerArguments:
        # llguidance gets its own copy of the tokenizer: where a grammar allows only one text, a mask needs its tokens,
        # and with ours it would wait for the GIL, which the engine's thread holds.
        return TokenizerArguments(
            self._tokenizer.to_json(), self._vocab_size, sorted(self._tokenizer.eos_ids), list(_SLICES)
        )

    def set_up(self) -> ModuleType:
        """Loads llguidance and its tokenizer. For a large vocabulary this takes a second the first time, in which
        llguidance holds the GIL: a server calls it before it accepts requests."""
        llguidance = _llguidance()
        with self._setup_lock:
            if self._ll_tokenizer is None:
                try:
                    self._ll_tokenizer = self._arguments().create(llguidance)
                except BaseException as error:  # includes a panic of llguidance; the cause is the tokenizer
                    why = " ".join(str(error).split())
                    raise InvalidRequest(
                        f"grammar is given, but llguidance cannot use this model's tokenizer ({why}): leave it out."
                    ) from None
                for token in self._tokenizer.eos_ids:
                    self._eos_mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
                self._executor = llguidance.LLExecutor(num_threads=max(1, min(_MAX_THREADS, _num_cores() - 1)))
        return llguidance

    # ------------------------------------------------------------------ following, on the engine's thread

    def attach(self, request: TrackedRequest, compiled: CompiledGrammar) -> None:
        self._matchers[request] = GrammarMatcher(compiled)

    def detach(self, request: TrackedRequest) -> None:
        self._matchers.pop(request, None)

    def apply_to(self, sampled: Iterable[TrackedRequest]) -> bool:
        return bool(self._matchers) and any(request in self._matchers for request in sampled)

    def masks(self, sampled: Sequence[TrackedRequest], buffer: MaskBufferOf, drafts: Drafts = ()) -> Masks:
        groups, masks = self._rows(sampled, buffer, drafts)
        for rows in groups:
            self._fill(rows, masks.bits)
        return masks

    def start_masks(self, sampled: Sequence[TrackedRequest], buffer: MaskBufferOf, drafts: Drafts = ()) -> None:
        """Like `masks`, on other threads; `wait_masks` returns the result. Requests may end in between, but no matcher
        may advance."""
        groups, masks = self._rows(sampled, buffer, drafts)
        while len(self._workers) < len(groups):
            self._workers.append(MaskWorker("paceline-masks"))
        # One worker each: a second call on the same thread would begin when the engine's thread blocks.
        workers = self._workers[: len(groups)]
        for worker, rows in zip(workers, groups, strict=True):
            worker.start(partial(self._fill, rows, masks.bits))
        self._started = masks, workers

    def wait_masks(self) -> Masks:
        assert self._started is not None, "no masks were started"
        (masks, workers), self._started = self._started, None
        for worker in workers:
            worker.wait()
        return masks

    def _rows(
        self, sampled: Sequence[TrackedRequest], buffer: MaskBufferOf, drafts: Drafts
    ) -> tuple[list[list[MaskRow]], Masks]:
        """The rows that get masks, those without and those with drafts. The bits are not written yet."""
        indices: list[int] = []
        plain: list[MaskRow] = []
        drafted: list[MaskRow] = []
        index = 0
        for row, request in enumerate(sampled):
            mine = drafts[row] if drafts else ()
            matcher = self._matchers.get(request)
            # The tokens of a request that has finished are discarded, so it needs no mask.
            if matcher is not None and not request.is_finished:
                (drafted if mine else plain).append(MaskRow(request, matcher, len(indices), mine))
                indices += range(index, index + 1 + len(mine))
            index += 1 + len(mine)
        masks = Masks(np.array(indices, np.int64), buffer(len(indices), -(-self._vocab_size // 32)))
        return [rows for rows in (plain, drafted) if rows], masks

    def _fill(self, rows: list[MaskRow], bits: Bits) -> None:
        """Computes the masks of some rows, on any thread."""
        if rows[0].drafts:
            fill_draft_masks(self._executor, rows, bits, self._tokenizer.eos_ids, self._eos_mask)
        else:
            fill_masks(self._executor, rows, bits)

    def advance(self, updates: Updates) -> Sequence[tuple[TrackedRequest, str]]:
        """Advances the matchers by the sampled tokens. Returns the requests whose grammar failed, with the reason."""
        if not self._matchers:
            return ()
        consumed: dict[TrackedRequest, tuple[GrammarMatcher, list[int]]] = {}
        for request, token in zip(updates.requests, updates.tokens.tolist(), strict=True):
            if request in self._matchers and not request.is_finished:
                consumed.setdefault(request, (self._matchers[request], []))[1].append(token)
        failures = []
        for request in consume(self._executor, consumed):
            self.detach(request)
            why = one_line_error(consumed[request][0].state)
            failures.append((request, f"{GRAMMAR_LIMIT}: {why}"))
        return failures


def _settle(
    future: Future[CompiledGrammar], compiled: CompiledGrammar | None = None, error: InvalidRequest | None = None
) -> None:
    """Sets the result or error of a future that has none yet."""
    with contextlib.suppress(InvalidStateError):
        if compiled is not None:
            future.set_result(compiled)
        else:
            future.set_exception(error)


def _num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequest("grammar is given, but llguidance is not installed: pip install llguidance.") from None
    return llguidance
