"""From a plan to one packed upload: what changes on the device, and for prompts which token belongs to whom.

The device keeps its own state by slot; the host only keeps what it needs to know what it must not send again: how many
tokens each slot's device counter stands at, and which rows the device has. Sampling advances the counter of its row,
so a row of a steady decode is never mentioned.

Of a pass with prompts the host says it all: tokens, tiles, who samples. Where they are few, these columns are padded to
one of a few sizes (`PrefillBucket`), so that one graph serves every such pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.kernels._triton import cdiv
from paceline.kernels.adjust import adjust_runs, pack_runs
from paceline.kernels.decode_units import NOTHING_SHARED, SharedUnits, shared_units
from paceline.kernels.extend_tiles import SharedTiles, SplitRule, extend_tiles, extend_units, shared_tiles
from paceline.kernels.slot_state import pack_diff, sampling_words
from paceline.sampling.adjust import adjustments_of, seen_tokens
from paceline.sampling.logprobs import LogprobTable, LogprobWidth
from paceline.scheduler.plan import Join, Plan

Column = npt.NDArray[np.int32]

ALIGN = 32  # words: parts begin on borders that Triton's pointer specialisation does not tell apart
SHARED_CHUNKS = (2048, 1024, 512, 256)  # positions that rows share or not as a whole
TILES = (16, 32, 64)  # query heads in a unit that several rows share
PROMPT_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)  # tokens of a pass that a graph runs
_MORE_TILES = 32  # than those tokens fill: each prompt may end within one
_SPLITS = ((0, 0), (32, 16), (128, 64))  # parts that keys are split into, and tiles they are of
_NONE: Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class UploadSpan:
    """A part of the upload, in words."""

    first: int
    count: int


def lay_out(counts: Iterable[int], at: int = 0) -> tuple[list[UploadSpan], int]:
    """Where parts of so many words lie, one after the other from `at` on, and where the next would begin."""
    spans = []
    for count in counts:
        spans.append(UploadSpan(at, count))
        at += cdiv(count, ALIGN) * ALIGN
    return spans, at


class PrefillBucket(NamedTuple):
    """What the columns of a pass with prompts are padded to. Tokens, units and folds of row -1 are nobody's."""

    tokens: int
    units: int
    folds: int

    def counts(self, max_rows: int) -> tuple[int, ...]:
        """Words of token_rows, query_starts, units, folds, sampled and live."""
        return self.tokens, max_rows + 1, 5 * self.units, 5 * self.folds, max_rows, 2


def rooms(tokens: int, tokens_per_tile: int) -> list[PrefillBucket]:
    """Of a pass of up to so many tokens, ascending."""
    tiles = cdiv(tokens, tokens_per_tile) + _MORE_TILES
    return [PrefillBucket(tokens, tiles + parts, folds) for parts, folds in _SPLITS]


