"""Router and GEMMs of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.kernels.expert_tuning import ExpertTile, ExpertTuning
from paceline.kernels.expert_weights import (
    ExpertMatrices,
    pack_mxfp4,
    quantize_fp8_experts,
    quantize_mxfp4,
    values_of,
)
from paceline.kernels.experts import (
    ClampedSwiglu,
    ExpertWorkspace,
    add_down,
    add_gate_up,
    experts_reference,
    num_squares,
)
from paceline.kernels.route_experts import (
    LISTED_ROWS,
    LiveRows,
    RoutedRows,
    RouterOptions,
    max_blocks,
    route,
    route_reference,
)
from paceline.model.mxfp4_tensors import dequantize_mxfp4
from tests.kernels.cases import relative_error

HIDDEN, FFN, EPS = 48, 40, 1e-6
PLAIN = RouterOptions(num_experts=6, num_chosen=2)
Quantize = Callable[[Tensor], ExpertMatrices]


def tuning(rows: int, block_m: int = 16, split: int = 2, *, summed: bool = False) -> ExpertTuning:
    """summed: one row, without tl.dot."""
    block_m = 1 if summed else LISTED_ROWS if rows <= LISTED_ROWS else block_m
    return ExpertTuning(block_m, *[ExpertTile(4 if summed else 16, 32, 4, 2)] * 2, split=split)


def dense(options: RouterOptions, ids: Tensor, weights: Tensor) -> Tensor:
    """[rows, experts]"""
    return weights.new_zeros(len(ids), options.num_experts).scatter_(1, ids, weights)


class Layer:
    """Random weights, and buffers for up to so many rows. gpt_oss: with biases and its activation. quantized: the
    formats of gate and up, and of down."""

    def __init__(
        self,
        options: RouterOptions,
        max_rows: int,
        gpt_oss: bool = False,
        quantized: tuple[Quantize, ...] = (),
        hidden: int = HIDDEN,
        ffn: int = FFN,
    ) -> None:
        count = options.num_experts
        self.options = options
        sizes = {"router": (count,), "gate_up": (count, 2 * ffn), "down": (count, hidden)}
        self.biases = {name: torch.randn(*shape) if gpt_oss else None for name, shape in sizes.items()}
        self.clamped = ClampedSwiglu(alpha=1.7, limit=0.9) if gpt_oss else None
        self.router = torch.randn(count + options.shared, hidden)
        self.gate_up: ExpertMatrices = torch.randn(count, 2 * ffn, hidden) / 5
        self.down: ExpertMatrices = torch.randn(count, hidden, ffn) / 5
        self.routed = RoutedRows.empty(max_rows, options, "cpu")
        self.workspace = ExpertWorkspace.empty(max_rows, options.num_chosen, count, ffn, hidden, self.down)
        if quantized:
            self.gate_up, self.down = (
                make(one) for make, one in zip(quantized, (self.gate_up, self.down), strict=True)
            )
        self.load = torch.zeros(count, dtype=torch.int64)
        for buffer in (self.workspace.act, self.workspace.parts, self.workspace.partials, self.routed.matrix):
            buffer.fill_(torch.nan)  # what an earlier pass may have left

    def run(
        self,
        x: Tensor,
        tuned: ExpertTuning,
        eps: float | None = EPS,
        residual: Tensor | None = None,
        live: LiveRows | None = None,
    ) -> Tensor:
        sizes = {"block_m": tuned.block_m, "eps": eps, "bias": self.biases["router"], "live": live}
        route(x, self.router, self.options, self.routed, self.load, **sizes)
        out = torch.full_like(x, torch.nan) if residual is None else residual
        gated = {"bias": self.biases["gate_up"], "clamped": self.clamped, "normed": eps is not None}
        add_gate_up(x, self.gate_up, self.routed, self.workspace, tuned, **gated)
        squares = torch.full((len(x), num_squares(*x.shape, tuned)), torch.nan)
        added = {"bias": self.biases["down"], "residual": residual, "squares_out": squares}
        add_down(self.down, self.routed, self.workspace, out, tuned, **added)
        torch.testing.assert_close(squares.sum(-1), out.square().sum(-1), equal_nan=True)
        return out

    def expected(self, x: Tensor, eps: float | None = EPS, residual: Tensor | None = None) -> Tensor:
        ids, weights = route_reference(x, self.router, self.options, eps, self.biases["router"])
        biases = self.biases["gate_up"], self.biases["down"]
        return experts_reference(x, ids, weights, self.gate_up, self.down, eps, residual, *biases, self.clamped)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        RouterOptions(num_experts=40, num_chosen=5, renormalise=False, shared=True),
        RouterOptions(num_experts=7, num_chosen=7, sigmoid=True),
        RouterOptions(num_experts=3, num_chosen=1, sigmoid=True, renormalise=False, shared=True),
    ],
    ids=["softmax", "shared", "all experts", "one expert"],
)
def test_experts_match_their_reference(options: RouterOptions, rows: int) -> None:
    torch.manual_seed(rows)
    layer, x, residual = Layer(options, rows), torch.randn(rows, HIDDEN) * 3, torch.randn(rows, HIDDEN)
    ids, weights = route_reference(x, layer.router, options, EPS)
    for summed in (False, rows == 1):  # counters are reset
        expected = layer.expected(x, EPS, residual)
        assert relative_error(layer.run(x, tuning(rows, summed=summed), EPS, residual), expected) < 1e-5
        assert relative_error(layer.routed.matrix, dense(options, ids, weights)) < 1e-5
    assert torch.equal(layer.load, 2 * torch.bincount(ids.flatten(), minlength=options.num_experts))
    if options.shared:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        assert relative_error(layer.routed.shared_weights, torch.sigmoid(normed @ layer.router[-1])) < 1e-5


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("split", [1, 3])
def test_experts_with_biases_and_clamped_swiglu(rows: int, split: int) -> None:
    """Padding has no bias either."""
    torch.manual_seed(rows)
    layer, x, residual = Layer(PLAIN, rows, gpt_oss=True), torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    expected = layer.expected(x, EPS, residual)
    tiles = tuning(rows, split=split, summed=rows == 1 and split > 1)
    assert relative_error(layer.run(x, tiles, EPS, residual.clone()), expected) < 1e-5
    live = LiveRows(torch.tensor([rows // 2], dtype=torch.int32), by_row=False)
    found = layer.run(x, tiles, EPS, residual.clone(), live)
    expected[rows // 2 :] = residual[rows // 2 :]
    assert relative_error(found, expected) < 1e-5


def scaled_apart(weight: Tensor) -> Tensor:
    """With experts, rows and columns of different magnitudes, which need scales of their own."""
    factors = [torch.exp2(torch.randint(-6, 1, (size,)).float()) for size in weight.shape]
    return weight * factors[0][:, None, None] * factors[1][:, None] * factors[2]


FORMATS: dict[str, tuple[Quantize, Quantize]] = {
    "fp8 rows": (lambda weight: quantize_fp8_experts(scaled_apart(weight)),) * 2,
    # As a rank has them: gate and up have 40 rows each, and down has 40 columns.
    "fp8 blocks": (
        lambda weight: quantize_fp8_experts(scaled_apart(weight), (8, 32)),
        lambda weight: quantize_fp8_experts(scaled_apart(weight), (16, 16)),
    ),
    "mxfp4": (lambda weight: quantize_mxfp4(scaled_apart(weight)),) * 2,
}


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts_give_what_dequantized_ones_give(name: str, rows: int) -> None:
    """With biases and a norm that is computed before, since it cannot be folded into the weights."""
    torch.manual_seed(rows)
    # MXFP4: parts of chunks, and of groups of four scales.
    hidden, ffn = (160, 96) if name == "mxfp4" else (HIDDEN, FFN)
    layer = Layer(PLAIN, rows, True, FORMATS[name], hidden, ffn)
    x, residual = torch.randn(rows, hidden), torch.randn(rows, hidden)
    expected = layer.expected(x, None, residual)
    tiles = tuning(rows, split=3, summed=rows == 1 and name == "fp8 blocks")
    assert relative_error(layer.run(x, tiles, None, residual.clone()), expected) < 1e-5
    rounded = values_of(layer.gate_up), values_of(layer.down)
    assert all(one.dtype is not torch.float32 for one in rounded)


def test_mxfp4_experts_have_the_nearest_numbers() -> None:
    torch.manual_seed(9)
    weight = scaled_apart(torch.randn(2, 5, 160))
    found = quantize_mxfp4(weight)
    scale = torch.exp2(weight.view(2, 5, 5, 32).abs().amax(-1).log2().floor() - 2).repeat_interleave(32, -1)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distances = (weight.abs() / scale)[..., None] - numbers
    nearest = numbers[distances.abs().argmin(-1)] * scale * weight.sign()
    assert torch.equal(found.dequantize(), nearest)
    assert torch.equal(found.dequantize(torch.bfloat16).float(), nearest), "bfloat16 holds every number"


def test_mxfp4_experts_are_packed_as_they_are_stored() -> None:
    """All numbers and the smallest and largest scales; the third group is alone in its word."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(2, 16, 3, 16)
    scales = torch.tensor([100, 120, 140], dtype=torch.uint8).expand(2, 16, 3).contiguous()
    scales[1] += 7
    found = pack_mxfp4(blocks, scales)
    assert found.shape == (2, 16, 96) and found.values.shape == (2, 16, 32) and found.scales.shape == (2, 1, 16)
    assert torch.equal(found.dequantize(), dequantize_mxfp4(blocks, scales))


