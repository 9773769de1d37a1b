"""The options and simulations that the simulator page requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paceline.config import BATCHING, EVICTION, POLICIES, ConfigError, SchedulerConfig, WorkloadConfig
from paceline.simulator.compare import scheduler_config
from paceline.simulator.profile import load_profile
from paceline.simulator.run import simulate
from paceline.simulator.ui import DEFAULTS, WORKLOAD_DEFAULTS, describe, run_frames
from paceline.simulator.workloads import make_workload

# Runs that wait for slots, for memory and for a batch, retract, and move pages to host memory and back.
RUNS: dict[str, dict[str, str]] = {
    "defaults": {},
    "little memory": {"num_pages": "40", "policy": "fcfs", "overlap": "false"},
    "static": {"batching": "static", "requests": "24"},
    "at once": {"arrivals": "once", "requests": "24", "policy": "lpm"},
    "tenants": {"workload": "tenants"},
    "drafts": {"drafts": "4", "acceptance": "0.6", "num_pages": "80"},
    "host memory": {"num_pages": "64", "num_host_pages": "200", "host_page_cost": "1", "prefix_wait_tokens": "16"},
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_frames(RUNS[request.param])


@pytest.mark.parametrize(("name", "choices"), [("policy", POLICIES), ("batching", BATCHING), ("eviction", EVICTION)])
def test_the_page_gets_a_sentence_for_every_choice(name: str, choices: dict[str, str]) -> None:
    option = describe()[name]
    assert option["choices"] == tuple(choices)
    assert option["choice_help"] == choices


def test_the_page_gets_a_help_text_for_every_option_and_no_hidden_ones() -> None:
    options = describe()
    assert options.keys() >= DEFAULTS.keys()
    assert all(option["help"] for option in options.values())
    assert "draft_tokens" not in options
    assert options["tenants"]["default_of"] == {"tenants": WORKLOAD_DEFAULTS["tenants"]["tenants"]}


def test_frames_cover_the_run_and_unknown_parameters_are_refused() -> None:
    run = run_frames({"requests": "8", "policy": "lpm"})
    assert run["policy"] == "lpm" and run["summary"]["requests"] == 8
    assert len(run["frames"]) - 1 == len(run["lanes"]) == run["summary"]["passes"]
    assert (run["frames"][0]["time"], run["frames"][-1]["time"]) == (
        0.0,
        pytest.approx(run["summary"]["seconds"], abs=1e-6),
    )
    with pytest.raises(ConfigError, match="unknown parameter 'draft_tokens'"):
        run_frames({"draft_tokens": "2"})
    with pytest.raises(ConfigError, match="unknown parameter 'tenant_weights'"):
        run_frames({"tenant_weights": "a=1"})
    with pytest.raises(ConfigError, match="workload is 'nano': choose one of agents, chat, one-long, prefixes"):
        run_frames({"workload": "nano"})


def test_the_figures_are_those_of_a_simulation_without_frames() -> None:
    found = run_frames({"policy": "fcfs", "batching": "static", "overlap": "false", "num_pages": "64"})["summary"]
    work = WorkloadConfig(**{name: DEFAULTS[name] for name in WorkloadConfig.__dataclass_fields__ if name in DEFAULTS})
    options = {name: DEFAULTS[name] for name in SchedulerConfig.__dataclass_fields__ if name in DEFAULTS}
    options |= {"policy": "fcfs", "batching": "static", "num_pages": 64}
    arrivals, profile = make_workload("prefixes", work), load_profile(DEFAULTS["gpu"])
    run = simulate(arrivals, scheduler_config(arrivals, profile, options), profile, overlap=False)
    assert found == run.summary()
    assert found["finished"] == len(run.served) == 64
    assert found["requests_per_s"] == pytest.approx(64 / run.seconds)
    assert found["wait_mean_ms"] == pytest.approx(1e3 * sum(one.admitted - one.arrival for one in run.served) / 64)


def test_drafts_are_shown_while_speculation_is_on() -> None:
    off, on = run_frames({"acceptance": "0.8"}), run_frames({"drafts": "4", "acceptance": "0.8"})
    assert "drafted_tokens" not in off["summary"] and {tuple(lane[7:]) for lane in off["lanes"]} == {(0, 0)}
    summary, counters = on["summary"], on["frames"][-1]["counters"]
    assert (summary["drafted_tokens"], summary["accepted_tokens"]) == tuple(
        sum(lane[index] for lane in on["lanes"]) for index in (7, 8)
    )
    assert (counters["drafted_tokens"], counters["accepted_tokens"]) == (
        summary["drafted_tokens"],
        summary["accepted_tokens"],
    )
    assert on["summary"]["passes"] < off["summary"]["passes"]


def test_counts_agree_with_rows_in_every_frame(run: dict[str, Any]) -> None:
    for frame in run["frames"]:
        rows = frame["waiting"]
        assert len(rows) == frame["num_waiting"] == frame["phases"]["waiting"]
        assert {kind: count for kind, count, _ in frame["reasons"]} == Counter(row["reason"] for row in rows)
        assert Counter(row["phase"] for row in frame["running"]) == Counter(
            {name: frame["phases"][name] for name in ("prefill", "decoding") if frame["phases"][name]}
        )
        assert frame["num_running"] == len(frame["running"])
        for tenant in frame["tenants"]:
            assert tenant["waiting"] == sum(row["tenant"] == tenant["name"] for row in rows)
            assert tenant["running"] == sum(row["tenant"] == tenant["name"] for row in frame["running"])
        assert sum(tenant["finished"] for tenant in frame["tenants"]) == frame["phases"]["finished"]


def test_the_journal_is_in_order_and_each_event_is_in_the_frame_that_shows_its_effect(run: dict[str, Any]) -> None:
    frames, events = run["frames"], run["events"]
    times = [event[1] for event in events]
    assert times == sorted(times) and [event[0] for event in events] == sorted(event[0] for event in events)
    arrived: set[str] = set()
    finished: set[str] = set()
    admitted = retracted = 0
    at = 0
    for index, frame in enumerate(frames):
        while at < len(events) and events[at][0] == index:
            _, time, kind, request_id, _ = events[at]
            assert time <= frame["time"] and (index == 0 or time >= frames[index - 1]["time"])
            arrived |= {request_id} if kind == "add" else set()
            finished |= {request_id} if kind == "finish" else set()
            admitted += kind == "admit"
            retracted += kind == "retract"
            at += 1
        shown = {row["id"] for row in frame["waiting"] + frame["running"]}
        assert shown == arrived - finished, f"frame {index}"
        assert frame["phases"]["finished"] == len(finished)
        assert (frame["counters"]["admitted"], frame["counters"]["retractions"]) == (admitted, retracted)
    assert at == len(events)
    assert len(finished) == run["summary"]["finished"]


def test_both_columns_get_the_same_arrivals() -> None:
    def arrivals(**own: str) -> list[Any]:
        return [event[1:] for event in run_frames({"requests": "24", **own})["events"] if event[2] == "add"]

    expected = arrivals(policy="fcfs")
    assert len(expected) == 24
    assert expected == arrivals(policy="lpm", batching="static", overlap="false")


def test_the_tenants_workload_starts_with_tenants_that_compete_and_fair_serves_the_small_ones_sooner() -> None:
    runs = {policy: run_frames({"workload": "tenants", "policy": policy}) for policy in ("fcfs", "fair")}
    for run in runs.values():
        assert len(run["frames"][0]["tenants"]) == 4
        assert max(sum(one["waiting"] > 0 for one in frame["tenants"]) for frame in run["frames"]) == 4
    waits = {policy: run["frames"][-1]["tenants"][-1]["wait"] for policy, run in runs.items()}
    assert waits["fair"] < waits["fcfs"] / 2, "the tenant that sends the least"


def test_service_is_counted_under_any_policy_as_policy_fair_counts_it() -> None:
    last = run_frames({"workload": "tenants", "policy": "fcfs"})["frames"][-1]
    charged = last["counters"]["computed_tokens"] + 2.0 * last["counters"]["decoded_tokens"]
    assert sum(one["service"] for one in last["tenants"]) == pytest.approx(charged)


def test_a_run_that_is_too_long_is_marked_as_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_frames({"requests": "8"})["cut"]
    monkeypatch.setattr("paceline.simulator.frames.MOST_FRAMES", 20)
    run = run_frames({"requests": "8"})
    assert run["cut"] and run["summary"]["finished"] < 8 and len(run["frames"]) == 21
