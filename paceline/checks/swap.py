"""KV pages that are spilled to host memory and fetched back."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from paceline.checks.harness import ROUNDING, CheckResult, CheckSetup, greedy, margin, random_prompts, tokens_of
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.cuda.streams import CudaEvent
from paceline.engine.cuda.swap import CudaSwap
from paceline.scheduler.plan import Column


class _PageComparison:
    """Keeps a checksum of every page that is spilled and compares it when the page is fetched.

    Runs on the stream of the engine, in order with the forward passes, and synchronizes nothing.
    """

    def __init__(self, swap: CudaSwap) -> None:
        self._swap, self._spill, self._fetch = swap, swap.spill, swap.fetch
        self._left: dict[int, Tensor] = {}  # by host page
        self._differ: list[Tensor] = []
        self._weights: Tensor | None = None
        swap.spill, swap.fetch = self.spill, self.fetch  # type: ignore[method-assign]

    def spill(self, pages: Tensor, hosts: Column) -> None:
        self._left.update(zip(hosts.tolist(), self._sums(pages).unbind(), strict=True))
        self._spill(pages, hosts)

    def fetch(self, pages: Tensor, hosts: Column, began: CudaEvent, arrived: CudaEvent) -> None:
        self._fetch(pages, hosts, began, arrived)
        left = torch.stack([self._left[host] for host in hosts.tolist()])
        self._differ.append(left != self._sums(pages))

    def _sums(self, pages: Tensor) -> Tensor:
        """One checksum per page, which depends on every bit and its position."""
        found = self._swap.kv.read(pages.long())
        bits = found.view(torch.int16 if found.dtype.itemsize == 2 else torch.int32).long()
        if self._weights is None:
            self._weights = 2 * torch.arange(bits.shape[1], device=bits.device) + 1
        return (bits * self._weights).sum(1)

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._differ))

    @property
    def num_wrong(self) -> int:
        return sum(int(each.sum()) for each in self._differ)


def check_swap(
    setup: CheckSetup,
    *,
    chats: int = 24,
    turns: int = 4,
    longest: int = 1500,
    num_tokens: int = 16,
    kv_tokens: int = 12_000,
) -> CheckResult:
    """Conversations that do not fit into the KV cache, turn by turn: every fetched page is bitwise equal to the spilled
    one, and greedy tokens are within the margin. On four layers."""
    spec, rng = setup.spec(4), random.Random(9)
    histories = random_prompts(rng, spec.vocab_size, chats, longest)
    asked: list[list[int]] = []
    answers: list[list[int]] = []
    options: dict[str, Any] = {"num_host_pages": 8 * kv_tokens // 16, "max_swap_pages": 48, "host_page_cost": 0.0}
    if setup.options.get("host_kv_tokens"):
        del options["num_host_pages"]
    with setup.llm(spec, kv_tokens=kv_tokens, **options) as llm:
        device = llm.engine.executor
        recorder = (
            _PageComparison(device.swap) if isinstance(device, CudaExecutor) and device.swap is not None else None
        )
        for _ in range(turns):
            rng.shuffle(histories)
            found = tokens_of(llm, histories, greedy([num_tokens] * chats))
            asked += histories
            answers += found
            questions = random_prompts(rng, spec.vocab_size, chats, max(2, longest // 8))
            histories = [[*before, *said, *new] for before, said, new in zip(histories, found, questions, strict=True)]
        faults = llm.engine.call(lambda scheduler: scheduler.check_idle(llm.engine.clock())).result()
        counters = llm.engine.scheduler.counters
        num_wrong = recorder.num_wrong if recorder is not None else 0
        compared = (
            f"{recorder.num_pages} pages compared, {num_wrong} of them wrong"
            if recorder is not None
            else "none compared"
        )
    reference, plain = setup.decoder(spec, "float32"), setup.decoder(spec)
    some = slice(0, None, 4)
    ours = margin(reference, asked[some], answers[some])
    theirs = margin(reference, asked[some], answers[some], plain)
    bound = 1.5 * theirs.worst + ROUNDING
    return CheckResult(
        counters.fetched_tokens > 0 and not num_wrong and not faults and ours.worst < bound,
        f"{chats} conversations of {turns} turns in {kv_tokens} tokens of KV: {counters.spilled_pages} pages spilled, "
        f"{counters.fetched_tokens} tokens fetched, {counters.hit_tokens} cached on the device, "
        f"{counters.computed_tokens} computed; {compared}; {ours.judged} greedy tokens, {ours.wrong} not the float32 "
        f"argmax, worst margin {ours.worst:.3f} (plain torch {theirs.wrong}, {theirs.worst:.3f}; bound {bound:.3f}); "
        f"{len(faults)} faults",
    )
