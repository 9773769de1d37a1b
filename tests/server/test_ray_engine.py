"""Streams of an engine replica on Ray, without Ray."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from paceline.server.ray_calls import ToReplica
from paceline.server.ray_engine import EngineReplica
from tests.server.scripted import MODEL

DRAIN_S = 600.0


class Replica(EngineReplica):
    """Without an engine process, and with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.sent: list[Any] = []
        fields: dict[str, Any] = {
            "_id": "one",
            "_folder": str(folder),
            "_loop": SimpleNamespace(time=lambda: self.now),
            "_control": SimpleNamespace(send=self.sent.append),
            "_child": SimpleNamespace(send=self.sent.append),
            "_setup": SimpleNamespace(address="ipc://engine"),
        }
        vars(self).update(fields)
        self._lease_s, self._weights, self._model = DRAIN_S + 30, "weights", MODEL
        self._running, self._streams, self._renewed = {}, {}, {}
        self._num_streams, self._context = itertools.count(), zmq.asyncio.Context()

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("has_job", [False, True])
def test_a_stream_that_nobody_renews_ends(tmp_path: Path, has_job: bool) -> None:
    """Without jobs after 30 s, so that the replica can stop; with jobs after the time that they have to finish."""

    async def main() -> None:
        replica, front_end = Replica(tmp_path), ToReplica("one")
        stream = replica.outputs(front_end, "front")
        await anext(stream)
        replica.now = 29.0
        await replica.renew(front_end, "front")
        replica.now += 29
        if has_job:
            replica._running[replica._streams["front"], 1] = asyncio.get_running_loop().create_future()
            replica.now += DRAIN_S
        with replica._context.socket(zmq.PUSH) as engine:
            engine.connect(replica.sent[0].address)
            await engine.send(msgspec.msgpack.encode({"type": "QueryResult"}))
            assert await anext(stream)
        replica.now += 2
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert not replica._streams and not replica._renewed
        replica._context.destroy(linger=0)

    asyncio.run(main())
