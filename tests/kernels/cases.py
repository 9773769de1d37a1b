"""Random inputs for kernel tests, in the interpreter (small) and on a GPU (at real sizes)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels.fp8 import to_fp8_reference


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(got).all(), "the kernel left an output unwritten, or not finite"
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def poisoned(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class Cache:
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    scales: torch.Tensor | None = None  # [2, K]: of a cache in FP8

    def in_fp8(self) -> Cache:
        """The same cache with FP8 numbers, each head with a scale of its own; some numbers are saturated."""
        heads = torch.arange(self.k.shape[2], device=self.k.device) % 2
        scales = torch.stack([0.25 * 0.37**heads, 1.7 * 0.004**heads]).float()
        k, v = (to_fp8_reference(x, scale[:, None]) for x, scale in zip((self.k, self.v), scales, strict=True))
        return Cache(k, v, self.page_table, scales)


def random_cache(
    slots: int,
    max_length: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    shared_pages: list[tuple[int, int, int]] | None = None,
) -> Cache:
    """A cache whose slots own pages in random order; shared_pages: (slot, other, n) gives it the other's first n."""
    per_slot = -(-max_length // page_size)
    pages = torch.randperm(slots * per_slot, device=device).int().view(slots, per_slot)
    for slot, other, count in shared_pages or []:
        pages[slot, :count] = pages[other, :count]
    shape = (slots * per_slot, page_size, kv_heads, head_dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    return Cache(k, v, pages.contiguous())


def poison_unwritten(cache: Cache, lengths: list[int]) -> None:
    """Fills what the slots have not written yet with NaN, which an earlier request may have left there."""
    page_size = cache.k.shape[1]
    written = torch.zeros(cache.k.shape[:2], dtype=torch.bool, device=cache.k.device)
    for pages, length in zip(cache.page_table.long(), lengths, strict=True):
        at = torch.arange(length, device=pages.device)
        written[pages[at // page_size], at % page_size] = True
    for part in (cache.k, cache.v):
        if part.dtype == torch.float8_e4m3fn:
            part.view(torch.uint8)[~written] = 0x7F  # NaN
        else:
            part[~written] = torch.nan
