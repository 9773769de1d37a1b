"""The live page in a browser: it shows the state of the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline.config import SchedulerConfig, TenantConfig
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.monitor import EngineMonitor
from paceline.engine.output import OutputDelta
from paceline.request import PacelineError, Request, SamplingParams, as_tokens
from paceline.scheduler import Scheduler
from paceline.testing import Harness
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


def test_the_page_shows_drafts_while_speculation_is_on(page: Page, url: str) -> None:
    page.goto(url)
    expect(figure(page, "ended")).to_be_visible()
    for name in ("acceptance", "tokens_per_row"):
        expect(figure(page, name)).to_have_count(0)
    expect(page.get_by_text("drafts verified")).to_have_count(0)
    built = build_engine(executor="virtual", speculate="ngram", virtual_acceptance=1.0, max_running=8)
    try:
        with run_app(make_app(built)) as address:
            page.goto(address)
            expect(figure(page, "tokens_per_row")).to_have_text("0.00")
            for sink in send(built, 40, tokens=65, tenants=1):
                sink.ended.result(300)
            # Every draft is right: after the first token each pass yields eight, of which seven were drafted.
            expect(figure(page, "acceptance")).to_have_text("100.0 %")
            expect(figure(page, "tokens_per_row")).not_to_have_text("0.00")
            totals = page.locator("section", has_text="Since the start").locator("tbody")
            for name in ("drafts verified", "drafts accepted"):
                expect(totals.locator("tr", has_text=name)).to_contain_text(f"{40 * 56:,}")
    finally:
        built.close()


def test_the_page_shows_why_a_thousand_requests_wait(page: Page, url: str, engine: Engine) -> None:
    sinks = send(engine, 1000, tokens=200)
    page.goto(url)
    expect(page.locator("[data-figure='num_running']")).to_have_text("8")
    waiting = page.locator("[data-figure='num_waiting']")
    assert int(waiting.inner_text().replace(",", "")) > 500
    # One group instead of a line for each request
    expect(page.locator("[data-reason]")).to_have_count(1)
    expect(page.locator("[data-reason] summary")).to_contain_text(
        "wait for one of 8 slots (max_running), all in use: a running request must finish first"
    )
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


# A state, frozen: what the page shows is compared with it, number by number.
@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    """The state of an engine with host memory, tenants and shared prefixes, in the middle of its work."""
    config = SchedulerConfig(
        num_pages=40,
        page_size=4,
        max_running=6,
        num_host_pages=48,
        prefix_wait_tokens=4,
        chunk_tokens=16,
        policy="fcfs",
    )
    run = Harness(Scheduler(config), overlap=True)
    monitor = EngineMonitor(run.scheduler, run.clock)
    monitor.state()
    for number in range(80):
        document = 100 * (number % 7)
        tokens = [*range(1, 17), *range(document, document + 20), *range(900 + number, 903 + number)]
        params = SamplingParams(max_tokens=6 + number % 9, ignore_eos=True)
        run.add(Request(f"r{number}", as_tokens(tokens), params, tenant=f"team-{number // 7 % 2}"))
    while not _shows_everything(found := monitor.state()):
        run.clock.advance(0.5)
        run.step()
    return {"model": "tiny", "device": "virtual", **found}


def _shows_everything(state: dict[str, Any]) -> bool:
    snapshot = state["snapshot"]
    return (
        snapshot["num_waiting"] > 3
        and len(snapshot["shared"]) > 1
        and any(one["fetched"] for one in snapshot["running"])
        and any(node[2] == "host" for node in snapshot["tree"]["nodes"])
        and len(state["samples"]) > 3
    )


def show(page: Page, url: str, state: dict[str, Any]) -> None:
    page.route("**/live/state", lambda route: route.fulfill(json=state))
    page.goto(url)
    expect(page.get_by_text("live", exact=True)).to_be_visible()


def test_waiting_requests_are_grouped_and_have_a_place_in_the_queue(
    page: Page, url: str, frozen: dict[str, Any]
) -> None:
    show(page, url, frozen)
    snapshot = frozen["snapshot"]
    shown = page.evaluate(
        "[...document.querySelectorAll('[data-reason]')].map(group => [group.dataset.reason, "
        "Number(group.querySelector('[data-figure=reason]').innerText), [...group.querySelectorAll('.row')]"
        ".map(row => [row.dataset.id, Number(row.querySelector('[data-figure=place]').innerText)])])"
    )
    counts = {kind: count for kind, count, _ in snapshot["reasons"]}
    assert {kind: count for kind, count, _ in shown} == counts
    assert all(count == len(rows) for _, count, rows in shown)
    expected = {
        kind: [[one["id"], one["place"]] for one in snapshot["waiting"] if one["reason"] == kind] for kind in counts
    }
    assert {kind: rows for kind, _, rows in shown} == expected
    expect(page.locator("[data-panel='waiting'] h2")).to_contain_text("in order of admission")
    group = page.locator("[data-reason]").first
    group.locator("summary").click()
    expect(group.locator(".row").first).to_be_hidden()
    group.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(group.locator(".row").first).to_be_visible()


def test_tooltips_count_every_token_once(page: Page, url: str, frozen: dict[str, Any]) -> None:
    show(page, url, frozen)
    kinds = r"([\d,]+) (?:cached|fetched from host memory|computed|to compute)"
    for one in frozen["snapshot"]["running"]:
        tip = page.locator(f".row[data-id='{one['id']}'] .bar").get_attribute("title") or ""
        prompt, parts = tip.split(" prompt tokens: ")
        assert sum(int(number) for number in re.findall(kinds, parts)) == int(prompt) == one["prompt"]
        assert f"; {one['output']} of at most {one['max']} output tokens" in parts
    for one in frozen["snapshot"]["waiting"]:
        tip = page.locator(f".row[data-id='{one['id']}'] .bar").get_attribute("title") or ""
        total, parts = tip.split(" tokens: ")
        assert sum(int(number) for number in re.findall(r"\d+", parts)) == int(total) == one["tokens"]


def test_host_memory_is_drawn(page: Page, url: str, frozen: dict[str, Any]) -> None:
    show(page, url, frozen)
    host, counters = frozen["snapshot"]["host"], frozen["snapshot"]["counters"]
    panel = page.locator("[data-panel='host']")
    expect(panel.locator("h2")).to_contain_text(f"{host['used']} of {host['pages']} pages in use")
    for name in ("spilled_pages", "fetched_tokens", "forgotten_pages"):
        expect(panel.locator(f"[data-figure='{name}']")).to_have_text(f"{counters[name]:,}")
    nodes = [node for node in frozen["snapshot"]["tree"]["nodes"] if node[2] == "host" and node[1]]
    assert page.locator(".tree rect.host").count() == len(nodes) > 0


def test_shared_prefixes_are_drawn_in_the_rows_and_in_the_tree(page: Page, url: str, frozen: dict[str, Any]) -> None:
    show(page, url, frozen)
    snapshot = frozen["snapshot"]
    for one in snapshot["running"]:
        tag = page.locator(f".row[data-id='{one['id']}'] .prefix")
        if one["shared"] is None:
            expect(tag).to_have_count(0)
            continue
        prefix = snapshot["shared"][one["shared"]]
        letter = chr(65 + one["shared"])
        expect(tag).to_have_text(f"{letter} {prefix['tokens']}")
        others = ", ".join(name for name in prefix["ids"] if name != one["id"])
        expect(tag).to_have_attribute("title", f"shares its first {prefix['tokens']} tokens with {others}")
        node = page.locator(f".tree g[data-prefix='{letter}'] title")
        assert f"shared prefix {letter} of {', '.join(prefix['ids'])}" in (node.text_content() or "")


def test_nothing_is_drawn_for_features_that_are_off(page: Page, url: str) -> None:
    run = Harness(Scheduler(SchedulerConfig(num_pages=40, prefix_cache=False, policy="fcfs")), overlap=False)
    monitor = EngineMonitor(run.scheduler, run.clock)
    run.add(Request("one", as_tokens(range(20)), SamplingParams(max_tokens=9)))
    run.step()
    show(page, url, {"model": "tiny", "device": "virtual", **monitor.state()})
    expect(page.locator(".row[data-id='one']")).to_be_visible()
    for absent in ("[data-panel='host']", "[data-panel='tree']", "[data-figure='hit_rate']", ".tag"):
        expect(page.locator(absent)).to_have_count(0)
    expect(page.get_by_text("host memory")).to_have_count(0)
    assert page.locator("[data-panel='tenants'] th").all_inner_texts() == ["tenant", "running", "waiting", "weight"]


def test_every_label_has_a_tooltip(page: Page, url: str, frozen: dict[str, Any]) -> None:
    show(page, url, frozen)
    without = page.evaluate(
        "[...document.querySelectorAll('h2, th, .stat, .legend > span, summary, .row .bar, .tag, .row .id')]"
        ".filter(one => !one.closest('[title]')).map(one => one.outerHTML.slice(0, 90))"
    )
    assert without == []


def test_the_last_label_of_the_time_axis_is_not_clipped(page: Page, url: str, frozen: dict[str, Any]) -> None:
    show(page, url, frozen)
    expect(page.locator("canvas").first).to_be_visible()
    # Columns of the strip under each chart that have ink: "now" is centred on the end of the plot, and ends before the
    # canvas does.
    charts = page.evaluate(
        """[...document.querySelectorAll('.uplot')].map(chart => {
          const canvas = chart.querySelector('canvas'), over = chart.querySelector('.u-over');
          const scale = canvas.width / canvas.getBoundingClientRect().width;
          const end = (over.getBoundingClientRect().right - canvas.getBoundingClientRect().left) * scale;
          const top = Math.ceil((over.getBoundingClientRect().bottom - canvas.getBoundingClientRect().top) * scale) + 3;
          const { data } = canvas.getContext('2d').getImageData(0, top, canvas.width, canvas.height - top);
          const inked = [];
          for (let x = 0; x < canvas.width; x++)
            for (let y = 0; y < canvas.height - top; y++)
              if (data[4 * (y * canvas.width + x) + 3] > 40) { inked.push(x); break; }
          return { width: canvas.width, end, inked };
        })"""
    )
    assert len(charts) == 3
    for chart in charts:
        label = [x for x in chart["inked"] if x > chart["end"] - 20]
        assert label, "there is a label at the end"
        assert max(label) < chart["width"] - 1
        assert (min(label) + max(label)) / 2 == pytest.approx(chart["end"], abs=3)


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


def test_the_chart_of_requests_has_the_numbers_of_the_lists() -> None:
    run = Harness(Scheduler(SchedulerConfig(num_pages=64, page_size=4, max_running=3)), overlap=True)
    monitor = EngineMonitor(run.scheduler, run.clock)
    for number in range(9):
        params = SamplingParams(max_tokens=1 + number % 3, ignore_eos=True)
        run.add(Request(f"r{number}", as_tokens([number, 1, 2]), params))
    while run.scheduler.has_work:
        run.step()
        run.clock.advance(1.0)
        state = monitor.state()
        assert state["samples"][-1][5:7] == [state["snapshot"]["num_running"], state["snapshot"]["num_waiting"]]


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
