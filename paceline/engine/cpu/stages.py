"""Pipeline parallelism on the CPU: the stages before the last, and the last.

All stages execute the same plans in the same order, each with its own layers and KV cache, under the same page tables.
The last one samples and sends the result to the first, where rows that decode need their tokens.
"""

from __future__ import annotations

import torch

from paceline.codec import encode
from paceline.engine.cpu.attention import CpuAttention
from paceline.engine.cpu.executor import CpuModelRunner, MaskSource
from paceline.engine.cpu.inputs import SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.linear import arrange
from paceline.engine.cpu.lora import ResidentAdapters
from paceline.engine.cpu.quantized_model import DecoderModel
from paceline.engine.executor import Result
from paceline.engine.late_tokens import LateTokens
from paceline.model.decoder import Decoder
from paceline.model.rank_group import StageLink
from paceline.scheduler.plan import NO_TOKENS, Plan


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
        self.cache = KVCache(
            decoder.spec, num_pages, page_size, decoder.kv_dtype, num_host_pages, num_slots=max_running
        )
        self._attention = CpuAttention(self.cache, decoder.spec)
        self._tables = SlotTables(max_running, max_row_tokens, page_size)
        self.adapters = ResidentAdapters(max_running)
        self.late_tokens = LateTokens(max_running, self._tables.store_tokens) if pipe.shard.is_first else None

    def load_weights(self, decoder: Decoder) -> None:
        self.decoder = arrange(decoder)
        self.adapters.replace_decoder(self.decoder)

    @torch.inference_mode()
    def run(self, plan: Plan, host: MaskSource | None) -> Result:
        """The result is empty: that of the pass comes from the last stage."""
        self.cache.apply(plan)
        self._tables.apply(plan)
        self.adapters.apply(plan, self.decoder)
        if self.late_tokens is not None:
            self.late_tokens.begin(plan)
        self.pipe.begin()
        inputs = self._tables.inputs(plan)
        attend = self._attention.begin(inputs)
        tokens, rotated_by = torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.rope_positions)
        self.decoder.forward(tokens, rotated_by, attend, self.adapters.rows(plan))
        return Result(NO_TOKENS, 0.0)  # the executor measures the time


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
