"""A short run, alone and under compute-sanitizer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.checks.harness import CheckResult, CheckSetup, greedy, random_prompts, tokens_of
from paceline.request import SamplingParams


def run_tiny(setup: CheckSetup) -> CheckResult:
    """Prefill, decode, drafts and an embedding on two layers, with a shared prefix: small enough for
    compute-sanitizer."""
    spec, rng = replace(setup.spec(2), vocab_size=2048), random.Random(1)
    shared = random_prompts(rng, spec.vocab_size, 1, 80)[0]
    prompts = [shared + own for own in random_prompts(rng, spec.vocab_size, 3, 20)]
    prompts += random_prompts(rng, spec.vocab_size, 2, 90)
    with setup.llm(
        spec,
        kv_tokens=2048,
        max_running=4,
        context_tokens=512,
        max_batch_tokens=128,
        max_prefill_tokens=128,
        chunk_tokens=64,
        draft_tokens=7,
    ) as llm:
        params = [
            *greedy([6, 5, 4]),
            SamplingParams(max_tokens=5, ignore_eos=True, top_k=20, seed=1, logprobs=3),
            *greedy([3]),
        ]
        found = sum(map(len, tokens_of(llm, prompts, params)))
        # One token again and again: all drafts are right. Four rows, then one.
        repeating = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={7: 100.0})
        found += sum(map(len, tokens_of(llm, prompts[:5], [repeating] * 5)))
        llm.embed(prompts[-1])
        num_accepted = llm.engine.scheduler.counters.accepted_tokens
    return CheckResult(found == 83 and num_accepted > 0, f"{found} of 83 tokens, {num_accepted} accepted drafts")


def run_sanitizer(command: Sequence[str]) -> CheckResult:
    """Runs `command` under compute-sanitizer. Torch's allocator splits large blocks, so only accesses outside of these
    are found."""
    tool = shutil.which("compute-sanitizer")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *sorted(Path("/usr/local").glob("cuda*"))]
    for place in places:
        candidate = place / "bin" / "compute-sanitizer"
        tool = tool or (str(candidate) if candidate.is_file() else None)
    if tool is None:
        return CheckResult(None, "compute-sanitizer is not installed")
    began = time.perf_counter()
    run = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "3", "--print-limit", "20", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
        check=False,
    )
    if run.returncode:
        print(run.stdout[-6000:])
    summary = next((line for line in reversed(run.stdout.splitlines()) if "ERROR SUMMARY" in line), "no summary")
    return CheckResult(
        run.returncode == 0 and "ERROR SUMMARY: 0 errors" in summary,
        f"exit status {run.returncode}, {summary.strip('= ')}, {time.perf_counter() - began:.0f} s",
    )
