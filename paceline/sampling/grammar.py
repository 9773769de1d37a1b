"""Constrained output: bit masks of the tokens that a grammar allows next.

llguidance parses. A grammar is compiled on a worker thread, within limits on its size and its cost, and cached: a
request gets a copy of the compiled grammar, which then follows its tokens (`matcher.py`). The masks of a pass are
computed on several cores, on other threads than the engine's, while the device computes the logits (`engine/loop.py`).
Between `start_masks` and `wait_masks` nothing else may use the matchers of that pass.
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
from functools import partial
from typing import Any

import numpy as np

from paceline.request import GRAMMAR_LIMIT, Grammar, InvalidRequest, Request
from paceline.sampling.mask_worker import MaskWorker
from paceline.sampling.matcher import Compiled, GrammarMatcher, MaskRow, consume, fill_draft_masks, fill_masks
from paceline.sampling.types import Bits, Drafts, Masks
from paceline.scheduler.plan import Updates
from paceline.text.json_schema import with_options
from paceline.text.tokenizer import Tokenizer

MAX_COMPILE_S = 10.0
MAX_REPEATS = 20_000  # counted repetitions of a pattern, nested ones multiplied: they need memory
_MAX_COMPILED = 512  # cached grammars
_NUM_COMPILERS = 2
# The cost limits of one grammar, in llguidance's units: about a second to compile and a few milliseconds per mask.
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "max_grammar_size": 500_000,
    "max_items_in_row": 2000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
}

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

# `\d` and `\w` are ASCII, as in JSON Schema, where llguidance reads them so; in other patterns it would allow all of
# Unicode. The nested brackets are valid within a class too.
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[a-zA-Z0-9_]", "W": "[^a-zA-Z0-9_]"}

MaskBufferOf = Callable[[int, int], Bits]  # masks, words -> where the bits are written


class Grammars:
    """Compiles grammars and follows those of running requests. `compile` can be called on any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # of _compiled
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._setup_lock = threading.Lock()
        self._ll_tokenizer: Any = None
        self._executor: Any = None
        self._eos_mask = np.zeros(-(-vocab_size // 32), np.int32)  # allows EOS only
        # Used by the engine's thread only:
        self._matchers: dict[Request, GrammarMatcher] = {}
        self._workers: list[MaskWorker] = []  # started on first use
        self._started: tuple[Masks, list[MaskWorker]] | None = None

    # ------------------------------------------------------------------ compiling, on any thread

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """A future of the compiled grammar. Its error is an InvalidRequest."""
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
        while self._workers:
            # Masks are written to the executor's memory, so their computation must end before the executor is closed.
            self._workers.pop().close()
        with self._lock:
            for future in self._compiled.values():
                _settle(future, error=InvalidRequest("grammar was still being compiled when the engine closed."))

    def _work(self, grammar: Grammar, future: Future[Compiled]) -> None:
        """Compiles. The future fails after MAX_COMPILE_S, even if this thread still compiles."""
        timer = threading.Timer(MAX_COMPILE_S, self._time_out, (grammar, future))
        timer.daemon = True
        timer.start()
        try:
            _settle(future, self._compile(grammar))
        except InvalidRequest as error:
            _settle(future, error=error)
        finally:
            timer.cancel()

    def _time_out(self, grammar: Grammar, future: Future[Compiled]) -> None:
        with self._lock:
            if self._compiled.get(grammar) is future:
                del self._compiled[grammar]  # the machine may only have been busy: a new request tries again
        _settle(future, error=InvalidRequest(f"grammar takes more than {MAX_COMPILE_S:g} s to compile: simplify it."))

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            return self._compile_checked(grammar)
        except InvalidRequest:
            raise
        except BaseException as error:  # includes a panic of llguidance; the cause is this grammar
            raise InvalidRequest(f"grammar cannot be compiled ({type(error).__name__}: {error}): change it.") from error

    def _compile_checked(self, grammar: Grammar) -> Compiled:
        llguidance = self.set_up()
        source = _source(llguidance.LLMatcher, grammar)
        if grammar.reasoning is not None:
            source = _after_reasoning(source, grammar, self._tokenizer)
        for pattern in _patterns(grammar):
            if (count := num_repeats(pattern)) > MAX_REPEATS:
                raise InvalidRequest(
                    f"grammar has the pattern {pattern[:40]!r}, which repeats {count:,} times: "
                    f"give at most {MAX_REPEATS:,}."
                )
        matcher = llguidance.LLMatcher(
            self._ll_tokenizer,
            source,
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS, verbose_errors=False),
        )
        # Compilation is lazy and copies share its results: computing masks here makes a too expensive grammar fail now.
        for _ in range(2):
            tried = matcher.deep_copy()
            if not tried.is_error():
                tried.compute_bitmask()
            if tried.is_error():
                raise InvalidRequest(f"grammar is not a usable {_NAMES[grammar.kind]}: {_one_line(tried)}")
        return matcher

    def set_up(self) -> Any:
        """Loads llguidance and its tokenizer. For a large vocabulary this takes a second the first time, in which
        llguidance holds the GIL: a server calls it before it accepts requests."""
        llguidance = _llguidance()
        with self._setup_lock:
            if self._ll_tokenizer is None:
                # llguidance gets its own copy of the tokenizer: where a grammar allows only one text, a mask needs its
                # tokens, and with ours it would wait for the GIL, which the engine's thread holds.
                try:
                    self._ll_tokenizer = llguidance.LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=self._vocab_size,
                        eos_token=sorted(self._tokenizer.eos_ids),
                        slices=_SLICES,
                    )
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

    def attach(self, request: Request, compiled: Compiled) -> None:
        self._matchers[request] = GrammarMatcher(compiled)

    def detach(self, request: Request) -> None:
        self._matchers.pop(request, None)

    def apply_to(self, sampled: Iterable[Request]) -> bool:
        return bool(self._matchers) and any(request in self._matchers for request in sampled)

    def masks(self, sampled: Sequence[Request], buffer: MaskBufferOf, drafts: Drafts = ()) -> Masks:
        groups, masks = self._rows(sampled, buffer, drafts)
        for rows in groups:
            self._fill(rows, masks.bits)
        return masks

    def start_masks(self, sampled: Sequence[Request], buffer: MaskBufferOf, drafts: Drafts = ()) -> None:
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
        self, sampled: Sequence[Request], buffer: MaskBufferOf, drafts: Drafts
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

    def advance(self, updates: Updates) -> Sequence[tuple[Request, str]]:
        """Advances the matchers by the sampled tokens. Returns the requests whose grammar failed, with the reason."""
        if not self._matchers:
            return ()
        consumed: dict[Request, tuple[GrammarMatcher, list[int]]] = {}
        for request, token in zip(updates.requests, updates.tokens.tolist(), strict=True):
            if request in self._matchers and not request.is_finished:
                consumed.setdefault(request, (self._matchers[request], []))[1].append(token)
        failures = []
        for request in consume(self._executor, consumed):
            self.detach(request)
            why = _one_line(consumed[request][0].state)
            failures.append((request, f"{GRAMMAR_LIMIT}: {why}"))
        return failures


