"""Request and SamplingParams: what a caller asks for. What the scheduler knows of a request is a `TrackedRequest`."""

from __future__ import annotations

import difflib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
SAME_AS_TOKENS: Tokens = np.empty(0, np.int32)  # as the keys of a prompt, compared by identity
Namespace = tuple[str, str, str]  # tenant, cache salt, adapter


GRAMMAR_LIMIT = "the grammar exceeded its cost limit"  # how the error of an output begins that ended for this reason


class PacelineError(Exception):
    """The base of every error a caller can cause; the message is one sentence with a remedy."""


class Unavailable(PacelineError):
    """What is needed is not there now: an address, a network, a disk. The same may succeed later, without a change."""


class InvalidRequest(PacelineError, ValueError):
    """A request that is not valid: the message names the field, the value and what is allowed."""


class Refused(PacelineError):
    """A valid request that cannot be accepted: it can never fit, or the queue is full."""

    def __init__(self, message: str, *, retry: bool, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry = retry  # whether the same request may be accepted later
        self.retry_after_s = retry_after_s  # when that is likely, if known


def short(value: object) -> str:
    """A value in an error message: its repr, or the beginning of it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def suggest(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """The end of an error about an unknown name: the nearest known ones. Empty if none is near."""
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"did you mean {' or '.join(map(show, close))}?" if close else ""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"  # it was not admitted in time
    RUNNING_TIMEOUT = "running_timeout"  # it did not end in time after its admission
    DISPLACED = "displaced"  # from a full queue, by a request of higher priority
    ERROR = "error"


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
MAX_BAD_WORD_CHARACTERS = 16_384  # of all bad words of a request together
MAX_STOP_IDS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request together
MAX_GRAMMAR_CHARACTERS = 1 << 18
DEFAULT_MAX_TOKENS = 256  # of outputs in Python and of `paceline generate`; HTTP has the defaults of OpenAI
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark", "choice")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output: a JSON schema (as JSON), any JSON object, a regular expression, a Lark grammar, or a
    choice of strings (a JSON list)."""

    kind: str
    source: str = ""
    # Markers of reasoning that may come before the constrained text. If the first is empty, the prompt has it, and the
    # reasoning must be completed.
    reasoning: tuple[str, str] | None = None
    prefix: str = ""  # what comes after that, before the constrained text: the header of a message

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidRequest(f"grammar kind is {self.kind!r}: choose one of {', '.join(GRAMMAR_KINDS)}.")
        if not isinstance(self.source, str) or (not self.source and self.kind != "json_object"):
            raise InvalidRequest(f"grammar is {self.source!r}: give its text.")
        if len(self.source) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(f"grammar has {len(self.source)} characters: give at most {MAX_GRAMMAR_CHARACTERS}.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool | str) -> Grammar:
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
    """How the tokens of a request are sampled, and when it stops.

    `temperature` 0 is greedy sampling. `top_k` keeps the k most likely tokens, `top_p` the smallest set of most likely
    tokens whose probabilities add up to p, `min_p` the tokens with at least that fraction of the highest probability;
    tokens of equal probability are kept or dropped together. `repetition_penalty` divides the positive logits of tokens
    in the prompt or the output and multiplies the negative ones; `frequency_penalty` is subtracted once per occurrence
    of a token in the output, `presence_penalty` once if it occurs. `logit_bias` is added by token id. With a `seed` the
    same request yields the same tokens, whatever else is in the batch.

    The `n` best of `best_of` generated sequences are returned. `stop` strings end the text and are not part of it,
    unless `include_stop`; `stop_token_ids` and the model's EOS tokens (unless `ignore_eos`) end it too, but none of
    these before `min_tokens`. `bad_words` are never generated. Without `max_tokens` the output is limited by the
    context (in `LLM`: to 256 tokens); with `max_tokens` 0 only the prompt is computed.

    `logprobs` returns the logprob of each output token and of that many most likely tokens, as the model computes them
    (before temperature, penalties and bias); `logprob_token_ids` adds these tokens; `prompt_logprobs` does the same for
    the prompt, from position `prompt_logprobs_start` on: KV of the tokens before it may come from the prefix cache. A
    `grammar` constrains every token.
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
    prompt_logprobs_start: int = 0
    grammar: Grammar | None = None

    def __new__(cls, **given: object) -> SamplingParams:
        for name in given:
            if name not in cls.__slots__:
                hint = suggest(name, cls.__slots__) or f"parameters are: {', '.join(cls.__slots__)}."
                raise InvalidRequest(f"SamplingParams has no {name!r}: {hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", check_stops(_as_tuple("stop", self.stop)))
        for name in ("bad_words", "stop_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        bias = self.logit_bias
        pairs = tuple(bias.items()) if isinstance(bias, Mapping) else _as_tuple("logit_bias", bias, "mapping")
        object.__setattr__(self, "logit_bias", pairs)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {short(getattr(self, name))}: give True or False.")
        _check_float(
            "temperature", self.temperature, 0, MAX_TEMPERATURE, "give 0 (always the likeliest token) to 10000"
        )
        _check_float("top_p", self.top_p, 0, 1, "give a number above 0 and up to 1 (all tokens)")
        if self.top_p == 0:
            raise InvalidRequest(f"top_p is {self.top_p!r}: give a number above 0 and up to 1 (all tokens).")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1, "give 1 or more, or leave it out to keep all tokens")
        _check_float("min_p", self.min_p, 0, 1, "give 0 (all tokens) to 1")
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _check_float("repetition_penalty", self.repetition_penalty, low, high, "give 0.01 to 100; 1 changes nothing")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, "give -2 to 2; 0 changes nothing")
        self._check_lengths()
        self._check_choices()
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, "give token ids, from 0 up")
        self._check_biases()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, f"give 0 to {MAX_LOGPROBS}", MAX_LOGPROBS)
        start = self.prompt_logprobs_start
        _check_int("prompt_logprobs_start", start, 0, "give a position of the prompt, from 0 up")
        if start and self.prompt_logprobs is None:
            raise InvalidRequest(f"prompt_logprobs_start is {start} and prompt_logprobs is not given: give both.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(f"grammar is {self.grammar!r}: give a Grammar, such as Grammar.regex(...).")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("ignore_eos is True and a grammar is given, which must be able to end: drop one.")

    @property
    def is_greedy(self) -> bool:
        """Below this temperature the probability of any other token is zero, and scaled logits would overflow."""
        return self.temperature < 1e-5

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs; `__post_init__` converts a mapping."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with this valid seed. The copy is not validated again: that would take as long as everything else that
        is done when a request arrives."""
        return self._with("seed", seed)

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """A copy with this limit, which may be below min_tokens: then the output ends at the limit. Not validated
        either."""
        return self._with("max_tokens", max_tokens)

    def _with(self, name: str, value: int) -> SamplingParams:
        changed = object.__new__(type(self))
        for slot in self.__slots__:
            object.__setattr__(changed, slot, getattr(self, slot))
        object.__setattr__(changed, name, value)
        return changed

    def each_choice(self) -> list[SamplingParams]:
        """The parameters of each sequence to generate, `best_of` or `n` of them, each with its own seed."""
        count = self.n if self.best_of is None else self.best_of
        if count == 1:
            return [self] if self.best_of is None else [replace(self, best_of=None)]
        # Ranking needs logprobs. The first sequence uses the given seed.
        logprobs = 0 if count > self.n and self.logprobs is None else self.logprobs
        seeds = [None if self.seed is None else (self.seed + i + 2**63) % 2**64 - 2**63 for i in range(count)]
        first = replace(self, n=1, best_of=None, seed=seeds[0], logprobs=logprobs)
        other = replace(first, prompt_logprobs=None, prompt_logprobs_start=0)  # one sequence computes them
        return [first, *(replace(other, seed=seed) for seed in seeds[1:])]

    def _check_lengths(self) -> None:
        if self.seed is not None:
            _check_int("seed", self.seed, MIN_SEED, "give a whole number of 64 bits", MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, "give 0 (compute the prompt alone) or more")
        _check_int("min_tokens", self.min_tokens, 0, "give 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}: lower it.")

    def _check_choices(self) -> None:
        _check_int("n", self.n, 1, f"give 1 to {MAX_CHOICES}", MAX_CHOICES)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, f"give n to {MAX_CHOICES}", MAX_CHOICES)
            if self.best_of < self.n:
                raise InvalidRequest(f"best_of is {self.best_of}, fewer than n = {self.n}: raise it or leave it out.")

    def _check_biases(self) -> None:
        for pair in self.biases:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise InvalidRequest(f"logit_bias has {short(pair)}: give a mapping of token ids to numbers.")
            token, bias = pair
            _check_int("logit_bias", token, 0, "give token ids, from 0 up")
            _check_float(
                "logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "give numbers from -100 (never) to 100 (always)"
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise InvalidRequest(f"bad_words has {word!r}: give strings of at least one character.")
        for name, most in (("logit_bias", MAX_BIASES), ("bad_words", MAX_BAD_WORDS), ("stop_token_ids", MAX_STOP_IDS)):
            if len(getattr(self, name)) > most:
                raise InvalidRequest(f"{name} has {len(getattr(self, name))} entries: give at most {most}.")
        if sum(map(len, self.bad_words)) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(f"bad_words has more than {MAX_BAD_WORD_CHARACTERS} characters: give shorter strings.")
        for token in self.logprob_token_ids:
            _check_int("logprob_token_ids", token, 0, "give token ids, from 0 up")
        if len(self.logprob_token_ids) > MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprob_token_ids has {len(self.logprob_token_ids)} entries: give at most {MAX_LOGPROBS}."
            )
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)


