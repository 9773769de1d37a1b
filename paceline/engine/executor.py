"""The executor interface: executes plans in the order they are launched.

`cpu/`, `cuda/` and `virtual/` each implement it. What an executor supports is in its `capabilities`; callers check
these and never probe for methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from paceline.engine.pooling import PooledStates
from paceline.sampling.types import Bits, Drafts, LogprobRun, Logprobs, Masks
from paceline.scheduler.plan import Column, Plan
from paceline.shared_pages import SharedPages

if TYPE_CHECKING:
    from paceline.engine.weight_source import WeightSource
    from paceline.model.decoder import Decoder
    from paceline.model.lora import LoraFile, LoraWeights


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor supports beyond sampling tokens."""

    logits: bool = False  # logprobs, and grammar masks through `launch_delayed`
    pooling: bool = False  # embeddings: pooled hidden states of prompts
    weights: bool = False  # `read_weights` and `load_weights`
    kv_transfer: bool = False  # `export_pages`, and `host_pages` that others may write
    lora: bool = False  # `add_adapter` and `remove_adapter`, and plans whose rows use adapters


class Result(NamedTuple):
    """What a forward pass produced, on the host."""

    # One token for each sampling row, in row order; or counts[i] tokens of row i, end to end. NO_TOKEN: the row's
    # logits contain NaN or are all infinite.
    tokens: Column
    device_s: float  # time on the device: the scheduler needs it for aging and predictions
    counts: Column | None = None
    num_drafts: Column | None = None  # drafts that were fed, by sampling row; with `counts` only
    idle_s: float | None = None  # device idle time before the pass, where it is measured
    logprobs: Logprobs | None = None  # of the sampled tokens, if a row asks for them
    prompt_logprobs: tuple[LogprobRun, ...] = ()
    fetch_s: float | None = None  # time to copy the fetched pages from host memory, where it is measured
    slow_launch: str | None = None  # why launching the pass took long, if it did
    pooled: tuple[PooledStates, ...] = ()  # hidden states of prompts that are embedded

    @property
    def num_drafted(self) -> int:
        return 0 if self.num_drafts is None else int(self.num_drafts.sum())

    @property
    def num_accepted(self) -> int:
        """Drafts that were right."""
        return 0 if self.counts is None else int(np.maximum(self.counts - 1, 0).sum())


class Pending(Protocol):
    """A pass in flight."""

    def wait(self) -> Result:
        """Blocks until the pass has run."""


class DelayedPending(Pending, Protocol):
    """A pass in flight that samples only after `sample` was called."""

    def drafts(self) -> Drafts:
        """The drafts that are verified. Blocks until they are known, which is when the pass begins. Called before
        `sample`."""

    def mask_buffer(self, num_masks: int, num_words: int) -> Bits:
        """The buffer for the bits of this pass's masks: memory that the device reads without another copy. Called once,
        after the pass before was waited for (of a pipeline: one with the same rows) and before another is launched."""

    def sample(self, masks: Masks) -> None:
        """Launches sampling. The masks' bits are in the mask buffer. Called once, before `wait`."""


class Completion(Protocol):
    """Copies that may still be running."""

    def wait(self) -> None:
        """Blocks until they have ended. May be called on any thread."""


