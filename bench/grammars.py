"""How long the host takes from the tokens of a pass to the masks of the next: `python bench/grammars.py`.

64 rows, a schema each, by the number of llguidance's threads; once step after step, once with a pause as long as a pass
between them, in which the threads fall asleep. No GPU is needed, but the cores of its host are.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.bench.workloads import structured
from paceline.request import Request
from paceline.sampling import grammar
from paceline.scheduler.plan import Updates
from paceline.text.synthetic import synthetic_tokenizer

ROWS, VOCAB, STEPS, PAUSE_S = 64, 151_936, 100, 0.0015
WORDS = -(-VOCAB // 32)


def allowed(mask: Any, rng: np.random.Generator) -> int:
    """Some token of a mask."""
    word = int(rng.choice(np.flatnonzero(mask)))
    return word * 32 + int(rng.choice([bit for bit in range(32) if int(mask[word]) >> bit & 1]))


def measure(num_threads: int, pause_s: float) -> tuple[Any, Any]:
    """Microseconds of each step, to follow the tokens and to compute the masks."""
    grammar._MAX_THREADS = num_threads
    tokenizer, rng = synthetic_tokenizer(VOCAB), np.random.default_rng(0)
    grammars = grammar.Grammars(tokenizer, VOCAB)
    requests = [
        Request(str(row), np.arange(3, 9), params) for row, params in enumerate(structured(ROWS, 256, 7).params)
    ]
    for request in requests:
        assert request.params.grammar is not None, "all of them have one"
        grammars.attach(request, grammars.compile(request.params.grammar).result())
    plan: Any = SimpleNamespace(requests=tuple(requests), samples=np.ones(ROWS, np.bool_))
    bits = np.zeros((ROWS, WORDS), np.int32)
    following, masking = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        grammars.masks(plan, lambda rows, words: bits[:rows])
        masking.append(time.perf_counter() - began)
        tokens = np.array([allowed(mask, rng) for mask in bits], np.int32)
        time.sleep(pause_s)
        began = time.perf_counter()
        grammars.advance(Updates(tuple(requests), tokens, (), 0))
        following.append(time.perf_counter() - began)
    assert not grammars.take_failures(), "a token that a mask allows is taken"
    grammars.close()
    return np.array(following) * 1e6, np.array(masking) * 1e6


def main() -> None:
    cores = grammar._num_cores()
    print(f"{cores} cores; microseconds a step of {ROWS} rows: median, 90th percentile")
    for pause_s in (0.0, PAUSE_S):
        for threads in sorted({1, 2, 3, 4, 6, 8, 12, max(1, cores - 1)}):
            if threads > cores:
                continue
            following, masking = measure(threads, pause_s)
            print(
                f"pause {pause_s * 1e3:3.1f} ms, {threads:2} threads: tokens {np.median(following):6.0f} "
                f"{np.percentile(following, 90):6.0f}   masks {np.median(masking):6.0f} "
                f"{np.percentile(masking, 90):6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
