"""Every check passes on a correct engine and fails on a broken one. Small models on the CPU."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import checks
from paceline.checks import CheckSetup
from paceline.checks import soak as soaking
from paceline.checks.harness import TimedSink
from paceline.checks.rank_judge import JudgedRow, RankJudge
from paceline.config import ConfigError
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cuda.inputs import PlanPacker
from paceline.engine.cuda.swap import CudaSwap
from paceline.kernels._triton import HAS_TRITON
from paceline.llm import LLM
from paceline.model.spec import ModelSpec
from paceline.sampling.sampler import Sampler
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan
from tests.checks.kernels import assemble_kernels

CPU = torch.device("cpu")
SETUP = CheckSetup("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 8192})
KERNELS = CheckSetup("tiny-qwen3", CPU, "float32", {}, assemble_kernels, num_layers=1)
interpreted = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(), reason="the interpreter is for machines with triton and no GPU"
)
SMALL: dict[str, Any] = {"longest": 40, "num_tokens": (2, 6)}


def break_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the CPU executor: in a batch every other row takes its second best token."""
    sample = Sampler.sample

    def second_best(self: Sampler, logits: torch.Tensor, *args: Any) -> np.ndarray:
        if len(logits) > 1:
            logits = logits.clone()
            logits[::2].scatter_(1, logits[::2].argmax(-1, keepdim=True), -torch.inf)
        return sample(self, logits, *args)

    monkeypatch.setattr(Sampler, "sample", second_best)


def test_check_passes_and_reports_what_it_compared() -> None:
    result = checks.check_tokens(SETUP, count=20, **SMALL)
    assert result.passed, result.text
    assert "outputs of 22 equal to overlap off: {'on': 22, 'sync': 22}" in result.text


@pytest.mark.cluster
def test_tensor_parallel_passes_and_reports_every_way_of_communicating(monkeypatch: pytest.MonkeyPatch) -> None:
    result = checks.check_tensor_parallel(SETUP, count=4, **SMALL)
    assert result.passed and "PASS    tp 2, gloo" in result.text and "NOT RUN tp 1, NCCL" in result.text, result.text
    break_batches(monkeypatch)  # of rank 0, and of the engine without ranks
    assert not checks.check_tensor_parallel(SETUP, count=4, **SMALL).passed


@pytest.mark.cluster
def test_pipeline_parallel_passes_and_reports_every_number_of_stages() -> None:
    result = checks.check_pipeline_parallel(SETUP, count=4, **SMALL)
    assert result.passed and "NOT RUN pp 2, NCCL: needs 2 GPUs" in result.text, result.text
    assert all(f"PASS    pp {size}, gloo" in result.text for size in (2, 3)), result.text
    assert result.text.count("10 of 10 outputs equal") == 3, "in float32 stages add in the same order as one"


def test_a_row_of_ranks_that_does_not_end_fails_and_is_the_last() -> None:
    may_end = threading.Event()

    def stuck() -> LLM:
        may_end.wait()
        raise RuntimeError("it ends with the test")

    judge = RankJudge(SETUP, count=1, **SMALL)
    result = judge.results([JudgedRow("pp 2", stuck), JudgedRow("pp 3", stuck)], time_limit=0.01)
    may_end.set()
    assert result.passed is False and "FAIL    pp 2: no result after 0.01 s" in result.text
    assert "NOT RUN pp 3: the row before it did not end" in result.text


