"""Plan: the immutable description of one forward pass, and Updates: what came of it.

A plan holds no tensors and nothing that changes later: its arrays are its own. Everything an executor must know
is here; it never looks into the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.request import FinishReason, Request, Tokens

Column = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A request takes a slot in this pass: the executor fills the slot's token row with `tokens` first."""

    slot: int
    request: Request
    tokens: Tokens  # prompt, and after a retraction the output so far


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Rows that read some of the same pages, in depth-first order of the prefix tree; see scheduler/sharing.py."""

    rows: Column
    common: Column  # common[i]: KV positions, all of them in memory, that rows[i] and rows[i + 1] both begin with


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Pages that move before a pass: first the device's `spill_pages` to `spill_hosts`, then `fetch_hosts` into
    `fetch_pages`, where a page just spilled may be among them. No host page stands in both directions."""

    spill_pages: Column
    spill_hosts: Column
    fetch_pages: Column
    fetch_hosts: Column


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Rows are decodes first, then prefill chunks. The order of application is: swap, joins, page changes, the pass.

    Row i feeds the tokens at positions starts[i] .. starts[i] + lengths[i] of its slot; tokens that a pass in
    flight will sample are read from the slot's token row on the device. Rows for which `samples` is true yield
    a token each, in row order, stored at position starts[i] + lengths[i].
    """

    step: int
    slots: Column
    starts: Column
    lengths: Column
    samples: npt.NDArray[np.bool_]
    num_decodes: int
    requests: tuple[Request, ...]  # row -> request; for whoever needs its sampling parameters
    joins: tuple[Join, ...]
    page_slots: Column  # page table entries to write before the pass: page_table[slot, index] = id
    page_indices: Column
    page_ids: Column
    num_tokens: int
    num_context_tokens: int  # KV positions read, summed over rows
    sharing: Sharing | None = None  # the same object as long as nothing has changed
    swap: Swap | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    request: Request
    reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Updates:
    """What a commit made known, as columns: requests[i] got tokens[i].

    A request that got several tokens in one pass stands there several times, in order.
    """

    requests: tuple[Request, ...]
    tokens: Column
    finished: tuple[Finished, ...]
    num_discarded: int  # tokens of requests that had ended while the pass was in flight


NO_TOKENS: Column = np.empty(0, np.int32)
