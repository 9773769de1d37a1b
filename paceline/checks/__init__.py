"""Correctness checks of a whole engine, at full size, on the device that serves. The engine never imports them."""

from __future__ import annotations

from collections.abc import Callable

from paceline.checks.embeddings import check_embeddings
from paceline.checks.harness import CheckResult, CheckSetup
from paceline.checks.inter_token_latency import check_inter_token_latency
from paceline.checks.logits import check_logits
from paceline.checks.pipeline_parallel import check_pipeline_parallel
from paceline.checks.sanitizer import run_sanitizer, run_tiny
from paceline.checks.soak import check_soak
from paceline.checks.swap import check_swap
from paceline.checks.tensor_parallel import check_tensor_parallel
from paceline.checks.tokens import check_alone, check_tokens
from paceline.checks.weights import check_weights

__all__ = [
    "CHECKS",
    "CheckResult",
    "CheckSetup",
    "check_alone",
    "check_embeddings",
    "check_inter_token_latency",
    "check_logits",
    "check_pipeline_parallel",
    "check_soak",
    "check_swap",
    "check_tensor_parallel",
    "check_tokens",
    "check_weights",
    "run_sanitizer",
    "run_tiny",
]

CHECKS: dict[str, Callable[[CheckSetup], CheckResult]] = {
    "check": check_tokens,
    "logits": check_logits,
    "alone": check_alone,
    "cosine": check_embeddings,
    "long": check_inter_token_latency,
    "soak": check_soak,
    "swap": check_swap,
    "tp": check_tensor_parallel,
    "pp": check_pipeline_parallel,
    "weights": check_weights,
    "tiny": run_tiny,
}