def test_alone_passes_on_a_correct_engine_and_fails_on_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = checks.check_alone(SETUP, batch=12, some=4, **SMALL)
    assert result.passed and "4 outputs equal" in result.text, result.text
    break_batches(monkeypatch)
    assert not checks.check_alone(SETUP, batch=12, some=4, **SMALL).passed


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_right", [True, False])
def test_cosine_passes_on_a_correct_executor_and_fails_on_a_broken_one(
    monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    if not is_right:  # the chunks of other prompts of the batch are summed too
        right = PlanPacker._pooling

        def wrong(self: PlanPacker, plan: Plan, query_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows, ranges = right(self, plan, query_starts)
            ranges[::2] = 0
            return rows, ranges

        monkeypatch.setattr(PlanPacker, "_pooling", wrong)
    result = checks.check_embeddings(KERNELS, lengths=(1, 5, 18))
    assert result.passed == is_right and "3 texts of 1 to 18 tokens in float32" in result.text, result.text


def test_cosine_is_not_run_on_a_cpu() -> None:
    assert checks.check_embeddings(SETUP).passed is None


CHATS: dict[str, Any] = {"chats": 4, "turns": 3, "longest": 60, "num_tokens": 4, "kv_tokens": 128}


def test_swap_passes_on_a_correct_engine_and_fails_on_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = CheckSetup("tiny-qwen3", CPU, "float32", {"threads": 1, "page_size": 4})
    result = checks.check_swap(setup, **CHATS)
    assert result.passed, result.text
    monkeypatch.setattr(KVCache, "swap", lambda self, swap: None)
    assert not checks.check_swap(setup, **CHATS).passed


SMALL_UPDATE: dict[str, Any] = {"count": 3, "longest": 80, "num_tokens": 3, "long_tokens": 60}


def test_weights_passes_on_a_correct_engine_and_fails_on_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = checks.check_weights(SETUP, **SMALL_UPDATE)
    assert result.passed, result.text
    monkeypatch.setattr(Scheduler, "drop_kv", lambda self, now: 0)  # KV of the old weights is used again
    assert not checks.check_weights(SETUP, **SMALL_UPDATE).passed


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_compares_engines_on_kernels() -> None:
    result = checks.check_weights(KERNELS, **SMALL_UPDATE | {"long_tokens": 6, "count": 2, "longest": 12})
    assert result.passed, result.text


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_right", [True, False])
def test_swap_compares_pages_on_kernels(monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    if not is_right:  # pages are fetched in another order
        fetch = CudaSwap.fetch
        monkeypatch.setattr(CudaSwap, "fetch", lambda self, pages, hosts, *rest: fetch(self, pages, hosts[::-1], *rest))
    setup = replace(KERNELS, assemble=partial(assemble_kernels, num_pages=12))
    result = checks.check_swap(setup, chats=2, turns=2, longest=40, num_tokens=2, kv_tokens=48)
    assert result.passed == is_right, result.text
    assert " 0 of them wrong" in result.text or not is_right


def test_soak_passes_and_counts_finish_reasons() -> None:
    options = {"live": 16, "running": 8, "longest": 60, "num_tokens": 20}
    setup = CheckSetup("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 800, "page_size": 4})
    result = checks.check_soak(setup, 0.0, min_requests=120, **options)
    assert result.passed, result.text
    assert " 0 faults" in result.text and "abort" in result.text and "stop" in result.text


def test_soak_fails_when_an_invariant_is_violated(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(scheduler: Any) -> None:
        raise AssertionError("a page has two owners")

    monkeypatch.setattr(soaking, "check_invariants", leak)
    result = checks.check_soak(SETUP, 0.2, live=8, running=4, longest=40, num_tokens=8)
    assert not result.passed and "the engine failed: a page has two owners" in result.text


def test_soak_fails_when_tokens_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedSink, "put", _forgetful(TimedSink.put))
    result = checks.check_soak(SETUP, 0.0, live=8, running=4, longest=40, num_tokens=8, min_requests=30)
    assert not result.passed and re.search(r"[1-9]\d* faults: ", result.text), result.text


def _forgetful(put: Any) -> Any:
    def forgetting(self: Any, piece: Any) -> None:
        put(self, piece)
        del self.tokens[1:2]

    return forgetting


def test_long_reports_the_latency_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    setup = CheckSetup("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 32_768})
    result = checks.check_inter_token_latency(setup, running=2, prompt_tokens=520, num_prompts=2, quiet_tokens=8)
    assert "2 running, 2 prompts of 520 tokens; chunk_tokens 512, max_batch_tokens 1024, itl_target inf" in result.text
    ratio = float(result.text.split(" ms (")[1].split("x)")[0])
    assert result.passed == (ratio <= 2)
    assert ("itl_target 0." in capsys.readouterr().out) == (not result.passed)


def test_long_refuses_prompts_that_do_not_fit() -> None:
    with pytest.raises(Exception, match="context"):
        checks.check_inter_token_latency(SETUP, running=1, prompt_tokens=3000, num_prompts=1, quiet_tokens=4)


def test_long_refuses_to_run_without_a_free_slot() -> None:
    setup = CheckSetup("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 32_768, "max_running": 4})
    with pytest.raises(ConfigError, match="running is 4 and max_running is 4: the prompts need a slot"):
        checks.check_inter_token_latency(setup, running=4, prompt_tokens=600, num_prompts=1, quiet_tokens=4)


def test_a_check_without_a_shape_or_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a shape and no model"):
        checks.check_tokens(CheckSetup("", CPU))
    with pytest.raises(ConfigError, match="part logits needs the CUDA executor"):
        checks.check_logits(SETUP)


def test_the_sanitizer_runs_if_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tool = tmp_path / "bin" / "compute-sanitizer"
    if not list(Path("/usr/local").glob("cuda*/bin/compute-sanitizer")):
        assert checks.run_sanitizer(["true"]) == (None, "compute-sanitizer is not installed")
    tool.parent.mkdir()
    for errors, status in ((0, 0), (2, 3)):
        tool.write_text(f"#!/bin/sh\necho '========= ERROR SUMMARY: {errors} errors'\nexit {status}\n")
        tool.chmod(0o755)
        result = checks.run_sanitizer(["true"])
        assert result.passed == (errors == 0) and f"ERROR SUMMARY: {errors} errors" in result.text


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_logits_passes_on_kernels_and_fails_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    result = checks.check_logits(KERNELS, count=2, longest=20, num_tokens=2)
    assert result.passed, result.text
    weights = CheckSetup.weights

    def others(setup: CheckSetup, spec: ModelSpec, dtype: str | None = None) -> dict[str, torch.Tensor]:
        made = weights(setup, spec, dtype)
        return made if dtype is None else {name: weight * 1.02 for name, weight in made.items()}

    monkeypatch.setattr(CheckSetup, "weights", others)  # of transformers alone
    assert not checks.check_logits(KERNELS, count=1, longest=9, num_tokens=1).passed


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tiny_runs_on_kernels() -> None:
    result = checks.run_tiny(KERNELS)
    assert result.passed, result.text
