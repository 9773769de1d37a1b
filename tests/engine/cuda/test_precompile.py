"""Where compiled kernels are kept."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline.engine.cuda.precompile import _writable


def test_kernels_are_kept_in_the_folder_if_it_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "kernels"
    assert _writable(folder) == folder and folder.is_dir() and not list(folder.iterdir())


def test_without_a_writable_folder_a_process_uses_one_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        found = _writable(tmp_path / "file" / "kernels")
    assert found.is_dir() and tmp_path not in found.parents
    assert caplog.messages == [
        f"{tmp_path}/file/kernels cannot be written (Not a directory): kernels are not kept; set PACELINE_HOME"
    ]
    found.rmdir()
