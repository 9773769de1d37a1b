"""What a grammar is in llguidance's notation, and within which limits it is compiled.

Nothing but `GrammarText.of` needs our tokenizer, so that another process can compile a grammar (`grammar_trials.py`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.request import Grammar, InvalidRequest
from paceline.sampling.matcher import CompiledGrammar
from paceline.text.json_schema import with_options
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_REPEATS = 20_000  # counted repetitions of a pattern, nested ones multiplied: they need memory
# Optional properties: llguidance's time for them and for their masks is quadratic. A row of its parser has four items
# for each, so at the limit `max_items_in_row` an object with 500 fails after its first token.
MAX_OPTIONAL = 450  # of one object
MAX_ALL_OPTIONAL = 1000  # of all objects: alternatives are followed at the same time
# The cost limits of one grammar, in llguidance's units: a few milliseconds per mask. Nothing limits the time that is
# quadratic in the number of properties.
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "max_grammar_size": 500_000,
    "max_items_in_row": 2000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
}

# `\d` and `\w` are ASCII, as in JSON Schema, where llguidance reads them so; in other patterns it would allow all of
# Unicode. The nested brackets are valid within a class too.
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[a-zA-Z0-9_]", "W": "[^a-zA-Z0-9_]"}

_ROW = re.compile(r"Current row has (\d+) items; max is (\d+)")
_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "choice": "list of choices",
}


class TrialTimeout(InvalidRequest):
    """A grammar was not tried: nothing is known of it, so it can be tried again."""


@dataclass(frozen=True, slots=True)
class TokenizerArguments:
    """The arguments of llguidance's tokenizer."""

    tokenizer: str  # as JSON
    n_vocab: int
    eos_token: list[int]
    slices: list[str]

    def create(self, llguidance: ModuleType) -> LLTokenizer:
        tokenizer: LLTokenizer = llguidance.LLTokenizer(
            self.tokenizer, n_vocab=self.n_vocab, eos_token=self.eos_token, slices=self.slices
        )
        return tokenizer


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar whose markers of reasoning are literals of Lark."""

    kind: str
    source: str
    reasoning: tuple[str, str] | None
    prefix: str

    @classmethod
    def of(cls, grammar: Grammar, tokenizer: Tokenizer) -> GrammarText:
        def literal(text: str) -> str:
            return tokenizer.lark_literal(text) if text else ""

        if grammar.reasoning is None:
            return cls(grammar.kind, grammar.source, None, "")
        opening, closing = grammar.reasoning
        return cls(grammar.kind, grammar.source, (literal(opening), literal(closing)), literal(grammar.prefix))


def llguidance_source(llguidance: ModuleType, grammar: GrammarText) -> str:
    """The grammar in llguidance's notation. Raises InvalidRequest for what llguidance would take too long for."""
    source = _body(llguidance.LLMatcher, grammar)
    if grammar.reasoning is not None:
        source = _after_reasoning(source, grammar)
    _check_optional(grammar)
    for pattern in _patterns(grammar):
        if (count := num_repeats(pattern)) > MAX_REPEATS:
            raise InvalidRequest(
                f"grammar has the pattern {pattern[:40]!r}, which repeats {count:,} times: "
                f"give at most {MAX_REPEATS:,}."
            )
    return source


def compiled(llguidance: ModuleType, ll_tokenizer: LLTokenizer, source: str, kind: str) -> CompiledGrammar:
    """The grammar with this source, compiled within the limits."""
    limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
    matcher = llguidance.LLMatcher(ll_tokenizer, source, log_level=0, limits=limits)
    # Compilation is lazy and copies share its results: computing masks here makes a too expensive grammar fail now.
    mask(matcher.deep_copy(), kind)
    state = matcher.deep_copy()
    first_mask = mask(state, kind)
    if (token := next_token(state, first_mask)) is not None:
        state.consume_token(token)
        mask(state, kind)
    return CompiledGrammar(matcher, first_mask)


def mask(state: LLMatcher, kind: str) -> npt.NDArray[np.int32]:
    """The mask of the next token. Raises InvalidRequest if the grammar exceeds a limit there."""
    bits = b"" if state.is_error() else state.compute_bitmask()
    if state.is_error():
        raise InvalidRequest(f"grammar is not a usable {_NAMES[kind]}: {one_line_error(state)}")
    return np.frombuffer(bits, np.int32)


