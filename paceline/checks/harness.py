"""What checks are made with: engines of random weights, and a judge of their tokens.

A token is judged by its **margin**: how far its logit lies below the best one when the same tokens are computed in
float32. Bfloat16 moves logits, so near the top the choice may differ and the margin of a right engine is small, not 0.
How small is not guessed: plain torch in the same dtype chooses after the same tokens, and no choice of the engine may
lie 1.5 times as far off as the worst of plain torch's. A page read by the wrong row is off by whole deviations.
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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import ConfigError, EngineConfig, split_options
from paceline.engine.build import assemble
from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta, TokenLogprob
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.registry import shape as named_shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import random_weights
from paceline.request import PacelineError, SamplingParams
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer

_SEED = 11
ROUNDING = 5e-3  # what float32 itself may differ by between two orders of summing up


class Verdict(NamedTuple):
    passed: bool | None  # None: it could not be run here
    text: str


@dataclass(frozen=True, slots=True)
class Lab:
    """What checks are made on: random weights of a shape, on a device, with the options that were given."""

    shape: str
    device: torch.device
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=dict)  # of engine and scheduler
    assemble: Callable[[Decoder, Tokenizer, EngineConfig, Mapping[str, Any]], Engine] = assemble
    num_layers: int | None = None  # at most; all that the shape has, if not given

    def spec(self, num_layers: int | None = None) -> ModelSpec:
        if not self.shape:
            raise ConfigError("a check makes its own random weights: give a shape and no model.")
        spec = named_shape(self.shape)
        count = min(spec.num_layers, num_layers or spec.num_layers, self.num_layers or spec.num_layers)
        cut = slice(0, count)
        return replace(spec, num_layers=count, windows=spec.windows[cut], rope_layers=spec.rope_layers[cut])

    def weights(self, spec: ModelSpec, dtype: str | None = None) -> dict[str, Tensor]:
        """The same numbers every time; in another dtype, those numbers rounded to it."""
        made = random_weights(spec, seed=_SEED, dtype=self.dtype, device=self.device)
        return made if dtype is None else {name: weight.to(getattr(torch, dtype)) for name, weight in made.items()}

    def decoder(self, spec: ModelSpec, dtype: str | None = None) -> Decoder:
        return Decoder(spec, self.weights(spec, dtype), max_positions=spec.context_tokens)

    @contextmanager
    def llm(self, spec: ModelSpec, *, overlap: str = "on", kv_tokens: int, **scheduler: Any) -> Iterator[LLM]:
        """An engine with these options, unless others were given."""
        engine, given = split_options(self.options)
        memory = {} if "num_pages" in given else {"kv_tokens": kv_tokens}
        config = EngineConfig(**{**memory, **engine, "overlap": overlap})
        tokenizer = synthetic_tokenizer(spec.vocab_size)
        gc.collect()  # an engine before this one and its thread refer to each other, and hold their memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        made = self.assemble(self.decoder(spec), tokenizer, config, {"max_wait": math.inf, **scheduler, **given})
        with LLM.from_engine(made) as llm:
            yield llm


class Margin(NamedTuple):
    worst: float
    wrong: int  # tokens that were not the best
    judged: int


@torch.inference_mode()
def margin(
    decoder: Decoder, prompts: Sequence[list[int]], outputs: Sequence[list[int]], chooser: Decoder | None = None
) -> Margin:
    """How far below the best logit of `decoder` a chosen token lies at worst, how many were not the best, of how
    many. With a `chooser`, its choice after the same tokens is judged instead of the outputs'."""
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
    """Logits [T, V] from which each token of `output` was to be chosen. Layers with windows are not for this."""
    assert not any(decoder.spec.windows), "a window would need a mask"

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    ids = torch.tensor(prompt + output[:-1], device=decoder.device)
    hidden = decoder.forward(ids, torch.arange(len(ids), device=decoder.device), attend)
    return decoder.logits(hidden[len(prompt) - 1 :])


def random_prompts(rng: random.Random, vocab_size: int, count: int, longest: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy(lengths: Sequence[int]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in lengths]


def tokens_of(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


@dataclass(slots=True, eq=False)
class Clocked:
    """A sink that knows when each token came."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: OutputDelta | None = None
    refused: PacelineError | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, piece: OutputDelta) -> None:
        self.times.extend([time.perf_counter()] * len(piece.token_ids))
        self.tokens.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        if piece.finish_reason is not None:
            assert not self.ended.is_set(), "a request ended twice"
            self.last = piece
            self.ended.set()
        if self.tokens or self.last is not None:
            self.started.set()

    def refuse(self, error: PacelineError) -> None:
        self.refused = error
        self.started.set()
        self.ended.set()

    def between(self, began: float, ended: float) -> list[float]:
        """Times between tokens that came in this window."""
        times = [at for at in self.times if began <= at <= ended]
        return [b - a for a, b in itertools.pairwise(times)]


def wait_for(engine: Engine, condition: Callable[[], bool]) -> None:
    while not condition():
        if engine.failure is not None:
            raise engine.failure
        time.sleep(0.001)
