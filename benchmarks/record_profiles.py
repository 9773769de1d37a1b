"""Records on a GPU what a profile of the simulator is fitted to.

    python benchmarks/record_profiles.py FOLDER [SHAPE] [--only NAME ...]
    paceline sim fit FOLDER/*.jsonl.gz --source "commit, date" --save PROFILE.json

One process for each of RECORDINGS of a shape. A recording is compressed when its process has ended, so those that are
done can be used if the rest is cut off.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
import time
from pathlib import Path

_POOL = ["--kv-tokens=100000"]
_HOST = [*_POOL, "--host-kv-tokens=400000"]
# Options of `paceline bench offline` by name. Without --speculate off an engine runs more kernels in every pass.
RECORDINGS: dict[str, dict[str, list[str]]] = {
    "qwen3-0.6b": {
        "main": ["nano", "gsp", "prompts", "sweep", "shared-sweep", "--batches=1,8,16,32,64,128,256", "--repeats=3"],
        "pool": ["gsp", *_POOL, "--repeats=3"],
        "chats": ["chats", *_HOST, "--repeats=4"],
        "drafts": ["speculate", "--batches=1,8,32,64", "--repeats=1"],
    },
    "qwen3-14b": {
        "main": ["nano", "gsp", "prompts", "sweep", "shared-sweep", "--batches=1,8,32,64,256", "--repeats=2"],
        "chats": ["chats", *_HOST, "--repeats=2"],
        "drafts": ["speculate", "--batches=1,8,32,64", "--repeats=1", "--scale=0.1"],
    },
}


def record(folder: Path, shape: str, name: str) -> bool:
    path = folder / f"{shape}-{name}.jsonl"
    drafts = [] if name == "drafts" else ["--speculate=off"]
    command = [sys.executable, "-m", "paceline.bench.offline", *RECORDINGS[shape][name], *drafts]
    began = time.perf_counter()
    status = subprocess.call([*command, f"--shape={shape}", "--load=random", f"--record={path}"])
    print(f"[{path.name}: {time.perf_counter() - began:.0f} s, exit status {status}]", flush=True)
    if path.exists():
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        path.unlink()
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", choices=RECORDINGS, default="qwen3-0.6b")
    parser.add_argument("--only", nargs="*", help="names of recordings (default: all)")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    names = given.only or list(RECORDINGS[given.shape])
    done = [record(given.folder, given.shape, name) for name in names]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
