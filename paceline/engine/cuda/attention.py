"""Attention on a GPU: the KV cache, and the kernels of decode and prefill rows for every layer.

`CudaAttention` is built once per executor. Per forward pass it prepares the work units and returns the function that
`CudaModel.forward` calls in each layer. What differs between layers (window, RoPE table, QK-norm) is read from
`CudaLayer`: another option of a layer's attention goes there, and to the kernels from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.engine.cache_storage import CacheStorage
from paceline.engine.cuda.model import AttentionKernels, CudaModel
from paceline.engine.cuda.sharing import SHARED_ALIGN, SHARED_CHUNKS
from paceline.engine.cuda.streams import Streams
from paceline.engine.cuda.tiles import SplitRule
from paceline.kernels._triton import cdiv, next_power_of_2
from paceline.kernels.decode_attention import (
    ALL_UNITS,
    NONE_SHARED,
    OWN_UNITS,
    SHARED_UNITS,
    DecodeTuning,
    DecodeWorkspace,
    NewTokens,
    decode_attention,
    decode_attention_tuning,
    draft_attention_tuning,
    fp8_attention_tuning,
    tiles_fit,
    tuning_for,
)
from paceline.kernels.decode_units import Chunks, DecodeUnits, decode_units
from paceline.kernels.extend_attention import (
    ExtendSplits,
    ExtendTuning,
    ExtendWorkspace,
    extend_attention,
    extend_shared,
    extend_tuning,
    tokens_per_tile,
)
from paceline.kernels.fp8 import FP8
from paceline.kernels.rope_kv import rope_kv
from paceline.kernels.slot_state import SlotState

# rows, query heads per KV head, query heads in a shared unit or 0, whether contexts are short -> tuning of units of one
# row, and of shared units
AttentionTuning = Callable[[int, int, int, bool], tuple[DecodeTuning, DecodeTuning]]
ChunkChoice = Callable[[int], Chunks]  # rows
SplitChoice = Callable[[int, int], SplitRule]  # KV heads, the widest window if every layer has one

_MAX_SHARED_UNITS = 1 << 14  # of all rows together, where rows share: longer contexts are split into longer chunks


def decode_chunks(rows: int) -> Chunks:
    """The fastest chunk sizes by batch size, in whole runs of `nano` on an H200 (docs/log/decode-attention.md).

    Some 528 programs of decode attention run at the same time there, one for each unit and KV head (8): 48 to 64 rows
    fill the GPU once without being split, 96 would fill it 1.5 times, from 128 on the last wave matters less.
    """
    if rows <= 4:
        return Chunks()
    if rows <= 16:
        return Chunks(target_units=32)
    return Chunks() if rows <= 32 or 64 < rows < 128 else Chunks(max_tokens=2048)


def max_units(sizes: Sequence[int], max_length: int, chunks: ChunkChoice, drafts: Iterable[tuple[int, int]]) -> int:
    """Most partial results, and work units, that a decode batch of any bucket can have; drafts: the numbers of rows and
    drafts of passes with drafts. Where rows share, the host checks that they fit (`SharedUnits.max_partials`)."""
    shared = sizes[-1] * (cdiv(max_length, SHARED_CHUNKS[-1]) + 1)
    batches = [*((size, 0) for size in sizes), *drafts]
    own = max((1 + num_drafts) * chunks(rows).capacity(rows, max_length) for rows, num_drafts in batches)
    return max(min(shared, _MAX_SHARED_UNITS), own)


@dataclass(frozen=True, slots=True)
class AttentionChoices:
    """How attention splits its work. The defaults were measured on an H200; benchmarks and tests replace them."""

    chunks: ChunkChoice = decode_chunks
    tuning: AttentionTuning = decode_attention_tuning
    fp8_tuning: AttentionTuning = fp8_attention_tuning
    split_rule: SplitChoice = SplitRule


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTiles:
    """The work units of the prefill rows of a batch, on the device."""

    positions: Tensor  # [T], like slots: of all tokens of the batch
    slots: Tensor
    query_starts: Tensor
    prefill_range: Tensor  # [2]: tokens that rope_kv processes; decodes come before them, padding after
    units: Tensor
    merges: Tensor
    num_splits: int
    shared: tuple[Tensor, Tensor, Tensor] | None  # tiles, rows and tokens of `SharedTiles`


def _tuning_like(tile_tokens: int, group: int, head_dim: int) -> ExtendTuning:
    """The tuning with which a draft model has tiles of as many tokens as its target model."""
    tuning = extend_tuning(head_dim)
    heads, most = next_power_of_2(group) * tile_tokens, tuning.block_m
    if not 16 <= heads <= most:
        raise ConfigError(
            f"the draft model has {group} query heads per KV head, which makes tiles of {heads} query heads where the "
            f"model has {most}: device cuda needs a draft model with fewer heads per KV head."
        )
    return replace(tuning, block_m=heads)


class CudaAttention:
    def __init__(
        self,
        model: CudaModel,
        streams: Streams,
        state: SlotState,
        *,
        num_pages: int,
        page_size: int,
        capacity: int,
        choices: AttentionChoices,
        max_drafts: int = 0,
        target: CudaAttention | None = None,
        fp8_kv: bool = False,
    ) -> None:
        """capacity: most work units, and partial results, of a decode batch (`max_units`). max_drafts: of a row.
        target: for a draft model, the attention of the target model, for whose heads prefill tiles are made."""
        mixer, device, max_rows = model.mixer, model.device, len(state.row_slots)
        num_layers, kv, group = model.spec.num_layers, mixer.cache, mixer.num_heads // mixer.num_kv_heads
        num_slots, dtype = len(state.token_pool), FP8 if fp8_kv else model.dtype
        self._model, self._streams, self._state = model, streams, state
        self._chunks, self._tuning = choices.chunks, choices.fp8_tuning if fp8_kv else choices.tuning
        # The interpreter runs programs one after the other, and idle ones cost as much as others.
        self._num_programs = 2 if device.type == "cpu" else None

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.cache = CacheStorage(model.spec, num_pages, page_size, num_slots, dtype, zeros)
        # Of an FP8 cache; graphs have the address. Set before the first pass, if the model needs others (kv_scales.py).
        self.scales: Tensor | None = None
        if fp8_kv:  # padded, so that the scales of every layer begin at a multiple of 16 bytes
            padded = torch.ones(num_layers, cdiv(2 * kv.num_kv_heads, 4) * 4, device=device)
            self.scales = torch.unflatten(padded[:, : 2 * kv.num_kv_heads], 1, (2, kv.num_kv_heads))
        self.caches = {layer: (kv[0], kv[1]) for layer, kv in self.cache.kv.items()}
        self._page_size, self._group = page_size, group
        # Layers with a sliding window share no KV reads: only the units of the others need buffers for sharing.
        self.units = {
            layer.window: DecodeUnits.empty(max_rows, capacity, 0 if layer.window else capacity, device)
            for layer in model.layers
        }
        # With drafts no row shares, whatever the units of plain decoding are.
        self._draft_units = {
            window: units if window else DecodeUnits.empty(max_rows, capacity, 0, device)
            for window, units in self.units.items()
            if max_drafts
        }
        self.workspace = DecodeWorkspace.empty(
            max_rows, capacity, mixer.num_heads, kv.num_kv_heads, kv.head_dim, device
        )
        windows = self.units.keys()
        self.split_rule = choices.split_rule(kv.num_kv_heads, 0 if 0 in windows else max(windows))
        self._extend_tuning, max_partials = extend_tuning(kv.head_dim), self.split_rule.max_partials
        if target is not None:
            self._extend_tuning = _tuning_like(target.tokens_per_tile, group, kv.head_dim)
            max_partials = target.max_splits * kv.num_kv_heads
        self.tokens_per_tile: int = tokens_per_tile(self._extend_tuning, group)
        self._extend_workspace = ExtendWorkspace.empty(max_partials, self._extend_tuning, kv.head_dim, device)
        # Queries have the type that keys are converted to.
        q_dtype = torch.float16 if fp8_kv and model.dtype is torch.bfloat16 else model.dtype
        self._q = torch.zeros(model.max_tokens, mixer.num_heads, mixer.head_dim, dtype=q_dtype, device=device)

    @property
    def shared_units(self) -> DecodeUnits | None:
        """The buffers for shared units; None if every layer has a sliding window, so that no row shares."""
        return self.units.get(0)

    def _scales(self, layer: int) -> Tensor | None:
        return None if self.scales is None else self.scales[layer]

    @property
    def can_share_prefill(self) -> bool:
        return self.units.keys() == {0}

    @property
    def max_splits(self) -> int:
        """Most splits of prefill tiles that the workspace can hold."""
        return len(self._extend_workspace.lse) // self._model.mixer.num_kv_heads

    def decode(
        self,
        rows: int,
        num_rows: Tensor,
        shared_block_m: int,
        short_contexts: bool = False,
        step: Tensor | None = None,
        *,
        defer_norm: bool,
        single_launch: bool = False,
        beside_engine: bool = False,
        new_tokens: NewTokens | None = None,
    ) -> AttentionKernels:
        """Computes the work units of the first `num_rows` rows, of at most `rows`; returns attention over them.
        defer_norm: it applies the RMSNorm factor to its qkv.

        Where rows share, shared units and units of one row are two launches side by side, since their tiles differ in
        size. With `single_launch` they are one, which is slower on the device and faster to launch. With
        `beside_engine` all launches are on other streams than the engine's: the caller launches more on that one, and
        then waits for the stream `side`. With `new_tokens` rows have drafts, and share nothing.
        """
        most = 1 if new_tokens is None else new_tokens.most
        model, state, spec, streams = self._model, self._state, self._model.spec, self._streams
        chunks, pdl = self._chunks(rows), not shared_block_m and model.uses_pdl(rows * most)
        all_units = self.units if new_tokens is None else self._draft_units
        for window, units in all_units.items():
            decode_units(units, state.row_slots[:rows], num_rows, state.num_computed, chunks, window, step)
            step = None  # incremented once per pass
        base = streams.side if beside_engine else streams.engine
        stream = model.input(rows) if defer_norm else None
        own, shared = self._tuning(rows, self._group, shared_block_m, short_contexts)
        if new_tokens is not None:
            own = draft_attention_tuning(rows, self._group, most, fp8=self.scales is not None)
        own, shared = (tuning_for(one, model.mixer.head_dim) for one in (own, shared))
        aligned = (chunks.min_tokens, SHARED_ALIGN)
        assert all(tiles_fit(size, self._page_size, one) for size in aligned for one in (own, shared)), (
            f"tiles of {own} and {shared} do not fit pages of {self._page_size} in {chunks} or shared segments"
        )
        if self._num_programs is not None:
            own, shared = (replace(one, num_programs=self._num_programs) for one in (own, shared))

        def launch(index: int, qkv: Tensor, out: Tensor, tuning: DecodeTuning, part: int) -> None:
            layer, cache = model.layers[index], self.caches[index]
            decode_attention(
                qkv,
                cache[0],
                cache[1],
                state.page_table,
                layer.cos_sin,
                layer.q_norm,
                layer.k_norm,
                spec.rms_eps,
                all_units[layer.window],
                self.workspace,
                out,
                window=layer.window,
                tuning=tuning,
                pdl=pdl,
                part=part,
                stream=stream,
                new_tokens=new_tokens,
                scales=self._scales(index),
                scale=layer.scale,
                cap=layer.score_cap,
                sinks=layer.sinks,
            )

        def attend(index: int, qkv: Tensor, out: Tensor) -> None:
            if not shared_block_m or model.layers[index].window:
                launch(index, qkv, out, own, NONE_SHARED)
                return
            if single_launch:
                launch(index, qkv, out, shared, ALL_UNITS)
                return
            streams.follow(streams.shared, base)
            with streams.use(streams.shared):
                launch(index, qkv, out, shared, SHARED_UNITS)
            launch(index, qkv, out, own, OWN_UNITS)
            streams.follow(base, streams.shared)

        def attend_beside(index: int, qkv: Tensor, out: Tensor) -> None:
            streams.follow(base, streams.engine)
            with streams.use(base):
                attend(index, qkv, out)

        return attend_beside if beside_engine else attend

    def mixed(
        self,
        tiles: PrefillTiles,
        decode_rows: int,
        shared_block_m: int,
        *,
        defer_norm: bool,
        skip_last: bool,
        single_launch: bool,
    ) -> AttentionKernels:
        """Attention of a prefill or mixed batch: of up to `decode_rows` decodes, which come first, and of prefill rows.

        Decodes are bound by memory and prefill by computation. In a graph, where another stream costs no launch time,
        they run side by side. skip_last: no output of the last layer is needed, only its keys and values.
        single_launch: as in `decode`, and decode and prefill rows run one after the other.
        """
        model, state, spec, streams = self._model, self._state, self._model.spec, self._streams
        slots, positions, query_starts = tiles.slots, tiles.positions, tiles.query_starts
        prefill_range, units, shared, num_tokens = tiles.prefill_range, tiles.units, tiles.shared, len(tiles.positions)
        decode = None
        if decode_rows:
            num_decodes = prefill_range[:1]
            decode = self.decode(
                decode_rows,
                num_decodes,
                shared_block_m,
                defer_norm=defer_norm,
                single_launch=single_launch,
                beside_engine=not single_launch,
            )
        # Views are made once and not in every layer: the host has little time for such a batch.
        q = self._q[:num_tokens]
        decode_qkv, decode_out = model.attention_buffers(decode_rows)
        heads = model.attention_buffers(num_tokens)[1].view(-1, model.mixer.num_heads, model.mixer.head_dim)
        splits = ExtendSplits(tiles.merges, tiles.num_splits, self._extend_workspace) if tiles.num_splits else None
        stream = model.input(num_tokens) if defer_norm else None
        last, tuning = len(model.layers) - 1, self._extend_tuning

        def attend(index: int, qkv: Tensor, out: Tensor) -> None:
            layer, cache, scales = model.layers[index], self.caches[index], self._scales(index)
            is_needed = index < last or not skip_last
            if decode is not None:
                decode(index, decode_qkv, decode_out)
            rope_kv(
                qkv,
                q,
                cache[0],
                cache[1],
                state.page_table,
                slots,
                positions,
                positions,  # of text: tokens are rotated by where they are cached
                layer.cos_sin,
                layer.q_norm,
                layer.k_norm,
                spec.rms_eps,
                stream,
                prefill_range,
                scales,
            )
            if len(units) and is_needed:
                extend_attention(
                    q,
                    cache[0],
                    cache[1],
                    state.page_table,
                    units,
                    state.row_slots,
                    positions,
                    query_starts,
                    heads,
                    window=layer.window,
                    tuning=tuning,
                    splits=splits,
                    scales=scales,
                    scale=layer.scale,
                    cap=layer.score_cap,
                    sinks=layer.sinks,
                )
            if shared is not None and is_needed:
                extend_shared(
                    q,
                    cache[0],
                    cache[1],
                    state.page_table,
                    *shared,
                    state.row_slots,
                    positions,
                    query_starts,
                    heads,
                    tuning=tuning,
                    scales=scales,
                    scale=layer.scale,
                    cap=layer.score_cap,
                    sinks=layer.sinks,
                )
            if decode is not None and not single_launch:
                streams.follow(streams.engine, streams.side)

        return attend
