"""Logits compared with transformers, same weights."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.checks.harness import ROUNDING, CheckResult, CheckSetup, greedy, random_prompts, tokens_of
from paceline.config import ConfigError
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.executor import Executor, Pending, Result
from paceline.model.layout import stored_parts
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Plan


class _LogitsRecorder(Executor):
    """An executor that records the logits of every sampled row. For overlap off: a pass overwrites the logits."""

    def __init__(self, device: CudaExecutor) -> None:
        self.device = device
        self.logits: dict[bytes, list[Tensor]] = {}  # by prompt
        self.prompts: dict[int, bytes] = {}  # by slot

    def launch(self, plan: Plan) -> Pending:
        for join in plan.joins:
            self.prompts[join.slot] = join.tokens[: join.num_prompt_tokens].tobytes()
        return _RecordingPending(self, plan, self.device.launch(plan))


class _RecordingPending:
    def __init__(self, recorder: _LogitsRecorder, plan: Plan, pending: Pending) -> None:
        self._recorder, self._plan, self._pending = recorder, plan, pending

    def wait(self) -> Result:
        result = self._pending.wait()
        rows = np.flatnonzero(self._plan.samples).tolist()
        logits = self._recorder.device.model._logits[: len(rows)].to(torch.float32, copy=True)
        for row, values in zip(rows, logits, strict=True):
            prompt = self._recorder.prompts[int(self._plan.slots[row])]
            self._recorder.logits.setdefault(prompt, []).append(values)
        return result


def check_logits(setup: CheckSetup, *, count: int = 16, longest: int = 700, num_tokens: int = 16) -> CheckResult:
    """Logits of prefill and decode compared with `transformers`, same weights.

    Both round to the dtype of the model, at different places, so they differ from each other as much as each does from
    float32. The check therefore compares errors against transformers in float32: ours may be at most 1.25 times that of
    transformers in the dtype of the model in the root mean square over all logits (millions of values), and at most 1.5
    times at the worst logit.
    """
    spec, rng = setup.spec(), random.Random(7)
    prompts = random_prompts(rng, spec.vocab_size, count, longest)
    with setup.llm(spec, overlap="off", kv_tokens=100_000) as llm:
        device = llm.engine.executor
        if not isinstance(device, CudaExecutor):
            raise ConfigError("part logits needs the CUDA executor, and this engine runs on a CPU: remove it.")
        recorder, loop = _LogitsRecorder(device), llm.engine.loop
        llm.engine.call(lambda _: setattr(loop, "executor", recorder)).result()
        tokens = tokens_of(llm, prompts, greedy([num_tokens] * count))
    ours = [torch.stack(recorder.logits[np.array(prompt, np.int32).tobytes()]) for prompt in prompts]
    picked = [torch.tensor(output, device=setup.device) for output in tokens]
    assert _worst_margin(ours, picked) == 0, "the recorded logits are not those that were sampled from"
    exact = _their_logits(setup, spec, "float32", prompts, tokens)
    theirs = _their_logits(setup, spec, setup.dtype, prompts, tokens)
    error, bound = _error(ours, exact), _error(theirs, exact)
    deviation = float(torch.cat(exact).std())
    below = _worst_margin(exact, picked)
    their_below = _worst_margin(exact, [rows.argmax(-1) for rows in theirs])
    right = (
        error.rms < 1.25 * bound.rms + ROUNDING
        and error.worst < 1.5 * bound.worst + ROUNDING
        and below < 1.5 * their_below + ROUNDING
    )
    return CheckResult(
        right,
        f"{count} prompts, {count * num_tokens} rows of {spec.vocab_size} logits with standard deviation "
        f"{deviation:.2f}, compared with transformers in float32: rms error {error.rms:.4f}, worst {error.worst:.3f}, "
        f"worst margin {below:.3f}; transformers in {setup.dtype}: {bound.rms:.4f}, {bound.worst:.3f}, "
        f"{their_below:.3f}",
    )


def _worst_margin(exact: Sequence[Tensor], chosen: Sequence[Tensor]) -> float:
    margins = [
        rows.amax(-1) - rows.gather(1, tokens[:, None])[:, 0] for rows, tokens in zip(exact, chosen, strict=True)
    ]
    return float(torch.cat(margins).max())


class _LogitError(NamedTuple):
    rms: float
    worst: float


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> _LogitError:
    worst, squares, count = 0.0, 0.0, 0
    for one, other in zip(found, exact, strict=True):
        difference = one - other
        worst = max(worst, float(difference.abs().max()))
        squares += float(difference.square().sum(dtype=torch.float64))
        count += difference.numel()
    return _LogitError(math.sqrt(squares / count), worst)


@torch.inference_mode()
def _their_logits(
    setup: CheckSetup, spec: ModelSpec, dtype: str, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[Tensor]:
    model = _their_model(setup, spec, dtype)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output[:-1]], device=setup.device)
        found.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float())
    return found


def _their_model(setup: CheckSetup, spec: ModelSpec, dtype: str) -> Any:
    """The Qwen3 of transformers with our weights, in `dtype`."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("part logits needs transformers, which is not installed: remove it.") from None
    if spec.family != "qwen3":
        raise ConfigError(f"part logits needs a shape of family qwen3, and this one is of family {spec.family}.")
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn  # of all layers
    assert mixer.rope is not None, "Qwen3 has rotary positions"
    sizes: dict[str, object] = {
        "hidden_size": spec.hidden_size, "num_hidden_layers": spec.num_layers, "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim, "intermediate_size": ffn.size,
        "vocab_size": spec.vocab_size, "max_position_embeddings": spec.context_tokens, "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tied,
    }  # fmt: skip
    kind: Callable[..., object] = transformers.Qwen3Config
    make: Callable[..., Any] = transformers.Qwen3ForCausalLM
    if "rope_parameters" in inspect.signature(kind).parameters:
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": mixer.rope.theta}
    else:  # transformers before version 5
        sizes["rope_theta"] = mixer.rope.theta
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(setup.device):
            model = make(kind(**sizes)).eval()
    finally:
        torch.set_default_dtype(before)
    if spec.tied:
        model.tie_weights()
    weights = setup.weights(spec, dtype)
    parameters = dict(model.named_parameters())
    for name, part in stored_parts(spec).items():
        source = weights[part.target][part.row : part.row + part.num_rows]
        with torch.no_grad():  # ours has one copy per head where theirs has one
            parameters.pop(name).copy_(source[0] if len(part.shape) < source.dim() else source)
    assert not parameters, f"transformers has parameters that are not set: {', '.join(parameters)}"
    return model
