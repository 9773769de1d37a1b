"""Attention over pages on the CPU: groups of rows, never one row after the other.

A pass is cut into groups of rows with equally many new tokens. What a group reads comes in up to three parts,
each one call, joined by their log-sum-exp:

    |<- shared: pages all rows have ->|<- own: each row's other pages, padded ->|<- new: causal, not from memory ->|

Decoding rows read their one new token from memory and have no third part. So a prefix that 64 rows share is read
once and not 64 times, and padding is bounded because rows of very different lengths are in different groups.
Layers with a sliding window that cuts something off take one masked call (`_Windowed`), the plain twin of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.cpu.inputs import Index, Inputs
from paceline.engine.cpu.kv_cache import KVCache
from paceline.model.spec import ModelSpec

# Fewest shared positions and rows for which a part of its own pays: below that one padded call is quicker.
SHARED_TOKENS = 64
SHARED_ROWS = 3
_UNBUCKETED = 4096  # padded positions up to which splitting a group by length costs more than it saves

# Returns the output and the log-sum-exp of the scores, and takes fewer KV heads than heads as they are.
_flash: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _RowGroup(Protocol):
    tokens: slice | Tensor  # which of the pass's tokens

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[tokens, heads, D] of this group's q, k, v."""


class CpuAttention:
    """`Attend` for one pass: writes keys and values, then attends group by group."""

    def __init__(self, cache: KVCache, spec: ModelSpec, inputs: Inputs) -> None:
        self._cache = cache
        self._places = torch.from_numpy(inputs.places)
        self._behind = torch.from_numpy(_behind(inputs, cache.page_size))
        self._num_tokens = len(inputs.tokens)
        reach = int((inputs.starts + inputs.lengths).max())
        groups: dict[int | None, list[_RowGroup]] = {}
        self._layers: list[list[_RowGroup]] = []
        for window in spec.windows:
            if window is not None and reach <= window:
                window = None  # nothing is cut off yet
            if window not in groups:
                make = _Windowed if window is not None else _Parts
                groups[window] = [
                    make(cache, spec, inputs, rows, shared, window) for rows, shared in _split(inputs, cache.page_size)
                ]
            self._layers.append(groups[window])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.keys[layer].index_copy_(0, self._places, k)
        self._cache.values[layer].index_copy_(0, self._places, v)
        if len(self._behind):
            self._cache.keys[layer].index_fill_(0, self._behind, 0)
            self._cache.values[layer].index_fill_(0, self._behind, 0)
        groups = self._layers[layer]
        if len(groups) == 1:
            return groups[0].run(layer, q, k, v).reshape(self._num_tokens, -1)
        out = q.new_empty(q.shape)
        for group in groups:
            at = group.tokens
            out[at] = group.run(layer, q[at], k[at], v[at])
        return out.view(self._num_tokens, -1)


