"""A browser that can reach only the server of the page."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

from tests.pages.browser import NoBrowser, find_browser

# A simulation runs in the process of the test: on a busy machine it takes longer than the defaults of 5 and 30 s.
TIMEOUT_MS = 120_000
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="package")  # no longer scope: Playwright keeps an event loop running, which breaks other tests
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
    """A page on which a script error or a request to another host fails the test."""
    opened = browser.new_page(viewport={"width": 1440, "height": 1000})
    opened.set_default_timeout(TIMEOUT_MS)
    wrong: list[str] = []

    def only_here(route: Route) -> None:
        if route.request.url.startswith(("http://127.0.0.1:", "data:")):
            route.continue_()
        else:
            wrong.append(f"a request to {route.request.url}")
            route.abort()

    opened.route("**/*", only_here)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if _is_wrong(message) else None)
    yield opened
    opened.close()
    assert not wrong, wrong


def _is_wrong(message: ConsoleMessage) -> bool:
    # Tests request error statuses on purpose; the browser reports them as console errors.
    return message.type == "error" and "with a status of" not in message.text
