import subprocess
import sys

import pytest
import torch

from paceline.kernels.pool_states import pool_states, pool_states_reference
from paceline.kernels.rms_norm import post_norm, post_norm_reference, rms_norm, rms_norm_reference
from paceline.kernels.rope_kv import rope_kv, rope_kv_reference, rope_table, rotate_reference
from paceline.kernels.silu_mul import silu_mul, silu_mul_reference
from paceline.kernels.soft_cap import soft_cap, soft_cap_reference
from tests.kernels.cases import poisoned, random_cache, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def test_kernel_files_import_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import pkgutil, importlib, paceline.kernels as kernels
for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"paceline.kernels.{module.name}")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [64, 96])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_matches_its_reference(dtype: torch.dtype, hidden: int, with_residual: bool) -> None:
    x = torch.randn(3, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype) + 0.5
    residual = torch.randn(3, hidden).to(dtype) if with_residual else None
    expected, total = rms_norm_reference(x, weight, 1e-6, residual)
    out = poisoned(3, hidden, dtype=dtype)
    rms_norm(x, weight, 1e-6, out, residual)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    if residual is not None:
        # The interpreter truncates to bfloat16 where the hardware rounds.
        assert relative_error(residual, total) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_out", [False, True])
def test_post_norm_matches_its_reference(dtype: torch.dtype, has_out: bool) -> None:
    x, residual = (5 * torch.randn(3, 2 * 96).to(dtype))[:, 96:], torch.randn(3, 96).to(dtype)  # strided rows
    weight = torch.rand(96).to(dtype) + 0.5
    expected, total = post_norm_reference(x, weight, 1e-6, residual)
    out = poisoned(3, 96, dtype=dtype) if has_out else None
    post_norm(x, weight, 1e-6, residual, out)
    assert relative_error(residual, total) < TOLERANCE[dtype]
    if out is not None:
        assert relative_error(out, expected) < TOLERANCE[dtype]


def test_rms_norm_of_some_columns_in_place_leaves_the_others() -> None:
    x, weight = torch.randn(3, 160), torch.rand(96) + 0.5
    before, expected = x.clone(), rms_norm_reference(x[:, 32:128], weight, 1e-6)[0]
    rms_norm(x[:, 32:128], weight, 1e-6, x[:, 32:128])
    assert relative_error(x[:, 32:128], expected) < 1e-6
    assert torch.equal(x[:, :32], before[:, :32]) and torch.equal(x[:, 128:], before[:, 128:])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_soft_cap_matches_its_reference(dtype: torch.dtype) -> None:
    logits = 20 * torch.randn(2, 5000).to(dtype)
    logits[0, :3] = torch.tensor([1e4, -1e4, 0.0])
    expected = soft_cap_reference(logits, 7.0)
    soft_cap(logits, 7.0)
    assert relative_error(logits, expected) < TOLERANCE[dtype]
    logits[1, 4] = torch.nan
    soft_cap(logits, 7.0)
    assert logits.isnan().sum() == 1, "a NaN must reach sampling, which reports it"


def test_gelu_mul_matches_its_reference() -> None:
    gate_up, out = 4 * torch.randn(3, 2 * 300), poisoned(3, 300, dtype=torch.float32)
    silu_mul(gate_up, out, gelu=True)
    assert relative_error(out, silu_mul_reference(gate_up, gelu=True)) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [None, 64, 96])
def test_silu_mul_matches_its_reference(dtype: torch.dtype, hidden: int | None) -> None:
    gate_up = torch.randn(3, 2 * 1100).to(dtype)
    stream = None if hidden is None else 3 * torch.randn(3, hidden).to(dtype)
    out = poisoned(3, 1100, dtype=dtype)
    for weights in (None, torch.rand(3)):
        silu_mul(gate_up, out, stream, 1e-2, weights)
        assert relative_error(out, silu_mul_reference(gate_up, stream, 1e-2, weights)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [64, 96])
def test_pooled_states_match_their_reference(dtype: torch.dtype, hidden: int) -> None:
    """Ranges of one token, of part of a tile, of several tiles; with tokens before, between and after them."""
    states = torch.randn(150, hidden).to(dtype)
    ranges = torch.tensor([[3, 4], [4, 36], [40, 149]], dtype=torch.int32)
    out = poisoned(3, hidden, dtype=torch.float32)
    pool_states(states, ranges, out)
    assert relative_error(out, pool_states_reference(states, ranges)) < 1e-6


