"""The timeline: well-formed, spans of a lane do not overlap, and overlapped scheduling is visible."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.build import build_engine
from paceline.engine.executor import Result
from paceline.engine.timeline import HOST_LANES, Timeline, trace_events, write_trace
from paceline.engine.trace_recorder import TraceRecorder
from paceline.llm import LLM
from paceline.request import Grammar, SamplingParams
from tests.helpers import harness, request

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def recorded(
    overlap: str, tmp_path: Path, params: SamplingParams = PARAMS
) -> tuple[Timeline, dict[str, list[dict[str, Any]]]]:
    """A run and its trace's spans by lane, in order of time."""
    timeline = Timeline()
    engine = build_engine(
        load="random", shape="tiny-llama", threads=1, kv_tokens=2048, overlap=overlap, chunk_tokens=16, trace=timeline
    )
    with LLM.from_engine(engine) as llm:
        llm.generate([[1, 2, 3], list(range(3, 60)), [9, 8]], params)
    write_trace(tmp_path / "out.json", [timeline])
    trace = json.loads((tmp_path / "out.json").read_text())
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= -1, event
            lanes[names[event["pid"], event["tid"]]].append(event)
    for events in lanes.values():
        events.sort(key=lambda event: (event["ts"], event["args"]["step"]))
    return timeline, lanes


@pytest.mark.parametrize("overlap", ["on", "off", "sync"])
def test_lanes_hold_every_pass_once_and_do_not_overlap_within_themselves(overlap: str, tmp_path: Path) -> None:
    timeline, lanes = recorded(overlap, tmp_path)
    steps = [one.step for one in timeline.passes]
    assert set(lanes) == {*HOST_LANES, "passes"} - {"masks"} and len(steps) > 12
    for name, events in lanes.items():
        assert [event["args"]["step"] for event in events] == steps, name
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-2, f"{name}: {one} reaches into {other}"


def test_masks_start_after_a_commit_and_are_awaited_after_the_next_plan(tmp_path: Path) -> None:
    digits = SamplingParams(temperature=0, max_tokens=9, grammar=Grammar.regex("[0-9]{20}"))
    _, lanes = recorded("on", tmp_path, digits)
    of = {name: {event["args"]["step"]: event for event in events} for name, events in lanes.items()}

    def follow(*events: dict[str, Any]) -> bool:
        return all(one["ts"] + one["dur"] <= other["ts"] + 1e-2 for one, other in pairwise(events))

    started, waited = lanes["masks"][::2], lanes["masks"][1::2]
    assert len(started) == len(waited) >= 8
    for start, wait in zip(started, waited, strict=True):
        step = start["args"]["step"]
        assert wait["args"]["step"] == step
        assert follow(of["commit"][step], start, of["text"][step], wait, of["wait"][step + 1])
        if step + 2 in of["plan"]:
            assert follow(of["text"][step], of["plan"][step + 2], wait, of["launch"][step + 2])


def test_the_next_launch_precedes_the_commit_only_with_overlap(tmp_path: Path) -> None:
    for overlap, ahead in (("on", True), ("off", False)):
        _, lanes = recorded(overlap, tmp_path)
        commits = {event["args"]["step"]: event["ts"] for event in lanes["commit"]}
        launches = {event["args"]["step"]: event["ts"] + event["dur"] for event in lanes["launch"]}
        followed = [step for step in commits if step + 1 in launches]
        assert len(followed) > 10
        assert all((launches[step + 1] <= commits[step]) == ahead for step in followed)


def test_a_pass_runs_between_its_launch_and_the_end_of_its_wait(tmp_path: Path) -> None:
    for overlap in ("on", "off"):
        timeline, lanes = recorded(overlap, tmp_path)
        for one, launch, wait in zip(lanes["passes"], lanes["launch"], lanes["wait"], strict=True):
            assert one["ts"] >= launch["ts"] - 1, (one, launch)
            assert one["ts"] + one["dur"] <= wait["ts"] + wait["dur"] + 1, (one, wait)
        assert lanes["passes"][0]["name"].endswith("tokens") and lanes["passes"][-1]["name"] == "1 decode rows"
        assert sum(one.num_tokens for one in timeline.passes) == 62 + 3 * 11
        assert sum(one.num_sampled for one in timeline.passes) == 36


