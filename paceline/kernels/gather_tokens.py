"""The input of a forward pass: gathers tokens from the token pool by slot and position, and their embedding rows.

A token that the previous pass sampled is read from where the sampler wrote it, without a round trip to the host. Where
the vocabulary is sharded, a rank writes zeros for tokens of other ranks, and an all-reduce follows. A stage of a
pipeline that gets hidden states from another needs slots and positions only.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import UNSPECIALIZED, launched, next_power_of_2, tl, triton
from paceline.kernels.slot_state import SlotState


def gather_tokens_reference(
    state: SlotState,
    embeddings: torch.Tensor,
    token_rows: torch.Tensor | None,
    query_starts: torch.Tensor | None,
    num_tokens: int,
    first_id: int = 0,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows [T, H], slots [T], positions [T])."""
    token = torch.arange(num_tokens, device=embeddings.device)
    rows = token if token_rows is None else token_rows[:num_tokens].long()
    live = rows >= 0
    rows = rows.clamp(min=0)
    slots = state.row_slots[rows].long()
    offset = 0 if query_starts is None else token - query_starts[rows]
    positions = torch.where(live, state.num_computed[slots] + offset, 0)
    ids = state.token_pool[slots, positions.long()].long() - first_id
    is_here = live & (ids >= 0) & (ids < len(embeddings))
    found = torch.where(is_here[:, None], embeddings[ids.where(is_here, 0)], torch.zeros_like(embeddings[:1]))
    return (found * scale).to(found.dtype), torch.where(live, slots, 0).int(), positions.int()


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _gather_tokens_kernel(
    token_pool,
    num_computed,
    row_slots,
    num_rows,
    token_rows,
    query_starts,
    embeddings,
    out,
    slots,
    positions,
    squares,
    pool_stride,
    squares_stride,
    hidden,
    first_id,
    num_ids,
    scale,
    SCALED: tl.constexpr,
    LEAVE_SQUARES: tl.constexpr,
    RAGGED: tl.constexpr,
    SHARDED: tl.constexpr,
    EMBED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    live = True
    row = token
    offset = 0
    if RAGGED:
        row = tl.load(token_rows + token)
        live = row >= 0
        offset = token - tl.load(query_starts + row, mask=live, other=0)
        slot = tl.load(row_slots + row, mask=live, other=0)
        position = tl.where(live, tl.load(num_computed + slot) + offset, 0)
    else:
        live = token < tl.load(num_rows)
        slot = tl.load(row_slots + row)
        position = tl.load(num_computed + slot) + offset
    if EMBED:
        token_id = tl.load(token_pool + slot.to(tl.int64) * pool_stride + position, mask=live, other=0).to(tl.int64)
        if SHARDED:
            token_id -= first_id
            live = live & (token_id >= 0) & (token_id < num_ids)
        # A padding row gets zeros, so that no NaN or infinity goes through the GEMMs.
        value = tl.load(embeddings + token_id * hidden + column, mask=inside & live, other=0.0)
        if SCALED:
            value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * hidden + column, value.to(out.dtype.element_ty), mask=inside)
        if LEAVE_SQUARES:
            wide = value.to(tl.float32)
            tl.store(squares + token * squares_stride, tl.sum(wide * wide, axis=0))
    tl.store(slots + token, slot)
    tl.store(positions + token, position)


def gather_tokens(
    state: SlotState,
    embeddings: torch.Tensor | None,
    out: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    first_id: int | None = None,
    scale: float = 1.0,
) -> None:
    """out [T, H], slots [T] and positions [T] (int32) for the tokens of a pass; embeddings [V, H], or None: `out` stays
    as it is.

    Without token_rows, token i is row i's only token (a decode batch; rows from num_rows on are padding and get zeros).
    With it, token i belongs to row token_rows[i] [T], whose tokens begin at query_starts[row] [R + 1]; row -1 is
    padding and gets zeros. squares [T, 1], if given, receives each row's sum of squares for the RMSNorm that follows
    (linear.py). scale: factor of the embeddings. first_id: embeddings are those of the token ids from there on, and
    other tokens get zeros (default: of all token ids).
    """
    assert (token_rows is None) == (query_starts is None), "token_rows and query_starts are given together"
    tokens, hidden = out.shape
    block = next_power_of_2(hidden)
    _gather_tokens_kernel[(tokens,)](
        state.token_pool,
        state.num_computed,
        state.row_slots,
        state.num_rows,
        state.row_slots if token_rows is None else token_rows,
        state.row_slots if query_starts is None else query_starts,
        out if embeddings is None else embeddings,
        out,
        slots,
        positions,
        out if squares is None else squares,
        state.token_pool.stride(0),
        0 if squares is None else squares.stride(0),
        hidden,
        first_id or 0,
        0 if embeddings is None else len(embeddings),
        float(scale),
        SCALED=scale != 1.0 and embeddings is not None,
        LEAVE_SQUARES=squares is not None,
        RAGGED=token_rows is not None,
        SHARDED=first_id is not None,
        EMBED=embeddings is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )
