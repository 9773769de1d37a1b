"""Output that obeys a grammar: which tokens may come next, as bits.

llguidance does the parsing. A grammar is compiled on a worker thread, within limits on its size and on the work it
takes, and kept: a request gets a copy of the compiled one, which then follows its tokens. Masks of a pass are computed
on several cores at once, beside the engine's thread and while the device computes the logits they are for
(`engine/loop.py`). Between `start_masks` and `wait_masks` nobody else may touch the matchers of that pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline.request import Grammar, InvalidRequest, Request
from paceline.sampling.types import Bits, Masks
from paceline.sampling.worker import Worker
from paceline.scheduler.plan import Updates
from paceline.text.tokenizer import Tokenizer

MAX_SOURCE = 1 << 18  # characters of a grammar
MAX_COMPILE_S = 10.0
MAX_REPEATS = 20_000  # of a pattern's counted repetitions, nested ones multiplied: memory grows with them
_MAX_COMPILED = 512  # grammars that are kept
_NUM_COMPILERS = 2
# What one grammar may cost, in llguidance's units: compiling about a second, and a mask of some milliseconds.
_LIMITS = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 200_000, "max_grammar_size": 500_000,
           "max_items_in_row": 2000, "step_max_items": 50_000, "max_lexer_states": 50_000}  # fmt: skip

# Classes of tokens that a mask takes as a whole where all of a class may come; the others it goes through byte by byte.
# A string with few characters left takes no class of longer ones, so there are many lengths: llguidance's own classes
# begin at 10 characters, and every mask near a string's end then costs a walk through the whole vocabulary.
_SLICES = [r"[\x20\x0A\x0D\x09]+",
           *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 3, 4, 5, 6, 8, 10, 14, 20, 30)),
           r'[^"\\\x00-\x1F\x7F]+']  # fmt: skip
_MAX_THREADS = 8  # more of them gain little (docs/log.md)

# Without a bound a weak model writes blanks for ever; a schema may say otherwise (its "x-guidance").
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}

Compiled = Any  # llguidance's matcher, in its first state
MaskBufferOf = Callable[[int, int], Bits]  # rows, words -> where the bits are written


class Grammars:
    """Compiles grammars and follows those of running requests. `compile` may be called on any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # of what is compiled
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._setup_lock = threading.Lock()
        self._ll_tokenizer: Any = None
        self._executor: Any = None
        # The engine's thread alone:
        self._matchers: dict[Request, Any] = {}
        self._worker: Worker | None = None  # made at first use
        self._started: Masks | None = None

    # ------------------------------------------------------------------ compiling, on any thread

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """The compiled grammar, now or later; the future's error is an InvalidRequest."""
        if len(grammar.source) > MAX_SOURCE:
            raise InvalidRequest(f"grammar has {len(grammar.source)} characters: give at most {MAX_SOURCE}.")
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
            if self._pool is None:
                _llguidance()
                self._pool = ThreadPoolExecutor(_NUM_COMPILERS, "paceline-grammar")
            found = self._compiled[grammar] = Future()
            self._pool.submit(self._work, grammar, found)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._worker is not None:
            # Masks that are being computed are written to the executor's memory: not after it is closed.
            self._worker.close()
            self._worker = None
        with self._lock:
            for future in self._compiled.values():
                _settle(future, error=InvalidRequest("grammar was still being compiled when the engine was closed."))

    def _work(self, grammar: Grammar, future: Future[Compiled]) -> None:
        """Compiles. Whoever waits is answered in time, even if this thread has to go on."""
        timer = threading.Timer(MAX_COMPILE_S, self._give_up, (grammar, future))
        timer.daemon = True
        timer.start()
        try:
            _settle(future, self._compile(grammar))
        except InvalidRequest as error:
            _settle(future, error=error)
        finally:
            timer.cancel()

    def _give_up(self, grammar: Grammar, future: Future[Compiled]) -> None:
        with self._lock:
            if self._compiled.get(grammar) is future:
                del self._compiled[grammar]  # the machine may only have been busy: who asks again may try again
        _settle(future, error=InvalidRequest(f"grammar takes more than {MAX_COMPILE_S:g} s to compile: simplify it."))

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            return self._compile_checked(grammar)
        except InvalidRequest:
            raise
        except BaseException as error:  # a panic of llguidance is one; whatever it was, it is about this grammar
            raise InvalidRequest(f"grammar cannot be compiled ({type(error).__name__}: {error}): change it.") from error

    def _compile_checked(self, grammar: Grammar) -> Compiled:
        llguidance = self.set_up()
        source = _source(llguidance.LLMatcher, grammar)
        for pattern in _patterns(grammar):
            if (count := num_repeats(pattern)) > MAX_REPEATS:
                raise InvalidRequest(
                    f"grammar has the pattern {pattern[:40]!r}, which repeats {count:,} times: allow {MAX_REPEATS:,}."
                )
        matcher = llguidance.LLMatcher(
            self._ll_tokenizer, source, log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS, verbose_errors=False),
        )  # fmt: skip
        # Work is put off until a mask needs it, and copies share what was done: one that is too much fails here.
        for _ in range(2):
            tried = matcher.deep_copy()
            if not tried.is_error():
                tried.compute_bitmask()
            if tried.is_error():
                raise InvalidRequest(f"grammar is not a {_NAMES[grammar.kind]} that can be used: {_one_line(tried)}")
        return matcher

    def set_up(self) -> Any:
        """llguidance, with what all grammars need. For a large vocabulary this takes a second the first time, in which
        llguidance lets no other thread run: a server does it before requests come."""
        llguidance = _llguidance()
        with self._setup_lock:
            if self._ll_tokenizer is None:
                # A copy of its own: where a grammar leaves one text, a mask asks for its tokens, and would have to ask
                # ours under Python's lock, for which the engine's thread lets it wait.
                try:
                    self._ll_tokenizer = llguidance.LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=sorted(self._tokenizer.eos_ids),
                        slices=_SLICES,
                    )  # fmt: skip
                except (
                    BaseException
                ) as error:  # a panic of llguidance is one; whatever it was, it is about this tokenizer
                    raise InvalidRequest(
                        f"grammar is given, and llguidance cannot use this model's tokenizer ({error}): leave it out."
                    ) from None
                self._executor = llguidance.LLExecutor(num_threads=max(1, min(_MAX_THREADS, _num_cores() - 1)))
        return llguidance

    # ------------------------------------------------------------------ following, on the engine's thread

    def attach(self, request: Request, compiled: Compiled) -> None:
        self._matchers[request] = compiled.deep_copy()

    def detach(self, request: Request) -> None:
        self._matchers.pop(request, None)

    def apply_to(self, sampled: Iterable[Request]) -> bool:
        return bool(self._matchers) and any(request in self._matchers for request in sampled)

    def masks(self, sampled: Sequence[Request], buffer: MaskBufferOf) -> Masks:
        matchers, masks = self._rows(sampled, buffer)
        self._fill(matchers, masks.bits)
        return masks

    def start_masks(self, sampled: Sequence[Request], buffer: MaskBufferOf) -> None:
        """As `masks`, on another thread: `wait_masks` has them. Requests may end in between, and nothing advances."""
        if self._worker is None:
            self._worker = Worker("paceline-masks")
        matchers, self._started = self._rows(sampled, buffer)
        bits = self._started.bits
        self._worker.start(lambda: self._fill(matchers, bits))

    def wait_masks(self) -> Masks:
        assert self._worker is not None and self._started is not None, "no masks were started"
        masks, self._started = self._started, None
        self._worker.wait()
        return masks

    def _rows(self, sampled: Sequence[Request], buffer: MaskBufferOf) -> tuple[list[tuple[Any, int]], Masks]:
        """Which rows get masks, with their matchers; the bits are still to be written."""
        rows: list[int] = []
        matchers: list[tuple[Any, int]] = []
        for row, request in enumerate(sampled):
            matcher = self._matchers.get(request)
            # One that has ended meanwhile may say anything: nobody will hear it.
            if matcher is not None and not request.is_finished:
                matchers.append((matcher, len(rows)))
                rows.append(row)
        return matchers, Masks(np.array(rows, np.int64), buffer(len(rows), -(-self._vocab_size // 32)))

    def _fill(self, matchers: list[tuple[Any, int]], bits: Bits) -> None:
        """On any thread; Python's lock is free while it computes."""
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * 4, len(matchers))
            for matcher, place in matchers:
                if matcher.is_error():
                    bits[place] = -1  # its request ends with the next tokens, which it will not take

    def advance(self, updates: Updates) -> Sequence[tuple[Request, str]]:
        if not self._matchers:
            return ()
        took = [
            (request, self._matchers[request], token)
            for request, token in zip(updates.requests, updates.tokens.tolist(), strict=True)
            if request in self._matchers and not request.is_finished
        ]
        if not took:
            return ()
        results = self._executor.consume_token_par([(matcher, token) for _, matcher, token in took])
        failures = []
        for (request, matcher, _), is_right in zip(took, results, strict=True):
            if not is_right:
                self.detach(request)
                failures.append((request, f"the grammar took too much work: {_one_line(matcher)}"))
        return failures


_NAMES = {"json_schema": "JSON schema", "json_object": "JSON object", "regex": "regular expression",
          "lark": "Lark grammar", "choice": "list of choices"}  # fmt: skip


def _settle(future: Future[Compiled], compiled: Compiled = None, error: InvalidRequest | None = None) -> None:
    """Unless that has happened."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(compiled)
        else:
            future.set_exception(error)


def _source(matcher: Any, grammar: Grammar) -> str:
    """In llguidance's own notation."""
    found: str
    if grammar.kind == "json_object":
        found = matcher.grammar_from_json_schema({"type": "object"}, _JSON)
    elif grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.source)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"grammar is not a JSON schema: {error}.") from None
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"grammar is {grammar.source[:60]!r}: a JSON schema is an object.")
        found = matcher.grammar_from_json_schema(grammar.source, _JSON)
    elif grammar.kind == "regex":
        found = matcher.grammar_from_regex(grammar.source)
    elif grammar.kind == "lark":
        found = matcher.grammar_from_lark(grammar.source)
    else:
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(grammar.source))
        found = matcher.grammar_from_lark(f"start: {options}")
    return found


