"""The simulator page in a real browser: it shows the results of the command line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import BATCHING, EVICTION, POLICIES
from paceline.scheduler.snapshot import CACHED, DECODING, PREFILL, WAITING
from paceline.simulator.ui import DEFAULTS, WORKLOAD_DEFAULTS, SimulatorApp, run_frames
from tests.pages.serving import run_app


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_app(SimulatorApp()) as address:
        yield address


def from_the_command_line(path: Path, **changed: object) -> dict[str, float]:
    """The summary that `paceline sim run` writes for the page's parameters."""
    options = {**DEFAULTS, **changed}
    arguments = ["sim", "run", str(options.pop("workload")), "--json", str(path)]
    arguments.append("--overlap" if options.pop("overlap") else "--no-overlap")
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(path.read_text())["runs"].values()
    return run["summary"]


def shown(page: Page, side: int, figure: str) -> str:
    return page.locator(f".run[data-side='{side}'] .stat [data-figure='{figure}']").inner_text()


def settled(page: Page) -> None:
    expect(page.locator("[data-busy='false']")).to_have_count(1)
    expect(page.locator(".run").first).to_be_visible()


def milliseconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"µs": 1e-3, "ms": 1, "s": 1e3}[unit]


def assert_shows(page: Page, side: int, summary: dict[str, float]) -> None:
    assert shown(page, side, "hit_rate") == f"{100 * summary['hit_rate']:.2f} %"
    assert shown(page, side, "tokens_per_s") == f"{round(summary['tokens_per_s']):,}"
    assert shown(page, side, "retractions") == f"{round(summary['retractions']):,}"
    for name in ("ttft_p50_ms", "ttft_p99_ms", "wait_p99_ms"):
        assert milliseconds(shown(page, side, name)) == pytest.approx(summary[name], rel=0.01, abs=0.5)


def test_both_policies_show_the_results_of_the_command_line(page: Page, url: str, tmp_path: Path) -> None:
    page.goto(url)
    settled(page)
    assert_shows(page, 0, from_the_command_line(tmp_path / "left.json", policy="fcfs"))
    assert_shows(page, 1, from_the_command_line(tmp_path / "right.json", policy="fair"))


def test_each_column_has_its_own_policy_batching_and_overlap(page: Page, url: str, tmp_path: Path) -> None:
    page.goto(url)
    settled(page)
    page.get_by_label("Left batching").select_option("static")
    page.get_by_label("Right policy").select_option("lpm")
    page.get_by_label("Right overlap").uncheck()
    expect(page.locator(".run[data-side='1'] .side-name")).to_contain_text("lpm mixed batching, overlap off")
    expect(page.locator(".run[data-side='0'] .side-name")).to_contain_text("fcfs static batching, overlap on")
    settled(page)
    for side, own in enumerate(
        ({"policy": "fcfs", "batching": "static", "overlap": True}, {"policy": "lpm", "overlap": False})
    ):
        assert_shows(page, side, from_the_command_line(tmp_path / f"{side}.json", **own))
    link = page.url
    assert "batching=static" in link and "against_batching=mixed" in link and "against_overlap=false" in link
    page.goto("about:blank")
    page.goto(link)
    settled(page)
    expect(page.locator(".run[data-side='1'] .side-name")).to_contain_text("lpm mixed batching, overlap off")
    expect(page.locator(".run[data-side='0'] .side-name")).to_contain_text("fcfs static batching, overlap on")


def test_links_from_before_columns_had_their_own_options_still_work(page: Page, url: str) -> None:
    page.goto(f"{url}/#policy=lpm&against=dfs&batching=static&overlap=false&requests=8")
    settled(page)
    for side, policy in enumerate(("lpm", "dfs")):
        expect(page.locator(f".run[data-side='{side}'] .side-name")).to_contain_text(
            f"{policy} static batching, overlap off"
        )


def column(page: Page, side: int, figure: str) -> str:
    return page.locator(f".run[data-side='{side}'] [data-figure='{figure}']").text_content() or ""


def move_to(page: Page, at: float) -> None:
    """Follows a link to another moment of the same runs."""
    page.evaluate("at => { location.hash = location.hash.replace(/at=[^&]*/, `at=${at}`); }", at)
    page.wait_for_function(
        "at => Math.abs(Number(document.querySelector('.transport input').value) - at) < 2e-6", arg=at
    )


