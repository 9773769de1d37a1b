"""The server that `paceline bench serve` measures: starts one, or asks a running one for its model."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from paceline.config import ConfigError
from paceline.request import PacelineError

_CONNECT_S = 10.0


@contextmanager
def started(arguments: str) -> Iterator[str]:
    """Starts a server on a free port, yields its URL and stops it."""
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "serve",
        "--port",
        "0",
        "--log-level",
        "warning",
        *shlex.split(arguments),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "stdout is a pipe"
    try:
        url = None
        for line in process.stdout:
            url = url or next(iter(re.findall(r"http://[\d.]+:\d+", line)), None)
            if "Ctrl-C" in line:
                break
        if url is None:
            raise ConfigError("the server did not start: see its message above.")
        yield url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        process.stdout.close()


class ServerUnavailable(PacelineError):
    """The server to measure does not respond, or not as expected."""


def served_model(url: str, key: str | None) -> str:
    """The model of the server. Raises at once if the server cannot be used."""
    name: str = model_card(url, key)["id"]
    return name


def model_card(url: str, key: str | None) -> dict[str, Any]:
    """What the server says of its model, with its `id` at least."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"url is {url!r}: expected http:// with host and port, such as http://127.0.0.1:8000.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}/v1/models"
    direct = build_opener(ProxyHandler({}))  # as the load itself, which uses no proxy
    try:
        with direct.open(Request(address, headers=headers), timeout=_CONNECT_S) as response:
            card = json.load(response)["data"][0]
            return {**card, "id": card["id"]}
    except HTTPError as error:
        error.close()
        hint = "give --key" if error.code in (401, 403) else "give the URL of a server with OpenAI's API, without /v1"
        raise ServerUnavailable(f"{address} responds with status {error.code}: {hint}.") from None
    except OSError as error:  # URLError and timeouts too
        why = getattr(error, "reason", error)
        raise ServerUnavailable(f"{address} does not respond ({why}): start the server, or use --start.") from None
    except (ValueError, LookupError, TypeError, HTTPException):
        raise ServerUnavailable(f"{address} responds, but not with a list of models: check the URL.") from None
