"""TrackedRequest: what the scheduler knows of a request, from `Scheduler.add` on.

The phase changes only through `TrackedRequest.enter`, so an illegal transition fails where it happens and not three
passes later. The fields of the request that every step reads are copied here when it is created: at a thousand rows a
second attribute lookup is measurable. Whoever needs another one reads it from `request`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from paceline.request import FinishReason, Namespace, Request, SamplingParams, Tokens


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"


class IllegalTransition(AssertionError):
    """A phase change that is not allowed: always a bug in Paceline."""


# PREFILL may finish directly: max_tokens is 1, or prefill_only. Only retraction leads back to WAITING.
_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODING, Phase.WAITING, Phase.FINISHED}),
    Phase.DECODING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request and its state. Compared by identity. Only the scheduler writes, and whoever exports its KV."""

    request: Request
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    # Packed: the integers of a list are scattered in memory, and inserting 272 of them into the prefix tree is slow.
    output: array[int] = field(default_factory=lambda: array("i"))
    max_tokens: int = 0  # params.max_tokens, or what context and memory allow
    background: bool = False  # of a background tenant: admitted only while no other tenant's request waits
    number: int = 0  # arrival number; breaks ties and is kept across retractions
    predicted_s: float = 0.0  # device time that it is expected to take (service_time.py)
    served_s: float = 0.0  # device time of its prefill since it was admitted
    decoding_from: float = 0.0  # the decode clock when its prefill ended
    arrival: float = 0.0
    first_admitted: float | None = None
    seniority: int = 0  # order of first admission; kept across retractions
    first_token: float | None = None
    finished: float | None = None
    retractions: int = 0
    recomputations: int = 0  # times it was requeued because KV that it had read may contain NaN
    overtaken: int = 0  # requests admitted before it while it did not fit
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_fetched: int = 0  # of these, fetched from host memory
    num_drafted: int = 0  # drafts verified for it (speculative decoding)
    num_accepted: int = 0  # of these, now in its output
    num_in_flight: int = 0  # after a retraction: tokens that passes in flight will still yield
    slot: int | None = None
    key: bytes = b""  # running: keys of the tokens it was admitted with, as the prefix tree compares them
    exclusive_pages: int = 0  # pages of nodes that it alone has locked
    queued: bool = False  # waiting in the policy's queue
    skipped: bool = False  # not a candidate again in this step
    wait_reason: str = "its turn"
    num_missing_pages: int = 0  # when it was last a candidate

    # Of `request`.
    id: str = field(init=False)
    prompt: Tokens = field(init=False)
    keys: Tokens = field(init=False)  # of the prompt; those of the output are its tokens
    params: SamplingParams = field(init=False)
    tenant: str = field(init=False)
    priority: int = field(init=False)
    adapter: str = field(init=False)
    namespace: Namespace = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    prefill_only: bool = field(init=False)
    compute_from: int | None = field(init=False)
    expected_tokens: int | None = field(init=False)
    draft_source: Tokens = field(init=False)
    is_exported: bool = field(init=False)  # until its pages are copied

    def __post_init__(self) -> None:
        request = self.request
        self.id = request.id
        self.prompt = request.prompt
        self.keys = request.keys
        self.params = request.params
        self.tenant = request.tenant
        self.priority = request.priority
        self.adapter = request.adapter
        self.namespace = request.namespace
        self.stop_ids = request.stop_ids
        self.prefill_only = request.prefill_only
        self.compute_from = request.compute_from
        self.expected_tokens = request.expected_tokens
        self.draft_source = request.draft_source
        self.is_exported = request.is_exported

    @property
    def clipped_max_tokens(self) -> int | None:
        """max_tokens, if the scheduler lowered it to what fits (`clip_max_tokens`)."""
        given = self.params.max_tokens
        return self.max_tokens if given is not None and 0 < self.max_tokens < given else None

    @property
    def num_tokens(self) -> int:
        """Prompt and known output."""
        return len(self.prompt) + len(self.output)

    @property
    def was_admitted(self) -> bool:
        """It runs or has run; if it waits, then again, after a retraction."""
        return self.first_admitted is not None

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def ends_by_length(self) -> bool:
        """Only max_tokens can end it, so its output length is known in advance."""
        return not self.stop_ids

    def enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise IllegalTransition(f"request {self.id} cannot go from {self.phase.value} to {phase.value}.")
        self.phase = phase
