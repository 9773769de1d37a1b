"""The contents of workloads and traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.config import ConfigError, SchedulerConfig, WorkloadConfig
from paceline.simulator.profile import load_profile
from paceline.simulator.run import simulate
from paceline.simulator.traces import block_tokens, read_trace
from paceline.simulator.workloads import DEFAULTS, WORKLOADS, Arrival, make_workload, times
from tests.engine.test_recording import harness, lines_of, requests


def common(one: Arrival, other: Arrival) -> int:
    length = min(len(one.prompt), len(other.prompt))
    differ = np.flatnonzero(one.prompt[:length] != other.prompt[:length])
    return int(differ[0]) if len(differ) else length


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_the_same_seed(name: str) -> None:
    config = WorkloadConfig(requests=32, seed=3)
    one, two = make_workload(name, config), make_workload(name, config)
    assert len(one) == 32
    assert [(a.at, a.id, a.prompt.tolist(), a.output.tolist()) for a in one] == [
        (a.at, a.id, a.prompt.tolist(), a.output.tolist()) for a in two
    ]
    assert [a.at for a in one] == sorted(a.at for a in one)
    assert len({a.id for a in one}) == 32


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "onoff"])
def test_arrivals_have_the_rate_asked_for(arrivals: str) -> None:
    config = WorkloadConfig(requests=20_000, arrivals=arrivals, rate=50)
    assert times(config, np.random.default_rng(0))[-1] == pytest.approx(400, rel=0.06)


def test_arrival_processes_have_their_variance() -> None:
    """The squared coefficient of variation of the time between arrivals; 1 for poisson."""

    def spread(arrivals: str) -> float:
        config = WorkloadConfig(requests=20_000, arrivals=arrivals, burstiness=9)
        gaps = np.diff(times(config, np.random.default_rng(0)))
        return float(gaps.var() / gaps.mean() ** 2)

    assert spread("poisson") == pytest.approx(1, rel=0.1)
    assert spread("gamma") == pytest.approx(9, rel=0.2)
    assert spread("onoff") > 9


def test_a_turn_of_a_conversation_continues_the_previous_turn() -> None:
    chats = {one.id: one for one in make_workload("chat", WorkloadConfig(requests=60))}
    followed = [
        (chats[f"chat{n}-{t}"], chats[f"chat{n}-{t + 1}"])
        for n in range(40)
        for t in range(5)
        if f"chat{n}-{t}" in chats and f"chat{n}-{t + 1}" in chats
    ]
    assert len(followed) > 10
    for turn, later in followed:
        assert later.prompt.tolist()[: len(turn.prompt) + len(turn.output)] == [*turn.prompt, *turn.output]
        assert later.at > turn.at


def test_agents_share_tools_and_agents_of_a_kind_share_more() -> None:
    arrivals = make_workload("agents", WorkloadConfig(requests=60, groups=2, prompt_tokens=400, shared=0.5))
    firsts = {one.id: one for one in arrivals if one.id.endswith("-0")}
    same, other = firsts["agent0-0"], firsts["agent1-0"]
    assert common(same, other) == 200
    assert common(same, firsts["agent2-0"]) >= 250


def test_the_first_tenant_sends_half() -> None:
    arrivals = make_workload("tenants", WorkloadConfig(requests=2000, tenants=4, prompt_tokens=16, output_tokens=1))
    share = sum(one.tenant == "tenant-0" for one in arrivals) / 2000
    assert share == pytest.approx(0.533, abs=0.04)


def test_one_long_is_one_output_of_500_tokens_and_350_of_10_at_once() -> None:
    arrivals = make_workload("one-long", WorkloadConfig(**DEFAULTS["one-long"]))
    assert [len(one.output) for one in arrivals] == [500] + [10] * 350
    assert {one.at for one in arrivals} == {0.0}
    assert {len(one.prompt) for one in arrivals} == {16}


def test_equal_mooncake_blocks_become_equal_prefixes_and_no_others(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 10, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1400, "output_length": 12, "hash_ids": [7, 8, 10]},
        {"timestamp": 9000, "input_length": 300, "output_length": 2, "hash_ids": [11]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two, three = read_trace(path, speed=3)
    assert [one.at, two.at, three.at] == [0, 1, 3]
    assert [len(each.prompt) for each in (one, two, three)] == [1500, 1400, 300]
    assert common(one, two) == 1024
    assert common(one, three) == 0
    run = simulate([one, two, three], SchedulerConfig(num_pages=500), load_profile("h200-qwen3-0.6b"))
    assert [served.cached_tokens for served in run.served] == [0, 1024, 0]


def test_blocks_of_different_ids_begin_differently() -> None:
    tokens = block_tokens(np.arange(20_000), 4).reshape(-1, 4)
    assert len(np.unique(tokens, axis=0)) == 20_000
    assert tokens.min() >= 0 and tokens.max() < 50_000


def test_azure_csv_is_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    one, two = read_trace(path)
    assert (one.at, len(one.prompt), len(one.output)) == (0, 374, 44)
    assert two.at == pytest.approx(4.314579, abs=1e-5)
    assert len(read_trace(path, limit=1)) == 1


def test_a_replayed_recording_has_the_same_cache_hits(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    run = harness(num_pages=400, page_size=4, max_running=2)
    lines_of(path, run, requests())
    arrivals = read_trace(path)
    replayed = simulate(arrivals, run.scheduler.config, load_profile("h200-qwen3-0.6b"))
    assert {one.id: (one.prompt_tokens, one.output_tokens) for one in replayed.served} == {
        name: (len(request.prompt), len(request.output)) for name, request in run.requests.items()
    }
    assert replayed.counters.hit_tokens == run.scheduler.counters.hit_tokens > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"begins with b'a,b\\n': expected Azure's CSV"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 cannot be read"),
        ('{"timestamp": 1, "hash_ids": "x"}\n', "line 1 cannot be read"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_an_unreadable_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
