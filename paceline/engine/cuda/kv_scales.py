"""Scales of an FP8 KV cache, one for keys and one for values of every layer and KV head.

Those of the checkpoint, if it has some. Otherwise the model is computed once for a few tokens, in the dtype of its
activations, and the largest key and value of each head are measured. FP8 is a floating point format: a scale only has
to put a head's numbers into its range, so these scales are powers of two, by which nothing is rounded, and leave room
for values `HEADROOM` times as large as those that were seen; larger ones saturate. So the token ids need not be text,
and two GPUs that round differently find the same scales.
Without scales, keys above 448 (Qwen2 has some of 200 to 300) would saturate, and values below 2^-6, which first layers
have, would have less than 3 bits of mantissa.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.fp8 import FP8_MAX
from paceline.kernels.rope_kv import rope_kv_reference
from paceline.model.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.engine.cuda.model import CudaModel

HEADROOM = 8.0
_TOKENS = 128
_STEP = 40_503  # odd: ids that are spread over the vocabulary


def scales_for(largest: Tensor) -> Tensor:
    """The scales of heads whose largest number is given; 1 where it is zero or not finite."""
    on_host = largest.float().cpu()  # where a logarithm has the same bits for every GPU
    usable = (on_host > 0) & torch.isfinite(on_host)
    exponent = torch.log2(torch.where(usable, on_host, FP8_MAX / HEADROOM) * (HEADROOM / FP8_MAX)).ceil()
    return torch.exp2(exponent).to(largest.device)


def scales_digest(scales: Tensor) -> str:
    """Two caches hold the same numbers for the same bits only if these are equal."""
    return hashlib.sha256(scales.float().cpu().numpy().tobytes()).hexdigest()[:16]


def calibration_ids(spec: ModelSpec, most: int) -> Tensor:
    """At most `most` token ids, the first of them BOS: the first token of a sequence often has the largest keys."""
    ids = torch.arange(min(_TOKENS, most)) * _STEP % spec.vocab_size
    if spec.bos_id is not None:
        ids[0] = spec.bos_id
    return ids


@torch.inference_mode()
def calibrate(model: CudaModel) -> Tensor:
    """[layers, 2, K] float32. Overwrites the model's buffers: no pass may be in flight. All stages of a pipeline
    call it."""
    spec, device, kv = model.spec, model.device, model.mixer.cache
    if model.kv_scales is not None:
        return model.kv_scales.to(device).expand(-1, -1, kv.num_kv_heads)
    ids = calibration_ids(spec, min(model.max_tokens, len(model.layers[0].cos_sin))).to(device)
    count = len(ids)
    if model.stages is None or model.shard.is_first:
        _embed(model, ids)
    else:
        model.input(count).copy_(model.stages.receive(count, spec.hidden_size, model.dtype))
    defer_norm = model.defers_norm(count, fused=False)
    stream = model.input(count) if defer_norm else None
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    positions = torch.arange(count, dtype=torch.int32, device=device)
    shape = (1, count, kv.num_kv_heads, kv.head_dim)
    k, v = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    largest = torch.zeros(spec.num_layers, 2, kv.num_kv_heads, device=device)

    def attend(index: int, qkv: Tensor, out: Tensor) -> None:
        layer = model.layers[index]
        q = rope_kv_reference(
            qkv,
            k,
            v,
            zeros[None, :1],
            zeros,
            positions,
            positions,
            layer.cos_sin,
            layer.q_norm,
            layer.k_norm,
            spec.rms_eps,
            stream,
        )
        for part, found in zip((k, v), largest[index], strict=True):
            found.copy_(part.abs().amax(dim=(0, 1, 3)))
        queries, keys, values = (x.to(q.dtype).transpose(0, 1)[None] for x in (q, k[0], v[0]))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        out.copy_(attended[0].transpose(0, 1).flatten(1))

    hidden = model.forward(count, attend, fused=False, defer_norm=defer_norm)
    if model.stages is not None and not model.shard.is_last:
        model.stages.send(hidden.cpu())
    return scales_for(largest)


def _embed(model: CudaModel, ids: Tensor) -> None:
    """The embeddings of token ids as the input of the next pass."""
    x = model.input(len(ids))
    if model.first_id is None:
        torch.index_select(model.embedding, 0, ids, out=x)
        return
    own = ids - model.first_id
    is_own = (own >= 0) & (own < len(model.embedding))
    x.copy_(model.embedding[own.clamp(0, len(model.embedding) - 1)] * is_own[:, None])
    model.sum_input(len(ids))
