"""Values as bytes: MessagePack by msgspec, with numpy arrays as raw memory.

Everything that crosses a process boundary is a frozen dataclass, a named tuple or a msgspec struct, and is encoded
here: plans and results, jobs and outputs. Arrays keep their dtype and shape; they are decoded without a copy and
read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, get_origin

import msgspec
import numpy as np

T = TypeVar("T")


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def _decode_array(kind: type, value: tuple[str, Sequence[int], bytes]) -> object:
    if (get_origin(kind) or kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    raise NotImplementedError(f"{kind} cannot be decoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: object) -> bytes:
    return _encoder.encode(value)


class TypedDecoder(Generic[T]):
    """Decodes values of one type; raises msgspec.DecodeError or msgspec.ValidationError for anything else."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)

    def decode(self, data: bytes) -> T:
        value: T = self._decoder.decode(data)
        return value
