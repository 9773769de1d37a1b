"""RankJudge: engines with several ranks or stages, each judged by its greedy tokens and by requests with other options.

Tokens are judged by their margin (harness.py), since ranks and stages round otherwise than one process.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.checks.harness import ROUNDING, CheckResult, CheckSetup, greedy, margin, random_prompts, tokens_of
from paceline.engine.cuda.executor import CudaExecutor
from paceline.llm import LLM
from paceline.request import Grammar, SamplingParams

_SEED = 11
_MARKS = {True: "PASS", False: "FAIL", None: "NOT RUN"}
# Everything that sampling does with the logits, and what splits a pass in two.
_FEATURES = [
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=2, top_k=20, top_p=0.9, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, grammar=Grammar("regex", "[0-9]{12,40}"), max_tokens=12),
]

Judged = tuple[bool | None, str]  # None: not runnable on this host


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """An engine to judge."""

    name: str
    make: Callable[[], AbstractContextManager[LLM]]
    graphs: bool = True  # whether it captures CUDA graphs on a GPU
    num_gpus: int = 0  # that it needs
    num_prompts: int | None = None  # default: all


class RankJudge:
    """The prompts, and what their tokens are compared with."""

    def __init__(self, setup: CheckSetup, *, count: int, longest: int, num_tokens: tuple[int, int]) -> None:
        self.spec = spec = setup.spec()
        self._setup, rng = setup, random.Random(9)
        shared = random_prompts(rng, spec.vocab_size, 1, longest)[0]
        self._prompts = random_prompts(rng, spec.vocab_size, count, longest)
        self._prompts += [shared + own for own in random_prompts(rng, spec.vocab_size, 6, 20)]
        self._params = greedy([rng.randint(*num_tokens) for _ in self._prompts])
        self._reference, self._plain = setup.decoder(spec, "float32"), setup.decoder(spec)
        given = {**setup.options, "load": "random", "shape": setup.shape, "seed": _SEED, "dtype": setup.dtype}
        self.options: dict[str, object] = {"kv_tokens": 16_384, "max_running": 32, "max_batch_tokens": 1024, **given}
        self._first: list[list[int]] | None = None  # the tokens of the first row

    def results(self, rows: Sequence[JudgedRow], time_limit: float | None = None) -> CheckResult:
        """Judges the rows one after the other. time_limit: seconds for each; after one that takes longer, which still
        occupies its device, no other runs."""
        lines, passed, is_stuck = [], True, False
        num_gpus = torch.cuda.device_count() if self._setup.device.type == "cuda" else 0
        for row in rows:
            found: Judged
            if num_gpus < row.num_gpus:
                found = None, "needs a GPU" if row.num_gpus == 1 else f"needs {row.num_gpus} GPUs"
            elif is_stuck:
                found = None, "the row before it did not end"
            else:
                found, is_stuck = self._limited(row, time_limit)
            lines.append(f"{_MARKS[found[0]]:7} {row.name}: {found[1]}")
            print(lines[-1], flush=True)
            passed = passed and found[0] is not False
        return CheckResult(passed, "\n  ".join(["", *lines]))

    def _limited(self, row: JudgedRow, time_limit: float | None) -> tuple[Judged, bool]:
        """What was found, and whether the row did not end in time."""
        if time_limit is None:
            return self._guarded(row), False
        found: list[Judged] = []
        thread = threading.Thread(target=lambda: found.append(self._guarded(row)), daemon=True)
        thread.start()
        thread.join(time_limit)
        if found:
            return found[0], False
        faulthandler.dump_traceback(sys.stderr)  # of all threads: where it waits
        return (False, f"no result after {time_limit:g} s"), True

    def _guarded(self, row: JudgedRow) -> Judged:
        try:
            return self._judge(row)
        except Exception as error:  # the other rows still run
            traceback.print_exc()
            return False, f"{type(error).__name__}: {error}"

    def _judge(self, row: JudgedRow) -> Judged:
        prompts = self._prompts[: row.num_prompts]
        with row.make() as llm:
            found = tokens_of(llm, prompts, self._params[: row.num_prompts])
            lengths = [len(tokens) for tokens in tokens_of(llm, prompts[: len(_FEATURES)], _FEATURES)]
            device = llm.engine.executor.local
            used = device.stats.graphs if isinstance(device, CudaExecutor) else 0
            counters = llm.engine.scheduler.counters
        self._first = self._first or found
        equal = sum(one == other for one, other in zip(found, self._first, strict=False))
        ours, theirs = margin(self._reference, prompts, found), margin(self._reference, prompts, found, self._plain)
        bound = 1.5 * theirs.worst + ROUNDING
        uses_graphs = row.graphs and self._setup.device.type == "cuda"
        right = ours.worst < bound and bool(used) == uses_graphs and lengths == [12] * len(_FEATURES)
        return right, (
            f"{ours.judged} greedy tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (bound "
            f"{bound:.3f}); {equal} of {len(found)} outputs equal to those of the first row; {used} passes by graph; "
            f"{counters.accepted_tokens} of {counters.drafted_tokens} drafts accepted; outputs with other options: "
            f"{lengths}"
        )