def test_figures_of_the_moment_and_of_the_run_are_those_of_the_simulation(page: Page, url: str) -> None:
    options = {"num_pages": "76", "requests": "24", "output_tokens": "64", "seed": "2"}  # with a retraction
    runs = [run_frames({"policy": policy, **options}) for policy in ("fcfs", "fair")]
    page.goto(f"{url}/#" + "&".join(f"{name}={value}" for name, value in options.items()))
    settled(page)
    for share in (0.0, 0.4, 1.0):
        at = share * max(run["frames"][-1]["time"] for run in runs)
        move_to(page, at)
        for side, run in enumerate(runs):
            frame = [one for one in run["frames"] if one["time"] <= at + 1e-6][-1]
            summary, counters = run["summary"], frame["counters"]
            assert column(page, side, "finished") == str(summary["finished"])
            assert column(page, side, "finished_now") == str(frame["phases"]["finished"])
            assert column(page, side, "requests_per_s") == f"{summary['requests_per_s']:.1f}"
            wait = milliseconds(column(page, side, "wait_mean_ms"))
            assert wait == pytest.approx(summary["wait_mean_ms"], rel=0.01, abs=0.5)
            rate = counters["hit_tokens"] / max(1, counters["prompt_tokens"])
            assert column(page, side, "hit_rate_now") == f"{100 * rate:.2f} %"
            assert column(page, side, "retractions_now") == str(counters["retractions"])
            busy, idle = (float(column(page, side, name).split()[0]) for name in ("busy", "idle"))
            assert busy + idle == pytest.approx(100)
            for state, number in frame["phases"].items():
                assert column(page, side, f"state_{state}") == str(number)
            assert column(page, side, "num_running") == str(frame["num_running"])
    assert runs[0]["summary"]["retractions"] > 0


def lit_ids(page: Page, selector: str, attribute: str) -> list[str]:
    found = page.evaluate(f"[...document.querySelectorAll('{selector}')].map(one => one.getAttribute('{attribute}'))")
    return sorted(found)


def test_a_click_on_a_state_highlights_its_requests_their_rows_and_their_pages(page: Page, url: str) -> None:
    run = run_frames({"policy": "fair"})
    frames, events = run["frames"], run["events"]
    bits = {"waiting": WAITING, "prefill": PREFILL, "decoding": DECODING}
    busy = [index for index, frame in enumerate(frames) if all(frame["phases"].values())]
    page.goto(f"{url}/#policy=fair&against=none&at=0")
    settled(page)
    for index in (busy[0], busy[-1]):
        frame = frames[index]
        move_to(page, frame["time"])
        uses = np.frombuffer(base64.b64decode(frame["uses"]), np.uint8)
        codes = np.frombuffer(base64.b64decode(frame["map"]), "<u2")
        for state in ("waiting", "prefill", "decoding", "finished"):
            page.locator(f"[data-state='{state}']").click()
            expect(page.locator(f"[data-state='{state}']")).to_have_attribute("aria-pressed", "true")
            rows = [one["id"] for one in frame["waiting"]] if state == "waiting" else []
            rows += [one["id"] for one in frame["running"] if one["phase"] == state]
            finished = [one[3] for one in events if one[2] == "finish" and one[0] <= index]
            assert lit_ids(page, ".row.lit", "data-id") == sorted(rows)
            assert lit_ids(page, "[data-lit-id]", "data-lit-id") == sorted(finished if state == "finished" else rows)
            pages = (codes == CACHED) & (uses == 0) if state == "finished" else uses & bits[state] > 0
            shown = page.locator("[data-panel='pages'] canvas").get_attribute("data-lit")
            assert shown == str(pages.sum())
            assert len(page.locator("[data-panel='states'] p").inner_text()) > 80, "what happens in this state"
            assert f"state={state}" in page.url
        page.locator("[data-state='finished']").click()
        assert lit_ids(page, ".row.lit, .row.dim", "data-id") == []


def test_states_are_selected_with_the_keyboard_and_kept_in_the_link(page: Page, url: str) -> None:
    page.goto(f"{url}/#at=0.3&requests=32&state=decoding")
    settled(page)
    both = page.locator("[data-state='decoding'][aria-pressed='true']")
    expect(both).to_have_count(2)
    page.keyboard.press("Escape")
    expect(both).to_have_count(0)
    waiting = page.locator(".run[data-side='0'] [data-state='waiting']")
    waiting.focus()
    page.keyboard.press(" ")
    expect(waiting).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("button", name="Play")).to_be_visible()  # the space bar did not start it
    page.keyboard.press("Enter")
    expect(waiting).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".run[data-side='0'] [data-state='prefill']")).to_have_attribute("aria-pressed", "true")


