"""Passes as CUDA graphs. Of decodes: one for each batch bucket, from the gathered tokens to the sampled ones; or one up
to the logits and one behind them, where the host has something to say in between. Of prompts and decodes: one for each
number of tokens, up to the logits, where these are so few that launching kernel by kernel takes longer than computing.

A graph is captured from the very function that would run otherwise, after that has run once with no live row, which
compiles its kernels and changes nothing. Rows beyond the real ones are padding: attention and sampling skip them, and
the products compute zeros, so a bucket costs little more than the batch in it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from paceline.engine.cuda.inputs import PrefillBucket
from paceline.engine.cuda.streams import Graph, Streams

SHORT_ROWS = 96  # with more rows than this, short contexts have a graph of their own
_SHORT_TOKENS = 512  # of context per row on average; both sides were measured, not where they meet (docs/log.md)

MOST_GRAPHS = 192  # that are kept, of some 4 MB each: kinds and buckets could make more than a thousand
FREQUENT = 3  # times that a pass with prompts is launched kernel by kernel before it is worth capturing


class GraphStage(Enum):
    ALL = "all"
    LOGITS = "logits"  # it ends with them
    TOKENS = "tokens"  # it begins with logits and masks


class GraphKey(NamedTuple):
    """What is fixed when a graph is captured, beside its bucket."""

    filters: bool = False  # some row samples with top-k or top-p
    short: bool = False  # rows have a few hundred tokens of their own
    tile: int = 0  # query heads in a unit that several rows share; 0: nobody shares
    adjusts: bool = False  # some row has penalties, biases or forbidden tokens
    part: GraphStage = GraphStage.ALL
    logprobs: bool = False  # some row asks how likely its tokens are
    room: PrefillBucket | None = None  # of a pass with prompts; its graph ends with the logits


def kind_of(num_rows: int, num_own_tokens: int, tile: int) -> GraphKey:
    """As far as the forward pass has a say in it."""
    return GraphKey(short=num_rows > SHORT_ROWS and num_own_tokens < _SHORT_TOKENS * num_rows, tile=tile)


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending. Products are computed in tiles of 16 to 64 rows, so closer ones gain nothing
    but memory traffic of a few padding rows."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
    sizes += range(160, max_rows + 32, 32)
    return [size for size in sizes if size < max_rows] + [max_rows]


class CudaGraphs:
    def __init__(
        self,
        streams: Streams,
        max_rows: int,
        run: Callable[[int, GraphKey], None],
        run_empty: Callable[[int, GraphKey], None],
    ) -> None:
        """`run(rows, kind)` is a pass of so many rows; `run_empty` is the same with none of them live."""
        self.sizes = buckets(max_rows)
        self._streams, self._run, self._run_empty = streams, run, run_empty
        self._graphs: dict[tuple[int, GraphKey], Graph] = {}
        self._uses: Counter[GraphKey] = Counter()  # of passes that can do without a graph

    def bucket(self, num_rows: int, kind: GraphKey) -> int:
        """The smallest bucket that holds so many rows. Where rows share, every second one is left out: those graphs
        are captured when they are first needed."""
        at = bisect.bisect_left(self.sizes, num_rows)
        return self.sizes[-1 - (len(self.sizes) - 1 - at) // 2 * 2] if kind.tile else self.sizes[at]

    def graph(self, size: int, kind: GraphKey) -> Graph:
        """The graph of a bucket, captured now if it is not there. What was not used for longest makes room for it."""
        graph = self._graphs.pop((size, kind), None)
        if graph is None:
            self._run_empty(size, kind)
            graph = self._streams.capture(lambda: self._run(size, kind))
        self._graphs[size, kind] = graph  # behind all others
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def with_prompts(self, kind: GraphKey) -> Graph | None:
        """The graph of a pass with prompts, whatever the number of rows; None while it is not worth capturing."""
        self._uses[kind] += 1
        is_there = (self.sizes[-1], kind) in self._graphs
        return self.graph(self.sizes[-1], kind) if is_there or self._uses[kind] >= FREQUENT else None

    def capture_one(self, kinds: Iterable[GraphKey]) -> bool:
        """Captures the first of these graphs with prompts that is missing. Whether one was. Not before such a pass has
        run: until then there are kernels to compile, which takes longer than anybody should wait."""
        missing = next((kind for kind in kinds if (self.sizes[-1], kind) not in self._graphs), None)
        if missing is None or not self._uses:
            return False
        self.graph(self.sizes[-1], missing)
        return True

    def capture_all(self) -> None:
        """All buckets without filters, the largest first, so that the smaller ones find their memory there."""
        for size in reversed(self.sizes):
            for short in (True, False) if size > SHORT_ROWS else (False,):
                self.graph(size, GraphKey(short=short))
