"""Copies pages between the KV cache, where a page has one block per layer, and buffers that hold whole pages."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch

from paceline.kernels._triton import UNSPECIALIZED, cdiv, launched, tl, triton


def collect_pages_reference(kv: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    return kv[:, pages.long()].transpose(0, 1)


def place_pages_reference(kv: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Returns the KV cache afterwards."""
    after = kv.clone()
    after[:, pages.long()] = buffer.transpose(0, 1)
    return after


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _move_pages_kernel(kv, buffer, pages, num_pages, row_size, page_size, OUT: tl.constexpr, BLOCK: tl.constexpr):
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < page_size
    page = tl.load(pages + index).to(tl.int64)
    scattered = kv + (part * num_pages + page) * page_size + column
    whole = buffer + index * row_size + part * page_size + column
    if OUT:
        tl.store(whole, tl.load(scattered, mask=inside), mask=inside)
    else:
        tl.store(scattered, tl.load(whole, mask=inside), mask=inside)


def collect_pages(kv: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer [N, parts, E] = the pages [N] int32 of kv [parts, pages, E]. Both are contiguous; a row of the buffer may
    be a part of a longer one."""
    _move(kv, pages, buffer, out=True)


def place_pages(kv: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies the buffer back into the pages of kv. The pages must be distinct."""
    _move(kv, pages, buffer, out=False)


def _move(kv: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor, *, out: bool) -> None:
    parts, num_pages, size = kv.shape
    block = 2048
    _move_pages_kernel[(len(pages), parts, cdiv(size, block))](
        kv, buffer, pages, num_pages, buffer.stride(0), size, OUT=out, BLOCK=block, num_warps=4
    )
