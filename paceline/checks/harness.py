"""The harness of the checks: engines with random weights, and the comparison of their tokens with float32.

A token is judged by its **margin**: the distance of its logit below the highest one when the same tokens are computed
in float32. Bfloat16 changes logits, so the choice between close candidates may differ and the margin of a correct
engine is small, not 0. The bound is measured: plain torch in the same dtype chooses after the same tokens, and the
worst margin of the engine must stay below 1.5 times that of plain torch. Reading a wrong page is off by whole standard
deviations.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import ConfigError, EngineConfig, split_options
from paceline.engine.build.assemble import assemble
from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.llm import LLM
from paceline.model.decoder import Decoder, soft_cap
from paceline.model.shapes import shape as named_shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import random_weights
from paceline.request import PacelineError, SamplingParams
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer

_SEED = 11
ROUNDING = 5e-3  # difference of float32 logits between two orders of summation


class CheckResult(NamedTuple):
    passed: bool | None  # None: not runnable on this host
    text: str


@dataclass(frozen=True, slots=True)
class CheckSetup:
    """What a check runs on: random weights of a shape, a device, and the options that the user gave."""

    shape: str
    device: torch.device
    dtype: str = "bfloat16"
    options: Mapping[str, object] = field(default_factory=dict)  # engine and scheduler options
    assemble: Callable[[Decoder, Tokenizer, EngineConfig, Mapping[str, object]], Engine] = assemble
    num_layers: int | None = None  # at most; None: all layers of the shape

    def spec(self, num_layers: int | None = None) -> ModelSpec:
        if not self.shape:
            raise ConfigError("checks use random weights: give a shape and no model.")
        spec = named_shape(self.shape)
        count = min(spec.num_layers, num_layers or spec.num_layers, self.num_layers or spec.num_layers)
        return spec.with_layers(range(count))

    def weights(self, spec: ModelSpec, dtype: str | None = None) -> dict[str, Tensor]:
        """The same values on every call; `dtype` rounds them."""
        made = random_weights(spec, seed=_SEED, dtype=self.dtype, device=self.device)
        return made if dtype is None else {name: weight.to(getattr(torch, dtype)) for name, weight in made.items()}

    def decoder(self, spec: ModelSpec, dtype: str | None = None) -> Decoder:
        return Decoder(spec, self.weights(spec, dtype), max_positions=spec.context_tokens)

    @contextmanager
    def llm(
        self,
        spec: ModelSpec,
        *,
        overlap: str = "on",
        kv_tokens: int,
        decoder: Decoder | None = None,
        **scheduler: object,
    ) -> Iterator[LLM]:
        """An engine with these options; those of the user take precedence. `decoder`: instead of random weights."""
        engine, given = split_options(self.options)
        memory = {} if "num_pages" in given else {"kv_tokens": kv_tokens}
        config = EngineConfig(**{**memory, **engine, "overlap": overlap})
        tokenizer = synthetic_tokenizer(spec.vocab_size)
        gc.collect()  # the previous engine and its thread refer to each other and hold memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        decoder = decoder or self.decoder(spec)
        made = self.assemble(decoder, tokenizer, config, {"max_wait": math.inf, **scheduler, **given})
        with LLM.from_engine(made) as llm:
            yield llm


class Margin(NamedTuple):
    worst: float
    wrong: int  # tokens that are not the argmax
    judged: int


@torch.inference_mode()
def margin(
    decoder: Decoder, prompts: Sequence[list[int]], outputs: Sequence[list[int]], chooser: Decoder | None = None
) -> Margin:
    """The worst margin of the output tokens under the logits of `decoder`.

    With a `chooser`, the argmax of its logits after the same tokens is judged instead.
    """
    worst, wrong, count = 0.0, 0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = logits_after(decoder, prompt, output)
        choice = torch.tensor(output, device=decoder.device)
        if chooser is not None:
            choice = logits_after(chooser, prompt, output).argmax(-1)
        below = logits.amax(-1) - logits.gather(1, choice[:, None])[:, 0]
        worst = max(worst, float(below.max()))
        wrong += int((below > 0).sum())
        count += len(output)
    return Margin(worst, wrong, count)


def logits_after(decoder: Decoder, prompt: list[int], output: list[int]) -> Tensor:
    """Logits [T, V] that predict each token of `output`."""
    return decoder.logits(hidden_states(decoder, prompt + output[:-1])[len(prompt) - 1 :])


def hidden_states(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Hidden states [T, H] in plain torch."""
    at = torch.arange(len(tokens), device=decoder.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mixer = decoder.spec.layers[layer].mixer
        if mixer.window is None and mixer.score_cap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True, scale=mixer.scale
            )[0]
        else:
            k, v = (x.repeat_interleave(mixer.num_heads // mixer.num_kv_heads, dim=0) for x in (k, v))
            scores = soft_cap(q.float() @ k.float().transpose(1, 2) * mixer.softmax_scale, mixer.score_cap)
            behind = at[:, None] - at[None, :]
            hidden = (behind < 0) | (behind >= (mixer.window or len(tokens)))
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                column = sinks.float()[:, None, None].expand(-1, len(tokens), 1)
                scores = torch.cat((scores, column), -1).log_softmax(-1)[..., :-1].exp()
            else:
                scores = scores.softmax(-1)
            out = (scores @ v.float()).to(q.dtype)
        return out.transpose(0, 1).flatten(1)

    ids = torch.tensor(tokens, device=decoder.device)
    return decoder.forward(ids, torch.arange(len(ids), device=decoder.device), attend)


def random_prompts(rng: random.Random, vocab_size: int, count: int, longest: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy(lengths: Sequence[int]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in lengths]


def tokens_of(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


@dataclass(slots=True, eq=False)
class TimedSink:
    """A sink that records when each token arrived."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: OutputDelta | None = None
    refused: PacelineError | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, delta: OutputDelta) -> None:
        self.times.extend([time.perf_counter()] * len(delta.token_ids))
        self.tokens.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            assert not self.ended.is_set(), "a request finished twice"
            self.last = delta
            self.ended.set()
        if self.tokens or self.last is not None:
            self.started.set()

    def refuse(self, error: PacelineError) -> None:
        self.refused = error
        self.started.set()
        self.ended.set()

    def between(self, began: float, ended: float) -> list[float]:
        """Inter-token latencies between two points in time."""
        times = [at for at in self.times if began <= at <= ended]
        return [b - a for a, b in itertools.pairwise(times)]


def wait_for(engine: Engine, condition: Callable[[], bool]) -> None:
    while not condition():
        if engine.failure is not None:
            raise engine.failure
        time.sleep(0.001)
