"""Messages between a front end and the engine process: msgspec structs, encoded as MessagePack.

Jobs and output deltas are sent as the dataclasses they are, so a new field of theirs needs no change here.
"""

from __future__ import annotations

import msgspec

from paceline.cluster.held_pages import PageChanges
from paceline.cluster.load import LoadReport
from paceline.codec import TypedDecoder
from paceline.engine.job import Job
from paceline.engine.output import Conflict, EngineFailed, OutputDelta, UnknownAdapter
from paceline.request import FinishReason, InvalidRequest, PacelineError, Refused
from paceline.server.queries import EngineQuery, Health

# ---------------------------------------------------------------------- front end -> engine


class RegisterFrontEnd(msgspec.Struct, tag=True):
    """The first message of a front end: the address at which it receives, and whether it routes between replicas and
    wants `ReplicaReport`s."""

    front_end: str
    address: str
    reports: bool = False


class SubmitJob(msgspec.Struct, tag=True):
    front_end: str
    number: int  # chosen by the front end; identifies the job in replies
    job: Job


class FinishRequest(msgspec.Struct, tag=True):
    id: str
    reason: FinishReason


class QueryRequest(msgspec.Struct, tag=True):
    front_end: str
    number: int  # as above
    query: EngineQuery


# ---------------------------------------------------------------------- engine -> front end


class OutputBatch(msgspec.Struct, tag=True):
    """All outputs of one step for one front end, by number. Deltas have token ids and no text."""

    outputs: list[tuple[int, OutputDelta]]


class QueryResult(msgspec.Struct, tag=True):
    number: int
    result: msgspec.Raw  # of the type in `QUERY_RESULTS`


class ReplicaReport(msgspec.Struct, tag=True):
    """For the router: the load of an engine, and what has changed in its prefix cache."""

    engine: str  # the address at which it receives, another one after a restart
    load: LoadReport
    num_received: int  # jobs of this front end
    changes: PageChanges


class EngineHealth(msgspec.Struct, tag=True):
    """A sign of life, from a thread that does nothing else, and what the engine knows of itself."""

    engine: str  # as above
    health: Health


_ERRORS: dict[str, type[PacelineError]] = {
    "failed": EngineFailed,
    "conflict": Conflict,
    "unknown_adapter": UnknownAdapter,
}


class ErrorReply(msgspec.Struct, tag=True):
    """The reply to a job or a query that failed."""

    number: int
    kind: str
    message: str
    retry: bool = False
    retry_after_s: float | None = None

    @classmethod
    def of(cls, number: int, error: PacelineError) -> ErrorReply:
        if isinstance(error, Refused):
            return cls(number, "refused", str(error), error.retry, error.retry_after_s)
        kind = next((kind for kind, known in _ERRORS.items() if isinstance(error, known)), "invalid")
        return cls(number, kind, str(error))

    def error(self) -> PacelineError:
        if self.kind == "refused":
            return Refused(self.message, retry=self.retry, retry_after_s=self.retry_after_s)
        return _ERRORS.get(self.kind, InvalidRequest)(self.message)


MessageToEngine = RegisterFrontEnd | SubmitJob | FinishRequest | QueryRequest
MessageToFrontEnd = OutputBatch | QueryResult | ErrorReply | ReplicaReport | EngineHealth
_to_engine: TypedDecoder[MessageToEngine] = TypedDecoder(MessageToEngine)
_to_front_end: TypedDecoder[MessageToFrontEnd] = TypedDecoder(MessageToFrontEnd)
decode_to_engine = _to_engine.decode
decode_to_front_end = _to_front_end.decode