# One reading of the page, in one task: nothing can be drawn meanwhile.
READ = """() => [...document.querySelectorAll('.run')].map(run => ({
  pass: Number(run.querySelector('.side-name').innerText.match(/pass ([0-9]+)/)[1]),
  waiting: Number(run.querySelector('[data-figure=num_waiting]').innerText),
  reasons: [...run.querySelectorAll('details')].map(group => [group.dataset.reason,
    Number(group.querySelector('[data-figure=reason]').innerText), group.querySelectorAll('.row').length]),
  rows: [...run.querySelectorAll('[data-panel=waiting] .row')].map(row => [row.dataset.id, row.title]),
  running: [...run.querySelectorAll('[data-panel=running] .row')].map(row => row.dataset.id),
  events: [...run.querySelectorAll('.journal > [data-kind]')].map(one =>
    [one.dataset.frame, one.dataset.time].map(Number)),
  boxes: [...run.children].map(panel => { const box = panel.getBoundingClientRect(); return [box.top, box.height]; }),
}))"""


def test_every_frame_agrees_with_itself(page: Page, url: str) -> None:
    """Counts with rows and their reasons, the order of the journal, and the panels of both columns."""
    options = {"requests": "12", "max_running": "3", "num_pages": "64", "output_tokens": "8", "rate": "200"}
    runs = [run_frames({"policy": policy, **options}) for policy in ("fcfs", "fair")]
    page.goto(f"{url}/#" + "&".join(f"{name}={value}" for name, value in options.items()))
    settled(page)
    reached = [set[int](), set[int]()]
    for _ in range(sum(len(run["frames"]) for run in runs)):
        left, right = page.evaluate(READ)
        assert_aligned(left, right)
        for seen, shown, run in zip(reached, (left, right), runs, strict=True):
            frame = run["frames"][shown["pass"]]
            assert shown["waiting"] == frame["num_waiting"] == len(shown["rows"])
            assert all(count == rows for _, count, rows in shown["reasons"])
            assert {kind: count for kind, count, _ in shown["reasons"]} == {
                kind: count for kind, count, _ in frame["reasons"]
            }
            assert dict(shown["rows"]) == {one["id"]: one["why"] for one in frame["waiting"]}
            assert shown["running"] == [one["id"] for one in frame["running"]]
            expected = [event[:2] for event in run["events"] if event[0] <= shown["pass"]][-40:][::-1]
            assert shown["events"] == expected == sorted(expected, reverse=True)
            seen.add(shown["pass"])
        page.keyboard.press("ArrowRight")
    assert reached == [set(range(len(run["frames"]))) for run in runs]


def assert_aligned(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert len(left["boxes"]) == len(right["boxes"])
    for one, other in zip(left["boxes"], right["boxes"], strict=True):
        assert one == pytest.approx(other, abs=0.5)


def test_panels_of_both_columns_stay_aligned_while_playing(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 1000, "height": 900})  # narrow: texts of different length wrap differently
    page.goto(f"{url}/#workload=tenants&num_host_pages=64&state=waiting&batching=prefill-first&against_batching=mixed")
    settled(page)
    page.get_by_label("speed").select_option("0.2")
    page.get_by_role("button", name="Play").click()
    passes = set()
    for _ in range(12):
        left, right = page.evaluate(READ)
        assert_aligned(left, right)
        passes.add(left["pass"])
        page.wait_for_function(
            "before => !document.querySelector('.side-name').innerText.includes(`pass ${before} of`)"
            " || document.querySelector('.btn.main').innerText === 'Play'",
            arg=left["pass"],
        )
    assert len(passes) > 1


@pytest.mark.parametrize("width", [900, 1000, 1440])
def test_nothing_reaches_beyond_the_right_edge(page: Page, url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{url}/#workload=tenants&num_host_pages=64&state=waiting&at=0.3")
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.card')].map(one => one.getBoundingClientRect().right))"
    )
    assert right <= width


