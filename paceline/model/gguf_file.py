"""The header of a GGUF file: metadata, and the offset of each tensor.

The header is parsed here because the reader of the `gguf` package creates an array object for every vocabulary entry,
which takes four seconds for a small model; this one takes a tenth of a second. It imports no torch, because the
tokenizer uses it too.

A model can be split into files NAME-00001-of-00003.gguf and so on: the first has the metadata, each has some tensors.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.model.spec import ModelError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file has the opposite order
    type_id: int
    offset: int  # from the start of its part
    part: int = 0  # of a model that is split into several files


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open model: its metadata and its memory-mapped bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    parts: tuple[mmap.mmap, ...]  # one, unless the model is split into several files

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def release_memory(self) -> None:
        """Lets the system take back the memory of what was read."""
        for part in self.parts:
            part.madvise(mmap.MADV_DONTNEED)

    def get(self, key: str) -> Any:
        if key not in self.metadata:
            raise ModelError(f"{self.path} lacks the metadata {key!r}: the file is incomplete, fetch another one.")
        return self.metadata[key]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def part_names(name: str) -> list[str]:
    """The names of all files of the model that `name` is a file of."""
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def whole_name(name: str) -> str:
    """The name of a file without its part number and suffix."""
    match = _PART_NAME.fullmatch(name)
    return match[1] if match else Path(name).stem


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads the header of a file, or of all parts if it is one of several. The result is cached, because spec,
    tokenizer and weights all use it."""
    path = Path(path)
    try:
        path.stat()
        parts = [path.with_name(name) for name in part_names(path.name)]
        if missing := [part.name for part in parts if not part.is_file()]:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{path} is one of {len(parts)} parts of a model, and its folder lacks {names}: fetch it.")
        stats = [part.stat() for part in parts]
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check the path.") from None
    return _open(tuple((part, stat.st_mtime_ns, stat.st_size) for part, stat in zip(parts, stats, strict=True)))


@lru_cache(maxsize=2)
def _open(parts: tuple[tuple[Path, int, int], ...]) -> GGUFFile:
    """parts: path, time of modification and size of each file."""
    files = [_open_part(path, size) for path, _, size in parts]
    first, count = files[0], len(files)
    for index, file in enumerate(files):
        found = file.metadata.get("split.no") or 0, file.metadata.get("split.count") or 1
        if found != (index, count):
            raise ModelError(
                f"{file.path} has split.no {found[0]!r} and split.count {found[1]!r}, and its name says {index} and "
                f"{count}: restore the names MODEL-00001-of-00002.gguf, or fetch all parts again."
            )
    tensors = dict(_tensors_of_parts(files))
    expected = first.metadata.get("split.tensors.count", len(tensors)) if count > 1 else len(tensors)
    if len(tensors) != expected:
        raise ModelError(
            f"{first.path} and its other parts have {len(tensors)} of {expected} tensors: fetch them again."
        )
    return GGUFFile(first.path, first.metadata, tensors, tuple(file.parts[0] for file in files))


def _tensors_of_parts(files: list[GGUFFile]) -> Iterator[tuple[str, TensorInfo]]:
    for part, file in enumerate(files):
        for name, info in file.tensors.items():
            yield name, replace(info, part=part)


def _open_part(path: Path, size: int) -> GGUFFile:
    if size < 24:
        raise ModelError(f"{path} has {size} bytes, which is too short for a GGUF file: fetch it again.")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Header(path, data).read()
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} has a damaged or truncated header ({error}): fetch it again.") from None


class _Header:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} does not begin with GGUF: give a GGUF file.")
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} has GGUF version {version}: supported are 2 and 3 (little-endian), convert it again."
            )
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        found = [self.tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32)) or 32
        start = -(-self.at // alignment) * alignment
        tensors = {}
        for name, shape, type_id, offset in found:
            info = TensorInfo(name, shape, type_id, start + offset)
            if info.offset + num_stored_bytes(info) > len(self.data):
                raise ModelError(f"{self.path} ends before the data of {name}: it is truncated, fetch it again.")
            tensors[name] = info
        return GGUFFile(self.path, metadata, tensors, (self.data,))

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """So many of them: a vocabulary has a hundred thousand, so the loop does little."""
        data, at, found = self.data, self.at, []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, at)
            at += 8 + length
            text = data[at - length : at]
            if len(text) != length:
                raise IndexError("a string runs past the end")
            found.append(text.decode("utf-8"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.scalar("<I"), self.scalar("<Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                if length * struct.calcsize(code) > len(self.data) - self.at:
                    raise IndexError("an array runs past the end")
                values = struct.unpack_from(f"<{length}{code[1]}", self.data, self.at)
                self.at += length * struct.calcsize(code)
                return list(values)
            return self.strings(length) if item == _STRING else [self.value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise IndexError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.scalar("<I")
        if num_dims > 4:
            raise IndexError(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(num_dims)]))
        return name, shape, self.scalar("<I"), self.scalar("<Q")


def experts(info: TensorInfo, first: int, stop: int) -> TensorInfo:
    """Some of the experts that a tensor [experts, rows, columns] has."""
    per_expert = num_stored_bytes(info) // info.shape[0]
    return replace(info, shape=(stop - first, *info.shape[1:]), offset=info.offset + first * per_expert)


def num_stored_bytes(info: TensorInfo) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
    except (ValueError, KeyError):
        raise ModelError(
            f"{info.name} has the unknown quantization type {info.type_id}: use a file of a common type such as Q8_0."
        ) from None
    if info.shape and info.shape[-1] % block:
        raise ModelError(
            f"{info.name} has rows of {info.shape[-1]} values, which is not a multiple of its block size {block}: "
            "fetch it again."
        )
    return math.prod(info.shape) // block * block_bytes
