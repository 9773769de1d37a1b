import pytest
import torch

from paceline.kernels.groupwise_linear import (
    GroupwiseMatrix,
    expand_groupwise,
    expand_groupwise_reference,
    groupwise_linear,
    pack_groupwise,
    pack_with_offsets,
    quantize_int4,
)
from paceline.kernels.linear import LinearTuning, LinearWorkspace
from paceline.kernels.quantized_linear import quantized_linear_reference
from tests.kernels.cases import poisoned, relative_error


def matrix(rows: int, columns: int, group: int, *, zeros: bool) -> tuple[GroupwiseMatrix, torch.Tensor]:
    """A random one, packed, and as numbers. Zeros go up to 16: that is what 15 means in a GPTQ file."""
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group) * 0.01 + 0.001).half()
    zero = torch.randint(0, 17, scales.shape) if zeros else torch.full(scales.shape, 8)
    wide = (values.double() - zero.repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    by_column = values.T.contiguous().T  # as GPTQ and AWQ files have them
    return pack_groupwise(by_column, scales, zero if zeros else None, group), wide


def matrix_with_offsets(rows: int, columns: int, bits: int) -> tuple[GroupwiseMatrix, torch.Tensor]:
    """As GGUF files have them, with all numbers that there are. The second: rounded to float16, as kernels do."""
    low, high = (0, 16) if bits == 4 else (-128, 128)
    values = torch.randint(low, high, (rows, columns), dtype=torch.int8)
    scales, offsets = (torch.randn(rows, -(-columns // 32)).half() * 0.01 for _ in range(2))
    scales[0, 0] = 0.0  # all weights of a group are the same
    offsets[1] = -8 * scales[1]
    wide = values.double() * scales.double().repeat_interleave(32, 1)[:, :columns]
    wide += offsets.double().repeat_interleave(32, 1)[:, :columns]
    return pack_with_offsets(values, scales, offsets, bits=bits), wide.half().double()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [128, 96, 200])
def test_packed_weights_with_offsets_are_the_same_numbers(columns: int, bits: int) -> None:
    torch.manual_seed(bits)
    packed, wide = matrix_with_offsets(5, columns, bits)
    assert packed.shape == (5, columns) and torch.equal(packed.dequantize(torch.float64), wide)
    found, wanted = poisoned(5, columns, dtype=torch.float32), torch.empty(5, columns)
    expand_groupwise(packed, found, block_n=4)
    expand_groupwise_reference(packed, wanted)
    assert torch.equal(found, wanted) and torch.equal(wanted, wide.float())


@pytest.mark.parametrize(("group", "columns"), [(32, 64), (64, 320), (128, 256), (128, 384)])
def test_packed_weights_are_the_same_numbers(group: int, columns: int) -> None:
    """Also where the columns fill no chunk."""
    for zeros in (False, True):
        packed, wide = matrix(5, columns, group, zeros=zeros)
        assert packed.shape == (5, columns) and torch.equal(packed.dequantize(torch.float64), wide)
        found, wanted = poisoned(5, columns, dtype=torch.float32), torch.empty(5, columns)
        expand_groupwise(packed, found, block_n=4)
        expand_groupwise_reference(packed, wanted)
        assert torch.equal(found, wanted) and torch.equal(wanted, wide.float())


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "gated", "split_k", "more"),
    [
        (3, 256, "128, zeros", False, 1, True),
        (9, 384, "128", True, 1, False),
        (17, 640, "128, zeros", False, 2, True),
        (2, 320, "32, zeros", False, 2, False),
        (5, 192, "64", True, 1, True),
        (3, 256, "4 bits, offsets", False, 2, True),
        (9, 160, "4 bits, offsets", True, 1, False),
        (17, 200, "8 bits, offsets", False, 2, False),
        (2, 128, "8 bits, offsets", True, 1, True),
    ],
)
def test_weights_in_groups_give_what_dequantized_ones_give(
    rows: int, columns: int, kind: str, gated: bool, split_k: int, more: bool
) -> None:
    """With bias and residual, with a gate, with split_k; numbers of rows and columns that fill no tile."""
    torch.manual_seed(rows)
    width = 20
    width_of_weight, first = width * (2 if gated else 1), int(kind.split(",")[0].split()[0])
    if "offsets" in kind:
        weight, _ = matrix_with_offsets(width_of_weight, columns, first)
    else:
        weight, _ = matrix(width_of_weight, columns, first, zeros="zeros" in kind)
    x = 0.1 * torch.randn(rows, columns)
    bias = torch.randn(width * (2 if gated else 1)) if more else None
    residual = torch.randn(rows, width) if more else None
    out = poisoned(rows, width, dtype=torch.float32) if residual is None else residual.clone()
    workspace = LinearWorkspace(torch.full((2 * rows * width,), torch.nan), torch.zeros(64, dtype=torch.int32))
    tuning = LinearTuning(8, 16, 0, 1, 1, split_k)
    groupwise_linear(x, weight, out, tuning, bias, gated, None if residual is None else out, workspace)
    assert relative_error(out, quantized_linear_reference(x, weight, bias, gated, residual)) < 1e-5
    assert not workspace.arrived.any()


def test_rounding_to_4_bits_is_within_half_a_step_and_better_with_zeros() -> None:
    torch.manual_seed(2)
    weight = torch.randn(6, 256) * torch.tensor([1e-2, 1.0, 30.0, 0.0, 1.0, 1.0])[:, None]
    weight[4] = weight[4].abs()  # no negative numbers
    errors = []
    for symmetric in (False, True):
        found = quantize_int4(weight, symmetric=symmetric)
        steps = found.scales.view(torch.float16)[:, ::2].float().T.repeat_interleave(128, 1)
        # A zero is rounded to an integer, so that numbers at the end of the range can be off by a whole step.
        assert ((found.dequantize() - weight).abs() <= 1.01 * steps).all()
        errors.append(float((found.dequantize() - weight).norm() / weight.norm()))
    assert errors[0] < 0.95 * errors[1] < 0.13
