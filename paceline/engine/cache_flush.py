"""Flush of the whole prefix cache of a running engine: running requests finish first, new ones wait meanwhile."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from paceline.engine.output import Conflict
from paceline.engine.pausing import PauseMode

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_numbers = itertools.count()


def flush_when_idle(engine: Engine, timeout_s: float) -> int:
    """Blocks until no request runs, and drops every cached prefix that is not pinned. Any thread may call it. Returns
    the pages freed. Raises, and drops nothing, if requests still run after `timeout_s`."""
    who = f"cache flush {next(_numbers)}"  # each resumes for itself alone, so several at once do no harm
    try:
        engine.pause(PauseMode.WAIT, who=who).result(timeout_s)
        return engine.call(engine.flush_cache).result()
    except TimeoutError:
        raise Conflict(
            f"requests still run after timeout_s = {timeout_s:g} seconds, and nothing was flushed: raise it, or flush "
            "without waiting."
        ) from None
    finally:
        engine.resume(who=who)
