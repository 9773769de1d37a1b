"""Extracts `data/h200-qwen3-0.6b.jsonl.gz` from a recording: `python tests/simulator/cut_data.py recording.jsonl`.

Keeps one warm run of nano and one of gsp, without block hashes: the tests know the workloads.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import msgspec

from paceline.engine.recording import Header, RecordedPass, RecordedRequest, read_recording
from paceline.simulator.fit import Recording

TARGET = Path(__file__).parent / "data" / "h200-qwen3-0.6b.jsonl.gz"


def cut(path: Path, target: Path) -> None:
    warm = Recording.read(path).warm().runs
    chosen = [[run for run in warm if run.name.startswith(kind)][-1] for kind in ("nano ", "gsp ")]
    names = {name for run in chosen for name in (run.name, f"end of {run.name}")}
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        for line in read_recording(path):
            if isinstance(line, RecordedRequest):
                line = msgspec.structs.replace(line, blocks=[])
            if (
                isinstance(line, Header)
                or (isinstance(line, RecordedPass | RecordedRequest) and any(line.at in run for run in chosen))
                or getattr(line, "name", None) in names
            ):
                file.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    cut(Path(sys.argv[1]), TARGET)
