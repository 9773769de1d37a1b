"""ProgressLine: one line on the terminal that shows how far a call of `LLM` is.

It is written to stderr only if that is a terminal, so logs, pipes and notebooks stay clean. The figures are sampled on
the engine's thread a few times per second: requests are not streamed for it, which would slow them down.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

INTERVAL_S = 0.5  # between two updates, and before the first: a short call shows nothing
_shown = threading.Lock()  # by one call at a time: two threads would overwrite each other's line


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a call is. Tokens are those of requests that have started."""

    num_finished: int
    prompt_tokens: int
    output_tokens: int


class ProgressLine:
    """A context manager. `update` is called often and writes at most every `INTERVAL_S` seconds.

    `sample` returns the latest figures at once, or None if there are none yet.
    """

    def __init__(self, num_requests: int, sample: Callable[[], CallProgress | None], *, wanted: bool = True) -> None:
        self._num_requests = num_requests
        self._sample = sample
        self._wanted = wanted
        self._terminal: TextIO | None = None
        self._began = self._updated = time.monotonic()
        self._width = 0  # of the line on the terminal

    def __enter__(self) -> ProgressLine:
        stream = sys.stderr  # None in a program without a console
        if self._wanted and stream is not None and stream.isatty() and _shown.acquire(blocking=False):
            self._terminal = stream
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            _shown.release()
            if self._width:
                self._write()
                self._terminal.write("\n")

    @property
    def interval_s(self) -> float | None:
        """How often to call `update` at least; None: there is no line."""
        return None if self._terminal is None else INTERVAL_S

    def update(self) -> None:
        if self._terminal is not None and time.monotonic() - self._updated >= INTERVAL_S:
            self._write()

    def _write(self) -> None:
        progress = self._sample()
        if progress is None:
            return
        assert self._terminal is not None, "only written to a terminal"
        self._updated = time.monotonic()
        seconds = self._updated - self._began
        text = f"{progress.num_finished}/{self._num_requests} requests, {seconds:.0f} s"
        for name, count in (("prompt", progress.prompt_tokens), ("output", progress.output_tokens)):
            if count:
                text += f", {name} {count:,} tokens ({count / seconds:,.0f}/s)"
        text = text[: shutil.get_terminal_size().columns - 1]  # a longer line would wrap and could not be overwritten
        self._terminal.write(f"\r{text.ljust(self._width)}")
        self._terminal.flush()
        self._width = len(text)
