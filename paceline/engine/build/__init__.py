"""Builds an engine from a model's name and options: resolve, load, build the executor, assemble.

Every option is a field of `EngineConfig` or `SchedulerConfig`; any other is an error. `resolve` decides everything
before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import ConfigError, EngineConfig, split_options
from paceline.engine.adapter_loading import load_adapter
from paceline.engine.build.assemble import assemble
from paceline.engine.build.executor import prepare_kernels
from paceline.engine.build.facts import CUDA, DeviceFacts, choose_device, device_facts
from paceline.engine.build.load import load_model
from paceline.engine.build.ranks import connect_ranks, links
from paceline.engine.build.resolution import Resolution, backend, resolve, resolve_drafts
from paceline.engine.build.weight_choice import wants_native
from paceline.engine.cpu.native import one_thread
from paceline.engine.draft_model import check_tokenizer, draft_source
from paceline.engine.engine import Engine, EngineHooks
from paceline.engine.loaded_text import LoadedText
from paceline.engine.loop import Trace
from paceline.engine.virtual.build import build_virtual
from paceline.model.fetch import DEFAULT_MODEL, find_model
from paceline.model.files import UnloadedModel, open_files
from paceline.model.lora import arrange_adapter, read_adapter
from paceline.model.rank_group import shard_of
from paceline.model.shapes import shape as named_shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import Progress
from paceline.request import short
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.template_trial import TemplateTrial

if TYPE_CHECKING:
    from paceline.engine.cuda.compile_workers import CompileWorkers

_LOAD = ("weights", "random")


def build_engine(
    model: str | Path | None = None,
    *,
    load: str = "weights",
    shape: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    trace: Trace | None = None,
    hooks: EngineHooks | None = None,
    detokenize: bool = True,
    role: str = "both",
    text: LoadedText | None = None,
    workers: CompileWorkers | None = None,
    **options: Any,
) -> Engine:
    """Builds the engine for a model: a folder, a .gguf file, a hub id, or the default model if None. With
    `load="random"`, weights are random (from `seed`) in a named shape. role: of prefill/decode disaggregation. text,
    workers: if they are loaded and started already (`start.py`)."""
    engine_options, scheduler_options = split_options(options, ("model", "load", "shape", "seed"))
    config = EngineConfig(**engine_options, role=role)
    _check_arguments(model, load, seed)
    if config.executor == "virtual":
        scheduler_options = with_ranks(config, scheduler_options)
        scheduler_options, _ = resolve_drafts(config, scheduler_options, config.executor)
        if model is not None or shape is not None or load != "weights":
            raise ConfigError("executor is 'virtual', which runs no model: remove model, load and shape.")
        return build_virtual(config, scheduler_options, trace=trace, hooks=hooks, detokenize=detokenize)
    choose_device(config)  # raises where there is no GPU, before a model is fetched
    source = find_source(model, load=load, shape=shape, progress=progress)
    draft = find_draft(config, source, progress)
    found = resolve_here(config, scheduler_options, source, draft)
    found.log_choices()
    with ExitStack() as stack:
        ranks, group, stages = None, None, None
        if config.num_ranks > 1:
            from paceline.engine.rank_processes import RankProcesses  # needs msgspec, which a minimal GPU host may lack

            ranks = RankProcesses(config.num_ranks)
            stack.callback(ranks.close)
            stack.enter_context(ranks.explained())
            store = connect_ranks(ranks, found, source, draft, shape, seed)
            kind = found.device.kind
            group, stages = links(found.config, backend(found.config, kind), 0, store, kind)
        kernels = None
        if found.device.kind == CUDA:
            shard = shard_of(group or stages)
            kernels = prepare_kernels(found.specs, found.precision, found.scheduler, found.config, shard, workers)
        with one_thread():
            path, vocab_size = None if source.files is None else source.files.path, source.spec.vocab_size
            if text is not None:
                tokenizer = text.tokenizer
            else:
                tokenizer = synthetic_tokenizer(vocab_size) if path is None else load_tokenizer(path)
            tokenizer.check_fits(vocab_size)
            if draft is not None:
                check_tokenizer(draft, tokenizer)
            # It runs while the weights are loaded.
            trial = stack.enter_context(closing(TemplateTrial([] if path is None else tokenizer.templates)))
            kind, context = found.device.kind, found.scheduler.context_tokens
            fast = load_model(
                source,
                found.weights,
                kind,
                seed=seed,
                max_positions=context,
                progress=progress,
                group=group,
                stages=stages,
            )
            drafter = None
            if draft is not None and found.draft_weights is not None:
                drafter = load_model(draft, found.draft_weights, kind, seed=seed, max_positions=context)
            trial.check()
        engine = assemble(
            fast,
            tokenizer,
            found.config,
            found.scheduler_options,
            trace=trace,
            hooks=hooks,
            detokenize=detokenize,
            kernels=kernels,
            draft=drafter,
            grammars=None if text is None else text.grammars,
            ranks=ranks,
        )
        stack.pop_all()  # the ranks are the engine's now
    with ExitStack() as stack:
        stack.callback(engine.close)
        for name, folder in config.lora.items():
            load_adapter(engine, name, folder)
        stack.pop_all()
    return engine


def _check_arguments(model: str | Path | None, load: str, seed: int) -> None:
    if model is not None and (not isinstance(model, str | Path) or model == ""):
        raise ConfigError(f"model is {short(model)}: give a folder, a .gguf file or a Hugging Face id.")
    if not isinstance(seed, int):
        raise ConfigError(f"seed is {short(seed)}: expected an integer.")
    if load not in _LOAD:
        raise ConfigError(f"load is {load!r}: choose one of {', '.join(_LOAD)}.")


def with_ranks(config: EngineConfig, scheduler_options: Mapping[str, object]) -> dict[str, object]:
    """The scheduler's options, with those that follow from the engine's."""
    found = {"adapter_slots": config.max_loras, **scheduler_options}
    return {**found, "num_stages": config.pp} if config.pp > 1 else found


def find_source(
    model: str | Path | None, *, load: str = "weights", shape: str | None = None, progress: Progress | None = None
) -> UnloadedModel:
    """Fetches the model if it is not here, and reads its headers."""
    if load == "random":
        if model is not None:
            raise ConfigError(f"model is {str(model)!r} and load is 'random': give a shape instead of a model.")
        if shape is None:
            raise ConfigError("load is 'random' and no shape is given: name one, such as smollm2-135m.")
        return UnloadedModel(named_shape(shape))
    if shape is not None:
        raise ConfigError(f"shape is {shape!r}, which requires load='random': leave it out.")
    files = open_files(find_model(DEFAULT_MODEL if model is None else model, progress=progress))
    return UnloadedModel(files.spec, files)


def find_draft(config: EngineConfig, source: UnloadedModel, progress: Progress | None = None) -> UnloadedModel | None:
    if config.draft_model is None:
        return None
    return draft_source(config.draft_model, source.spec, random=source.files is None, progress=progress)


def resolve_here(
    config: EngineConfig,
    scheduler_options: Mapping[str, object],
    source: UnloadedModel,
    draft: UnloadedModel | None = None,
    *,
    device: DeviceFacts | None = None,
) -> Resolution:
    """`resolve` with the facts of this machine, or of another device, and of the adapters in `lora`."""
    if device is None:
        kind = choose_device(config)
        sources = [one for one in (source, draft) if one is not None]
        device = device_facts(config, needs_native=any(wants_native(one, config, kind) for one in sources))
    options = with_ranks(config, scheduler_options)
    return resolve(source, config, options, device, draft=draft, adapter_ranks=_adapter_ranks(config, source.spec))


def _adapter_ranks(config: EngineConfig, spec: ModelSpec) -> tuple[int, ...]:
    """The highest ranks of the adapters in `lora`. Raises for those that cannot be loaded, before a model is."""
    ranks = []
    for folder in dict.fromkeys(config.lora.values()):
        file = read_adapter(folder)
        arrange_adapter(file, spec, torch.float32)
        ranks.append(file.max_rank)
    return tuple(ranks)
