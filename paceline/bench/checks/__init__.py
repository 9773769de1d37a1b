"""Is it right? Checks of a whole engine that are worth running at full size, on the device that will serve."""

from __future__ import annotations

from collections.abc import Callable

from paceline.bench.checks.lab import Lab, Verdict
from paceline.bench.checks.right_logits import logits
from paceline.bench.checks.right_tokens import alone, check
from paceline.bench.checks.sanitizing import sanitizer, tiny
from paceline.bench.checks.soaking import soak
from paceline.bench.checks.swapping import swap
from paceline.bench.checks.time_between import long

__all__ = ["CHECKS", "Lab", "Verdict", "alone", "check", "logits", "long", "sanitizer", "soak", "swap", "tiny"]

CHECKS: dict[str, Callable[[Lab], Verdict]] = {
    "check": check, "logits": logits, "alone": alone, "long": long, "soak": soak, "swap": swap, "tiny": tiny,
}  # fmt: skip
