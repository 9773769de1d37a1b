"""KV transfers by NIXL, with the real library over what UCX finds on this machine."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cluster import kv_nixl
from paceline.cluster.kv_nixl import NixlMemory, RemoteMemory
from paceline.cluster.kv_receiver import RemotePrefill
from paceline.request import PacelineError
from paceline.shared_pages import SharedPages
from tests.cluster.disaggregated import Pair
from tests.cluster.test_kv_engines import PROMPTS, ask_all, expected, wait_until
from tests.ports import free_ports
from tests.server.process import ServerProcess, serving
from tests.server.virtual import complete, metric

__all__ = ["expected"]  # a fixture
pytestmark = pytest.mark.cluster
pytest.importorskip("nixl", reason="`make test-cluster` installs NIXL")


class Memories:
    """Two engines' memories, of two ranks each, whose parts of a page have different sizes."""

    def __init__(self) -> None:
        self.pages = [SharedPages.create(8, 4096, 1000), SharedPages.create(12, 4096, 1000)]
        self.here, self.there = (NixlMemory(one) for one in self.pages)

    def fill(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        data = rng.integers(0, 256, (8, 5096), np.uint8)
        self.pages[0].write(np.arange(8, dtype=np.int32), data)
        return data

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def memories() -> Iterator[Memories]:
    found = Memories()
    yield found
    found.close()


def test_pages_are_written_where_they_belong_and_nowhere_else(memories: Memories) -> None:
    data, remote = memories.fill(), memories.here.connect(memories.there.describe())
    pages, targets = np.array([5, 0, 3], np.int32), np.array([1, 11, 6], np.int32)
    remote.write(pages, targets)
    found = memories.pages[1].read(np.arange(12, dtype=np.int32))
    assert np.array_equal(found[targets], data[pages])
    assert not found[[0, 2, 3, 4, 5, 7, 8, 9, 10]].any()
    remote.close()


def test_an_engine_that_connects_again_can_be_written_until_both_connections_have_ended(memories: Memories) -> None:
    data, page = memories.fill(), np.array([2], np.int32)
    offered = memories.there.describe()
    first, second = memories.here.connect(offered), memories.here.connect(offered)
    first.close()
    second.write(page, page)
    assert np.array_equal(memories.pages[1].read(page), data[page])
    second.close()
    third = memories.here.connect(offered)
    third.write(page, page + 1)
    assert np.array_equal(memories.pages[1].read(page + 1), data[page])


def test_memory_that_does_not_fit_is_refused(memories: Memories) -> None:
    offered = memories.there.describe()
    with pytest.raises(PacelineError, match="memory of 1 ranks and 12 pages was offered"):
        memories.here.connect(RemoteMemory(offered.agent, offered.addresses[:1], 12))


def test_a_write_outside_the_memory_that_was_offered_fails(memories: Memories) -> None:
    remote = memories.here.connect(memories.there.describe())
    with pytest.raises(Exception, match=r"(?i)nixl"):
        remote.write(np.array([0], np.int32), np.array([1 << 20], np.int32))


def test_tokens_are_those_of_one_engine(
    tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.kv"), Pair(tmp_path, "nixl") as pair:
        ask_all(pair, expected)
        assert pair.remote.num_completed == len(PROMPTS) and pair.remote.num_recomputed == 0
        assert pair.decode.scheduler.counters.received_pages > 40
        assert pair.remote.num_bytes == pair.server.num_bytes > 0
        pair.check()
        assert pair.num_reserved() == 0
        assert "is connected by NIXL" in caplog.text


def test_a_write_that_fails_costs_only_time(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(tmp_path, "nixl") as pair:
        monkeypatch.setattr(kv_nixl, "WRITE_S", -1.0)  # a write that is not done at once is lost
        monkeypatch.setattr(type(pair.server._memory._agent), "transfer", lambda agent, handle: "PROC")
        ask_all(pair, expected)
        assert pair.remote.num_completed == 0 and pair.remote.num_recomputed > 0
        wait_until(lambda: pair.num_reserved() == 0)
        monkeypatch.undo()
        others = itertools.count(1)  # what was computed here in the meantime is cached
        wait_until(lambda: pair.submit([next(others) % 500, *PROMPTS[5]]).result() and pair.remote.num_completed > 0)
        pair.check()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_with_nixl_on_one_side_pages_are_sent_over_tcp(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    class Other(RemotePrefill):
        def __init__(self, *args: Any, nixl: bool, **options: Any) -> None:
            super().__init__(*args, nixl=side == "decode", **options)

    monkeypatch.setattr("tests.cluster.disaggregated.RemotePrefill", Other)
    if side == "decode":
        monkeypatch.setattr("paceline.cluster.kv_sender.NixlMemory", lambda pages: None)
    with Pair(tmp_path, "nixl") as pair:
        ask_all(pair, expected)
        assert pair.remote.num_completed == len(PROMPTS) and pair.remote.num_recomputed == 0
        assert (pair.remote.memory is None) == (side == "prefill")


def test_memory_that_the_prefill_engine_cannot_reach_is_sent_over_tcp(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(memory: NixlMemory, remote: RemoteMemory) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(NixlMemory, "connect", unreachable)
    with Pair(tmp_path, "nixl") as pair:
        ask_all(pair, expected)
        assert pair.remote.num_completed == len(PROMPTS)
    assert "pages are sent over TCP: NIXL cannot reach the decode engine (no route)" in caplog.text


def test_two_servers_transfer_by_nixl() -> None:
    address = f"tcp://127.0.0.1:{free_ports(1)}"
    options = (
        *("--load", "random", "--shape", "tiny-llama", "--served-name", "virtual", "--threads", "1"),
        *("--kv-token", "a-secret-of-both", "--kv-transport", "nixl", "--prefill-from-tokens", "32"),
        *("--kv-tokens", "1024", "--log-level", "warning"),
    )
    prompts = [[*range(5 + number, 65 + number)] for number in range(3)]

    def answers(server: ServerProcess, salt: str) -> list[str]:
        responses = [complete(server, prompt, 4, temperature=0, cache_salt=salt) for prompt in prompts]
        return [response.json()["choices"][0]["text"] for response in responses]

    with (
        serving(*options, "--role", "prefill", "--kv-listen", address) as prefill,
        serving(*options, "--role", "decode", "--prefill-peers", address, "--host-kv-tokens", "1024") as decode,
    ):
        assert answers(decode, "one") == answers(prefill, "one")
        assert metric(decode, "kv_transfers_total") == len(prompts)
        os.kill(prefill.children["engine"][0], signal.SIGKILL)
        assert answers(decode, "two") == answers(decode, "three"), "it computes the prompts itself, or a new engine"
    assert "Traceback" not in prefill.output + decode.output


def test_without_the_library_the_start_ends_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    with pytest.raises(PacelineError, match=r"pip install 'paceline\[nixl\]', or set it to tcp"):
        NixlMemory(SharedPages.create(1, 8))
