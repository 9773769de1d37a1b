import pytest
import torch

from paceline.kernels.move_pages import collect_pages, collect_pages_reference, place_pages, place_pages_reference
from tests.kernels.cases import poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 2048 + 96])
def test_pages_are_collected_and_placed_as_in_the_references(dtype: torch.dtype, size: int) -> None:
    kv = torch.randn(6, 9, size).to(dtype)
    pages = torch.tensor([7, 0, 3], dtype=torch.int32)
    buffer = poisoned(3, 6, size, dtype=dtype)
    collect_pages(kv, pages, buffer)
    assert torch.equal(buffer, collect_pages_reference(kv, pages))
    others = torch.tensor([1, 8, 4], dtype=torch.int32)
    expected = place_pages_reference(kv, others, buffer)
    place_pages(kv, others, buffer)
    assert torch.equal(kv, expected)
