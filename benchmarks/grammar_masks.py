"""How long does the host take from the tokens of a pass to the grammar masks of the next?

    python benchmarks/grammar_masks.py

Prints microseconds per step (median, 90th percentile) for 64 rows with a schema each, by the number of llguidance's
threads: step after step; with a pause as long as a forward pass, in which the threads fall asleep; and concurrently
with a busy thread like the engine's: how long starting the masks and waiting for them blocks it. Needs no GPU, but the
cores of a GPU host.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.bench.workloads import structured
from paceline.request import Request
from paceline.sampling import grammar
from paceline.scheduler.plan import Updates
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.text.synthetic import synthetic_tokenizer

ROWS, VOCAB, STEPS, PAUSE_S = 64, 151_936, 100, 0.0015
WORK_S = 0.0004  # in which the engine thread detokenizes, plans and packs
WORDS = -(-VOCAB // 32)


def allowed(mask: Any, rng: np.random.Generator) -> int:
    """A random token that a mask allows."""
    word = int(rng.choice(np.flatnonzero(mask)))
    return word * 32 + int(rng.choice([bit for bit in range(32) if int(mask[word]) >> bit & 1]))


def work(seconds: float) -> None:
    """Holds the GIL, as planning does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def measure(num_threads: int, pause_s: float, concurrent: bool) -> dict[str, Any]:
    """Microseconds per step to advance the grammars and compute the masks, or to start them and wait for them."""
    grammar._MAX_THREADS = num_threads
    tokenizer, rng = synthetic_tokenizer(VOCAB), np.random.default_rng(0)
    grammars = grammar.Grammars(tokenizer, VOCAB)
    requests = [
        TrackedRequest(Request(str(row), np.arange(3, 9), params))
        for row, params in enumerate(structured(ROWS, 256, 7).params)
    ]
    for request in requests:
        assert request.params.grammar is not None, "every request has a grammar"
        grammars.attach(request, grammars.compile(request.params.grammar).result())
    bits = np.zeros((ROWS, WORDS), np.int32)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(what: str, call: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        result = call(*args)
        spent[what].append((time.perf_counter() - began) * 1e6)
        return result

    def mask_buffer(rows: int, words: int) -> Any:
        return bits[:rows]

    for _ in range(STEPS):
        if concurrent:
            timed("start", grammars.start_masks, requests, mask_buffer)
            work(WORK_S)
            timed("wait", grammars.wait_masks)
        else:
            timed("masks", grammars.masks, requests, mask_buffer)
        tokens = np.array([allowed(mask, rng) for mask in bits], np.int32)
        time.sleep(pause_s)
        failures = timed("tokens", grammars.advance, Updates(tuple(requests), tokens, (), 0))
        assert not failures, "a grammar refused a token that its mask allows"
    grammars.close()
    return {what: np.array(each) for what, each in sorted(spent.items())}


def main() -> None:
    cores = grammar._num_cores()
    print(f"{cores} cores; microseconds per step of {ROWS} rows: median, 90th percentile")
    for pause_s, concurrent in ((0.0, False), (PAUSE_S, False), (PAUSE_S, True)):
        for threads in sorted({1, 2, 3, 4, 6, 8, 12, max(1, cores - 1)}):
            if threads > cores:
                continue
            found = "   ".join(
                f"{what} {np.median(each):6.0f} {np.percentile(each, 90):6.0f}"
                for what, each in measure(threads, pause_s, concurrent).items()
            )
            how = f"{WORK_S * 1e3:3.1f} ms of concurrent work" if concurrent else "no concurrent work"
            print(f"pause {pause_s * 1e3:3.1f} ms, {how}, {threads:2} threads: {found}", flush=True)


if __name__ == "__main__":
    main()
