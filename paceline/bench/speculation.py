"""`paceline bench offline speculate`: what speculative decoding gains, by task and batch size.

One engine with `speculate` auto, or with a draft model if one is given, generates each task with drafts and without, in
turns, so that both see the same machine. Some tasks repeat their input, others write something new.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.bench.runner import BenchRunner
from paceline.config import ConfigError
from paceline.engine.cuda.executor import CudaExecutor
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.scheduler.draft_depth import MAX_ROWS, DraftDepth
from paceline.scheduler.plan import DRAFT_DEPTHS
from paceline.scheduler.tracked_request import TrackedRequest

_OUTPUT_TOKENS = 192
_MAX_QUESTIONS = 4  # of each category
_MAX_CPU_BATCH = 16
_COIN, _COIN_PROMPT = 0.7, 512

_TEXT = (
    "The lighthouse at Cape Arren was built in 1874, after three ships had been lost on the reef in a single winter.",
    "Its first keeper, Ida Holm, lived there with two sons and a mule for thirty-one years.",
    "Oil for the lamp came by boat four times a year, and in stormy seasons it came late.",
    "In 1931 the lamp was electrified, and in 1988 the last keeper left: since then a sensor switches it on at dusk.",
    "The tower is open to visitors from May to September; tickets cost four euros, and children enter free.",
    "From the gallery one can see the reef at low tide, and on clear days the island of Sund.",
)
_CODE = """def load_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            number, customer, amount = line.strip().split(";")
            orders.append({"number": number, "customer": customer, "amount": float(amount)})
    return orders


def total_by_customer(orders):
    totals = {}
    for order in orders:
        customer = order["customer"]
        totals[customer] = totals.get(customer, 0) + order["amount"]
    return totals
"""


class _FixedDepth(DraftDepth):
    def __init__(self, depth: int) -> None:
        super().__init__(max(DRAFT_DEPTHS))
        self.depth = depth

    def choose(self, requests: Sequence[TrackedRequest]) -> int:
        return self.depth


class _TaskRun(NamedTuple):
    seconds: float
    tokens: list[list[int]]
    num_passes: int
    num_drafted: int
    num_accepted: int


def _tasks(questions: str | None) -> dict[str, list[str]]:
    """Prompts by task."""
    text = " ".join(_TEXT)
    tasks = {
        "copy": [f"Repeat this text exactly, word for word:\n\n{text}", f"Repeat this code exactly:\n\n{_CODE}"],
        "edit": [
            f"Repeat this text, but write 1890 instead of 1874:\n\n{text}",
            f"Rename `orders` to `items` in this code and print the whole code:\n\n{_CODE}",
        ],
        "summarise": [f"Summarise this text in three sentences:\n\n{text}", f"Explain this code:\n\n{_CODE}"],
        "story": [
            "Write a short story about a clockmaker who finds a letter.",
            "Describe a walk through a harbour town.",
        ],
        "code": [
            "Write a Python class for a stack with a maximum size.",
            "Write a C program that counts words in a file.",
        ],
    }
    return tasks if questions is None else tasks | _read_questions(questions)


def _read_questions(path: str) -> dict[str, list[str]]:
    """The first turns of a file of questions in the format of MT-Bench, by category."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"questions is {path!r}, which cannot be read: {error.strerror}.") from None
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        try:
            question = json.loads(line)
            category, turn = str(question["category"]), str(question["turns"][0])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"questions is {path!r}, whose line {number} is not a question: it needs a category and turns."
            ) from None
        of_category = found.setdefault(category, [])
        if len(of_category) < _MAX_QUESTIONS:
            of_category.append(turn)
    return found


def run_speculate(runner: BenchRunner) -> None:
    config = runner.config
    tasks = _tasks(config.questions)
    on_gpu = runner.device.type == "cuda"
    sizes = [size for size in config.batch_sizes if on_gpu or size <= _MAX_CPU_BATCH]
    params = SamplingParams(temperature=0, max_tokens=max(16, int(_OUTPUT_TOKENS * (config.scale or 1))))
    runner.close()
    mode = "draft" if runner.has_draft_model else "auto"
    with runner.make(speculate=mode, recent_output_tokens=0) as llm:
        modes = {"off": _FixedDepth(0), mode: DraftDepth(max(DRAFT_DEPTHS), has_model=mode == "draft")}
        _run(llm, modes["off"], tasks["story"], 1, params)  # warm-up
        runner.table.append(
            f"{'task':12} {'batch':>5} {'off tok/s':>10} {mode + ' tok/s':>11} {'speed-up':>8} {'accepted':>8} "
            f"{'tok/pass':>8} {'drafted tokens':>14}"
        )
        for size, (task, prompts) in itertools.product(sizes, tasks.items()):
            runs: dict[str, list[_TaskRun]] = {one: [] for one in modes}
            for repeat in range(config.repeats):
                for one in list(modes)[:: -1 if repeat % 2 else 1]:
                    runs[one].append(_run(llm, modes[one], prompts, size, params))
            _report(runner, task, size, *(min(found, key=lambda run: run.seconds) for found in runs.values()))
        if isinstance(llm.engine.executor, CudaExecutor):
            _run_coin(runner, llm, llm.engine.executor, [size for size in sizes if size <= MAX_ROWS])


