"""Streams the output of a request to the calling thread."""

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

    def put(self, delta: OutputDelta) -> None:
        self.queue.put(delta)

    def refuse(self, error: PacelineError) -> None:
        self.queue.put(error)


@contextmanager
def stream(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, adapter: str = ""
) -> Iterator[Iterator[OutputDelta]]:
    """The output deltas of one request. Leaving the context early, by Ctrl-C for example, aborts the request."""
    from paceline.engine.job import Job

    sink = _TerminalSink()
    request_id = engine.submit(Job(engine.encode(prompt), params, adapter=adapter), sink)
    try:
        yield _deltas(sink)
    finally:
        engine.abort(request_id)


def _deltas(sink: _TerminalSink) -> Iterator[OutputDelta]:
    from paceline.engine.output import EngineFailed

    while True:
        item = sink.queue.get()
        if isinstance(item, PacelineError):
            raise item
        if item.error is not None:
            raise EngineFailed(f"generation failed: {item.error}.")
        yield item
        if item.finish_reason is not None:
            return
