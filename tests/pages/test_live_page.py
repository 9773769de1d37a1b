"""The live page in a browser: it shows the state of the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline.config import TenantConfig
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.monitor import EngineMonitor
from paceline.engine.output import OutputDelta
from paceline.request import PacelineError, SamplingParams
from tests.pages.serving import run_app
from tests.server.process import serving
from tests.server.serving import make_app


class Sink:
    """Waits until one request has finished."""

    def __init__(self) -> None:
        self.ended: Future[OutputDelta] = Future()

    def put(self, output: OutputDelta) -> None:
        if output.finish_reason is not None:
            self.ended.set_result(output)

    def refuse(self, error: PacelineError) -> None:
        self.ended.set_exception(error)


def send(engine: Engine, count: int, *, tokens: int = 4, tenants: int = 2, length: int = 24) -> list[Sink]:
    sinks = [Sink() for _ in range(count)]
    for number, sink in enumerate(sinks):
        prompt = [*range(100, 100 + length), number % 90 + 1, number % 7 + 1]
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        name = f"secret-{number}-{time.monotonic_ns()}"
        engine.submit(Job(engine.encode(prompt), params, id=name, tenant=f"team-{number % tenants}"), sink)
    return sinks


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    built = build_engine(load="random", shape="tiny-llama", threads=1, max_running=8, num_pages=512, page_size=8)
    yield built
    built.close()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with run_app(make_app(engine)) as address:
        yield address


def figure(page: Page, name: str) -> Any:
    return page.locator(f".stat [data-figure='{name}']")


def test_the_page_shows_the_engines_figures(page: Page, url: str, engine: Engine) -> None:
    page.goto(url)
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    for sink in send(engine, 30):
        sink.ended.result(300)
    finished = engine.call(lambda scheduler: sum(scheduler.counters.finished.values())).result()
    expect(figure(page, "ended")).to_have_text(f"{finished:,}")
    counters = engine.call(lambda scheduler: scheduler.counters).result()
    expect(figure(page, "hit_rate")).to_have_text(f"{100 * counters.hit_rate:.1f} %")
    expect(page.locator("main")).to_contain_text("team-1")
    expect(page.get_by_text("Recent requests")).to_be_visible()
    rows = page.locator("section", has_text="Recent requests").locator("tbody tr")
    expect(rows).to_have_count(30)
    expect(rows.first).to_contain_text("length")


def test_the_page_shows_why_a_thousand_requests_wait(page: Page, url: str, engine: Engine) -> None:
    sinks = send(engine, 1000, tokens=200)
    page.goto(url)
    expect(page.locator("[data-figure='num_running']")).to_have_text("8")
    waiting = page.locator("[data-figure='num_waiting']")
    assert int(waiting.inner_text().replace(",", "")) > 500
    expect(page.get_by_label("waiting requests")).to_contain_text("for one of 8 slots (max_running), all in use")
    expect(page.get_by_label("waiting requests")).to_contain_text("more")
    text = waiting.inner_text()
    expect(waiting).not_to_have_text(text)  # the page refreshes itself
    kinds = ("owned", "shared", "cached", "free")
    counts = [page.locator(f".legend [data-figure='{kind}']").inner_text() for kind in kinds]
    assert sum(map(int, counts)) == 512
    for sink in sinks:
        engine.abort(str(id(sink)))  # an unknown id is ignored
    engine.call(lambda scheduler: [scheduler.abort(name, 0.0) for name in list(scheduler.requests)]).result()
    for sink in sinks:
        sink.ended.result(300)


def test_the_page_reports_a_lost_server(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    page.route("**/live/state", lambda route: route.fulfill(body="half an ans"))
    expect(page.get_by_role("status")).to_contain_text("no response")
    page.unroute("**/live/state")


def test_the_page_is_served_to_browsers_and_contains_no_prompts(url: str, engine: Engine) -> None:
    for sink in send(engine, 2):
        sink.ended.result(300)
    assert "routes" in httpx.get(url).json(), "a client that does not accept HTML gets the routes"
    page = httpx.get(url, headers={"Accept": "text/html"})
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    state = httpx.get(f"{url}/live/state").json()
    assert len(state["recent"]) > 0
    assert all(isinstance(one["prompt"], int) for one in state["recent"]), "the length, not the text"
    assert httpx.post(f"{url}/live/state").status_code in (404, 405)
    for path in ("/live/../config.py", "/live/__init__.py", "/live/vendor", "/live/nothing.js"):
        assert httpx.get(url + path).status_code == 404


def test_the_page_can_be_turned_off(engine: Engine) -> None:
    with run_app(make_app(engine, live_page=False)) as url:
        assert "routes" in httpx.get(url, headers={"Accept": "text/html"}).json()
        assert httpx.get(f"{url}/live/state").status_code == 404


def test_with_api_keys_the_page_requires_the_admin_key(page: Page, engine: Engine) -> None:
    app = make_app(engine, admin_key="ours", tenants=[TenantConfig(name="team", keys=("theirs",))])
    with run_app(app) as url:
        for key, status in ((None, 401), ("theirs", 401), ("ours", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/live/state", headers=headers).status_code == status
        page.goto(f"{url}/live/live.html")
        page.get_by_label("admin key").fill("ours")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.goto("about:blank")  # else it keeps polling a server that has stopped


def test_the_page_shows_an_engine_in_another_process() -> None:
    with serving("--executor", "virtual") as server:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
        state = httpx.get(f"{server.url}/live/state").json()
        assert state["recent"][0]["prompt"] == 3
        assert state["snapshot"]["counters"]["finished"]["length"] >= 1


def test_the_page_costs_the_engine_little(engine: Engine) -> None:
    """With a thousand waiting requests the size of the state is bounded."""
    live = engine.call(lambda scheduler: EngineMonitor(scheduler, engine.clock)).result()
    sinks = send(engine, 1000, tokens=200)
    state = engine.call(lambda _: live.state()).result()
    assert state["snapshot"]["num_waiting"] > 900
    assert len(state["snapshot"]["waiting"]) == 100
    assert len(state["snapshot"]["tree"]["nodes"]) <= 150
    engine.call(lambda scheduler: [scheduler.abort(name, 0.0) for name in list(scheduler.requests)]).result()
    for sink in sinks:
        sink.ended.result(300)
