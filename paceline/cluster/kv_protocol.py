"""Messages between a decode engine and a prefill engine, and what both must agree on.

A decode engine connects, proves that it knows the token, and says what its pages look like. Then it asks for prompts;
the prefill engine answers with pages, and at the end of each transfer with `PrefillDone` or `PrefillFailed`. The one
thing to know before changing this: after one of the two the prefill engine writes nothing for that transfer any more,
so the decode engine may use the memory for something else.

    prefill  Challenge ─▶            ◀─ Hello      Welcome or Rejected ─▶
    with NIXL                        ◀─ RemoteMemory  MemoryMapped ─▶
    decode   ◀─ StartPrefill (CancelPrefill)       PagesSent ... PrefillDone or PrefillFailed ─▶
    always   ◀─ Ping                               Pong ─▶

A frame is the length of the header (4 bytes, big-endian), the header (a message in MessagePack) and the payload that
the header announces: the pages of `PagesSent` over TCP, each with the parts of all ranks. In shared memory pages are
written in place and have none; so they are by NIXL (kv_nixl.py).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from paceline.cluster.kv_nixl import MemoryMapped, RemoteMemory
from paceline.request import PacelineError
from paceline.shared_pages import LAYOUT_VERSION

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

MAX_HEADER_BYTES = 8 << 20  # a prompt of two million tokens, or half as many with keys
MAX_HANDSHAKE_BYTES = 64 << 10  # of a peer that has not proved yet that it knows the token
MAX_PAYLOAD_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


class KvProtocolError(PacelineError):
    """What the other engine sent is not what this protocol allows. The connection is closed."""


class KvRejected(PacelineError):
    """The two engines cannot exchange KV; the message says why."""


class LayerRun(msgspec.Struct, frozen=True):
    """Layers behind each other that keep the same of a position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of keys
    v_head_dim: int


class KvLayout(msgspec.Struct, frozen=True):
    """What two engines must have in common to exchange pages."""

    model: str
    layers: tuple[LayerRun, ...]
    dtype: str
    kv_dtype: str
    kv_scales: str  # a digest: FP8 numbers mean something only with their scales
    page_size: int
    tp: int
    rank_page_bytes: tuple[int, ...]  # what each rank has of a page
    version: int = LAYOUT_VERSION

    @property
    def page_bytes(self) -> int:
        return sum(self.rank_page_bytes)

    def differences(self, other: KvLayout) -> str:
        """Of another engine; empty if there are none."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return ", ".join(f"{name} is {mine[name]!r} here and {theirs[name]!r} there"
                         for name in mine if mine[name] != theirs[name])  # fmt: skip


def layout_of(engine: Engine, model: str) -> KvLayout:
    """Of an engine that has loaded `model`."""
    spec, page_size = engine.spec, engine.scheduler.config.page_size
    assert spec is not None, "the executor runs a model"
    caches = (layer.mixer.cache for layer in spec.layers)
    kept_of_position = ((one.num_kv_heads, one.head_dim, one.v_head_dim) for one in caches)
    info = engine.info
    rank_bytes = info.kv_rank_bytes or (info.kv_bytes_per_token,)
    return KvLayout(
        model,
        tuple(LayerRun(len(list(run)), *kept) for kept, run in groupby(kept_of_position)),
        info.dtype,
        info.kv_dtype,
        info.kv_scales,
        page_size,
        len(rank_bytes),
        tuple(page_size * count for count in rank_bytes),
    )


class Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    answer: bytes  # to the challenge
    nonce: bytes
    layout: KvLayout
    num_shared_pages: int = 0  # of the memory whose descriptors, of each rank, come along; 0: pages are sent
    nixl: bool = False  # it can be written by NIXL


class Welcome(msgspec.Struct, frozen=True, tag=True):
    answer: bytes  # to the nonce of `Hello`
    nixl: bool = False  # pages are written by NIXL: `RemoteMemory` is expected


class Rejected(msgspec.Struct, frozen=True, tag=True):
    reason: str


class StartPrefill(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Compute a prompt and send pages `first_page` .. `first_page + num_pages` of it."""

    id: str
    prompt: bytes  # int32, whole pages
    first_page: int
    num_pages: int
    weights: str  # version; the pages must be computed with it
    targets: bytes = b""  # int32: where in the decode engine's memory each page goes, if it is written there
    tenant: str = "default"
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    front_end: str = ""  # whose request it is
    keys: bytes = b""  # int32, one for each token of the prompt; empty: the tokens are the keys


class CancelPrefill(msgspec.Struct, frozen=True, tag=True):
    """Stop. It is answered by `PrefillFailed`, unless the transfer has ended."""

    id: str


class PagesSent(msgspec.Struct, frozen=True, tag=True):
    """Pages `first` .. `first + count` of a transfer, counted from its first, are written or follow as the payload."""

    id: str
    first: int
    count: int
    num_bytes: int = 0  # of the payload
    checksum: int = 0  # CRC-32 of it


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    id: str
    num_pages: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache of the prefill engine
    weights: str


class PrefillFailed(msgspec.Struct, frozen=True, tag=True):
    id: str
    reason: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """From a decode engine, when it has heard nothing for a while: answered at once, whatever the engine does."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


KvMessage = (
    Challenge
    | Hello
    | Welcome
    | Rejected
    | RemoteMemory
    | MemoryMapped
    | StartPrefill
    | CancelPrefill
    | PagesSent
    | PrefillDone
    | PrefillFailed
    | Ping
    | Pong
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[KvMessage] = msgspec.msgpack.Decoder(KvMessage)


def encode_frame(message: KvMessage) -> bytes:
    """Without the payload."""
    header = _encoder.encode(message)
    assert len(header) <= MAX_HEADER_BYTES, f"a header has {len(header)} bytes"
    return _LENGTH.pack(len(header)) + header


def read_message(read: Callable[[int], bytes], max_bytes: int = MAX_HEADER_BYTES) -> KvMessage:
    """The next message; its payload is read by the caller. `read` returns exactly so many bytes, or raises."""
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > max_bytes:
        raise KvProtocolError(f"a header of {length} bytes was announced: at most {max_bytes} are allowed.")
    try:
        message = _decoder.decode(read(length))
    except msgspec.DecodeError as error:
        raise KvProtocolError(f"a message cannot be read: {error}.") from None
    if isinstance(message, PagesSent) and not 0 <= message.num_bytes <= MAX_PAYLOAD_BYTES:
        raise KvProtocolError(f"a payload of {message.num_bytes} bytes was announced: at most {MAX_PAYLOAD_BYTES}.")
    return message


def prove(token: str, role: str, nonce: bytes) -> bytes:
    """The answer to a nonce: shows that `role`, decode or prefill, knows the token without sending it."""
    return hmac.digest(token.encode(), role.encode() + nonce, hashlib.sha256)


def is_proof(answer: bytes, token: str, role: str, nonce: bytes) -> bool:
    return hmac.compare_digest(answer, prove(token, role, nonce))
