"""Two engines behind Ray Serve on this machine, over HTTP: first the default model, then virtual GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server import virtual
from tests.server.ray_cluster import RayCluster, ray_cluster
from tests.server.test_cpu_replicas import QUESTIONS, SYSTEMS
from tests.server.virtual import assert_nothing_is_left, complete, events, expected_text, get, metric

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
pytest.importorskip("ray", reason="`make test-cluster` installs Ray")
wait_until = partial(virtual.wait_until, seconds=1200)  # Ray starts a dozen processes, slowly on a busy host

ROOT = Path(__file__).parent.parent.parent
VIRTUAL = {"executor": "virtual", "log_level": "warning", "replicas": 2, "num_cpus": 0.1}
SCALED = VIRTUAL | {
    "replicas": 1, "max_replicas": 2, "target_queue_s": 0.1, "scale_up_s": 0, "scale_down_s": 0, "virtual_slowdown": 20,
    "max_running": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def default_model(cluster: RayCluster, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RayCluster:
    """The example of deploy/ray, as a user runs it."""
    example = yaml.safe_load((ROOT / "deploy" / "ray" / "paceline.yaml").read_text())
    example["http_options"]["port"] = cluster.port
    example["applications"][0]["args"] |= {"model": str(smollm2_path), "served_name": "default", "kv_tokens": 8192}
    path = tmp_path_factory.mktemp("ray") / "paceline.yaml"
    path.write_text(yaml.safe_dump(example))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address", cluster.address, path]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: is_ready(cluster), why=lambda: cluster.call("status"))
    return cluster


def is_ready(cluster: RayCluster) -> bool:
    try:
        return get(cluster, "/ready").status_code == 200
    except httpx.TransportError:  # Ray has not started its proxy, or the proxy waits for a replica
        return False


@pytest.fixture(scope="module")
def virtual_gpus(cluster: RayCluster) -> RayCluster:
    """Another configuration of the same app: Ray replaces the replicas one after the other."""
    cluster.deploy(**VIRTUAL, virtual_slowdown=4)
    wait_until(lambda: metric(cluster, "replicas_up") == 2)
    return cluster


@pytest.fixture
def client(cluster: RayCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def ask(client: openai.OpenAI, system: str, question: str, **more: Any) -> Any:
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return client.chat.completions.create(model="default", messages=messages, max_tokens=4, temperature=0, **more)


# ---------------------------------------------------------------------- the default model


def test_the_openai_client_gets_the_same_answer_with_and_without_streaming(
    default_model: RayCluster, client: openai.OpenAI
) -> None:
    full = ask(client, SYSTEMS[0], QUESTIONS[0])
    chunks = list(ask(client, SYSTEMS[0], QUESTIONS[0], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == full.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == full.choices[0].finish_reason
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 1, "it was streamed"


def test_requests_with_a_common_prefix_go_to_the_replica_that_has_it(
    default_model: RayCluster, client: openai.OpenAI
) -> None:
    """In another order the second time: taking turns would miss. Whether both replicas are used depends on when they
    report; one whose report is late is not chosen, so a busy host may miss some."""

    def hits(attempt: int) -> bool:
        systems = [f"{attempt}. {system}" for system in SYSTEMS[:2]]
        for system in systems:
            ask(client, system, QUESTIONS[0])
        found = [ask(client, system, QUESTIONS[1]).usage for system in reversed(systems)]
        return all(usage.prompt_tokens_details.cached_tokens > 0.7 * usage.prompt_tokens for usage in found)

    assert sum(hits(attempt) for attempt in range(5)) >= 3  # one in four by chance


# ---------------------------------------------------------------------- virtual GPUs


def open_by_replica(cluster: RayCluster) -> dict[str, float]:
    found = text_string_to_metric_families(get(cluster, "/metrics").text)
    samples = [one for family in found if family.name == "paceline_num_requests_open" for one in family.samples]
    return {one.labels["replica"]: one.value for one in samples}


def test_a_client_that_disconnects_aborts_its_request(virtual_gpus: RayCluster) -> None:
    payload = {"model": "virtual", "prompt": [5] * 40, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{virtual_gpus.url}/v1/completions", json=payload, timeout=300) as response:
        chunks = response.iter_raw()
        assert response.status_code == 200 and next(chunks)
        assert metric(virtual_gpus, "num_requests_open") == 1
    wait_until(lambda: metric(virtual_gpus, "num_requests_open") == 0)
    assert_nothing_is_left(virtual_gpus)


def test_a_killed_replica_ends_its_streams_and_its_other_requests_are_sent_to_another_one(
    virtual_gpus: RayCluster,
) -> None:
    victim = virtual_gpus.replicas[0]
    (engine,) = victim.children()
    prompts = [[500 + number] * 40 for number in range(12)]
    began = threading.Semaphore(0)

    def stream(prompt: list[int]) -> list[Any]:
        payload = {"model": "virtual", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        raw = b""
        with httpx.stream("POST", f"{virtual_gpus.url}/v1/completions", json=payload, timeout=300) as response:
            for data in response.iter_raw():
                raw += data
                began.release()
        return events(raw)

    with ThreadPoolExecutor(24) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        others = [pool.submit(complete, virtual_gpus, [*prompt, 9], 400) for prompt in prompts]
        for _ in prompts:
            assert began.acquire(timeout=600)
        wait_until(lambda: min(open_by_replica(virtual_gpus).values()) > 0)
        victim.kill()
        results = [one.result() for one in streams]
        for prompt, other in zip(prompts, others, strict=True):
            assert other.result().status_code == 200, other.result().text
            assert other.result().json()["choices"][0]["text"] == expected_text([*prompt, 9], 400)
    failed = [found for found in results if found[-1] != b"[DONE]"]
    assert 0 < len(failed) < len(results), "streams of the other replica went on"
    assert {found[-1]["error"]["code"] for found in failed} == {"engine_failed"}
    assert metric(virtual_gpus, "router_retries_total") > 0
    wait_until(lambda: metric(virtual_gpus, "replicas_up") == 2)
    assert victim.pid not in {one.pid for one in virtual_gpus.replicas}
    wait_until(lambda: not engine.is_running())
    assert_nothing_is_left(virtual_gpus)


def test_a_stop_string_ends_the_request_in_the_engine(virtual_gpus: RayCluster) -> None:
    text = expected_text([5, 6] * 20, 400)
    choice = complete(virtual_gpus, [5, 6] * 20, 400, stop=[text[20:26]]).json()["choices"][0]
    assert choice["text"] == text[: text.index(text[20:26])] and choice["finish_reason"] == "stop"
    wait_until(lambda: metric(virtual_gpus, "num_requests_open") == 0)
    assert metric(virtual_gpus, "request_success_total", finished_reason="stop") == 1


def test_an_update_of_the_app_loses_no_request(virtual_gpus: RayCluster) -> None:
    """Requests arrive all the time while Ray replaces both engines and the ingress; none is refused or cut off."""
    stop, number = threading.Event(), iter(range(10_000))

    def send() -> int:
        count = 0
        while not stop.is_set():
            prompt = [100 + next(number), 7] * 20
            response = complete(virtual_gpus, prompt, 40)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"] == expected_text(prompt, 40)
            count += 1
        return count

    before = {one.pid for one in virtual_gpus.engines}
    with ThreadPoolExecutor(2) as pool:
        senders = [pool.submit(send) for _ in range(2)]
        try:
            virtual_gpus.deploy(**SCALED)
        finally:
            stop.set()
        assert all(sender.result() > 0 for sender in senders)
    assert not before & {one.pid for one in virtual_gpus.engines}
    wait_until(lambda: metric(virtual_gpus, "num_requests_open") == 0)


def test_engines_are_started_and_stopped_by_queue_time(virtual_gpus: RayCluster) -> None:
    virtual_gpus.deploy(**SCALED)
    wait_until(lambda: metric(virtual_gpus, "replicas_up") == 1 and len(virtual_gpus.engines) == 1)
    scaled = threading.Event()

    def load(number: int) -> None:
        """Keeps the engine busy until there are two, then disconnects."""
        payload = {"model": "virtual", "prompt": [700 + number] * 40, "max_tokens": 200, "ignore_eos": True}
        while not scaled.is_set():
            with httpx.stream(
                "POST", f"{virtual_gpus.url}/v1/completions", json={**payload, "stream": True}, timeout=300
            ) as response:
                for _ in response.iter_raw():
                    if scaled.is_set():
                        break

    with ThreadPoolExecutor(12) as pool:
        loads = [pool.submit(load, number) for number in range(12)]
        try:
            wait_until(lambda: metric(virtual_gpus, "replicas_up") == 2)
        finally:
            scaled.set()
        for one in loads:
            one.result()
    wait_until(lambda: metric(virtual_gpus, "replicas_up") == 1 and len(virtual_gpus.engines) == 1)
    assert complete(virtual_gpus, [3, 4], 5).json()["choices"][0]["text"] == expected_text([3, 4], 5)


def test_a_replica_exits_with_its_engine(virtual_gpus: RayCluster) -> None:
    replica, engine = virtual_gpus.replicas[0], virtual_gpus.engines[0]
    engine.kill()
    wait_until(lambda: not replica.is_running())
    assert complete(virtual_gpus, [8, 9], 5).status_code == 200, "it waits for the next one"
