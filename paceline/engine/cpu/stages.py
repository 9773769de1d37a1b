"""Pipeline parallelism on the CPU: the stages before the last, and the last.

All stages execute the same plans in the same order, each with its own layers and KV cache, under the same page tables.
The last one samples and sends the result to the first, where rows that decode need their tokens.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue

import numpy as np
import torch

from paceline.codec import encode
from paceline.engine.cpu.attention import CpuAttention
from paceline.engine.cpu.executor import CpuModelRunner, MaskSource
from paceline.engine.cpu.inputs import SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.lora import ResidentAdapters
from paceline.engine.cpu.model import DecoderModel, arranged_like
from paceline.engine.executor import Result
from paceline.model.decoder import Decoder
from paceline.model.rank_group import StageLink
from paceline.scheduler.plan import NO_TOKENS, Column, Plan


class LateTokens:
    """The tokens of the first stage. What a pass samples arrives when later passes have begun here; it is stored when a
    pass needs it, or before the next one."""

    def __init__(self, tables: SlotTables, max_running: int) -> None:
        self._tables = tables
        self._arrived: SimpleQueue[tuple[Plan, Column] | Exception] = SimpleQueue()
        self._stored_step = 0  # the tokens of all passes up to this one are stored
        self._sampled_step = np.zeros(max_running, np.int64)  # by slot: the last pass that samples for its request
        self._joined_step = np.zeros(max_running, np.int64)  # by slot: the pass with which its request joined

    def put(self, plan: Plan, tokens: Column) -> None:
        """Called in the order of the passes, by another thread."""
        self._arrived.put((plan, tokens))

    def fail(self, error: Exception) -> None:
        """No more tokens will arrive."""
        self._arrived.put(error)

    def begin(self, plan: Plan) -> None:
        """Blocks until the tokens that this pass feeds are stored, which the tables have applied."""
        for join in plan.joins:
            self._joined_step[join.slot] = plan.step
            self._sampled_step[join.slot] = 0
        needed = int(self._sampled_step[plan.slots].max(initial=0))
        while self._store_next(wait=self._stored_step < needed):
            pass
        self._sampled_step[plan.slots[plan.samples]] = plan.step

    def _store_next(self, *, wait: bool) -> bool:
        try:
            arrived = self._arrived.get(block=wait)
        except Empty:
            return False
        if isinstance(arrived, Exception):
            raise arrived
        plan, tokens = arrived
        rows = np.flatnonzero(plan.samples)
        # The slot may have another request by now, whose tokens must stay.
        is_same = self._joined_step[plan.slots[rows]] <= plan.step
        rows, tokens = rows[is_same], tokens[is_same]
        # A row without a token continues with a valid id until the host has seen it.
        self._tables.tokens[plan.slots[rows], plan.starts[rows] + plan.lengths[rows]] = np.maximum(tokens, 0)
        self._stored_step = plan.step
        return True


class StageRunner:
    """A stage before the last: computes hidden states and sends them on."""

    def __init__(
        self,
        decoder: DecoderModel,
        pipe: StageLink,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_row_tokens: int,
        num_host_pages: int = 0,
    ) -> None:
        self.decoder, self.pipe = decoder, pipe
        self.cache = KVCache(decoder.spec, num_pages, page_size, decoder.dtype, num_host_pages)
        self._attention = CpuAttention(self.cache, decoder.spec)
        self._tables = SlotTables(max_running, max_row_tokens, page_size)
        self.adapters = ResidentAdapters(max_running)
        self.late_tokens = LateTokens(self._tables, max_running) if pipe.shard.is_first else None

    def load_weights(self, decoder: Decoder) -> None:
        self.decoder = arranged_like(self.decoder, decoder)
        self.adapters.replace_decoder(self.decoder)

    @torch.inference_mode()
    def run(self, plan: Plan, host: MaskSource | None) -> Result:
        """The result is empty: that of the pass comes from the last stage."""
        if plan.swap is not None:
            self.cache.swap(plan.swap)
        self._tables.apply(plan)
        self.adapters.apply(plan, self.decoder)
        if self.late_tokens is not None:
            self.late_tokens.begin(plan)
        self.pipe.begin()
        inputs = self._tables.inputs(plan)
        attend = self._attention.begin(inputs)
        tokens, positions = torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.positions)
        self.decoder.forward(tokens, positions, attend, self.adapters.rows(plan))
        return Result(NO_TOKENS)


class LastStageRunner:
    """The last stage: samples, and sends the result to the first."""

    def __init__(self, runner: CpuModelRunner, pipe: StageLink) -> None:
        self._runner, self._pipe = runner, pipe
        self.cache, self.adapters = runner.cache, runner.adapters

    @property
    def decoder(self) -> DecoderModel:
        return self._runner.decoder

    def load_weights(self, decoder: Decoder) -> None:
        self._runner.load_weights(decoder)

    def run(self, plan: Plan, host: MaskSource | None) -> Result:
        result = self._runner.run(plan, host)
        self._pipe.send_result(encode(result._replace(device_s=self._pipe.elapsed_s)))
        return result
