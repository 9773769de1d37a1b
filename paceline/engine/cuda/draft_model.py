"""The draft model of speculative decoding on a GPU: a smaller decoder, whose drafts the target model verifies.

It has a KV cache of its own under the page table of the target model: a page id means a page in both. What it computes
and when:

    prefill, mixed batches   the same tokens, in the same pass: their KV only
    decode batches           k times the next token of every row, as a part of the graph that verifies them
    without drafts           nothing

It samples with the noise, temperature and filters of the target model, whose token at a position it tries to predict.
Penalties and biases are left to verification. Its KV of a position may be missing, after passes without drafts or
where pages were fetched from host memory. Then its drafts are worse, and the output is the same.

With tensor parallelism every rank has all of it, and computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.engine.cuda.attention import AttentionChoices, CudaAttention, max_units
from paceline.engine.cuda.decode import DecodeForward
from paceline.engine.cuda.model import CudaModel
from paceline.engine.cuda.prefill import PrefillInputs, PrefillRunner
from paceline.engine.cuda.sampling import CudaSampling
from paceline.engine.cuda.streams import Streams
from paceline.kernels.decode_attention import NewTokens
from paceline.kernels.drafts import FIRST_TOKENS, MAX_DRAFTS, ModelDraftBuffers, begin_drafts
from paceline.kernels.sampling import sample
from paceline.kernels.slot_state import SlotState
from paceline.model.rank_group import RankGroup


class DraftModel:
    def __init__(
        self,
        model: CudaModel,
        streams: Streams,
        state: SlotState,
        target: CudaAttention,
        sampling: CudaSampling,
        *,
        num_pages: int,
        page_size: int,
        sizes: Sequence[int],
        draft_rows: Sequence[int],
        choices: AttentionChoices,
        fp8_kv: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        """state, target and sampling: those of the target model. sizes: the buckets of decode batches; draft_rows:
        those of batches with drafts. group: the ranks of the target model."""
        device, (max_running, max_length) = model.device, state.token_pool.shape
        self.model, self._group = model, group
        self._target_state, self._sampling = state, sampling
        self._buffers = ModelDraftBuffers.empty(max_running, max_running, device)
        # Tokens, pages and parameters of the slots are those of the target model.
        self._state = replace(state, num_computed=self._buffers.num_computed)
        self.attention = CudaAttention(
            model,
            streams,
            self._state,
            num_pages=num_pages,
            page_size=page_size,
            capacity=max_units(sizes, max_length, choices.chunks, [(rows, FIRST_TOKENS - 1) for rows in draft_rows]),
            choices=choices,
            max_drafts=FIRST_TOKENS - 1,
            target=target,
            fp8_kv=fp8_kv,
        )
        self._slots, self._positions = (
            torch.zeros(model.max_tokens, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._forward = DecodeForward(model, self.attention, self._state, self._slots, self._positions)
        self._prefill = PrefillRunner(model, self.attention, self._state, self._slots, self._positions, max_running, ())
        self._drafts = torch.zeros(MAX_DRAFTS, sampling.results.shape[1], dtype=torch.int32, device=device)
        # The number of each step, at a multiple of 16 bytes, so that Triton's specialisation is always the same.
        self._steps = torch.arange(MAX_DRAFTS, dtype=torch.int32, device=device)[:, None].repeat(1, 4)
        self._no_tokens = self._steps[0, :0]

    def load_libraries(self, decode_sizes: Sequence[int], prefill_sizes: Sequence[int]) -> None:
        """Loads the kernels of libraries: see `CudaExecutor.load_libraries`."""
        self.model.load_gemm_kernels(decode_sizes, prefill_sizes)
        buffers = self._buffers
        self.model.select(self.model.last_states(1), buffers.last_tokens[:1])
        torch.minimum(buffers.num_computed, buffers.last_positions, out=buffers.num_computed)
        self._agreed(self._drafts)

    def compute_kv(
        self,
        num_tokens: int,
        decode_rows: int,
        inputs: PrefillInputs,
        num_splits: int,
        shared: tuple[Tensor, Tensor, Tensor] | None,
        *,
        single_launch: bool,
    ) -> None:
        """Computes the KV of the tokens of a prefill or mixed batch, after the target model; see `PrefillRunner`."""
        self._state.num_computed.copy_(self._target_state.num_computed)
        inputs = replace(inputs, output_tokens=self._no_tokens)
        self._prefill.run_inputs(num_tokens, decode_rows, 0, inputs, num_splits, shared, single_launch=single_launch)

    def propose(self, rows: int, num_drafts: int, *, filters: bool) -> Tensor:
        """Drafts [num_drafts, R] of each of the first num_rows rows, of at most `rows`: the same on all ranks."""
        state, buffers = self._state, self._buffers
        begin_drafts(self._target_state, buffers, rows, num_drafts)
        index: Tensor | None
        for step in range(num_drafts):
            if step == 0:
                new_tokens = NewTokens(buffers.query_starts, buffers.num_fed, FIRST_TOKENS)
                hidden = self._forward.states(rows, new_tokens, buffers.token_rows[: FIRST_TOKENS * rows])
                index = buffers.last_tokens[:rows]
                logits = self.model.logits(self.model.select(hidden, index))
            else:
                torch.minimum(state.num_computed, buffers.last_positions, out=state.num_computed)
                index, logits = None, self._forward.logits(rows)
            sample(
                logits,
                self._slots,
                self._positions,
                state.num_rows,
                state,
                self._drafts,
                self._steps[step, :1],
                self._sampling.workspace,
                index=index,
                filters=filters,
            )
        return self._agreed(self._drafts[:num_drafts, :rows])

    def _agreed(self, drafts: Tensor) -> Tensor:
        """The same drafts on all ranks. Those of each may differ: ranks may have prompts in tiles of different sizes,
        and near ties are decided by rounding."""
        if self._group is not None:
            drafts.copy_(self._group.all_reduce_max(drafts.to(torch.int64, memory_format=torch.contiguous_format)))
        return drafts