def test_device_idle_time_appears_between_passes() -> None:
    """On a virtual clock: passes take about a millisecond, with half a millisecond of device idle time before each."""
    subject = harness()
    timeline = subject.loop.trace = Timeline()
    launch = subject.executor.launch

    class Late:
        def __init__(self, pending: Any) -> None:
            self.pending = pending

        def wait(self) -> Result:
            subject.clock.advance(5e-4)
            return self.pending.wait()._replace(idle_s=5e-4)

    subject.loop.executor = type("Slow", (), {"launch": lambda self, plan: Late(launch(plan))})()
    subject.add(request(max_tokens=5))
    subject.run()
    assert len(timeline.passes) == 5 and timeline.passes[0].idle_s == 0
    assert [one.idle_s for one in timeline.passes[1:]] == [5e-4] * 4
    spans = timeline.device_spans()
    for (_, ended), (began, _) in pairwise(spans):
        assert began - ended == pytest.approx(5e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pass_shows_its_drafts(overlap: bool) -> None:
    subject = harness(overlap=overlap, draft_tokens=3)
    timeline = subject.loop.trace = Timeline()
    subject.add_all(request(max_tokens=20), request([5, 6], max_tokens=20))
    subject.run()
    counters = subject.scheduler.counters
    passes = [event for event in trace_events([timeline]) if event["ph"] == "X" and event["pid"] == 2]
    assert "drafted_tokens" not in passes[0]["args"] and passes[0]["name"] == "2 prefill rows, 5 tokens"
    drafted = sum(event["args"].get("drafted_tokens", 0) for event in passes)
    accepted = sum(event["args"].get("accepted_tokens", 0) for event in passes)
    assert (drafted, accepted) == (counters.drafted_tokens, counters.accepted_tokens) and 0 < accepted < drafted
    first = timeline.passes[1]
    assert first.num_tokens == 2 + first.num_drafted == first.num_sampled == 8
    assert passes[1]["name"] == f"2 decode rows + 6 drafts, {first.num_accepted} accepted"


def test_passes_are_placed_correctly_without_idle_measurements() -> None:
    subject = harness()
    timeline = subject.loop.trace = Timeline()
    subject.add(request(max_tokens=5))
    subject.step()
    subject.clock.advance(0.5)  # the host was busy elsewhere, and the device had nothing to do
    subject.run()
    for one, (began, ended) in zip(timeline.passes, timeline.device_spans(), strict=True):
        assert one.idle_s == 0 and one.launched <= began + 1e-9
        assert ended == pytest.approx(one.waited)


def test_a_trace_that_begins_while_a_request_decodes_shows_it_decoding() -> None:
    subject = harness()
    one, two = subject.add_all(request(max_tokens=30), request([5, 6], max_tokens=30))
    for _ in range(5):
        subject.step()
    recorder = TraceRecorder(subject.scheduler, subject.clock())
    subject.loop.trace = recorder
    subject.scheduler.journal.listeners.append(recorder.note)
    subject.scheduler.retract(two.id, subject.clock(), "a test")
    subject.run()
    recorder.ended = subject.clock()
    phases = {name: [mark.phase for mark in marks] for name, marks in recorder.marks.items()}
    assert phases == {
        one.id: ["decode", "finished"],
        two.id: ["decode", "queue", "prefill", "decode", "finished"],
    }
    spans = [event for event in recorder.events() if event["ph"] == "X" and event["pid"] == 3]
    assert {span["name"] for span in spans} == {one.id, two.id, "queue", "prefill", "decode"}
