"""The size of an installation without torch stays small."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

LIMIT_MB = 165  # numpy alone has 72 on x86-64, 50 on aarch64


def needed_by(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and its runtime dependencies on this machine, by canonical name."""
    canonical = re.sub(r"[-_.]+", "-", name).lower()
    if canonical in found:
        return found
    found[canonical] = distribution(name)
    for text in found[canonical].requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed_by(requirement.name, found)
    return found


def megabytes(installed: Distribution) -> float:
    files = [Path(str(file.locate())) for file in installed.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def test_dependencies_besides_torch_stay_small() -> None:
    ours = needed_by("paceline", {})
    torchs = needed_by("torch", {})
    sizes = {name: megabytes(item) for name, item in ours.items() if name not in torchs and name != "paceline"}
    assert {"uvicorn", "starlette", "msgspec", "tokenizers", "numpy", "huggingface-hub"} <= set(sizes)
    assert min(sizes[name] for name in ("numpy", "tokenizers")) > 1, "sizes were not found"
    assert not {"transformers", "pytest", "openai", "mypy"} & set(sizes), "a test tool became a dependency"
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    assert sum(sizes.values()) < LIMIT_MB, f"{sum(sizes.values()):.0f} MB, the largest: {largest}"
