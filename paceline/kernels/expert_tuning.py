"""Tiles of the GEMMs of a mixture of experts, by format of the weights and number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.kernels.expert_weights import CHUNK, ExpertMatrices, Mxfp4Experts
from paceline.kernels.route_experts import LISTED_ROWS


@dataclass(frozen=True, slots=True)
class ExpertTile:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    block_m: int  # 1: one row, without tl.dot
    gate_up: ExpertTile
    down: ExpertTile
    split: int = 1  # programs that share the experts of a tile of `down`, with up to LISTED_ROWS rows


TunedExperts = Callable[[int, int, int], ExpertTuning]  # rows, experts per token, experts


def expert_tuning(rows: int, num_chosen: int, num_experts: int) -> ExpertTuning:
    """The fastest tiles on an H200 for Qwen3-30B-A3B. Blocks have room for about twice the mean number of rows of an
    expert: most experts then need one block, which reads their weights once."""
    mean = rows * num_chosen / num_experts
    if rows == 1:  # no faster than tl.dot alone, but programs are small, so that those of the next kernel start early
        return ExpertTuning(1, ExpertTile(2, 2048, 4, 1), ExpertTile(8, 1024, 8, 1), split=2)
    if rows <= LISTED_ROWS:
        gate_up = ExpertTile(32, 128, 4, 4) if rows <= 2 else ExpertTile(32, 256, 4, 3)
        return ExpertTuning(LISTED_ROWS, gate_up, ExpertTile(32, 128, 4, 10), split=4)
    if mean <= 8:
        return ExpertTuning(16, ExpertTile(32, 256, 4, 3), ExpertTile(128, 128, 4, 3))
    if mean <= 20:
        return ExpertTuning(32, ExpertTile(64, 128, 4, 3), ExpertTile(128, 128, 4, 3))
    if mean <= 64:
        return ExpertTuning(64, ExpertTile(64, 64, 4, 4), ExpertTile(128, 64, 4, 4))
    return ExpertTuning(128, ExpertTile(128, 64, 8, 4), ExpertTile(256, 64, 8, 3))


def fp8_expert_tuning(rows: int, num_chosen: int, num_experts: int) -> ExpertTuning:
    """As `expert_tuning`, for experts in FP8. Tiles have the columns of one scale; with many rows they are smaller,
    since sums with and without scales are in registers at once. Not tuned: those that spill none."""
    mean = rows * num_chosen / num_experts
    if rows <= LISTED_ROWS:
        return ExpertTuning(LISTED_ROWS, ExpertTile(32, 128, 4, 5), ExpertTile(32, 128, 4, 10), split=4)
    if mean <= 8:
        return ExpertTuning(16, ExpertTile(32, 128, 4, 5), ExpertTile(128, 128, 4, 3))
    if mean <= 20:
        return ExpertTuning(32, ExpertTile(32, 128, 4, 4), ExpertTile(128, 128, 4, 3))
    if mean <= 64:
        return ExpertTuning(64, ExpertTile(64, 64, 4, 4), ExpertTile(128, 64, 4, 4))
    return ExpertTuning(128, ExpertTile(64, 64, 8, 4), ExpertTile(128, 64, 8, 4))


def mxfp4_expert_tuning(rows: int, num_chosen: int, num_experts: int) -> ExpertTuning:
    """As `fp8_expert_tuning`, for gpt-oss-20b. Tiles have the columns of a chunk."""
    mean = rows * num_chosen / num_experts
    if rows <= LISTED_ROWS:
        gate_up = ExpertTile(32, CHUNK, 4, 8) if rows <= 2 else ExpertTile(64, CHUNK, 4, 6)
        return ExpertTuning(LISTED_ROWS, gate_up, ExpertTile(32, CHUNK, 4, 10), split=4)
    if mean <= 8:
        return ExpertTuning(16, ExpertTile(64, CHUNK, 4, 6), ExpertTile(128, CHUNK, 4, 4))
    if mean <= 20:
        return ExpertTuning(32, ExpertTile(64, CHUNK, 4, 4), ExpertTile(128, CHUNK, 4, 4))
    if mean <= 64:
        return ExpertTuning(64, ExpertTile(32, CHUNK, 4, 4), ExpertTile(64, CHUNK, 4, 4))
    return ExpertTuning(128, ExpertTile(64, CHUNK, 8, 4), ExpertTile(64, CHUNK, 8, 4))


def tuning_of(weight: ExpertMatrices) -> TunedExperts:
    """The tiles for matrices of this format."""
    if isinstance(weight, torch.Tensor):
        return expert_tuning
    return mxfp4_expert_tuning if isinstance(weight, Mxfp4Experts) else fp8_expert_tuning
