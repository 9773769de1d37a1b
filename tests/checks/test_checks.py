"""The checks themselves, in small: that they pass on a right engine and fail on a wrong one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import checks
from paceline.checks import Lab
from paceline.checks import soak as soaking
from paceline.checks.harness import Clocked
from paceline.config import ConfigError
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cuda.swap import CudaSwap
from paceline.kernels._triton import HAS_TRITON
from paceline.model.spec import ModelSpec
from paceline.sampling.sampler import Sampler
from tests.checks.kernels import assemble_kernels

CPU = torch.device("cpu")
LAB = Lab("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 8192})
KERNELS = Lab("tiny-qwen3", CPU, "float32", {}, assemble_kernels, num_layers=1)
interpreted = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(), reason="the interpreter is for machines with triton and no GPU"
)
SMALL: dict[str, Any] = {"longest": 40, "num_tokens": (2, 6)}


def unlike_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the CPU's executor: in a batch every other row takes its second best token."""
    sample = Sampler.sample

    def second_best(self: Sampler, logits: torch.Tensor, *args: Any) -> np.ndarray:
        if len(logits) > 1:
            logits = logits.clone()
            logits[::2].scatter_(1, logits[::2].argmax(-1, keepdim=True), -torch.inf)
        return sample(self, logits, *args)

    monkeypatch.setattr(Sampler, "sample", second_best)


def test_check_passes_and_says_what_it_found() -> None:
    verdict = checks.check_tokens(LAB, count=20, **SMALL)
    assert verdict.passed, verdict.text
    assert "of 22 outputs as with overlap off: {'on': 22, 'sync': 22}" in verdict.text


def test_alone_passes_on_a_right_engine_and_fails_on_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = checks.check_alone(LAB, batch=12, some=4, **SMALL)
    assert verdict.passed and "4 outputs equal" in verdict.text, verdict.text
    unlike_alone(monkeypatch)
    assert not checks.check_alone(LAB, batch=12, some=4, **SMALL).passed


CHATS: dict[str, Any] = {"chats": 4, "turns": 3, "longest": 60, "num_tokens": 4, "kv_tokens": 128}


def test_swap_passes_on_a_right_engine_and_fails_on_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab("tiny-qwen3", CPU, "float32", {"threads": 1, "page_size": 4})
    verdict = checks.check_swap(lab, **CHATS)
    assert verdict.passed, verdict.text
    monkeypatch.setattr(KVCache, "swap", lambda self, swap: None)
    assert not checks.check_swap(lab, **CHATS).passed


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_right", [True, False])
def test_swap_compares_pages_on_kernels(monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    if not is_right:  # pages come back in another order
        fetch = CudaSwap.fetch
        monkeypatch.setattr(CudaSwap, "fetch", lambda self, pages, hosts, *rest: fetch(self, pages, hosts[::-1], *rest))
    lab = replace(KERNELS, assemble=partial(assemble_kernels, num_pages=12))
    verdict = checks.check_swap(lab, chats=2, turns=2, longest=40, num_tokens=2, kv_tokens=48)
    assert verdict.passed == is_right, verdict.text
    assert " 0 of them wrong" in verdict.text or not is_right


def test_soak_counts_what_happened() -> None:
    options = {"live": 16, "running": 8, "longest": 60, "num_tokens": 20}
    lab = Lab("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 800, "page_size": 4})
    verdict = checks.check_soak(lab, 2.0, **options)
    assert verdict.passed, verdict.text
    assert " 0 faults" in verdict.text and "abort" in verdict.text and "stop" in verdict.text


def test_soak_fails_when_the_books_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(scheduler: Any) -> None:
        raise AssertionError("a page has two owners")

    monkeypatch.setattr(soaking, "check_invariants", leak)
    verdict = checks.check_soak(LAB, 0.2, live=8, running=4, longest=40, num_tokens=8)
    assert not verdict.passed and "the engine failed: a page has two owners" in verdict.text


def test_soak_fails_when_tokens_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clocked, "put", _forgetful(Clocked.put))
    verdict = checks.check_soak(LAB, 0.5, live=8, running=4, longest=40, num_tokens=8)
    assert not verdict.passed and "ended by length with" in verdict.text


def _forgetful(put: Any) -> Any:
    def forgetting(self: Any, piece: Any) -> None:
        put(self, piece)
        del self.tokens[1:2]

    return forgetting


def test_long_gives_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    lab = Lab("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 32_768})
    verdict = checks.check_inter_token_latency(lab, running=4, prompt_tokens=600, num_prompts=2, quiet_tokens=40)
    assert (
        "4 running, 2 prompts of 600 tokens; chunk_tokens 512, max_batch_tokens 1024, itl_target None" in verdict.text
    )
    ratio = float(verdict.text.split(" ms (")[1].split("x)")[0])
    assert verdict.passed == (ratio <= 2)
    assert ("itl_target 0." in capsys.readouterr().out) == (not verdict.passed)


def test_long_refuses_prompts_that_do_not_fit() -> None:
    with pytest.raises(Exception, match="context"):
        checks.check_inter_token_latency(LAB, running=1, prompt_tokens=3000, num_prompts=1, quiet_tokens=4)


def test_long_needs_a_slot_for_the_prompts() -> None:
    lab = Lab("tiny-qwen3", CPU, "float32", {"threads": 1, "kv_tokens": 32_768, "max_running": 4})
    with pytest.raises(ConfigError, match="running is 4 and max_running 4: the prompts need a slot"):
        checks.check_inter_token_latency(lab, running=4, prompt_tokens=600, num_prompts=1, quiet_tokens=4)


def test_a_check_without_a_shape_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="give a shape and no model"):
        checks.check_tokens(Lab("", CPU))
    with pytest.raises(ConfigError, match="logits looks into the CUDA executor"):
        checks.check_logits(LAB)


def test_the_sanitizer_is_run_if_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tool = tmp_path / "bin" / "compute-sanitizer"
    if not list(Path("/usr/local").glob("cuda*/bin/compute-sanitizer")):
        assert checks.run_sanitizer(["true"]) == (None, "this host has no compute-sanitizer")
    tool.parent.mkdir()
    for errors, status in ((0, 0), (2, 3)):
        tool.write_text(f"#!/bin/sh\necho '========= ERROR SUMMARY: {errors} errors'\nexit {status}\n")
        tool.chmod(0o755)
        verdict = checks.run_sanitizer(["true"])
        assert verdict.passed == (errors == 0) and f"ERROR SUMMARY: {errors} errors" in verdict.text


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_logits_on_kernels_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = checks.check_logits(KERNELS, count=2, longest=20, num_tokens=2)
    assert verdict.passed, verdict.text
    weights = Lab.weights

    def others(lab: Lab, spec: ModelSpec, dtype: str | None = None) -> dict[str, torch.Tensor]:
        made = weights(lab, spec, dtype)
        return made if dtype is None else {name: weight * 1.02 for name, weight in made.items()}

    monkeypatch.setattr(Lab, "weights", others)  # of transformers alone
    assert not checks.check_logits(KERNELS, count=1, longest=9, num_tokens=1).passed


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tiny_runs_on_kernels() -> None:
    verdict = checks.run_tiny(KERNELS)
    assert verdict.passed, verdict.text
