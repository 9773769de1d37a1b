"""`Now`: the step and the time of a decision, passed to everything that needs either."""

from __future__ import annotations

from typing import NamedTuple


class Now(NamedTuple):
    step: int  # number of the forward pass being planned, or of the next one
    time: float  # in the caller's clock
