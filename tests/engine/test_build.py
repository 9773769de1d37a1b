"""Engine options and KV cache sizing: every option takes effect or is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.config import ConfigError, EngineConfig, SchedulerConfig, split_options
from paceline.engine import kv_sizing
from paceline.engine.build import build_engine
from paceline.engine.build.resolution import scheduler_config, why_no_drafts
from paceline.engine.engine import Engine
from paceline.engine.kv_sizing import UnitBytes, check_models_fit, num_kv_pages
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.model.spec import ModelError
from paceline.request import Refused, SamplingParams
from tests.moving_average import recurrent_spec

RANDOM: dict[str, Any] = {"load": "random", "shape": "tiny-llama", "threads": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**RANDOM, "max_runing": 3}, "unknown option 'max_runing': did you mean max_running or max_waiting?"),
        ({**RANDOM, "zzz": 3}, "unknown option 'zzz': options are: background_tenants, batching,"),
        ({"load": "random", "shap": "tiny-llama"}, "unknown option 'shap': did you mean shape"),
        ({**RANDOM, "max_model_len": 64}, "unknown option 'max_model_len': here it is called context_tokens"),
        (
            {**RANDOM, "gpu_memory_utilization": 0.9},
            "unknown option 'gpu_memory_utilization': here it is called kv_memory_fraction",
        ),
        ({"model": 5}, "model is 5: give a folder, a .gguf file or a Hugging Face id."),
        ({"model": b"x"}, "model is b'x': give a folder, a .gguf file or a Hugging Face id."),
        ({"model": ""}, "model is '': give a folder, a .gguf file or a Hugging Face id."),
        ({**RANDOM, "seed": "a"}, "seed is 'a': expected an integer."),
        ({**RANDOM, "draft_tokens": 2}, "draft_tokens is 2, which is not supported: set speculate instead."),
        ({**RANDOM, "overlap": "yes"}, "overlap is 'yes': choose one of on, off, sync."),
        ({**RANDOM, "dtype": "int4"}, "dtype is 'int4': choose one of auto, float32, bfloat16, float16."),
        ({**RANDOM, "threads": 0}, "threads is 0: must be at least 1."),
        ({**RANDOM, "context_tokens": 9999}, "context_tokens is 9999, more than the model's 2048"),
        ({**RANDOM, "context_tokens": "many"}, "context_tokens is 'many': expected an integer."),
        ({**RANDOM, "kv_tokens": 64, "num_pages": 4}, "kv_tokens is 64 and num_pages is 4: give one of them."),
        ({**RANDOM, "kv_tokens": 10**10}, "kv_tokens is 10000000000, which takes"),
        ({**RANDOM, "num_pages": 10**9}, "num_pages is 1000000000, which takes"),
        ({**RANDOM, "num_pages": 10**12}, "num_pages is 1000000000000: must be at most 2147483647."),
        ({**RANDOM, "kv_tokens": 3}, "kv_tokens is 3, less than a page of 16 tokens: give at least 16"),
        ({"executor": "virtual", "kv_tokens": 3}, "kv_tokens is 3, less than a page of 16 tokens: give at least 16"),
        ({**RANDOM, "kv_tokens": 40, "page_size": 64}, "less than a page of 64 tokens: give at least 64"),
        (
            {**RANDOM, "kv_tokens": 16, "pin_quota_pages": 2},
            "kv_tokens is 16, less than a page of 16 tokens beside pin_quota_pages = 2: give at least 48",
        ),
        ({"executor": "virtual", "kv_tokens": 10**13}, "kv_tokens is 10000000000000: must be at most 34359738352."),
        ({"executor": "virtual", "page_size": 0}, "page_size is 0: must be at least 1."),
        ({"load": "random"}, "load is 'random' and no shape is given"),
        ({"load": "magic"}, "load is 'magic': choose one of weights, random."),
        ({"shape": "tiny-llama"}, "shape is 'tiny-llama', which requires load='random'"),
        ({**RANDOM, "model": "x"}, "model is 'x' and load is 'random'"),
        ({**RANDOM, "shape": "huge"}, "shape is 'huge', which is not known"),
        ({"model": "/nowhere/at/all"}, "model is '/nowhere/at/all', which does not exist"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.escape(message)):
        build_engine(**options)


@pytest.mark.parametrize(
    "options",
    [{"kv_tokens": 16}, {"kv_tokens": 48, "pin_quota_pages": 2}, {"kv_tokens": 200_000, "pin_quota_pages": 5000}],
)
@pytest.mark.parametrize("kind", [RANDOM, {"executor": "virtual"}], ids=["model", "virtual"])
def test_the_smallest_kv_cache_that_an_error_names_works(kind: dict[str, Any], options: dict[str, Any]) -> None:
    with LLM(**kind, **options) as llm:
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=14, ignore_eos=True))[0].token_ids) == 14
        with pytest.raises(Refused, match=r"more than the KV memory for|more than the context of"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=400_000))


@pytest.mark.parametrize(
    ("make", "options", "target"),
    [
        (build_engine, {"executor": "virtual"}, 0.125),
        (build_engine, {**RANDOM, "kv_tokens": 4096}, math.inf),
        (build_engine, {**RANDOM, "kv_tokens": 4096, "itl_target": 0.5}, 0.5),
        (lambda **options: LLM(**options).engine, {"executor": "virtual"}, math.inf),
        (lambda **options: LLM(**options).engine, {"executor": "virtual", "itl_target": 0.5}, 0.5),
    ],
    ids=["GPU", "CPU", "CPU, given", "offline", "offline, given"],
)
def test_itl_target_has_a_default_where_requests_are_served_by_a_gpu(
    make: Callable[..., Engine], options: dict[str, Any], target: float
) -> None:
    engine = make(**options)
    assert engine.scheduler.config.itl_target == target
    engine.close()


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({}, True),
        ({"max_batch_tokens": 128}, False),  # as many as 64 rows, without drafts
        ({"max_running": 4, "max_batch_tokens": 32}, True),
        ({"max_running": 4, "max_batch_tokens": 31}, False),
        ({"pp": 2}, False),
        ({"executor": "virtual"}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "max_batch_tokens": 4096}, True),
        ({"device": "cuda", "max_batch_tokens": 4095}, False),
        ({"device": "cuda", "tp": 2}, False),
        ({"device": "cuda", "quantization": "fp8"}, True),
        ({"device": "cuda", "kv_dtype": "fp8_e4m3"}, True),
    ],
    ids=str,
)
def test_drafts_are_the_default_where_they_fit(options: dict[str, Any], drafts: bool) -> None:
    engine_options, given = split_options(options, ())
    config = EngineConfig(**engine_options)
    device = "virtual" if config.executor == "virtual" else "cuda" if config.device == "cuda" else "cpu"
    assert (why_no_drafts(config, given, device) is None) is drafts


def test_kv_memory_follows_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = shape("smollm2-135m")
    monkeypatch.setattr(kv_sizing, "free_memory", lambda: 2**30)
    per_token, units = 2 * 30 * 3 * 64 * 4, UnitBytes.of(16, [(spec, 4)])
    config = SchedulerConfig(context_tokens=8192)
    pages = num_kv_pages(EngineConfig(kv_memory_fraction=0.5), units, config, {})
    assert pages == 2**29 // per_token // 16
    assert num_kv_pages(EngineConfig(kv_tokens=1000), units, config, {}) == 62
    monkeypatch.setattr(kv_sizing, "free_memory", lambda: 2**20)
    with pytest.raises(ConfigError, match="choose a smaller model, free some memory, or raise kv_memory_fraction"):
        num_kv_pages(EngineConfig(), units, config, {})
    with pytest.raises(ConfigError, match=r"parameters take .*, but only .* of memory are free"):
        check_models_fit([spec], 4 * spec.num_parameters)


def test_pages_have_the_memory_that_states_leave() -> None:
    config = SchedulerConfig(context_tokens=1000, max_running=10)
    half, page = EngineConfig(kv_memory_fraction=0.5), {"num_pages": 5}
    assert num_kv_pages(half, UnitBytes(page=1600, state=3000), config, {}, free=30_000 + 320_000) == 100
    assert num_kv_pages(half, UnitBytes(page=1600, state=3000), config, page, free=38_000) == 5
    with pytest.raises(ConfigError, match=r"^num_pages is 5, which takes .* free: lower it to 4 or less"):
        num_kv_pages(half, UnitBytes(page=1600, state=3000), config, page, free=37_999)
    with pytest.raises(ConfigError, match=r"^max_running is 10: the states of so many .* lower it to 9 or less"):
        num_kv_pages(half, UnitBytes(page=1600, state=3000), config, {}, free=29_999)


def test_no_engine_is_built_with_a_prefix_cache_of_states() -> None:
    with pytest.raises(ConfigError, match=r"^prefix_cache is True and the model has layers with a state, from which"):
        scheduler_config(recurrent_spec(), {"prefix_cache": True}, "cpu")
    assert not scheduler_config(recurrent_spec(), {}, "cpu").prefix_cache


def test_pages_without_kv_cost_no_memory_and_are_enough_for_all_requests() -> None:
    config = SchedulerConfig(context_tokens=1000, max_running=100)
    units = UnitBytes.of(16, [(recurrent_spec(), 4)])
    assert units == (0, 4 * 1024)
    assert num_kv_pages(EngineConfig(), units, config, {}, free=100 * units.state) == 100 * 63
    assert num_kv_pages(EngineConfig(), units, config, {"num_pages": 7}, free=100 * units.state) == 7


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 uses BLAS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_dtypes_run(dtype: str) -> None:
    with LLM(**RANDOM, dtype=dtype, kv_tokens=1024) as llm:
        outputs = llm.generate([[5, 6, 7], [8] * 40, [9, 10]], SamplingParams(temperature=0, max_tokens=5))
        assert all(output.token_ids for output in outputs)
        assert llm.engine.executor.runner.cache.keys[0].dtype == getattr(torch, dtype)  # type: ignore[attr-defined]


def test_without_memory_for_a_packed_copy_weights_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for a packed copy, the tokens are the same."""
    prompts, params = [[5, 6, 7], [8] * 40, [9, 10]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(**RANDOM, kv_tokens=1024) as llm:
        expected = llm.generate(prompts, params)
    monkeypatch.setattr("paceline.engine.cpu.linear.free_memory", lambda: 0)
    with LLM(**RANDOM, kv_tokens=1024) as llm:
        decoder = llm.engine.executor.runner.decoder  # type: ignore[attr-defined]
        assert decoder.head._packed is None
        found = llm.generate(prompts, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but .*: choose device cpu, or install what is missing"):
        build_engine(**{**RANDOM, "device": "cuda"})