def _as_tuple(name: str, value: object, expected: str = "list") -> tuple[Any, ...]:
    """A list as a tuple; one string is a list of itself."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence | Set | np.ndarray) or isinstance(value, bytes | bytearray):
        raise InvalidRequest(f"{name} is {short(value)}: give a {expected}.")
    return tuple(value)


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request as a tuple; raises InvalidRequest if they are not valid."""
    if isinstance(stops, str):
        stops = (stops,)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings: give at most {MAX_STOPS}.")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest(f"stop has {stop!r}: give strings of at least one character.")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(f"stop has more than {MAX_STOP_CHARACTERS} characters: give shorter strings.")
    return tuple(stops)


def _check_int(name: str, value: object, low: int, remedy: str, high: int = 2**63 - 1) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    if not valid:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}.")


def _check_float(name: str, value: object, low: float, high: float, remedy: str) -> None:
    # A comparison with NaN is false, so NaN is rejected.
    valid = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not valid:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}.")


POOLING = ("mean", "last")


def check_pooling(pooling: object) -> None:
    if pooling not in POOLING:
        raise InvalidRequest(f"pooling is {short(pooling)}: choose one of {', '.join(POOLING)}.")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and what is asked of it. Compared by identity. The scheduler keeps its state elsewhere
    (`TrackedRequest`), so the same request, or a copy with another id, can be added again."""

    id: str
    prompt: Tokens
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = "default"
    priority: int = 0  # higher runs first
    deadline: float | None = None  # in the scheduler's clock
    queue_timeout_s: float = math.inf  # from its arrival to its first admission; the scheduler may have a lower limit
    running_timeout_s: float = math.inf  # from its first admission to its end; the same
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # requests share cached prefixes only within one tenant, salt and adapter
    adapter: str = ""  # a LoRA adapter, name and version; "": the base model
    prefill_only: bool = False  # embeddings, prompt logprobs: ends after prefill and samples nothing
    pooling: str | None = None  # mean or last: embeds the prompt and generates nothing
    compute_from: int | None = None  # positions from here on are computed even if cached
    expected_tokens: int | None = None  # the caller's estimate of the output length, for policy and memory forecast
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # of params.bad_words: no last token may follow the others
    is_exported: bool = False  # its prompt pages are copied to another engine; see `Memory.holds`
    num_prefilled: int = 0  # prompt tokens that another engine computed for it: they do not count as cached
    # Speculative decoding: tokens that the output may follow. It never changes the output.
    draft_source: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    # One per prompt token: what prefixes are compared by. Two prompts share KV as far as their keys are equal, so a
    # placeholder token gets a key of what it stands for. For text it is the array of the tokens itself.
    keys: Tokens = field(default_factory=lambda: SAME_AS_TOKENS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", as_tokens(self.prompt))
        object.__setattr__(self, "keys", keys_of(self.prompt, self.keys))
        if self.pooling is not None or self.params.max_tokens == 0:
            object.__setattr__(self, "prefill_only", True)
        if self.pooling is not None:
            check_pooling(self.pooling)
        if self.params.prompt_logprobs is not None:
            object.__setattr__(self, "compute_from", self._first_for_logprobs())
        if self.pooling == "mean":  # cached tokens have no hidden states, so every position is computed
            object.__setattr__(self, "compute_from", 0)
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

    def _first_for_logprobs(self) -> int:
        """The first position whose logits are needed: each position's logits give the logprob of the next token."""
        start = self.params.prompt_logprobs_start
        if start >= max(len(self.prompt), 1):
            raise InvalidRequest(
                f"prompt_logprobs_start is {start}: give a position of the prompt, 0 to {len(self.prompt) - 1}."
            )
        return max(start - 1, 0)

    @property
    def namespace(self) -> Namespace:
        """Requests share cached prefixes only within one namespace."""
        return (self.tenant, self.cache_salt, self.adapter)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the output."""
        ids = frozenset(self.params.stop_token_ids)
        return ids if self.params.ignore_eos else ids | frozenset(self.eos_token_ids)


def keys_of(prompt: Tokens, keys: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """The keys of a prompt, checked."""
    if keys is SAME_AS_TOKENS or keys is prompt:
        return prompt
    checked = as_tokens(keys, "keys")
    if len(checked) != len(prompt):
        raise InvalidRequest(
            f"keys has {len(checked)} integers for a prompt of {len(prompt)} tokens: give one for each token."
        )
    return checked


def adapter_name(adapter: str) -> str:
    """The name that clients use for an adapter, which the engine calls name@digest (engine/adapters.py)."""
    return adapter.rpartition("@")[0] or adapter


def as_tokens(ids: Sequence[int] | npt.NDArray[np.integer], name: str = "the prompt") -> Tokens:
    """Token ids as the one-dimensional int32 array that all packages use; errors call them `name`."""
    try:
        array = np.asarray(_packed(ids))
    except ValueError:  # lists of unequal lengths inside the list
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest(f"{name} is {short(ids)}: give a string or a flat list of token ids (integers).")
    if array.size and array.dtype != np.int32 and int(array.max()) > np.iinfo(np.int32).max:
        raise InvalidRequest(f"token id {int(array.max())} is too large: token ids must fit into 32 bits.")
    if array.size and array.min() < 0:
        raise InvalidRequest(f"{name} has a negative token id, {array.min()}: token ids start at 0.")
    return np.ascontiguousarray(array, dtype=np.int32)


def _packed(ids: object) -> object:
    """A list of integers that fit into 32 bits as an array; anything else as it is. numpy takes almost three times as
    long for a list, since it first looks for a common type."""
    if not isinstance(ids, list) or not ids or type(ids[0]) is not int:  # True is an integer here, but not for numpy
        return ids
    array = np.empty(len(ids), np.int32)
    try:
        struct.pack_into(f"{len(ids)}i", array.data, 0, *ids)
    except (struct.error, TypeError):  # numpy decides what is wrong
        return ids
    return array
