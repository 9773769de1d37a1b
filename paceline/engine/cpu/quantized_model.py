"""A decoder with quantized weights on the CPU: one call of `native/native.c` computes all layers.

The reference implementation is `model.decoder.Decoder` with the dequantized weights, whose inputs of matrices are
rounded to 15 bits as here; a test compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.attention import AttentionBackend
from paceline.engine.cpu.attention import CpuAttention
from paceline.engine.cpu.inputs import Index, Inputs
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.native import (
    LOADING_THREADS,
    AdaptedMatrix,
    Batch,
    Layer,
    LowRankPart,
    Model,
    NativeLibrary,
    PackedMatrix,
    title_of_bits,
)
from paceline.model.decoder import Attend, Decoder, scaled, soft_cap
from paceline.model.layers import ACTIVATIONS, Dense
from paceline.model.layout import WHOLE_MODEL
from paceline.model.lora import ADAPTED_MATRICES, LoraRows, LoraWeights
from paceline.model.quantized import QuantizedTensor
from paceline.model.rope import rope_table
from paceline.model.spec import ModelSpec

_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "qk_norm")
_MATRICES = ("qkv", "out", "gate_up", "down")
_PER_LAYER = ("window", "rope", "rotary_dim", "residual_scale")  # what may differ between layers


@dataclass(frozen=True, slots=True, eq=False)
class NativePass:
    """What a forward pass reads of a batch and of the KV cache."""

    cache: KVCache
    inputs: Inputs

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> NoReturn:
        raise TypeError("a quantized model computes attention itself, not layer by layer")


@dataclass(frozen=True, slots=True, eq=False)
class NativeRows:
    """The rows of a batch as `native/native.c` takes them: those of generated tokens first."""

    starts: Index
    lengths: Index
    offsets: Index
    pages: npt.NDArray[np.int32]
    num_decode_rows: int
    order: Index | None = None  # of the tokens of the batch; None: as they are

    @classmethod
    def of(cls, inputs: Inputs, *, has_tiles: bool) -> NativeRows:
        """Without tiles there is no difference between the tokens of prompts and generated ones."""
        prompts, lengths = inputs.prompts, inputs.lengths
        num_decode_rows = len(prompts) - int(np.count_nonzero(prompts)) if has_tiles else len(prompts)
        pages = np.ascontiguousarray(inputs.page_rows)
        if (prompts[num_decode_rows:] == lengths[num_decode_rows:]).all():
            return cls(inputs.starts, lengths, inputs.offsets, pages, num_decode_rows)
        # A request that was retracted is computed again, with what it has generated: its row becomes two.
        generated, rows = np.flatnonzero(prompts < lengths), np.flatnonzero(prompts)
        both = np.concatenate([generated, rows])
        skipped = np.concatenate([prompts[generated], np.zeros_like(rows)])
        lengths = np.concatenate([lengths[generated] - prompts[generated], prompts[rows]])
        offsets = np.cumsum(lengths) - lengths
        order = np.arange(int(lengths.sum())) + np.repeat(inputs.offsets[both] + skipped - offsets, lengths)
        return cls(inputs.starts[both] + skipped, lengths, offsets, pages[both], len(generated), order)


class NativeAttention:
    """The attention backend of a quantized model: `native/native.c` computes it."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def begin(self, inputs: Inputs) -> NativePass:
        return NativePass(self._cache, inputs)


def attention_for(decoder: DecoderModel, cache: KVCache) -> AttentionBackend[Inputs, Attend]:
    return NativeAttention(cache) if isinstance(decoder, QuantizedModel) else CpuAttention(cache, decoder.spec)


@dataclass(frozen=True, slots=True, eq=False)
class NativeAdapter(LoraWeights):
    """An adapter with the table that `native/native.c` reads: [layers, ADAPTED_MATRICES]."""

    table: ctypes.Array[AdaptedMatrix]

    @classmethod
    def of(cls, weights: LoraWeights) -> NativeAdapter:
        table = (AdaptedMatrix * (len(weights.layers) * len(ADAPTED_MATRICES)))()
        for index, layer in enumerate(weights.layers):
            for matrix, name in enumerate(ADAPTED_MATRICES):
                parts = layer.get(name, ())
                array = (LowRankPart * len(parts))(
                    *(LowRankPart(part.a.data_ptr(), part.b.data_ptr(), part.first, *part.b.shape) for part in parts)
                )
                table[index * len(ADAPTED_MATRICES) + matrix] = AdaptedMatrix(array, len(parts))
        return cls(weights.layers, table)


