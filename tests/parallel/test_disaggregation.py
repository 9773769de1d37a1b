"""Prefill/decode disaggregation between engines with tensor parallelism: each rank copies its part of every page."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from paceline.cluster.kv_protocol import layout_of
from paceline.cluster.kv_transfer import GRACE_S
from paceline.config import EngineConfig, ServerConfig, check_replicas
from paceline.engine.build import build_engine
from paceline.engine.build.assemble import assemble
from paceline.engine.build.executor import build_executor
from paceline.engine.cpu.linear import arrange
from paceline.engine.engine import Engine, EngineHooks
from paceline.engine.job import Job
from paceline.engine.rank_copies import CopyReports
from paceline.engine.rank_messages import CopiesEnded
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelSpec
from paceline.request import FinishReason, PacelineError, SamplingParams
from paceline.scheduler.invariants import check
from paceline.shared_pages import SharedPages
from paceline.text.synthetic import synthetic_tokenizer
from tests.cluster.disaggregated import TINY, Answer, Pair
from tests.cluster.test_kv_engines import wait_until
from tests.parallel.ranks import ThreadRanks, make_weights, sharded_decoders
from tests.parallel.test_processes import ranks_of

OPTIONS = {name: value for name, value in TINY.items() if name not in ("load", "shape", "threads", "dtype")}
RNG = np.random.default_rng(4)
SHARED = RNG.integers(3, 500, 12).tolist()
PROMPTS = [[*SHARED, *RNG.integers(3, 500, 9 + 8 * number).tolist()] for number in range(4)]


@cache
def model(num_kv_heads: int) -> tuple[ModelSpec, dict[str, Tensor]]:
    spec = vary(shape("tiny-llama"), num_kv_heads=num_kv_heads)
    return spec, make_weights(spec)


def make(
    num_kv_heads: int = 2, tp: int = 2, role: str = "both", hooks: EngineHooks | None = None, **options: Any
) -> Engine:
    """An engine whose ranks are threads."""
    spec, weights = model(num_kv_heads)
    config, options = EngineConfig(threads=1, role=role), {**OPTIONS, **options}
    first, *others = (arrange(one) for one in sharded_decoders(spec, weights, tp))
    ranks = ThreadRanks([build_executor(one, config, options).executor for one in others]) if others else None
    return assemble(first, synthetic_tokenizer(spec.vocab_size), config, options, hooks=hooks, ranks=ranks)


def tokens_of(engine: Engine) -> list[list[int]]:
    found = []
    for tokens in PROMPTS:
        engine.submit(Job(tokens, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)), answer := Answer())
        answer.result()
        found.append(answer.token_ids)
    engine.close()
    return found


@cache
def alone(num_kv_heads: int) -> list[list[int]]:
    """Of one engine without ranks."""
    return tokens_of(make(num_kv_heads, tp=1))


def ask_all(pair: Pair, expected: list[list[int]]) -> None:
    answers = [pair.submit(tokens) for tokens in PROMPTS]
    for answer in answers:
        answer.result()
    assert [answer.token_ids for answer in answers] == expected


def assert_pages_came(pair: Pair) -> None:
    counters = pair.decode.scheduler.counters
    assert pair.remote.num_completed == len(PROMPTS) and pair.remote.num_recomputed == 0
    assert counters.received_pages > 20
    assert counters.computed_tokens < 4 * len(PROMPTS) + 8, "only the ends of the prompts"
    assert pair.server is not None and pair.remote.num_bytes == pair.server.num_bytes > 0
    pair.check()
    assert pair.num_reserved() == 0


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize(("num_kv_heads", "tp"), [(2, 2), (3, 2), (2, 3)], ids=["even", "uneven", "shared"])
def test_tokens_are_those_of_one_engine(tmp_path: Path, transport: str, num_kv_heads: int, tp: int) -> None:
    """Also if ranks have different numbers of KV heads, or there are fewer KV heads than ranks."""
    with Pair(tmp_path, transport, make=make, options={"num_kv_heads": num_kv_heads, "tp": tp}) as pair:
        assert pair.remote.layout.tp == tp
        ask_all(pair, alone(num_kv_heads))
        assert_pages_came(pair)


def test_another_number_of_ranks_is_rejected_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), Pair(tmp_path, make=make, options={}, decode={"tp": 1}) as pair:
        ask_all(pair, alone(2))
        assert pair.remote.num_completed == 0 and pair.decode.scheduler.counters.received_pages == 0
        wait_until(lambda: pair.num_reserved() == 0, GRACE_S + 30)
        pair.check()
    assert "a decode engine was rejected: the KV layouts differ: tp is 2 here and 1 there" in caplog.text
    assert "its prompts are computed here" in caplog.text


def rank_executors(engine: Engine) -> Any:
    executor: Any = engine.executor
    return executor._ranks.executors


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_rank_that_cannot_copy_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Nothing is sent before all ranks have copied their part."""
    with Pair(tmp_path, transport, make=make, options={}) as pair:
        (rank,) = rank_executors(pair.prefill)

        def fail(*_: Any) -> None:
            raise RuntimeError("no copy")

        monkeypatch.setattr(rank.runner.cache, "export", fail)
        ask_all(pair, alone(2))
        assert pair.remote.num_completed == 0 and pair.remote.num_recomputed == len(PROMPTS)
        assert pair.remote.failures.keys() <= {"connection"}
        wait_until(lambda: pair.num_reserved() == 0, GRACE_S + 30)
        pair.check()