class Executor(ABC):
    """Executes plans on one device. Not thread-safe: the engine's thread is the only caller."""

    capabilities = Capabilities()

    @property
    def local(self) -> Executor:
        """The executor that computes in this process: with ranks, that of rank 0."""
        return self

    @property
    def activity(self) -> float:
        """Grows while a pass computes, where that can be told: a long pass is not a stuck one. May be read from any
        thread."""
        return 0.0

    @property
    def slow_launches(self) -> Mapping[str, int]:
        """Launches that took so long that running requests waited for them, by cause, where they are counted."""
        return {}

    @property
    def expert_rows(self) -> Sequence[Sequence[int]]:
        """Of each layer with experts, how many rows each expert has computed since the start, where that is counted.
        Copies from the device and waits for the copy, but for no pass."""
        return ()

    @property
    def may_capture(self) -> bool:
        """Whether the next launch may capture CUDA graphs: no pass runs. With ranks, rank 0 decides for all."""
        return False

    def let_capture(self, may_capture: bool) -> None:  # noqa: B027 -- optional
        """What rank 0 has decided about the next launch. Ranks must have the same graphs."""

    @abstractmethod
    def launch(self, plan: Plan) -> Pending:
        """Starts a pass and returns at once. Passes run in launch order."""

    def prepare(self, plan: Plan) -> None:  # noqa: B027 -- optional
        """Does the part of `launch` that does not depend on earlier passes. If called, the next launch is of this
        plan."""

    def launch_delayed(self, plan: Plan) -> DelayedPending:
        """As `launch`, for a pass whose masks the host does not know yet. The pass runs up to its logits and continues
        with `sample`, which must be called before the next launch. Requires `capabilities.logits`."""
        raise NotImplementedError(f"{type(self).__name__} does not compute logits")

    def read_weights(self, source: WeightSource) -> Decoder:
        """The weights of another checkpoint of the same shape, or this rank's part of them, in host memory. Raises
        ModelError if they cannot be read. May be called on any thread. Requires `capabilities.weights`."""
        raise NotImplementedError(f"{type(self).__name__} has no weights")

    def announce_weights(self, source: WeightSource) -> None:  # noqa: B027 -- optional
        """The other ranks, if there are any, begin to read their parts, while passes run. `load_weights` uses them."""

    def wait_weights(self) -> None:  # noqa: B027 -- optional
        """Blocks until the other ranks have read what was announced last. Raises ModelError if one could not. May be
        called on any thread."""

    def drop_weights(self) -> None:  # noqa: B027 -- optional
        """The other ranks release what was announced last."""

    def load_weights(self, decoder: Decoder) -> None:
        """Replaces the weights by those of a decoder of the same spec, which is taken over; on the other ranks, by
        those that were announced. No pass is in flight. Requires `capabilities.weights`."""
        raise NotImplementedError(f"{type(self).__name__} has no weights")

    def arrange_adapter(self, file: LoraFile) -> LoraWeights:
        """The matrices of an adapter for the model of this rank, on the host. Raises ModelError if it belongs to
        another model. May be called on any thread. Requires `capabilities.lora`."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters")

    def add_adapter(self, adapter: str, file: LoraFile, weights: LoraWeights) -> None:
        """Plans that are launched from now on may load this adapter into a slot. weights: of `arrange_adapter`."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters")

    def remove_adapter(self, adapter: str) -> None:
        """No plan that is launched from now on loads this adapter. Those that are launched may still use it."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters")

    @property
    def host_pages(self) -> SharedPages | None:
        """The host memory tier, if other processes may write pages of it that the scheduler has reserved."""
        return None

    def map_pages(self, target: SharedPages) -> None:  # noqa: B027 -- optional
        """Prepares memory as a target of `export_pages`. May be called on any thread."""

    def unmap_pages(self, target: SharedPages) -> None:  # noqa: B027 -- optional
        """The inverse of `map_pages`; nothing is copied there any more."""

    def export_pages(self, pages: Column, target: SharedPages, targets: Column) -> Completion:
        """Copies device pages, as passes launched so far leave them, to pages of `target`. Later passes may overwrite
        them. Requires `capabilities.kv_transfer`."""
        raise NotImplementedError(f"{type(self).__name__} cannot export pages")

    def after_launched(self) -> Completion:
        """The end of everything launched so far, copies to and from host memory included. Requires
        `capabilities.kv_transfer`."""
        raise NotImplementedError(f"{type(self).__name__} cannot export pages")

    def run_background_work(self) -> bool:
        """Runs one unit of background work, such as capturing a CUDA graph; returns whether there was any. No pass is
        in flight."""
        return False

    def check(self) -> None:  # noqa: B027 -- optional
        """Raises if a pass has failed. May be called from any thread, and blocks for nothing."""

    def close(self) -> None:  # noqa: B027 -- optional
        """Waits for launched passes and releases threads and streams."""
