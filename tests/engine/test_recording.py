"""A recording describes exactly what ran and reveals nothing about texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.config import ConfigError, SchedulerConfig
from paceline.engine.executor import Executor, Pending
from paceline.engine.loop import Loop
from paceline.engine.pass_features import PassFeatures, read_features
from paceline.engine.recording import Header, Line, Mark, RecordedPass, RecordedRequest, Recorder, read_recording
from paceline.llm import LLM
from paceline.request import Request, SamplingParams
from paceline.scheduler import Plan, Scheduler
from paceline.testing import Harness

BUCKETS = [1, 2, 4, 8, 16]


def harness(overlap: bool = False, **options: object) -> Harness:
    settings = {"num_pages": 200, "page_size": 4, "max_running": 8, "chunk_tokens": 16} | options
    return Harness(Scheduler(SchedulerConfig(**settings)), overlap=overlap)  # type: ignore[arg-type]


def requests(count: int = 12, tenants: int = 1) -> list[Request]:
    tokens = np.random.default_rng(1)
    system = tokens.integers(0, 60, 22)
    found = []
    for number in range(count):
        own = tokens.integers(0, 60, int(tokens.integers(1, 20)))
        prompt = np.concatenate([system, own]) if number % 2 else own
        params = SamplingParams(max_tokens=int(tokens.integers(1, 9)), ignore_eos=True)
        found.append(Request(f"secret-{number}", prompt, params, tenant=f"tenant-{number % tenants}"))
    return found


def record(path: Path, run: Harness, buckets: list[int] = BUCKETS) -> Recorder:
    recorder = Recorder(path, run.scheduler, run.clock, device="toy", model="toy-1", overlap="off", buckets=buckets)
    run.loop = Loop(run.scheduler, recorder.watch(run.executor), run.clock, overlap=run.loop.overlap)
    return recorder


def lines_of(path: Path, run: Harness, added: list[Request]) -> list[Line]:
    recorder = record(path, run)
    recorder.mark("all of it")
    run.add_all(*added)
    run.run()
    recorder.close()
    return list(read_recording(path))


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_and_every_pass_is_recorded_once(tmp_path: Path, overlap: bool) -> None:
    run, added = harness(overlap), requests()
    lines = lines_of(tmp_path / "run.jsonl", run, added)
    kinds = Counter(type(line) for line in lines)
    assert kinds == {Header: 1, Mark: 1, RecordedRequest: 12, RecordedPass: run.scheduler.counters.steps}
    header = lines[0]
    assert isinstance(header, Header)
    assert (header.page_size, header.num_pages, header.options) == (
        4,
        200,
        {"chunk_tokens": 16, "itl_target": 0.125},
    )
    passes = [line for line in lines if isinstance(line, RecordedPass)]
    assert [line.step for line in passes] == sorted(line.step for line in passes)
    assert sum(line.features.num_decodes for line in passes) == run.scheduler.counters.decoded_tokens
    assert sum(line.features.num_prompt_tokens for line in passes) == run.scheduler.counters.computed_tokens
    for line, plan in zip(passes, run.executor.plans, strict=True):
        assert line.device_s == run.executor.step_time.of(plan)
    by_id = {line.id: line for line in lines if isinstance(line, RecordedRequest)}
    for request in run.requests.values():
        line = by_id[request.id]
        assert (line.prompt_tokens, line.output_tokens) == (len(request.prompt), len(request.output))
        assert (line.cached_tokens, line.reason) == (request.num_cached, "length")
        assert line.finished_s == pytest.approx(request.finished - request.arrival, abs=1e-6)  # type: ignore[operator]
        assert len(line.blocks) == request.num_tokens // 4


@pytest.mark.parametrize("overlap", [False, True])
def test_the_drafts_of_every_pass_and_request_are_recorded(tmp_path: Path, overlap: bool) -> None:
    run, path = harness(overlap, draft_tokens=3), tmp_path / "run.jsonl"
    recorder = record(path, run)
    run.add_all(*requests(24))
    for _ in range(4):
        run.step()
    run.scheduler.retract(run.scheduler.running.requests[0].id, run.clock(), "a test")  # its slot gets another request
    run.run()
    recorder.close()
    lines, counters = list(read_recording(path)), run.scheduler.counters
    passes = [line for line in lines if isinstance(line, RecordedPass)]
    assert sum(line.drafted_tokens for line in passes) == counters.drafted_tokens
    assert sum(line.accepted_tokens for line in passes) == counters.accepted_tokens > 0
    assert all(line.accepted_tokens <= line.drafted_tokens <= line.features.num_drafts for line in passes)
    for line in lines:
        if isinstance(line, RecordedRequest):
            assert len(line.accepted) + sum(line.accepted) == line.output_tokens, "one token more per pass"
            assert len(line.drafted) == len(line.accepted)


def test_equal_blocks_are_equal_prefixes_of_one_tenant_and_nothing_else(tmp_path: Path) -> None:
    added = requests(8, tenants=2)
    # The same block after another beginning is another prefix.
    added += [
        Request("one", np.arange(12), SamplingParams(max_tokens=1), tenant="tenant-0"),
        Request("two", np.array([50, 51, 52, 53, *range(4, 12)]), SamplingParams(max_tokens=1), tenant="tenant-0"),
    ]
    run = harness()
    lines = lines_of(tmp_path / "run.jsonl", run, added)
    blocks = {line.id: line.blocks for line in lines if isinstance(line, RecordedRequest)}
    for one in run.requests.values():
        for other in run.requests.values():
            same = one.tenant == other.tenant
            ours, theirs = ([*each.prompt.tolist(), *each.output] for each in (one, other))
            for index, (left, right) in enumerate(zip(blocks[one.id], blocks[other.id], strict=False)):
                end = 4 * (index + 1)
                assert (left == right) == (same and ours[:end] == theirs[:end])


def test_the_same_prompt_of_two_tenants_has_different_hashes(tmp_path: Path) -> None:
    """Also if they finish one after the other."""
    added = [
        Request(name, np.arange(12), SamplingParams(max_tokens=1), tenant=name) for name in ("one", "two", "three")
    ]
    lines = lines_of(tmp_path / "run.jsonl", harness(), added)
    blocks = [block for line in lines if isinstance(line, RecordedRequest) for block in line.blocks]
    assert len(blocks) == len(set(blocks)) == 9


def test_two_recordings_of_the_same_prompt_have_different_hashes(tmp_path: Path) -> None:
    """Otherwise hashes of likely prompts would reveal which were sent."""
    one, two = (
        {block for line in lines_of(tmp_path / name, harness(), requests()) if isinstance(line, RecordedRequest)
         for block in line.blocks}
        for name in ("one.jsonl", "two.jsonl")
    )  # fmt: skip
    assert one and not one & two


class SlowReader:
    """Reference implementation: features from a copy of the page tables, row by row."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, int]] = {}

    def read(self, plan: Plan) -> PassFeatures:
        for slot, index, page in np.stack(plan.page_changes[0], 1).tolist():
            self.rows.setdefault(slot, {})[index] = page
        seen: set[int] = set()
        repeated = context = longest = before = pairs = new = 0
        for row in range(plan.num_rows):
            slot, start, length = int(plan.slots[row]), int(plan.starts[row]), int(plan.lengths[row])
            if row < plan.num_decodes:
                context += start + 1
                longest = max(longest, start + 1)
                for index in range(start // 4):
                    repeated += 4 * (self.rows[slot][index] in seen)
                    seen.add(self.rows[slot][index])
            else:
                before += start
                new += length
                pairs += sum(position + 1 for position in range(start, start + length))
        return PassFeatures(
            num_decodes=plan.num_decodes, num_prompts=plan.num_rows - plan.num_decodes, num_prompt_tokens=new,
            num_sampled=sum(plan.samples.tolist()),
            bucket=0 if plan.num_rows > plan.num_decodes else min(b for b in BUCKETS if b >= plan.num_rows),
            context_tokens=context, repeated_tokens=repeated, longest_context=longest, prompt_context_tokens=before,
            prompt_pairs=pairs, num_joins=len(plan.joins), join_tokens=sum(len(join.tokens) for join in plan.joins),
            num_page_changes=len(plan.page_changes[0].pages),
        )  # fmt: skip


@pytest.mark.parametrize("num_pages", [200, 30])
def test_features_are_those_a_row_by_row_count_gives(num_pages: int) -> None:
    """Also with duplicates that are remapped, and retractions."""
    run = harness(num_pages=num_pages, prefix_wait=False)
    run.add_all(*requests(24))
    run.run()
    slow = SlowReader()
    found = [(read_features(plan, BUCKETS), slow.read(plan)) for plan in run.executor.plans]
    for ours, theirs in found:
        # Beside prompts, what decodes have in common with them counts too.
        assert ours.has_prompts or ours.repeated_tokens == theirs.repeated_tokens
        assert msgspec.structs.replace(ours, repeated_tokens=0) == msgspec.structs.replace(theirs, repeated_tokens=0)
    assert any(ours.repeated_tokens and not ours.has_prompts for ours, _ in found)
    assert run.scheduler.counters.duplicate_pages


def test_the_record_option_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with LLM(load="random", shape="tiny-llama", threads=1, kv_tokens=4096, record=str(path)) as llm:
        llm.generate([[1, 2, 3], list(range(40))], SamplingParams(max_tokens=4, ignore_eos=True))
    header, *lines = read_recording(path)
    assert isinstance(header, Header)
    assert (header.device, header.overlap, header.options["max_wait"]) == ("cpu", "on", "inf")
    assert sorted(line.prompt_tokens for line in lines if isinstance(line, RecordedRequest)) == [3, 40]
    assert all(line.device_s for line in lines if isinstance(line, RecordedPass))


def test_a_truncated_recording_is_read_up_to_its_last_full_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = lines_of(path, harness(), requests())
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_recording(path)) == lines[:-1]


