"""Paceline serves large language models: many prompts in, one machine answering all of them token by token."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.llm import LLM, Choice, RequestOutput
    from paceline.request import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Choice", "Grammar", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {"LLM": "paceline.llm", "Choice": "paceline.llm", "RequestOutput": "paceline.llm",
          "Grammar": "paceline.request", "SamplingParams": "paceline.request"}  # fmt: skip

# Torch's threads meet at 150 places a token. Who comes first spins up to 300,000 times, libgomp's default, before it
# sleeps; where a pause takes 75 ns that is 22 ms. Beside another busy process the two often share a core, where the one
# that spins keeps out the one it waits for: a token took seconds. 4,000 outlast most of what Python does in between.
# Other architectures have other pauses and are left alone. libgomp reads the count when torch is loaded, so it is said
# here, before anything of ours can load it; whoever has said how to wait is not contradicted. Figures: docs/log.md.
_SPINS = "4000"
if sys.platform == "linux" and os.uname().machine == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def __getattr__(name: str) -> Any:
    # Looked up on first use: importing paceline is quick and needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
