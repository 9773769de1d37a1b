from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.scheduler.step_time import MixedBatchTimes, StepTime, StepTimeFit


@dataclass
class Features:
    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    num_drafts: int = 0


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


def test_the_fit_is_renewed_every_16_passes() -> None:
    fit = StepTimeFit()
    observe(fit, StepTime(1e-3, 2e-6, 5e-6, 3e-8), 20)
    first = fit.model()
    observe(fit, StepTime(2e-3, 2e-6, 5e-6, 3e-8), 15)
    assert fit.model() is first
    observe(fit, StepTime(2e-3, 2e-6, 5e-6, 3e-8), 1)
    assert fit.model() is not first


# ---------------------------------------------------------------------- mixed batches

CONTEXT = 10_000  # at which a prompt token takes twice as long


@dataclass
class Device:
    """Mixed batches with as many prompt tokens as `MixedBatchTimes` allows."""

    decode_s: float
    token_s: float = 40e-6
    start: int = 0  # context of the prompt tokens
    target: float = 0.125

    def __post_init__(self) -> None:
        self.times = MixedBatchTimes(CONTEXT)

    def run(self, num_tokens: int, *, num_decodes: int = 100, waits: float = 0.0) -> float:
        """Observes a batch; returns how long it took."""
        rows = np.ones(num_decodes, np.int32)
        plan = mixed(np.append(rows, np.int32(self.start)), np.append(rows, np.int32(num_tokens)), num_decodes)
        compute = num_tokens * self.token_s * (1 + self.start / CONTEXT)
        seconds = compute + waits + (self.decode_s if num_decodes else 0.0)
        self.times.observe(plan, seconds)
        return seconds

    def budget(self) -> int:
        tokens, weighted = self.times.tokens_within(self.target)
        return int(min(tokens, weighted / (1 + self.start / CONTEXT)))

    def step(self) -> float:
        return self.run(self.budget())


def mixed(starts: np.ndarray, lengths: np.ndarray, num_decodes: int) -> Any:
    tokens = int(lengths[num_decodes:].sum())
    return SimpleNamespace(starts=starts, lengths=lengths, num_decodes=num_decodes, num_prefill_tokens=tokens)


@pytest.mark.parametrize("decode_s", [0.0005, 0.01, 0.05])
def test_the_budget_reaches_the_target_from_below_within_a_few_batches(decode_s: float) -> None:
    device = Device(decode_s)
    for _ in range(20):
        device.run(20)
    times = [device.step() for _ in range(12)]
    assert max(times) < 1.02 * device.target
    assert times[5] > 0.8 * device.target and times[-1] > 0.95 * device.target


def test_the_first_batches_are_small() -> None:
    device = Device(0.02)
    assert device.step() < device.target
    cold = Device(0.02)
    cold.run(8192, num_decodes=0)
    assert 0.7 * cold.target < cold.step() < 1.2 * cold.target, "a prefill batch tells what a prompt token takes"


def test_one_slow_batch_does_not_change_the_budget() -> None:
    device = Device(0.02)
    for _ in range(20):
        device.step()
    usual = device.budget()
    device.run(usual, waits=3.0)
    for _ in range(10):
        assert device.budget() > 0.95 * usual
        device.step()


def test_a_slow_first_batch_is_soon_forgotten() -> None:
    device = Device(0.02)
    device.run(1024, waits=3.0)
    times = [device.step() for _ in range(16)]
    assert sum(times[:12]) < 1.0 and times[-1] > 0.9 * device.target


def test_after_a_long_context_a_batch_has_fewer_tokens_at_once() -> None:
    device = Device(0.02)
    for _ in range(20):
        device.step()
    device.start = 4 * CONTEXT
    assert max(device.step() for _ in range(20)) < 1.1 * device.target
    assert device.step() > 0.9 * device.target
    device.start = 0
    assert device.step() < 1.1 * device.target


@pytest.mark.parametrize("decode_s", [0.1, 0.2])
def test_prompts_get_half_of_the_time_beside_slow_decodes(decode_s: float) -> None:
    device = Device(decode_s)
    device.run(8192, num_decodes=0)
    for _ in range(30):
        device.step()
    assert device.step() == pytest.approx(2 * decode_s, rel=0.03)


def test_a_batch_never_takes_more_than_four_times_the_target() -> None:
    """Whatever the prefill batches seem to have taken, which is where half of the time is derived from."""
    device = Device(0.05)
    device.step()
    device.run(8192, num_decodes=0, waits=-0.3)
    assert max(device.step() for _ in range(30)) <= 4 * device.target
