from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paceline.scheduler.step_time import StepTime, StepTimeFit


@dataclass
class Features:
    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int


def observe(fit: StepTimeFit, truth: StepTime, count: int, noise: float = 0.0) -> None:
    rng = random.Random(0)
    for _ in range(count):
        features = Features(rng.randrange(4096), rng.randrange(256), rng.randrange(300_000))
        seconds = truth.of(features)  # type: ignore[arg-type]
        fit.observe(features, seconds * (1 + noise * rng.uniform(-1, 1)))  # type: ignore[arg-type]


def test_the_fit_finds_the_true_coefficients() -> None:
    truth = StepTime(1e-3, 2e-6, 5e-6, 3e-8)
    fit = StepTimeFit()
    assert fit.model() is None
    observe(fit, truth, 300)
    model = fit.model()
    assert model is not None
    assert model.base == pytest.approx(truth.base, rel=0.01)
    assert model.per_prefill_token == pytest.approx(truth.per_prefill_token, rel=0.01)
    assert model.per_decode == pytest.approx(truth.per_decode, rel=0.01)
    assert model.per_context_token == pytest.approx(truth.per_context_token, rel=0.01)


def test_coefficients_are_never_negative() -> None:
    fit = StepTimeFit()
    observe(fit, StepTime(1e-3, 2e-6, 0.0, 0.0), 40, noise=0.9)
    model = fit.model()
    assert model is not None
    assert min(model.base, model.per_prefill_token, model.per_decode, model.per_context_token) >= 0


def test_old_passes_are_forgotten() -> None:
    fit = StepTimeFit()
    observe(fit, StepTime(1e-3, 2e-6, 5e-6, 3e-8), 500)
    observe(fit, StepTime(2e-3, 4e-6, 10e-6, 6e-8), 5000)
    model = fit.model()
    assert model is not None
    assert model.base == pytest.approx(2e-3, rel=0.02)


def test_prefill_tokens_within_is_the_largest_number_within_the_target() -> None:
    model = StepTime(1e-3, 1e-6, 1e-5, 0.0)
    assert model.prefill_tokens_within(3e-3, 100, 0) == 1000
    assert model.prefill_tokens_within(1e-3, 100, 0) == 0
    assert StepTime(1e-3, 0.0, 1e-5, 0.0).prefill_tokens_within(1e-3, 1, 0) is None
