"""The simplest KV cache, for tests of the decoder alone: one request, keys and values in a list."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.layers import Attention


class ContiguousCache:
    """Runs one sequence through a decoder, any number of tokens at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.keys: list[list[Tensor]] = [[] for _ in range(decoder.spec.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(decoder.spec.num_layers)]
        self.num_tokens = 0

    def feed(self, tokens: list[int]) -> Tensor:
        """Logits of every one of `tokens`."""
        positions = torch.arange(self.num_tokens, self.num_tokens + len(tokens), device=self.decoder.device)
        self.num_tokens += len(tokens)
        ids = torch.tensor(tokens, device=self.decoder.device)
        return self.decoder.logits(self.decoder.forward(ids, positions, self.attend))

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        produced = [int(self.feed(prompt)[-1].argmax())]
        while len(produced) < num_tokens:
            produced.append(int(self.feed(produced[-1:])[-1].argmax()))
        return produced

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        self.keys[layer].append(k)
        self.values[layer].append(v)
        keys, values = torch.cat(self.keys[layer]), torch.cat(self.values[layer])
        return attention(self.decoder.spec.layers[layer].mixer, q, keys, values, sinks)


def attention(mixer: Attention, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of the last len(q) positions, by its formula."""
    group = mixer.num_heads // mixer.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * mixer.softmax_scale
    if mixer.score_cap is not None:
        scores = mixer.score_cap * torch.tanh(scores / mixer.score_cap)
    at = torch.arange(len(keys), device=q.device)
    query, key = at[-len(q) :, None], at[None, :]
    visible = key <= query
    if mixer.window is not None:
        visible &= key > query - mixer.window
    scores = scores.masked_fill(~visible, float("-inf")).float()
    if sinks is not None:  # one more column, of which no value is read
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1).to(q.dtype)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).reshape(len(q), -1)
