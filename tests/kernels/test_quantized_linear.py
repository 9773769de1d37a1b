import pytest
import torch

from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantized_linear import (
    quantize_fp8,
    quantized_linear,
    quantized_linear_reference,
)
from tests.kernels.cases import poisoned, relative_error


@pytest.mark.parametrize(
    ("rows", "gated", "split_k", "more"), [(3, False, 1, True), (20, True, 1, False), (17, False, 2, True)]
)
def test_quantized_weights_give_what_dequantized_ones_give(rows: int, gated: bool, split_k: int, more: bool) -> None:
    """With bias and residual, with a gate, with split_k; numbers of columns that fill no tile."""
    torch.manual_seed(rows)
    columns, width = 40, 200
    num_rows = columns * (2 if gated else 1)
    weight = quantize_fp8(torch.randn(num_rows, width) * torch.exp2(torch.randint(-9, 2, (num_rows, 1))))
    x = 0.01 * torch.randn(rows, width)
    bias = torch.randn(columns) if more else None
    residual = torch.randn(rows, columns) if more else None
    out = poisoned(rows, columns, dtype=torch.float32) if residual is None else residual.clone()
    workspace = LinearWorkspace(torch.full((2 * rows * columns,), torch.nan), torch.zeros(64, dtype=torch.int32))
    quantized_linear(
        x,
        weight,
        out,
        LinearTuning(16, 16, 64, 1, 1, split_k),
        bias,
        gated,
        None if residual is None else out,
        workspace,
    )
    assert relative_error(out, quantized_linear_reference(x, weight, bias, gated, residual)) < 1e-5
    assert not workspace.arrived.any()


def test_fp8_weights_are_within_three_bits_of_the_original() -> None:
    weight = torch.randn(5, 300) * torch.tensor([1e-5, 1.0, 300.0, 0.0, 1e4])[:, None]
    found = quantize_fp8(weight)
    assert found.values.float().abs().max() == 448
    assert ((found.dequantize() - weight).abs() <= weight.abs() / 16 + found.factors[:, None] * 2**-10).all()
