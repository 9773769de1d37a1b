"""Reads the weights of a model in the formats of its plan."""

from __future__ import annotations

from typing import Any

from paceline.engine.build.facts import CPU
from paceline.engine.build.weight_choice import NONE
from paceline.engine.cpu.linear import arrange
from paceline.engine.cpu.native import native_library, return_free_memory
from paceline.engine.cpu.quantized_model import DecoderModel, QuantizedModel
from paceline.engine.draft_model import with_vocabulary
from paceline.model.files import UnloadedModel
from paceline.model.gguf_file import is_gguf, open_gguf
from paceline.model.quantized import QuantizedTensor
from paceline.model.rank_group import RankGroup, StageLink, shard_of
from paceline.model.weights import Progress, QuantizedWeights, load_decoder, random_decoder
from paceline.model.weights_plan import WeightsPlan


def load_model(
    source: UnloadedModel,
    plan: WeightsPlan,
    device: str,
    *,
    seed: int = 0,
    max_positions: int | None = None,
    progress: Progress | None = None,
    group: RankGroup | None = None,
    stages: StageLink | None = None,
) -> DecoderModel:
    """A decoder with its weights, or this rank's part of it. The vocabulary of `source.spec` may have another size than
    that of its files, which a draft model gets. What a plan rounds on a GPU is rounded when the executor is built."""
    files, spec = source.files, source.spec
    options: dict[str, Any] = {"dtype": plan.dtype, "device": device, "max_positions": max_positions}
    options |= {"progress": progress, "group": group, "stages": stages}
    if files is None:
        return arrange(random_decoder(spec, seed=seed, **options))
    if device == CPU and plan.quantization != NONE:
        return _load_native(source, plan, max_positions, progress)
    if plan.is_stored:
        from paceline.engine.linear.pack import keepers  # not at the top: the CPU needs no Triton

        options["keep"] = keepers(plan.of_stage(spec, shard_of(group or stages)), spec)
    return arrange(with_vocabulary(load_decoder(files, **options), spec.vocab_size))


def _load_native(
    source: UnloadedModel, plan: WeightsPlan, max_positions: int | None, progress: Progress | None
) -> QuantizedModel:
    files, spec = source.files, source.spec
    assert files is not None, "only weights of a file are packed on a CPU"
    weights = QuantizedWeights(files, plan, progress=progress)

    def matrix(name: str) -> QuantizedTensor:
        weight = weights.matrix(name)
        return weight.with_num_rows(spec.vocab_size) if name in ("embedding", "head") else weight

    model = QuantizedModel(native_library(), spec, weights.vectors, matrix, max_positions=max_positions)
    return_free_memory()
    if is_gguf(files.path):
        open_gguf(files.path).release_memory()
    return model
