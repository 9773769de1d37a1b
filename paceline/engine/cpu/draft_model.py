"""The draft model of speculative decoding on the CPU: a smaller decoder, whose drafts the target model verifies.

It has a KV cache of its own under the page table of the target model, and computes the same tokens of prompts. It
samples as the target model does. Where its KV of a position is missing, after passes without drafts, its drafts are
worse and the output is the same. With tensor parallelism every rank has all of it.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.engine.cpu.drafts import NgramDrafts
from paceline.engine.cpu.inputs import Index, Inputs, SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.quantized_model import DecoderModel, attention_for
from paceline.model.rank_group import RankGroup
from paceline.sampling.sampler import Sampler
from paceline.scheduler.plan import Join

_FIRST_TOKENS = 4  # of a row that are computed in the first step


class ModelDrafts:
    def __init__(
        self,
        decoder: DecoderModel,
        sampler: Sampler,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        group: RankGroup | None = None,
    ) -> None:
        """sampler: of the whole vocabulary. group: the ranks of the target model, which all have this draft model."""
        self._decoder, self._sampler, self._group = decoder, sampler, group
        self._attention = attention_for(decoder, KVCache(decoder.spec, num_pages, page_size, decoder.kv_dtype))
        self._sources = NgramDrafts(max_running, adapts=False)

    def join(self, join: Join) -> None:
        self._sources.join(join)

    def compute_kv(self, inputs: Inputs) -> torch.Tensor:
        """Computes the KV of the tokens of a pass. Returns their hidden states."""
        attend = self._attention.begin(inputs)
        return self._decoder.forward(torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.rope_positions), attend)

    def propose_all(self, tables: SlotTables, slots: Index, positions: Index, limits: Index) -> Index:
        """As many drafts as allowed: those of a row's draft source if it matches, else of the model."""
        nums = np.maximum(limits, 0)
        # The tokens before the next one are computed again: after a pass whose drafts were all right, or a few without
        # drafts, they were not computed.
        starts, ends = np.maximum(positions + 1 - _FIRST_TOKENS, 0), positions
        for step in range(int(nums.max(initial=0))):
            rows = np.flatnonzero(nums > step)
            inputs = tables.row_inputs(slots[rows], starts[rows], ends[rows] + 1 - starts[rows])
            logits = self._decoder.logits(self.compute_kv(inputs)[torch.from_numpy(inputs.sampled)])
            tokens = self._sampler.sample(logits, inputs.sampled_slots, inputs.sampled_positions, tables.tokens)
            tables.store(inputs, np.maximum(tokens, 0))
            ends = ends + 1
            starts = ends
        self._agree(tables, slots, positions, nums)
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            found = self._sources.from_source(slot, tables.tokens[slot, : position + 1], int(nums[row]))
            if len(found):
                tables.tokens[slot, position + 1 : position + 1 + len(found)] = found
                nums[row] = len(found)
        return nums

    def _agree(self, tables: SlotTables, slots: Index, positions: Index, nums: Index) -> None:
        """Lets all ranks verify the same drafts. Those of each may differ: its GEMMs may be arranged in another way,
        and near ties are decided by rounding."""
        rows, number = np.nonzero(np.arange(nums.max(initial=0)) < nums[:, None])
        if self._group is None or not len(rows):
            return
        places = slots[rows], positions[rows] + 1 + number
        own = torch.from_numpy(tables.tokens[places].astype(np.int64))
        tables.tokens[places] = self._group.all_reduce_max(own).numpy()

    def settle(self, slot: int, position: int, num_drafts: int, num_accepted: int) -> None:
        """The scheduler decides how many drafts a row has."""
