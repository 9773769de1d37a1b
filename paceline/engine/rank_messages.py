"""Messages between rank 0, which is the engine, and the other ranks of tensor parallelism or stages of a pipeline.

To the ranks by the ring, from them one line of JSON each by their standard output. The first message to a rank is its
setup; then come the passes in launch order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.codec import TypedDecoder
from paceline.sampling.types import Masks
from paceline.scheduler.plan import Plan


class RankSetup(msgspec.Struct, frozen=True, tag=True):
    """What all ranks build: `build_engine`'s arguments, and the port of the store by which they find each other."""

    port: int
    backend: str  # of the collectives: gloo, nccl or symmetric
    model: str | None
    load: str
    shape: str | None
    seed: int
    device: str
    engine_options: dict[str, Any]
    scheduler_options: dict[str, Any]


class UsePages(msgspec.Struct, frozen=True, tag=True):
    """The number of pages of every rank's KV cache."""

    num_pages: int


class LaunchPass(msgspec.Struct, frozen=True, tag=True):
    plan: Plan
    delayed: bool = False


class SamplePass(msgspec.Struct, frozen=True, tag=True):
    """The masks of the pass that was launched last, which was delayed."""

    masks: Masks


class RunBackgroundWork(msgspec.Struct, frozen=True, tag=True):
    """All ranks capture the same graphs."""


class AddAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read the adapter at `folder`: later passes may load it. Its contents have this digest."""

    adapter: str
    folder: str
    digest: str


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    adapter: str


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """Finish what was launched, and exit."""


MessageToRank = (
    RankSetup | UsePages | LaunchPass | SamplePass | RunBackgroundWork | AddAdapter | RemoveAdapter | StopRank
)
to_rank: TypedDecoder[MessageToRank] = TypedDecoder(MessageToRank)


class RankStarted(msgspec.Struct, frozen=True, tag=True):
    """The process runs, and connects next."""


class RankSized(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. `num_pages` fit into the memory that is left."""

    num_pages: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The executor is built."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """It could not be built. `is_usage`: because of an option or a model file."""

    message: str
    is_usage: bool


RankReport = RankStarted | RankSized | RankReady | RankFailed
