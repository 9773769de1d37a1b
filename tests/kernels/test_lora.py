"""LoRA kernels compared with their reference, for rows of several adapters, of none, and padding."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.layouts import SAMPLING_WORDS, SamplingWord
from paceline.kernels.lora import (
    AdapterMatrix,
    AdapterRows,
    add_lora,
    group_rows,
    lora_rank,
    lora_reference,
    lora_tuning,
)
from paceline.kernels.route_experts import LiveRows


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grouped(ids: torch.Tensor, num_slots: int, width: int, live: str = "") -> tuple[AdapterRows, torch.Tensor]:
    """The buffers for rows with these adapters, and the adapters that rows really use. -1: none."""
    count = len(ids)
    sampling = torch.full((count + 3, SAMPLING_WORDS), 7, dtype=torch.int32)
    slots = torch.randperm(count + 3, generator=torch.Generator().manual_seed(5))[:count].to(torch.int32)
    sampling[slots.long(), SamplingWord.ADAPTER] = ids.to(torch.int32) + 1
    rows = AdapterRows.empty(count + 5, num_slots, width, "cpu")
    rows.blocks.fill_(0)  # of an earlier batch
    used, alive = ids.clone(), None
    if live == "first":
        alive, used[count - 3 :] = LiveRows(torch.tensor([count - 3], dtype=torch.int32), by_row=False), -1
    elif live == "by row":
        values = torch.arange(count, dtype=torch.int32)
        values[1::4] = -1
        alive, used[1::4] = LiveRows(values, by_row=True), -1
    group_rows(slots, sampling, rows, alive)
    return rows, used


def adapters(num_slots: int, rank: int, width: int, widths: tuple[int, ...]) -> AdapterMatrix:
    """Of ranks between 0 and `rank`. What they do not use of a slot has other values: it must not be read."""
    sizes = len(widths) * rank * width, sum(widths) * rank
    a, b = random(num_slots, sum(sizes)).split(sizes, dim=1)  # strided, as the executor has them
    ranks = torch.randint(0, rank + 1, (num_slots, len(widths)), generator=torch.Generator().manual_seed(4)).int()
    ranks[-1] = rank
    return AdapterMatrix(
        a.view(num_slots, -1, width) * width**-0.5, b.view(num_slots, rank, -1) * rank**-0.5, ranks, widths
    )


@pytest.mark.parametrize(
    ("count", "num_slots", "rank", "widths", "width", "live"),
    [
        (37, 5, 16, (48, 16, 16), 80, "first"),
        (5, 3, 32, (64,), 600, ""),
        (21, 1, 16, (40, 40), 48, "by row"),
        (1, 20, 16, (130,), 1100, ""),
        (9, 2, 16, (256, 128, 128), 32, ""),
        (9, 2, 16, (256, 256), 32, ""),
    ],
)
def test_every_row_gets_what_its_adapter_adds(
    count: int, num_slots: int, rank: int, widths: tuple[int, ...], width: int, live: str
) -> None:
    ids = torch.randint(-1, num_slots, (count,), generator=torch.Generator().manual_seed(2))
    rows, used = grouped(ids, num_slots, len(widths) * rank, live)
    matrix = adapters(num_slots, rank, width, widths)
    x, out = random(count, width, seed=1), random(count, sum(widths) + 6, seed=3)[:, : sum(widths)]
    expected = lora_reference(x, out, used, matrix)
    plain = out.clone()
    add_lora(x, out, matrix, rows)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(out[used < 0], plain[used < 0])
    assert count == 1 or not torch.equal(out[used >= 0], plain[used >= 0])
    assert rows.loads[:num_slots].tolist() == [int((used == slot).sum()) for slot in range(num_slots)]


def test_a_batch_without_adapters_changes_nothing() -> None:
    rows, _ = grouped(torch.full((9,), -1), 4, 16)
    matrix = adapters(4, 16, 32, (24,))
    out = random(9, 24)
    before = out.clone()
    add_lora(random(9, 32), out, matrix, rows)
    assert torch.equal(out, before) and (rows.blocks[0] == -1).all()


def test_few_rows_of_a_wide_matrix_are_computed_in_parts() -> None:
    wide, fused, narrow = (adapters(1, 16, *sizes) for sizes in ((4096, (64,)), (4096, (64, 64)), (48, (64,))))
    assert [lora_tuning(rows, wide).parts for rows in (16, 256, 4096)] == [8, 8, 1]
    assert [lora_tuning(rows, fused).parts for rows in (16, 256, 4096)] == [8, 4, 1]
    assert lora_tuning(4, narrow)[:2] == (1, 64)
    assert [lora_rank(rank) for rank in (1, 16, 17, 128)] == [16, 16, 32, 128]
