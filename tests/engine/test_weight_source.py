"""What identifies the files of a model notices a change of any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine.weight_source import identity


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_part_of_a_split_file_identifies_it(number: int, tmp_path: Path) -> None:
    parts = [tmp_path / f"model-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = [identity(part) for part in parts]
    assert len(set(before)) == 1, "whichever part is named"
    parts[number - 1].write_bytes(b"GGUF and more")
    assert identity(parts[0]) == identity(parts[2]) != before[0]
