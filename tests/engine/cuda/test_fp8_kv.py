"""An FP8 KV cache on the CUDA executor, in the interpreter: tokens are those of a CPU executor that rounds its KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cluster.kv_protocol import layout_of
from paceline.config import ConfigError, EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cpu.attention import CpuAttention
from paceline.engine.cpu.inputs import SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.rounded_kv import calibrated_scales, rounding
from paceline.engine.cuda.kv_scales import HEADROOM, calibrate, calibration_ids, scales_digest, scales_for
from paceline.engine.engine import ModelInfo
from paceline.engine.precision import Precision
from paceline.kernels.fp8 import FP8, FP8_MAX, to_fp8_reference
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.text.synthetic import synthetic_tokenizer
from tests.engine.cuda.interpreted import BASE, IN_BOUNDS, INTERPRETED, PROMPTS, decoder, on_kernels
from tests.engine.cuda.interpreted import GREEDY as FOUR
from tests.engine.cuda.test_kv_transfer import make
from tests.resolving import resolved

pytestmark = [*INTERPRETED, IN_BOUNDS]

GREEDY = replace(FOUR, max_tokens=3)
SCALES = torch.exp2(torch.arange(8).view(2, 2, 2) % 5 - 6.0)  # of two layers with two KV heads


def expected(name: str, prompts: list[list[int]], scales: torch.Tensor) -> list[list[int]]:
    model = decoder(name)
    forward = model.forward
    model.forward = lambda ids, positions, attend, lora: forward(  # type: ignore
        ids, positions, rounding(attend, scales), lora
    )
    tokenizer = synthetic_tokenizer(model.spec.vocab_size)
    engine = assemble(model, tokenizer, EngineConfig(device="cpu", threads=1, overlap="off"), BASE)
    with LLM.from_engine(engine) as llm:
        return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny-qwen3", {"num_pages": 96, "shared_reads": True}),
        ("tiny-qwen2", {}),
        ("tiny-qwen3", {"draft_tokens": 3}),
        ("tiny-qwen3", {"num_pages": 7, "num_host_pages": 24, "max_swap_pages": 3, "max_running": 1}),
    ],
    ids=["shared", "windows", "drafts", "host"],
)
def test_tokens_are_those_of_rounded_keys_and_values(name: str, options: dict[str, Any]) -> None:
    """In prefill, mixed and decode batches, with cache hits, shared reads, drafts and pages from host memory."""
    wanted = expected(name, PROMPTS, SCALES)
    llm, device = on_kernels(name, fp8_kv=True, **options)
    assert device.attention.scales is not None and device.kv_dtype is FP8
    device.attention.scales.copy_(SCALES)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        numbers = (0, 3, 0) if device.swap is not None else (0,)
        again = [llm.generate([PROMPTS[number]], GREEDY)[0] for number in numbers]
        assert [one.token_ids for one in again] == [wanted[number] for number in numbers]
        assert any(one.num_cached_tokens for one in again)


def test_scales_are_those_of_the_largest_numbers_of_each_head() -> None:
    """Found by the kernels' model and by the decoder, of the same weights."""
    model = decoder("tiny-qwen3")
    for layer in model.layers:
        layer.qkv.weight[-16:] *= 50  # values of the last head
    tables, cache = SlotTables(1, 32, 4), KVCache(model.spec, 8, 4, model.dtype)
    tables.pages[0] = np.arange(8)
    inputs = tables.row_inputs(np.zeros(1, np.int64), np.array([0]), np.array([32]))
    attend = CpuAttention(cache, model.spec).begin(inputs)
    wanted = torch.stack(calibrated_scales(model, calibration_ids(model.spec, 32), attend))
    llm, device = on_kernels("tiny-qwen3", model=model, fp8_kv=True)
    with llm:
        found = calibrate(device.model)
        assert torch.equal(found, wanted) and (found[:, 1, 1] >= 16 * found[:, 1, 0]).all()
        assert device.attention.scales is not None and (device.attention.scales == 1).all()
        before = device.kv_scales
        device.warm_up()
        assert torch.equal(device.attention.scales, wanted) and device.kv_scales == scales_digest(wanted) != before


