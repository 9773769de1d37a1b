"""The grammars of running requests: masks of their next tokens, and of the drafts behind them.

A matcher follows the tokens of one request. For drafts (speculative decoding) llguidance advances it by them and rolls
it back. Behind a draft that the grammar forbids masks are not written: that draft is rejected by its own mask, so what
is sampled there does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.sampling.types import Bits
from paceline.scheduler.tracked_request import TrackedRequest

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar that requests share."""

    matcher: LLMatcher  # llguidance's, in its initial state
    # The mask of a first token. llguidance keeps none: with many optional properties each request would pay again.
    first_mask: npt.NDArray[np.int32]


class GrammarMatcher:
    """Follows the output of one request."""

    __slots__ = ("compiled", "exceeds_limit", "is_initial", "state")

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self.state = compiled.matcher.deep_copy()
        self.is_initial = True  # no token has followed
        self.exceeds_limit = False  # the cost limit, behind some drafts of the pass in flight

    def after(self, output: Sequence[int]) -> LLMatcher:
        """A new state, after these tokens."""
        state = self.compiled.matcher.deep_copy()
        state.consume_tokens(list(output))
        return state


class MaskRow(NamedTuple):
    request: TrackedRequest
    matcher: GrammarMatcher
    first: int  # index of its first mask; those of its drafts follow
    drafts: Sequence[int]


def fill_masks(executor: LLExecutor, rows: Sequence[MaskRow], bits: Bits) -> None:
    """Computes the masks of rows without drafts, on any thread. The GIL is released meanwhile."""
    matchers = []
    for row in rows:
        if row.matcher.is_initial:
            bits[row.first] = row.matcher.compiled.first_mask[: bits.shape[1]]  # it may have a word more
        else:
            matchers.append((row.matcher.state, row.first))
    if matchers:
        executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * 4, len(bits))
    for row in rows:
        if row.matcher.state.is_error():
            bits[row.first] = -1  # `advance` refuses the next token, which ends the request


def fill_draft_masks(
    executor: LLExecutor, rows: Sequence[MaskRow], bits: Bits, eos_ids: Set[int], eos_mask: npt.NDArray[np.int32]
) -> None:
    """As `fill_masks`, for rows with drafts. `eos_mask` allows `eos_ids` only."""
    for row in rows:
        if not eos_ids.isdisjoint(row.drafts):
            # Where an EOS ends the grammar, only EOS can follow, and llguidance writes no masks.
            at = next(at for at, token in enumerate(row.drafts, 1) if token in eos_ids)
            bits[row.first + at : row.first + 1 + len(row.drafts)] = eos_mask
    matchers = [(row.matcher.state, row.first, list(row.drafts)) for row in rows]
    executor.unsafe_compute_mask_ptr_with_draft_token(matchers, bits.ctypes.data, bits.shape[1] * 4, len(bits))
    for row in rows:
        if row.matcher.state.is_error():
            _fill_one_by_one(row, bits[row.first : row.first + 1 + len(row.drafts)])


def _fill_one_by_one(row: MaskRow, masks: Bits) -> None:
    """Of a row with a draft behind which the grammar exceeds its cost limit: then the matcher is in an error state for
    ever, but the draft may be wrong. The request fails only if its output gets there, as without drafts."""
    state = row.matcher.after(row.request.output)
    for index, mask in enumerate(masks):
        state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if state.is_error():
            masks[index:] = -1
            break
        if index < len(row.drafts) and not state.consume_token(row.drafts[index]):
            break
    row.matcher.state, row.matcher.exceeds_limit = row.matcher.after(row.request.output), True


def consume(
    executor: LLExecutor, tokens: dict[TrackedRequest, tuple[GrammarMatcher, list[int]]]
) -> list[TrackedRequest]:
    """Advances matchers by the tokens that their requests got in one pass. Returns requests whose grammar failed."""
    failed: list[TrackedRequest] = []
    turn = 0
    while batch := [
        (request, matcher, given[turn])
        for request, (matcher, given) in tokens.items()
        if turn < len(given) and request not in failed
    ]:
        for _, matcher, _ in batch:
            matcher.is_initial = False
            if matcher.exceeds_limit:
                matcher.state.compute_bitmask()  # as before each token of plain decoding: an error state shows here
        results = executor.consume_token_par([(matcher.state, token) for _, matcher, token in batch])
        failed += [request for (request, _, _), is_accepted in zip(batch, results, strict=True) if not is_accepted]
        turn += 1
    for matcher, _ in tokens.values():
        matcher.exceeds_limit = False
    return failed
