"""Traces as workloads: Azure's CSV, Mooncake's JSON lines, and Paceline's own recordings.

A trace has no tokens, only their number and, in the latter two, hashes of token blocks. Each block is filled with
tokens derived from its hash, so that a shared prefix in the trace is a shared prefix in the simulation.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.config import ConfigError
from paceline.engine.recording import Header, RecordedRequest, open_packed, read_recording
from paceline.simulator.workloads import EOS, VOCAB, Arrival, Tokens, unique_ids

_MOONCAKE_BLOCK = 512


class _Mooncake(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0, rebased: bool = True) -> list[Arrival]:
    """The first `limit` requests of a trace, `speed` times as fast. The format is detected by the first line.

    `rebased`: the first request arrives at 0.
    """
    if speed <= 0:
        raise ConfigError(f"speed is {speed}: must be above 0.")
    with open_packed(path) as file:
        first = file.readline()
    if first.startswith(b"TIMESTAMP,"):
        found = _azure(path)
    elif b'"hash_ids"' in first:
        found = _mooncake(path)
    elif first.startswith(b'{"line":"header"'):
        found = _recording(path)
    else:
        raise ConfigError(
            f"trace {path.name!r} begins with {first[:40]!r}: expected Azure's CSV (TIMESTAMP,…), Mooncake's JSON "
            "lines (with hash_ids) or a recording made with --record."
        )
    arrivals = list(itertools.islice(found, limit))
    if not arrivals:
        raise ConfigError(f"trace {path.name!r} has no requests.")
    arrivals.sort(key=lambda one: one.at)
    began = arrivals[0].at if rebased else 0.0
    return unique_ids([dataclasses.replace(one, at=(one.at - began) / speed) for one in arrivals])


def block_tokens(ids: npt.ArrayLike, size: int) -> Tokens:
    """`size` tokens for each block id: equal ids have equal tokens."""
    blocks = np.asarray(ids, np.uint64)[:, None]
    with np.errstate(over="ignore"):
        mixed = (blocks + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.arange(size, dtype=np.uint64) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(33)) % np.uint64(VOCAB)).astype(np.int32).ravel()


def _random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCAB, max(1, count), dtype=np.int32)


def _azure(path: Path) -> Iterator[Arrival]:
    rng = np.random.default_rng(0)
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                # Timestamps have seven decimal digits; Python reads six.
                at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path.name}, line {number + 2} cannot be read: {error}.") from None
            yield Arrival(at, f"azure-{number}", _random_tokens(rng, prompt), _random_tokens(rng, output))


def _mooncake(path: Path) -> Iterator[Arrival]:
    rng = np.random.default_rng(0)
    decoder = msgspec.json.Decoder(_Mooncake)
    with path.open("rb") as file:
        for number, text in enumerate(file):
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigError(f"{path.name}, line {number + 1} cannot be read: {error}.") from None
            tokens = block_tokens(line.hash_ids, _MOONCAKE_BLOCK)
            prompt = tokens[: line.input_length]
            if len(prompt) < line.input_length:  # fewer blocks than tokens: the rest is unique
                prompt = np.concatenate([prompt, _random_tokens(rng, line.input_length - len(prompt))])
            yield Arrival(line.timestamp / 1e3, f"mooncake-{number}", prompt, _random_tokens(rng, line.output_length))


def _recording(path: Path) -> Iterator[Arrival]:
    """A recorded request has its recorded output length, which the scheduler does not know in advance."""
    rng = np.random.default_rng(0)
    size = 16
    for line in read_recording(path):
        if isinstance(line, Header):
            size = line.page_size
        elif isinstance(line, RecordedRequest):
            yield _recorded(line, size, rng)


def _recorded(line: RecordedRequest, size: int, rng: np.random.Generator) -> Arrival:
    drafts = {"drafted": line.drafted, "accepted": line.accepted}
    known = block_tokens(line.blocks, size)
    whole = np.concatenate([known, _random_tokens(rng, max(1, line.prompt_tokens + line.output_tokens - len(known)))])
    output = whole[line.prompt_tokens : line.prompt_tokens + max(1, line.output_tokens)].copy()
    if line.known_length and line.reason == "length":
        return Arrival(
            line.at, line.id, whole[: line.prompt_tokens], output, None, line.tenant, line.priority, **drafts
        )
    if line.reason != "length":
        output[-1] = EOS
    max_tokens = max(line.max_tokens, len(output))
    return Arrival(
        line.at, line.id, whole[: line.prompt_tokens], output, max_tokens, line.tenant, line.priority, **drafts
    )
