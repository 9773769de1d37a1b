"""Attention over pages on the CPU, computed for groups of rows instead of row by row.

A forward pass is split into groups of rows with equally many new tokens. A group reads its keys in up to three parts,
each one call; the results are merged by their log-sum-exp:

    |<- shared: pages all rows have ->|<- own: each row's other pages, padded ->|<- new: causal, not from the cache ->|

Decode rows read their one new token from the cache and have no third part. A prefix that 64 rows share is therefore
read once instead of 64 times, and padding is bounded because rows of very different lengths are in different groups.
Layers whose sliding window hides something use one masked call (`_MaskedGroup`), which is also the simplest form of
all this. So do models with a soft cap of the scores: torch's flash kernel has no hook between the scores and the
softmax, so theirs is written out, one KV head after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.cpu.inputs import Index, Inputs
from paceline.engine.cpu.kv_cache import KVCache
from paceline.model.decoder import Attend, soft_cap
from paceline.model.layers import Attention
from paceline.model.spec import ModelSpec
from paceline.model.state_rows import StateRows

# Fewest shared positions and rows for which a separate shared part pays off: below that one padded call is faster.
SHARED_TOKENS = 64
SHARED_ROWS = 3
_UNBUCKETED = 4096  # padded positions up to which splitting a group by length costs more than it saves

# Returns the output and the log-sum-exp of the scores; accepts fewer KV heads than query heads.
_flash: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _RowGroup(Protocol):
    tokens: slice | Tensor  # indices of the group's tokens in the batch

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[tokens, heads, D] of this group's q, k, v."""


class CpuAttention:
    """The attention backend of the CPU."""

    def __init__(self, cache: KVCache, spec: ModelSpec) -> None:
        self._cache = cache
        mixers = [(index, layer.mixer) for index, layer in enumerate(spec.layers)]
        # Layers that are equal in these, and in what their window hides, read the cache in the same way.
        self._layers = {
            index: (one, (one.num_heads, one.num_kv_heads, one.head_dim, one.scale, one.score_cap))
            for index, one in mixers
            if isinstance(one, Attention)
        }

    def begin(self, inputs: Inputs) -> Attend:
        return _BatchAttention(self._cache, self._layers, inputs)


class _BatchAttention:
    """`Attend` for one batch: writes keys and values, then attends group by group."""

    def __init__(self, cache: KVCache, layers: Mapping[int, tuple[Attention, Hashable]], inputs: Inputs) -> None:
        self._cache = cache
        self._kv_indices = torch.from_numpy(inputs.kv_indices)
        self._stale = torch.from_numpy(_stale_indices(inputs, cache.page_size))
        self._num_tokens = len(inputs.tokens)
        self._slots, offsets = torch.from_numpy(inputs.slots), np.append(inputs.offsets, self._num_tokens)
        self._offsets = torch.from_numpy(offsets)
        longest = int((inputs.starts + inputs.lengths).max())
        groups: dict[tuple[Hashable, int | None], list[_RowGroup]] = {}
        self._layers: dict[int, list[_RowGroup]] = {}
        for index, (mixer, kind) in layers.items():
            # A window of the whole context hides nothing yet.
            window = mixer.window if mixer.window is not None and longest > mixer.window else None
            found = groups.get((kind, window))
            if found is None:
                make = _FullGroup if window is None and mixer.score_cap is None else _MaskedGroup
                found = groups[kind, window] = [
                    make(cache, mixer, inputs, rows, shared, window) for rows, shared in _split(inputs, cache.page_size)
                ]
            self._layers[index] = found

    def state(self, layer: int) -> StateRows:
        """Of a layer that has a state instead of attention."""
        return StateRows(self._cache.states[layer], self._slots, self._offsets)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        self._cache.keys[layer].index_copy_(0, self._kv_indices, k)
        self._cache.values[layer].index_copy_(0, self._kv_indices, v)
        if len(self._stale):
            self._cache.keys[layer].index_fill_(0, self._stale, 0)
            self._cache.values[layer].index_fill_(0, self._stale, 0)
        groups = self._layers[layer]
        if len(groups) == 1:
            return groups[0].run(layer, q, k, v, sinks).reshape(self._num_tokens, -1)
        out = q.new_empty(q.shape)
        for group in groups:
            at = group.tokens
            out[at] = group.run(layer, q[at], k[at], v[at], sinks)
        return out.view(self._num_tokens, -1)


