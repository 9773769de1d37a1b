"""What crosses the border between a front end and the engine's process: msgspec structs as MessagePack.

Parameters and pieces travel as the dataclasses they are, so a new field of theirs needs nothing here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import FinishReason, InvalidRequest, PacelineError, Refused
from paceline.server.engine_client import Job
from paceline.server.queries import EngineQuery


class Hello(msgspec.Struct, tag=True):
    """A front end says where it listens. Comes before everything else it says."""

    front_end: str
    address: str


class Submit(msgspec.Struct, tag=True):
    front_end: str
    number: int  # by which the front end knows it
    job: Job
    prompt: bytes  # int32; the job's own is left empty

    @classmethod
    def of(cls, front_end: str, number: int, job: Job) -> Submit:
        return cls(front_end, number, replace(job, prompt=()), np.asarray(job.prompt, np.int32).tobytes())


class End(msgspec.Struct, tag=True):
    id: str
    reason: FinishReason


class QueryMessage(msgspec.Struct, tag=True):
    front_end: str
    number: int
    question: EngineQuery


class OutputBatch(msgspec.Struct, tag=True):
    """All that one step has for a front end. A piece's text is `TokenText`."""

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


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(Hello | Submit | End | QueryMessage)
_to_front_end = msgspec.msgpack.Decoder(OutputBatch | Reply | Refusal)


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> Hello | Submit | End | QueryMessage:
    message: Hello | Submit | End | QueryMessage = _to_engine.decode(data)
    return message


def decode_to_front_end(data: bytes) -> OutputBatch | Reply | Refusal:
    message: OutputBatch | Reply | Refusal = _to_front_end.decode(data)
    return message
