"""Weights that are replaced in a running engine."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from paceline.checks.harness import CheckResult, CheckSetup, TimedSink, greedy, random_prompts, tokens_of
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.engine.pausing import PauseMode
from paceline.engine.weight_update import update_weights
from paceline.model.layers import Dense
from paceline.model.layout import stored_parts
from paceline.model.read_spec import read_spec
from paceline.model.registry import FAMILIES
from paceline.model.spec import ModelSpec
from paceline.model.weights import load_decoder, random_weights
from paceline.request import as_tokens

_OTHER_SEED = 12


def check_weights(
    setup: CheckSetup, *, count: int = 64, longest: int = 900, num_tokens: int = 16, long_tokens: int = 200
) -> CheckResult:
    """After an update the tokens are those of an engine that loaded the new weights; and a request that runs during an
    update in mode `continue` finishes and reports both versions."""
    spec, rng = setup.spec(), random.Random(7)
    prompts = random_prompts(rng, spec.vocab_size, count, longest)
    params = greedy([num_tokens] * count)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), spec, random_weights(spec, seed=_OTHER_SEED, dtype=setup.dtype))
        with setup.llm(spec, kv_tokens=100_000) as llm:
            before = tokens_of(llm, prompts, params)
            found = update_weights(llm.engine, folder)
            after = tokens_of(llm, prompts, params)
            sink = _PausingSink(llm.engine)
            llm.engine.submit(Job(as_tokens(prompts[0]), greedy([long_tokens])[0], stream=True), sink)
            sink.started.wait()
            update_weights(llm.engine, folder, mode="continue")
            llm.engine.resume()
            sink.ended.wait()
            versions = () if sink.last is None else sink.last.weight_versions
        fresh = load_decoder(folder, dtype=setup.dtype, device=setup.device)
        with setup.llm(spec, kv_tokens=100_000, decoder=fresh) as llm:
            expected = tokens_of(llm, prompts, params)
    same = sum(a == b for a, b in zip(after, expected, strict=True))
    changed = sum(a != b for a, b in zip(after, before, strict=True))
    return CheckResult(
        same == count and changed > 0 and len(sink.tokens) == long_tokens and versions == ("1", "2"),
        f"{spec.num_parameters:,} parameters in {found.load_s + found.pause_s + found.copy_s:.2f} s (loaded in "
        f"{found.load_s:.2f} s while serving, at rest after {found.pause_s * 1e3:.1f} ms, copied in "
        f"{found.copy_s * 1e3:.0f} ms); {same} of {count} outputs equal to an engine that loaded them, {changed} "
        f"different from before; a request across an update reports versions {', '.join(versions)}",
    )


class _PausingSink(TimedSink):
    """Pauses the engine with the first token: else a fast request would end before the weights are loaded."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def put(self, delta: OutputDelta) -> None:
        if not self.tokens:
            self._engine.pause(PauseMode.CONTINUE)
        super().put(delta)


def write_folder(folder: Path, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
    """Writes fused weights as a Hugging Face folder: config.json and model.safetensors."""
    from safetensors.torch import save_file

    family = next(one for one in FAMILIES if one.name == spec.family)
    mixer, experts = spec.layers[0].mixer, spec.expert_layers
    assert mixer.rope is not None, "this config has no field for layers without RoPE"
    config: dict[str, object] = {
        "architectures": [family.architecture], "hidden_size": spec.hidden_size, "num_hidden_layers": spec.num_layers,
        "num_attention_heads": mixer.num_heads, "num_key_value_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim,
        "intermediate_size": (spec.dense_layers or experts)[0].size, "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_tokens, "rms_norm_eps": spec.rms_eps,
        "rope_theta": mixer.rope.theta, "tie_word_embeddings": spec.tied,
        "bos_token_id": spec.bos_id, "eos_token_id": list(spec.eos_ids), "torch_dtype": spec.dtype,
    }  # fmt: skip
    if experts:
        config |= {
            "num_experts": experts[0].count, "num_experts_per_tok": experts[0].per_token,
            "norm_topk_prob": experts[0].routing.renormalise, "shared_expert_intermediate_size": experts[0].shared_size,
            "mlp_only_layers": [index for index, layer in enumerate(spec.layers) if isinstance(layer.ffn, Dense)],
            str(family.experts_key): experts[0].size,
        }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, part in stored_parts(spec).items():
        rows = weights[part.target][part.row : part.row + part.num_rows]
        is_whole = rows.numel() == math.prod(part.shape)  # else one row for each head
        tensors[name] = (rows.reshape(part.shape) if is_whole else rows[0]).contiguous().cpu()
    save_file(tensors, folder / "model.safetensors")
    assert read_spec(folder) == spec, "this config has no field for an option of the spec"
