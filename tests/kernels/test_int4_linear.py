import pytest
import torch

from paceline.kernels.int4_linear import (
    Int4Matrix,
    expand_int4,
    expand_int4_reference,
    int4_linear,
    pack_int4,
    quantise_int4,
)
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantised_linear import quantised_linear_reference
from tests.kernels.cases import poisoned, relative_error


def matrix(rows: int, columns: int, group: int, *, zeros: bool) -> tuple[Int4Matrix, torch.Tensor]:
    """A random one, packed, and as numbers. Zeros go up to 16: that is what 15 means in a GPTQ file."""
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group) * 0.01 + 0.001).half()
    zero = torch.randint(0, 17, scales.shape) if zeros else torch.full(scales.shape, 8)
    wide = (values.double() - zero.repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    by_column = values.T.contiguous().T  # as GPTQ and AWQ files have them
    return pack_int4(by_column, scales, zero if zeros else None, group), wide


@pytest.mark.parametrize(("group", "columns"), [(32, 64), (64, 320), (128, 256), (128, 384)])
def test_packed_weights_are_the_same_numbers(group: int, columns: int) -> None:
    """Also where the columns fill no chunk."""
    for zeros in (False, True):
        packed, wide = matrix(5, columns, group, zeros=zeros)
        assert packed.shape == (5, columns) and torch.equal(packed.dequantise(torch.float64), wide)
        found, wanted = poisoned(5, columns, dtype=torch.float32), torch.empty(5, columns)
        expand_int4(packed, found, block_n=4)
        expand_int4_reference(packed, wanted)
        assert torch.equal(found, wanted) and torch.equal(wanted, wide.float())


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "gated", "split_k", "more"),
    [
        (3, 256, 128, True, False, 1, True),
        (9, 384, 128, False, True, 1, False),
        (17, 640, 128, True, False, 2, True),
        (2, 320, 32, True, False, 2, False),
        (5, 192, 64, False, True, 1, True),
    ],
)
def test_int4_weights_give_what_dequantised_ones_give(
    rows: int, columns: int, group: int, zeros: bool, gated: bool, split_k: int, more: bool
) -> None:
    """With bias and residual, with a gate, with split_k; numbers of rows and columns that fill no tile."""
    torch.manual_seed(rows)
    width = 20
    weight, _ = matrix(width * (2 if gated else 1), columns, group, zeros=zeros)
    x = 0.1 * torch.randn(rows, columns)
    bias = torch.randn(width * (2 if gated else 1)) if more else None
    residual = torch.randn(rows, width) if more else None
    out = poisoned(rows, width, dtype=torch.float32) if residual is None else residual.clone()
    workspace = LinearWorkspace(torch.full((2 * rows * width,), torch.nan), torch.zeros(64, dtype=torch.int32))
    tuning = LinearTuning(8, 16, 0, 1, 1, split_k)
    int4_linear(x, weight, out, tuning, bias, gated, None if residual is None else out, workspace)
    assert relative_error(out, quantised_linear_reference(x, weight, bias, gated, residual)) < 1e-5
    assert not workspace.arrived.any()


def test_rounding_to_4_bits_is_within_half_a_step_and_better_with_zeros() -> None:
    torch.manual_seed(2)
    weight = torch.randn(6, 256) * torch.tensor([1e-2, 1.0, 30.0, 0.0, 1.0, 1.0])[:, None]
    weight[4] = weight[4].abs()  # no negative numbers
    errors = []
    for symmetric in (False, True):
        found = quantise_int4(weight, symmetric=symmetric)
        steps = found.scales.view(torch.float16)[:, ::2].float().T.repeat_interleave(128, 1)
        # A zero is rounded to an integer, so that numbers at the end of the range can be off by a whole step.
        assert ((found.dequantise() - weight).abs() <= 1.01 * steps).all()
        errors.append(float((found.dequantise() - weight).norm() / weight.norm()))
    assert errors[0] < 0.95 * errors[1] < 0.13
