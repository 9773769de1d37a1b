"""Modules that take seconds to import, imported when they are used: every test process collects every file."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for its marks
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
