"""The web pages: plain ES modules, served as files. No build step, and no request to any other host."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).resolve().parent  # the package may be reached through a link
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The policy blocks every other host; bars set their width with inline styles.
SECURITY = (
    (b"content-security-policy", b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class WebFile(NamedTuple):
    body: bytes
    type: str


def web_file(name: str) -> WebFile | None:
    """A file of the pages by its path below this folder; None if it does not exist or may not be served."""
    path = (_FOLDER / name).resolve()
    if path.suffix not in _TYPES or not path.is_relative_to(_FOLDER) or not path.is_file():
        return None
    return WebFile(path.read_bytes(), _TYPES[path.suffix])