class QuantizedModel:
    dtype = torch.float32  # of all that is not a matrix
    kv_dtype = torch.bfloat16
    kv_scales = None
    is_packed = True
    group = None
    stages = None
    shard = WHOLE_MODEL

    def __init__(
        self,
        library: NativeLibrary,
        spec: ModelSpec,
        vectors: Mapping[str, Tensor],
        read_matrix: Callable[[str], QuantizedTensor],
        *,
        max_positions: int | None = None,
    ) -> None:
        """vectors, read_matrix: the fused tensors of `layout.target_shapes(spec)`. Matrices are read and packed by two
        threads, nearly all of it in foreign code without the GIL."""
        spec.refuse_differences("quantization on a CPU", "set quantization to none", allowed=_PER_LAYER)
        mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
        assert isinstance(ffn, Dense), "a plan keeps no experts in 4 or 8 bits on a CPU"
        self.spec = self.whole_spec = spec
        self._library = library

        def packed(name: str) -> PackedMatrix:
            return PackedMatrix(library, read_matrix(name), vectors.get(f"{name}_bias"))

        names = [f"{index}.{name}" for index in range(spec.num_layers) for name in _MATRICES]
        names += ["embedding"] if spec.tied else ["embedding", "head"]
        with ThreadPoolExecutor(LOADING_THREADS) as pool:
            matrices = dict(zip(names, pool.map(packed, names), strict=True))
        positions = max_positions or spec.context_tokens
        ropes = {one: rope_table(one, positions, torch.device("cpu")) for one in spec.rotations}
        self._head = matrices["embedding" if spec.tied else "head"]
        self._norm = vectors["norm"]
        self._keep = (vectors, matrices, ropes)  # what the structs below point to
        layers = (Layer * spec.num_layers)()
        for index, layer in enumerate(layers):
            for name in _MATRICES:
                setattr(layer, name, matrices[f"{index}.{name}"].struct)
            for name in _NORMS:
                if f"{index}.{name}" in vectors:
                    setattr(layer, name, vectors[f"{index}.{name}"].data_ptr())
            own = spec.layers[index].mixer
            layer.rope = None if own.rotation is None else ropes[own.rotation].data_ptr()
            layer.window = own.window or 0
        self._layers = layers
        self._model = Model(
            embedding=matrices["embedding"].struct,
            layers=layers,
            norm=self._norm.data_ptr(),
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            ffn=ffn.size,
            eps=spec.rms_eps,
            scale=mixer.softmax_scale,
            score_cap=mixer.score_cap or 0.0,
            embedding_scale=spec.embedding_scale,
            activation=ACTIVATIONS.index(ffn.activation.kind),
            full_qk_norm=mixer.qk_norm == "whole",
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.precision = title_of_bits(matrices.values())
        if library.has_tiles:
            self.precision += ", for prompts bfloat16 (AMX)"

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, lora: LoraRows | None = None) -> Tensor:
        """Hidden states [T, hidden] after the final norm. attend: a `NativePass`."""
        assert isinstance(attend, NativePass), "the attention backend of a quantized model is NativeAttention"
        cache, kv_indices = attend.cache, attend.inputs.kv_indices
        rows = NativeRows.of(attend.inputs, has_tiles=self._library.has_tiles)
        if rows.order is not None:
            order = torch.from_numpy(rows.order)
            tokens, positions, kv_indices = tokens[order], positions[order], kv_indices[rows.order]
        x = torch.empty(len(tokens), self.spec.hidden_size)
        model = ctypes.byref(self._model)
        keys, values = cache.addresses
        batch = Batch(
            num_tokens=len(tokens),
            num_rows=len(rows.lengths),
            num_decode_rows=rows.num_decode_rows,
            page_size=cache.page_size,
            num_pages=rows.pages.shape[1],
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            kv_indices=kv_indices.ctypes.data,
            starts=rows.starts.ctypes.data,
            lengths=rows.lengths.ctypes.data,
            offsets=rows.offsets.ctypes.data,
            pages=rows.pages.ctypes.data,
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            x=x.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        if lora is not None:
            addresses = np.zeros(len(tokens), np.uintp)
            for tokens_of, weights in lora.groups:
                assert isinstance(weights, NativeAdapter), "prepare_adapter makes the adapters of this model"
                addresses[tokens_of.numpy()] = ctypes.addressof(weights.table)
            addresses = addresses if rows.order is None else addresses[rows.order]
            batch.adapters = addresses.ctypes.data
        needed = self._library.scratch_bytes(model, ctypes.byref(batch)) + 64
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed * 5 // 4, dtype=torch.uint8)
        batch.scratch = -(-self._scratch.data_ptr() // 64) * 64
        self._library.forward(model, ctypes.byref(batch))
        if rows.order is None:
            return x
        hidden = torch.empty_like(x)
        hidden[order] = x
        return hidden

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        return NativeAdapter.of(weights)

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return soft_cap(scaled(self._library.linear(self._head, hidden), self.spec.logit_scale), self.spec.logit_cap)


DecoderModel = Decoder | QuantizedModel  # what the CPU executor runs