def _stale_indices(inputs: Inputs, page_size: int) -> Index:
    """KV indices after the last token of rows that begin a page in this pass: they hold what an earlier owner wrote."""
    ends = inputs.starts + inputs.lengths
    rows = np.flatnonzero((ends % page_size > 0) & (inputs.starts <= ends // page_size * page_size))
    offsets = np.arange(page_size)
    first = inputs.page_rows[rows, ends[rows] // page_size].astype(np.int64) * page_size
    indices: Index = (first[:, None] + offsets)[offsets >= (ends[rows] % page_size)[:, None]]
    return indices


def _split(inputs: Inputs, page_size: int) -> list[tuple[Index, int]]:
    """Groups of rows, and how many leading pages all rows of a group share."""
    num_rows = len(inputs.lengths)
    if num_rows == 1:
        return [(np.zeros(1, np.int64), 0)]
    groups: list[tuple[Index, int]] = []
    for length in np.unique(inputs.lengths).tolist():
        rows = np.flatnonzero(inputs.lengths == length)
        # Rows are candidates for sharing if they have the same page at this depth.
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
    """Leading pages that are the same for all rows and end before every row's new tokens."""
    limit = int(inputs.starts[rows].min()) // page_size
    pages = inputs.page_rows[rows, :limit]
    same = (pages == pages[0]).all(axis=0)
    return limit if same.all() else int(same.argmin())


def _buckets(inputs: Inputs, rows: Index, length: int) -> list[Index]:
    """Rows of similar length: within a bucket the longest is at most about 1.4 times the shortest."""
    if not len(rows):
        return []
    if length > 1:  # rows that start at 0 have no cached part
        fresh = inputs.starts[rows] == 0
        if fresh.any() and not fresh.all():
            return [rows[fresh], *_buckets(inputs, rows[~fresh], length)]
    starts = inputs.starts[rows]
    if int(starts.max()) * len(rows) - int(starts.sum()) <= _UNBUCKETED:
        return [rows]
    bucket = np.ceil(2 * np.log2(np.maximum(starts, 16))).astype(np.int64)
    return [rows[bucket == value] for value in np.unique(bucket).tolist()]


def _tokens_of(inputs: Inputs, rows: Index, length: int) -> slice | Tensor:
    offsets = inputs.offsets[rows]
    if (np.diff(offsets) == length).all():
        return slice(int(offsets[0]), int(offsets[-1]) + length)
    return torch.from_numpy((offsets[:, None] + np.arange(length)).reshape(-1))


def _own_pages(inputs: Inputs, rows: Index, first: Index, count: int, page_size: int) -> npt.NDArray[np.int32]:
    """Pages [rows, count] starting at `first` [rows, 1]. Past a row's end this repeats its last page, which the mask
    hides, and never another request's: a weight of zero times a NaN would still be NaN."""
    last = (inputs.starts[rows] + inputs.lengths[rows] - 1) // page_size
    at = np.minimum(first + np.arange(count), last[:, None])
    found: npt.NDArray[np.int32] = np.take_along_axis(inputs.page_rows[rows], at, 1)
    return found


@dataclass(slots=True, eq=False)
class _Reader:
    """Reads cached keys and values [rows, KV heads, positions, D]: a view if the pages are consecutive, else a copy."""

    cache: KVCache
    num_rows: int
    num_positions: int
    first: int | None  # KV index of the first position, for one row with consecutive pages
    page_ids: Tensor | None  # else the pages of the keys, then those of the values

    @classmethod
    def of(cls, cache: KVCache, pages: npt.NDArray[np.int32], num_positions: int) -> _Reader:
        """A reader of pages [rows, pages], up to `num_positions` per row."""
        if len(pages) == 1 and (np.diff(pages[0]) == 1).all():
            return cls(cache, 1, num_positions, int(pages[0, 0]) * cache.page_size, None)
        flat = pages.reshape(-1).astype(np.int64)
        page_ids = torch.from_numpy(np.concatenate([flat, flat + cache.num_pages]))
        return cls(cache, len(pages), num_positions, None, page_ids)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        if self.first is not None:
            end = self.first + self.num_positions
            keys, values = self.cache.keys[layer][self.first : end], self.cache.values[layer][self.first : end]
            return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        assert self.page_ids is not None, "a reader has a first index or a list of pages"
        keys, values = self.cache.gather(layer, self.page_ids, self.num_rows)
        end = self.num_positions
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)


class _FullGroup:
    """Rows with equally many new tokens in layers that attend to all positions."""

    def __init__(
        self, cache: KVCache, mixer: Attention, inputs: Inputs, rows: Index, shared: int, window: int | None
    ) -> None:
        assert window is None, "a window that hides something needs a mask"
        size = cache.page_size
        self.num_rows, self.length = len(rows), int(inputs.lengths[rows[0]])
        self.tokens = _tokens_of(inputs, rows, self.length)
        num_kv = mixer.num_kv_heads
        self._grouped = (self.num_rows, num_kv, mixer.num_heads // num_kv, mixer.head_dim)
        self._scale = mixer.scale
        # A decode row reads its new token from the cache, where it has just been written.
        num_cached = inputs.starts[rows] + (1 if self.length == 1 else 0)
        pages = inputs.page_rows[rows]
        self._shared = _Reader.of(cache, pages[:1, :shared], shared * size) if shared else None
        pages = _own_pages(inputs, rows, shared + np.zeros((len(rows), 1), np.int64), pages.shape[1] - shared, size)
        own = num_cached - shared * size
        longest = int(own.max())
        self._own: _Reader | None = None
        self._mask: Tensor | None = None
        self._absent: Tensor | None = None  # rows without an own part, in a group where others have one
        if longest:
            self._own = _Reader.of(cache, pages[:, : -(-longest // size)], longest)
            if (own < longest).any():
                visible = torch.from_numpy(np.arange(longest) < own[:, None])[:, None, None, :]
                self._mask = torch.zeros(visible.shape, dtype=cache.dtype).masked_fill_(~visible, -torch.inf)
                if (own == 0).any():
                    self._absent = torch.from_numpy(own == 0)[:, None, None]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if self.length == 1:
            return self._decode(layer, q, sinks)
        heads = (self.num_rows, self.length, -1, q.shape[-1])
        out, lse = _attend_new(q.reshape(heads), k.reshape(heads), v.reshape(heads), self._scale)
        if self._own is not None:
            keys, values = self._own.read(layer)
            past, past_lse = _attend_cached(q.reshape(heads), keys, values, self._mask, self._scale)
            if self._absent is not None:
                past_lse = past_lse.masked_fill(self._absent, -torch.inf)
            out, lse = _merge(out, lse, past, past_lse)
        if self._shared is not None:
            out, lse = _merge(out, lse, *self._read_shared(layer, q, heads))
        return _with_sinks(out, lse, sinks).reshape(q.shape)

    def _decode(self, layer: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        assert self._own is not None, "a decode row reads at least its own token"
        keys, values = self._own.read(layer)
        # The query heads of a KV head are passed as query positions, so that its keys are read once for all of them.
        out, lse = _flash(q.reshape(self._grouped), keys, values, attn_mask=self._mask, scale=self._scale)
        heads = (self.num_rows, 1, -1, q.shape[-1])
        out, lse = out.reshape(heads), lse.reshape(self.num_rows, 1, -1)
        if self._shared is not None:
            out, lse = _merge(out, lse, *self._read_shared(layer, q, heads))
        return _with_sinks(out, lse, sinks).reshape(q.shape)

    def _read_shared(self, layer: int, q: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """All tokens of the group in one call, over the one copy of the shared pages."""
        assert self._shared is not None, "the group shares nothing"
        out, lse = _attend_cached(q.unsqueeze(0), *self._shared.read(layer), None, self._scale)
        return out.reshape(heads), lse.reshape(heads[0], heads[1], -1)


class _MaskedGroup:
    """Rows with equally many new tokens in layers with a sliding window, or a soft cap: one call with its own mask."""

    def __init__(
        self, cache: KVCache, mixer: Attention, inputs: Inputs, rows: Index, shared: int, window: int | None
    ) -> None:
        size = cache.page_size
        self.num_rows, self.length = len(rows), int(inputs.lengths[rows[0]])
        self.tokens = _tokens_of(inputs, rows, self.length)
        self._scale, self._softmax_scale, self._cap = mixer.scale, mixer.softmax_scale, mixer.score_cap
        starts = inputs.starts[rows]
        # The first visible page.
        first = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0) // size
        num_pages = int(((starts + self.length - 1) // size - first).max()) + 1
        pages = _own_pages(inputs, rows, first[:, None], num_pages, size)
        self._reader = _Reader.of(cache, pages, num_pages * size)
        query = torch.from_numpy(starts[:, None] + np.arange(self.length))[:, None, :, None]
        key = torch.from_numpy(first[:, None] * size + np.arange(num_pages * size))[:, None, None, :]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        self._mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, -torch.inf)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        heads = q.reshape(self.num_rows, self.length, -1, q.shape[-1])
        if self._cap is not None:
            assert sinks is None, "Attention refuses both"
            return self._capped(heads, *self._reader.read(layer), self._cap).reshape(q.shape)
        out, lse = _attend_cached(heads, *self._reader.read(layer), self._mask, self._scale)
        return _with_sinks(out, lse, sinks).reshape(q.shape)

    def _capped(self, q: Tensor, keys: Tensor, values: Tensor, cap: float) -> Tensor:
        """[rows, queries, heads, D] of q in that order, and of keys and values [rows, KV heads, positions, D]."""
        # [rows, KV heads, query heads of each, queries, D]
        groups = q.view(*q.shape[:2], keys.shape[1], -1, q.shape[-1]).permute(0, 2, 3, 1, 4)
        parts = []
        for head in range(keys.shape[1]):
            mine, k, v = groups[:, head].float(), keys[:, head, None].float(), values[:, head, None].float()
            scores = soft_cap(mine @ k.transpose(-1, -2) * self._softmax_scale, cap)
            parts.append((scores + self._mask).softmax(-1) @ v)
        return torch.cat(parts, dim=1).transpose(1, 2).to(q.dtype)


def _attend_new(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention of new tokens to each other: output [rows, queries, heads, D] and log-sum-exp [rows, queries,
    heads] of q, k, v in that same order."""
    return _attend_cached(q, k.transpose(1, 2), v.transpose(1, 2), None, scale, is_causal=True)


def _attend_cached(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    out, lse = _flash(q.transpose(1, 2), keys, values, is_causal=is_causal, attn_mask=mask, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The output [rows, queries, heads, D] over all keys, with sinks [heads] added to the denominators of the softmax:
    once, after all parts are merged."""
    return out if sinks is None else out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two attention results over different keys into the result over both."""
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)
