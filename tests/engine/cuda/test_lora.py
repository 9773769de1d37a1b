"""Adapters on the CUDA executor, in Triton's interpreter: the tokens of the CPU executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.linear import groupwise
from paceline.engine.linear.dense import DenseLinear
from paceline.engine.linear.pack import quantize_decoder
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelSpec
from paceline.request import InvalidRequest, SamplingParams
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import BASE, IN_BOUNDS, INTERPRETED, PROMPTS, decoder, on_kernels
from tests.engine.cuda.test_int4 import dequantized, in_groups_of_32
from tests.oracle.adapters import ALL, adapted_shapes, write_adapter

pytestmark = [*INTERPRETED, IN_BOUNDS]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
NAMES = ["a", "", "b"]


def write_adapters(folder: Path, spec: ModelSpec) -> dict[str, Path]:
    """Of different ranks, and b of some matrices only."""
    for name, rank, targets in (("a", 3, ALL), ("b", 16, ("v_proj", "o_proj", "up_proj"))):
        write_adapter(folder / name, adapted_shapes(spec, targets), rank=rank, seed=rank)
    return {"a": folder / "a", "b": folder / "b"}


def run(llm: LLM, folders: dict[str, Path], names: list[str] | None = None) -> list[list[int]]:
    for name, folder in folders.items():
        llm.load_lora_adapter(name, folder)
    return [output.token_ids for output in llm.generate(PROMPTS[:3], GREEDY, lora=names or NAMES)]


def expected(name: str | Decoder, folders: dict[str, Path], names: list[str] | None = None) -> list[list[int]]:
    reference = decoder(name) if isinstance(name, str) else name
    engine = assemble(
        reference, synthetic_tokenizer(reference.spec.vocab_size), EngineConfig(threads=1, overlap="off"), BASE
    )
    with LLM.from_engine(engine) as llm:
        return run(llm, folders, names)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny-qwen3", {"prefill_sizes": (16,)}),
        ("tiny-qwen3", {"slots": 1, "draft_tokens": 2}),
        ("tiny-gemma2", {"chunk_tokens": 32}),
    ],
    ids=["graphs", "one slot, drafts", "norms after blocks"],
)
@pytest.mark.usefixtures("graphs_at_first_use")
def test_kernels_with_adapters_give_the_tokens_of_the_cpu(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folders = write_adapters(tmp_path, decoder(name).spec)
    lora = {"max_loras": options.pop("slots", 3), "max_lora_rank": 16}
    wanted, plain = expected(name, folders), expected(name, {}, [""] * 3)
    assert wanted != plain
    llm, device = on_kernels(name, lora=lora, **options)
    with llm:
        assert run(llm, folders) == wanted
        assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == plain[0]
        keys = [key for _, key in device.graphs._graphs]
        assert {key.lora for key in keys} == {True, False}  # a batch without adapters has a graph without them


@pytest.mark.parametrize("quantization", ["int4", "q8", "q4"])
@pytest.mark.parametrize("max_rows", [2, 224])  # with more the matrices are expanded
def test_adapters_are_added_to_packed_matrices(
    quantization: str, max_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the dequantized model on a CPU."""
    monkeypatch.setattr(groupwise, "MAX_GROUPWISE_ROWS", max_rows)
    reference = in_groups_of_32("tiny-gemma2")
    folders = write_adapters(tmp_path, reference.spec)
    quantize_decoder(reference, quantization)
    wanted = expected(dequantized(reference), folders)
    llm, _ = on_kernels(
        "", model=in_groups_of_32("tiny-gemma2"), lora={"max_loras": 3, "max_lora_rank": 16}, quantization=quantization
    )
    with llm:
        assert run(llm, folders) == wanted


def test_what_does_not_fit_into_the_slots_is_refused(tmp_path: Path) -> None:
    folders = write_adapters(tmp_path, decoder("tiny-qwen3").spec)
    llm, _ = on_kernels("tiny-qwen3", lora={"max_loras": 1, "max_lora_rank": 8})
    with llm, pytest.raises(InvalidRequest, match="has rank 16, and memory was allocated for ranks up to 8"):
        run(llm, folders)
    llm, device = on_kernels("tiny-qwen3")
    with llm, pytest.raises(InvalidRequest, match="has no memory for LoRA adapters: start it with max_lora_rank"):
        run(llm, folders)
    assert device.model.lora is None and isinstance(device.model.layers[0].qkv, DenseLinear)


def test_adapters_follow_weights_that_are_replaced(tmp_path: Path) -> None:
    folders, found = write_adapters(tmp_path, decoder("tiny-qwen3").spec), []
    for is_replaced in (False, True):
        other = decoder("tiny-qwen3")
        for layer in other.layers:
            assert layer.attention_norm is not None and layer.mlp_norm is not None
            layer.attention_norm.weight.mul_(1.5)
            layer.mlp_norm.weight.copy_(layer.mlp_norm.weight.flip(0))
        model = decoder("tiny-qwen3") if is_replaced else other
        llm, device = on_kernels("tiny-qwen3", model=model, lora={"max_loras": 2, "max_lora_rank": 16})
        with llm:
            for name, folder in folders.items():
                llm.load_lora_adapter(name, folder)
            if is_replaced:
                llm.generate(PROMPTS[1], GREEDY, lora="a")
                device.load_weights(other)
                llm.engine.call(lambda scheduler: scheduler.flush_cache()).result()
            found.append(llm.generate(PROMPTS[1], GREEDY, lora="a")[0].token_ids)
    assert found[0] == found[1]