def _padded(column: Column, count: int, value: int) -> Column:
    return np.concatenate([column, np.full(count - len(column), value, np.int32)])


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One pass's upload: the parts, each padded, and where they lie."""

    parts: tuple[Column, ...]
    num_words: int
    is_decode: bool  # one token a row, all of them sample: a graph can run it
    has_filters: bool  # some row samples with top-k, top-p or min-p
    adjusts: bool  # some row has penalties, biases or forbidden tokens
    logprobs: LogprobWidth | None  # what there is to tell of the output, if some sampling row asks
    tile: int  # query heads in a unit of decode attention that several rows share; 0: nobody shares
    num_own_tokens: int  # KV positions of decodes that no other row has
    num_saved_tokens: int  # KV positions that decodes do not read because another row of their unit does
    num_decodes: int  # rows that decode attention serves: the plan's decodes, or all rows of a pass that a graph runs
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_parts: int  # of tiles whose keys are split
    room: PrefillBucket | None  # what the next six are padded to, if a graph could run a pass with prompts
    token_rows: UploadSpan
    query_starts: UploadSpan
    units: UploadSpan  # tiles of prompts, whole or in parts
    folds: UploadSpan  # of tiles whose keys are split
    sampled: UploadSpan  # the last token of each sampling row
    live: UploadSpan  # two words: where the tokens of prompts begin, behind one for each decode, and where they end
    shared_tiles: UploadSpan  # of prompts that share what they begin with
    tile_rows: UploadSpan
    tile_tokens: UploadSpan
    adjust: UploadSpan  # what to write into slots' lists of adjustments
    spilled: UploadSpan  # pages that go to host memory before the pass
    fetched: UploadSpan  # pages that come from there

    def write(self, target: Column) -> None:
        """Copies all parts into the upload buffer."""
        at = 0
        for part in self.parts:
            target[at : at + len(part)] = part
            at += cdiv(len(part), ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class ShareRule:
    """When and how decodes share what they read; measured in docs/log.md."""

    group: int  # query heads of a KV head
    max_units: int  # room on the device, for units and their queries and for partial results
    chunks: tuple[int, ...] = SHARED_CHUNKS
    least_saving: float = 0.1  # of all positions: less is not worth cutting everything at chunks
    prompts: bool = True  # whether prompts may share tiles: where no layer has a window
    target_units: int = 24  # of the shared ones, times the KV heads: fewer leave multiprocessors idle
    least_of_pairs: int = 1024  # positions that two rows share, where no three do: less they find in the L2 anyway

    def choose(self, plan: Plan, num_decodes: int) -> tuple[SharedUnits | None, int]:
        """What the first `num_decodes` rows of `plan` share, and how many query heads a tile of them has."""
        rows, common = _of_rows(plan, 0, num_decodes)
        least = self.chunks[-1]
        worth = int((common // least).sum()) * least
        if not worth or worth < self.least_saving * int(plan.starts[:num_decodes].sum()):
            return None, 0
        borders = np.flatnonzero(np.concatenate([[0], common // least, [0]]) == 0)
        heads = int(np.diff(borders).max()) * self.group  # of the rows that stand together at most
        tile = next((tile for tile in TILES if heads <= tile), TILES[-1])
        if tile < 2 * self.group or (heads == 2 * self.group and int(common.max()) < self.least_of_pairs):
            return None, 0
        ends = plan.max_lengths[:num_decodes]
        found = None
        for chunk in self.chunks:  # long ones, as long as that loses little and leaves enough of them
            if int((common // chunk).sum()) * chunk < 0.85 * worth:
                continue
            if int((ends // chunk + 1).sum()) > self.max_units:
                break
            shared = shared_units(rows, common, num_decodes, chunk, tile // self.group)
            if shared is None or max(len(shared.units), len(shared.query_rows)) > self.max_units:
                break
            found = shared
            if len(shared.units) >= self.target_units:
                break
        return (found, tile) if found is not None else (None, 0)


def _of_rows(plan: Plan, first: int, end: int) -> tuple[Column, Column]:
    """The plan's sharing among the rows first:end alone."""
    if plan.sharing is None:
        return _NONE, _NONE
    kept = np.flatnonzero((plan.sharing.rows >= first) & (plan.sharing.rows < end))
    if len(kept) < 2:
        return _NONE, _NONE
    return plan.sharing.rows[kept], np.minimum.reduceat(plan.sharing.common[: kept[-1]], kept[:-1])


class PlanPacker:
    def __init__(
        self, max_running: int, vocab_size: int, tokens_per_tile: int, share_rule: ShareRule | None = None,
        max_length: int = 0, split_rule: SplitRule = SplitRule(kv_heads=1),  # noqa: B008
        prompt_sizes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._prompt_sizes = prompt_sizes
        self._share_rule = share_rule
        self._split_rule = split_rule
        self._sharing_version = 0  # of the plan that `_shared` was made from
        self._shared: SharedUnits | None = None  # as the device has it
        self._tile = 0
        self._vocab_size = vocab_size
        self._tokens_per_tile = tokens_per_tile
        self._computed = np.zeros(max_running, np.int32)  # the device's num_computed
        self._rows = _NONE  # the device's row_slots
        self._filtered = np.zeros(max_running, np.bool_)
        self._max_length = max_length
        self._adjusted = np.zeros(max_running, np.bool_)  # also what the device has in the slot's lists
        self.logprobs = LogprobTable(max_running, vocab_size)

    def pack(self, plan: Plan) -> Packed:
        slots, samples, lengths = plan.slots, plan.samples, plan.lengths
        num_sampled = int(np.count_nonzero(samples))
        # A prompt of which all but the last token is cached runs as a decode does, where all the others are decodes.
        is_decode = plan.num_tokens == plan.num_rows == num_sampled
        num_decodes = plan.num_rows if is_decode else plan.num_decodes
        diff, adjust = self._diff(plan, num_decodes), self._adjust(plan)
        num_parts, room = 0, None
        columns: tuple[Column, ...] = ()
        if not is_decode:
            query_starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
            alone, shared = self._prompts(plan, query_starts)
            tiles = extend_tiles(plan.starts, lengths, self._tokens_per_tile, alone)
            units = extend_units(tiles, self._split_rule.parts(tiles[:, 2]))
            num_parts = units.num_parts
            columns = (
                np.repeat(np.arange(len(slots), dtype=np.int32), lengths),
                query_starts,
                units.units.reshape(-1),
                units.folds.reshape(-1),
                (query_starts[1:] - 1)[samples],
                np.array([plan.num_decodes, plan.num_tokens], np.int32),
                *((shared.tiles.reshape(-1), shared.rows, shared.tokens.reshape(-1)) if shared else ()),
            )
            room = None if shared else self._room(plan.num_tokens, len(units.units), len(units.folds))
            if room is not None:
                counts = room.counts(len(self._computed))
                columns = tuple(
                    _padded(*padding) for padding in zip(columns, counts, (-1, 0, -1, -1, 0, 0), strict=True)
                )
        columns += (_NONE,) * (9 - len(columns))
        moved = (_NONE, _NONE) if plan.swap is None else (plan.swap.spill_pages, plan.swap.fetch_pages)
        parts = (diff, *columns, adjust, *moved)
        (_, *spans), num_words = lay_out(map(len, parts))
        # A row that samples is advanced by the device itself; another one stays where the diff has put it.
        self._computed[slots] = plan.starts + np.where(samples, lengths, 0)
        filtered = bool(self._filtered[slots].any())
        own, saved = int(plan.starts[:num_decodes].sum()), 0
        if self._shared is not None:
            own, saved = own - int(self._shared.covered.sum()) * self._shared.chunk, self._shared.num_saved_tokens
        adjusted = bool(self._adjusted[slots].any())
        return Packed(
            parts, num_words, is_decode, filtered, adjusted, self.logprobs.of_output(plan), self._tile, own, saved,
            num_decodes, len(slots), plan.num_tokens, num_sampled, num_parts, room, *spans,
        )  # fmt: skip

    def _room(self, num_tokens: int, num_units: int, num_folds: int) -> PrefillBucket | None:
        """The smallest that holds so much."""
        tokens = next((size for size in self._prompt_sizes if size >= num_tokens), None)
        if tokens is None:
            return None
        fitting = rooms(tokens, self._tokens_per_tile)
        return next((room for room in fitting if num_units <= room.units and num_folds <= room.folds), None)

    def _prompts(self, plan: Plan, query_starts: Column) -> tuple[Column, SharedTiles | None]:
        """The rows with prompts that have tiles of their own, and the tiles of the others."""
        alone = np.arange(plan.num_decodes, plan.num_rows, dtype=np.int32)
        if self._share_rule is None or not self._share_rule.prompts:
            return alone, None
        rows, common = _of_rows(plan, plan.num_decodes, plan.num_rows)
        if not len(common):
            return alone, None
        shared = shared_tiles(rows, common, query_starts, self._tokens_per_tile, self._share_rule.chunks[-1])
        return (alone, None) if shared is None else (np.setdiff1d(alone, shared.rows), shared)

    def _share(self, plan: Plan, num_decodes: int) -> bool:
        """Sees to it that `_shared` is what this pass's decodes share. Whether that is news to the device."""
        if self._share_rule is None or plan.sharing_version == self._sharing_version:
            return False
        self._sharing_version, before = plan.sharing_version, self._shared
        self._shared, self._tile = self._share_rule.choose(plan, num_decodes)
        return self._shared is not None or before is not None

    def _diff(self, plan: Plan, num_decodes: int) -> Column:
        joins = plan.joins
        words = np.stack([self._join(join) for join in joins]) if joins else None
        stale = self._computed[plan.slots] != plan.starts
        rows = plan.slots
        if np.array_equal(rows, self._rows):
            rows = _NONE
        else:
            self._rows = plan.slots
        return pack_diff(
            *_last_written(plan.page_slots, plan.page_indices, plan.page_ids),
            start_slots=plan.slots[stale],
            start_positions=plan.starts[stale],
            join_slots=np.array([join.slot for join in joins], np.int32),
            join_sampling=words,
            token_runs=[(join.slot, 0, join.tokens) for join in joins],
            row_slots=rows,
            shared=(self._shared or NOTHING_SHARED) if self._share(plan, num_decodes) else None,
        )

    def _join(self, join: Join) -> Column:
        """Remembers what the host must know of the slot's new owner. Returns what the device must."""
        slot, params = join.slot, join.params
        top_k = params.top_k if params.top_k is not None and params.top_k < self._vocab_size else 0
        self._filtered[slot] = not params.is_greedy and (top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self.logprobs.join(join)
        temperature = 0.0 if params.is_greedy else params.temperature
        return sampling_words(
            temperature, top_k, params.top_p, params.min_p, params.seed or 0, params.logprobs, params.logprob_token_ids
        )

    def _adjust(self, plan: Plan) -> Column:
        """What the device must write of new owners' adjustments; of most plans nothing."""
        runs: list[tuple[int, int, Column]] = []
        for join in plan.joins:
            by = adjustments_of(join, self._vocab_size)
            if by is not None:
                runs += adjust_runs(
                    join.slot, self._max_length, (by.repetition, by.frequency, by.presence), (by.bias_ids, by.bias),
                    (by.forbidden, by.until, by.prefixes), seen_tokens(join.tokens, by.num_prompt_tokens),
                    len(join.tokens),
                )  # fmt: skip
            elif self._adjusted[join.slot]:
                runs.append((join.slot, 0, np.zeros(1, np.int32)))
            self._adjusted[join.slot] = by is not None
        return pack_runs(runs) if runs else _NONE


def _last_written(slots: Column, indices: Column, pages: Column) -> tuple[Column, Column, Column]:
    """Page changes without those that a later one of the same plan overrules: the device applies them in no order."""
    if len(slots) < 2:
        return slots, indices, pages
    keys = slots.astype(np.int64) << 32 | indices
    _, last = np.unique(keys[::-1], return_index=True)
    if len(last) == len(keys):
        return slots, indices, pages
    kept = len(keys) - 1 - last
    return slots[kept], indices[kept], pages[kept]
