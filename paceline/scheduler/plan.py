"""Plan: the immutable description of one forward pass. Updates: what its commit made known.

A plan is a value. It holds no tensors, no live requests and nothing that changes later, so it can be serialised
(`paceline/codec.py`) and executed by another process. An executor needs nothing else; it never sees the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.request import FinishReason, SamplingParams, Tokens
from paceline.scheduler.tracked_request import TrackedRequest

Column = npt.NDArray[np.int32]

DRAFT_DEPTHS = (2, 4, 7)  # drafts per decode row that a pass can have besides none (speculative decoding)


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A request takes a slot in this pass. The executor first fills the slot's token row with `tokens`, and clears the
    slot's unit of every cache group that has states."""

    slot: int
    request_id: str
    tokens: Tokens  # the prompt and, after a retraction, the output so far
    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()  # tokens that end the request, ascending; not allowed before `params.min_tokens`
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    pooling: str | None = None  # the prompt's hidden states are returned, pooled this way
    namespace: tuple[str, ...] = ()  # requests share KV only within one tenant, cache salt and adapter
    max_length: int = 0  # prompt and output at full length
    draft_source: Tokens = field(default_factory=lambda: NO_TOKENS)  # what the output may follow
    adapter_slot: int | None = None  # where its adapter is; None: it uses the base model

    @classmethod
    def of(cls, request: TrackedRequest, slot: int, adapter_slot: int | None = None) -> Join:
        return cls(
            slot,
            request.id,
            np.concatenate([request.prompt, np.array(request.output, np.int32)]),
            len(request.prompt),
            request.params,
            tuple(sorted(request.stop_ids)),
            request.request.bad_word_ids,
            request.request.pooling,
            request.namespace,
            len(request.prompt) + request.max_tokens,
            request.draft_source,
            adapter_slot,
        )


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter that is copied into a slot of the device before a pass."""

    slot: int
    adapter: str


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Rows that read some of the same pages, in depth-first order of the prefix tree; see scheduler/sharing.py.

    Plans with equal, non-zero `version` have equal sharing, so an executor may keep what it derived from it.
    """

    version: int
    rows: Column
    common: Column  # common[i]: KV positions, all of them in memory, that rows[i] and rows[i + 1] both begin with


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Pages that move before a pass: first the device's `spill_pages` to `spill_hosts`, then `fetch_hosts` into
    `fetch_pages`, which may include a page that was just spilled. No host page appears in both directions."""

    spill_pages: Column
    spill_hosts: Column
    fetch_pages: Column
    fetch_hosts: Column


class TableChanges(NamedTuple):
    """Entries of a page table that are written before a pass: table[slots[i], indices[i]] = pages[i], in order."""

    slots: Column
    indices: Column
    pages: Column


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Rows are decodes first, then prefill chunks. The order of application is: swap, adapter loads, joins, page
    changes, the pass.

    Row i feeds the tokens at positions starts[i] .. starts[i] + lengths[i] of its slot. Tokens that a pass in flight
    will sample are read from the slot's token row on the device. Rows for which `samples` is true yield one token each,
    in row order, stored at position starts[i] + lengths[i].

    With `drafts` (speculative decoding), decode row i may feed up to drafts[i] more tokens, guesses of the executor. It
    yields one token, and one more for each guess that was right. While earlier passes are in flight its position is
    known to the executor alone: starts[i] is the highest that is possible. A row that has all of its max_lengths[i]
    tokens yields none.
    """

    step: int  # unique and ascending: identifies the plan
    slots: Column
    starts: Column
    lengths: Column
    max_lengths: Column  # prompt and output at full length
    samples: npt.NDArray[np.bool_]
    num_decodes: int
    joins: tuple[Join, ...]
    page_changes: tuple[TableChanges, ...]  # by page table; all cache groups of pages have the same one
    num_tokens: int
    num_context_tokens: int  # KV positions read, summed over rows
    sharing: Sharing | None = None
    swap: Swap | None = None
    drafts: Column | None = None  # by decode row
    adapter_loads: tuple[AdapterLoad, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes - self.num_drafts

    @property
    def num_drafts(self) -> int:
        """At most: the executor may have fewer."""
        return 0 if self.drafts is None else int(self.drafts.sum())

    @property
    def sharing_version(self) -> int:
        """0: no rows share."""
        return 0 if self.sharing is None else self.sharing.version


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    request: TrackedRequest
    reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Updates:
    """What a commit made known, as columns: requests[i] got tokens[i].

    A request that got several tokens in one pass appears several times, in order.
    """

    requests: tuple[TrackedRequest, ...]
    tokens: Column
    finished: tuple[Finished, ...]
    # Sampling rows without a token: the logits contain NaN, or the request ended or is computed again
    discarded: frozenset[int]

    @property
    def num_discarded(self) -> int:
        return len(self.discarded)


NO_TOKENS: Column = np.empty(0, np.int32)
NO_CHANGES = TableChanges(NO_TOKENS, NO_TOKENS, NO_TOKENS)
