"""What the ingress and the engine deployment of Ray Serve exchange: arguments of handle calls, read by the router too.

This module imports no Ray, and Ray's copies of the router import it by name: both sides have the same classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paceline.codec import TypedDecoder
from paceline.engine.job import Job
from paceline.server.engine_client import ServedModel


@dataclass(frozen=True, slots=True)
class ToReplica:
    """A call to one particular replica."""

    replica: str  # Ray's unique id of it


@dataclass(frozen=True, slots=True, eq=False)
class RunJob:
    """A job for the replica that the router chooses by its token ids. Its output goes to the stream of `front_end`."""

    front_end: str
    number: int
    job: Job


class StreamStart(msgspec.Struct):
    """The first message of a stream from a replica."""

    weights: str  # which ones it runs: an ingress uses replicas of its own model only
    address: str  # identifies the engine in its reports
    model: ServedModel


_starts: TypedDecoder[StreamStart] = TypedDecoder(StreamStart)
decode_start = _starts.decode