def test_fp8_experts_are_within_three_bits_of_the_original() -> None:
    torch.manual_seed(8)
    weight = scaled_apart(torch.randn(3, 32, 40))
    for block in (None, (16, 16)):
        found = quantize_fp8_experts(weight, block)
        scales = found.scales.transpose(1, 2).repeat_interleave(found.rows, 1).repeat_interleave(found.columns, 2)
        error = (found.dequantize() - weight).abs()
        assert (error <= weight.abs() / 16 + scales[..., :40] * 2**-10).all()
        assert found.num_bytes < weight.numel() * 1.2


@pytest.mark.parametrize("rows", [2, 3, 40])
def test_experts_without_a_norm_or_a_residual(rows: int) -> None:
    torch.manual_seed(1)
    layer, x = Layer(PLAIN, 64), torch.randn(rows, HIDDEN)
    assert relative_error(layer.run(x, tuning(rows, split=1), None), layer.expected(x, None)) < 1e-5


@pytest.mark.parametrize(("rows", "block_m"), [(16, 16), (50, 16), (50, 64)])
def test_all_rows_choose_the_same_experts(rows: int, block_m: int) -> None:
    torch.manual_seed(2)
    layer, x = Layer(PLAIN, rows), torch.randn(rows, HIDDEN)
    layer.router[:] = 0
    x[:, 0] = 9
    layer.router[4, 0], layer.router[2, 0] = 2.0, 1.0
    assert relative_error(layer.run(x, tuning(rows, block_m)), layer.expected(x)) < 1e-5
    assert layer.load.tolist() == [0, 0, rows, 0, rows, 0]


