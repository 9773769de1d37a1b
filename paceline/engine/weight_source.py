"""Where the weights of an update come from. Every rank reads its own part of the same files.

The ranks read at different times, so a file could change in between, and the parts would be those of two models. What
identifies the files, their names, sizes and times, is therefore compared after reading. A digest of the contents would
take longer than reading them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.model.gguf_file import part_names
from paceline.model.spec import ModelError

if TYPE_CHECKING:
    from paceline.model.decoder import Decoder
    from paceline.model.rank_group import RankGroup, StageLink

_SUFFIXES = (".json", ".safetensors")  # of a folder's files that make up a model


@dataclass(frozen=True, slots=True)
class WeightSource:
    path: str  # absolute
    dtype: str
    max_positions: int
    files: str  # `identity` of the files

    @classmethod
    def of(cls, path: Path, dtype: str, max_positions: int) -> WeightSource:
        path = path.absolute()
        return cls(str(path), dtype, max_positions, identity(path))

    def read(self, group: RankGroup | None = None, stages: StageLink | None = None) -> Decoder:
        """The weights in host memory, or this rank's part of them. Raises ModelError if they cannot be read."""
        from paceline.model.weights import load_decoder  # not at the top: needs torch, which a virtual GPU does not

        decoder = load_decoder(
            self.path, dtype=self.dtype, max_positions=self.max_positions, group=group, stages=stages
        )
        if identity(Path(self.path)) != self.files:
            raise ModelError(f"{self.path} has changed while it was read: write new weights to a folder of their own.")
        return decoder


def identity(path: Path) -> str:
    """Changes whenever a file of the model is written or replaced. Contents are not read."""
    parts = [path.with_name(name) for name in part_names(path.name)]  # of a split GGUF file
    files = [part for part in parts if part.is_file()]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    stats = [(file.name, file.stat()) for file in files]
    found = [(name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(found).encode()).hexdigest()
