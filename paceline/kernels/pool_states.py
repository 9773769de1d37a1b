"""Pooling of hidden states: the sums of ranges of tokens, in float32, for embeddings."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import cdiv, launched, tl, triton


def pool_states_reference(states: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    """[N, H] float32."""
    return torch.stack([states[first:end].float().sum(0) for first, end in ranges.tolist()])


@launched
@triton.jit
def _pool_states_kernel(states, ranges, out, hidden, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    first = tl.load(ranges + 2 * row)
    end = tl.load(ranges + 2 * row + 1)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for at in range(first, end, TOKENS):
        token = at + tl.arange(0, TOKENS)
        address = states + token[:, None].to(tl.int64) * hidden + column[None, :]
        total += tl.load(address, mask=(token < end)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * hidden + column, tl.sum(total, axis=0), mask=inside)


def pool_states(states: torch.Tensor, ranges: torch.Tensor, out: torch.Tensor) -> None:
    """out [N, H] float32: row i is the sum of states [T, H] of the tokens ranges[i] = first, end (int32).

    One launch for all rows, whatever their lengths; each program reads 64 columns of one row's tokens.
    """
    count, hidden = out.shape
    columns = 64
    _pool_states_kernel[(count, cdiv(hidden, columns))](
        states, ranges, out, hidden, TOKENS=32, COLUMNS=columns, num_warps=4
    )
