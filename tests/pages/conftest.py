"""A browser that can reach nothing but the page's own server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

from tests.pages.browser import NoBrowser, find_browser


@pytest.fixture(scope="package")  # not longer: Playwright keeps an event loop running, which others would trip over
def browser() -> Iterator[Browser]:
    try:
        path = find_browser()
    except NoBrowser as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which an error of the script, or a request to any other host, fails the test."""
    opened = browser.new_page(viewport={"width": 1440, "height": 1000})
    wrong: list[str] = []

    def only_here(route: Route) -> None:
        if route.request.url.startswith(("http://127.0.0.1:", "data:")):
            route.continue_()
        else:
            wrong.append(f"a request to {route.request.url}")
            route.abort()

    opened.route("**/*", only_here)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield opened
    opened.close()
    assert not wrong, wrong
