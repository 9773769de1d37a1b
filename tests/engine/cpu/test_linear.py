"""The linear layers of a CPU against the reference, and what is arranged for them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.engine.cpu.linear import CpuLinear, arrange
from paceline.model.decoder import Decoder
from paceline.model.layers import Experts
from paceline.model.linear import Linear
from paceline.model.shapes import shape, vary
from paceline.model.weights import random_decoder, random_weights
from tests.model.contiguous_cache import ContiguousCache

TOKENS = [5, 9, 2, 80, 41]


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """A made-up format: a matrix in float16."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values.to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_every_number_of_rows_gives_the_result_of_the_reference(rows: int, packed: bool, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias, norm = (torch.randn(*size, generator=generator) for size in ((40, 24), (40,), (24,)))
    y, x = torch.randn(rows, 24, generator=generator), torch.randn(rows, 40, generator=generator)
    reference = Linear(weight, bias if has_bias else None, "out")
    found = CpuLinear(reference, norm, packed=packed)
    torch.testing.assert_close(found(y), reference(y * norm), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.add_to(x, y), x + reference(y * norm), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.weight, weight * norm)

    def adapt(name: str, inputs: Tensor, outputs: Tensor) -> None:
        assert name == "out"
        outputs.add_(inputs.sum(-1, keepdim=True))

    expected = reference(y * norm) + y.sum(-1, keepdim=True)
    torch.testing.assert_close(found(y, adapt), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.add_to(x, y, adapt), x + expected, atol=1e-5, rtol=1e-5)


def test_packed_matrices_stay_and_are_dequantized() -> None:
    spec = vary(shape("tiny-llama"), ffn=Experts(count=4, per_token=2, size=24, shared_size=16))
    packed, wide = (random_decoder(spec, seed=1, dtype="float32") for _ in range(2))
    for (_, _, mine), (_, _, theirs) in zip(packed.linears(), wide.linears(), strict=True):
        mine.weight = Halves(mine.tensor.half())
        theirs.weight = mine.weight.dequantize()
    for own, other in zip(packed.mixtures, wide.mixtures, strict=True):
        assert isinstance(own.expert_down, Tensor)
        own.expert_down = Halves(own.expert_down.half())
        other.expert_down = own.expert_down.dequantize()
    assert all(isinstance(one.weight, Halves) for _, _, one in arrange(packed).linears())
    torch.testing.assert_close(ContiguousCache(packed).feed(TOKENS), ContiguousCache(wide).feed(TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_experts_are_counted(dtype: str) -> None:
    decoder = arrange(random_decoder(shape("tiny-qwen3-moe"), seed=1, dtype=dtype))
    ContiguousCache(decoder).feed(TOKENS)
    chosen = [one.per_token for one in decoder.spec.expert_layers]
    assert [sum(rows) for rows in decoder.expert_rows] == [len(TOKENS) * num for num in chosen]


def test_weights_in_16_bits_stay_as_they_are() -> None:
    decoder = arrange(random_decoder(shape("tiny-llama"), dtype="bfloat16"))
    assert not any(isinstance(one, CpuLinear) for _, _, one in decoder.linears())
    assert not decoder.norm.is_folded


def test_a_second_decoder_of_the_same_weights_is_arranged_alike() -> None:
    """Norms are folded into the matrices of experts in place."""
    spec = shape("tiny-qwen2-moe")
    weights = random_weights(spec, seed=2, dtype="float32")
    for name, weight in weights.items():
        if name.endswith("norm"):
            weight.mul_(torch.linspace(0.5, 1.5, weight.shape[-1]))
    expected = outputs(Decoder(spec, weights))
    for _ in range(2):
        found = outputs(arrange(Decoder(spec, dict(weights))))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def outputs(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Hidden states and logits."""
    hidden = decoder.forward(torch.tensor(TOKENS), torch.arange(len(TOKENS)), ContiguousCache(decoder).attend)
    return decoder.states(hidden), decoder.logits(hidden)
