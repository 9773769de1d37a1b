"""Paceline serves large language models: many prompts in, one machine answering all of them token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.llm import LLM, Choice, RequestOutput
    from paceline.request import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Choice", "Grammar", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {"LLM": "paceline.llm", "Choice": "paceline.llm", "RequestOutput": "paceline.llm",
          "Grammar": "paceline.request", "SamplingParams": "paceline.request"}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Looked up on first use: importing paceline is quick and needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
