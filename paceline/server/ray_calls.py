"""Arguments of the handle calls to an engine deployment of Ray Serve: the request router reads them.

This module imports no Ray, and Ray's copies of the router import it by name: both sides have the same classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.job import Job


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
