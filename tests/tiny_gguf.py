"""A tiny Llama in a GGUF file, with matrices of several types."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType
# Of the first layer and of the others: q and v are fused, so qkv gets 8 bits in the first.
FIRST = {"attn_q": Q.Q4_1, "attn_k": Q.Q4_0, "attn_v": Q.Q5_1, "ffn_down": Q.Q8_0}
OTHERS = {"attn_v": Q.Q4_1, "ffn_down": Q.Q4_0}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY = 64, 4, 2, 32, 96, 512


def save_gguf(path: Path, num_layers: int = 2, kinds: dict[str, gguf.GGMLQuantizationType] | None = None) -> Path:
    """kinds: types that replace those above, by tensor; Q4_1 is that of all others."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }

    def add(name: str, shape: tuple[int, int], kind: gguf.GGMLQuantizationType, gain: float) -> None:
        values = (gain / np.sqrt(shape[1]) * rng.standard_normal(shape)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd", (VOCABULARY, HIDDEN), Q.Q8_0, 3.0)
    add("output", (VOCABULARY, HIDDEN), Q.Q8_0, 3.0)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer in range(num_layers):
        for norm in ("attn_norm", "ffn_norm"):
            value = (1 + 0.3 * rng.standard_normal(HIDDEN)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{norm}.weight", value)
        found = {**(OTHERS if layer else FIRST), **(kinds or {})}
        for name, shape in shapes.items():
            gain = 4.0 if name in ("attn_output", "ffn_down") else 2.0
            add(f"blk.{layer}.{name}", shape, found.get(name, Q.Q4_1), gain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
