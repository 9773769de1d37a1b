"""CUDA graphs of forward passes.

Decode batches have one graph per batch bucket, from gathering the tokens to sampling; or one graph up to the logits and
one after them, where the host computes grammar masks in between, and a third for the drafts that have masks. Small
prefill and mixed batches have one graph per `PrefillBucket`, up to the logits: with so few tokens, launching kernel by
kernel takes longer than computing. Batches with prompts that are embedded, or whose logprobs are requested, have
another that ends with all hidden states.

A graph is captured from the same function that runs without graphs; capturing executes nothing. A pass without a graph
is launched kernel by kernel, which takes the host a few milliseconds and gives the same bits. Likely graphs are
captured at start and in idle time, others when a pass misses them again and the device is idle. Behind a running pass
the driver may wait for its end before it instantiates a graph, which long prompts make hundreds of milliseconds, and
the launch of single kernels is hidden anyway. Rows beyond the real ones are padding: attention and sampling skip them,
and the GEMMs compute zeros, so a bucket costs little more than the batch in it.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from paceline.engine.cuda.inputs import PrefillBucket
from paceline.engine.cuda.streams import Graph, Streams
from paceline.scheduler.plan import DRAFT_DEPTHS

SHORT_CONTEXT_ROWS = 96  # batches with more rows have a graph of their own for short contexts
_SHORT_CONTEXT_TOKENS = 512  # per row on average; measured well above and below (docs/log/decode-attention.md)

MAX_GRAPHS = 192  # of some 4 MB each; keys and buckets could make more than a thousand
# Times that a pass is launched kernel by kernel before its graph is captured, and before another is dropped for it.
CAPTURE_AFTER, REPLACE_AFTER = 1, 16


class GraphStage(Enum):
    ALL = "all"
    DRAFTS = "drafts"  # ends with the drafts, if the pass has any
    LOGITS = "logits"  # begins with the drafts and ends with the logits
    TOKENS = "tokens"  # begins with logits and grammar masks


class GraphKey(NamedTuple):
    """What is fixed when a graph is captured, besides its number of rows."""

    filters: bool = False  # some row samples with top-k, top-p or min-p
    short_contexts: bool = False  # rows have a few hundred tokens each, and share none
    shared_block_m: int = 0  # query heads in a unit that several rows share; 0: no row shares
    adjusts: bool = False  # some row has penalties, biases or forbidden tokens
    stage: GraphStage = GraphStage.ALL
    logprobs: bool = False  # some row requests logprobs
    prefill: PrefillBucket | None = None  # a prefill or mixed batch; its graph ends with the logits
    drafts: int = 0  # of each row of a decode batch, at most (speculative decoding)
    all_states: bool = False  # the graph of a prefill batch ends with the hidden states of all tokens instead
    lora: bool = False  # some row has an adapter


def forward_key(num_rows: int, num_context_tokens: int, shared_block_m: int, *, lora: bool = False) -> GraphKey:
    """The part of a decode batch's key that concerns the forward pass. num_context_tokens: KV positions of all rows."""
    if shared_block_m:
        return GraphKey(shared_block_m=shared_block_m, lora=lora)
    short = num_rows > SHORT_CONTEXT_ROWS and num_context_tokens < _SHORT_CONTEXT_TOKENS * num_rows
    return GraphKey(short_contexts=short, lora=lora)


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending. GEMMs compute tiles of 16 to 64 rows, so finer buckets would only save the
    memory traffic of a few padding rows."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
    sizes += [*range(160, 257, 32), *range(320, max_rows + 64, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def draft_sizes(sizes: Sequence[int], max_rows: int, max_drafts: int) -> list[tuple[int, int]]:
    """The numbers of rows and drafts of passes with drafts, which sample at most `max_rows` tokens."""
    depths = [depth for depth in DRAFT_DEPTHS if depth <= max_drafts]
    return [(rows, depth) for rows in sizes for depth in depths if rows * (1 + depth) <= max_rows]


def forward_keys(rows: int) -> list[GraphKey]:
    """The keys of a decode batch of so many rows that shares nothing."""
    return [GraphKey(short_contexts=short) for short in ((True, False) if rows > SHORT_CONTEXT_ROWS else (False,))]


Sized = tuple[int, GraphKey]  # a graph: its number of rows and its key


class CudaGraphs:
    """Captured graphs by number of rows and key, least recently used first."""

    def __init__(
        self, streams: Streams, max_rows: int, run: Callable[[int, GraphKey], None], *, is_enabled: bool = True
    ) -> None:
        """`run(rows, key)` is a forward pass of so many rows. is_enabled: otherwise no graph is ever captured."""
        self.sizes = buckets(max_rows)
        self.capture_s = 0.0  # host time so far
        self.is_enabled = is_enabled
        self._streams, self._run = streams, run
        self._graphs: dict[Sized, Graph] = {}
        self._misses: Counter[Sized] = Counter()  # of graphs that do not exist

    def bucket(self, num_rows: int, key: GraphKey) -> int:
        """The smallest bucket that holds so many rows. Where rows share KV reads, every second bucket is left out."""
        at = bisect.bisect_left(self.sizes, num_rows)
        return self.sizes[-1 - (len(self.sizes) - 1 - at) // 2 * 2] if key.shared_block_m else self.sizes[at]

    def find(self, size: int, key: GraphKey, *, may_capture: bool) -> Graph | None:
        """The graph of a bucket; None if there is none yet. may_capture: it is captured if it was missed often enough,
        which takes the host some ten milliseconds, and longer if the device is busy."""
        if (size, key) not in self._graphs:
            needed = CAPTURE_AFTER if len(self._graphs) < MAX_GRAPHS else REPLACE_AFTER
            if not (self.is_enabled and may_capture and self._misses[size, key] >= needed):
                self._misses[size, key] += 1
                return None
            self.capture(size, key)
        graph = self._graphs[size, key] = self._graphs.pop((size, key))
        return graph

    def capture(self, size: int, key: GraphKey) -> None:
        """Captures a graph. The least recently used one is dropped if there are too many."""
        if not self.is_enabled:
            return
        began = time.perf_counter()
        self._graphs[size, key] = self._streams.capture(lambda: self._run(size, key))
        self._misses.pop((size, key), None)
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self.capture_s += time.perf_counter() - began

    def drop_drafts(self) -> None:
        """Drops the graphs of passes with drafts. Not all graphs: torch frees their memory pool with the last one."""
        self._graphs = {graph: one for graph, one in self._graphs.items() if not graph[1].drafts}

    def capture_next(self, likely: Iterable[Sized]) -> bool:
        """Captures one graph that was missed or is likely to be used; returns False if there is none."""
        if len(self._graphs) >= MAX_GRAPHS or not self.is_enabled:
            return False
        missing = (graph for graph in (*self._misses, *likely) if graph not in self._graphs)
        graph = next(missing, None)
        if graph is not None:
            self.capture(*graph)
        return graph is not None
