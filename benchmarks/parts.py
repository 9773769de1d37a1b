"""Runs the parts of a benchmark: one that fails prints its traceback, and the others still run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping


def run_parts(parts: Mapping[str, Callable[[], None]]) -> int:
    """Runs them in order, and returns the exit status."""
    failed = []
    for name, part in parts.items():
        began = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            part()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"[{name}: {time.perf_counter() - began:.1f} s]", flush=True)
    print(f"FAILED: {', '.join(failed)}" if failed else "all parts ran")
    return int(bool(failed))