def test_memory_that_a_rank_cannot_map_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unmapped = []

    def make_failing(**options: Any) -> Engine:
        engine = make(**options)
        if options["role"] == "prefill":
            (rank,) = rank_executors(engine)

            def fail(target: SharedPages) -> None:
                raise RuntimeError("no memory")

            monkeypatch.setattr(rank, "map_pages", fail)
            monkeypatch.setattr(engine.executor.local, "unmap_pages", unmapped.append)
        return engine

    with caplog.at_level("WARNING"), Pair(tmp_path, make=make_failing, options={}) as pair:
        ask_all(pair, alone(2))
        assert pair.remote.num_completed == 0
        wait_until(lambda: pair.num_reserved() == 0, GRACE_S + 30)
    assert "rank 1 cannot share memory: no memory" in caplog.text
    assert unmapped, "rank 0 does not keep it"


def shared_files() -> int:
    """Descriptors of this process for shared pages."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found += "paceline-kv" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_a_decode_engine_that_disconnects_leaves_no_descriptor_on_any_rank(tmp_path: Path) -> None:
    gc.collect()  # engines of other tests
    before = shared_files()
    with Pair(tmp_path, make=make, options={}) as pair:
        server, peer = pair.server, next(iter(pair.remote._peers.values()))
        assert server is not None
        for number in range(2):
            pair.submit(PROMPTS[number]).result()
            # The host tier of each rank, which rank 0 has too; and the same, of the prefill engine's ranks. A mapping
            # has a descriptor of its own.
            assert shared_files() == before + 12
            next(iter(server._links)).connection.close("test")
            wait_until(lambda: shared_files() == before + 6)
            peer.connect()
            wait_until(lambda: peer._connection is not None and server._links)
        pair.submit(PROMPTS[3]).result()
        assert pair.remote.num_completed == 3


def test_a_connection_ends_when_no_rank_can_write_any_more() -> None:
    """Rank 0 may be killed while another rank copies."""
    engine = make(role="prefill")
    target = SharedPages.create(4, *layout_of(engine, "m").rank_page_bytes)
    theirs, mine = socket.socketpair()
    with theirs, mine:
        target.connection = mine.fileno()
        engine.executor.map_pages(target)
        mine.close()
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        engine.executor.unmap_pages(target)
        assert theirs.recv(1) == b""
    engine.close()


def test_a_copy_ends_when_it_has_ended_on_all_ranks_or_one_is_lost() -> None:
    reports = CopyReports(2)
    first, second = reports.expect(), reports.expect()
    reports.on_report(0, CopiesEnded())
    reports.on_report(0, CopiesEnded())
    reports.on_report(1, CopiesEnded())
    first.wait()
    assert not second._ended.is_set()  # type: ignore[attr-defined]
    reports.on_lost(1, PacelineError("rank 2 is lost"))
    first.wait()
    third = reports.expect()
    reports.on_report(0, CopiesEnded())
    for one in (second, third):
        with pytest.raises(PacelineError, match="rank 2 is lost"):
            one.wait()


@pytest.mark.parametrize("server", [{"replicas": 2, "prefill_replicas": 1}, {
    "role": "prefill", "kv_listen": "tcp://127.0.0.1:1", "kv_token": "x" * 16}])  # fmt: skip
def test_roles_are_accepted_with_tensor_parallelism(server: dict[str, Any]) -> None:
    check_replicas(ServerConfig(**server), EngineConfig(tp=2), ())


# ---------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # Without num_host_pages, as a server is started: the ranks agree on it.
    with Pair(tmp_path_factory.mktemp("kv"), options={**TINY, "tp": 2}, decode={"num_host_pages": 0}) as pair:
        yield pair
    assert not ranks_of(os.getpid())


@pytest.fixture(scope="module")
def one() -> list[list[int]]:
    return tokens_of(build_engine(**TINY))


@pytest.mark.cluster
def test_ranks_in_processes_write_the_memory_of_the_ranks_of_the_decode_engine(
    processes: Pair, one: list[list[int]]
) -> None:
    ask_all(processes, one)
    assert_pages_came(processes)


@pytest.mark.cluster
def test_killing_a_rank_of_the_prefill_engine_under_load_loses_no_request(
    processes: Pair, one: list[list[int]]
) -> None:
    for engine in (processes.prefill, processes.decode):
        engine.call(lambda scheduler: scheduler.flush_cache()).result()
    server, executor = processes.server, cast(Any, processes.prefill.executor)
    assert server is not None
    (victim,) = executor._ranks._processes
    victim.send_signal(signal.SIGSTOP)  # so that passes and copies wait for it
    before = processes.remote.num_completed
    copies = processes.prefill.call(lambda _: executor.after_launched()).result()
    answers = [processes.submit([*PROMPTS[number % 4], *range(3, 3 + number)]) for number in range(16)]
    wait_until(lambda: server.num_open == len(answers))
    victim.kill()
    with pytest.raises(PacelineError, match="rank 1 of 2 ended unexpectedly"):
        copies.wait()
    wait_until(lambda: processes.prefill.failure is not None)
    for answer in answers:
        assert answer.result().finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 6
    assert processes.remote.num_completed == before
    ask_all(processes, one)
    assert len(ranks_of(os.getpid())) == 1, "that of the decode engine"
    wait_until(lambda: processes.num_reserved() == 0, GRACE_S + 30)
    processes.decode.call(check).result()
