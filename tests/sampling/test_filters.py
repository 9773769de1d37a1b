"""The tokens that top-k, top-p and min-p keep equal those of a float64 reference, on adversarial logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.sampling.sampler import _thresholds

VOCAB = 64
RANDOM = np.random.default_rng(4)
CASES = {
    "random": RANDOM.normal(0, 3, VOCAB),
    "flat": np.zeros(VOCAB),
    "two values": np.repeat([1.0, 0.0], VOCAB // 2),
    "ties": RANDOM.integers(0, 4, VOCAB).astype(float),
    "masked": np.where(np.arange(VOCAB) % 7, -np.inf, RANDOM.normal(0, 1, VOCAB)),
    "one left": np.where(np.arange(VOCAB) == 9, 0.0, -np.inf),
    "huge": RANDOM.normal(0, 1e4, VOCAB),
    "one huge": np.where(np.arange(VOCAB) == 5, 1e30, 0.0),
    "tiny": RANDOM.normal(0, 1e-6, VOCAB),
    "banned": np.where(np.arange(VOCAB) % 2, -1e30, RANDOM.normal(0, 1, VOCAB)),
}


def kept(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Token by token: it is kept unless too many tokens, or too much probability, are strictly above it."""
    scores = scores.astype(np.float64)
    probs = np.exp(scores - scores.max())
    within = np.array([(scores > score).sum() < top_k for score in scores])
    total = probs[within].sum()
    most = top_p * total if top_p < 1 else np.inf
    stays = within & np.array([probs[within & (scores > score)].sum() < most for score in scores])
    floor = scores.max() + np.log(min_p) if min_p else -np.inf
    return stays & (scores >= floor) & (scores > -np.inf)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("top_k", [1, 3, 17, VOCAB])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_keep_the_tokens_of_the_reference(name: str, top_k: int, top_p: float, min_p: float) -> None:
    scores = CASES[name].astype(np.float32)
    # Other rows of the batch must not change the result.
    rows = np.stack([scores, CASES["random"].astype(np.float32), CASES["ties"].astype(np.float32)])
    least = _thresholds(
        torch.from_numpy(rows),
        np.array([top_k, 5, VOCAB]),
        np.array([top_p, 1, 0.5], np.float32),
        np.array([min_p, 0, 0], np.float32),
    )[0, 0]
    found = (scores >= least.numpy()) & (scores > -np.inf)
    assert found.tolist() == kept(scores, top_k, float(np.float32(top_p)), min_p).tolist()