def _behind(inputs: Inputs, page_size: int) -> Index:
    """Places behind the last token of rows that begin a page in this pass: what an earlier owner left there."""
    ends = inputs.starts + inputs.lengths
    rows = np.flatnonzero((ends % page_size > 0) & (inputs.starts <= ends // page_size * page_size))
    offsets = np.arange(page_size)
    first = inputs.page_rows[rows, ends[rows] // page_size].astype(np.int64) * page_size
    places: Index = (first[:, None] + offsets)[offsets >= (ends[rows] % page_size)[:, None]]
    return places


def _split(inputs: Inputs, page_size: int) -> list[tuple[Index, int]]:
    """Groups of rows, and how many pages at the front all rows of a group share."""
    num_rows = len(inputs.lengths)
    if num_rows == 1:
        return [(np.zeros(1, np.int64), 0)]
    groups: list[tuple[Index, int]] = []
    for length in np.unique(inputs.lengths).tolist():
        rows = np.flatnonzero(inputs.lengths == length)
        # Rows are candidates to share when they have the same page at this depth.
        depth = max(1, -(-SHARED_TOKENS // page_size))
        deep = (inputs.starts[rows] // page_size >= depth) & inputs.shares
        page = np.full(len(rows), -1)
        if deep.any():
            page[deep] = inputs.page_rows[rows[deep], depth - 1]
        values, group_of, counts = np.unique(page, return_inverse=True, return_counts=True)
        sharing = (values >= 0) & (counts >= SHARED_ROWS)
        for index in np.flatnonzero(sharing).tolist():
            members = rows[group_of == index]
            groups.append((members, _num_shared(inputs, members, page_size)))
        groups += [(members, 0) for members in _buckets(inputs, rows[~sharing[group_of]], length)]
    return groups


def _num_shared(inputs: Inputs, rows: Index, page_size: int) -> int:
    """Pages at the front that are the same for all and lie wholly before every row's new tokens."""
    limit = int(inputs.starts[rows].min()) // page_size
    pages = inputs.page_rows[rows, :limit]
    same = (pages == pages[0]).all(axis=0)
    return limit if same.all() else int(same.argmin())


def _buckets(inputs: Inputs, rows: Index, length: int) -> list[Index]:
    """Rows of similar reach: within a bucket the longest is at most about 1.4 times the shortest."""
    if not len(rows):
        return []
    if length > 1:  # rows without a past have one part less
        fresh = inputs.starts[rows] == 0
        if fresh.any() and not fresh.all():
            return [rows[fresh], *_buckets(inputs, rows[~fresh], length)]
    reach = inputs.starts[rows]
    if int(reach.max()) * len(rows) - int(reach.sum()) <= _UNBUCKETED:
        return [rows]
    bucket = np.ceil(2 * np.log2(np.maximum(reach, 16))).astype(np.int64)
    return [rows[bucket == value] for value in np.unique(bucket).tolist()]


def _tokens_of(inputs: Inputs, rows: Index, length: int) -> slice | Tensor:
    offsets = inputs.offsets[rows]
    if (np.diff(offsets) == length).all():
        return slice(int(offsets[0]), int(offsets[-1]) + length)
    return torch.from_numpy((offsets[:, None] + np.arange(length)).reshape(-1))


def _own_pages(inputs: Inputs, rows: Index, first: Index, count: int, page_size: int) -> npt.NDArray[np.int32]:
    """Pages [rows, count] from `first` [rows, 1] on. Past a row's end its last page is read again, behind the mask, and
    nobody else's: a weight of zero times another request's NaN would still be a NaN."""
    last = (inputs.starts[rows] + inputs.lengths[rows] - 1) // page_size
    at = np.minimum(first + np.arange(count), last[:, None])
    found: npt.NDArray[np.int32] = np.take_along_axis(inputs.page_rows[rows], at, 1)
    return found


@dataclass(slots=True, eq=False)
class _Reader:
    """Cached keys and values [rows, KV heads, positions, D] of some pages: a view where they lie in line."""

    cache: KVCache
    num_rows: int
    num_positions: int
    first: int | None  # where the only row begins, if its pages follow each other
    both: Tensor | None

    @classmethod
    def of(cls, cache: KVCache, pages: npt.NDArray[np.int32], num_positions: int) -> _Reader:
        """Of pages [rows, pages], up to `num_positions` a row."""
        if len(pages) == 1 and (np.diff(pages[0]) == 1).all():
            return cls(cache, 1, num_positions, int(pages[0, 0]) * cache.page_size, None)
        flat = pages.reshape(-1).astype(np.int64)
        both = torch.from_numpy(np.concatenate([flat, flat + cache.num_pages]))
        return cls(cache, len(pages), num_positions, None, both)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        if self.first is not None:
            end = self.first + self.num_positions
            keys, values = self.cache.keys[layer][self.first : end], self.cache.values[layer][self.first : end]
            return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        assert self.both is not None, "a reader has a place or a list of pages"
        keys, values = self.cache.gather(layer, self.both, self.num_rows)
        end = self.num_positions
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)


class _Parts:
    """Rows with equally many new tokens in layers that see everything."""

    def __init__(
        self, cache: KVCache, spec: ModelSpec, inputs: Inputs, rows: Index, shared: int, window: int | None
    ) -> None:
        assert window is None, "a window that cuts something off needs a mask"
        size = cache.page_size
        self.num_rows, self.length = len(rows), int(inputs.lengths[rows[0]])
        self.tokens = _tokens_of(inputs, rows, self.length)
        self._grouped = (self.num_rows, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        # A decoding row finds its new token in memory, where it has just been written.
        reach = inputs.starts[rows] + (1 if self.length == 1 else 0)
        pages = inputs.page_rows[rows]
        self._shared = _Reader.of(cache, pages[:1, :shared], shared * size) if shared else None
        pages = _own_pages(inputs, rows, shared + np.zeros((len(rows), 1), np.int64), pages.shape[1] - shared, size)
        own = reach - shared * size
        longest = int(own.max())
        self._own: _Reader | None = None
        self._mask: Tensor | None = None
        self._absent: Tensor | None = None  # rows that have no own part though others of the group do
        if longest:
            self._own = _Reader.of(cache, pages[:, : -(-longest // size)], longest)
            if (own < longest).any():
                visible = torch.from_numpy(np.arange(longest) < own[:, None])[:, None, None, :]
                self._mask = torch.zeros(visible.shape, dtype=cache.keys[0].dtype).masked_fill_(~visible, -torch.inf)
                if (own == 0).any():
                    self._absent = torch.from_numpy(own == 0)[:, None, None]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.length == 1:
            return self._decode(layer, q)
        heads = (self.num_rows, self.length, -1, q.shape[-1])
        out, lse = _attend(q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True)
        if self._own is not None:
            keys, values = self._own.read(layer)
            past, past_lse = _attend_cached(q.reshape(heads), keys, values, self._mask)
            if self._absent is not None:
                past_lse = past_lse.masked_fill(self._absent, -torch.inf)
            out, lse = _join(out, lse, past, past_lse)
        if self._shared is not None:
            out, lse = _join(out, lse, *self._read_shared(layer, q, heads))
        return out.reshape(q.shape)

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        assert self._own is not None, "a decoding row reads at least its own token"
        keys, values = self._own.read(layer)
        # The query heads of a KV head stand in for query positions: its keys are read once for all of them.
        out, lse = _flash(q.reshape(self._grouped), keys, values, attn_mask=self._mask)
        out = out.reshape(q.shape)
        if self._shared is not None:
            heads = (self.num_rows, 1, -1, q.shape[-1])
            lse = lse.reshape(self.num_rows, 1, -1)
            out, _ = _join(out.view(heads), lse, *self._read_shared(layer, q, heads))
        return out.reshape(q.shape)

    def _read_shared(self, layer: int, q: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """All tokens of the group at once against the one copy of what they share."""
        assert self._shared is not None, "the group shares nothing"
        out, lse = _attend_cached(q.unsqueeze(0), *self._shared.read(layer), None)
        return out.reshape(heads), lse.reshape(heads[0], heads[1], -1)


class _Windowed:
    """Rows with equally many new tokens in layers with a sliding window: one call with a mask of its own."""

    def __init__(
        self, cache: KVCache, spec: ModelSpec, inputs: Inputs, rows: Index, shared: int, window: int | None
    ) -> None:
        assert window is not None, "a layer without a window needs no mask"
        size = cache.page_size
        self.num_rows, self.length = len(rows), int(inputs.lengths[rows[0]])
        self.tokens = _tokens_of(inputs, rows, self.length)
        starts = inputs.starts[rows]
        first = np.maximum(starts - window + 1, 0) // size  # the first page that anything is seen of
        num_pages = int(((starts + self.length - 1) // size - first).max()) + 1
        pages = _own_pages(inputs, rows, first[:, None], num_pages, size)
        self._reader = _Reader.of(cache, pages, num_pages * size)
        query = torch.from_numpy(starts[:, None] + np.arange(self.length))[:, None, :, None]
        key = torch.from_numpy(first[:, None] * size + np.arange(num_pages * size))[:, None, None, :]
        hidden = (key > query) | (key <= query - window)
        self._mask = torch.zeros(hidden.shape, dtype=cache.keys[0].dtype).masked_fill_(hidden, -torch.inf)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = q.reshape(self.num_rows, self.length, -1, q.shape[-1])
        out, _ = _attend_cached(heads, *self._reader.read(layer), self._mask)
        return out.reshape(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output [rows, queries, heads, D] and log-sum-exp [rows, queries, heads] of q, k, v in that same order."""
    return _attend_cached(q, k.transpose(1, 2), v.transpose(1, 2), None, **options)


def _attend_cached(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    out, lse = _flash(q.transpose(1, 2), keys, values, attn_mask=mask, **options)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions over different keys as the one over both."""
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)