def test_tenants_start_under_contention_and_are_shown(page: Page, url: str) -> None:
    frames = run_frames({"workload": "tenants", "policy": "fair"})["frames"]
    frame = max(frames, key=lambda one: one["num_waiting"])
    page.goto(url)
    settled(page)
    expect(page.locator("[data-panel='tenants']")).to_have_count(0)  # one tenant: nothing to compare
    page.get_by_label("Kind").select_option("tenants")
    expect(page.locator("[data-panel='tenants']")).to_have_count(2)
    expect(page.get_by_label("Tenants")).to_have_value(str(WORKLOAD_DEFAULTS["tenants"]["tenants"]))
    page.goto("about:blank")
    page.goto(f"{url}/#workload=tenants&at={frame['time']}")
    settled(page)
    for one in frame["tenants"]:
        row = page.locator(f".run[data-side='1'] tr[data-tenant='{one['name']}']")
        for name in ("waiting", "running", "finished"):
            assert row.locator(f"[data-figure='tenant_{name}']").inner_text() == str(one[name])
        if one["wait"] is not None:
            wait = milliseconds(row.locator("[data-figure='tenant_wait']").inner_text())
            assert wait == pytest.approx(1e3 * one["wait"], rel=0.01, abs=0.5)
    assert sum(one["waiting"] > 0 for one in frame["tenants"]) > 1
    for one in frame["waiting"] + frame["running"]:
        tag = page.locator(f".run[data-side='1'] .row[data-id='{one['id']}'] [data-tenant]")
        assert tag.inner_text() == one["tenant"]


def test_every_label_has_a_tooltip(page: Page, url: str) -> None:
    page.goto(f"{url}/#workload=tenants&num_host_pages=64&at=0.3")
    settled(page)
    without = page.evaluate(
        "[...document.querySelectorAll('h2, th, .stat, .legend > span, .side-name, .side label, .side legend, "
        ".side select, .columns > *, summary, .transport label, .transport button, .row .bar, .tag')]"
        ".filter(one => one.innerText && !one.title).map(one => one.outerHTML.slice(0, 90))"
    )
    assert without == []
    assert page.locator(".stat").count() >= 22 and page.locator(".state > title").count() == 8


def test_nothing_is_drawn_for_a_feature_that_is_off(page: Page, url: str) -> None:
    page.goto(f"{url}/#requests=8&at=0.05")
    settled(page)
    for panel in ("host", "tenants"):
        expect(page.locator(f"[data-panel='{panel}']")).to_have_count(0)
    expect(page.get_by_text("in host memory")).to_have_count(0)
    page.goto("about:blank")
    page.goto(f"{url}/#requests=8&at=0.05&prefix_cache=false&num_host_pages=0")
    settled(page)
    expect(page.locator("[data-panel='tree']")).to_have_count(0)


def test_moving_a_slider_runs_the_simulation_again(page: Page, url: str, tmp_path: Path) -> None:
    page.goto(url)
    settled(page)
    before = shown(page, 0, "hit_rate")
    page.get_by_label("KV cache pages").fill("64")
    expect(page.locator(".run[data-side='0'] h2", has_text="KV cache 64 pages")).to_be_visible()
    settled(page)
    assert shown(page, 0, "hit_rate") != before
    assert_shows(page, 0, from_the_command_line(tmp_path / "small.json", policy="fcfs", num_pages=64))


def test_switching_the_policy_shows_that_policy(page: Page, url: str, tmp_path: Path) -> None:
    page.goto(url)
    settled(page)
    page.get_by_label("Left policy").select_option("lpm")
    expect(page.locator(".run[data-side='0'] .side-name")).to_contain_text("lpm")
    settled(page)
    assert_shows(page, 0, from_the_command_line(tmp_path / "lpm.json", policy="lpm"))
    page.get_by_label("Right policy").select_option("none")
    expect(page.locator(".run")).to_have_count(1)


def test_play_and_step_move_through_the_passes(page: Page, url: str) -> None:
    page.goto(url)
    settled(page)
    name = page.locator(".run[data-side='0'] .side-name")
    expect(name).to_contain_text("pass 0 of")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.get_by_label("next pass").click()
    expect(name).not_to_contain_text("pass 0 of")
    after = name.inner_text()
    page.get_by_role("button", name="Play").click()
    expect(name).not_to_have_text(after)
    page.get_by_role("button", name="Pause").click()
    page.keyboard.press("Home")
    expect(name).to_contain_text("pass 0 of")
    page.keyboard.press("End")
    expect(page.locator(".run[data-side='0'] [data-figure='num_running']")).to_have_text("0")
    expect(page.locator(".run[data-side='0'] [data-figure='num_waiting']")).to_have_text("0")


