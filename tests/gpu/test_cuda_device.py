"""The whole engine on a GPU: right tokens, and the same ones however it is overlapped."""

from __future__ import annotations

from paceline.bench.offline import Bench


def test_greedy_tokens_are_as_good_as_plain_torch_and_overlap_changes_none() -> None:
    Bench("qwen3-0.6b", repeats=1, batches=(), options={}).check()
