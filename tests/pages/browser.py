"""Finds a Chromium for the tests: an installed one, or Playwright's, or the distribution's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from playwright.sync_api import sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowser(Exception):
    """No Chromium is installed and none could be downloaded."""


@cache
def find_browser() -> str:
    """The path of a browser; installs one if there is none, which may take minutes, once."""
    with _one_at_a_time():
        found = _here()
        if found is None:
            _try([sys.executable, "-m", "playwright", "install", "chromium"])
            found = _here()
        if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
            _try(["apt-get", "update", "-qq"])
            _try(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"])
            found = _here()
    if found is None:
        raise NoBrowser("there is no Chromium, and neither Playwright nor apt-get could install one")
    return found


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of several test processes one installs the browser, and the others wait and find it."""
    path = Path(tempfile.gettempdir()) / f"paceline-test-browser-{os.geteuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _here() -> str | None:
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def _try(command: list[str]) -> None:
    subprocess.run(command, check=False, timeout=240, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
