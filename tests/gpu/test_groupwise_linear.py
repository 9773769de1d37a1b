"""GEMMs with weights in groups, by the tiles that the engine uses, against float64: `pytest -m gpu tests/gpu`."""

import pytest
import torch

from paceline.engine.linear.groupwise import TUNED_ROWS, groupwise_tuning
from paceline.kernels.groupwise_linear import (
    expand_groupwise,
    groupwise_linear,
    pack_groupwise,
    pack_with_offsets,
)
from paceline.kernels.linear import LinearWorkspace
from paceline.kernels.quantized_linear import quantized_linear_reference
from tests.kernels.cases import poisoned, relative_error


@pytest.mark.parametrize(("group", "offset_bits"), [(32, 0), (64, 0), (128, 0), (32, 4), (32, 8)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("columns", [1024, 1152])
def test_groupwise_linear_at_size(group: int, offset_bits: int, gated: bool, columns: int) -> None:
    """1,152 columns are no multiple of a chunk. The bits are the same in two runs."""
    torch.manual_seed(group)
    width = 1504
    num_rows = width * (2 if gated else 1)
    values = torch.randint(0, 16, (num_rows, columns), dtype=torch.uint8)
    scales = (0.5 + torch.rand(num_rows, columns // group)) * 0.2 * columns**-0.5
    zeros = torch.randint(0, 17, scales.shape)
    if offset_bits:
        values = values if offset_bits == 4 else torch.randint(-128, 128, values.shape)
        scales = scales if offset_bits == 4 else scales / 16
        signed, offsets = values.to(torch.int8).cuda(), (-7.5 if offset_bits == 4 else 0.5) * scales.cuda()
        weight = pack_with_offsets(signed, scales.cuda(), offsets, bits=offset_bits)
    else:
        weight = pack_groupwise(values.cuda(), scales.cuda(), zeros.cuda(), group)
    wide = poisoned(num_rows, columns, dtype=torch.float32, device="cuda")
    expand_groupwise(weight, wide)
    assert torch.equal(wide, weight.dequantize())
    bias = torch.randn(num_rows, device="cuda").bfloat16()
    for rows in TUNED_ROWS:
        x, stream = torch.randn(rows, columns, device="cuda").half(), torch.randn(rows, width, device="cuda").bfloat16()
        residual = None if gated else stream
        expected = quantized_linear_reference(x, weight, bias, gated, residual)
        workspace = LinearWorkspace(
            torch.empty(8 * rows * width, device="cuda"), torch.zeros(4096, dtype=torch.int32, device="cuda")
        )
        found = []
        for _ in range(2):
            out = poisoned(rows, width, dtype=torch.float16 if gated else torch.bfloat16, device="cuda")
            groupwise_linear(x, weight, out, groupwise_tuning(rows, gated), bias, gated, residual, workspace)
            found.append(out)
        assert relative_error(found[0], expected) < 1e-2
        assert torch.equal(*found) and not workspace.arrived.any()
