"""Tensor parallelism on one GPU: two ranks that share it, and NCCL with one rank.

Tokens are judged by their margin (harness.py), since the sums of two ranks are rounded otherwise than those of one. Two
ranks on one GPU say nothing about speed: their processes take turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.checks.harness import CheckResult, CheckSetup
from paceline.checks.rank_judge import JudgedRow, RankJudge
from paceline.engine.build.ranks import group_of_one
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelSpec

_SHARE_A_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def check_tensor_parallel(
    setup: CheckSetup, *, count: int = 24, longest: int = 300, num_tokens: tuple[int, int] = (8, 24)
) -> CheckResult:
    """Greedy tokens within the margin: two ranks over gloo, two over symmetric memory in CUDA graphs, also with the
    model as its own draft model, one over NCCL in CUDA graphs; and requests with every sampling option end."""
    judge = RankJudge(setup, count=count, longest=longest, num_tokens=num_tokens)
    options = judge.options
    with_ranks = {**options, "tp": 2, "collectives": "symmetric"}
    with_draft = {**with_ranks, "speculate": "draft", "draft_model": setup.shape}
    rows = [
        JudgedRow("tp 1", lambda: LLM(None, **options)),
        JudgedRow("tp 2, gloo", lambda: LLM(None, **{**options, "tp": 2, "collectives": "gloo"}), graphs=False),
        JudgedRow("tp 2, symmetric memory", lambda: _sharing_a_gpu(with_ranks), num_gpus=1),
        # Few prompts: where processes take turns, a pass with drafts takes half a second.
        JudgedRow("tp 2, symmetric memory, draft model", lambda: _sharing_a_gpu(with_draft), num_gpus=1, num_prompts=6),
        JudgedRow("tp 1, NCCL", lambda: _over_nccl(setup, judge.spec), num_gpus=1),
    ]
    return judge.results(rows)


@contextmanager
def _sharing_a_gpu(options: dict[str, object]) -> Iterator[LLM]:
    before = os.environ.get(_SHARE_A_GPU)
    os.environ[_SHARE_A_GPU] = "1"
    try:
        with LLM(None, **options) as llm:
            yield llm
    finally:
        del os.environ[_SHARE_A_GPU]
        if before is not None:
            os.environ[_SHARE_A_GPU] = before


@contextmanager
def _over_nccl(setup: CheckSetup, spec: ModelSpec) -> Iterator[LLM]:
    """One rank that communicates with itself."""
    decoder = Decoder(spec, setup.weights(spec), max_positions=spec.context_tokens, group=group_of_one())
    with setup.llm(spec, kv_tokens=16_384, decoder=decoder, max_running=32, max_batch_tokens=1024) as llm:
        yield llm
