"""A made-up mixer with a state, the mean of the inputs at the last positions, and a model of it and of attention."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.layers import Attention, Dense, Division, LayerSpec, State
from paceline.model.layout import WHOLE_MODEL
from paceline.model.shapes import shape
from paceline.model.spec import ModelSpec
from paceline.model.state_rows import StateRows

WIDTH = 4


@dataclass(frozen=True, slots=True)
class MovingAverage:
    size: int
    rotation: ClassVar[None] = None
    position_macs: ClassVar[int] = 0

    @property
    def cache(self) -> State:
        return State("moving_average", 4 * (WIDTH - 1) * self.size)

    def num_macs(self, hidden_size: int) -> int:
        return 0

    def num_parameters(self, hidden_size: int) -> int:
        return 0

    def shard(self, shard: Division) -> MovingAverage:
        return self

    def mix(self, x: Tensor, rows: StateRows) -> Tensor:
        inputs, out = rows.states.view(torch.float32).unflatten(1, (WIDTH - 1, self.size)), torch.empty_like(x)
        ends = rows.offsets.tolist()
        for slot, first, end in zip(rows.slots.tolist(), ends, ends[1:], strict=False):
            last = torch.cat([inputs[slot], x[first:end]])
            out[first:end] = last.unfold(0, WIDTH, 1).mean(-1)
            inputs[slot] = last[1 - WIDTH :]
        return out


def hybrid_spec(mixers: str = "sass") -> ModelSpec:
    """s: a layer with a state, a: one of attention, w: one of attention with a window."""
    spec = shape("tiny-llama")
    whole = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=None)
    some: Any = {"s": MovingAverage(spec.hidden_size), "a": whole, "w": replace(whole, window=9)}
    return replace(spec, layers=tuple(LayerSpec(mixer=some[one], ffn=Dense(size=16)) for one in mixers), tied=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(Attention):
    """Has the weights of attention, and says that it keeps a state: for what happens before a model is computed."""

    @property
    def cache(self) -> Any:
        return State("recurrent", 1000)


def recurrent_spec(name: str = "tiny-llama", *layers: int) -> ModelSpec:
    """A shape in which these layers keep a state; default: all."""
    spec = shape(name)
    mixers = [layer.mixer for layer in spec.layers]
    recurrent = [Recurrent(**{one.name: getattr(mixer, one.name) for one in fields(mixer)}) for mixer in mixers]
    return replace(spec, layers=tuple(
        replace(layer, mixer=recurrent[index]) if index in layers or not layers else layer
        for index, layer in enumerate(spec.layers)
    ))  # fmt: skip


class HybridDecoder:
    """A decoder of such a model. Its layers have no MLP: only the mixers matter here."""

    dtype = kv_dtype = torch.float32
    precision, is_packed, shard, group, stages, kv_scales = "float32", False, WHOLE_MODEL, None, None, None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = self.whole_spec = spec
        random, hidden = torch.Generator().manual_seed(5), spec.hidden_size
        self.embedding = torch.randn(spec.vocab_size, hidden, generator=random)
        mixers = [layer.mixer for layer in spec.layers]
        sizes = [one.qkv_size if isinstance(one, Attention) else hidden for one in mixers]
        self._in = [torch.randn(size, hidden, generator=random) * hidden**-0.5 for size in sizes]
        sizes = [one.q_size if isinstance(one, Attention) else hidden for one in mixers]
        self._out = [torch.randn(hidden, size, generator=random) * size**-0.5 for size in sizes]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any, lora: Any = None) -> Tensor:
        x = self.embedding[tokens]
        for index, layer in enumerate(self.spec.layers):
            mixer: Any = layer.mixer
            between = F.linear(F.rms_norm(x, x.shape[1:]), self._in[index])
            if isinstance(mixer, MovingAverage):
                mixed = mixer.mix(between, attend.state(index))
            else:
                heads = between.view(len(x), -1, mixer.head_dim)
                mixed = attend(index, *heads.split([mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads], 1), None)
            x = x + F.linear(mixed, self._out[index])
        return x

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(F.rms_norm(hidden, hidden.shape[1:]), self.embedding)

    def prepare_adapter(self, weights: Any) -> Any:
        return weights

    @torch.inference_mode()
    def recomputed(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The greedy continuation, with every token computed again for each of them."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            hidden = self.forward(torch.tensor(tokens), torch.arange(len(tokens)), _OneSequence(self.spec, len(tokens)))
            tokens.append(int(self.logits(hidden[-1:]).argmax()))
        return tokens[len(prompt) :]


class _OneSequence:
    """A whole sequence, which has no cache and begins with a state of zeros."""

    def __init__(self, spec: ModelSpec, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._mixers: list[Any] = [layer.mixer for layer in spec.layers]

    def state(self, layer: int) -> StateRows:
        state = torch.zeros(1, self._mixers[layer].cache.num_bytes, dtype=torch.uint8)
        return StateRows(state, torch.tensor([0]), torch.tensor([0, self._num_tokens]))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: None) -> Tensor:
        at = torch.arange(len(q))
        distance = at[:, None] - at
        visible = (distance >= 0) & (distance < (self._mixers[layer].window or len(q)))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)