@pytest.mark.parametrize("rows", [2, 5, 20])
def test_of_equal_experts_the_first_are_chosen(rows: int) -> None:
    layer, x = Layer(RouterOptions(num_experts=40, num_chosen=5), rows), torch.ones(rows, HIDDEN)
    layer.router[:] = 0
    layer.router[33] = 1.0
    layer.run(x, tuning(rows))
    assert torch.equal(layer.load.nonzero()[:, 0], torch.tensor([0, 1, 2, 3, 33]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes with NaN in the interpreter
@pytest.mark.parametrize("rows", [5, 33])
def test_a_row_that_is_not_finite_stays_alone(rows: int) -> None:
    torch.manual_seed(3)
    layer, x = Layer(PLAIN, rows), torch.randn(rows, HIDDEN)
    expected = layer.expected(x)
    x[2] = torch.nan
    x[3, 7] = torch.inf
    found = layer.run(x, tuning(rows))
    assert not torch.isfinite(found[2:4]).any()
    assert (layer.load.sum() == rows * PLAIN.num_chosen).all()
    rest = [row for row in range(rows) if row not in (2, 3)]
    assert relative_error(found[rest], expected[rest]) < 1e-5


@pytest.mark.parametrize("rows", [9, 30])
def test_other_rows_do_not_change_the_bits_of_a_row(rows: int) -> None:
    # The rows of a batch and its padding must not matter: an expert's pairs keep their order.
    torch.manual_seed(4)
    layer, x = Layer(PLAIN, rows), torch.randn(rows, HIDDEN)
    first = layer.run(x, tuning(rows, split=1))
    other = torch.cat([x[:4], torch.randn(rows - 4, HIDDEN)])
    assert torch.equal(layer.run(other, tuning(rows, split=1))[:4], first[:4])


@pytest.mark.parametrize("rows", [9, 30])
@pytest.mark.parametrize("by_row", [False, True])
def test_padding_uses_no_expert(by_row: bool, rows: int) -> None:
    torch.manual_seed(6)
    layer, x, residual = Layer(PLAIN, rows), torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    is_live = torch.arange(rows) % 2 == 0 if by_row else torch.arange(rows) < 5
    values = torch.where(is_live, 3, -1) if by_row else torch.tensor([5])
    x[~is_live, 0] = torch.nan  # what an earlier pass may have left
    ids, weights = route_reference(x[is_live], layer.router, PLAIN, EPS)
    expected = experts_reference(x[is_live], ids, weights, layer.gate_up, layer.down, EPS, residual[is_live])
    found = layer.run(x, tuning(rows), EPS, residual.clone(), LiveRows(values.int(), by_row))
    assert relative_error(found[is_live], expected) < 1e-5
    assert torch.equal(found[~is_live], residual[~is_live])
    assert torch.equal(layer.load, torch.bincount(ids.flatten(), minlength=PLAIN.num_experts))


def test_padding_after_a_full_batch_leaves_none_of_its_blocks() -> None:
    """The grid of the GEMMs follows from the rows of a graph, not from those that are live."""
    torch.manual_seed(7)
    rows, is_live = 75, torch.arange(75) < 20
    layer, x, residual = Layer(PLAIN, rows), torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    layer.run(torch.randn(rows, HIDDEN), tuning(rows))
    ids, weights = route_reference(x[is_live], layer.router, PLAIN, EPS)
    expected = experts_reference(x[is_live], ids, weights, layer.gate_up, layer.down, EPS, residual[is_live])
    found = layer.run(x, tuning(rows), EPS, residual.clone(), LiveRows(torch.tensor([20], dtype=torch.int32), False))
    assert relative_error(found[is_live], expected) < 1e-5
    used = layer.routed.blocks[0, : max_blocks(rows * PLAIN.num_chosen, PLAIN.num_experts, tuning(rows).block_m)]
    ends = layer.routed.blocks[2, : len(used)][used >= 0]
    assert int(ends.max()) <= 20 * PLAIN.num_chosen, "a block of the batch before"


def test_many_rows_are_routed_by_one_program_for_all_experts() -> None:
    torch.manual_seed(5)
    rows = 2100
    layer, x = Layer(PLAIN, 1), torch.randn(rows, HIDDEN)
    routed = RoutedRows.empty(rows, PLAIN, "cpu")
    route(x, layer.router, PLAIN, routed, layer.load, block_m=128, eps=EPS)
    ids, weights = route_reference(x, layer.router, PLAIN, EPS)
    assert torch.equal(routed.ids.long(), ids)
    assert relative_error(routed.matrix, dense(PLAIN, ids, weights)) < 1e-5
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(routed.sorted.long(), order)
    seen = []
    for expert, first, end in routed.blocks[:, : 2 * rows // 128 + PLAIN.num_experts].T.tolist():
        if expert >= 0:
            pairs = routed.sorted[first : min(first + 128, end)].long()
            assert len(pairs) > 0 and (ids.flatten()[pairs] == expert).all()
            seen += pairs.tolist()
    assert seen == order.tolist()
