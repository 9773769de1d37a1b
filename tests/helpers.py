"""Shortcuts for tests."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from paceline.config import SchedulerConfig
from paceline.engine.cpu import native
from paceline.request import Request, SamplingParams
from paceline.scheduler import EventKind, Scheduler
from paceline.scheduler.draft_depth import DraftDepth
from paceline.scheduler.kv_events import Medium
from paceline.scheduler.node import Node
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.testing import Harness

EOS = 0
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("gcc", "cc", "clang"))), reason="kernels for quantized weights need a C compiler"
)


@cache
def portable_library(
    lanes: int, signed: int, words: int, tiles: int = 0, compiler: str | None = None
) -> native.NativeLibrary:
    """`native.c` in plain C with the layouts of another CPU: the lanes of a vector, whether 8-bit weights are signed,
    whether inputs are words, and whether there are tiles. compiler: None is that of the library for this CPU."""
    names = {"LANES": lanes, "SIGNED": signed, "WORDS": words}
    flags = ["-DPACELINE_PORTABLE", *(f"-D{name}={value}" for name, value in names.items())]
    flags += ["-DPACELINE_TILES"] * tiles
    flags += ["-O1", "-w", "-fPIC", "-shared", "-std=gnu11", "-ffp-contract=off"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "portable.so"
        command = [compiler or native.c_compiler(), *flags, str(native.FOLDER / "native.c"), "-lm", "-o", str(target)]
        subprocess.run(command, check=True)
        made = native.NativeLibrary(target)
    assert made.isa == "portable" and made.has_tiles == bool(tiles)
    return made


def clang_library() -> native.NativeLibrary:
    """The library for this CPU as clang compiles it, from the cache if it is there."""
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "clang")
        with native._compiled() as path:
            return native.NativeLibrary(path)


def library_with_tiles() -> native.NativeLibrary:
    """That of this CPU, or one in plain C."""
    library = native.native_library()
    return library if library.has_tiles else portable_library(16, 0, 0, 1)


class RandomDepth(DraftDepth):
    """Adaptive drafts that adapt to nothing: every pass gets a random depth."""

    def __init__(self, max_drafts: int, choice: Callable[[Sequence[int]], int] | None = None) -> None:
        super().__init__(max_drafts)
        self._choice = choice or random.Random(0).choice

    def choose(self, requests: Sequence[TrackedRequest]) -> int:
        super().choose(requests)
        return self._choice([0, 0, *self._depths])


Page = tuple[Medium, tuple[str, ...], bytes]  # medium, namespace, all tokens up to its end


class CheckedEvents(Protocol):
    def check(self) -> None:
        """Asserts that the KV events so far give exactly the pages of the tree."""


class ReplayedEvents:
    """What a router knows from KV events alone. It ignores nothing: a page stored or removed twice is an error."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.pages: set[Page] = set()
        self.num_stored = self.num_removed = self.num_cleared = 0
        self._scheduler = scheduler
        scheduler.listen(self)

    def stored(self, node: Node, medium: Medium) -> None:
        pages = self._pages(node, medium)
        assert not pages & self.pages, "a page was stored twice"
        self.pages |= pages
        self.num_stored += len(pages)

    def removed(self, node: Node, medium: Medium) -> None:
        pages = self._pages(node, medium)
        assert pages <= self.pages, "a page was removed that was not stored"
        self.pages -= pages
        self.num_removed += len(pages)

    def cleared(self) -> None:
        self.pages.clear()
        self.num_cleared += 1

    def check(self) -> None:
        """Asserts that the events give exactly the pages of the tree."""
        cached: set[Page] = set()
        for node in self._scheduler.memory.tree.nodes():
            if len(node.pages):
                cached |= self._pages(node, Medium.GPU)
            if len(node.host_pages):
                cached |= self._pages(node, Medium.CPU)
        assert self.pages == cached

    def _pages(self, node: Node, medium: Medium) -> set[Page]:
        path, names, parent = node.key, [], node.parent
        while parent is not None:
            path = parent.key + path
            names += [] if parent.depth or parent.parent is None else [parent.name]
            parent = parent.parent
        (salt, adapter), tenant = names
        size = self._scheduler.memory.tree.page_bytes
        ends = range(len(path) - len(node.key) + size, len(path) + 1, size)
        return {(medium, (tenant, salt, adapter), path[:end]) for end in ends}


def seeds(few: int, many: int, first: int = 0) -> pytest.MarkDecorator:
    """Random runs by seed, from `first` on: few of them in `make test`, many in `make test-slow`."""
    deep = pytest.param(range(first, first + many), id="many", marks=(pytest.mark.slow, pytest.mark.timeout(3600)))
    return pytest.mark.parametrize("seeds", [pytest.param(range(first, first + few), id="few"), deep])


_numbers = itertools.count()


def prompt(*parts: int | list[int] | range) -> np.ndarray:
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else list(part)
    return np.array(tokens)


def request(tokens: Any = (1, 2, 3), max_tokens: int | None = 4, *, id: str = "", **fields: Any) -> Request:
    """A request that ends by length unless EOS ids or stop ids are given."""
    params = SamplingParams(
        max_tokens=max_tokens, **{k: fields.pop(k) for k in ("min_tokens", "stop_token_ids") if k in fields}
    )
    return Request(id or f"request-{next(_numbers)}", np.array(tokens), params, **fields)


def tracked(tokens: Any = (1, 2, 3), max_tokens: int | None = 4, **fields: Any) -> TrackedRequest:
    """What a scheduler makes of a request, for tests of its parts."""
    return TrackedRequest(request(tokens, max_tokens, **fields))


def scheduler(**options: Any) -> Scheduler:
    settings: dict[str, Any] = {"num_pages": 64, "page_size": 4, "max_running": 8, "max_batch_tokens": 256}
    return Scheduler(SchedulerConfig(**settings | options))


def harness(*, overlap: bool = False, lazy: bool = False, vocab: int = 64, **options: Any) -> Harness:
    return Harness(scheduler(**options), overlap=overlap, lazy=lazy, vocab=vocab)


def slots_of(*requests: TrackedRequest) -> np.ndarray:
    return np.array([one.slot for one in requests], np.int32)


def retract_often(scheduler: Scheduler, every: int, first: int = 0) -> None:
    """From now on, retracts a running request before every `every`-th plan, each time another one."""
    plan, count = scheduler.plan, itertools.count()

    def planning(now: float) -> Any:
        number = next(count) - first
        running = scheduler.running.requests
        if running and number >= 0 and number % every == 0:
            victim = running[number // every % len(running)]
            if victim.retractions < 3:
                scheduler.retract(victim.id, now, "a test")
        # A retracted request is not admitted in the same step; if it was the only one, the next step admits it.
        return plan(now) or plan(now)

    scheduler.plan = planning  # type: ignore[method-assign]


def admissions(subject: Scheduler) -> list[str]:
    """Request ids in the order they were admitted."""
    return [event.request_id for event in subject.journal.events if event.kind is EventKind.ADMIT]


def events(subject: Scheduler, kind: EventKind, request_id: str | None = None) -> list[Any]:
    return [e for e in subject.journal.events if e.kind is kind and request_id in (None, e.request_id)]


class Logprob(float):
    """Equals those that differ by rounding only. Rounded to digits, two that are close may differ in the last one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, rel_tol=0, abs_tol=2e-3)

    __hash__ = None  # type: ignore[assignment]
