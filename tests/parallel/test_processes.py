"""Tensor and pipeline parallelism with a process for every rank: generation, failure, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from paceline.checks.weights import write_folder
from paceline.config import ConfigError, EngineConfig
from paceline.engine import build, rank_processes
from paceline.engine.output import EngineFailed
from paceline.engine.rank_messages import RankSetup
from paceline.engine.rank_processes import RankProcesses
from paceline.llm import LLM
from paceline.model.shapes import shape as named_shape
from paceline.model.weights import random_weights
from paceline.request import InvalidRequest, SamplingParams
from paceline.scheduler.plan import DRAFT_DEPTHS
from tests.engine.cpu.test_draft_model import FourDrafts
from tests.server.process import serving
from tests.tiny_folder import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(3, 3 + count)) for count in (5, 23, 40)]
TINY: dict[str, Any] = {"load": "random", "shape": "tiny-llama", "kv_tokens": 4096}


def ranks_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "paceline.engine.rank_process" in child.cmdline()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collectives": "gloo", "tp": 2, "executor": "virtual"}, "collectives is 'gloo' and executor is 'virtual'"),
        ({"collectives": "gloo"}, "collectives is 'gloo' and tp is 1"),
        ({"quantization": "q4", "executor": "virtual"}, "quantization is 'q4' and executor is 'virtual'"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_more_stages_than_layers_are_refused_before_a_process_is_started() -> None:
    with pytest.raises(ValueError, match="num_layers is 4, which 5 stages cannot divide"):
        LLM(**TINY, pp=5)
    assert not ranks_of(os.getpid())


def test_more_ranks_than_heads_are_refused_before_a_process_is_started() -> None:
    with pytest.raises(ValueError, match="num_heads is 6, which 8 ranks cannot divide"):
        LLM(**TINY, tp=8)
    assert not ranks_of(os.getpid())


@cache
def alone(shape: str = TINY["shape"]) -> list[list[int]]:
    """The tokens of an engine without other processes."""
    with LLM(**{**TINY, "shape": shape}) as llm:
        return tokens_of(llm)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.cluster
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2-moe"])
def test_two_processes_generate_and_end_with_the_engine(shape: str) -> None:
    with LLM(**{**TINY, "shape": shape}, tp=2) as llm:
        assert tokens_of(llm) == alone(shape)
        assert len(ranks_of(os.getpid())) == 1
    assert not ranks_of(os.getpid())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "precision"),
    [({"pp": 2, "dtype": "float32"}, "float32"), ({"pp": 2}, "4- and 8-bit"), ({"tp": 2}, "4- and 8-bit")],
    ids=str,
)
def test_the_default_model_is_divided_in_the_bits_of_its_file(
    options: dict[str, Any], precision: str, smollm2_path: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(smollm2_path), kv_tokens=512, **options) as llm:
        assert llm.engine.info.dtype == precision and llm.engine.executor.capabilities.weights == (
            precision == "float32"
        )
        outputs = llm.generate([[504, 3575, 282, 4649, 314], [504, 3575]], params)
        assert outputs[0].token_ids == [7042, 30, 198, 198, 504, 2988, 314, 42]
        assert len(ranks_of(os.getpid())) == max(options.get("pp", 1), options.get("tp", 1)) - 1
    assert not ranks_of(os.getpid())


def assert_it_ends(llm: LLM, rank: int, signal_name: str, reason: str, *, idle: bool = False) -> None:
    """A rank is killed or suspended: the engine fails with the reason, and leaves no process behind."""
    assert tokens_of(llm) == alone()
    process = next(one for one in ranks_of(os.getpid()) if one.cmdline()[-4] == str(rank))
    getattr(process, signal_name)()
    if idle:
        wait_until(lambda: llm.engine.failure is not None)
    with pytest.raises(EngineFailed, match=reason):
        tokens_of(llm)
    llm.close()
    assert not ranks_of(os.getpid())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "rank", "idle"), [({"tp": 2}, 1, True), ({"pp": 3}, 1, False), ({"pp": 3}, 2, False)], ids=str
)
def test_a_rank_that_is_killed_ends_the_engine_with_the_reason(options: dict[str, int], rank: int, idle: bool) -> None:
    reason = rf"rank {rank} of {sum(options.values())} ended unexpectedly \(signal SIGKILL\)"
    assert_it_ends(LLM(**TINY, **options), rank, "kill", reason, idle=idle)


@pytest.mark.cluster
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_rank_that_hangs_ends_the_pass_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    monkeypatch.setattr(rank_processes, "_MISSED_BEATS", 4)
    assert_it_ends(LLM(**TINY, **options), 1, "suspend", "rank 1 of 2 has not responded for")


@pytest.mark.cluster
def test_two_processes_draft_with_a_model_from_a_folder(tmp_path: Path) -> None:
    path, draft = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "draft")
    options: dict[str, Any] = {"kv_tokens": 2048, "speculate": "draft", "draft_model": str(draft), "dtype": "float32"}
    with LLM(str(path), tp=2, **options) as llm:
        llm.engine.scheduler.draft_depth = FourDrafts(max(DRAFT_DEPTHS))
        found, counters = tokens_of(llm), llm.engine.scheduler.counters
        assert counters.accepted_tokens == counters.drafted_tokens > 12
    with LLM(str(path), kv_tokens=2048, dtype="float32", speculate="off") as llm:
        assert found == tokens_of(llm)


@pytest.mark.cluster
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_weights_are_replaced_on_all_ranks_or_on_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, int]
) -> None:
    spec, tiny = named_shape("tiny-qwen3"), {**TINY, "shape": "tiny-qwen3"}
    write_folder(tmp_path, spec, random_weights(spec, seed=9, dtype="float32"))
    with LLM(**tiny) as llm:
        llm.update_weights(tmp_path)
        expected = tokens_of(llm)
    with LLM(**tiny, **options) as llm:
        executor = llm.engine.executor
        with monkeypatch.context() as patched:
            announce = executor.announce_weights
            patched.setattr(executor, "announce_weights", lambda source: announce(replace(source, files="others")))
            with pytest.raises(InvalidRequest, match=r"rank 1 of 2: .* has changed while it was read"):
                llm.update_weights(tmp_path)
        assert tokens_of(llm) == alone("tiny-qwen3")
        llm.update_weights(tmp_path)
        assert tokens_of(llm) == expected != alone("tiny-qwen3")
        monkeypatch.setattr(executor, "announce_weights", lambda _: ranks_of(os.getpid())[0].kill())
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 ended unexpectedly \(signal SIGKILL\)"):
            llm.update_weights(tmp_path)
        wait_until(lambda: llm.engine.failure is not None)
    assert not ranks_of(os.getpid())


@pytest.mark.cluster
def test_a_rank_that_cannot_be_built_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = RankProcesses.connect

    def with_another_shape(ranks: RankProcesses, setup: RankSetup) -> None:
        connect(ranks, msgspec.structs.replace(setup, shape="gone"))

    monkeypatch.setattr(RankProcesses, "connect", with_another_shape)
    with pytest.raises(ConfigError, match="rank 1 of 2: shape is 'gone', which is not known"):
        LLM(**TINY, tp=2)
    assert not ranks_of(os.getpid())


@pytest.mark.cluster
def test_the_report_of_a_rank_takes_the_place_of_its_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RankProcesses] = []
    connect = RankProcesses.connect

    def with_another_device(ranks: RankProcesses, setup: RankSetup) -> None:
        found.append(ranks)
        connect(ranks, msgspec.structs.replace(setup, engine_options={**setup.engine_options, "device": "gone"}))

    def closed(*_: Any) -> None:
        wait_until(lambda: found[0].failure is not None)
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(RankProcesses, "connect", with_another_device)
    monkeypatch.setattr(build, "links", closed)
    with pytest.raises(ConfigError, match="rank 1 of 2: device is 'gone'"):
        LLM(**TINY, tp=2)


@pytest.mark.cluster
def test_no_rank_outlives_an_engine_that_is_killed() -> None:
    code = f"from paceline.llm import LLM; llm = LLM(**{TINY!r}, tp=3); print('up', flush=True); input()"
    files = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    ranks = ranks_of(parent.pid)
    assert len(ranks) == 2
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(rank.is_running() for rank in ranks))
    assert set(os.listdir("/dev/shm")) <= files


@pytest.mark.cluster
def test_a_server_restarts_its_engine_when_a_rank_is_killed() -> None:
    body = {"model": "tiny-llama", "prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    options = ["--load", "random", "--shape", "tiny-llama", "--kv-tokens", "4096", "--tp", "2"]
    with serving(*options) as server:

        def complete() -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        expected = complete().json()["choices"][0]["text"]
        (engine,) = server.children["engine"]
        (rank,) = ranks_of(engine)
        os.kill(rank.pid, signal.SIGKILL)
        wait_until(lambda: server.children["engine"] not in ([engine], []))
        wait_until(lambda: complete().status_code == 200)
        assert complete().json()["choices"][0]["text"] == expected
        assert not psutil.pid_exists(engine)
    assert not rank.is_running()
