"""A prefill engine and a decode engine in one process, connected as two servers would be."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.cluster.kv_protocol import layout_of
from paceline.cluster.kv_receiver import RemotePrefill
from paceline.cluster.kv_sender import PrefillServer
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine, EngineHooks
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.request import PacelineError, SamplingParams
from paceline.scheduler.invariants import check

TINY: dict[str, Any] = {
    "load": "random", "shape": "tiny-llama", "threads": 1, "dtype": "float32", "page_size": 4, "max_running": 6,
    "max_batch_tokens": 64, "max_prefill_tokens": 64, "chunk_tokens": 16, "num_pages": 200,
}  # fmt: skip


class Answer:
    """Receives the output of one job."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[OutputDelta | PacelineError] = queue.SimpleQueue()
        self.token_ids: list[int] = []

    def put(self, delta: OutputDelta) -> None:
        self.items.put(delta)

    def refuse(self, error: PacelineError) -> None:
        self.items.put(error)

    def result(self, timeout_s: float = 60) -> OutputDelta:
        """The last output; `token_ids` has all tokens."""
        while True:
            item = self.items.get(timeout=timeout_s)
            if isinstance(item, PacelineError):
                raise item
            self.token_ids += item.token_ids
            if item.finish_reason is not None:
                return item


class Pair:
    def __init__(
        self,
        folder: Path,
        transport: str = "shared",
        *,
        make: Callable[..., Engine] = build_engine,
        options: dict[str, Any] | None = None,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        min_tokens: int = 8,
        timeout_s: float = 60.0,
        token: str = "secret",
        decode_token: str = "secret",
        model: str = "m",
    ) -> None:
        """transport: shared, tcp or nixl."""
        nixl = transport == "nixl"
        shared = TINY if options is None else options
        self.prefill = make(
            **{**shared, "role": "prefill", **(prefill or {})}, hooks=EngineHooks(after_step=self._after)
        )
        self.server: PrefillServer | None = None
        address = f"unix:{folder}/kv" if transport == "shared" else "tcp://127.0.0.1:0"
        self.server = PrefillServer(self.prefill, layout_of(self.prefill, "m"), token, address, nixl=nixl)
        if transport != "shared":
            address = f"tcp://127.0.0.1:{self.server.port}"
        self.decode = make(**{**shared, "role": "decode", "num_host_pages": 120, **(decode or {})})
        self.remote = RemotePrefill(
            self.decode,
            layout_of(self.decode, model),
            decode_token,
            peers=[address],
            min_tokens=min_tokens,
            timeout_s=timeout_s,
            nixl=nixl,
        )

    def _after(self) -> None:
        if self.server is not None:
            self.server.after_step()

    def submit(self, tokens: Any, max_tokens: int = 6, **fields: Any) -> Answer:
        answer = Answer()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.remote.submit(Job(tokens, params, **fields), answer)
        return answer

    def check(self) -> None:
        """All invariants, and no page in transit."""
        for engine in (self.prefill, self.decode):
            engine.call(check).result()
        assert not self.prefill.call(lambda scheduler: dict(scheduler.memory.holds)).result()

    def num_reserved(self) -> int:
        return self.decode.call(lambda scheduler: scheduler.memory.host.num_pages_reserved).result()

    def close(self) -> None:
        self.remote.close()
        self.decode.close()
        assert self.server is not None
        self.server.close()
        self.prefill.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
