"""Passes with prompts on a GPU: decodes first, one token each, then the tokens of prompts.

Such a pass is launched kernel by kernel from its upload, with as many programs as it has work. Or, where tokens are few
and some are sampled from, it is what a graph holds: made for a `PrefillBucket`, over words at a fixed place,
and what a pass has less than the room holds is nobody's. So it is before the graph is captured, too: products of
another number of rows would round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.cuda.graphs import GraphKey
from paceline.engine.cuda.inputs import Packed, PrefillBucket, UploadSpan, lay_out, rooms
from paceline.engine.cuda.model import AttendKernel, CudaModel
from paceline.engine.cuda.streams import Streams
from paceline.kernels.extend_attention import (
    ExtendParts,
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    extend_shared,
    tokens_per_tile,
)
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.rope_kv import rope_kv
from paceline.kernels.slot_state import SlotState

Part = Callable[[UploadSpan], Tensor]  # of an upload


class DecodeAttention(Protocol):
    def __call__(self, rows: int, num_rows: Tensor, kind: GraphKey, *, raw: bool, at_once: bool) -> AttendKernel: ...


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillWords:
    """What there is to know of a pass, on the device."""

    token_rows: Tensor
    query_starts: Tensor
    units: Tensor
    folds: Tensor
    picked: Tensor | None
    live: Tensor


class PrefillRunner:
    def __init__(
        self, model: CudaModel, streams: Streams, state: SlotState, caches: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor, positions: Tensor, decode_attention: DecodeAttention, split_room: int, max_rows: int,
        sizes: Sequence[int],
    ) -> None:  # fmt: skip
        """slots and positions [T]: of a pass's tokens, for whoever samples."""
        spec = model.spec
        self._model, self._streams, self._state, self._caches = model, streams, state, caches
        self._slots, self._positions, self._decode_attention = slots, positions, decode_attention
        self._tuning = ExtendTuning()
        self.tokens_per_tile = tokens_per_tile(self._tuning, spec.num_heads // spec.num_kv_heads)
        self._workspace = ExtendWorkspace.empty(split_room, self._tuning, spec.head_dim, model.device)
        self._q = torch.zeros(len(slots), spec.num_heads, spec.head_dim, dtype=model.dtype, device=model.device)
        self._max_rows = max_rows
        self.rooms = [rooms(size, self.tokens_per_tile)[0] for size in sizes]  # for prompts whose keys are not split
        num_words = lay_out(rooms(sizes[-1], self.tokens_per_tile)[-1].counts(max_rows))[1] if sizes else 0
        self._placed = torch.zeros(num_words, dtype=torch.int32, device=model.device)  # where graphs read

    def run(self, packed: Packed, part: Part, rows: int, picked: Tensor | None) -> Tensor:
        """Hidden states of a pass's tokens: of those `picked`, or of all. rows: a bucket that holds its decodes; what
        that runs is compiled already."""
        units, folds, shared = (part(span) for span in (packed.units, packed.folds, packed.shared_tiles))
        words = _PrefillWords(
            part(packed.token_rows), part(packed.query_starts), units.view(-1, 5), folds.view(-1, 5), picked,
            part(packed.live),
        )  # fmt: skip
        tiles = (shared.view(-1, 3), part(packed.tile_rows), part(packed.tile_tokens)) if len(shared) else None
        return self._run(packed.num_tokens, rows, packed.tile, words, packed.num_parts, tiles, at_once=True)

    # ------------------------------------------------------------------ by graph

    def run_placed(self, rows: int, tile: int, room: PrefillBucket) -> Tensor:
        """Hidden states [rows, H] of the tokens that are sampled from, in a pass of up to so many tokens and rows."""
        num_parts = len(self._workspace.lse) // self._model.spec.num_kv_heads if room.folds else 0  # at most
        return self._run(room.tokens, rows, tile, self._words_of(room), num_parts, None, at_once=False)

    def place(self, packed: Packed, part: Part) -> None:
        """Puts what a graph will read where it reads it."""
        assert packed.room is not None, "this pass is not padded"
        first, num_words = packed.token_rows.first, lay_out(packed.room.counts(self._max_rows))[1]
        self._placed[:num_words].copy_(part(UploadSpan(first, num_words)))

    def place_nothing(self, room: PrefillBucket) -> None:
        """A pass in which all is padding."""
        words = self._words_of(room)
        self._placed.zero_()
        for column in (words.token_rows, words.units, words.folds):
            column.fill_(-1)

    def _words_of(self, room: PrefillBucket) -> _PrefillWords:
        spans, _ = lay_out(room.counts(self._max_rows))
        columns = [self._placed[span.first : span.first + span.count] for span in spans]
        token_rows, query_starts, units, folds, sampled, live = columns
        return _PrefillWords(token_rows, query_starts, units.view(-1, 5), folds.view(-1, 5), sampled, live)

    # ------------------------------------------------------------------ either way

    def _run(
        self, count: int, rows: int, tile: int, words: _PrefillWords, num_parts: int,
        shared: tuple[Tensor, Tensor, Tensor] | None, *, at_once: bool,
    ) -> Tensor:  # fmt: skip
        model, state, spec, tuning, picked = self._model, self._state, self._model.spec, self._tuning, words.picked
        slots, positions, q = self._slots[:count], self._positions[:count], self._q[:count]
        token_rows, query_starts = words.token_rows[:count], words.query_starts
        gather_tokens(state, model.embedding, model.input(count), slots, positions, token_rows, query_starts)

        raw = not tile and model.takes_raw(count, fused=False)
        read = None
        if rows:
            # Two launches in every layer where rows share, or one that is quicker to launch.
            read = self._decode_attention(rows, words.live[:1], GraphKey(tile=tile), raw=raw, at_once=at_once)
        # Made once and not in every layer: the host has little time for such a pass.
        decode_qkv, decode_out = model.attention_buffers(rows)
        heads = model.attention_buffers(count)[1].view(-1, spec.num_heads, spec.head_dim)
        # Decodes wait for the memory and prompts for the multiprocessors. In a graph, where it costs no launch, they do
        # so side by side; where decodes share, the side is taken.
        beside, streams = not at_once and not tile, self._streams
        parts = ExtendParts(words.folds, num_parts, self._workspace) if num_parts else None
        stream = model.input(count) if raw else None
        last = len(model.layers) - 1

        def attend(index: int, qkv: Tensor, out: Tensor) -> None:
            layer, cache = model.layers[index], self._caches[index]
            if beside and read is not None:
                streams.follow(streams.side, streams.engine)
                with streams.use(streams.side):
                    read(index, decode_qkv, decode_out)
            elif read is not None:
                read(index, decode_qkv, decode_out)
            rope_kv(
                qkv, q, cache[0], cache[1], state.page_table, slots, positions, layer.cos_sin, layer.q_norm,
                layer.k_norm, spec.rms_eps, stream, words.live,
            )  # fmt: skip
            if index == last and picked is not None and not len(picked):
                return  # nobody reads what would come of it
            if len(words.units):
                extend_attention(
                    q, cache[0], cache[1], state.page_table, words.units, state.row_slots, positions, query_starts,
                    heads, window=layer.window, tuning=tuning, parts=parts,
                )  # fmt: skip
            if shared is not None:
                extend_shared(
                    q, cache[0], cache[1], state.page_table, *shared, state.row_slots, positions, query_starts, heads,
                    tuning=tuning,
                )  # fmt: skip
            if beside:
                streams.follow(streams.engine, streams.side)

        return model.forward(count, attend, fused=False, raw=raw, picked=picked)
