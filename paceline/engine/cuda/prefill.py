"""Prefill and mixed batches on a GPU: decodes first, one token each, then the tokens of prompts.

Such a batch is launched kernel by kernel from its upload, with as many programs as it has work. A small batch whose
hidden states are needed, of the tokens that are sampled from or of all, can also run as a CUDA graph: the graph is
captured for a `PrefillBucket`, reads its inputs from a fixed buffer, and smaller batches are padded. Such a batch is
padded even before its graph is captured, since a GEMM with another number of rows would round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.engine.cuda.attention import CudaAttention, PrefillTiles
from paceline.engine.cuda.inputs import PackedBatch, PrefillBucket, UploadSpan, lay_out, prefill_buckets
from paceline.engine.cuda.model import CudaModel
from paceline.kernels.layouts import EXTEND_UNIT_WORDS, SHARED_TILE_WORDS
from paceline.kernels.route_experts import LiveRows
from paceline.kernels.slot_state import SlotState

SpanOf = Callable[[UploadSpan], Tensor]  # a part of the upload on the device


@dataclass(frozen=True, slots=True, eq=False)
class PrefillInputs:
    """The columns of a prefill batch, on the device."""

    token_rows: Tensor
    query_starts: Tensor
    units: Tensor
    merges: Tensor
    output_tokens: Tensor | None  # tokens whose hidden states are needed, padded; None: all
    num_outputs: Tensor  # [1]: how many of them are no padding
    prefill_range: Tensor


class PrefillRunner:
    def __init__(
        self,
        model: CudaModel,
        attention: CudaAttention,
        state: SlotState,
        slots: Tensor,
        positions: Tensor,
        max_rows: int,
        sizes: Sequence[int],
        compute_draft_kv: Callable[..., None] | None = None,
    ) -> None:
        """slots and positions [T] receive those of the batch's tokens, for sampling. sizes: tokens of the buckets.
        compute_draft_kv: `DraftModel.compute_kv`."""
        self._model, self._attention, self._state = model, attention, state
        self._slots, self._positions = slots, positions
        self._max_rows = max_rows
        self._compute_draft_kv = compute_draft_kv
        per_tile = attention.tokens_per_tile
        self.buckets = [prefill_buckets(size, per_tile)[0] for size in sizes]  # for prompts whose keys are not split
        num_words = lay_out(prefill_buckets(sizes[-1], per_tile)[-1].counts(max_rows))[1] if sizes else 0
        self._graph_inputs = torch.zeros(num_words, dtype=torch.int32, device=model.device)

    def run(self, packed: PackedBatch, span: SpanOf, decode_rows: int, output_tokens: Tensor | None) -> Tensor:
        """Hidden states of the batch's tokens, kernel by kernel: of `output_tokens`, or of all. decode_rows: a bucket
        that holds its decodes; the kernels of a bucket are compiled already."""
        inputs = PrefillInputs(
            span(packed.token_rows),
            span(packed.query_starts),
            span(packed.extend_units).view(-1, EXTEND_UNIT_WORDS),
            span(packed.extend_merges).view(-1, EXTEND_UNIT_WORDS),
            output_tokens,
            span(packed.num_outputs),
            span(packed.prefill_range),
        )
        tiles = span(packed.shared_tiles).view(-1, SHARED_TILE_WORDS)
        shared = (tiles, span(packed.tile_rows), span(packed.tile_tokens)) if len(tiles) else None
        return self.run_inputs(
            packed.token_rows.count,
            decode_rows,
            packed.shared_block_m,
            inputs,
            packed.num_splits,
            shared,
            single_launch=True,
            lora=packed.has_adapters,
        )

    # ------------------------------------------------------------------ as a CUDA graph

    def run_bucket(
        self, rows: int, shared_block_m: int, bucket: PrefillBucket, *, all_states: bool, lora: bool = False
    ) -> Tensor:
        """Hidden states for the inputs in the graphs' buffer: of the tokens that are sampled from, or of all."""
        num_splits = self._attention.max_splits if bucket.merges else 0
        inputs = self.bucket_inputs(bucket)
        if all_states:
            inputs = replace(inputs, output_tokens=None)
        return self.run_inputs(
            bucket.tokens, rows, shared_block_m, inputs, num_splits, None, single_launch=False, lora=lora
        )

    def load_inputs(self, packed: PackedBatch, span: SpanOf) -> None:
        """Copies the inputs of a padded batch into the buffer that graphs read."""
        assert packed.bucket is not None, "this batch is not padded"
        first, num_words = packed.token_rows.first, lay_out(packed.bucket.counts(self._max_rows))[1]
        self._graph_inputs[:num_words].copy_(span(UploadSpan(first, num_words)))

    def load_padding(self, bucket: PrefillBucket) -> None:
        """Fills the buffer that graphs read with a batch of padding only."""
        inputs = self.bucket_inputs(bucket)
        self._graph_inputs.zero_()
        for column in (inputs.token_rows, inputs.units, inputs.merges):
            column.fill_(-1)

    def bucket_inputs(self, bucket: PrefillBucket) -> PrefillInputs:
        spans, _ = lay_out(bucket.counts(self._max_rows))
        columns = [self._graph_inputs[span.first : span.first + span.count] for span in spans]
        token_rows, query_starts, units, merges, sampled, num_outputs, prefill_range = columns
        units, merges = units.view(-1, EXTEND_UNIT_WORDS), merges.view(-1, EXTEND_UNIT_WORDS)
        return PrefillInputs(token_rows, query_starts, units, merges, sampled, num_outputs, prefill_range)

    # ------------------------------------------------------------------ both

    def run_inputs(
        self,
        num_tokens: int,
        decode_rows: int,
        shared_block_m: int,
        inputs: PrefillInputs,
        num_splits: int,
        shared: tuple[Tensor, Tensor, Tensor] | None,
        *,
        single_launch: bool,
        lora: bool = False,
    ) -> Tensor:
        model = self._model
        output_tokens = inputs.output_tokens if model.shard.is_last else None  # the next stage gets those of all
        slots, positions = self._slots[:num_tokens], self._positions[:num_tokens]
        model.embed(self._state, slots, positions, inputs.token_rows[:num_tokens], inputs.query_starts)
        defer_norm = not shared_block_m and model.defers_norm(num_tokens, fused=False)
        tiles = PrefillTiles(
            positions, slots, inputs.query_starts, inputs.prefill_range, inputs.units, inputs.merges, num_splits, shared
        )
        attend = self._attention.mixed(
            tiles,
            decode_rows,
            shared_block_m,
            defer_norm=defer_norm,
            skip_last=output_tokens is not None and not len(output_tokens),
            single_launch=single_launch,
        )
        hidden = model.forward(
            num_tokens,
            attend,
            fused=False,
            defer_norm=defer_norm,
            output_tokens=output_tokens,
            live=LiveRows(inputs.token_rows[:num_tokens], by_row=True),
            live_outputs=LiveRows(inputs.num_outputs, by_row=False),
            lora=lora,
        )
        if self._compute_draft_kv is not None:
            self._compute_draft_kv(num_tokens, decode_rows, inputs, num_splits, shared, single_launch=single_launch)
        return hidden
