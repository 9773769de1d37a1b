"""`/admin/pause`, `/admin/weights` and `/admin/trace`, in one process and with an engine process."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.checks.weights import write_folder
from paceline.engine import trace_recorder
from paceline.model.shapes import shape
from paceline.model.weights import random_weights
from tests.server.process import serving
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app, tiny_engine

KEY = {"Authorization": "Bearer secret"}
TINY = ("--load", "random", "--shape", "tiny-qwen3", "--kv-tokens", "4096", "--threads", "1", "--admin-key", "secret")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, spec = tmp_path_factory.mktemp("weights"), shape("tiny-qwen3")
    write_folder(path, spec, random_weights(spec, seed=99))
    return path


@pytest.fixture
def caller() -> Iterator[Caller]:
    engine = tiny_engine()
    yield Caller(make_app(engine, admin_key="secret"))
    engine.close()


def admin(caller: Caller, method: str, route: str, **body: Any) -> httpx.Response:
    return caller.request(method, route, headers=KEY, **({"json": body} if body else {}))


def test_a_paused_engine_is_not_ready_and_serves_after_resume(caller: Caller) -> None:
    assert admin(caller, "POST", "/admin/pause").json() == {"paused": True, "num_running": 0, "num_waiting": 0}
    ready = caller.request("GET", "/ready")
    assert (ready.status_code, ready.json()["why"]) == (503, "The engine is paused: POST /admin/resume resumes it.")
    health = caller.request("GET", "/health")
    assert health.status_code == 200 and health.json()["paused"]
    assert "paceline_engine_paused 1.0" in caller.request("GET", "/metrics").text
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(caller.post(COMPLETIONS, TEXT)))
    client.start()
    while not admin(caller, "GET", "/admin/pause").json()["num_waiting"]:
        pass
    (waiting,) = caller.request("GET", "/v1/requests").json()["data"]
    assert "waits for the engine to resume" in waiting["why"]
    assert admin(caller, "POST", "/admin/resume").json()["paused"] is False
    client.join()
    assert answers[0].status_code == 200


def test_every_response_names_the_weights_it_was_computed_with(caller: Caller, folder: Path) -> None:
    def versions() -> list[Any]:
        streamed = caller.events(CHAT, HELLO)
        *before, last = [event for event in streamed if event != "[DONE]"]
        assert all("weight_versions" not in event for event in before)
        pieces = [event for event in caller.events(COMPLETIONS, TEXT) if event != "[DONE]"]
        return [
            caller.ok(CHAT, HELLO)["weight_versions"],
            caller.ok(COMPLETIONS, TEXT, n=2, temperature=1)["weight_versions"],
            caller.ok("/v1/embeddings", {"model": "tiny", "input": ["a", "b"]})["weight_versions"],
            last["weight_versions"],
            pieces[-1]["weight_versions"],
        ]

    assert versions() == [["0"]] * 5
    before = caller.ok(COMPLETIONS, TEXT)["choices"]
    updated = admin(caller, "POST", "/admin/weights", path=str(folder), version="step-1000")
    assert updated.status_code == 200 and updated.json()["version"] == "step-1000", updated.text
    assert admin(caller, "GET", "/admin/weights").json() == {"version": "step-1000"}
    assert versions() == [["step-1000"]] * 5
    assert caller.ok(COMPLETIONS, TEXT)["choices"] != before
    assert "paceline_weight_updates_total 1.0" in caller.request("GET", "/metrics").text


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("weights", {}, "`path` is required."),
        ("weights", {"path": "/nowhere"}, "model is '/nowhere', which is neither a folder nor a .gguf file"),
        ("weights", {"path": "x", "mode": "later"}, "mode is 'later'"),
        ("weights", {"path": "x", "version": ""}, "version has 0 characters"),
        ("pause", {"mode": 3}, "mode is 3"),
        ("trace", {"seconds": 0}, "seconds is 0: give more than 0 and at most 60"),
        ("trace", {"seconds": 1e9}, "seconds is 1e+09"),
        ("trace", {"seconds": "long"}, "seconds is 'long': give a number."),
    ],
)
def test_invalid_calls_are_400_and_change_nothing(caller: Caller, path: str, body: Any, message: str) -> None:
    response = caller.request("POST", f"/admin/{path}", headers=KEY, json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
    assert caller.ok(COMPLETIONS, TEXT)["weight_versions"] == ["0"]


def test_weights_are_not_a_tenants_business(caller: Caller, folder: Path) -> None:
    for path in ("pause", "resume", "weights", "trace"):
        assert caller.post(f"/admin/{path}", {"path": str(folder)}).status_code == 401


def test_a_trace_has_host_device_and_request_spans(caller: Caller) -> None:
    started, answers = threading.Event(), []

    def ask() -> None:
        started.wait()
        answers.extend(caller.ok(COMPLETIONS, TEXT, max_tokens=12) for _ in range(6))

    client = threading.Thread(target=ask)
    client.start()
    started.set()
    response = admin(caller, "POST", "/admin/trace", seconds=2)
    client.join()
    assert response.status_code == 200, response.text
    assert response.headers["content-disposition"] == 'attachment; filename="paceline-trace.json"'
    events = response.json()["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(processes.values()) == {"host", "device", "scheduler", "requests"}
    spans: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault(processes[event["pid"]], []).append(event)
            assert event["dur"] >= 0 and event["ts"] >= 0
    assert {span["name"].split()[0] for span in spans["host"]} >= {"plan", "launch", "wait", "commit", "text"}
    assert spans["device"]
    # Requests that began and ended within the trace: queue, prefill and decode follow each other inside one span.
    ids = {answer["id"] for answer in answers}
    whole = [
        span for span in spans["requests"] if span["name"].rpartition("-")[0] in ids and "finish_reason" in span["args"]
    ]
    assert whole
    for request in whole:
        parts = [one for one in spans["requests"] if one["args"]["id"] == request["name"] and one is not request]
        assert [part["name"] for part in parts][-3:] == ["queue", "prefill", "decode"][-len(parts) :]
        ends = [part["ts"] + part["dur"] for part in parts]
        assert parts[0]["ts"] == request["ts"] and abs(ends[-1] - request["ts"] - request["dur"]) < 0.01
        for end, after in zip(ends, parts[1:], strict=False):
            assert abs(end - after["ts"]) < 0.01
    assert admin(caller, "POST", "/admin/trace", seconds=0.01).status_code == 200, "and again"


def test_one_trace_at_a_time(caller: Caller) -> None:
    with trace_recorder._recording:
        second = admin(caller, "POST", "/admin/trace", seconds=0.01)
    assert second.status_code == 409 and "another trace is being recorded" in second.json()["error"]["message"]
    assert admin(caller, "POST", "/admin/trace", seconds=0.01).status_code == 200


@pytest.mark.cluster
def test_a_restarted_engine_loads_the_replaced_weights_again(folder: Path) -> None:
    with serving(*TINY) as server:
        url, body = server.url, {"model": "tiny-qwen3", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        updated = httpx.post(f"{url}/admin/weights", json={"path": str(folder)}, headers=KEY, timeout=60)
        assert updated.status_code == 200, updated.text
        before = httpx.post(url + COMPLETIONS, json=body, timeout=60).json()
        assert before["weight_versions"] == ["1"]
        (engine,) = server.children["engine"]
        os.kill(engine, signal.SIGKILL)
        while server.children["engine"] in ([], [engine]) or httpx.get(f"{url}/ready", timeout=60).status_code != 200:
            time.sleep(0.05)
        after = httpx.post(url + COMPLETIONS, json=body, timeout=60).json()
        assert (after["weight_versions"], after["choices"]) == (["1"], before["choices"])
        assert httpx.post(f"{url}/admin/trace", json={"seconds": 0.1}, headers=KEY, timeout=60).status_code == 200
        assert httpx.post(f"{url}/admin/pause", headers=KEY, timeout=60).json()["paused"]
        wrong = httpx.post(f"{url}/admin/weights", json={"path": "/nowhere"}, headers=KEY, timeout=60)
        assert wrong.status_code == 400 and "neither a folder" in json.loads(wrong.text)["error"]["message"]
        assert not httpx.post(f"{url}/admin/resume", headers=KEY, timeout=60).json()["paused"]


@pytest.mark.cluster
def test_new_weights_reach_all_replicas_and_those_that_are_restarted(folder: Path) -> None:
    with serving(*TINY, "--replicas", "2") as server:
        url = server.url

        prompts = itertools.count()

        def served() -> list[float]:
            """By each engine."""
            name = r'paceline_request_success_total\{finished_reason="length",replica="(\d)"\} (\S+)'
            found = re.findall(name, httpx.get(f"{url}/metrics", timeout=60, headers=KEY).text)
            return [float(count) for _, count in sorted(found)]

        def ask(_: int) -> set[str]:
            body = {"model": "tiny-qwen3", "prompt": [next(prompts) % 300] * 40, "max_tokens": 2, "temperature": 0}
            response = httpx.post(url + COMPLETIONS, json=body, timeout=60)
            assert response.status_code == 200, response.text
            return set(response.json()["weight_versions"])

        def versions() -> set[str]:
            """Of requests that share nothing, so many at a time that both engines get some."""
            found, before = set(), served()
            with ThreadPoolExecutor(16) as clients:
                while not all(now > then for now, then in zip(served(), before, strict=True)):
                    found |= set().union(*clients.map(ask, range(16)))
            return found

        assert versions() == {"0"}
        updated = httpx.post(f"{url}/admin/weights", json={"path": str(folder)}, headers=KEY, timeout=60)
        assert updated.status_code == 200, updated.text
        assert versions() == {"1"}
        victim = server.children["engine"][0]
        os.kill(victim, signal.SIGKILL)
        while (
            victim in server.children["engine"]
            or "paceline_replicas_up 2.0" not in httpx.get(f"{url}/metrics", timeout=60, headers=KEY).text
        ):
            time.sleep(0.05)
        assert versions() == {"1"}


@pytest.mark.parametrize("action", ["pin", "unpin", "flush"])
def test_a_long_cache_salt_is_refused_for_every_action(caller: Caller, action: str) -> None:
    response = admin(caller, "POST", "/admin/cache", action=action, name="x", prompt="a", cache_salt="s" * 257)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] == "cache_salt has 257 characters: give at most 256."
