"""A request and its life.

What a caller asks for (`Request`, `SamplingParams`) and how far the scheduler has got with it. The phase can
only change through `Request.enter`, so an illegal step is an error where it happens and not three passes later.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paceline.scheduler.node import Node

Tokens = npt.NDArray[np.int32]


class PacelineError(Exception):
    """The base of every error a caller can cause; the message is one sentence with a remedy."""


class InvalidRequest(PacelineError, ValueError):
    """A request that makes no sense: the message names the field, the value and what would be right."""


class Refused(PacelineError):
    """A request that was understood and cannot be taken: it can never fit, or the queue is full."""

    def __init__(self, message: str, *, retry: bool, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry = retry  # whether the same request may be accepted later
        self.retry_after_s = retry_after_s  # when that is likely, if it can be told


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"


class IllegalTransition(AssertionError):
    """A phase change that the life of a request does not allow: always our own bug."""


# PREFILL may finish directly: one token asked for, or none at all. The only way back is retraction.
_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODING, Phase.WAITING, Phase.FINISHED}),
    Phase.DECODING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


# Bounds of sampling parameters. `SamplingParams` checks them; the OpenAPI document states them.
MAX_TEMPERATURE = 10_000
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100
MAX_PENALTY = 2  # of presence and frequency, in both directions
MAX_LOGIT_BIAS = 100  # in both directions
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BIASES = 1024  # tokens that one request may bias
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 4096
MAX_STOP_IDS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request together
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark", "choice")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like: a JSON schema (as JSON), any JSON object, a regular expression, a grammar in
    Lark's notation, or one of some strings (a JSON list)."""

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidRequest(f"grammar is of kind {self.kind!r}: choose one of {', '.join(GRAMMAR_KINDS)}.")
        if not isinstance(self.source, str) or (not self.source and self.kind != "json_object"):
            raise InvalidRequest(f"grammar is {self.source!r}: give its text.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        return cls("lark", text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        if isinstance(options, str) or not options or not all(isinstance(one, str) and one for one in options):
            raise InvalidRequest(f"choice is {options!r}: give a list of strings of at least one character.")
        return cls("choice", json.dumps(list(options)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. `max_tokens` left open ends with the context.

    `temperature` 0 always takes the likeliest token. `top_k` keeps so many of the likeliest, `top_p` the smallest set
    of them whose chances add up to it, `min_p` those at least so likely as that share of the likeliest; equals stay
    together. `repetition_penalty` divides the positive logits of tokens that stand in the prompt or the output and
    multiplies the negative ones; `frequency_penalty` is subtracted for each time a token stands in the output,
    `presence_penalty` once. `logit_bias` is added by token id. With a `seed` the same request gives the same tokens,
    whatever runs beside it.

    `n` answers are given, of `best_of` that are generated. `stop` are strings that end the text and are not part of
    it, unless `include_stop`; `stop_token_ids` and the model's own end tokens (unless `ignore_eos`) end it too. Before
    `min_tokens` none of these can. `bad_words` never appear. `max_tokens` 0 computes the prompt alone.

    `logprobs` asks for the logarithm of each output token's chance, as the model gives it (before temperature,
    penalties and bias), and of so many of the likeliest; `logprob_token_ids` for those of these tokens too;
    `prompt_logprobs` for the prompt's. A `grammar` is obeyed by every token.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "bad_words", "logprob_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        bias = self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(bias.items() if isinstance(bias, Mapping) else bias))
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE, "give 0 (always the likeliest token) to 10000")
        _number("top_p", self.top_p, 0, 1, "give a number above 0 and up to 1 (all tokens)")
        if self.top_p == 0:
            raise InvalidRequest(f"top_p is {self.top_p!r}: give a number above 0 and up to 1 (all tokens).")
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1, "give 1 or more, or leave it out to keep all tokens")
        _number("min_p", self.min_p, 0, 1, "give 0 (all tokens) to 1")
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _number("repetition_penalty", self.repetition_penalty, low, high, "give 0.01 to 100; 1 changes nothing")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, "give -2 to 2; 0 changes nothing")
        self._check_lengths()
        self._check_choices()
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop has {text!r}: give strings of at least one character.")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, "give token ids, from 0 up")
        self._check_biases()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, f"give 0 to {MAX_LOGPROBS}", MAX_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(f"grammar is {self.grammar!r}: give a Grammar, such as Grammar.regex(...).")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("ignore_eos is True and a grammar is given, which must be able to end: drop one.")

    @property
    def is_greedy(self) -> bool:
        """Below this temperature no other token has a chance, and scaled logits would overflow."""
        return self.temperature < 1e-5

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, however it was given."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with this seed, a right one: nothing is checked again, which takes as long as all else that is done
        when a request comes."""
        seeded = copy(self)
        object.__setattr__(seeded, "seed", seed)
        return seeded

    def each_choice(self) -> list[SamplingParams]:
        """The parameters of every answer that is to be generated, `best_of` or `n` of them, each with its own seed."""
        count = self.n if self.best_of is None else self.best_of
        if count == 1:
            return [self] if self.best_of is None else [replace(self, best_of=None)]
        # To be ranked they need their chances; the seed of the first is the one given.
        logprobs = 0 if count > self.n and self.logprobs is None else self.logprobs
        seeds = [None if self.seed is None else (self.seed + i + 2**63) % 2**64 - 2**63 for i in range(count)]
        prompts = [self.prompt_logprobs] + [None] * (count - 1)  # one of them is enough
        return [
            replace(self, n=1, best_of=None, seed=seed, logprobs=logprobs, prompt_logprobs=prompt)
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]

    def _check_lengths(self) -> None:
        if self.seed is not None:
            _whole("seed", self.seed, MIN_SEED, "give a whole number of 64 bits", MAX_SEED)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, "give 0 (compute the prompt alone) or more")
        _whole("min_tokens", self.min_tokens, 0, "give 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}: lower it.")

    def _check_choices(self) -> None:
        _whole("n", self.n, 1, f"give 1 to {MAX_CHOICES}", MAX_CHOICES)
        if self.best_of is not None:
            _whole("best_of", self.best_of, 1, f"give n to {MAX_CHOICES}", MAX_CHOICES)
            if self.best_of < self.n:
                raise InvalidRequest(f"best_of is {self.best_of}, fewer than n = {self.n}: raise it or leave it out.")

    def _check_biases(self) -> None:
        for token, bias in self.biases:
            _whole("logit_bias", token, 0, "give token ids, from 0 up")
            _number(
                "logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "give numbers from -100 (never) to 100 (always)"
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise InvalidRequest(f"bad_words has {word!r}: give strings of at least one character.")
        for name, most in (("logit_bias", MAX_BIASES), ("bad_words", MAX_BAD_WORDS), ("stop_token_ids", MAX_STOP_IDS)):
            if len(getattr(self, name)) > most:
                raise InvalidRequest(f"{name} has {len(getattr(self, name))} entries: give at most {most}.")
        for token in self.logprob_token_ids:
            _whole("logprob_token_ids", token, 0, "give token ids, from 0 up")
        if len(self.logprob_token_ids) > MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprob_token_ids has {len(self.logprob_token_ids)} entries: give at most {MAX_LOGPROBS}."
            )
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)


def _whole(name: str, value: object, low: int, remedy: str, high: int = 2**63 - 1) -> None:
    right = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    if not right:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}.")


def _number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    # A comparison with NaN is false: it fails here as it should.
    right = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not right:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}.")


POOLING = ("mean", "last")


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what became of it. Compared by identity: two requests are never the same one."""

    id: str
    prompt: npt.NDArray[Any]  # token ids; int32 once it is here
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = "default"
    priority: int = 0  # larger goes first
    deadline: float | None = None  # in the scheduler's clock
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # requests share cached prefixes only within one tenant, salt and adapter
    adapter: str = ""
    prefill_only: bool = False  # embeddings, prompt logprobs: ends with its prefill, samples nothing
    pooling: str | None = None  # mean or last: the prompt is embedded, nothing is generated
    compute_from: int | None = None  # positions from here on are computed even if they are cached
    expected_tokens: int | None = None  # the caller's guess of the output's length, for the order and the budget
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words: the last token of each may not follow the rest

    # What the scheduler knows. Only the scheduler writes below this line.
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    # Packed: a list's integers lie all over memory, and a prefix tree that takes 272 of them in waits for each.
    output: array[int] = field(default_factory=lambda: array("i"))
    max_tokens: int = 0  # params.max_tokens, or what context and pool leave
    stop_ids: frozenset[int] = frozenset()
    number: int = 0  # arrivals are numbered; ties are broken by it and it survives retraction
    arrival: float = 0.0
    first_admitted: float | None = None
    seniority: int = 0  # order of first admission; survives retraction
    first_token: float | None = None
    finished: float | None = None
    retractions: int = 0
    overtaken: int = 0  # how many were admitted past it while it did not fit
    num_cached: int = 0  # prompt tokens found in the tree at first admission
    num_fetched: int = 0  # of these, brought back from host memory
    num_in_flight: int = 0  # tokens still to come for a request that holds no slot any more
    slot: int | None = None
    key: bytes = b""  # running: the tokens it was admitted with, four bytes each: what the tree compares
    node: Node | None = None  # waiting: where its path ends in the tree
    held: Node | None = None  # running: the deepest node it has locked; its own pages begin below
    sole_pages: int = 0  # pages of locked nodes that it alone holds
    queued: bool = False  # whether an order has it
    set_aside: bool = False  # not considered again in this step
    waits_for: str = "its turn"
    waits_for_pages: int = 0  # how many were missing when it was last tried

    def __post_init__(self) -> None:
        self.prompt = as_tokens(self.prompt)
        self.prefill_only = self.prefill_only or self.pooling is not None or self.params.max_tokens == 0
        if self.pooling is not None and self.pooling not in POOLING:
            raise InvalidRequest(f"pooling is {self.pooling!r}: choose one of {', '.join(POOLING)}.")
        if self.pooling == "mean":  # cached tokens have no hidden states, so every position is computed
            self.compute_from = 0
        if len(self.prompt) == 0:
            raise InvalidRequest(f"request {self.id}: the prompt is empty: give at least one token.")
        if self.expected_tokens is not None and self.expected_tokens < 1:
            raise InvalidRequest(
                f"request {self.id}: expected_tokens is {self.expected_tokens}: give at least 1, or leave it out."
            )
        if self.compute_from is not None and not 0 <= self.compute_from < len(self.prompt):
            raise InvalidRequest(
                f"request {self.id}: compute_from is {self.compute_from}: give a position of the prompt, "
                f"0 to {len(self.prompt) - 1}."
            )

    @property
    def namespace(self) -> tuple[str, str, str]:
        """Requests share cached prefixes only within one namespace."""
        return (self.tenant, self.cache_salt, self.adapter)

    @property
    def num_tokens(self) -> int:
        """Prompt and known output."""
        return len(self.prompt) + len(self.output)

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def ends_by_length(self) -> bool:
        """Nothing but its length can end it, so the length of its output is known in advance."""
        return not self.stop_ids

    def enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise IllegalTransition(f"request {self.id} cannot go from {self.phase.value} to {phase.value}.")
        self.phase = phase


def as_tokens(ids: Sequence[int] | npt.NDArray[Any]) -> Tokens:
    """Token ids as the one-dimensional int32 array that every room uses."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest("a prompt is a flat list of token ids (whole numbers).")
    if array.size and array.dtype != np.int32 and int(array.max()) > np.iinfo(np.int32).max:
        raise InvalidRequest(f"token id {int(array.max())} is too large: ids fit 32 bits.")
    if array.size and array.min() < 0:
        raise InvalidRequest(f"the prompt has a negative token id, {array.min()}: ids begin at 0.")
    return np.ascontiguousarray(array, dtype=np.int32)
