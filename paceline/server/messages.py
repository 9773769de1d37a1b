"""What crosses the border between a front end and the engine's process: msgspec structs as MessagePack.

Parameters and pieces travel as the dataclasses they are, so a new field of theirs needs nothing here.
"""

from __future__ import annotations

import msgspec

from paceline.codec import Decoder
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import FinishReason, InvalidRequest, PacelineError, Refused
from paceline.server.engine_client import Question


class Hello(msgspec.Struct, tag=True):
    """A front end says where it listens. Comes before everything else it says."""

    front_end: str
    address: str


class Submit(msgspec.Struct, tag=True):
    front_end: str
    number: int  # chosen by the front end; identifies the request in replies
    job: Job


class End(msgspec.Struct, tag=True):
    id: str
    reason: FinishReason


class QueryMessage(msgspec.Struct, tag=True):
    front_end: str
    number: int
    question: Question


class OutputBatch(msgspec.Struct, tag=True):
    """All outputs of one step for a front end. Deltas have token ids and no text."""

    pieces: list[tuple[int, OutputDelta]]


class Reply(msgspec.Struct, tag=True):
    number: int
    answer: msgspec.Raw


class Refusal(msgspec.Struct, tag=True):
    """Instead of pieces or a reply."""

    number: int
    kind: str
    message: str
    retry: bool = False
    retry_after_s: float | None = None

    @classmethod
    def of(cls, number: int, error: PacelineError) -> Refusal:
        if isinstance(error, Refused):
            return cls(number, "refused", str(error), error.retry, error.retry_after_s)
        return cls(number, "failed" if isinstance(error, EngineFailed) else "invalid", str(error))

    def error(self) -> PacelineError:
        if self.kind == "refused":
            return Refused(self.message, retry=self.retry, retry_after_s=self.retry_after_s)
        return EngineFailed(self.message) if self.kind == "failed" else InvalidRequest(self.message)


_to_engine: Decoder[Hello | Submit | End | QueryMessage] = Decoder(Hello | Submit | End | QueryMessage)
_to_front_end: Decoder[OutputBatch | Reply | Refusal] = Decoder(OutputBatch | Reply | Refusal)
decode_to_engine = _to_engine.decode
decode_to_front_end = _to_front_end.decode
