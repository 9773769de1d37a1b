"""Every precision with the weights of a real model, through the engine: is its output right, and how fast is it?

    python benchmarks/real_model.py MODEL [PRECISION ...]        a GGUF file, a folder or an id; on a CPU, too

Prints for each precision: the perplexity of a text, how far its logprobs are from those of float32 on the CPU and how
often both would choose the same token; milliseconds per token with one row and with many; and for the copy of a text
with drafts against without them the speed-up and whether the tokens are equal. Then two ranks on one device against
one, for weights in groups. A precision that fails prints its traceback, and the others still run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts import run_parts
from paceline.bench.quality import TEXT, read_text
from paceline.llm import LLM
from paceline.request import SamplingParams

TEXT_TOKENS, WINDOW = 1024, 256
ROWS, OUTPUT_TOKENS = (1, 16, 64), 256
COPIED = (
    "The lighthouse at Cape Arren was built in 1874, after three ships had been lost on the reef in a single winter. "
    "Its first keeper, Ida Holm, lived there with two sons and a mule for thirty-one years. Oil for the lamp came by "
    "boat four times a year, and in stormy seasons it came late."
)
PRECISIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"quantization": "none"},
    "gguf": {"quantization": "gguf"},
    "q8": {"quantization": "q8"},
    "q4": {"quantization": "q4"},
    "fp8": {"quantization": "fp8"},
    "fp8 KV": {"quantization": "none", "kv_dtype": "fp8_e4m3"},
    "fp8, fp8 KV": {"quantization": "fp8", "kv_dtype": "fp8_e4m3"},
    "gguf, fp8 KV": {"quantization": "gguf", "kv_dtype": "fp8_e4m3"},
}
REFERENCE = {"device": "cpu", "dtype": "float32", "quantization": "none"}
# Two ranks on one device: random weights, since heads of a small model may not divide
RANKS: dict[str, Any] = {"load": "random", "shape": "qwen3-0.6b", "kv_tokens": 16_384, "max_running": 16}


class Scores(NamedTuple):
    """Of the tokens of a text: their logprobs, and the most likely token at each position."""

    logprobs: torch.Tensor
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


def score(llm: LLM, windows: list[list[int]]) -> Scores:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    logprobs, best = [], []
    for output in llm.generate(windows, params, progress=False):
        for one in (output.prompt_logprobs or [])[1:]:
            assert one is not None, "only the first token has no context"
            logprobs.append(one.logprob)
            best.append(max(one.top, key=lambda pair: pair[1])[0])
    return Scores(torch.tensor(logprobs, dtype=torch.float64), best)


def windows_of(llm: LLM) -> list[list[int]]:
    tokens = llm.engine.tokenizer.encode(read_text(TEXT))[:TEXT_TOKENS]
    return [tokens[at : at + WINDOW] for at in range(0, len(tokens), WINDOW)]


def token_ms(llm: LLM, rows: int) -> float:
    """Milliseconds per token of a batch, without its prompts: the best of two."""
    found = []
    for seed in range(2):
        seconds = []
        for count in (16, 16 + OUTPUT_TOKENS):
            prompts = [[100 + (7 * row + at + 31 * seed + count) % 1000 for at in range(64)] for row in range(rows)]
            params = SamplingParams(temperature=0.6, seed=rows, max_tokens=count, ignore_eos=True)
            began = time.perf_counter()
            llm.generate(prompts, params, progress=False)
            seconds.append(time.perf_counter() - began)
        found.append((seconds[1] - seconds[0]) / OUTPUT_TOKENS * 1e3)
    return min(found)


def copy(llm: LLM) -> tuple[float, list[int]]:
    """Tokens per second of copying a text, the best of three, and the tokens."""
    message = {"role": "user", "content": f"Repeat this text exactly, word for word:\n\n{COPIED}"}
    prompt = llm.engine.tokenizer.encode_chat([message])
    times = []
    for _ in range(3):
        began = time.perf_counter()
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=96), progress=False)
        times.append((time.perf_counter() - began) / len(output.token_ids))
    return 1 / min(times), output.token_ids


def check(model: str, name: str, reference: Scores | None) -> None:
    with LLM(model, kv_tokens=65_536, max_running=64, **PRECISIONS[name]) as llm:
        windows = windows_of(llm)
        scores = score(llm, windows)
        line = f"{name:14} perplexity {scores.perplexity:9.4f}"
        if reference is not None:
            distance = float((scores.logprobs - reference.logprobs).abs().mean())
            same = sum(a == b for a, b in zip(scores.best, reference.best, strict=True)) / len(scores.best)
            line += f"  |difference| {distance:.5f}  top-1 {same:.4f}"
        line += "  ms/token " + ", ".join(f"{rows}: {token_ms(llm, rows):.3f}" for rows in ROWS)
    copies = []
    for speculate in ("off", "auto"):
        with LLM(model, kv_tokens=16_384, speculate=speculate, max_running=16, **PRECISIONS[name]) as llm:
            copies.append(copy(llm))
            text = llm.engine.tokenizer.decode(copies[-1][1])
    (off, tokens), (auto, drafted) = copies
    print(f"{line}  copy {off:.0f} -> {auto:.0f} tok/s, tokens equal: {tokens == drafted}", flush=True)
    print(f"  {text[:150]!r}", flush=True)


def check_ranks(quantization: str) -> None:
    windows = [[(13 * at + 7 * row) % 5000 + 10 for at in range(200)] for row in range(4)]
    found = []
    ranks: tuple[dict[str, Any], ...] = ({}, {"tp": 2, "collectives": "gloo"})
    for more in ranks:
        with LLM(**RANKS, quantization=quantization, **more) as llm:
            found.append(score(llm, windows))
    one, two = found
    distance = float((two.logprobs - one.logprobs).abs().mean())
    same = sum(a == b for a, b in zip(two.best, one.best, strict=True)) / len(one.best)
    print(f"{quantization}, two ranks against one: |difference| {distance:.5f}, top-1 {same:.4f}", flush=True)


def check_all_ranks() -> None:
    for quantization in ("none", "q4", "q8"):
        check_ranks(quantization)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("precisions", nargs="*", help=f"{', '.join(PRECISIONS)}, ranks (default: all)")
    given = parser.parse_args()
    names = given.precisions or [*PRECISIONS, "ranks"]
    reference: Scores | None = None
    if set(names) - {"ranks"}:
        with LLM(given.model, kv_tokens=4096, max_running=4, **REFERENCE) as llm:
            reference = score(llm, windows_of(llm))
        print(f"{'float32, CPU':14} perplexity {reference.perplexity:9.4f}", flush=True)
    parts = {name: partial(check, given.model, name, reference) for name in names if name != "ranks"}
    sys.exit(run_parts(parts | ({"ranks": check_all_ranks} if "ranks" in names else {})))


if __name__ == "__main__":
    main()
