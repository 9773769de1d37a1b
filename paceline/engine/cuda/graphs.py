"""CUDA graphs of forward passes.

Decode batches have one graph per batch bucket, from gathering the tokens to sampling; or one graph up to the logits and
one after them, where the host computes grammar masks in between. Small prefill and mixed batches have one graph per
`PrefillBucket`, up to the logits: with so few tokens, launching kernel by kernel takes longer than computing. Batches
with prompts that are embedded, or whose logprobs are requested, have another that ends with all hidden states.

A graph is captured from the same function that runs without graphs, after that has run once without live rows, which
compiles its kernels and changes no state. Rows beyond the real ones are padding: attention and sampling skip them, and
the GEMMs compute zeros, so a bucket costs little more than the batch in it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from paceline.engine.cuda.inputs import PrefillBucket
from paceline.engine.cuda.streams import Graph, Streams

SHORT_CONTEXT_ROWS = 96  # batches with more rows have a graph of their own for short contexts
_SHORT_CONTEXT_TOKENS = 512  # per row on average; measured well above and below (docs/log/decode-attention.md)

MAX_GRAPHS = 192  # of some 4 MB each; keys and buckets could make more than a thousand
CAPTURE_AFTER = 3  # times that a prefill bucket is launched kernel by kernel before it is worth capturing


class GraphStage(Enum):
    ALL = "all"
    LOGITS = "logits"  # ends with the logits
    TOKENS = "tokens"  # begins with logits and grammar masks


class GraphKey(NamedTuple):
    """What is fixed when a graph is captured, besides its number of rows."""

    filters: bool = False  # some row samples with top-k, top-p or min-p
    short_contexts: bool = False  # rows have a few hundred unshared tokens each
    shared_block_m: int = 0  # query heads in a unit that several rows share; 0: no row shares
    adjusts: bool = False  # some row has penalties, biases or forbidden tokens
    stage: GraphStage = GraphStage.ALL
    logprobs: bool = False  # some row requests logprobs
    prefill: PrefillBucket | None = None  # a prefill or mixed batch; its graph ends with the logits
    all_states: bool = False  # the graph of a prefill batch ends with the hidden states of all tokens instead


def forward_key(num_rows: int, num_unshared_tokens: int, shared_block_m: int) -> GraphKey:
    """The part of a decode batch's key that concerns the forward pass."""
    short = num_rows > SHORT_CONTEXT_ROWS and num_unshared_tokens < _SHORT_CONTEXT_TOKENS * num_rows
    return GraphKey(short_contexts=short, shared_block_m=shared_block_m)


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending. GEMMs compute tiles of 16 to 64 rows, so finer buckets would only save the
    memory traffic of a few padding rows."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
    sizes += range(160, max_rows + 32, 32)
    return [size for size in sizes if size < max_rows] + [max_rows]


class CudaGraphs:
    """Captured graphs by number of rows and key, least recently used first."""

    def __init__(
        self,
        streams: Streams,
        max_rows: int,
        run: Callable[[int, GraphKey], None],
        run_empty: Callable[[int, GraphKey], None],
    ) -> None:
        """`run(rows, key)` is a forward pass of so many rows; `run_empty` is the same without live rows."""
        self.sizes = buckets(max_rows)
        self._streams, self._run, self._run_empty = streams, run, run_empty
        self._graphs: dict[tuple[int, GraphKey], Graph] = {}
        self._uses: Counter[GraphKey] = Counter()  # of prefill buckets, which can also run without a graph

    def bucket(self, num_rows: int, key: GraphKey) -> int:
        """The smallest bucket that holds so many rows. Where rows share KV reads, every second bucket is left out:
        those graphs are captured at first use."""
        at = bisect.bisect_left(self.sizes, num_rows)
        return self.sizes[-1 - (len(self.sizes) - 1 - at) // 2 * 2] if key.shared_block_m else self.sizes[at]

    def graph(self, size: int, key: GraphKey) -> Graph:
        """The graph of a bucket, captured now if it does not exist. The least recently used graph is dropped if there
        are too many."""
        graph = self._graphs.pop((size, key), None)
        if graph is None:
            self._run_empty(size, key)
            graph = self._streams.capture(lambda: self._run(size, key))
        self._graphs[size, key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def prefill_graph(self, key: GraphKey) -> Graph | None:
        """The graph of a prefill bucket, for any number of rows; None while it is not worth capturing."""
        self._uses[key] += 1
        is_captured = (self.sizes[-1], key) in self._graphs
        return self.graph(self.sizes[-1], key) if is_captured or self._uses[key] >= CAPTURE_AFTER else None

    def capture_next(self, keys: Iterable[GraphKey]) -> bool:
        """Captures the first of these prefill graphs that is missing; returns whether one was. Does nothing before a
        prefill bucket has run: until then there are kernels to compile, which would block the engine for too long."""
        missing = next((key for key in keys if (self.sizes[-1], key) not in self._graphs), None)
        if missing is None or not self._uses:
            return False
        self.graph(self.sizes[-1], missing)
        return True

    def capture_all(self) -> None:
        """Captures all buckets without filters, the largest first, so that smaller ones reuse its memory."""
        for size in reversed(self.sizes):
            for short_contexts in (True, False) if size > SHORT_CONTEXT_ROWS else (False,):
                self.graph(size, GraphKey(short_contexts=short_contexts))
