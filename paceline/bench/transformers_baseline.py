"""Compares with transformers' `generate()`: same model, prompts, dtype (float32) and number of threads, in one run.

Three workloads: one stream; 16 prompts with outputs of different lengths, which transformers runs as a padded batch
until the longest output ends; 64 requests with a shared prefix, which transformers computes 64 times. Runs alternate
and the best of each counts, since a busy machine only makes a run slower. Only this module imports `transformers`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from paceline.config import OVERLAP, EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cpu.linear import arrange
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.fetch import DEFAULT_MODEL, find_model
from paceline.model.weights import load_decoder
from paceline.request import SamplingParams
from paceline.text.load import load_tokenizer
from paceline.text.tokenizer import Tokenizer

WORKLOADS = ("single", "batch", "prefix")


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: list[list[int]]
    output_lengths: list[int]
    repeats: int

    @property
    def num_tokens(self) -> int:
        return sum(self.output_lengths)


def workloads(vocab_size: int, *, scale: float = 1.0) -> list[Workload]:
    """`scale` below 1 gives fewer requests and shorter outputs."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return [int(token) for token in rng.integers(100, vocab_size, count)]

    def some(count: int) -> int:
        return max(2, int(count * scale))

    outputs = np.linspace(16, 256, 16).astype(int)
    rng.shuffle(outputs)
    prefix = ids(512)
    return [
        Workload("single", [ids(32)], [some(64)], 3),
        Workload("batch", [ids(int(n)) for n in rng.integers(8, 129, 16)], [some(int(n)) for n in outputs], 1),
        Workload("prefix", [prefix + ids(32) for _ in range(some(64))], [16] * some(64), 1),
    ]


def compare_with_transformers(
    model: str | Path | None = None,
    *,
    threads: int = 1,
    scale: float = 1.0,
    only: Sequence[str] = WORKLOADS,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Runs the comparison and returns the ratios; `say` gets every line, the last one as JSON."""
    torch.set_num_threads(threads)
    path = find_model(DEFAULT_MODEL if model is None else model)
    decoder, tokenizer = arrange(load_decoder(path, dtype="float32")), load_tokenizer(path)
    theirs = _load_theirs(path)
    say(f"{path.name}, float32, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}")
    found: dict[str, object] = {}
    equal = True
    for work in workloads(decoder.spec.vocab_size, scale=scale):
        if work.name not in only:
            continue
        our_s = their_s = math.inf
        for _ in range(work.repeats):
            seconds, tokens = _run_ours(decoder, tokenizer, threads, "on", work)
            our_s = min(our_s, seconds)
            seconds, their_tokens = _run_theirs(theirs, work)
            their_s = min(their_s, seconds)
        for mode in OVERLAP:
            equal = equal and (mode == "on" or _run_ours(decoder, tokenizer, threads, mode, work)[1] == tokens)
        same = sum(a == b for a, b in zip(tokens, their_tokens, strict=True))
        found[f"{work.name}_ratio"] = round(their_s / our_s, 3)
        say(
            f"{work.name:7} {len(work.prompts)} prompts, {work.num_tokens} output tokens: paceline {our_s:.2f} s "
            f"({work.num_tokens / our_s:.1f} tokens/s), transformers {their_s:.2f} s "
            f"({work.num_tokens / their_s:.1f} tokens/s): {their_s / our_s:.2f}x; "
            f"{same} of {len(tokens)} outputs equal"
        )
    found["tokens_equal"] = equal
    say(json.dumps(found))
    return found


def _run_ours(
    decoder: Decoder, tokenizer: Tokenizer, threads: int, overlap: str, work: Workload
) -> tuple[float, list[list[int]]]:
    config = EngineConfig(threads=threads, overlap=overlap, kv_tokens=65_536)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in work.output_lengths]
    with LLM.from_engine(assemble(decoder, tokenizer, config, {"max_wait": math.inf})) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        began = time.perf_counter()
        outputs = llm.generate(work.prompts, params)
        seconds = time.perf_counter() - began
    return seconds, [output.token_ids for output in outputs]


def _load_theirs(path: Path) -> Any:
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    reading: Any = modeling_gguf_pytorch_utils
    reading.tqdm = lambda items, **_: items  # no setting disables its progress bar once tqdm is imported
    logging: ModuleType = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if path.is_file():
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        )
    return transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)


@torch.inference_mode()
def _run_theirs(model: Any, work: Workload) -> tuple[float, list[list[int]]]:
    """One padded batch, which runs until the longest output ends."""
    longest = max(map(len, work.prompts))
    ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(work.prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    count = max(work.output_lengths)
    began = time.perf_counter()
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    seconds = time.perf_counter() - began
    outputs = [row[longest:].tolist()[:n] for row, n in zip(found, work.output_lengths, strict=True)]
    return seconds, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares with transformers, float32 on the CPU.")
    parser.add_argument("--model", help="model folder, .gguf file or name (default: the default model)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for both sides")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: fewer requests and shorter outputs")
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    given = parser.parse_args()
    compare_with_transformers(given.model, threads=given.threads, scale=given.scale, only=given.only)


if __name__ == "__main__":
    main()
