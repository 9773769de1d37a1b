"""Text from the engine, on the caller's own thread, as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

from paceline.request import PacelineError, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.output import OutputDelta


class _TerminalSink:
    def __init__(self) -> None:
        self.queue: SimpleQueue[OutputDelta | PacelineError] = SimpleQueue()

    def put(self, piece: OutputDelta) -> None:
        self.queue.put(piece)

    def refuse(self, error: PacelineError) -> None:
        self.queue.put(error)


@contextmanager
def stream(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Iterator[Iterator[OutputDelta]]:
    """The pieces of one request. Leaving early, an interrupt included, aborts it."""
    from paceline.engine.job import Job

    sink = _TerminalSink()
    request_id = engine.submit(Job(engine.encode(prompt), params), sink)
    try:
        yield _pieces(sink)
    finally:
        engine.abort(request_id)


def _pieces(sink: _TerminalSink) -> Iterator[OutputDelta]:
    from paceline.engine.output import EngineFailed

    while True:
        item = sink.queue.get()
        if isinstance(item, PacelineError):
            raise item
        if item.error is not None:
            raise EngineFailed(f"generation failed ({item.error}): try again.")
        yield item
        if item.finish_reason is not None:
            return
