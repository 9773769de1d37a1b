"""Health, readiness, metrics, and the repair of inconsistent scheduler state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.kv_events import ClearedPages, KvEventLog, StoredPages
from paceline.config import EngineConfig
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine, EngineHooks
from paceline.engine.job import Job
from paceline.engine.output import EngineFailed
from paceline.engine.virtual.build import build_virtual
from paceline.request import SamplingParams
from paceline.server import engine_queries
from paceline.server.engine_client import EngineState
from paceline.server.handlers.health import get_health, get_ready
from paceline.server.routing import Call
from tests.server.serving import Caller, make_app
from tests.server.virtual import wait_until


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = build_virtual(EngineConfig(executor="virtual"), {"num_pages": 512})
    yield engine
    engine.close()


def caller_of(engine: Engine, watchdog_s: float = 60) -> Caller:
    return Caller(make_app(engine, name="virtual", watchdog_s=watchdog_s))


class Stuck:
    """Blocks forward passes until `go` is set."""

    def __init__(self, engine: Engine) -> None:
        self.go = threading.Event()
        launch = engine.loop.executor.launch

        def held(plan: Any) -> Any:
            pending = launch(plan)
            wait = pending.wait
            pending.wait = lambda: (self.go.wait(), wait())[1]
            return pending

        engine.loop.executor.launch = held  # type: ignore[method-assign]


class Silent:
    def put(self, output: Any) -> None: ...

    def refuse(self, error: Any) -> None: ...


def test_health_fails_without_progress_and_names_the_stuck_pass(engine: Engine) -> None:
    caller = caller_of(engine, watchdog_s=0.2)
    stuck = Stuck(engine)
    assert caller.request("GET", "/health").status_code == caller.request("GET", "/ready").status_code == 200
    engine.submit(Job(engine.encode([1, 2, 3]), SamplingParams(max_tokens=5)), Silent())
    try:
        wait_until(lambda: caller.request("GET", "/health").status_code == 503)
        failure = caller.request("GET", "/health").json()["failure"]
        assert "no progress for" in failure and "waiting for the device to finish pass 1 (0 decode rows" in failure
        assert caller.request("GET", "/ready").status_code == 503
    finally:
        stuck.go.set()  # else closing the engine waits forever
    wait_until(lambda: caller.request("GET", "/health").status_code == 200)


def test_a_long_busy_period_does_not_fail_health(engine: Engine) -> None:
    watchdog_s = 1.0
    caller = caller_of(engine, watchdog_s)
    engine.submit(Job(engine.encode([1, 2, 3]), SamplingParams(max_tokens=2000, ignore_eos=True), id="long"), Silent())
    wait_until(lambda: engine.progress.has_work)
    started, codes = time.monotonic(), set()
    while engine.progress.has_work:
        codes.add(caller.request("GET", "/health").status_code)
    assert time.monotonic() - started > watchdog_s, "the request was too short to test anything"
    assert codes == {200}


@pytest.mark.parametrize("max_computing", [1000, 2])
def test_a_slow_pass_of_a_cpu_is_not_stuck_while_it_computes(
    monkeypatch: pytest.MonkeyPatch, max_computing: int
) -> None:
    monkeypatch.setattr(engine_queries, "_MAX_COMPUTING", max_computing)
    watchdog_s = 1.0
    engine = build_engine(load="random", shape="tiny-qwen3", threads=1, kv_tokens=1024)
    may_end, waits, run = threading.Event(), threading.Event(), engine.executor.runner.run  # type: ignore[attr-defined]

    def slow(*arguments: Any) -> Any:
        while not may_end.is_set():
            if waits.is_set():
                may_end.wait()
        return run(*arguments)

    monkeypatch.setattr(engine.executor.runner, "run", slow)  # type: ignore[attr-defined]
    caller = caller_of(engine, watchdog_s)
    try:
        engine.submit(Job(engine.encode("a"), SamplingParams(max_tokens=2)), Silent())
        wait_until(lambda: engine.progress.has_work)
        began, codes = time.monotonic(), list[int]()
        while time.monotonic() - began < 4 * watchdog_s:
            codes.append(caller.request("GET", "/health").status_code)
            time.sleep(0.02)
        assert (503 in codes) == (max_computing == 2), "computing for ever is no progress either"
        if max_computing > 2:
            waits.set()
            wait_until(lambda: caller.request("GET", "/health").status_code == 503)
    finally:
        may_end.set()
    wait_until(lambda: caller.request("GET", "/health").status_code == 200)
    engine.close()


def test_inconsistent_scheduler_state_is_reset_when_idle_and_counted(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caller = caller_of(engine)

    def lose_a_page(scheduler: Any) -> None:
        scheduler.memory.pool.allocate(1)

    assert engine.scheduler.counters.repairs == 0
    with caplog.at_level(logging.ERROR, "paceline.engine"):
        engine.submit(Job(engine.encode([1, 2, 3]), SamplingParams(max_tokens=5, ignore_eos=True)), Silent())
        wait_until(lambda: not engine.progress.has_work)
        engine.call(lose_a_page).result()
        engine.submit(Job(engine.encode([1, 2, 3]), SamplingParams(max_tokens=5, ignore_eos=True)), Silent())
        wait_until(lambda: "pages with no owner" in caplog.text)
    assert engine.scheduler.counters.repairs == 1
    assert caller.ok("/v1/completions", {"model": "virtual", "prompt": "x", "max_tokens": 3})["choices"]
    assert "paceline_scheduler_state_repairs_total 1.0" in caller.request("GET", "/metrics").text


def test_metrics_are_in_prometheus_format_and_count_requests(engine: Engine) -> None:
    caller = caller_of(engine)
    for number in range(3):
        caller.ok(
            "/v1/completions",
            {"model": "virtual", "prompt": [1000] * 40 + [number], "max_tokens": 5, "ignore_eos": True},
        )
    response = caller.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["paceline_request_success_total", "length"] == 3
    assert samples["paceline_prefix_cache_queries_total",] == 123 and samples["paceline_prefix_cache_hits_total",] == 64
    assert samples["paceline_prefix_cache_hit_bytes_total",] == 64 * 114_688
    assert samples["paceline_num_requests_running",] == 0 and samples["paceline_engine_up",] == 1
    assert 0 <= samples["paceline_device_idle_ratio",] <= 1
    assert samples["paceline_http_responses_total", "/v1/completions", "200", "front-end-0"] == 3


def test_metrics_count_the_tokens_of_experts() -> None:
    with contextlib.closing(build_engine(load="random", shape="tiny-qwen3-moe", threads=1, kv_tokens=4096)) as engine:
        caller = Caller(make_app(engine, name="moe"))
        assert 'paceline_expert_tokens_total{expert="11"} 0.0' in caller.request("GET", "/metrics").text
        caller.ok("/v1/completions", {"model": "moe", "prompt": [5] * 40, "max_tokens": 3, "ignore_eos": True})
        families = text_string_to_metric_families(caller.request("GET", "/metrics").text)
        found = {family.name: [sample.value for sample in family.samples] for family in families}
    # 40 tokens of the prompt and two of the output, in three layers with experts, of which a token uses three.
    assert len(found["paceline_expert_tokens"]) == 12 and sum(found["paceline_expert_tokens"]) == 42 * 3 * 3
    assert len(found["paceline_expert_imbalance"]) == 3 and all(
        1 < one <= 12 for one in found["paceline_expert_imbalance"]
    )


def test_routers_learn_at_once_that_a_reset_has_emptied_the_cache() -> None:
    log, taken = KvEventLog(16), []
    hooks = EngineHooks(after_step=lambda: taken.extend(log.take()))
    engine = build_virtual(EngineConfig(executor="virtual"), {"num_pages": 512}, hooks=hooks)
    engine.call(lambda scheduler: scheduler.listen(log)).result()
    job = Job(engine.encode([1] * 40), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.submit(job, Silent())
    wait_until(lambda: not engine.progress.has_work and any(isinstance(event, StoredPages) for event in taken))
    engine.call(lambda scheduler: scheduler.memory.pool.allocate(1)).result()  # a page is lost
    taken.clear()
    engine.submit(job, Silent())
    wait_until(lambda: any(isinstance(event, ClearedPages) for event in taken))  # no request follows
    engine.close()


@pytest.mark.parametrize("names", ["paceline", "vllm", "both"])
def test_metrics_that_routers_read_have_the_names_of_vllm_on_request(engine: Engine, names: str) -> None:
    text = Caller(make_app(engine, name="virtual", metric_names=names)).request("GET", "/metrics").text
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    sizes = {"block_size": "16", "num_gpu_blocks": "512"}
    expected = {"num_requests_waiting": ({}, 0), "num_requests_running": ({}, 0), "cache_config_info": (sizes, 1)}
    theirs = {f"vllm:{name}": value for name, value in expected.items()} | {"vllm:kv_cache_usage_perc": ({}, 0)}
    ours = {f"paceline_{name}": value for name, value in expected.items()} | {"paceline_kv_cache_usage_ratio": ({}, 0)}
    assert {name: value for name, value in samples.items() if name in ours} == (ours if names != "vllm" else {})
    assert {name: value for name, value in samples.items() if ":" in name} == (theirs if names != "paceline" else {})
    assert "paceline_steps_total" in samples, "others keep their name"


def test_metrics_count_cache_hits_and_host_fetches_separately() -> None:
    engine = build_virtual(EngineConfig(executor="virtual", kv_tokens=2048, host_kv_tokens=8192), {})
    caller = caller_of(engine)
    for token in (1000, 1001, 1000):
        caller.ok(
            "/v1/completions", {"model": "virtual", "prompt": [token] * 1600, "max_tokens": 2, "ignore_eos": True}
        )
    samples = {
        sample.name.removeprefix("paceline_"): sample.value
        for family in text_string_to_metric_families(caller.request("GET", "/metrics").text)
        for sample in family.samples
    }
    engine.close()
    assert 0 < samples["prefix_cache_fetched_tokens_total"] == engine.scheduler.counters.fetched_tokens
    assert samples["prefix_cache_hits_total"] + samples["prefix_cache_fetched_tokens_total"] == 1584
    assert (
        samples["host_kv_cache_tokens"] == 8192
        and samples["spilled_pages_total"] > samples["host_evicted_pages_total"] == 0
    )
    assert samples["host_kv_cache_tokens_used"] == 16 * samples["spilled_pages_total"]


def test_unknown_paths_do_not_become_metric_labels(engine: Engine) -> None:
    caller = caller_of(engine)
    for number in range(5):
        assert caller.request("GET", f"/nothing/{number}").status_code == 404
    text = caller.request("GET", "/metrics").text
    assert "/nothing" not in text and 'route="none",status="404"' in text


def test_tokenize_and_detokenize_round_trip(engine: Engine) -> None:
    caller = caller_of(engine)

    def post(path: str, **payload: Any) -> httpx.Response:
        return caller.request("POST", path, json=payload)

    tokens = post("/tokenize", prompt="hello there").json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512 * 16
    assert post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "hello there"}
    chat = post("/tokenize", messages=[{"role": "user", "content": "hello there"}]).json()
    assert chat["count"] > tokens["count"]
    for path, payload in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"prompt": "x", "colour": 1}),
    ):
        assert post(path, **payload).status_code == 400, payload
    assert post("/tokenize", prompt="x", model="other").status_code == 404


UP, LOADING, DOWN = (None, False), ("It loads.", True), ("It has exited.", False)


@pytest.mark.parametrize(
    ("engines", "health", "ready"),
    [
        ({"both": [UP, DOWN, DOWN]}, 200, 200),
        ({"both": [DOWN, LOADING]}, 200, 503),
        ({"both": [DOWN, DOWN]}, 503, 503),
        ({"prefill": [UP], "decode": [LOADING, DOWN]}, 200, 503),
        ({"prefill": [DOWN], "decode": [UP, LOADING]}, 200, 200),
        ({"prefill": [UP]}, 200, 200),  # of other servers
    ],
)
def test_health_and_readiness_count_the_engines_of_each_role(
    engines: dict[str, list[tuple[str | None, bool]]], health: int, ready: int
) -> None:
    class Known:
        async def query(self, query: Any) -> Any:
            raise EngineFailed("It does not answer.")

        @property
        def engines(self) -> list[EngineState]:
            return [EngineState(role, *one) for role, states in engines.items() for one in states]

    state = SimpleNamespace(client=Known(), draining=False, model_name="tiny")
    call = Call(cast("Any", state), {}, None, None, None, cast("Any", None))
    counts = {
        role: {"up": states.count(UP), "total": len(states)} for role, states in engines.items()
    }  # of those that can generate
    for route, expected in ((get_health, health), (get_ready, ready)):
        response = asyncio.run(route(call))
        assert response.status_code == expected
        assert json.loads(response.body)["engines"] == counts
    assert (json.loads(response.body)["why"] is None) == (ready == 200)


def test_a_health_check_at_the_end_of_a_front_end_leaves_no_traceback() -> None:
    """The client is closed, then the event loop cancels what is left. In a task of its own, the failed query would be
    an exception that nobody handles."""

    reports: list[Any] = []

    class Closing:
        engines = (EngineState("both", None),)

        def __init__(self) -> None:
            self.stats: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.asked = asyncio.Event()

        async def query(self, query: Any) -> Any:
            self.asked.set()
            return await asyncio.wait_for(self.stats, 60)

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        client = Closing()
        state = SimpleNamespace(client=client, draining=False, model_name="tiny")
        task = asyncio.create_task(get_health(Call(cast("Any", state), {}, None, None, None, cast("Any", None))))
        await client.asked.wait()
        client.stats.set_exception(EngineFailed("The front end was closed."))
        assert not task.done()

    asyncio.run(serve())
    assert not reports