def test_scales_of_the_checkpoint_are_used() -> None:
    """And those of the weights that replace it."""
    model, other = decoder("tiny-qwen3"), decoder("tiny-qwen3")
    model.kv_scales = torch.tensor([0.03, 0.4, 1.7, 0.002]).view(2, 2, 1)
    other.kv_scales = model.kv_scales * 3
    wanted = expected("tiny-qwen3", PROMPTS[:1], model.kv_scales.expand(-1, -1, 2))
    on_cpu = calibrated_scales(model, calibration_ids(model.spec, 8), lambda *_: pytest.fail("not needed"))
    assert torch.equal(torch.stack(on_cpu), model.kv_scales.expand(-1, -1, 2))
    llm, device = on_kernels("tiny-qwen3", model=model, fp8_kv=True)
    with llm:
        device.warm_up()
        assert device.attention.scales is not None
        assert torch.equal(device.attention.scales, model.kv_scales.expand(-1, -1, 2))
        assert [output.token_ids for output in llm.generate(PROMPTS[:1], GREEDY)] == wanted
        device.load_weights(other)
        assert torch.equal(device.attention.scales, other.kv_scales.expand(-1, -1, 2))


def test_a_scale_is_a_power_of_two_that_leaves_headroom() -> None:
    largest = torch.tensor([0.001, 1.0, 300.0, FP8_MAX / HEADROOM, 0.0, torch.inf, torch.nan])
    scales = scales_for(largest)
    assert torch.equal(scales.log2(), scales.log2().round())
    finite = largest[:4] * HEADROOM / scales[:4]
    assert (finite <= FP8_MAX).all() and (finite > FP8_MAX / 2).all()
    assert scales[3:].tolist() == [1, 1, 1, 1]
    assert to_fp8_reference(largest[:4] * HEADROOM, scales[:4]).float().max() <= FP8_MAX


def test_pages_take_half_the_bytes_of_16_bits() -> None:
    _, device = on_kernels("tiny-qwen3", fp8_kv=True, num_host_pages=3, max_swap_pages=1)
    (kv,) = device.kv
    assert kv.nbytes == device.model.spec.kv_bytes_per_token(1) * 64 * 4
    assert device.swap is not None and sum(block.nbytes for block in device.swap._blocks) == kv.nbytes * 3 // 64
    precision = Precision.of(EngineConfig(kv_dtype="fp8_e4m3"), "bfloat16")
    assert precision.kv_bytes(torch.bfloat16) == 1 and precision.kv_name == "fp8_e4m3"
    assert Precision.of(EngineConfig(), "bfloat16").kv_bytes(torch.bfloat16) == 2


@pytest.mark.parametrize(
    ("given", "device", "dtype", "error"),
    [
        ("fp8_e4m3", "cpu", "float32", "kv_dtype is 'fp8_e4m3', which needs a GPU"),
        ("bfloat16", "cuda", "float16", "kv_dtype is 'bfloat16' and dtype is 'float16'"),
    ],
)
def test_a_kv_dtype_that_does_not_fit_is_refused(given: str, device: str, dtype: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        resolved(shape("tiny-qwen3"), device, kv_dtype=given, dtype=dtype)


def test_engines_exchange_kv_of_the_same_type_and_scales_only() -> None:
    engines = [make("prefill"), make("decode")]
    layouts = []
    for engine, info in zip(
        engines, (ModelInfo(kv_dtype="float8_e4m3fn", kv_scales="a"), ModelInfo(kv_dtype="bfloat16")), strict=True
    ):
        engine.info = info
        layouts.append(layout_of(engine, "m"))
        engine.close()
    assert layouts[0].differences(layouts[1]) == (
        "kv_dtype is 'float8_e4m3fn' here and 'bfloat16' there, kv_scales is 'a' here and '' there"
    )
