"""The processes of a model that is divided: how they find each other, and the executor of one that is not rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from paceline.config import EngineConfig
from paceline.engine.build.executor import build_executor, prepare_kernels
from paceline.engine.build.facts import CUDA
from paceline.engine.build.load import load_model
from paceline.engine.build.resolution import Resolution, backend, scheduler_config
from paceline.engine.cpu.executor import CpuExecutor
from paceline.engine.cpu.native import one_thread
from paceline.engine.draft_model import draft_source
from paceline.engine.precision import KernelFormat, Precision
from paceline.model.files import UnloadedModel, open_files
from paceline.model.layout import Shard
from paceline.model.rank_group import RankGroup, shard_of
from paceline.model.shapes import shape as named_shape
from paceline.parallel.collectives import TorchGroup, connect, listen
from paceline.parallel.stages import StagePipe

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from paceline.engine.executor import Executor
    from paceline.engine.rank_messages import RankSetup
    from paceline.engine.rank_processes import RankProcesses


def connect_ranks(
    ranks: RankProcesses,
    found: Resolution,
    source: UnloadedModel,
    draft: UnloadedModel | None,
    shape: str | None,
    seed: int,
) -> TCPStore:
    """Sends all ranks what rank 0 has resolved. Returns the store by which they find each other."""
    from paceline.engine.rank_messages import RankSetup

    store, port = listen()
    engine_options = {**asdict(found.config), "record": None}
    if draft is not None and draft.files is not None:
        engine_options["draft_model"] = str(draft.files.path.resolve())
    ranks.connect(
        RankSetup(
            port,
            backend(found.config, found.device.kind),
            None if source.files is None else str(source.files.path.resolve()),
            shape,
            seed,
            found.device.kind,
            engine_options,
            dict(found.scheduler_options),
            tuple(found.plans),
        )
    )
    return store


def build_rank(setup: RankSetup, rank: int, size: int, agree: Callable[[int], int]) -> Executor:
    """The executor of a rank other than 0. agree: returns the number of pages that all ranks use."""
    config, device = EngineConfig(**setup.engine_options), setup.device
    if device == CUDA:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    assert size == config.num_ranks, f"{size} processes for {config.num_ranks} ranks"
    group, stages = links(config, setup.backend, rank, connect(setup.port), device)
    if setup.model is not None:
        files = open_files(setup.model)
        source = UnloadedModel(files.spec, files)
    else:
        assert setup.shape is not None, "rank 0 has sent a model or a shape"
        source = UnloadedModel(named_shape(setup.shape))
    scheduler = scheduler_config(source.spec, setup.scheduler_options, device)
    draft = None
    if config.draft_model is not None:
        draft = draft_source(config.draft_model, source.spec, random=setup.model is None)
    sources = [source] if draft is None else [source, draft]
    kernels, context = None, scheduler.context_tokens
    if device == CUDA:
        precision = Precision.of(config, setup.weights[0].dtype, tuple(map(KernelFormat.of, setup.weights)))
        specs = [one.spec for one in sources]
        kernels = prepare_kernels(specs, precision, scheduler, config, shard_of(group or stages))
    with one_thread():
        fast, *drafters = (
            load_model(
                one,
                plan,
                device,
                seed=setup.seed,
                max_positions=context,
                group=group if one is source else None,
                stages=stages if one is source else None,
            )
            for one, plan in zip(sources, setup.weights, strict=True)
        )
    drafter = drafters[0] if drafters else None
    options = setup.scheduler_options
    executor = build_executor(fast, config, options, kernels=kernels, draft=drafter, agree=agree).executor
    if isinstance(executor, CpuExecutor) or stages is None:
        return executor
    from paceline.engine.cuda.stages import LaterCudaStage  # not at the top: the CPU needs no Triton

    return LaterCudaStage(executor, stages)


def links(
    config: EngineConfig, backend: str, rank: int, store: TCPStore, device: str
) -> tuple[RankGroup | None, StagePipe | None]:
    """What this process has to do with the others: its place among the ranks, or among the stages."""
    if config.pp > 1:
        shard = Shard(rank, config.pp)
        device_ranks = None
        if backend == "nccl":
            device_ranks = TorchGroup(shard, store, "nccl")
            device_ranks.connect_neighbours()
        return None, StagePipe(TorchGroup(shard, store, "gloo"), device_ranks)
    return _group(backend, Shard(rank, config.tp), store, device), None


def _group(backend: str, shard: Shard, store: TCPStore, device: str) -> RankGroup:
    if backend != "symmetric":
        return TorchGroup(shard, store, backend)
    from paceline.parallel.symmetric import SymmetricGroup  # not at the top: needs CUDA

    base = "nccl" if torch.cuda.device_count() >= shard.size else "gloo"  # ranks that share a GPU
    return SymmetricGroup(TorchGroup(shard, store, base), torch.device(device, torch.cuda.current_device()))


def group_of_one() -> RankGroup:
    """A group with one rank, over NCCL: the code and the CUDA graphs of tensor parallelism on one GPU, for checks."""
    return TorchGroup(Shard(0, 1), listen()[0], "nccl")
