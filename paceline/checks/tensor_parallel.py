"""Tensor parallelism on one GPU: two ranks that share it, and NCCL with one rank.

Tokens are judged by their margin (harness.py), since the sums of two ranks are rounded otherwise than those of one. Two
ranks on one GPU say nothing about speed: their processes take turns.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.checks.harness import ROUNDING, CheckResult, CheckSetup, greedy, margin, random_prompts, tokens_of
from paceline.engine.build import group_of_one
from paceline.engine.cuda.executor import CudaExecutor
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelSpec
from paceline.request import Grammar, SamplingParams

_SEED = 11
_SHARE_A_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_MARKS = {True: "PASS", False: "FAIL", None: "NOT RUN"}
# Everything that sampling does with gathered logits, and what splits a pass in two.
_FEATURES = [
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=2, top_k=20, top_p=0.9, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, grammar=Grammar("regex", "[0-9]{12,40}"), max_tokens=12),
]


def check_tensor_parallel(
    setup: CheckSetup, *, count: int = 24, longest: int = 300, num_tokens: tuple[int, int] = (8, 24)
) -> CheckResult:
    """Greedy tokens within the margin: two ranks over gloo, two over symmetric memory in CUDA graphs, also with the
    model as its own draft model, one over NCCL in CUDA graphs; and requests with every sampling option end."""
    spec, rng = setup.spec(), random.Random(9)
    shared = random_prompts(rng, spec.vocab_size, 1, longest)[0]
    prompts = random_prompts(rng, spec.vocab_size, count, longest)
    prompts += [shared + own for own in random_prompts(rng, spec.vocab_size, 6, 20)]
    params = greedy([rng.randint(*num_tokens) for _ in prompts])
    reference, plain = setup.decoder(spec, "float32"), setup.decoder(spec)
    on_gpu = setup.device.type == "cuda"

    def judge(make: Callable[[], Any], *, graphs: bool, prompts: list[list[int]] = prompts) -> tuple[bool, str]:
        with make() as llm:
            found = tokens_of(llm, prompts, params[: len(prompts)])
            lengths = [len(tokens) for tokens in tokens_of(llm, prompts[: len(_FEATURES)], _FEATURES)]
            device = llm.engine.executor.local
            used = device.stats.graphs if isinstance(device, CudaExecutor) else 0
            counters = llm.engine.scheduler.counters
        ours, theirs = margin(reference, prompts, found), margin(reference, prompts, found, plain)
        bound = 1.5 * theirs.worst + ROUNDING
        right = ours.worst < bound and bool(used) == (graphs and on_gpu) and lengths == [12] * len(_FEATURES)
        return right, (
            f"{ours.judged} greedy tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (bound "
            f"{bound:.3f}); {used} passes by graph; {counters.accepted_tokens} of {counters.drafted_tokens} drafts "
            f"accepted; outputs with other options: {lengths}"
        )

    options = {**setup.options, "load": "random", "shape": setup.shape, "seed": _SEED, "dtype": setup.dtype}
    options = {"kv_tokens": 16_384, "max_running": 32, "max_batch_tokens": 1024, **options}
    rows: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("tp 1", lambda: judge(lambda: LLM(**options), graphs=True)),
        ("tp 2, gloo", lambda: judge(lambda: LLM(**{**options, "tp": 2, "collectives": "gloo"}), graphs=False)),
    ]
    with_ranks = {**options, "tp": 2, "collectives": "symmetric"}
    with_draft = {**with_ranks, "speculate": "draft", "draft_model": setup.shape}
    on_gpus: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("tp 2, symmetric memory", lambda: judge(lambda: _sharing_a_gpu(with_ranks), graphs=True)),
        # Few prompts: where processes take turns, a pass with drafts takes half a second.
        (
            "tp 2, symmetric memory, draft model",
            lambda: judge(lambda: _sharing_a_gpu(with_draft), graphs=True, prompts=prompts[:6]),
        ),
        ("tp 1, NCCL", lambda: judge(lambda: _over_nccl(setup, spec), graphs=True)),
    ]
    results: list[tuple[str, bool | None, str]] = [
        (name, *_guarded(name, run)) for name, run in (rows + on_gpus if on_gpu else rows)
    ]
    if not on_gpu:
        results += [(name, None, "needs a GPU") for name, _ in on_gpus]
    lines = [f"{_MARKS[passed]:7} {name}: {text}" for name, passed, text in results]
    return CheckResult(all(passed is not False for _, passed, _ in results), "\n  ".join(["", *lines]))


def _guarded(name: str, run: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    began = time.perf_counter()
    try:
        passed, text = run()
        print(f"{_MARKS[passed]:7} {name}, {time.perf_counter() - began:.0f} s", flush=True)
        return passed, text
    except Exception as error:  # the other rows still run
        traceback.print_exc()
        return False, f"{type(error).__name__}: {error}"


@contextmanager
def _sharing_a_gpu(options: dict[str, Any]) -> Iterator[LLM]:
    before = os.environ.get(_SHARE_A_GPU)
    os.environ[_SHARE_A_GPU] = "1"
    try:
        with LLM(**options) as llm:
            yield llm
    finally:
        del os.environ[_SHARE_A_GPU]
        if before is not None:
            os.environ[_SHARE_A_GPU] = before


@contextmanager
def _over_nccl(setup: CheckSetup, spec: ModelSpec) -> Iterator[LLM]:
    """One rank that communicates with itself."""
    decoder = Decoder(spec, setup.weights(spec), max_positions=spec.context_tokens, group=group_of_one())
    with setup.llm(spec, kv_tokens=16_384, decoder=decoder, max_running=32, max_batch_tokens=1024) as llm:
        yield llm