def _run_coin(runner: BenchRunner, llm: LLM, executor: CudaExecutor, sizes: Sequence[int]) -> None:
    """What verification costs where acceptance is given: each draft is accepted with a probability, whatever it is."""
    executor.accept_by_coin(_COIN)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 10_000) for _ in range(_COIN_PROMPT)] for _ in range(max(sizes))]
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    for size in sizes:
        runs: dict[int, list[_TaskRun]] = {depth: [] for depth in (0, *DRAFT_DEPTHS)}
        for depth in (*runs, *list(runs) * runner.config.repeats):  # the first captures graphs
            runs[depth].append(_generate(llm, _FixedDepth(depth), [prompts[:size]], params))
        best = {depth: min(found, key=lambda run: run.seconds) for depth, found in runs.items()}
        for depth in DRAFT_DEPTHS:
            _report(runner, f"coin {_COIN}, {depth}", size, best[0], best[depth])


def _run(llm: LLM, depth: DraftDepth, prompts: list[str], size: int, params: SamplingParams) -> _TaskRun:
    """Generates all prompts of a task, `size` at a time."""
    # A larger batch repeats the prompts, with a number so that they differ.
    rows = [f"{prompts[row % len(prompts)]}\n\n(Request {row})" for row in range(max(size, len(prompts)))]
    encoded = [llm.engine.tokenizer.encode_chat([{"role": "user", "content": row}]) for row in rows]
    return _generate(llm, depth, [encoded[at : at + size] for at in range(0, len(encoded), size)], params)


def _generate(llm: LLM, depth: DraftDepth, batches: Sequence[Sequence[list[int]]], params: SamplingParams) -> _TaskRun:
    engine = llm.engine
    engine.call(lambda scheduler: setattr(scheduler, "draft_depth", depth)).result()
    counters = engine.scheduler.counters
    before = counters.steps, counters.drafted_tokens, counters.accepted_tokens
    tokens: list[list[int]] = []
    began = time.perf_counter()
    for batch in batches:
        tokens += [output.token_ids for output in llm.generate(list(batch), params, progress=False)]
    seconds = time.perf_counter() - began
    after = counters.steps, counters.drafted_tokens, counters.accepted_tokens
    return _TaskRun(seconds, tokens, *(end - begin for begin, end in zip(before, after, strict=True)))


def _report(runner: BenchRunner, task: str, size: int, off: _TaskRun, drafted: _TaskRun) -> None:
    num_tokens = sum(map(len, drafted.tokens))
    off_speed, speed = sum(map(len, off.tokens)) / off.seconds, num_tokens / drafted.seconds
    acceptance = drafted.num_accepted / drafted.num_drafted if drafted.num_drafted else 0.0
    per_pass = num_tokens / drafted.num_passes / size
    num_equal = sum(one == other for one, other in zip(off.tokens, drafted.tokens, strict=True))
    runner.print_result({
        "workload": "speculate", "shape": runner.name, "task": task, "batch": size,
        "seconds": round(drafted.seconds, 4), "tokens_per_s": round(speed, 1), "off_tokens_per_s": round(off_speed, 1),
        "speed_up": round(speed / off_speed, 3), "acceptance": round(acceptance, 3),
        "tokens_per_pass": round(per_pass, 3), "drafted": drafted.num_drafted, "equal_outputs": num_equal,
        "outputs": len(drafted.tokens),
    })  # fmt: skip
    runner.table.append(
        f"{task:12} {size:5} {off_speed:10.1f} {speed:11.1f} {speed / off_speed:7.2f}x {acceptance:8.0%} "
        f"{per_pass:8.2f} {drafted.num_drafted:14}"
    )
