"""Where every stored parameter goes: the names in model files against the fused tensors of the decoder.

q, k and v become one matrix and gate and up another, so that a layer is four matrix products. The table
made here is also what "every parameter is accounted for" means: a stored name that is not in it is
unexpected, one of its names that no file has is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored parameter: rows `row` to `row + num_rows` of the fused tensor `target`.

    A part of fewer dimensions than its target is repeated over the rows: the QK-norm weights are stored
    once per layer and kept once per head, so that queries and keys are normed together.
    """

    target: str
    shape: tuple[int, ...]
    row: int
    num_rows: int


# The norms of a layer: stored name (of Llama, OLMo 2 and Gemma 2) and name in the decoder.
_NORMS: dict[str, dict[str, str]] = {
    "pre": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}


def target_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The fused tensors of the decoder, by name."""
    hidden, qkv = spec.hidden_size, spec.q_size + 2 * spec.kv_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden), "norm": (hidden,)}
    if not spec.tied:
        shapes["head"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        at = f"{layer}."
        shapes.update({at + name: (hidden,) for name in _NORMS[spec.norm_placement].values()})
        shapes[at + "qkv"] = (qkv, hidden)
        shapes[at + "out"] = (hidden, spec.q_size)
        shapes[at + "gate_up"] = (2 * spec.ffn_size, hidden)
        shapes[at + "down"] = (hidden, spec.ffn_size)
        if spec.qkv_bias:
            shapes[at + "qkv_bias"] = (qkv,)
        if spec.out_bias:
            shapes[at + "out_bias"] = (hidden,)
        if spec.mlp_bias:
            shapes[at + "gate_up_bias"] = (2 * spec.ffn_size,)
            shapes[at + "down_bias"] = (hidden,)
        if spec.qk_norm:
            shapes[at + "qk_norm"] = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
    return shapes


def stored_parts(spec: ModelSpec) -> dict[str, StoredPart]:
    """Where each parameter goes, by its Hugging Face name."""
    parts = {
        "model.embed_tokens.weight": _whole("embedding", (spec.vocab_size, spec.hidden_size)),
        "model.norm.weight": _whole("norm", (spec.hidden_size,)),
    }
    if not spec.tied:
        parts["lm_head.weight"] = _whole("head", (spec.vocab_size, spec.hidden_size))
    for layer in range(spec.num_layers):
        parts.update(_layer_parts(spec, f"model.layers.{layer}.", f"{layer}."))
    return parts


def _layer_parts(spec: ModelSpec, stored: str, at: str) -> Iterator[tuple[str, StoredPart]]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    for name, target in _NORMS[spec.norm_placement].items():
        yield f"{stored}{name}.weight", _whole(at + target, (hidden,))
    row = 0
    for name, rows in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
        yield f"{stored}self_attn.{name}_proj.weight", StoredPart(at + "qkv", (rows, hidden), row, rows)
        if spec.qkv_bias:
            yield f"{stored}self_attn.{name}_proj.bias", StoredPart(at + "qkv_bias", (rows,), row, rows)
        row += rows
    yield stored + "self_attn.o_proj.weight", _whole(at + "out", (hidden, spec.q_size))
    if spec.out_bias:
        yield stored + "self_attn.o_proj.bias", _whole(at + "out_bias", (hidden,))
    if spec.qk_norm:
        heads = (spec.head_dim,)
        yield stored + "self_attn.q_norm.weight", StoredPart(at + "qk_norm", heads, 0, spec.num_heads)
        yield (
            stored + "self_attn.k_norm.weight",
            StoredPart(at + "qk_norm", heads, spec.num_heads, spec.num_kv_heads),
        )
    for index, name in enumerate(("gate", "up")):
        yield f"{stored}mlp.{name}_proj.weight", StoredPart(at + "gate_up", (ffn, hidden), index * ffn, ffn)
        if spec.mlp_bias:
            yield f"{stored}mlp.{name}_proj.bias", StoredPart(at + "gate_up_bias", (ffn,), index * ffn, ffn)
    yield stored + "mlp.down_proj.weight", _whole(at + "down", (hidden, ffn))
    if spec.mlp_bias:
        yield stored + "mlp.down_proj.bias", _whole(at + "down_bias", (hidden,))


def _whole(target: str, shape: tuple[int, ...]) -> StoredPart:
    return StoredPart(target, shape, 0, shape[0])
