"""Checks of memory, port, folders, limits and clock."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.config import ServerConfig
from paceline.doctor.finding import Check, Finding, ok, problem, warning
from paceline.doctor.software import has_driver

_GIB = 2**30
_FEW_BYTES, _TOO_FEW_BYTES = 5 * _GIB, 200 * 2**20  # of disk: small models, the default model and its wheel
_SOCKET_PATH = 107  # bytes that the path of a Unix socket may have
_RELEASED = 1_767_225_600.0  # 2026-01-01: no correct clock is before this


def machine_checks(config: ServerConfig) -> list[tuple[str, Check]]:
    from paceline.model.fetch import models_dir

    checks: list[tuple[str, Check]] = [
        ("memory", check_memory),
        ("port", lambda: check_port(config)),
        ("models folder", lambda: check_cache("models folder", models_dir(), "PACELINE_HOME")),
        ("hub cache", lambda: check_cache("hub cache", hub_cache(), "HF_HOME")),
        ("temporary folder", check_temporary_folder),
        ("open files", lambda: check_open_files(config)),
        ("clock", check_clock),
    ]
    if has_driver():
        checks.append(("kernel cache", lambda: check_cache("kernel cache", triton_cache(), "TRITON_CACHE_DIR")))
    return checks


def check_memory() -> Iterator[Finding]:
    from paceline.engine.kv_sizing import free_memory

    free = free_memory()
    text = f"{free / _GIB:.1f} GiB free"
    if free < _GIB:
        yield warning("memory", text, "end other programs, or raise the memory limit of the container")
    else:
        yield ok("memory", text)


def check_port(config: ServerConfig) -> Iterator[Finding]:
    from paceline.server.run import bind, url_of

    taken = bind(config)  # raises ConfigError
    yield ok("port", f"{url_of(taken)} is free")
    taken.close()


def hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def triton_cache() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"


def check_cache(name: str, folder: Path, variable: str) -> Iterator[Finding]:
    """A folder that is made when it is first written to: it, or the folder that will contain it, is writable. What it
    has already can be used in any case."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".paceline-"):
            pass
    except OSError as error:
        text = f"{folder} is not writable ({error.strerror})"
        yield warning(name, text, f"set {variable} to a folder that this user may write to")
        return
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < _TOO_FEW_BYTES:
        yield problem(name, text, f"free some space, or set {variable} to a folder on another disk")
    elif free < _FEW_BYTES:
        yield warning(name, text, f"set {variable} to a folder on another disk for large models")
    else:
        yield ok(name, text)


def check_temporary_folder() -> Iterator[Finding]:
    """The processes of the server talk through Unix sockets in a temporary folder, whose path must be short."""
    name = "temporary folder"
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            longest = f"{folder}/front-end-00-0000"
    except OSError as error:
        yield problem(name, f"none is writable ({error.strerror or error})", "set TMPDIR to a writable folder")
        return
    if len(os.fsencode(longest)) > _SOCKET_PATH:
        yield problem(name, f"{tempfile.gettempdir()} is too long for sockets", "set TMPDIR to a shorter path")
    else:
        yield ok(name, tempfile.gettempdir())


def check_open_files(config: ServerConfig, limit: int | None = None) -> Iterator[Finding]:
    """Each worker has one open file per connection. The server raises its soft limit itself."""
    from paceline.server.open_files import RESERVED_FILES

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    needed = config.max_connections + RESERVED_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        yield warning(
            "open files",
            f"a process may have {limit:,}; {config.max_connections:,} connections per worker need {needed:,}",
            f"run `ulimit -Hn {needed}` (systemd: LimitNOFILE), or lower --max-connections",
        )
    else:
        yield ok("open files", "unlimited" if limit == resource.RLIM_INFINITY else f"a process may have {limit:,}")


def check_clock(now: float | None = None) -> Iterator[Finding]:
    now = time.time() if now is None else now
    resolution = time.get_clock_info("monotonic").resolution
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < _RELEASED:
        yield warning("clock", f"{text} is in the past: downloads fail on certificates", "set the time of the machine")
    elif resolution > 1e-3:
        yield warning(
            "clock", f"{text}, resolution {resolution:g} s", "latencies are imprecise: use another clock source"
        )
    else:
        yield ok("clock", text)
