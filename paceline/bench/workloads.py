"""The workloads figures are given for, exactly, so that they compare."""

from __future__ import annotations

import random

import numpy as np

from paceline.request import Request, SamplingParams


def gsp(
    groups: int = 64, per_group: int = 16, *, prefix: int = 2048, own: int = 128, output: int = 256
) -> list[Request]:
    """Shared prefixes: every group has a system prompt, every request some tokens of its own; shuffled once."""
    tokens = np.random.default_rng(0)
    prompts = []
    for _ in range(groups):
        system = tokens.integers(0, 10_000, prefix)
        prompts += [np.concatenate([system, tokens.integers(0, 10_000, own)]) for _ in range(per_group)]
    random.Random(0).shuffle(prompts)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return [Request(f"gsp-{number}", prompt, params) for number, prompt in enumerate(prompts)]
