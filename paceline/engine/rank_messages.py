"""Messages between rank 0, which is the engine, and the other ranks of tensor parallelism or stages of a pipeline.

To the ranks by the ring, from them one line of JSON each by their standard output. The first message to a rank is its
setup; then come the passes in launch order. Messages about memory, with its file descriptor, have a socket of their own
(rank_copies.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.codec import TypedDecoder
from paceline.engine.weight_source import WeightSource
from paceline.model.weights_plan import WeightsPlan
from paceline.sampling.types import Masks
from paceline.scheduler.plan import Column, Plan


class RankSetup(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 has resolved, and the port of the store by which all ranks find each other."""

    port: int
    backend: str  # of the collectives: gloo, nccl or symmetric
    model: str | None  # None: random weights of the shape
    shape: str | None
    seed: int
    device: str
    engine_options: dict[str, Any]
    scheduler_options: dict[str, Any]
    weights: tuple[WeightsPlan, ...]  # of the model, and of a draft model


class UsePages(msgspec.Struct, frozen=True, tag=True):
    """The number of pages of every rank's KV cache, or of its host memory tier."""

    num_pages: int


class LaunchPass(msgspec.Struct, frozen=True, tag=True):
    plan: Plan
    delayed: bool = False
    may_capture: bool = False  # CUDA graphs; of tensor parallelism, since stages have graphs of their own


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


class ExportPages(msgspec.Struct, frozen=True, tag=True):
    """`Executor.export_pages` of this rank's part. `CopiesEnded` reports the end."""

    target: int  # id of the memory, which was mapped
    pages: Column
    targets: Column


class AfterLaunched(msgspec.Struct, frozen=True, tag=True):
    """`CopiesEnded` reports the end of everything that was launched before."""


class ReadWeights(msgspec.Struct, frozen=True, tag=True):
    """Read this rank's part of a checkpoint beside the passes, and report `WeightsRead` with the same number."""

    number: int
    source: WeightSource


class UseWeights(msgspec.Struct, frozen=True, tag=True):
    """Replace the weights by those that were read last. Later passes use them."""


class DropWeights(msgspec.Struct, frozen=True, tag=True):
    """Release the weights that were read last, or are being read."""


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """Finish what was launched, and exit."""


MessageToRank = (
    RankSetup
    | UsePages
    | LaunchPass
    | SamplePass
    | RunBackgroundWork
    | AddAdapter
    | RemoveAdapter
    | ExportPages
    | AfterLaunched
    | ReadWeights
    | UseWeights
    | DropWeights
    | StopRank
)
to_rank: TypedDecoder[MessageToRank] = TypedDecoder(MessageToRank)


class RankStarted(msgspec.Struct, frozen=True, tag=True):
    """The process runs, and connects next."""


class RankSized(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. `num_pages` fit into the memory that is left. The answer is `UsePages`."""

    num_pages: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The executor is built."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """It could not be built. `is_usage`: because of an option or a model file."""

    message: str
    is_usage: bool


class CopiesEnded(msgspec.Struct, frozen=True, tag=True):
    """Of one `ExportPages` or `AfterLaunched`, in order. error: why they failed, if they did."""

    error: str = ""


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """The weights of a `ReadWeights` are in host memory, or could not be read."""

    number: int
    error: str = ""


RankReport = RankStarted | RankSized | RankReady | RankFailed | CopiesEnded | WeightsRead


class MapPages(msgspec.Struct, frozen=True, tag=True):
    """The memory whose descriptor comes along has this rank's part of pages. A second descriptor: see
    `SharedPages.connection`."""

    id: int
    num_pages: int
    page_bytes: int


class UnmapPages(msgspec.Struct, frozen=True, tag=True):
    id: int


class ShareHostPages(msgspec.Struct, frozen=True, tag=True):
    """Send the descriptor of the host memory tier."""


MemoryRequest = MapPages | UnmapPages | ShareHostPages


class MemoryReply(msgspec.Struct, frozen=True):
    error: str = ""
    num_pages: int = 0  # of the memory whose descriptor comes along
    page_bytes: int = 0
