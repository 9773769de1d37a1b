"""Tensor and pipeline parallelism in one process: ranks as threads, on the real ring, with the real executors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from paceline.codec import encode
from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.build.executor import build_executor
from paceline.engine.cpu.linear import arrange
from paceline.engine.executor import Completion, Executor
from paceline.engine.rank_copies import CopyReports, RankCopier, RankMemory
from paceline.engine.rank_messages import (
    AfterLaunched,
    CopiesEnded,
    ExportPages,
    MessageToRank,
    RankReport,
    StopRank,
    WeightsRead,
)
from paceline.engine.rank_process import run_rank
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelSpec
from paceline.model.weights import random_weights, shard_weights
from paceline.parallel.ring import RingReader, RingWriter, create_memory
from paceline.parallel.stages import StagePipe
from paceline.parallel.threads import ThreadGroup
from paceline.text.synthetic import synthetic_tokenizer

BASE: dict[str, Any] = {"num_pages": 256, "page_size": 4, "max_running": 8, "context_tokens": 256}


class ThreadRanks:
    """The ranks from 1 on."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self.executors, self.size = executors, 1 + len(executors)
        self._pipes = [os.pipe() for _ in executors]
        memory = create_memory(1 << 14)  # so small that passes wait for room
        self._ring = RingWriter(memory, [write for _, write in self._pipes], lambda: None)
        self.readers = [RingReader(memory, index, read) for index, (read, _) in enumerate(self._pipes)]
        os.close(memory)
        self._sockets = [socket.socketpair() for _ in executors]
        self.memory = RankMemory([mine for mine, _ in self._sockets])
        self._copies = CopyReports(len(executors))
        self.num_messages = 0
        self.stopped: list[bool] = []
        self._reports: list[SimpleQueue[RankReport]] = [SimpleQueue() for _ in executors]
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(len(executors))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        executor, (_, theirs) = self.executors[index], self._sockets[index]

        def report(message: RankReport) -> None:
            if isinstance(message, CopiesEnded):
                self._copies.on_report(index, message)
            else:
                self._reports[index].put(message)

        copier = RankCopier(executor, theirs, report)
        self.stopped.append(run_rank(executor, self.readers[index].read, report, copier))
        theirs.close()

    def wait_weights(self, rank: int) -> WeightsRead:
        report = self._reports[rank - 1].get(timeout=60)
        assert isinstance(report, WeightsRead)
        return report

    def agree(self, num_pages: int) -> int:
        return num_pages

    def wait_ready(self) -> None: ...

    def watch(self, on_failure: Callable[[BaseException], None]) -> None: ...

    def check(self) -> None: ...

    def wait_failure(self) -> None: ...

    def send(self, message: MessageToRank) -> None:
        self.num_messages += 1
        self._ring.write(encode(message))

    def launch_copies(self, message: ExportPages | AfterLaunched) -> Completion:
        end = self._copies.expect()
        self.send(message)
        return end

    def close(self) -> None:
        self.send(StopRank())
        for thread in self._threads:
            thread.join()
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)
        self.memory.close()


def sharded_decoders(spec: ModelSpec, weights: Mapping[str, Tensor], size: int) -> list[Decoder]:
    groups = ThreadGroup.of_size(size)
    return [Decoder(spec, shard_weights(spec, weights, group.shard), group=group) for group in groups]


def staged_decoders(spec: ModelSpec, weights: Mapping[str, Tensor], num_stages: int) -> list[Decoder]:
    pipes = [StagePipe(group) for group in ThreadGroup.of_size(num_stages)]
    return [Decoder(spec, shard_weights(spec, weights, pipe.shard), stages=pipe) for pipe in pipes]


def pipeline_llm(spec: ModelSpec, weights: Mapping[str, Tensor], num_stages: int, **options: Any) -> LLM:
    """An LLM on a pipeline of the CPU; on one stage, without any of this, if that is 1."""
    if num_stages == 1:
        return cpu_llm(spec, weights, 1, **options)
    return llm_of(staged_decoders(spec, weights, num_stages), num_stages=num_stages, **options)


def cpu_llm(spec: ModelSpec, weights: Mapping[str, Tensor], size: int, **options: Any) -> LLM:
    """An LLM on `size` ranks of the CPU; on one, without any of this, if that is 1."""
    if size > 1:
        return llm_of(sharded_decoders(spec, weights, size), **options)
    return llm_of([whole_decoder(spec, weights)], **options)


def whole_decoder(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Decoder:
    return Decoder(spec, {name: weight.clone() for name, weight in weights.items()})


def llm_of(decoders: Sequence[Decoder], *, overlap: str = "on", drafts: Sequence[Decoder] = (), **options: Any) -> LLM:
    """An LLM on decoders that have the parts of one model, in order of rank. drafts: the draft model of each rank."""
    options = {**BASE, **options}
    config = EngineConfig(threads=1, overlap=overlap)
    tokenizer = synthetic_tokenizer(decoders[0].whole_spec.vocab_size)
    first, *others = (arrange(one) for one in decoders)
    first_draft, *other_drafts = [arrange(one) for one in drafts] or [None] * len(decoders)
    ranks = None
    if others:
        built = [
            build_executor(one, config, options, draft=draft) for one, draft in zip(others, other_drafts, strict=True)
        ]
        ranks = ThreadRanks([one.executor for one in built])
    return LLM.from_engine(assemble(first, tokenizer, config, options, draft=first_draft, ranks=ranks))


def make_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Random weights whose norms and biases change the result."""
    weights, generator = random_weights(spec, seed=5, dtype="float32"), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith("norm"):
            weight.mul_(1 + 0.3 * torch.randn(weight.shape[-1], generator=generator))
            if name.endswith("qk_norm"):  # one for all query heads, another for all key heads
                weight[: spec.layers[0].mixer.num_heads] = weight[0] * 1.1
    return weights
