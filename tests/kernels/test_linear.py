import pytest
import torch

from paceline.kernels.linear import (
    LinearTuning,
    LinearWorkspace,
    linear,
    linear_reference,
    num_squares,
    summed_tuning,
)
from tests.kernels.cases import poisoned, relative_error

PLAIN = LinearTuning(block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=2)
SUMMED = LinearTuning(block_m=1, block_n=4, block_k=64, num_warps=4, num_stages=1)


@pytest.mark.parametrize(
    ("rows", "tuning", "width"), [(1, PLAIN, 64), (17, PLAIN, 64), (1, SUMMED, 60), (2, SUMMED, 100)]
)
@pytest.mark.parametrize(
    "what",
    [
        "plain",
        "bias",
        "norm",
        "gated",
        "norm gated",
        "norm gated bias",
        "residual",
        "norm bias residual",
        "norm gated gelu",
    ],
)
def test_linear_matches_its_reference(rows: int, tuning: LinearTuning, width: int, what: str) -> None:
    columns = 42
    gated = "gated" in what
    x = torch.randn(rows, width)
    weight = torch.randn(columns * (1 + gated), width)
    bias = torch.randn(columns * (1 + gated)) if "bias" in what else None
    squares = x.square().view(rows, 4, -1).sum(-1) if "norm" in what else None
    eps = 1e-6 if "norm" in what else None
    residual = torch.randn(rows, columns) if "residual" in what else None
    expected = linear_reference(x, weight, bias, eps, gated, residual, gelu="gelu" in what)
    out = poisoned(rows, columns, dtype=torch.float32) if residual is None else residual
    squares_out = poisoned(rows, num_squares(columns, tuning), dtype=torch.float32)
    linear(x, weight, out, tuning, bias, squares, 1e-6, gated, residual, squares_out, gelu="gelu" in what)
    assert relative_error(out, expected) < 1e-5
    assert relative_error(squares_out.sum(-1), expected.square().sum(-1)) < 1e-5


@pytest.mark.parametrize(
    ("width", "columns", "gated", "block_k"),
    [(1024, 3072, True, 1024), (3072, 1024, False, 4096), (5120, 7168, False, 1024), (17408, 5120, False, 1024)],
)
def test_a_thread_has_few_enough_weights_of_a_row_for_its_registers(
    width: int, columns: int, gated: bool, block_k: int
) -> None:
    tuning = summed_tuning(width, columns, gated)
    assert tuning.block_m == 1 and tuning.block_k == block_k
    assert 32 <= tuning.block_n * (1 + gated) * block_k / (32 * tuning.num_warps) <= 128


def test_split_k_adds_to_the_residual_once_and_clears_its_counts() -> None:
    x, weight, residual = torch.randn(17, 128), torch.randn(40, 128), torch.randn(17, 40)
    tuning = LinearTuning(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=2, split_k=4)
    workspace = LinearWorkspace(torch.full((4 * 17 * 40,), torch.nan), torch.zeros(6, dtype=torch.int32))
    for _ in range(2):
        expected = linear_reference(x, weight, residual=residual)
        squares_out = poisoned(17, 3, dtype=torch.float32)
        linear(x, weight, residual, tuning, residual=residual, squares_out=squares_out, workspace=workspace)
        assert relative_error(residual, expected) < 1e-5
        assert relative_error(squares_out.sum(-1), expected.square().sum(-1)) < 1e-5
        assert not workspace.arrived.any()