_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "choice": "list of choices",
}


def _settle(future: Future[Compiled], compiled: Compiled = None, error: InvalidRequest | None = None) -> None:
    """Sets the result or error of a future that has none yet."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(compiled)
        else:
            future.set_exception(error)


def _source(matcher: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's notation."""
    found: str
    if grammar.kind == "json_object":
        found = matcher.grammar_from_json_schema(with_options({"type": "object"}))
    elif grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.source)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"grammar is not a JSON schema: {error}.") from None
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"grammar is {grammar.source[:60]!r}: give a JSON schema, an object or a boolean.")
        found = matcher.grammar_from_json_schema(with_options(schema))
    elif grammar.kind == "regex":
        found = matcher.grammar_from_regex(_with_ascii_classes(grammar.source))
    elif grammar.kind == "lark":
        found = matcher.grammar_from_lark(grammar.source)
    else:
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(grammar.source))
        found = matcher.grammar_from_lark(f"start: {options}")
    return found


def _with_ascii_classes(pattern: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ASCII_CLASSES.get(match[1], match[0]), pattern, flags=re.DOTALL)


def _after_reasoning(source: str, grammar: Grammar, tokenizer: Tokenizer) -> str:
    """The grammar of reasoning, the prefix, and then a text that `source` allows. Reasoning is any text up to the
    closing marker."""
    assert grammar.reasoning is not None, "called for grammars with reasoning"
    opening, closing = grammar.reasoning
    literal = tokenizer.lark_literal(closing)
    if literal.startswith("<["):  # a token of its own, which is no part of a text
        reasoning = f"reasoning: text {literal} BLANKS?\ntext: /(.|\\n)*/"
    else:
        reasoning = f"reasoning: text BLANKS?\ntext[suffix={literal}]: /(.|\\n)*/"
    body_rule = f"{tokenizer.lark_literal(grammar.prefix)} @body" if grammar.prefix else "@body"
    start = f"({tokenizer.lark_literal(opening)} reasoning)? {body_rule}" if opening else f"reasoning {body_rule}"
    whole = "\n".join([f"start: {start}", reasoning, r"BLANKS: /[ \n\r\t]{1,4}/"])
    body = {"lark_grammar": source} if grammar.kind in ("lark", "choice") else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": whole}, {**body, "name": "body"}]})


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
    """The most repetitions of any part of a pattern by counts such as {3} or {1,9}, nested ones multiplied."""
    most = [1]  # for each open group, outermost first
    last = 1  # of the part that a following count repeats
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
    if text.startswith("NoExtensionBias"):  # what llguidance says of a grammar without any text
        return "a rule or $ref refers only to itself, so that no text matches it."
    return text if len(text) <= 300 else text[:297] + "..."


def _num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequest("grammar is given, but llguidance is not installed: pip install llguidance.") from None
    return llguidance
