"""LoRA adapters over HTTP: chosen by `model`, loaded and unloaded while the server runs, kept across restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.config import ConfigError, EngineConfig, ServerConfig, check_replicas
from paceline.engine.adapter_loading import unload_adapter
from paceline.engine.engine import Engine
from paceline.server.engine_process import reload_adapters
from paceline.server.process_messages import AdaptersChanged, AdapterSource
from tests.parallel.test_lora import write_adapters
from tests.server.process import serving
from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller, make_app, tiny_engine

KEY = {"Authorization": "Bearer boss"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    write_adapters(path, "tiny-qwen3")
    (path / "link").symlink_to("/etc")
    return path


@pytest.fixture(scope="module")
def lora_engine() -> Iterator[Engine]:
    engine = tiny_engine()
    yield engine
    engine.close()


@pytest.fixture
def caller(lora_engine: Engine, folder: Path) -> Iterator[Caller]:
    yield Caller(make_app(lora_engine, admin_key="boss", lora_folder=str(folder)))
    for one in lora_engine.adapters.loaded:
        unload_adapter(lora_engine, one.name)


def admin(caller: Caller, path: str, **body: Any) -> httpx.Response:
    return caller.request("POST", path, json=body, headers=KEY)


def test_model_names_an_adapter_in_every_api(caller: Caller, folder: Path) -> None:
    loaded = admin(caller, LOAD, lora_name="sql", lora_path="a")
    assert loaded.status_code == 200 and loaded.json()["rank"] == 3
    base = caller.ok(COMPLETIONS, TEXT)["choices"][0]["text"]
    adapted = caller.ok(COMPLETIONS, TEXT, model="sql")
    assert adapted["choices"][0]["text"] != base and adapted["model"] == "sql"
    assert caller.ok(CHAT, HELLO, model="sql")["choices"] != caller.ok(CHAT, HELLO)["choices"]
    streamed = "".join(event["choices"][0]["text"] for event in caller.events(COMPLETIONS, TEXT, model="sql")[:-1])
    assert streamed == adapted["choices"][0]["text"]
    vectors = [caller.ok("/v1/embeddings", {"model": name, "input": "hello"}) for name in ("tiny", "sql")]
    assert vectors[0]["data"] != vectors[1]["data"]
    assert caller.ok("/tokenize", {"model": "sql", "prompt": "hello"})["count"] > 0
    messages = {"model": "sql", "max_tokens": 4, "messages": HELLO["messages"]}
    assert caller.ok("/v1/messages", messages)["model"] == "sql"
    assert caller.ok(
        "/api/generate", {"model": "sql:latest", "prompt": "x", "stream": False, "options": {"num_predict": 2}}
    )["done"]
    unnamed = caller.post(COMPLETIONS, {"prompt": "x"})
    assert unnamed.status_code == 400
    assert unnamed.json()["error"]["message"] == "`model` is required: this server has tiny, sql."
    models = caller.request("GET", "/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in models] == [("tiny", None), ("sql", "tiny")]
    assert caller.request("GET", "/v1/models/sql").json()["parent"] == "tiny"
    assert [one["name"] for one in caller.request("GET", "/api/tags").json()["models"]] == ["tiny", "sql"]


def test_loading_and_unloading_follow_vllms_rules(caller: Caller, lora_engine: Engine, folder: Path) -> None:
    unknown = caller.post(COMPLETIONS, TEXT, model="sql")
    assert unknown.status_code == 404 and "does not exist: use 'tiny'." in unknown.text
    assert admin(caller, LOAD, lora_name="sql", lora_path=str(folder / "a")).status_code == 200
    unknown = caller.post(COMPLETIONS, TEXT, model="other")
    assert "use 'tiny', 'sql'." in unknown.json()["error"]["message"]
    again = admin(caller, LOAD, lora_name="sql", lora_path="b")
    assert again.status_code == 400 and "load_inplace" in again.text
    first = caller.ok(COMPLETIONS, TEXT, model="sql")["choices"][0]["text"]
    assert admin(caller, LOAD, lora_name="sql", lora_path="b", load_inplace=True).json()["rank"] == 17
    assert caller.ok(COMPLETIONS, TEXT, model="sql")["choices"][0]["text"] != first
    other_front_end = Caller(make_app(lora_engine))
    assert other_front_end.ok(COMPLETIONS, TEXT, model="sql")
    assert admin(caller, UNLOAD, lora_name="sql").status_code == 200
    assert other_front_end.post(COMPLETIONS, TEXT, model="sql").status_code == 404
    for gone in (caller.post(COMPLETIONS, TEXT, model="sql"), admin(caller, UNLOAD, lora_name="sql")):
        assert gone.status_code == 404, gone.text
    assert len(caller.request("GET", "/v1/models").json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x"}, 400, "`lora_path` is required"),
        ({"lora_name": "x", "lora_path": "none"}, 400, "which is no folder"),
        ({"lora_name": "x", "lora_path": "../"}, 403, "not below the lora_folder"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "not below the lora_folder"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "not below the lora_folder"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 403, "not below the lora_folder"),
        ({"lora_name": "", "lora_path": "a"}, 400, "lora_name is ''"),
        ({"lora_name": "a\0b", "lora_path": "a"}, 400, "printable"),
        ({"lora_name": "tiny", "lora_path": "a"}, 400, "the name of the served model"),
    ],
)
def test_bad_loads_are_refused(caller: Caller, body: dict[str, str], status: int, message: str) -> None:
    refused = admin(caller, LOAD, **body)
    assert (refused.status_code, message in refused.text) == (status, True), refused.text
    assert caller.ok(COMPLETIONS, TEXT)


def test_tenants_may_not_load_and_a_server_without_a_folder_loads_nothing(caller: Caller, lora_engine: Engine) -> None:
    body = {"lora_name": "x", "lora_path": "a"}
    assert caller.request("POST", LOAD, json=body).status_code == 401
    closed = Caller(make_app(lora_engine, admin_key="boss"))
    refused = admin(closed, LOAD, **body)
    assert refused.status_code == 403 and "--lora-folder" in refused.text
    for config, engine, name in (
        (ServerConfig(lora_folder="x"), EngineConfig(executor="virtual"), "executor"),
        (ServerConfig(lora_folder="x", replicas=2, prefill_replicas=1), EngineConfig(), "prefill_replicas"),
    ):
        with pytest.raises(ConfigError, match=f"lora_folder is 'x' and {name} is"):
            check_replicas(config, engine, ())


def test_a_restarted_engine_loads_the_adapters_again_that_are_still_there(lora_engine: Engine, folder: Path) -> None:
    before = [AdapterSource("kept", str(folder / "b")), AdapterSource("gone", str(folder / "none"))]
    reload_adapters(lora_engine, AdaptersChanged(tuple(before)))
    assert [(one.name, one.rank) for one in lora_engine.adapters.loaded] == [("kept", 17)]
    unload_adapter(lora_engine, "kept")


def test_metrics_name_the_adapters_of_requests(caller: Caller) -> None:
    assert "lora_requests_info" not in caller.request("GET", "/metrics", headers=KEY).text
    admin(caller, LOAD, lora_name="sql", lora_path="a")
    text = caller.request("GET", "/metrics", headers=KEY).text
    expected = 'lora_requests_info{max_lora="8",running_lora_adapters="",waiting_lora_adapters=""}'
    assert f"paceline_{expected}" in text
    assert "paceline_lora_adapters 1.0" in text and "paceline_lora_loads_total" in text
    assert 'lora_requests_running{adapter="sql"} 0.0' in text


@pytest.mark.cluster
def test_adapters_reach_all_replicas_and_those_that_are_restarted(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    for name in "ab":
        shutil.copytree(folder / name, own / name)
    arguments = ["--load", "random", "--shape", "tiny-qwen3", "--kv-tokens", "2048", "--served-name", "tiny"]
    arguments += ["--threads", "1", "--device", "cpu", "--admin-key", "boss", "--lora", f"start={own / 'a'}"]
    arguments += ["--lora-folder", str(own), "--replicas", "2", "--metric-names", "both"]
    with serving(*arguments) as server:
        url = server.url

        def text(model: str, prompt: int) -> str:
            body = {"model": model, "prompt": [prompt] * 40, "max_tokens": 4, "temperature": 0}
            response = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["text"])

        def texts() -> dict[tuple[str, int], str]:
            """Of requests that share nothing, so that both engines get some."""
            return {(name, prompt): text(name, prompt) for name in ("tiny", "late") for prompt in range(6)}

        def post(path: str, **body: str) -> int:
            return httpx.post(f"{url}{path}", json=body, headers=KEY, timeout=60).status_code

        assert text("start", 1) != text("tiny", 1)
        assert post(LOAD, lora_name="late", lora_path="b") == 200
        expected = texts()
        assert 'vllm:lora_requests_info{max_lora="8"' in httpx.get(f"{url}/metrics", headers=KEY, timeout=60).text
        assert post(UNLOAD, lora_name="start") == 200
        shutil.rmtree(own / "a")  # a restarted engine does not need it
        victim = server.children["engine"][0]
        os.kill(victim, signal.SIGKILL)
        while (
            victim in server.children["engine"]
            or "paceline_replicas_up 2.0" not in httpx.get(f"{url}/metrics", timeout=60, headers=KEY).text
        ):
            time.sleep(0.05)
        assert texts() == expected
        gone = httpx.post(f"{url}{COMPLETIONS}", json={**TEXT, "model": "start"}, timeout=60)
        assert gone.status_code == 404 and "'late'" in gone.text


@pytest.mark.parametrize(("allowed", "most"), [(False, 0), (True, 20)], ids=["no adapters", "adapters"])
def test_a_flood_of_wrong_names_asks_the_engine_a_few_times(
    lora_engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool, most: int
) -> None:
    app = make_app(lora_engine, lora_folder=str(folder) if allowed else None, admin_key="boss")
    ask, asked = app.state.client.query, []

    async def slow(query: Any) -> Any:
        asked.append(query)
        await asyncio.sleep(0.3)
        return await ask(query)

    monkeypatch.setattr(app.state.client, "query", slow)

    async def flood(client: httpx.AsyncClient) -> list[int]:
        sent = (client.post(COMPLETIONS, json={**TEXT, "model": f"wrong-{number}"}) for number in range(40))
        return [one.status_code for one in await asyncio.gather(*sent)]

    assert Caller(app).run(flood) == [404] * 40
    assert len(asked) <= most