def _patterns(grammar: Grammar) -> Iterator[str]:
    """The regular expressions in a grammar."""
    if grammar.kind == "regex":
        yield grammar.source
    elif grammar.kind == "lark":
        yield from re.findall(r"/((?:\\.|[^/\\\n])+)/", grammar.source)
    elif grammar.kind == "json_schema":
        todo = [json.loads(grammar.source)]
        while todo:
            value = todo.pop()
            todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if isinstance(value, dict):
                yield from [value["pattern"]] if isinstance(value.get("pattern"), str) else ()
                yield from value["patternProperties"] if isinstance(value.get("patternProperties"), dict) else ()


def num_repeats(pattern: str) -> int:
    """How often the innermost part of a pattern may be repeated by counts such as {3} or {1,9}, at most."""
    most = [1]  # of each open group, outermost first
    last = 1  # of what a count would repeat
    for token in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|.", pattern, re.DOTALL):
        if token == "(":
            most.append(1)
            last = 1
        elif token == ")" and len(most) > 1:
            last = most.pop()
            most[-1] = max(most[-1], last)
        elif len(token) > 2 and token[0] == "{":
            last *= max(int(number or 1) for number in token[1:-1].split(","))
            most[-1] = max(most[-1], last)
        else:
            last = 1
    return max(most)


def _one_line(matcher: Any) -> str:
    text = " ".join(matcher.get_error().split())
    return text if len(text) <= 300 else text[:297] + "..."


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequest(
            "grammar is given, and llguidance is not installed here: pip install 'paceline[grammar]'."
        ) from None
    return llguidance
