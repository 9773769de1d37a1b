"""From a plan to one packed upload: the changes of device state, and for prefill tokens which row each belongs to.

The device keeps its own state by slot. The host keeps only what it needs to avoid sending things again: the position of
each slot's counter on the device, and the rows the device has. Sampling advances the counter of its row, so a row that
keeps decoding appears in no upload. Stages of a pipeline before the last sample nothing: they get the positions of all
rows, and the first one the tokens that the last one has sampled.

For a prefill or mixed batch the upload contains everything: tokens, work units, which rows sample. Small batches are
padded to one of a few sizes (`PrefillBucket`), so that one CUDA graph serves many of them. The tokens of others are
padded to a multiple of `TOKEN_STEP`: libraries choose another kernel for another number of rows, and load it at first
use, for which they wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.engine.cuda.packing import (
    NO_WORDS,
    Run,
    adjust_runs,
    no_adjustments,
    pack_diff,
    pack_runs,
    sampling_words,
)
from paceline.engine.cuda.sharing import NOTHING_SHARED, SharedUnits, ShareRule, shared_rows
from paceline.engine.cuda.tiles import SharedTiles, SplitRule, extend_tiles, extend_units, shared_tiles
from paceline.kernels._triton import cdiv
from paceline.kernels.layouts import EXTEND_UNIT_WORDS, SourceWord
from paceline.sampling.adjust import logit_adjustments, token_counts
from paceline.sampling.logprobs import LogprobTable, LogprobWidth
from paceline.scheduler.plan import Join, Plan

Column = npt.NDArray[np.int32]

ALIGN = 32  # words: parts begin at multiples, so that Triton's pointer specialisation is the same for all of them
PREFILL_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)  # tokens of prefill buckets
TOKEN_STEP = 64  # tokens of a prefill batch without a bucket are padded to a multiple
_EXTRA_TILES = 32  # more than a bucket's tokens fill: each prompt may end within a tile
_MIN_OUTPUT_ROWS = 16
_SPLIT_CAPACITIES = ((0, 0), (32, 16), (128, 64))  # splits of keys, and tiles they belong to
_UNKNOWN = -1  # position: drafts may have been accepted
_NUM_PREFILL_COLUMNS = 10  # token_rows to tile_tokens of `PackedBatch`


@dataclass(frozen=True, slots=True, eq=False)
class UploadSpan:
    """A part of an upload, in words."""

    first: int
    count: int


def lay_out(counts: Iterable[int], at: int = 0) -> tuple[list[UploadSpan], int]:
    """The spans of consecutive parts of so many words from `at` on, and where the next part would begin."""
    spans = []
    for count in counts:
        spans.append(UploadSpan(at, count))
        at += cdiv(count, ALIGN) * ALIGN
    return spans, at


class PrefillBucket(NamedTuple):
    """The sizes that a small prefill or mixed batch is padded to. Tokens, units and merges of row -1 are padding."""

    tokens: int
    units: int
    merges: int

    def counts(self, max_rows: int) -> tuple[int, ...]:
        """Words of token_rows, query_starts, extend_units, extend_merges, sampled, num_outputs and prefill_range."""
        units, merges = EXTEND_UNIT_WORDS * self.units, EXTEND_UNIT_WORDS * self.merges
        return self.tokens, max_rows + 1, units, merges, max_rows, 1, 2


def prefill_buckets(tokens: int, tokens_per_tile: int) -> list[PrefillBucket]:
    """The buckets for batches of up to so many tokens, ascending."""
    tiles = cdiv(tokens, tokens_per_tile) + _EXTRA_TILES
    return [PrefillBucket(tokens, tiles + splits, merges) for splits, merges in _SPLIT_CAPACITIES]


def token_sizes(max_tokens: int) -> list[int]:
    """All numbers of tokens that `padded_tokens` pads to."""
    return sorted({padded_tokens(count, max_tokens) for count in range(1, max_tokens + 1)})


def padded_tokens(count: int, max_tokens: int) -> int:
    """What the tokens of a prefill batch without a bucket are padded to."""
    return min(cdiv(count, TOKEN_STEP) * TOKEN_STEP, max_tokens)


def output_rows(count: int, max_rows: int) -> int:
    """What the hidden states that a prefill batch samples from are padded to: few numbers of rows, since cuBLAS has
    other kernels for other numbers, and loads them at first use."""
    return min(max(_MIN_OUTPUT_ROWS, 1 << (count - 1).bit_length()), max_rows)


def output_sizes(max_rows: int) -> list[int]:
    """All numbers that `output_rows` pads to."""
    return sorted({output_rows(count, max_rows) for count in range(1, max_rows + 1)})


def _padded(column: Column, count: int, value: int) -> Column:
    return np.concatenate([column, np.full(count - len(column), value, np.int32)])


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The upload of one forward pass: its parts, and the span of each."""

    parts: tuple[Column, ...]
    num_words: int  # 0: nothing is uploaded, and the device's state is not changed before the pass
    is_decode: bool  # a decode batch: one token per row, and all rows sample
    has_filters: bool  # some row samples with top-k, top-p or min-p
    adjusts: bool  # some row has penalties, biases or forbidden tokens
    has_adapters: bool  # some row uses a LoRA adapter
    logprobs: LogprobWidth | None  # the logprobs of the output, if some sampling row requests them
    shared_block_m: int  # query heads in a unit of decode attention that several rows share; 0: no row shares
    num_saved_tokens: int  # KV positions that decode rows do not read because another row of their unit does
    num_decodes: int  # rows of decode attention: the plan's decodes, or all rows of a decode batch
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_splits: int  # of tiles whose keys are split
    bucket: PrefillBucket | None  # what the next seven spans are padded to, if a CUDA graph can run the batch
    pooled_rows: Column  # rows of prompts that are embedded
    pooled_starts: Column  # the position of each one's first token
    token_rows: UploadSpan  # padded
    query_starts: UploadSpan
    extend_units: UploadSpan  # tiles of prefill queries, whole or in splits
    extend_merges: UploadSpan  # tiles whose keys are split
    sampled: UploadSpan  # the last token of each sampling row, padded
    num_outputs: UploadSpan  # one word: num_sampled
    prefill_range: UploadSpan  # two words: where the prefill tokens begin, after those of decodes, and where they end
    shared_tiles: UploadSpan  # tiles of prefill rows that share a prefix
    tile_rows: UploadSpan
    tile_tokens: UploadSpan
    adjust_runs: UploadSpan  # changes of slots' penalties, biases and forbidden tokens
    source_runs: UploadSpan  # changes of slots' draft sources
    spill_pages: UploadSpan  # pages that are copied to host memory before the pass
    fetch_pages: UploadSpan  # pages that are copied back
    pool_ranges: UploadSpan  # first and end of the tokens that are summed for each of `pooled_rows`

    def without_upload(self) -> PackedBatch:
        """The same decode batch again: nothing is left to change."""
        spans = [field.name for field in fields(self) if isinstance(getattr(self, field.name), UploadSpan)]
        empty: dict[str, Any] = dict.fromkeys(spans, UploadSpan(0, 0))
        return replace(self, parts=(), num_words=0, **empty)

    def write(self, target: Column) -> None:
        """Copies all parts into the upload buffer."""
        at = 0
        for part in self.parts:
            target[at : at + len(part)] = part
            at += cdiv(len(part), ALIGN) * ALIGN