def test_a_file_that_is_not_a_recording_is_refused_with_its_line_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(ConfigError, match=r"trace.csv, line 1 is not a line of a recording"):
        list(read_recording(path))
    path.write_text('{"line": "mark", "at": 0, "name": "x"}\n')
    with pytest.raises(ConfigError, match="not a recording of version 1"):
        list(read_recording(path))
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        record(tmp_path / "missing" / "run.jsonl", harness())


def test_preparing_counts_as_launch_time(tmp_path: Path) -> None:
    run = harness(overlap=True)
    recorder = record(tmp_path / "run.jsonl", run)
    run.add_all(*requests(1))
    plan = run.scheduler.plan(run.clock())
    assert plan is not None

    class Preparing(Executor):
        def prepare(self, plan: Plan) -> None:
            run.clock.advance(0.25)

        def launch(self, plan: Plan) -> Pending:
            run.clock.advance(0.5)
            return run.executor.launch(plan)

    watched: Any = recorder.watch(Preparing())
    run.clock.advance(1.0)
    watched.prepare(plan)
    run.clock.advance(2.0)
    watched.launch(plan).wait()
    recorder.close()
    (line,) = [line for line in read_recording(tmp_path / "run.jsonl") if isinstance(line, RecordedPass)]
    assert (line.host_s, line.launch_s) == (3.0, 0.75)
