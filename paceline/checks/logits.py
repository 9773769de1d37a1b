"""Logits against transformers with the same weights."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.checks.harness import ROUNDING, Lab, Verdict, greedy, random_prompts, tokens_of
from paceline.config import ConfigError
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.executor import Executor, Pending, Result
from paceline.model.layout import stored_parts
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Plan


class _LogitsSpy(Executor):
    """An executor that keeps the logits of every sampling row. For serial runs: each pass overwrites the last one's."""

    def __init__(self, device: CudaExecutor) -> None:
        self.device = device
        self.logits: dict[bytes, list[Tensor]] = {}  # by prompt
        self.prompts: dict[int, bytes] = {}  # by slot

    def launch(self, plan: Plan) -> Pending:
        for join in plan.joins:
            self.prompts[join.slot] = join.tokens[: join.num_prompt_tokens].tobytes()
        return _SpyPending(self, plan, self.device.launch(plan))


class _SpyPending:
    def __init__(self, spy: _LogitsSpy, plan: Plan, pending: Pending) -> None:
        self._spy, self._plan, self._pending = spy, plan, pending

    def wait(self) -> Result:
        result = self._pending.wait()
        rows = np.flatnonzero(self._plan.samples).tolist()
        logits = self._spy.device.model._logits[: len(rows)].to(torch.float32, copy=True)
        for row, values in zip(rows, logits, strict=True):
            prompt = self._spy.prompts[int(self._plan.slots[row])]
            self._spy.logits.setdefault(prompt, []).append(values)
        return result


def check_logits(lab: Lab, *, count: int = 16, longest: int = 700, num_tokens: int = 16) -> Verdict:
    """Logits of prompts and decodes against `transformers` with the same weights.

    Both round to the model's dtype, at different places, so they differ from each other as much as each does from
    float32. What can be asked is that our error against transformers in float32 is no larger than that of
    transformers in the model's dtype: by 1.25 at most in the mean square over all logits, a figure of millions of
    numbers, and by 1.5 at the worst of them.
    """
    spec, rng = lab.spec(), random.Random(7)
    prompts = random_prompts(rng, spec.vocab_size, count, longest)
    with lab.llm(spec, overlap="off", kv_tokens=100_000) as llm:
        device = llm.engine.executor
        if not isinstance(device, CudaExecutor):
            raise ConfigError("logits looks into the CUDA executor, and this engine runs on a CPU: leave it out.")
        spy, loop = _LogitsSpy(device), llm.engine.loop
        llm.engine.call(lambda _: setattr(loop, "executor", spy)).result()
        tokens = tokens_of(llm, prompts, greedy([num_tokens] * count))
    ours = [torch.stack(spy.logits[np.array(prompt, np.int32).tobytes()]) for prompt in prompts]
    picked = [torch.tensor(output, device=lab.device) for output in tokens]
    assert _worst_margin(ours, picked) == 0, "these are not the logits that were sampled from"
    exact = _their_logits(lab, spec, "float32", prompts, tokens)
    theirs = _their_logits(lab, spec, lab.dtype, prompts, tokens)
    error, bound = _error(ours, exact), _error(theirs, exact)
    deviation = float(torch.cat(exact).std())
    below = _worst_margin(exact, picked)
    their_below = _worst_margin(exact, [rows.argmax(-1) for rows in theirs])
    right = (
        error.rms < 1.25 * bound.rms + ROUNDING
        and error.worst < 1.5 * bound.worst + ROUNDING
        and below < 1.5 * their_below + ROUNDING
    )
    return Verdict(
        right,
        f"{count} prompts, {count * num_tokens} rows of {spec.vocab_size} logits with deviation {deviation:.2f}, "
        f"against transformers in float32: rms error {error.rms:.4f}, worst {error.worst:.3f}, worst margin "
        f"{below:.3f}; transformers in {lab.dtype}: {bound.rms:.4f}, {bound.worst:.3f}, {their_below:.3f}",
    )


def _worst_margin(exact: Sequence[Tensor], chosen: Sequence[Tensor]) -> float:
    margins = [
        rows.amax(-1) - rows.gather(1, tokens[:, None])[:, 0] for rows, tokens in zip(exact, chosen, strict=True)
    ]
    return float(torch.cat(margins).max())


class _Error(NamedTuple):
    rms: float
    worst: float


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> _Error:
    worst, squares, count = 0.0, 0.0, 0
    for one, other in zip(found, exact, strict=True):
        difference = one - other
        worst = max(worst, float(difference.abs().max()))
        squares += float(difference.square().sum(dtype=torch.float64))
        count += difference.numel()
    return _Error(math.sqrt(squares / count), worst)


@torch.inference_mode()
def _their_logits(
    lab: Lab, spec: ModelSpec, dtype: str, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[Tensor]:
    model = _their_model(lab, spec, dtype)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output[:-1]], device=lab.device)
        found.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float())
    return found


def _their_model(lab: Lab, spec: ModelSpec, dtype: str) -> Any:
    """Transformers' Qwen3 with our weights, in `dtype`."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("logits compares with transformers, which is not installed here: leave it out.") from None
    if spec.family != "qwen3":
        raise ConfigError(f"logits compares with transformers' Qwen3, and this shape is of family {spec.family}.")
    sizes: dict[str, Any] = {
        "hidden_size": spec.hidden_size, "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size, "max_position_embeddings": spec.context_tokens, "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tied,
    }  # fmt: skip
    kind: Any = transformers.Qwen3Config
    make: Any = transformers.Qwen3ForCausalLM
    if "rope_parameters" in inspect.signature(kind.__init__).parameters:
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": spec.rope.theta}
    else:  # before version 5
        sizes["rope_theta"] = spec.rope.theta
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(lab.device):
            model = make(kind(**sizes)).eval()
    finally:
        torch.set_default_dtype(before)
    if spec.tied:
        model.tie_weights()
    weights = lab.weights(spec, dtype)
    parameters = dict(model.named_parameters())
    for name, part in stored_parts(spec).items():
        source = weights[part.target][part.row : part.row + part.num_rows]
        with torch.no_grad():  # a part that we keep once per head is one of theirs
            parameters.pop(name).copy_(source[0] if len(part.shape) < source.dim() else source)
    assert not parameters, f"transformers has parameters that we have not: {', '.join(parameters)}"
    return model
