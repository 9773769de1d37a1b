"""Rotary position embeddings (RoPE): the table of cosines and sines, and the rotation.

The table is computed once, in float32, for every position that the engine may use: 16 bits cannot represent the angles
of large positions. Heads are stored in halves (first the real, then the imaginary parts), as in Hugging Face files;
GGUF files of the llama family interleave the two, which `gguf.py` reverts at load.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from paceline.model.layers import RopeSpec, Rotation
from paceline.model.norm import in_dtype_of


def inverse_frequencies(rope: RopeSpec, head_dim: int, num_positions: int = 0) -> torch.Tensor:
    """The angle per position of each of the head_dim / 2 pairs, float32. num_positions: that will be used, for
    longrope."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "plain":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind in ("divisors", "longrope"):
        # One set for all requests, by the context that is served: a request that outgrew the original context would
        # otherwise need all its cached keys again, with the other angles.
        is_long = rope.kind == "longrope" and num_positions > rope.original_context
        return plain / torch.tensor(rope.long_divisors if is_long else rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    assert rope.kind == "yarn", f"rope kind {rope.kind!r} is not implemented"
    return _yarn(rope, plain, head_dim)


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Wavelengths above the original context are scaled, short ones are kept, those between are interpolated."""
    wavelength = 2 * math.pi / plain
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    long = wavelength > rope.original_context / rope.low_freq_factor
    short = wavelength < rope.original_context / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blended))


def _yarn(rope: RopeSpec, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Like llama3, but the ramp is over dimensions: from those that turn beta_fast times in the original context to
    those that turn beta_slow times."""

    def dimension(num_turns: float) -> float:
        turns = rope.original_context / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def rope_table(rotation: Rotation, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, head_dim] float32: the cosines of a position, then its sines. Pairs beyond rotary_dim have cosine
    1 and sine 0 (`stored.rotary_order` puts them there)."""
    rope, head_dim, rotated = rotation
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, rotated, num_positions))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    rest = (0, (head_dim - rotated) // 2)
    return torch.cat((F.pad(cos, rest, value=1.0), F.pad(sin, rest)), dim=-1).to(device)


def rotation_at(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, 1, D] each, to broadcast over heads: what `rotate` multiplies rows at these positions with."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates the heads of x[T, heads, D]: x * cosines + (x with its halves swapped) * sines, in float32."""
    cos, sin = rotation
    return in_dtype_of(x, (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin))
