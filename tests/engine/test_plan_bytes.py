"""A plan is a value: another process executes a whole run from the bytes alone."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.codec import TypedDecoder, encode
from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cpu.executor import CpuModelRunner
from paceline.engine.engine import Engine
from paceline.engine.executor import Capabilities, Executor, Result
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.model.weights import random_decoder
from paceline.request import PacelineError, SamplingParams, as_tokens
from paceline.scheduler import Scheduler
from paceline.scheduler.plan import Plan
from paceline.text.synthetic import synthetic_tokenizer

SHAPE = "tiny-qwen3"
OPTIONS = {"num_pages": 64, "page_size": 4, "max_running": 4, "context_tokens": 200, "chunk_tokens": 7}
PROMPTS = [list(range(3, 3 + count)) for count in (5, 23, 40, 11, 23, 8)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=7, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=8, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=20, ignore_eos=True),
    SamplingParams(
        temperature=0, logprobs=3, prompt_logprobs=2, logprob_token_ids=(5,), max_tokens=12, ignore_eos=True
    ),
    SamplingParams(temperature=0, logit_bias={9: 5.0}, min_tokens=6, max_tokens=20),
    SamplingParams(seed=9, bad_words=("a",), frequency_penalty=0.3, max_tokens=20, ignore_eos=True),
]

CHILD = """
import struct, sys
from paceline.codec import TypedDecoder, encode
from paceline.scheduler.plan import Plan
from tests.engine.test_plan_bytes import make_runner
runner, plans = make_runner(), TypedDecoder(Plan)
while header := sys.stdin.buffer.read(4):
    data = sys.stdin.buffer.read(struct.unpack("<I", header)[0])
    answer = encode(runner.run(plans.decode(data), None))
    sys.stdout.buffer.write(struct.pack("<I", len(answer)) + answer)
    sys.stdout.buffer.flush()
"""


def make_runner() -> CpuModelRunner:
    decoder = random_decoder(shape(SHAPE), seed=5, dtype="float32", max_positions=200)
    return CpuModelRunner(decoder, num_pages=64, page_size=4, max_running=4, max_row_tokens=200)


class ProcessExecutor(Executor):
    """Sends the bytes of each plan to another process."""

    capabilities = Capabilities(logits=True, pooling=True)

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._results: TypedDecoder[Result] = TypedDecoder(Result)
        self.num_plans = 0

    def launch(self, plan: Plan) -> ProcessExecutor:
        data = encode(plan)
        assert self._child.stdin is not None
        self._child.stdin.write(struct.pack("<I", len(data)) + data)
        self._child.stdin.flush()
        self.num_plans += 1
        return self

    def wait(self) -> Result:
        """Results arrive in launch order, which is also the order of waiting."""
        assert self._child.stdout is not None
        (size,) = struct.unpack("<I", self._child.stdout.read(4))
        return self._results.decode(self._child.stdout.read(size))


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen[bytes]]:
    """One process for all engines: it imports torch once."""
    made = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield made
    made.communicate()
    assert made.returncode == 0


def engine_on(executor: Executor, overlap: str, **options: Any) -> Engine:
    spec = shape(SHAPE)
    with_model = assemble(
        random_decoder(spec, seed=5, dtype="float32", max_positions=200),
        synthetic_tokenizer(spec.vocab_size),
        EngineConfig(threads=1),
        {**OPTIONS, **options},
    )
    config = with_model.scheduler.config
    with_model.close()
    return Engine(
        Scheduler(config),
        executor,
        synthetic_tokenizer(spec.vocab_size),
        vocab_size=spec.vocab_size,
        overlap=overlap,
    )


def local_engine() -> Engine:
    spec = shape(SHAPE)
    decoder = random_decoder(spec, seed=5, dtype="float32", max_positions=200)
    config = EngineConfig(threads=1, overlap="off")
    return assemble(decoder, synthetic_tokenizer(spec.vocab_size), config, OPTIONS)


def outputs_of(engine: Engine) -> list[Any]:
    outputs = LLM.from_engine(engine).generate(PROMPTS, PARAMS)
    return [(one.token_ids, one.logprobs, one.prompt_logprobs, one.finish_reason) for one in outputs]


class Last:
    """Keeps the final delta."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.delta: OutputDelta | None = None

    def put(self, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            self.delta = delta
            self.done.set()

    def refuse(self, error: PacelineError) -> None:
        raise AssertionError(error)


def embedding_of(engine: Engine, pooling: str) -> np.ndarray:
    sink = Last()
    engine.submit(Job(engine.encode(PROMPTS[2]), SamplingParams(max_tokens=1), pooling=pooling), sink)
    assert sink.done.wait(60) and sink.delta is not None and sink.delta.vector is not None
    return np.frombuffer(sink.delta.vector, np.float32)


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[list[Any], dict[str, np.ndarray]]]:
    engine = local_engine()
    yield outputs_of(engine), {pooling: embedding_of(engine, pooling) for pooling in ("mean", "last")}
    engine.close()


def test_another_process_executes_a_run_from_the_bytes_alone(
    child: subprocess.Popen[bytes], expected: tuple[list[Any], dict[str, np.ndarray]]
) -> None:
    executor = ProcessExecutor(child)
    engine = engine_on(executor, overlap="on")
    try:
        assert outputs_of(engine) == expected[0]
        for pooling, vector in expected[1].items():
            assert np.array_equal(embedding_of(engine, pooling), vector)
        assert engine.scheduler.counters.steps == executor.num_plans > 20
    finally:
        engine.close()


def test_a_draft_source_is_in_the_bytes(child: subprocess.Popen[bytes]) -> None:
    executor = ProcessExecutor(child)
    engine = engine_on(executor, overlap="on", draft_tokens=7)
    outputs: list[list[int]] = [[]]
    num_plans = [0]
    try:
        for _ in range(2):
            sink, source = Last(), as_tokens(outputs[-1])
            engine.submit(Job(engine.encode(PROMPTS[1]), PARAMS[0], stream=False, draft_source=source), sink)
            assert sink.done.wait(60) and sink.delta is not None
            outputs.append(list(sink.delta.token_ids))
            num_plans.append(executor.num_plans)
    finally:
        engine.close()
    assert outputs[1] == outputs[2] and num_plans[2] - num_plans[1] < num_plans[1] - 8
