"""Pipeline parallelism on one GPU: two and three stages that share it, and two on two GPUs if there are as many.

Stages that share a GPU say nothing about speed: they take turns, and their hidden states go through host memory.
"""

from __future__ import annotations

from paceline.checks.harness import CheckResult, CheckSetup
from paceline.checks.rank_judge import JudgedRow, RankJudge
from paceline.llm import LLM

_TIME_LIMIT = 120.0  # seconds for each number of stages; the first start compiles kernels


def check_pipeline_parallel(
    setup: CheckSetup, *, count: int = 24, longest: int = 300, num_tokens: tuple[int, int] = (8, 24)
) -> CheckResult:
    """Greedy tokens within the margin: one stage, two and three over gloo, two over NCCL; and requests with every
    sampling option end."""
    judge = RankJudge(setup, count=count, longest=longest, num_tokens=num_tokens)
    options = judge.options
    rows = [
        JudgedRow("pp 1", lambda: LLM(None, **options)),
        JudgedRow("pp 2, gloo", lambda: LLM(None, **{**options, "pp": 2, "collectives": "gloo"})),
        JudgedRow("pp 3, gloo", lambda: LLM(None, **{**options, "pp": 3, "collectives": "gloo"})),
        JudgedRow("pp 2, NCCL", lambda: LLM(None, **{**options, "pp": 2, "collectives": "nccl"}), num_gpus=2),
    ]
    return judge.results(rows, _TIME_LIMIT)
