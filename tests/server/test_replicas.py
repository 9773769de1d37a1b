"""Two engines behind one server: routing, failure, and everything that asks all of them."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.config import ConfigError, EngineConfig, ServerConfig, TenantConfig, check_replicas
from paceline.engine.kv_sizing import CPU_KV_FRACTION
from paceline.engine.recording import RecordedRequest, read_recording
from paceline.server.engine_device import choose_device
from tests.cluster.subscriber import Subscriber
from tests.ports import free_ports
from tests.server.process import ServerProcess
from tests.server.test_processes import stream_all
from tests.server.virtual import (
    assert_nothing_is_left,
    body,
    complete,
    events,
    expected_text,
    get,
    metric,
    text_of,
    virtual,
    wait_until,
)

pytestmark = pytest.mark.cluster

ADMIN = "admin-key"
ROUTED_HIT_RATE = 0.74  # where an engine's times look long on a busy host, another one computes a few prefixes again
ROOT = root_hash(("default", "", ""))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """For tests that leave it as it was, but for its cache."""
    with virtual("--replicas", "2", "--admin-key", ADMIN, "--pin-quota-pages", "100") as server:
        yield server


def admin(server: ServerProcess, method: str, path: str, **json: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    return httpx.request(method, server.url + path, headers=headers, json=json or None, timeout=120)


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def shared_prefix_hit_rate(server: ServerProcess, first: int) -> float:
    """Eight prompts of 2,560 tokens, each sent six times with another end, in mixed order. So long that computing one
    again costs more than a pass that the host has delayed."""
    numbers = [group for group in range(8) for _ in range(6)]
    random.Random(0).shuffle(numbers)
    hits = 0
    for count, group in enumerate(numbers):
        hits += cached_tokens(complete(server, [first + group] * 2560 + [first + 100 + count] * 20, 1))
    return hits / (2580 * len(numbers))


# ---------------------------------------------------------------------- routing


def test_requests_with_a_common_prefix_go_where_it_is_cached(server: ServerProcess) -> None:
    """Of six requests with a prefix five can use it: 0.83 of all tokens. Without a router a prefix is computed by each
    engine once: 0.66."""
    assert shared_prefix_hit_rate(server, 1000) > ROUTED_HIT_RATE
    assert metric(server, "router_decisions_total", reason="cache") >= 36
    used = [metric(server, "prompt_tokens_total", replica=replica) for replica in "01"]
    assert min(used) > 0.25 * sum(used), "both engines were used"


def test_random_routing_loses_hits() -> None:
    with virtual("--replicas", "2", "--router", "random") as server:
        assert shared_prefix_hit_rate(server, 1000) < ROUTED_HIT_RATE


def test_every_request_gets_the_output_of_one_engine(server: ServerProcess) -> None:
    prompts = [[number, number + 1] * 10 for number in range(300, 340)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: complete(server, prompt, 30), prompts))
    for prompt, response in zip(prompts, found, strict=True):
        assert response.json()["choices"][0]["text"] == expected_text(prompt, 30)


def test_the_prompts_and_choices_of_one_response_may_run_on_different_engines(server: ServerProcess) -> None:
    prompts = [[number] * 200 for number in range(400, 416)]
    before = [metric(server, "generation_tokens_total", replica=replica) for replica in "01"]
    payload = {"model": "virtual", "prompt": prompts, "max_tokens": 40, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=payload, timeout=300)
    texts = [choice["text"] for choice in sorted(response.json()["choices"], key=lambda choice: choice["index"])]
    assert texts == [expected_text(prompt, 40) for prompt in prompts]
    after = [metric(server, "generation_tokens_total", replica=replica) for replica in "01"]
    assert all(new > old for new, old in zip(after, before, strict=True))


def test_two_front_ends_route_by_the_reports_of_the_same_engines() -> None:
    with virtual("--replicas", "2", "--workers", "2") as server:
        prompts = [[20 + number] * 640 for number in range(6)]

        for prompt in prompts:
            wait_until(lambda prompt=prompt: complete(server, prompt, 2).status_code == 200)
        victim, other = server.children["front_end"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.children["front_end"]) == 2 and victim not in server.children["front_end"])
        os.kill(other, signal.SIGSTOP)  # from here on the new one gets all connections
        try:
            # Its first requests may come before it knows the engines, or before their reports.
            wait_until(lambda: complete(server, prompts[0], 2).status_code == 200)
            wait_until(lambda: cached_tokens(complete(server, prompts[0], 2)) == 624)
            wait_until(lambda: metric(server, "router_decisions_total", reason="cache") > 0)
            # It has routed none of these and is told where they are: no engine computes one that another has.
            assert [cached_tokens(complete(server, prompt, 2)) for prompt in prompts[1:]] == [624] * 5
        finally:
            os.kill(other, signal.SIGCONT)


# ---------------------------------------------------------------------- what asks all engines


def test_health_and_stats_are_those_of_both_engines(server: ServerProcess) -> None:
    engines = {"both": {"up": 2, "total": 2}}
    assert get(server, "/ready").json() == {"ready": True, "why": None, "engines": engines}
    health = get(server, "/health").json()
    assert health["status"] == "ok" and health["kv_tokens"] == 2 * 524_288
    assert metric(server, "replicas_up") == 2 == metric(server, "engine_up") * 2
    assert metric(server, "kv_cache_tokens") == 2 * 524_288


def test_a_flush_reaches_both_engines_and_a_pin_the_one_that_has_the_prefix(server: ServerProcess) -> None:
    prompt = [77] * 320
    assert admin(server, "POST", "/admin/cache", action="pin", name="system", prompt=prompt).status_code == 400
    complete(server, prompt, 2)
    assert admin(server, "POST", "/admin/cache", action="pin", name="system", prompt=prompt).status_code == 200
    assert [pin["name"] for pin in admin(server, "GET", "/admin/cache").json()["pins"]] == ["system"]
    assert metric(server, "pinned_pages") == 20, "it is pinned where it is cached"
    assert admin(server, "POST", "/admin/cache", action="unpin", name="system").status_code == 200
    assert admin(server, "POST", "/admin/cache", action="unpin", name="system").status_code == 400
    assert metric(server, "pinned_pages") == 0
    shared_prefix_hit_rate(server, 2000)
    assert admin(server, "POST", "/admin/cache", action="flush").json()["flushed_tokens"] > 8 * 640
    wait_until(lambda: cached_tokens(complete(server, [2000] * 640 + [5], 2)) <= 640)
    health = get(server, "/health").json()
    assert health["kv_tokens_free"] == health["kv_tokens"]


def test_pausing_stops_both_engines_and_resuming_starts_them(server: ServerProcess) -> None:
    assert admin(server, "POST", "/admin/pause", mode="wait").json()["paused"]
    try:
        assert get(server, "/ready").status_code == 503
        assert [metric(server, "engine_paused", replica=replica) for replica in "01"] == [1, 1]
    finally:
        assert not admin(server, "POST", "/admin/resume").json()["paused"]
    assert complete(server, [1, 2], 2).status_code == 200


def test_an_engine_that_restarts_is_as_paused_as_the_others() -> None:
    with virtual("--replicas", "2", "--admin-key", ADMIN) as server:

        def kill_engines(count: int) -> None:
            victims = server.children["engine"][:count]
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            wait_until(lambda: len(set(server.children["engine"]) - set(victims)) == 2)
            wait_until(lambda: metric(server, "replicas_up") == 2)

        def paused() -> list[float]:
            return [metric(server, "engine_paused", replica=replica) for replica in "01"]

        assert admin(server, "POST", "/admin/pause", mode="wait").json()["paused"]
        for count in (1, 2):  # also if none is left that knows of the pause
            kill_engines(count)
            assert paused() == [1, 1] and get(server, "/ready").status_code == 503
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(complete, server, [number] * 20, 5) for number in (1, 2)]
            wait_until(lambda: get(server, "/health").json()["num_waiting"] == 2)
            assert metric(server, "generation_tokens_total") == 0
            assert not admin(server, "POST", "/admin/resume").json()["paused"]
            assert [one.result().status_code for one in found] == [200, 200]
        for path, expected in (("pause", [1, 1]), ("resume", [0, 0])):  # while one restarts, or before that is noticed
            victim = server.children["engine"][0]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda path=path: admin(server, "POST", f"/admin/{path}").status_code == 200)
            wait_until(lambda: metric(server, "replicas_up") == 2)
            assert paused() == expected and victim not in server.children["engine"]
        assert complete(server, [3] * 20, 5).status_code == 200


def test_requests_of_both_engines_are_listed_and_can_be_aborted() -> None:
    with virtual("--replicas", "2", "--virtual-slowdown", "20") as server:
        threads = [
            threading.Thread(target=complete, args=(server, [600 + number] * 300, 20_000)) for number in range(6)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(get(server, "/v1/requests").json()["data"]) == 6)
        assert min(metric(server, "num_requests_open", replica=replica) for replica in "01") > 0
        for one in get(server, "/v1/requests").json()["data"]:
            response_id = one["id"].rpartition("-")[0]
            assert httpx.delete(f"{server.url}/v1/requests/{response_id}", timeout=60).status_code == 200
        for thread in threads:
            thread.join()
        assert_nothing_is_left(server)


def test_a_stored_response_is_found_on_whichever_engine_it_is(server: ServerProcess) -> None:
    payload = {"model": "virtual", "input": "hello", "max_output_tokens": 16, "store": True}
    for _ in range(6):
        made = httpx.post(f"{server.url}/v1/responses", json=payload, timeout=120).json()
        assert get(server, f"/v1/responses/{made['id']}").json()["id"] == made["id"]
        assert httpx.delete(f"{server.url}/v1/responses/{made['id']}", timeout=120).status_code == 200
        assert get(server, f"/v1/responses/{made['id']}").status_code == 404


def test_the_live_page_shows_the_replica_of_its_address(server: ServerProcess) -> None:
    assert get(server, "/live/state").json()["device"] == "replica 0 of 2, virtual"
    assert get(server, "/live/state?replica=1").json()["device"] == "replica 1 of 2, virtual"
    for wrong in ("2", "-1", "x", "9" * 50):
        response = get(server, f"/live/state?replica={wrong}")
        assert response.status_code == 400 and "give a number from 0 to 1" in response.json()["error"]["message"]


# ---------------------------------------------------------------------- failure


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    """For tests that kill its engines, and wait until they are up again."""
    with virtual("--replicas", "2", "--virtual-slowdown", "4") as server:
        yield server


def test_killing_an_engine_under_load_ends_or_retries_its_streams_and_no_others(slow: ServerProcess) -> None:
    engines = slow.children["engine"]
    payload = [body([500 + number] * 40, 1_500) for number in range(40)]
    streams = asyncio.run(stream_all(slow, payload, lambda: os.kill(engines[0], signal.SIGKILL)))
    failed = 0
    for number, raw in enumerate(streams):
        found = events(raw)
        expected = expected_text([500 + number] * 40, 1_500)
        if found[-1] == b"[DONE]":
            assert text_of(found) == expected
        else:
            failed += 1
            assert found[-1]["error"]["code"] == "engine_failed" and "SIGKILL" in found[-1]["error"]["message"]
            assert expected.startswith(text_of(found[:-1]))
    assert 0 < failed < 40, "streams of the other engine went on"
    wait_until(lambda: len(slow.children["engine"]) == 2 and metric(slow, "replicas_up") == 2)
    assert engines[0] not in slow.children["engine"] and engines[1] in slow.children["engine"]
    assert get(slow, "/ready").status_code == 200
    assert_nothing_is_left(slow)
    assert "Traceback" not in slow.output


def test_requests_without_output_are_retried_on_another_engine(slow: ServerProcess) -> None:
    """Responses that are not streamed have sent nothing before their end."""
    engines, retries = slow.children["engine"], metric(slow, "router_retries_total")
    is_killed = threading.Event()

    def ask(number: int) -> httpx.Response:
        """The first response after the kill: the engines have requests until then, however slow this process is."""
        while True:
            response = complete(slow, [700 + number] * 40, 600)
            if is_killed.is_set() or response.status_code != 200:
                return response

    with ThreadPoolExecutor(24) as pool:
        found = [pool.submit(ask, number) for number in range(24)]
        try:
            wait_until(lambda: min(metric(slow, "num_requests_open", replica=replica) for replica in "01") > 0)
            os.kill(engines[1], signal.SIGKILL)
        finally:
            is_killed.set()
        responses = [one.result() for one in found]
    assert [one.status_code for one in responses] == [200] * 24
    for number, response in enumerate(responses):
        assert response.json()["choices"][0]["text"] == expected_text([700 + number] * 40, 600)
    assert metric(slow, "router_retries_total") > retries
    wait_until(lambda: metric(slow, "replicas_up") == 2)
    assert_nothing_is_left(slow)


def test_requests_are_served_while_an_engine_restarts_and_again_by_all_afterwards() -> None:
    with virtual("--replicas", "2") as server:
        for victim in server.children["engine"]:
            os.kill(victim, signal.SIGKILL)
            until = time.monotonic() + 60
            while victim in server.children["engine"] or metric(server, "replicas_up") < 2:
                assert time.monotonic() < until
                assert complete(server, [3, 4], 3).status_code == 200
                assert get(server, "/ready").status_code == 200
        assert shared_prefix_hit_rate(server, 3000) > ROUTED_HIT_RATE, "a restarted engine reports its cache"


def test_an_engine_that_is_stopped_is_restarted_and_the_others_never_notice() -> None:
    with virtual("--replicas", "3", "--stall-s", "3", "--virtual-slowdown", "20") as server:
        before = server.children["engine"]
        stopped = before[1]
        payload = [body([500 + number] * 40, 1_000) for number in range(30)]
        streams = asyncio.run(stream_all(server, payload, lambda: os.kill(stopped, signal.SIGSTOP)))
        failed = 0
        for number, raw in enumerate(streams):
            found = events(raw)
            if found[-1] == b"[DONE]":
                assert text_of(found) == expected_text([500 + number] * 40, 1_000)
            else:
                failed += 1
                assert "no sign of life for 3 s" in found[-1]["error"]["message"]
        assert failed < 30, "streams of the others went on"
        wait_until(lambda: get(server, "/ready").json()["engines"] == {"both": {"up": 3, "total": 3}})
        after = server.children["engine"]
        assert stopped not in after and len({*before} & {*after}) == 2
        assert_nothing_is_left(server)


def test_health_and_metrics_do_not_wait_for_an_engine_that_is_stopped() -> None:
    """From the moment on at which its silence is noticed."""
    with virtual("--replicas", "3", "--stall-s", "600") as server:
        stopped = server.children["engine"][2]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: get(server, "/ready").json()["engines"] == {"both": {"up": 2, "total": 3}})
        ready, health = get(server, "/ready"), get(server, "/health")
        assert ready.json()["ready"] and ready.status_code == health.status_code == 200
        assert health.json()["engines"] == {"both": {"up": 2, "total": 3}}
        assert "has not responded" in health.json()["failure"]
        wait_until(lambda: get(server, "/health").json().get("kv_tokens") == 2 * 524_288)
        assert metric(server, "replicas_up") == 2
        os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: get(server, "/ready").json()["engines"] == {"both": {"up": 3, "total": 3}})
        assert metric(server, "replicas_up") == 3 and stopped in server.children["engine"]


def test_an_engine_that_makes_no_progress_is_restarted() -> None:
    """It lives, and its pass takes longer than `--watchdog-s`."""
    with virtual("--virtual-slowdown", "10000", "--watchdog-s", "0.5") as server:
        engine = server.children["engine"][0]
        response = complete(server, [1, 2, 3], 5)
        assert response.status_code == 503 and "no progress for" in response.json()["error"]["message"]
        wait_until(lambda: get(server, "/ready").status_code == 200)
        assert engine not in server.children["engine"]


def test_a_front_end_that_is_stopped_is_restarted() -> None:
    with virtual("--workers", "2", "--stall-s", "3") as server:
        stopped, other = server.children["front_end"]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: stopped not in server.children["front_end"] and len(server.children["front_end"]) == 2)
        assert other in server.children["front_end"]
        assert [complete(server, [number, 7], 3).status_code for number in range(4)] == [200] * 4


def test_without_any_engine_requests_are_503_at_once_and_nothing_hangs(slow: ServerProcess) -> None:
    for engine in slow.children["engine"]:
        os.kill(engine, signal.SIGKILL)
    wait_until(lambda: get(slow, "/ready").status_code == 503)
    response = complete(slow, [7], 1)
    assert response.status_code in (200, 503)  # 200: an engine was restarted already
    wait_until(lambda: get(slow, "/ready").status_code == 200)
    assert complete(slow, [7, 8, 9], 12).json()["choices"][0]["text"] == expected_text([7, 8, 9], 12)


def test_a_signal_ends_all_engines() -> None:
    with virtual("--replicas", "3") as server:
        children = [pid for pids in server.children.values() for pid in pids]
        assert len(children) == 4
        server.signal(signal.SIGTERM)
        assert server.process.returncode == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


# ---------------------------------------------------------------------- tenants and options


def test_the_limit_of_a_tenant_holds_for_all_engines_together(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('[[tenants]]\nname = "small"\nkeys = ["small-key"]\nmax_requests = 3\n')
    with virtual("--replicas", "2", "--virtual-slowdown", "20", "--config", str(config)) as server:
        headers = {"Authorization": "Bearer small-key"}

        def send(number: int) -> httpx.Response:
            payload = body([800 + number] * 50, 300)
            return httpx.post(f"{server.url}/v1/completions", json=payload, headers=headers, timeout=300)

        with ThreadPoolExecutor(8) as pool:
            found = [one.status_code for one in pool.map(send, range(8))]
        assert found.count(200) >= 3 and found.count(429) == 8 - found.count(200) > 0
        assert send(9).status_code == 200, "they were released"


@pytest.mark.parametrize(
    ("server", "engine", "tenant", "message"),
    [
        ({"router": "random"}, {}, {}, "router is 'random', but there is one replica: give replicas, too."),
        ({"replicas": 2, "workers": 2}, {}, {"max_requests": 3}, "tenant 'a' has max_requests or tokens_per_minute"),
    ],
)
def test_what_several_engines_cannot_do_is_refused(
    server: dict[str, Any], engine: dict[str, Any], tenant: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_replicas(ServerConfig(**server), EngineConfig(**engine), [TenantConfig(name="a", **tenant)])


@pytest.mark.parametrize(
    ("events", "replay", "shared"),
    [("tcp://*:5557", "tcp://*:5557", "tcp://*:5557"), ("tcp://*:5557", "tcp://*:5559", "tcp://*:5559"),
     ("ipc:///x", "ipc:///x_dp1", "ipc:///x_dp1")],
)  # fmt: skip
def test_addresses_of_kv_events_that_overlap_are_refused(events: str, replay: str, shared: str) -> None:
    with pytest.raises(ConfigError, match=f"use {re.escape(repr(shared))}: give different ports, at least 3 apart"):
        ServerConfig(replicas=3, kv_events=events, kv_events_replay=replay)


def test_each_replica_has_the_next_address_of_kv_events() -> None:
    config = ServerConfig(replicas=3, kv_events="tcp://*:5557", kv_events_replay="ipc:///replay")
    assert config.kv_event_addresses(0) == ("tcp://*:5557", "ipc:///replay")
    assert config.kv_event_addresses(2) == ("tcp://*:5559", "ipc:///replay_dp2")
    free = ServerConfig(replicas=2, kv_events="tcp://127.0.0.1:*", kv_events_replay="tcp://127.0.0.1:*")
    assert free.kv_event_addresses(1) == ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    assert ServerConfig(replicas=2).kv_event_addresses(1) == (None, None)


def test_each_replica_publishes_and_records_what_it_does_itself(tmp_path: Path) -> None:
    first = free_ports(4)
    events, replays = ([f"tcp://127.0.0.1:{first + 2 * kind + replica}" for replica in (0, 1)] for kind in (0, 1))
    options = ("--kv-events", events[0], "--kv-events-replay", replays[0], "--record", str(tmp_path / "day.jsonl"))
    prompts = [[number] * 70 for number in range(10, 18)]
    pages = {
        number: set(block_hashes(np.array([number] * 70, np.int32), 16, ROOT).tolist()) for number in range(10, 18)
    }

    def published(replica: int, wanted: int) -> set[int]:
        """The hashes that one replica has published, once there are as many as wanted."""
        with Subscriber(events[replica]) as subscriber:

            def known() -> set[int]:
                subscriber.known.clear()
                for _, batch in subscriber.replay(replays[replica], 0):
                    assert subscriber.apply(batch).data_parallel_rank == replica
                return subscriber.known.get("GPU", set())

            wait_until(lambda: len(known()) >= wanted)
            return known()

    with virtual("--replicas", "2", "--router", "round-robin", *options) as server:
        for prompt in prompts:
            assert complete(server, prompt, 1).status_code == 200
        found = [published(replica, 16) for replica in (0, 1)]
        assert found[0] | found[1] == set().union(*pages.values()) and not found[0] & found[1]
        engine = next(pid for pid in server.children["engine"] if f":{first + 1}" in listening(pid))
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: metric(server, "replicas_up") == 2 and engine not in server.children["engine"])
        assert published(1, 0) == set(), "it has begun again with a clear, at the same address"
        assert published(0, 16) == found[0]
        server.signal(signal.SIGTERM)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"day-0.jsonl", "day-1.jsonl", "day-1.2.jsonl"}
    for name in ("day-0.jsonl", "day-1.jsonl"):
        assert len([one for one in read_recording(tmp_path / name) if isinstance(one, RecordedRequest)]) >= 4


def listening(pid: int) -> str:
    """The ports that a process listens on."""
    return " ".join(f":{one.laddr.port}" for one in psutil.Process(pid).net_connections() if one.status == "LISTEN")


def test_each_replica_gets_a_gpu_or_its_share_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3, 5"}
    assert choose_device({}, 1, 2, environment) == {} and environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert choose_device({"tp": 2}, 1, 2, four := {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == {"tp": 2}
    assert four["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ConfigError, match="there are 3 GPUs: each replica needs pp = 2"):
        choose_device({"pp": 2}, 0, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    environment = {"CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(ConfigError, match="replicas is 2 and there are 1 GPUs"):
        choose_device({"device": "cuda"}, 0, 2, environment)
    assert choose_device({"executor": "virtual"}, 0, 2, environment) == {"executor": "virtual"}
    assert choose_device({}, 0, 1, environment) == {}, "one engine takes what there is"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    shares = choose_device({"device": "cpu"}, 0, 3, environment)
    assert shares == {"device": "cpu", "threads": 2, "kv_memory_fraction": CPU_KV_FRACTION / 3}
    assert choose_device({"device": "cpu", "threads": 7, "kv_tokens": 9}, 0, 3, {})["threads"] == 7
