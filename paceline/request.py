"""A request and its life.

What a caller asks for (`Request`, `SamplingParams`) and how far the scheduler has got with it. The phase can
only change through `Request.enter`, so an illegal step is an error where it happens and not three passes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. `max_tokens` left open ends with the context.

    `temperature` 0 always takes the likeliest token. `top_k` keeps so many of the likeliest, `top_p` the smallest set
    of them whose chances add up to it. With a `seed` the same request gives the same tokens, whatever runs beside
    it. `stop` are strings that end the text and are not part of it; `stop_token_ids` and the model's own end tokens
    (unless `ignore_eos`) end it too. Before `min_tokens` none of these can.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _number("temperature", self.temperature, 0, 1e4, "give 0 (always the likeliest token) to 10000")
        _number("top_p", self.top_p, 0, 1, "give a number above 0 and up to 1 (all tokens)")
        if self.top_p == 0:
            raise InvalidRequest(f"top_p is {self.top_p!r}: give a number above 0 and up to 1 (all tokens).")
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1, "give 1 or more, or leave it out to keep all tokens")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), "give a whole number of 64 bits")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, "ask for at least 1 token")
        _whole("min_tokens", self.min_tokens, 0, "give 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}: lower it.")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop has {text!r}: give strings of at least one character.")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, "give token ids, from 0 up")


def _whole(name: str, value: object, low: int, remedy: str) -> None:
    right = isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63
    if not right:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}.")


def _number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    # A comparison with NaN is false: it fails here as it should.
    right = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not right:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}.")


POOLING = ("mean", "last")


class Pooled:
    """What becomes of the hidden states of a prompt that is to be embedded: the device gives them, chunk by chunk."""

    def __init__(self, kind: str) -> None:
        if kind not in POOLING:
            raise InvalidRequest(f"pooling is {kind!r}: choose one of {', '.join(POOLING)}.")
        self.kind = kind
        self._total: npt.NDArray[Any] | None = None

    def begin(self) -> None:
        """The prompt is computed from its first token on; after a retraction, once more."""
        self._total = None

    def take(self, states: npt.NDArray[Any]) -> None:
        """Hidden states of the next tokens, [tokens, size]."""
        if self.kind == "last":
            self._total = states[-1].astype(np.float64)
        else:
            total = states.sum(axis=0, dtype=np.float64)
            self._total = total if self._total is None else self._total + total

    def vector(self) -> npt.NDArray[np.float32]:
        """Of length 1: for comparing, only the direction counts; so a mean is as good as a sum."""
        assert self._total is not None, "no state was taken"
        unit: npt.NDArray[np.float32] = (self._total / max(float(np.linalg.norm(self._total)), 1e-30)).astype(
            np.float32
        )
        return unit


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
    pooled: Pooled | None = None  # with prefill_only: an embedding is asked for
    compute_from: int | None = None  # positions from here on are computed even if they are cached
    expected_tokens: int | None = None  # the caller's guess of the output's length, for the order and the budget

    # What the scheduler knows. Only the scheduler writes below this line.
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
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
        if len(self.prompt) == 0:
            raise InvalidRequest(f"request {self.id}: the prompt is empty: give at least one token.")
        if self.prompt.min() < 0:
            raise InvalidRequest(f"request {self.id}: the prompt has a negative token id: ids begin at 0.")
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
    if array.size and int(array.max()) > np.iinfo(np.int32).max:
        raise InvalidRequest(f"token id {int(array.max())} is too large: ids fit 32 bits.")
    return np.ascontiguousarray(array, dtype=np.int32)
