"""The simulator page in a real browser: it shows the results of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import BATCHING, EVICTION, POLICIES
from paceline.simulator.ui import DEFAULTS, SimulatorApp
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
    page.get_by_label("Left").select_option("lpm")
    expect(page.locator(".run[data-side='0'] .side-name")).to_contain_text("lpm")
    settled(page)
    assert_shows(page, 0, from_the_command_line(tmp_path / "lpm.json", policy="lpm"))
    page.get_by_label("Right").select_option("none")
    expect(page.locator(".run")).to_have_count(1)


def test_play_and_step_move_through_the_passes(page: Page, url: str) -> None:
    page.goto(url)
    settled(page)
    name = page.locator(".run[data-side='0'] .side-name")
    expect(name).to_contain_text("pass 1 of")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.get_by_label("next pass").click()
    expect(name).not_to_contain_text("pass 1 of")
    after = name.inner_text()
    page.get_by_role("button", name="Play").click()
    expect(name).not_to_have_text(after)
    page.get_by_role("button", name="Pause").click()
    page.keyboard.press("Home")
    expect(name).to_contain_text("pass 1 of")
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
    page.get_by_label("Right").select_option("hrrn")
    expect(page.locator(".run[data-side='1'] .side-name")).to_contain_text("hrrn")
    settled(page)
    page.get_by_label("time", exact=True).fill("0.1")
    page.wait_for_function("location.hash.includes('at=0.1')")
    link, seen = page.url, page.locator("main").inner_text()
    page.goto("about:blank")
    page.goto(link)
    settled(page)
    assert page.locator("main").inner_text() == seen


def test_tooltips_of_selects_are_the_sentences_of_the_config(page: Page, url: str) -> None:
    page.goto(f"{url}/#policy=lpm&against=hrrn")
    settled(page)
    expect(page.get_by_label("Left")).to_have_attribute("title", POLICIES["lpm"])
    expect(page.get_by_label("Right")).to_have_attribute("title", POLICIES["hrrn"])
    expect(page.get_by_label("Batching")).to_have_attribute("title", BATCHING["mixed"])
    expect(page.get_by_label("Eviction")).to_have_attribute("title", EVICTION["lru"])
    for label, choices in (("Left", POLICIES), ("Batching", BATCHING), ("Eviction", EVICTION)):
        for name, sentence in choices.items():
            assert page.get_by_label(label).locator(f"option[value='{name}']").get_attribute("title") == sentence


def test_the_journal_gives_reasons(page: Page, url: str) -> None:
    page.goto(f"{url}/#policy=fair&against=none&at=0.2&num_pages=64")
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
