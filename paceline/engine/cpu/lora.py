"""The adapters of the CPU executor: those that are known, those in slots, and which request uses which.

Device memory is host memory, so loading an adapter into a slot copies nothing. What the model folds into its matrices
is folded into an adapter when it is arranged, beside the passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.cpu.quantized_model import DecoderModel
from paceline.model.lora import LoraRows, LoraWeights
from paceline.scheduler.plan import Plan

_NONE = -1  # adapter slot of a request that uses the base model


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter(LoraWeights):
    """An adapter as its folder has it, and as a decoder uses it."""

    decoder: DecoderModel
    prepared: LoraWeights

    @classmethod
    def of(cls, weights: LoraWeights, decoder: DecoderModel) -> PreparedAdapter:
        return cls(weights.layers, decoder, decoder.prepare_adapter(weights))


class ResidentAdapters:
    """Used by the thread that runs passes."""

    def __init__(self, max_running: int) -> None:
        self._known: dict[str, PreparedAdapter] = {}
        self._names: dict[int, str] = {}  # by adapter slot
        self._resident: dict[int, LoraWeights] = {}  # by adapter slot, as the decoder uses them
        self._slots = np.full(max_running, _NONE, np.int64)  # adapter slot by request slot

    def add(self, adapter: str, weights: LoraWeights) -> None:
        assert isinstance(weights, PreparedAdapter), "`arrange_adapter` makes the adapters of this executor"
        self._known[adapter] = weights

    def remove(self, adapter: str) -> None:
        """No later plan loads it."""
        del self._known[adapter]

    def apply(self, plan: Plan, decoder: DecoderModel) -> None:
        """Loads adapters, then lets requests that join use theirs: the order of the plan."""
        for load in plan.adapter_loads:
            self._names[load.slot] = load.adapter
            self._resident[load.slot] = self._prepared(load.adapter, decoder)
        for join in plan.joins:
            self._slots[join.slot] = _NONE if join.adapter_slot is None else join.adapter_slot

    def replace_decoder(self, decoder: DecoderModel) -> None:
        """The weights of the model, which may be folded into adapters, have changed."""
        for slot, adapter in list(self._names.items()):
            if adapter in self._known:
                self._resident[slot] = self._prepared(adapter, decoder)
            else:  # unloaded: the slot is not used before another adapter is loaded into it
                del self._names[slot], self._resident[slot]

    def _prepared(self, adapter: str, decoder: DecoderModel) -> LoraWeights:
        known = self._known[adapter]
        if known.decoder is not decoder:  # the weights were replaced since
            known = self._known[adapter] = PreparedAdapter.of(known, decoder)
        return known.prepared

    def rows(self, plan: Plan) -> LoraRows | None:
        """The tokens of this pass by adapter; None if all rows use the base model."""
        slots = self._slots[plan.slots]
        if (slots == _NONE).all():
            return None
        by_token = np.repeat(slots, plan.lengths)
        used = np.unique(slots[slots != _NONE]).tolist()
        return LoraRows([(torch.from_numpy(np.flatnonzero(by_token == slot)), self._resident[slot]) for slot in used])
