"""KV pages between two CUDA executors, in the interpreter: the tokens are those of the CPU executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, SchedulerConfig
from paceline.engine.cuda.build import build_cuda
from paceline.engine.engine import Engine, EngineHooks, ModelInfo
from paceline.scheduler import Scheduler
from paceline.text.synthetic import synthetic_tokenizer
from tests.cluster.disaggregated import Pair
from tests.engine.cuda.interpreted import BASE, GREEDY, INTERPRETED, PROMPTS, decoder, expected, small_tiles

pytestmark = INTERPRETED


INTERPRETER = threading.RLock()  # it runs the programs of one kernel at a time


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with INTERPRETER:
            return function(*args, **options)

    return call


def make(role: str, hooks: EngineHooks | None = None, **options: Any) -> Engine:
    model = decoder("tiny-qwen3")
    spec = model.spec
    config = SchedulerConfig(**{**BASE, **options})
    device, config = build_cuda(model, EngineConfig(role=role), config, None, tuning=small_tiles, prefill_sizes=())
    for name in ("prepare", "launch", "launch_delayed", "export_pages", "run_background_work"):
        setattr(device, name, one_at_a_time(getattr(device, name)))
    return Engine(
        Scheduler(config),
        device,
        synthetic_tokenizer(spec.vocab_size),
        vocab_size=spec.vocab_size,
        spec=spec,
        info=ModelInfo(dtype="float32", kv_bytes_per_token=spec.kv_bytes_per_token(4)),
        hooks=hooks,
    )


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_tokens_of_two_executors_are_those_of_the_cpu(tmp_path: Path, transport: str) -> None:
    prompts = [PROMPTS[0], PROMPTS[2], [*range(3, 30)]]
    wanted = expected("tiny-qwen3", prompts, GREEDY)
    with Pair(tmp_path, transport, make=make, options={"max_swap_pages": 2}) as pair:
        answers = [pair.submit(prompt, 4) for prompt in prompts]
        for answer in answers:
            answer.result(200)
        assert [answer.token_ids for answer in answers] == wanted
        counters = pair.decode.scheduler.counters
        assert counters.received_pages > 6 and counters.fetched_tokens > 0, "what arrived was used"
        # The second has the beginning of the first, which may be there by then.
        assert pair.remote.num_completed == pair.remote.num_started >= 2 and not pair.remote.failures
        pair.check()