class PlanPacker:
    """Packs plans in launch order. It tracks the state that the device will have after each of them."""

    def __init__(
        self,
        max_running: int,
        vocab_size: int,
        tokens_per_tile: int,
        share_rule: ShareRule | None = None,
        max_length: int = 0,
        split_rule: SplitRule = SplitRule(kv_heads=1),  # noqa: B008  (frozen)
        prefill_sizes: Sequence[int] = (),
        *,
        max_tokens: int,
        has_drafts: bool = False,
        samples: bool = True,
    ) -> None:
        """max_tokens: of a batch. samples: the device samples, and advances the rows that do."""
        self._max_tokens = max_tokens
        self._has_drafts, self._samples = has_drafts, samples
        self._token_runs: list[Run] = []  # tokens that were sampled elsewhere, for the next upload
        self._has_source = np.zeros(max_running, np.bool_)  # slots whose draft source on the device is not empty
        self._prefill_sizes = prefill_sizes
        self._share_rule = share_rule
        self._split_rule = split_rule
        self._sharing_version = 0  # of the plan that `_shared` was computed from
        self._shared: SharedUnits | None = None  # the device's shared units
        self._shared_block_m = 0
        self._vocab_size = vocab_size
        self._tokens_per_tile = tokens_per_tile
        self._computed = np.zeros(max_running, np.int32)  # the device's num_computed
        self._rows = NO_WORDS  # the device's row_slots
        self._last: PackedBatch | None = None  # the last batch, if it was a decode batch
        self._filtered = np.zeros(max_running, np.bool_)
        self._pooled, self._pools_last = np.zeros((2, max_running), np.bool_)  # slots whose prompt is embedded
        self._max_length = max_length
        self._adjusted = np.zeros(max_running, np.bool_)  # slots whose lists on the device are not empty
        self._adapted = np.zeros(max_running, np.bool_)  # slots whose request uses a LoRA adapter
        self.logprobs = LogprobTable(max_running, vocab_size)

    def add_tokens(self, slots: Column, positions: Column, tokens: Column) -> None:
        """The next upload writes these tokens into the token pool."""
        self._token_runs += zip(slots.tolist(), positions.tolist(), tokens[:, None], strict=True)

    def pack(self, plan: Plan) -> PackedBatch:
        if self._last is None or not self._repeats(plan):
            packed = self._pack(plan)
            self._last = packed if packed.is_decode else None
            return packed
        if self._last.num_words:
            self._last = self._last.without_upload()
        self._computed[plan.slots] = plan.starts + 1 if plan.drafts is None else _UNKNOWN
        return self._last

    def _repeats(self, plan: Plan) -> bool:
        """Whether a plan decodes the rows of the last batch again and changes nothing else, as most plans do. Sampling
        has advanced the rows on the device."""
        return not (
            plan.joins
            or len(plan.page_changes[0].slots)
            or self._token_runs
            or plan.swap is not None
            or plan.num_decodes != len(self._rows)
            or plan.num_rows != plan.num_decodes
            or (self._share_rule is not None and plan.sharing_version != self._sharing_version)
            or not (plan.slots == self._rows).all()
            or not plan.samples.all()
            or not (plan.drafts is not None or (self._computed[plan.slots] == plan.starts).all())
        )

    def _pack(self, plan: Plan) -> PackedBatch:
        slots, samples, lengths = plan.slots, plan.samples, plan.lengths
        num_sampled = int(np.count_nonzero(samples))
        # A prompt of which all but the last token is cached runs as a decode, if all other rows are decodes.
        num_tokens = plan.num_tokens - plan.num_drafts  # the device adds drafts
        is_decode = num_tokens == plan.num_rows == num_sampled
        num_decodes = plan.num_rows if is_decode else plan.num_decodes
        diff, adjust = self._diff(plan, num_decodes), self._adjust(plan)
        num_splits, bucket = 0, None
        columns: tuple[Column, ...] = ()
        pooled_rows, pool_ranges = NO_WORDS, NO_WORDS
        if not is_decode:
            query_starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
            pooled_rows, pool_ranges = self._pooling(plan, query_starts)
            unshared, shared = self._prefill_sharing(plan, query_starts)
            tiles = extend_tiles(plan.starts, lengths, self._tokens_per_tile, unshared)
            units = extend_units(tiles, self._split_rule.splits(tiles[:, 2]))
            num_splits = units.num_splits
            columns = (
                np.repeat(np.arange(len(slots), dtype=np.int32), lengths),
                query_starts,
                units.units.reshape(-1),
                units.merges.reshape(-1),
                (query_starts[1:] - 1)[samples],
                np.array([num_sampled], np.int32),
                np.array([plan.num_decodes, num_tokens], np.int32),
                *((shared.tiles.reshape(-1), shared.rows, shared.tokens.reshape(-1)) if shared else ()),
            )
            bucket = None if shared else self._bucket(num_tokens, len(units.units), len(units.merges))
            if bucket is not None:
                counts = bucket.counts(len(self._computed))
                columns = tuple(
                    _padded(*padding) for padding in zip(columns, counts, (-1, 0, -1, -1, 0, 0, 0), strict=True)
                )
            else:
                token_rows = _padded(columns[0], padded_tokens(num_tokens, self._max_tokens), -1)
                outputs = output_rows(num_sampled, len(self._computed)) if num_sampled else 0
                columns = (token_rows, *columns[1:4], _padded(columns[4], outputs, 0), *columns[5:])
        columns += (NO_WORDS,) * (_NUM_PREFILL_COLUMNS - len(columns))
        swapped = (NO_WORDS, NO_WORDS) if plan.swap is None else (plan.swap.spill_pages, plan.swap.fetch_pages)
        parts = (diff, *columns, adjust, self._sources(plan), *swapped, pool_ranges)
        (_, *spans), num_words = lay_out(map(len, parts))
        # Sampling advances its row on the device; other rows stay where the diff has set them.
        self._computed[slots] = plan.starts + np.where(samples & self._samples, lengths, 0)
        if plan.drafts is not None:
            self._computed[slots[: plan.num_decodes]] = _UNKNOWN
        filtered = bool(self._filtered[slots].any())
        return PackedBatch(
            parts,
            num_words,
            is_decode,
            filtered,
            bool(self._adjusted[slots].any()),
            bool(self._adapted[slots].any()),
            self.logprobs.of_output(plan) if self._samples else None,
            self._shared_block_m,
            0 if self._shared is None else self._shared.num_saved_tokens,
            num_decodes,
            len(slots),
            num_tokens,
            num_sampled if self._samples else 0,
            num_splits,
            bucket,
            pooled_rows,
            plan.starts[pooled_rows],
            *spans,
        )

    def _bucket(self, num_tokens: int, num_units: int, num_merges: int) -> PrefillBucket | None:
        """The smallest bucket that fits, if any."""
        tokens = next((size for size in self._prefill_sizes if size >= num_tokens), None)
        if tokens is None:
            return None
        buckets = prefill_buckets(tokens, self._tokens_per_tile)
        return next((one for one in buckets if num_units <= one.units and num_merges <= one.merges), None)

    def _pooling(self, plan: Plan, query_starts: Column) -> tuple[Column, Column]:
        """The rows whose prompt is embedded, and for each the first and the end of the tokens to sum: all of its chunk,
        or the last one."""
        rows = np.flatnonzero(self._pooled[plan.slots] & self._samples).astype(np.int32)
        ends = query_starts[1:][rows]
        firsts = np.where(self._pools_last[plan.slots[rows]], ends - 1, query_starts[rows])
        return rows, np.stack([firsts, ends], axis=1).reshape(-1)

    def _prefill_sharing(self, plan: Plan, query_starts: Column) -> tuple[Column, SharedTiles | None]:
        """The prefill rows that have tiles of their own, and the shared tiles of the others."""
        prefills = np.arange(plan.num_decodes, plan.num_rows, dtype=np.int32)
        if self._share_rule is None or not self._share_rule.share_prefill:
            return prefills, None
        rows, common = shared_rows(plan, plan.num_decodes, plan.num_rows)
        if not len(common):
            return prefills, None
        shared = shared_tiles(rows, common, query_starts, self._tokens_per_tile, self._share_rule.chunks[-1])
        if shared is None:
            return prefills, None
        is_own = np.ones(plan.num_rows, bool)  # not by setdiff1d, whose first call imports numpy.ma for 90 ms
        is_own[shared.rows] = False
        return prefills[is_own[prefills]], shared

    def _update_sharing(self, plan: Plan, num_decodes: int) -> bool:
        """Updates `_shared` to what the decode rows of this plan share. Returns whether the device must be updated."""
        if self._share_rule is None or plan.sharing_version == self._sharing_version:
            return False
        self._sharing_version, before = plan.sharing_version, self._shared
        self._shared, self._shared_block_m = self._share_rule.choose(plan, num_decodes)
        return self._shared is not None or before is not None

    def _diff(self, plan: Plan, num_decodes: int) -> Column:
        joins = plan.joins
        words = np.stack([self._join(join) for join in joins]) if joins else None
        stale = self._computed[plan.slots] != plan.starts
        if plan.drafts is not None:
            stale[: plan.num_decodes] = False  # where a row is that decodes, only the device knows
        late_runs, self._token_runs = self._token_runs, []
        rows = plan.slots
        if np.array_equal(rows, self._rows):
            rows = NO_WORDS
        else:
            self._rows = plan.slots
        return pack_diff(
            *_last_written(*plan.page_changes[0]),
            start_slots=plan.slots[stale],
            start_positions=plan.starts[stale],
            join_slots=np.array([join.slot for join in joins], np.int32),
            join_sampling=words,
            token_runs=[*((join.slot, 0, join.tokens) for join in joins), *late_runs],
            row_slots=rows,
            shared=(self._shared or NOTHING_SHARED) if self._update_sharing(plan, num_decodes) else None,
        )

    def _join(self, join: Join) -> Column:
        """Updates the host's tables for a slot's new request. Returns the slot's sampling words for the device."""
        slot, params = join.slot, join.params
        top_k = params.top_k if params.top_k is not None and params.top_k < self._vocab_size else 0
        self._filtered[slot] = not params.is_greedy and (top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self._pooled[slot], self._pools_last[slot] = join.pooling is not None, join.pooling == "last"
        self._adapted[slot] = join.adapter_slot is not None
        self.logprobs.join(join)
        temperature = 0.0 if params.is_greedy else params.temperature
        return sampling_words(
            temperature,
            top_k,
            params.top_p,
            params.min_p,
            params.seed or 0,
            params.logprobs,
            params.logprob_token_ids,
            join.max_length,
            join.adapter_slot,
        )

    def _adjust(self, plan: Plan) -> Column:
        """The packed adjustments of joining requests; empty for most plans."""
        runs: list[Run] = []
        for join in plan.joins:
            by = logit_adjustments(join, self._vocab_size)
            if by is not None:
                runs += adjust_runs(
                    join.slot,
                    self._max_length,
                    penalties=(by.repetition, by.frequency, by.presence),
                    bias=(by.bias_ids, by.bias),
                    forbidden=(by.banned_ids, by.banned_until, by.banned_prefixes),
                    seen=token_counts(join.tokens, by.num_prompt_tokens),
                    num_counted=len(join.tokens),
                )
            elif self._adjusted[join.slot]:
                runs.append(no_adjustments(join.slot))
            self._adjusted[join.slot] = by is not None
        return pack_runs(runs) if runs else NO_WORDS

    def _sources(self, plan: Plan) -> Column:
        """The packed draft sources of joining requests; empty for most plans."""
        runs: list[Run] = []
        for join in plan.joins if self._has_drafts else ():
            source = join.draft_source[: self._max_length]  # the context may be longer than the KV cache
            if len(source) or self._has_source[join.slot]:
                header = np.array([len(source), join.num_prompt_tokens], np.int32)
                runs.append((join.slot, SourceWord.NUM_TOKENS, np.concatenate([header, source])))
            self._has_source[join.slot] = len(source) > 0
        return pack_runs(runs) if runs else NO_WORDS


def _last_written(slots: Column, indices: Column, pages: Column) -> tuple[Column, Column, Column]:
    """Page changes without those that a later one of the same plan overwrites: the device applies them in any order."""
    if len(slots) < 2:
        return slots, indices, pages
    keys = slots.astype(np.int64) << 32 | indices
    _, last = np.unique(keys[::-1], return_index=True)
    if len(last) == len(keys):
        return slots, indices, pages
    kept = len(keys) - 1 - last
    return slots[kept], indices[kept], pages[kept]
