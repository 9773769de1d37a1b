"""Speculative decoding on the device: drafts from a row's own tokens or its draft source, and which were right.

A decode row with d drafts feeds 1 + d tokens. Their logits give the tokens that plain decoding would sample if all
drafts before them are right. A draft is accepted exactly if it equals that token, so the output is that of plain
decoding. Where a row continues is known on the device only: the next pass can be launched before the host knows it.

`propose_drafts` runs before the tokens of a pass are gathered. It looks for the longest and latest earlier occurrence
of a row's last tokens, and writes what followed it behind them into the token pool. If the slot has a draft source, a
text that the output may follow, a match there that is as long comes first: the one nearest to where the output is if it
has the same length so far. Rows feed between one and 1 + drafts tokens; the tokens of all rows are packed one after the
other. `accept_drafts` runs after sampling.

A draft model (engine/cuda/draft_model.py) has its drafts first, starting with `begin_drafts`; then `propose_drafts`
writes them into the token pool, or those of the draft source where it matches.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.kernels._triton import UNSPECIALIZED, launched, next_power_of_2, tl, triton
from paceline.kernels.layouts import (
    DRAFT_WORDS,
    SAMPLING_WORDS,
    DraftWord,
    SamplingWord,
    SourceWord,
    constants,
)
from paceline.kernels.slot_state import SlotState

MAX_DRAFTS = DRAFT_WORDS - DraftWord.TOKENS - 1
FIRST_TOKENS = 4  # of a row that a draft model computes in its first step; a power of two
SHORTEST_MATCH, LONGEST_MATCH = 2, 4  # tokens that must have occurred before, and most that are compared

_NUM_FED, _COUNT, _TOKENS = constants(DraftWord)
_NUM_SOURCE, _NUM_PROMPT, _SOURCE_TOKENS = constants(SourceWord)
_DRAFT_WORDS = tl.constexpr(DRAFT_WORDS)
_MAX_LENGTH = tl.constexpr(SamplingWord.MAX_LENGTH.value)
_MAX_INDEX = tl.constexpr(1 << 28)  # a match is one number: its length times this, and where it ends


@dataclass(frozen=True, slots=True, eq=False)
class DraftBuffers:
    """What the kernels of one forward pass with drafts tell each other, and what the host gets."""

    num_fed: torch.Tensor  # [R] int32: tokens that a row feeds
    query_starts: torch.Tensor  # [R + 1] int32: where those of a row begin among all tokens
    token_rows: torch.Tensor  # [T] int32: the row of each token; -1: padding
    num_tokens: torch.Tensor  # [1] int32
    arrived: torch.Tensor  # [1] int32, zero between launches
    proposed: torch.Tensor  # [R, DRAFT_WORDS] int32: num_fed and the drafts, for masks; COUNT is not set
    results: torch.Tensor  # [depth, R, DRAFT_WORDS] int32: a ring like that of sampled tokens
    sources: torch.Tensor  # [S, SourceWord.TOKENS + max_length] int32
    # Sampling stores the tokens of rows where nobody reads them: which of them count is decided afterwards.
    unused_pool: torch.Tensor  # [S, max_length] int32, the same memory for all slots
    unused_computed: torch.Tensor  # [S] int32

    @classmethod
    def empty(
        cls, rows: int, tokens: int, depth: int, max_length: int, slots: int, device: torch.device | str
    ) -> DraftBuffers:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            num_fed=zeros(rows),
            query_starts=zeros(rows + 1),
            token_rows=zeros(tokens),
            num_tokens=zeros(1),
            arrived=zeros(1),
            proposed=zeros(rows, DRAFT_WORDS),
            results=zeros(depth, rows, DRAFT_WORDS),
            sources=zeros(slots, SourceWord.TOKENS + max_length),
            unused_pool=zeros(1, max_length).expand(slots, -1),
            unused_computed=zeros(slots),
        )

    def without_rows(self, state: SlotState) -> SlotState:
        """The state with places for tokens and positions that nobody reads."""
        return replace(state, token_pool=self.unused_pool, num_computed=self.unused_computed)


def propose_drafts_reference(
    tokens: list[int], limit: int, source: list[int] | None = None, num_prompt_tokens: int = 0
) -> list[int]:
    """Up to `limit` tokens that may follow `tokens`."""
    source = source or []
    here = len(tokens) - num_prompt_tokens  # where the output is in its source, if it has followed it
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        last = tokens[len(tokens) - size :]
        ends = [end for end in range(size, len(source)) if source[end - size : end] == last]
        if size == LONGEST_MATCH and 0 < here < size and here < len(source) and source[:here] == tokens[-here:]:
            ends = [here]  # the output is the beginning of its source
        if ends:
            end = min(ends, key=lambda end: (abs(end - here), -end))
            return source[end : end + limit]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == last:
                following = tokens[end:]
                return [following[i % len(following)] for i in range(limit)]
    return []


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _propose_kernel(
    token_pool,
    num_computed,
    row_slots,
    num_rows,
    sampling,
    num_fed,
    query_starts,
    token_rows,
    num_tokens,
    arrived,
    proposed,
    sources,
    model_drafts,
    pool_stride,
    words_stride,
    model_stride,
    WORDS: tl.constexpr,
    DRAFTS: tl.constexpr,
    ALWAYS: tl.constexpr,
    FROM_MODEL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.num_programs(0)
    num_live = tl.load(num_rows)
    lane = tl.arange(0, BLOCK)
    fed = row * 0
    if row < num_live:
        fed += 1
        slot = tl.load(row_slots + row).to(tl.int64)
        position = tl.load(num_computed + slot)
        history = token_pool + slot * pool_stride
        limit = tl.minimum(tl.load(sampling + slot * WORDS + _MAX_LENGTH) - 2 - position, DRAFTS)
        if limit > 0:
            last = tl.load(history + position)
            second = tl.load(history + position - 1, mask=position > 0, other=-1)
            third = tl.load(history + position - 2, mask=position > 1, other=-1)
            fourth = tl.load(history + position - 3, mask=position > 2, other=-1)
            best = row * 0
            if not FROM_MODEL:
                for start in range(0, position, BLOCK):
                    i = start + lane
                    known = i < position
                    same = (tl.load(history + i, mask=known, other=-2) == last) & known
                    same = same & (tl.load(history + i - 1, mask=known & (i > 0), other=-2) == second)
                    three = tl.load(history + i - 2, mask=known & (i > 1), other=-2) == third
                    four = tl.load(history + i - 3, mask=known & (i > 2), other=-2) == fourth
                    length = 2 + three.to(tl.int32) + (three & four).to(tl.int32)
                    best = tl.maximum(best, tl.max(tl.where(same, length * _MAX_INDEX + i, 0), axis=0))
            if ALWAYS:
                best = tl.maximum(best, position - 1)
            source = sources + slot * words_stride
            num_source = tl.load(source + _NUM_SOURCE)
            found = row * 0
            at = row * 0
            if num_source > 0:
                here = position - tl.load(source + _NUM_PROMPT)  # where the output is, if it has followed its source
                for start in range(0, num_source - 1, BLOCK):
                    i = start + lane
                    known = i < num_source - 1
                    text = source + _SOURCE_TOKENS + i
                    one = (tl.load(text, mask=known, other=-2) == last) & known
                    two = tl.load(text - 1, mask=known & (i > 0), other=-2) == second
                    three = tl.load(text - 2, mask=known & (i > 1), other=-2) == third
                    four = tl.load(text - 3, mask=known & (i > 2), other=-2) == fourth
                    length = 2 + three.to(tl.int32) + (three & four).to(tl.int32)
                    # The beginning of the output is that of its source: one token is as good as four.
                    begins = one & (i == here) & (two | (i < 1)) & (three | (i < 2)) & (four | (i < 3))
                    same = (one & two) | begins
                    length = tl.where(begins, 4, length)
                    distance = tl.abs(i - here)
                    score = tl.where(same, length * _MAX_INDEX + _MAX_INDEX - 1 - distance, 0)
                    highest = tl.max(score, axis=0)
                    if highest > found:
                        found = highest
                        at = tl.max(tl.where(score == highest, i, 0), axis=0)
            if (found > 0) & (found // _MAX_INDEX >= best // _MAX_INDEX):
                limit = tl.minimum(limit, num_source - 1 - at)
                draft = tl.arange(0, BLOCK_D)
                token = tl.load(source + _SOURCE_TOKENS + at + 1 + draft, mask=draft < limit, other=0)
                tl.store(history + position + 1 + draft, token, mask=draft < limit)
                tl.store(proposed + row * _DRAFT_WORDS + _TOKENS + draft, token, mask=draft < limit)
                fed += limit
            elif FROM_MODEL:
                draft = tl.arange(0, BLOCK_D)
                token = tl.load(model_drafts + draft * model_stride + row, mask=draft < limit, other=0)
                token = tl.maximum(token, 0)  # NO_TOKEN
                tl.store(history + position + 1 + draft, token, mask=draft < limit)
                tl.store(proposed + row * _DRAFT_WORDS + _TOKENS + draft, token, mask=draft < limit)
                fed += limit
            elif best > 0:
                end = best % _MAX_INDEX + 1
                draft = tl.arange(0, BLOCK_D)
                # Once it has reached the end of the row, it begins again.
                token = tl.load(history + end + draft % (position + 1 - end), mask=draft < limit, other=0)
                tl.store(history + position + 1 + draft, token, mask=draft < limit)
                tl.store(proposed + row * _DRAFT_WORDS + _TOKENS + draft, token, mask=draft < limit)
                fed += limit
    tl.store(num_fed + row, fed)
    tl.store(proposed + row * _DRAFT_WORDS + _NUM_FED, fed)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == count - 1:
        tl.store(arrived, 0)
        rows = tl.arange(0, BLOCK_R)
        feeds = tl.load(num_fed + rows, mask=rows < count, other=0, cache_modifier=".cg")
        ends = tl.cumsum(feeds, axis=0)
        total = tl.sum(feeds, axis=0)
        tl.store(num_tokens, total)
        tl.store(query_starts + rows, ends - feeds, mask=rows < count)
        tl.store(query_starts + count, total)
        for j in tl.static_range(DRAFTS + 1):
            tl.store(token_rows + ends - feeds + j, rows, mask=j < feeds)
        for start in range(0, count * (DRAFTS + 1), BLOCK):
            token = start + lane
            tl.store(token_rows + token, token * 0 - 1, mask=(token >= total) & (token < count * (DRAFTS + 1)))


def propose_drafts(
    state: SlotState,
    buffers: DraftBuffers,
    rows: int,
    drafts: int,
    *,
    always: bool = False,
    model_drafts: torch.Tensor | None = None,
    block: int = 1024,
) -> None:
    """Writes up to `drafts` drafts of each of the first num_rows rows, of at most `rows`, into the token pool and
    `buffers.proposed`, and how all tokens are packed into `buffers`. always: some drafts, even where nothing has
    occurred before (benchmarks). model_drafts [D, R]: those of a draft model, which are used where no draft source
    matches."""
    from_model = model_drafts is not None
    model_drafts = buffers.proposed if model_drafts is None else model_drafts
    _propose_kernel[(rows,)](
        state.token_pool,
        state.num_computed,
        state.row_slots,
        state.num_rows,
        state.sampling,
        buffers.num_fed,
        buffers.query_starts,
        buffers.token_rows,
        buffers.num_tokens,
        buffers.arrived,
        buffers.proposed,
        buffers.sources,
        model_drafts,
        state.token_pool.stride(0),
        buffers.sources.stride(0),
        model_drafts.stride(0),
        WORDS=SAMPLING_WORDS,
        DRAFTS=drafts,
        ALWAYS=always and not from_model,
        FROM_MODEL=from_model,
        BLOCK_D=next_power_of_2(drafts),
        BLOCK_R=next_power_of_2(len(state.row_slots)),
        BLOCK=block,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ModelDraftBuffers:
    """Where a draft model is: it computes the last tokens of a row again, and then the next."""

    num_fed: torch.Tensor  # [R] int32: tokens that a row feeds in the first step, at most FIRST_TOKENS
    query_starts: torch.Tensor  # [R + 1] int32: multiples of FIRST_TOKENS
    token_rows: torch.Tensor  # [FIRST_TOKENS * R] int32: the row of each of these tokens; -1: padding
    last_tokens: torch.Tensor  # [R] int32: the last of these tokens of each row
    num_computed: torch.Tensor  # [S] int32: the next position that the draft model feeds
    last_positions: torch.Tensor  # [S] int32: the last one; a row that has reached it computes it again

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device | str) -> ModelDraftBuffers:
        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(zeros(rows), zeros(rows + 1), zeros(FIRST_TOKENS * rows), zeros(rows), zeros(slots), zeros(slots))


def begin_drafts_reference(num_computed: int, max_length: int, drafts: int) -> tuple[int, int, int]:
    """(num_computed, num_fed, last_position) of a row for the draft model."""
    num_fed = min(num_computed + 1, FIRST_TOKENS)
    limit = max(1, min(max_length - 2 - num_computed, drafts))
    return num_computed + 1 - num_fed, num_fed, num_computed + limit - 1


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _begin_kernel(
    num_computed,
    row_slots,
    num_rows,
    sampling,
    own_computed,
    last_positions,
    num_fed,
    query_starts,
    token_rows,
    last_tokens,
    WORDS: tl.constexpr,
    DRAFTS: tl.constexpr,
    FIRST: tl.constexpr,
):
    row = tl.program_id(0)
    fed = row * 0
    if row < tl.load(num_rows):
        slot = tl.load(row_slots + row).to(tl.int64)
        position = tl.load(num_computed + slot)
        fed += tl.minimum(position + 1, FIRST)
        limit = tl.minimum(tl.load(sampling + slot * WORDS + _MAX_LENGTH) - 2 - position, DRAFTS)
        tl.store(own_computed + slot, position + 1 - fed)
        tl.store(last_positions + slot, position + tl.maximum(limit, 1) - 1)
    tl.store(num_fed + row, fed)
    tl.store(query_starts + row, FIRST * row)
    token = tl.arange(0, FIRST)
    tl.store(token_rows + FIRST * row + token, tl.where(token < fed, row, -1))
    tl.store(last_tokens + row, FIRST * row + tl.maximum(fed, 1) - 1)


def begin_drafts(state: SlotState, buffers: ModelDraftBuffers, rows: int, drafts: int) -> None:
    """Where a draft model begins with each of the first num_rows rows, of at most `rows`. It feeds the tokens before
    the next one too: where all drafts of the previous pass were right, or a few passes had none, it has not computed
    them."""
    _begin_kernel[(rows,)](
        state.num_computed,
        state.row_slots,
        state.num_rows,
        state.sampling,
        buffers.num_computed,
        buffers.last_positions,
        buffers.num_fed,
        buffers.query_starts,
        buffers.token_rows,
        buffers.last_tokens,
        WORDS=SAMPLING_WORDS,
        DRAFTS=drafts,
        FIRST=FIRST_TOKENS,
        num_warps=1,
    )


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _accept_kernel(
    token_pool,
    num_computed,
    row_slots,
    num_rows,
    num_fed,
    query_starts,
    results,
    tokens,
    step,
    pool_stride,
    max_tokens,
    max_rows,
    depth,
    FED: tl.constexpr,
    COIN: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    position = tl.load(num_computed + slot)
    following = token_pool + slot * pool_stride + position + 1
    fed = tl.load(num_fed + row)
    ring = tl.load(step) % depth
    sampled = tokens + ring * max_tokens + tl.load(query_starts + row)
    out = results + (ring * max_rows + row) * _DRAFT_WORDS
    count = row * 0
    going = fed > 0
    for j in tl.static_range(FED):
        token = tl.load(sampled + j, mask=going, other=-1)
        is_draft = going & (j + 1 < fed)
        draft = tl.load(following + j, mask=is_draft, other=-2)
        tl.store(out + _TOKENS + j, token, mask=going)
        tl.store(following + j, tl.maximum(token, 0), mask=going)
        count += going.to(tl.int32)
        right = token == draft
        if COIN > 0:
            mixed = (position * 8 + j) * 747796405 + row * 277803737 + 12345
            mixed = ((mixed >> 7) ^ mixed) * 277803737
            right = ((mixed >> 9) & 0xFF) < COIN
        going = is_draft & right
    tl.store(num_computed + slot, position + count)
    tl.store(out + _NUM_FED, fed)
    tl.store(out + _COUNT, count)


def accept_drafts(
    state: SlotState,
    buffers: DraftBuffers,
    tokens: torch.Tensor,
    step: torch.Tensor,
    rows: int,
    drafts: int,
    *,
    coin: int = 0,
) -> None:
    """Of the tokens that were sampled in this step, tokens[step % depth] [depth, max_tokens], stores those that count
    in the token pool and in buffers.results, and advances their rows. coin: accepts a draft with probability coin / 256
    instead, whatever it is (benchmarks)."""
    _accept_kernel[(rows,)](
        state.token_pool,
        state.num_computed,
        state.row_slots,
        state.num_rows,
        buffers.num_fed,
        buffers.query_starts,
        buffers.results,
        tokens,
        step,
        state.token_pool.stride(0),
        tokens.shape[1],
        buffers.results.shape[1],
        buffers.results.shape[0],
        FED=drafts + 1,
        COIN=coin,
        num_warps=1,
    )