def test_pages_of_every_kind_add_up_at_any_time(page: Page, url: str) -> None:
    for at in ("0.01", "0.1", "0.2"):
        page.goto(f"{url}/#policy=fair&against=none&at={at}")
        page.reload()
        settled(page)
        kinds = ("owned", "shared", "cached", "free")
        counts = [page.locator(f".legend [data-figure='{kind}']").inner_text() for kind in kinds]
        assert sum(map(int, counts)) == DEFAULTS["num_pages"]


def test_a_link_reproduces_the_view(page: Page, url: str) -> None:
    page.goto(url)
    settled(page)
    page.get_by_label("Max running").fill("3")
    page.get_by_label("Right policy").select_option("hrrn")
    expect(page.locator(".run[data-side='1'] .side-name")).to_contain_text("hrrn")
    settled(page)
    page.get_by_label("time", exact=True).fill("0.1")
    page.wait_for_function("location.hash.includes('at=0.1')")
    page.get_by_label("next pass").click()  # to the exact time of a frame, which the link rounds
    page.wait_for_function(
        "Math.abs(location.hash.match(/at=([0-9.]+)/)[1] - document.querySelector('.transport input').value) < 2e-6"
    )
    link, seen = page.evaluate("location.href"), page.locator("main").inner_text()
    page.goto("about:blank")
    page.goto(link)
    settled(page)
    assert page.locator("main").inner_text() == seen


def test_tooltips_of_selects_are_the_sentences_of_the_config(page: Page, url: str) -> None:
    page.goto(f"{url}/#policy=lpm&against=hrrn")
    settled(page)
    expect(page.get_by_label("Left policy")).to_have_attribute("title", POLICIES["lpm"])
    expect(page.get_by_label("Right policy")).to_have_attribute("title", POLICIES["hrrn"])
    expect(page.get_by_label("Left batching")).to_have_attribute("title", BATCHING["mixed"])
    expect(page.get_by_label("Eviction")).to_have_attribute("title", EVICTION["lru"])
    for label, choices in (("Left policy", POLICIES), ("Left batching", BATCHING), ("Eviction", EVICTION)):
        for name, sentence in choices.items():
            assert page.get_by_label(label).locator(f"option[value='{name}']").get_attribute("title") == sentence


def test_the_journal_gives_reasons(page: Page, url: str) -> None:
    frames = run_frames({"policy": "fair", "num_pages": 64})["frames"]
    frame = max(frames, key=lambda one: one["num_waiting"])
    page.goto(f"{url}/#policy=fair&against=none&at={frame['time']}&num_pages=64")
    settled(page)
    text = page.get_by_label("journal").inner_text()
    assert "is admitted:" in text and "tokens cached" in text
    waiting = page.get_by_label("waiting requests").inner_text()
    assert "for one of 8 slots" in waiting or "short" in waiting


def test_an_invalid_parameter_is_reported_in_one_sentence(page: Page, url: str) -> None:
    page.goto(f"{url}/#policy=fair&against=none")
    settled(page)
    answer = page.request.get(f"{url}/api/run?requests=many")
    assert (answer.status, answer.json()["error"]) == (400, "requests is 'many': expected a number.")
    answer = page.request.get(f"{url}/api/run?draft_tokens=2")
    assert (answer.status, answer.json()["error"]) == (400, "unknown parameter 'draft_tokens'.")
    assert page.request.get(f"{url}/../pyproject.toml").status == 404
    assert (
        page.request.get(f"{url}/api/run?policy=magic").json()["error"].startswith("policy is 'magic': choose one of")
    )


def test_drafts_are_shown_while_speculation_is_on(page: Page, url: str, tmp_path: Path) -> None:
    page.goto(url)
    settled(page)
    expect(page.locator("[data-figure='tokens_per_decode']")).to_have_count(0)
    page.get_by_label("Drafts per row").fill("4")
    expect(page.locator("[data-figure='tokens_per_decode']")).to_have_count(2)
    settled(page)
    found = from_the_command_line(tmp_path / "left.json", policy="fcfs", drafts=4, acceptance=0.7)
    assert_shows(page, 0, found)
    assert shown(page, 0, "tokens_per_decode") == f"{found['tokens_per_decode']:.2f}"
    assert shown(page, 0, "accepted") == f"{100 * found['accepted_tokens'] / found['drafted_tokens']:.1f} %"