def next_token(state: LLMatcher, allowed: npt.NDArray[np.int32]) -> int | None:
    """A token that may follow: the only one, or else the first that is allowed. None where the grammar ends."""
    forced: list[int] = [] if state.is_stopped() else state.compute_ff_tokens()
    if forced:
        return forced[0]
    tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
    return None if state.is_stopped() or not len(tokens) else int(tokens[0])


def cannot_be_compiled(error: BaseException) -> InvalidRequest:
    """For any other error, such as a panic of llguidance: its cause is the grammar."""
    return InvalidRequest(f"grammar cannot be compiled ({type(error).__name__}: {error}): change it.")


def _body(matcher: type[LLMatcher], grammar: GrammarText) -> str:
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


def _after_reasoning(source: str, grammar: GrammarText) -> str:
    """The grammar of reasoning, the prefix, and then a text that `source` allows. Reasoning is any text up to the
    closing marker."""
    assert grammar.reasoning is not None, "called for grammars with reasoning"
    opening, closing = grammar.reasoning
    if closing.startswith("<["):  # a token of its own, which is no part of a text
        reasoning = f"reasoning: text {closing} BLANKS?\ntext: /(.|\\n)*/"
    else:
        reasoning = f"reasoning: text BLANKS?\ntext[suffix={closing}]: /(.|\\n)*/"
    body_rule = f"{grammar.prefix} @body" if grammar.prefix else "@body"
    start = f"({opening} reasoning)? {body_rule}" if opening else f"reasoning {body_rule}"
    whole = "\n".join([f"start: {start}", reasoning, r"BLANKS: /[ \n\r\t]{1,4}/"])
    body = {"lark_grammar": source} if grammar.kind in ("lark", "choice") else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": whole}, {**body, "name": "body"}]})


def _nodes(schema: object) -> Iterator[dict[str, object]]:
    """All objects in a JSON document."""
    todo = [schema]
    while todo:
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, dict):
            yield value


def _schemas(grammar: GrammarText) -> Iterator[object]:
    """The JSON schemas in a grammar."""
    if grammar.kind == "json_schema":
        yield json.loads(grammar.source)
    elif grammar.kind == "lark":
        for found in re.finditer(r"%json\s*", grammar.source):
            with contextlib.suppress(ValueError, RecursionError):  # llguidance reports it, if it is no comment
                yield json.JSONDecoder().raw_decode(grammar.source, found.end())[0]


def _check_optional(grammar: GrammarText) -> None:
    total = 0
    for node in chain.from_iterable(map(_nodes, _schemas(grammar))):
        properties, required = node.get("properties"), node.get("required")
        if not isinstance(properties, dict):
            continue
        names = {one for one in required if isinstance(one, str)} if isinstance(required, list) else set()
        total += (count := len(properties.keys() - names))
        if count > MAX_OPTIONAL:
            raise InvalidRequest(
                f"grammar has an object with {count:,} optional properties: give at most {MAX_OPTIONAL:,}, "
                "or list them in required."
            )
    if total > MAX_ALL_OPTIONAL:
        raise InvalidRequest(
            f"grammar has {total:,} optional properties in all its objects: give at most {MAX_ALL_OPTIONAL:,}, "
            "or list them in required."
        )


def _patterns(grammar: GrammarText) -> Iterator[str]:
    """The regular expressions in a grammar."""
    if grammar.kind == "regex":
        yield grammar.source
    elif grammar.kind == "lark":
        yield from re.findall(r"/((?:\\.|[^/\\\n])+)/", grammar.source)
    for node in chain.from_iterable(map(_nodes, _schemas(grammar))):
        if isinstance(pattern := node.get("pattern"), str):
            yield pattern
        if isinstance(patterns := node.get("patternProperties"), dict):
            yield from patterns


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


def one_line_error(matcher: LLMatcher) -> str:
    text = " ".join(matcher.get_error().split())
    if found := _ROW.search(text):
        return (
            f"it allows too much at one place ({found[1]} items of llguidance's parser, at most {found[2]}): give "
            "fewer alternatives or optional properties."
        )
    if text.startswith("NoExtensionBias"):  # what llguidance says of a grammar without any text
        return "a rule or $ref refers only to itself, so that no text matches it."
    return text if len(text) <= 300 else text[:297] + "..."
