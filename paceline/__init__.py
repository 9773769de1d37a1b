"""Paceline, an inference and serving engine for large language models."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.llm import LLM, Choice, RequestOutput
    from paceline.request import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Choice", "Grammar", "RequestOutput", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "paceline.llm",
    "Choice": "paceline.llm",
    "RequestOutput": "paceline.llm",
    "Grammar": "paceline.request",
    "SamplingParams": "paceline.request",
}

# Torch's OpenMP threads synchronize about 150 times per token. A waiting thread spins up to 300,000 times (the default
# of libgomp) before it sleeps; with a pause instruction of 75 ns that is 22 ms. Beside another busy process, two
# threads often share a core, and the spinning one blocks the one it waits for: a token took seconds. 4,000 spins cover
# most of the Python code between two parallel regions. Other architectures have other pause times and keep the default.
# libgomp reads the variable when torch is loaded, so it is set here, before any import of torch. A wait policy set by
# the user takes precedence. Measurements: docs/log.
_SPINS = "4000"
if sys.platform == "linux" and os.uname().machine == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def __getattr__(name: str) -> object:
    # Imported on first use: `import paceline` is fast and does not import torch.
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
