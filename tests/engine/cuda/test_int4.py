"""4-bit weights on the CUDA executor, in the interpreter, and on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import ConfigError, EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.linear import groupwise
from paceline.engine.linear.pack import quantize_decoder
from paceline.engine.precision import rounding_group
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.layers import Dense
from paceline.model.linear import expanded
from paceline.model.shapes import shape, vary
from paceline.model.weights import load_decoder, random_weights
from paceline.text.synthetic import synthetic_tokenizer
from paceline.weight_formats import INT4
from tests.engine.cuda.interpreted import BASE, GREEDY, IN_BOUNDS, INTERPRETED, PROMPTS, on_kernels
from tests.resolving import keep_stored, plan_of
from tests.tiny_int4 import FORMATS, save_int4

pytestmark = [*INTERPRETED, IN_BOUNDS]


def on_cpu(model: Decoder) -> list[list[int]]:
    tokenizer = synthetic_tokenizer(model.spec.vocab_size)
    engine = assemble(model, tokenizer, EngineConfig(device="cpu", threads=1, overlap="off"), BASE)
    with LLM.from_engine(engine) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def in_groups_of_32(name: str) -> Decoder:
    """A tiny shape with an MLP of 128 columns."""
    spec = shape(name)
    spec = vary(spec, ffn=Dense(size=128, activation=spec.layers[0].ffn.activation))
    return Decoder(spec, random_weights(spec, dtype="float32"), max_positions=192)


def dequantized(model: Decoder) -> Decoder:
    """The same model with the values of its 4-bit weights in float32."""
    for *_, linear in model.linears():
        linear.weight = expanded(linear.weight, torch.float32)
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_4_bit_checkpoints_give_the_tokens_of_the_dequantized_model(tmp_path: Path, name: str) -> None:
    """Prefill, mixed and decode batches on kernels that convert in registers. The CPU has expanded weights."""
    save_int4(tmp_path / "model", FORMATS[name])
    expected = on_cpu(load_decoder(tmp_path / "model", dtype="float32", max_positions=192))
    kept = load_decoder(
        tmp_path / "model", dtype="float32", max_positions=192, keep=keep_stored(tmp_path / "model", "int4")
    )
    llm, device = on_kernels(name, model=kept, quantization="int4")
    with llm:
        assert device.model.is_packed and not device.capabilities.weights
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


def test_a_4_bit_checkpoint_is_expanded_on_a_cpu(tmp_path: Path) -> None:
    """If quantization is none."""
    save_int4(tmp_path / "model", FORMATS["awq"])
    expected = on_cpu(load_decoder(tmp_path / "model", dtype="float32", max_positions=192))
    with LLM(tmp_path / "model", device="cpu", threads=1, kv_tokens=1024, quantization="none") as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-qwen2", "tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-olmo2", "tiny-granite"]
)
def test_rounded_models_give_the_tokens_of_the_dequantized_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, QK-norms, norms behind blocks and GELU. Batches of more than two rows expand the weights."""
    monkeypatch.setattr(groupwise, "MAX_GROUPWISE_ROWS", 2)
    model = in_groups_of_32(name)
    quantize_decoder(model, "int4")
    expected = on_cpu(dequantized(model))
    llm, device = on_kernels(name, model=in_groups_of_32(name), quantization="int4")
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        assert device.stats.passes > 4


def test_rounding_takes_the_largest_group_that_divides_all_matrices() -> None:
    assert rounding_group(shape("qwen3-14b"), INT4) == 128
    assert rounding_group(vary(shape("qwen3-14b"), ffn=Dense(size=17408 + 32)), INT4) == 32
    with pytest.raises(ConfigError, match="quantization is 'int4' and matrices have 5120, 17424 columns"):
        rounding_group(vary(shape("qwen3-14b"), ffn=Dense(size=17424)), INT4)


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int4' and the model has a mixture of experts"):
        plan_of(shape("tiny-qwen3-moe"), "cuda", quantization="int4")


def test_every_number_of_rows_has_a_tile() -> None:
    """Those that `kernel_variants` lists are all."""
    for gated in (False, True):
        listed = {groupwise.groupwise_tuning(rows, gated) for rows in groupwise.TUNED_ROWS}
        assert {
            groupwise.groupwise_tuning(rows, gated) for rows in range(1, groupwise.MAX_GROUPWISE_ROWS + 1)
        } == listed
        assert all(one.block_n * (2 if gated else 1) % (16 * one.num_warps) == 0 for one in listed)