def test_silu_mul_with_deferred_norm_equals_silu_mul_of_normed_input() -> None:
    x, weight = 5 * torch.randn(3, 96), torch.randn(2 * 40, 96)
    normed, _ = rms_norm_reference(x, torch.ones(96), 1e-6)
    assert relative_error(silu_mul_reference(x @ weight.T, x, 1e-6), silu_mul_reference(normed @ weight.T)) < 1e-5


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 64), (4, 2, 48)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("defer_norm", [False, True])
def test_rope_kv_rotates_and_writes_the_cache(
    page_size: int, q_heads: int, kv_heads: int, head_dim: int, with_norm: bool, defer_norm: bool
) -> None:
    tokens = 5
    cache = random_cache(3, 40, page_size, kv_heads, head_dim, torch.float32)
    k, v = cache.k.clone(), cache.v.clone()
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim)
    slots = torch.tensor([2, 2, 2, 0, 1], dtype=torch.int32)
    positions = torch.tensor([15, 16, 17, 0, 39], dtype=torch.int32)
    turns = torch.tensor([30, 3, 3, 7, 0], dtype=torch.int32)
    table = rope_table(40, head_dim, 1e4)
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if with_norm else (None, None)
    stream = 3 * torch.randn(tokens, 96) if defer_norm else None
    expected = rope_kv_reference(qkv, k, v, cache.page_table, slots, positions, turns, table, *norms, 1e-6, stream)
    q = poisoned(tokens, q_heads, head_dim, dtype=torch.float32)
    rope_kv(qkv, q, cache.k, cache.v, cache.page_table, slots, positions, turns, table, *norms, 1e-6, stream)
    assert relative_error(q, expected) < 1e-6
    assert relative_error(cache.k, k) < 1e-6
    assert relative_error(cache.v, v) < 1e-6 if defer_norm else torch.equal(cache.v, v)


def test_what_a_token_is_rotated_by_does_not_move_it_in_the_cache() -> None:
    """The reference itself: rotated by other positions, keys are written to the places of their own."""
    cache = random_cache(1, 40, 16, 2, 64, torch.float32)
    qkv, table = torch.randn(3, 8 * 64), rope_table(40, 64, 1e4)
    slots, positions = torch.zeros(3, dtype=torch.int32), torch.tensor([4, 20, 39], dtype=torch.int32)
    turns = torch.tensor([17, 4, 20], dtype=torch.int32)
    q = rope_kv_reference(qkv, cache.k, cache.v, cache.page_table, slots, positions, turns, table, None, None, 1e-6)
    heads = qkv.view(3, 8, 64)
    rotated = rotate_reference(heads[:, :6], None, table[turns.long()], 1e-6)
    pages = cache.page_table[0, (positions // 16).long()].long()
    assert torch.equal(q, rotated[:, :4]) and torch.equal(cache.k[pages, (positions % 16).long()], rotated[:, 4:])
    assert torch.equal(cache.v[pages, (positions % 16).long()], heads[:, 6:])


def test_rope_kv_writes_saturated_fp8() -> None:
    """The bits of torch's rounding, subnormal numbers, saturation and NaN; queries saturate in float16."""
    torch.manual_seed(3)
    cache = random_cache(3, 40, 16, 2, 64, torch.float32).in_fp8()
    k, v = cache.k.clone(), cache.v.clone()
    qkv = torch.randn(4, 8 * 64) * torch.exp2(torch.randint(-12, 12, (4, 8 * 64)))
    qkv[1, -1], qkv[0, 0] = torch.nan, 1e6
    slots, positions = torch.tensor([[2, 2, 0, 1], [15, 16, 0, 39]], dtype=torch.int32)
    table = rope_table(40, 64, 1e4)
    rest = (cache.page_table, slots, positions, positions, table, None, None, 1e-6, None)
    expected = rope_kv_reference(qkv, k, v, *rest, cache.scales)
    q = poisoned(4, 4, 64, dtype=torch.float16)
    rope_kv(qkv, q, cache.k, cache.v, *rest, None, cache.scales)
    assert relative_error(q, expected.clamp(-65504, 65504)) < 1e-3 and q.max() == 65504
    for found, wanted in ((cache.k, k), (cache.v, v)):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert cache.v.float().isnan().sum() == 1


def test_rope_kv_does_not_write_decodes_and_padding() -> None:
    """Of six tokens the first two are decodes, which attention writes, and the last is padding."""
    cache = random_cache(3, 40, 16, 2, 64, torch.float32)
    k, v = cache.k.clone(), cache.v.clone()
    qkv, table = torch.randn(6, 8 * 64), rope_table(40, 64, 1e4)
    slots = torch.tensor([2, 1, 0, 0, 1, 0], dtype=torch.int32)
    positions = torch.tensor([15, 16, 17, 18, 39, 0], dtype=torch.int32)
    turns = positions.flip(0).contiguous()
    middle = slice(2, 5)
    expected = rope_kv_reference(
        qkv[middle], k, v, cache.page_table, slots[middle], positions[middle], turns[middle], table, None, None, 1e-6
    )
    q, live = poisoned(6, 4, 64, dtype=torch.float32), torch.tensor([2, 5], dtype=torch.int32)
    rope_kv(qkv, q, cache.k, cache.v, cache.page_table, slots, positions, turns, table, None, None, 1e-6, live=live)
    assert relative_error(q[middle], expected) < 1e-6
    assert q[:2].isnan().all() and q[5:].isnan().all()
    assert relative_error(cache.k, k) < 1e-6 and torch.equal(cache.v, v)
