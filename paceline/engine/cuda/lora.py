"""LoRA adapters on a GPU: memory for a fixed number of them, and their rows in a pass.

A slot of the memory holds all matrices of one adapter behind each other, padded to the highest rank, with the norms
folded in that are folded into the model's matrices. An adapter on the host has the same layout, in pinned memory:
loading it is one copy, on the engine's stream, behind the passes that may still use what was there.

    slots [adapters, elements]:  layer 0: A of qkv, B of qkv, A of out, ...;  layer 1: ...
    ranks [adapters, slices]:    layer 0: of q, k, v, out, ...;  layer 1: ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.lora import AdapterMatrix, AdapterRows, add_lora, group_rows, lora_rank
from paceline.kernels.route_experts import LiveRows
from paceline.model.decoder import Decoder, Mlp
from paceline.model.layers import Dense, LayerSpec
from paceline.model.lora import ADAPTED_MATRICES, LoraWeights
from paceline.model.spec import ModelSpec

_ALIGN = 64  # elements: matrices begin at multiples, as kernels expect of pointers


@dataclass(frozen=True, slots=True)
class LoraSizes:
    """How many adapters are resident, and their highest rank. 0: none."""

    num_slots: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a matrix is in a slot."""

    first: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + -(-math.prod(self.shape) // _ALIGN) * _ALIGN

    def of(self, slots: Tensor) -> Tensor:
        """[..., *shape] of slots [..., elements]."""
        return slots[..., self.first : self.first + math.prod(self.shape)].view(*slots.shape[:-1], *self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class LoraHostWeights(LoraWeights):
    """An adapter in host memory, also in the layout of a slot."""

    packed: Tensor
    ranks: Tensor


class CudaLora:
    """The adapters of one model on its device."""

    def __init__(self, decoder: Decoder, sizes: LoraSizes, max_tokens: int) -> None:
        """decoder: before its norms are folded into its matrices."""
        hidden = decoder.spec.hidden_size
        self._sizes = [matrix_sizes(layer, hidden) for layer in decoder.spec.layers]
        self.sizes, self._rank = sizes, lora_rank(sizes.rank)
        self._dtype, device = decoder.dtype, decoder.device
        self._norms = [_folded_norms(decoder, index) for index in range(len(self._sizes))]
        self._places: list[dict[str, tuple[_Place, _Place, _Place]]] = []  # of A, B and their ranks
        end = num_ranks = 0
        for matrices in self._sizes:
            places: dict[str, tuple[_Place, _Place, _Place]] = {}
            for name, (widths, columns) in matrices.items():
                a = _Place(end, (len(widths) * self._rank, columns))
                b = _Place(a.end, (self._rank, sum(widths)))
                end = b.end
                ranks = _Place(num_ranks, (len(widths),))
                num_ranks = ranks.end
                places[name] = a, b, ranks
            self._places.append(places)
        self._num_elements, self._num_ranks = end, num_ranks
        self._slots = torch.zeros(sizes.num_slots, end, dtype=self._dtype, device=device)
        self._ranks = torch.zeros(sizes.num_slots, num_ranks, dtype=torch.int32, device=device)
        self.matrices = [
            {
                name: AdapterMatrix(a.of(self._slots), b.of(self._slots), own.of(self._ranks), matrices[name][0])
                for name, (a, b, own) in places.items()
            }
            for matrices, places in zip(self._sizes, self._places, strict=True)
        ]
        self._rows = AdapterRows.empty(max_tokens, sizes.num_slots, 3 * self._rank, device)
        self._uses_pdl = device.type != "cpu"
        self._token_slots: Tensor | None = None
        self._sampling: Tensor | None = None
        self._known: dict[str, LoraWeights] = {}
        self._resident: dict[int, str] = {}

    def bind(self, token_slots: Tensor, sampling: Tensor) -> None:
        """Where the slots of a pass's tokens are, and the state of slots, which names their adapters."""
        self._token_slots, self._sampling = token_slots, sampling

    # ------------------------------------------------------------------ adapters

    def pack(self, weights: LoraWeights) -> LoraHostWeights:
        """An adapter in the layout of a slot. Any thread may call it."""
        packed = torch.zeros(self._num_elements, dtype=self._dtype)
        packed_ranks = torch.zeros(self._num_ranks, dtype=torch.int32)
        for layer, (places, norms) in enumerate(zip(self._places, self._norms, strict=True)):
            for name, parts in weights.layers[layer].items():
                a, b = (place.of(packed) for place in places[name][:2])
                ranks = places[name][2].of(packed_ranks)
                starts = _starts(self._sizes[layer][name][0])
                norm = norms.get(name)
                for part in parts:
                    index, rank = starts.index(part.first), part.rank
                    own = part.a if norm is None else (part.a.float() * norm).to(self._dtype)
                    a[index * self._rank : index * self._rank + rank] = own
                    b[:rank, part.first : part.first + len(part.b)] = part.b.T
                    ranks[index] = rank
        if self._slots.device.type == "cuda":
            packed, packed_ranks = packed.pin_memory(), packed_ranks.pin_memory()
        return LoraHostWeights(weights.layers, packed, packed_ranks)

    def add(self, adapter: str, weights: LoraWeights) -> None:
        self._known[adapter] = weights

    def remove(self, adapter: str) -> None:
        del self._known[adapter]

    def load(self, slot: int, adapter: str) -> None:
        """Copies an adapter into a slot, on the current stream."""
        weights = self._known[adapter]
        assert isinstance(weights, LoraHostWeights), "`pack` makes the adapters of this model"
        self._slots[slot].copy_(weights.packed, non_blocking=True)
        self._ranks[slot].copy_(weights.ranks, non_blocking=True)
        self._resident[slot] = adapter

    def reload(self, decoder: Decoder) -> None:
        """The weights of the model were replaced by those of this decoder: its norms are folded into all adapters."""
        self._norms = [_folded_norms(decoder, index) for index in range(len(self._sizes))]
        self._known = {adapter: self.pack(weights) for adapter, weights in self._known.items()}
        for slot, adapter in self._resident.items():
            if adapter in self._known:
                self.load(slot, adapter)

    # ------------------------------------------------------------------ a pass

    def begin(self, num_tokens: int, live: LiveRows | None) -> None:
        """Groups the tokens of a pass by adapter."""
        assert self._token_slots is not None and self._sampling is not None, "the executor binds them"
        group_rows(self._token_slots[:num_tokens], self._sampling, self._rows, live)

    def add_to(self, matrix: AdapterMatrix, x: Tensor, out: Tensor) -> None:
        """out += what the adapters of its rows add."""
        add_lora(x, out, matrix, self._rows, pdl=self._uses_pdl)


def lora_bytes(spec: ModelSpec, sizes: LoraSizes, item_bytes: int) -> int:
    """Device memory of the slots."""
    rank = lora_rank(sizes.rank)
    return (
        sizes.num_slots
        * item_bytes
        * sum(
            rank * (len(widths) * columns + sum(widths))
            for layer in spec.layers
            for widths, columns in matrix_sizes(layer, spec.hidden_size).values()
        )
    )


def matrix_sizes(layer: LayerSpec, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """The matrices of a layer that adapters can change: widths of their slices, and columns. layer: of this rank."""
    mixer, ffn = layer.mixer, layer.ffn
    sizes: dict[str, tuple[tuple[int, ...], int]] = {
        "qkv": ((mixer.q_size, mixer.kv_size, mixer.kv_size), hidden),
        "out": ((hidden,), mixer.q_size),
    }
    if isinstance(ffn, Dense):
        sizes |= {"gate_up": ((ffn.size, ffn.size), hidden), "down": ((hidden,), ffn.size)}
    assert set(sizes) <= set(ADAPTED_MATRICES), "adapters can change these"
    return sizes


def _starts(widths: Sequence[int]) -> list[int]:
    return [sum(widths[:index]) for index in range(len(widths))]


def _folded_norms(decoder: Decoder, index: int) -> dict[str, Tensor]:
    """The norms that are folded into matrices of a layer, on the host. They are not folded into packed ones."""
    layer = decoder.layers[index]
    places = [("qkv", layer.attention_norm, layer.qkv)]
    if isinstance(layer.mlp, Mlp):
        places.append(("gate_up", layer.mlp_norm, layer.mlp.gate_up))
    found = {
        name: norm.weight.float().clone()
        for name, norm, linear in places
        if norm is not None and isinstance(linear.weight, Tensor)
    }
    return found if decoder.device.type == "meta" else {name: norm.cpu() for name, norm in found.items()}
