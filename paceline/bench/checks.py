"""Is it right? Checks of a whole engine that are worth running at full size, on the device that will serve.

A token is judged by its **margin**: how far its logit lies below the best one when the same tokens are computed in
float32. Bfloat16 moves logits, so near the top the choice may differ and the margin of a right engine is small, not 0.
How small is not guessed: plain torch in the same dtype chooses after the same tokens, and no choice of the engine may
lie 1.5 times as far off as the worst of plain torch's. A page read by the wrong row is off by whole deviations.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import os
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import ConfigError, EngineConfig, split_options
from paceline.engine.build import assemble
from paceline.engine.cuda_device import CudaDevice
from paceline.engine.cuda_streams import Event
from paceline.engine.cuda_swap import CudaSwap
from paceline.engine.engine import Engine
from paceline.engine.executor import Pending, Result
from paceline.engine.output import Piece, TokenLogprob
from paceline.engine.timeline import Timeline
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.layout import stored_parts
from paceline.model.registry import shape as named_shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import random_weights
from paceline.request import FinishReason, PacelineError, SamplingParams
from paceline.scheduler.invariants import check as check_invariants
from paceline.scheduler.plan import Column, Plan
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer

_SEED = 11
_ROUNDING = 5e-3  # what float32 itself may differ by between two orders of summing up


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
        logits = _logits_after(decoder, prompt, output)
        choice = torch.tensor(output, device=decoder.device)
        if chooser is not None:
            choice = _logits_after(chooser, prompt, output).argmax(-1)
        below = logits.amax(-1) - logits.gather(1, choice[:, None])[:, 0]
        worst = max(worst, float(below.max()))
        wrong += int((below > 0).sum())
        count += len(output)
    return Margin(worst, wrong, count)


def _logits_after(decoder: Decoder, prompt: list[int], output: list[int]) -> Tensor:
    """Logits [T, V] from which each token of `output` was to be chosen. Layers with windows are not for this."""
    assert not any(decoder.spec.windows), "a window would need a mask"

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    ids = torch.tensor(prompt + output[:-1], device=decoder.device)
    hidden = decoder.forward(ids, torch.arange(len(ids), device=decoder.device), attend)
    return decoder.logits(hidden[len(prompt) - 1 :])


def _random_prompts(rng: random.Random, vocab_size: int, count: int, longest: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def _greedy(lengths: Sequence[int]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in lengths]


def _tokens(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


# ------------------------------------------------------------------ tokens


def check(lab: Lab, *, count: int = 180, longest: int = 900, num_tokens: tuple[int, int] = (8, 40)) -> Verdict:
    """Greedy tokens within the margin; and the same tokens with overlap on, off and sync. On four layers."""
    spec, rng = lab.spec(4), random.Random(3)
    shared = _random_prompts(rng, spec.vocab_size, 1, longest)[0]
    prompts = _random_prompts(rng, spec.vocab_size, count, longest)
    prompts += [
        shared + own for own in _random_prompts(rng, spec.vocab_size, max(2, count // 9), max(2, longest // 18))
    ]
    params = _greedy([rng.randint(*num_tokens) for _ in prompts])
    options = {"context_tokens": min(8192, spec.context_tokens), "chunk_tokens": 512}
    tokens: dict[str, list[list[int]]] = {}
    some, few = slice(0, None, 20), slice(0, 4)
    for mode in ("off", "on", "sync"):
        with lab.llm(spec, overlap=mode, kv_tokens=400_000, **options) as llm:
            tokens[mode] = _tokens(llm, prompts, params)
            if mode == "on":
                again = _tokens(llm, prompts[some], params[some])
                alone = [_tokens(llm, [p], [q])[0] for p, q in zip(prompts[few], params[few], strict=True)]
    reference, plain = lab.decoder(spec, "float32"), lab.decoder(spec)
    judged = slice(0, None, 4)
    ours = margin(reference, prompts[judged], tokens["on"][judged])
    theirs = margin(reference, prompts[judged], tokens["on"][judged], plain)
    hits, single = margin(reference, prompts[some], again), margin(reference, prompts[few], alone)
    same = {mode: sum(a == b for a, b in zip(tokens[mode], tokens["off"], strict=True)) for mode in ("on", "sync")}
    bound = 1.5 * theirs.worst + _ROUNDING
    right = max(ours.worst, hits.worst, single.worst) < bound and set(same.values()) == {len(prompts)}
    return Verdict(
        right,
        f"{ours.judged} greedy tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (hits "
        f"{hits.worst:.3f}, alone {single.worst:.3f}; plain torch in {lab.dtype}: {theirs.wrong}, {theirs.worst:.3f}; "
        f"bound {bound:.3f}); of {len(prompts)} outputs as with overlap off: {same}",
    )


def alone(
    lab: Lab, *, batch: int = 256, some: int = 16, longest: int = 900, num_tokens: tuple[int, int] = (8, 40)
) -> Verdict:
    """The same request alone and in a full batch: both within the margin, with nothing cached between them."""
    spec, rng = lab.spec(), random.Random(5)
    prompts = _random_prompts(rng, spec.vocab_size, batch, longest)
    params = _greedy([rng.randint(*num_tokens) for _ in prompts])
    with lab.llm(spec, kv_tokens=400_000, prefix_cache=False) as llm:
        together = _tokens(llm, prompts, params)
        single = [_tokens(llm, [p], [q])[0] for p, q in zip(prompts[:some], params[:some], strict=True)]
    reference, plain = lab.decoder(spec, "float32"), lab.decoder(spec)
    prompts, together = prompts[:some], together[:some]
    ours, lonely = margin(reference, prompts, together), margin(reference, prompts, single)
    theirs = margin(reference, prompts, together, plain)
    same = sum(a == b for a, b in zip(together, single, strict=True))
    bound = 1.5 * theirs.worst + _ROUNDING
    return Verdict(
        max(ours.worst, lonely.worst) < bound,
        f"{some} requests alone and among {batch}, {ours.judged} greedy tokens: worst margin alone {lonely.worst:.3f}, "
        f"in the batch {ours.worst:.3f} (plain torch in {lab.dtype}: {theirs.worst:.3f}; bound {bound:.3f}); not the "
        f"float32 argmax: {lonely.wrong}, {ours.wrong} (plain torch: {theirs.wrong}); {same} outputs equal",
    )


# ------------------------------------------------------------------ logits


class _LogitsSpy:
    """An executor that keeps the logits of every sampling row. For serial runs: each pass overwrites the last one's."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.logits: dict[bytes, list[Tensor]] = {}  # by prompt

    def launch(self, plan: Plan) -> Pending:
        return _SpyPending(self, plan, self.device.launch(plan))


class _SpyPending:
    def __init__(self, spy: _LogitsSpy, plan: Plan, pending: Pending) -> None:
        self._spy, self._plan, self._pending = spy, plan, pending

    def wait(self) -> Result:
        result = self._pending.wait()
        rows = np.flatnonzero(self._plan.samples).tolist()
        logits = self._spy.device.model._logits[: len(rows)].to(torch.float32, copy=True)
        for row, values in zip(rows, logits, strict=True):
            self._spy.logits.setdefault(self._plan.requests[row].prompt.tobytes(), []).append(values)
        return result


def logits(lab: Lab, *, count: int = 16, longest: int = 700, num_tokens: int = 16) -> Verdict:
    """Logits of prompts and decodes against `transformers` with the same weights.

    Both round to the model's dtype, at different places, so they differ from each other as much as each does from
    float32. What can be asked is that our error against transformers in float32 is no larger than that of
    transformers in the model's dtype: by 1.25 at most in the mean square over all logits, a figure of millions of
    numbers, and by 1.5 at the worst of them.
    """
    spec, rng = lab.spec(), random.Random(7)
    prompts = _random_prompts(rng, spec.vocab_size, count, longest)
    with lab.llm(spec, overlap="off", kv_tokens=100_000) as llm:
        device = llm.engine.executor
        if not isinstance(device, CudaDevice):
            raise ConfigError("logits looks into the CUDA executor, and this engine runs on a CPU: leave it out.")
        spy, loop = _LogitsSpy(device), llm.engine.loop
        llm.engine.ask(lambda _: setattr(loop, "executor", spy)).result()
        tokens = _tokens(llm, prompts, _greedy([num_tokens] * count))
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
        error.rms < 1.25 * bound.rms + _ROUNDING
        and error.worst < 1.5 * bound.worst + _ROUNDING
        and below < 1.5 * their_below + _ROUNDING
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


# ------------------------------------------------------------------ time between tokens


@dataclass(slots=True, eq=False)
class _Clocked:
    """A sink that knows when each token came."""

    wants_all_at_once: bool = False
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Piece | None = None
    refused: PacelineError | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, piece: Piece) -> None:
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


class _Gaps(NamedTuple):
    """Times between tokens of running requests, before long prompts arrive, after that, and while they do."""

    before: list[float]
    after: list[float]
    busy: list[float]
    first_token_s: float  # of a long prompt, on average
    prompt_tokens: float  # in a pass with prompts, on average
    pass_s: float  # of such a pass, on average
    quiet_pass_s: float
    settings: str  # what decides it

    def quiet(self, percent: float) -> float:
        """The mean of before and after: contexts grow all the time, and those between are in the middle."""
        return (_p(self.before, percent) + _p(self.after, percent)) / 2

    @property
    def ratio(self) -> float:
        return _p(self.busy, 99) / self.quiet(99)

    def __str__(self) -> str:
        p99, p50 = (
            f"{_p(self.before, percent) * 1e3:.2f}, {_p(self.busy, percent) * 1e3:.2f}, "
            f"{_p(self.after, percent) * 1e3:.2f}"
            for percent in (99, 50)
        )
        return (
            f"{self.settings}: p99 before, while and after {p99} ms ({self.ratio:.2f}x), median {p50}; a pass has "
            f"{self.prompt_tokens:.0f} prompt tokens and takes {self.pass_s * 1e3:.2f} ms "
            f"({self.quiet_pass_s * 1e3:.2f} without); a long prompt's first token after {self.first_token_s:.2f} s"
        )


def _p(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def long(
    lab: Lab, running: int = 256, *, prompt_tokens: int = 32_000, num_prompts: int = 3, quiet_tokens: int = 300
) -> Verdict:
    """Running requests' p99 time between tokens while long prompts arrive, one behind the other, over the same without:
    2 at most. Without is half before and half after, since contexts grow meanwhile; the first prompt, for which kernels
    are compiled and loaded, does not count. With the options as they are; if that is too much, with some others, to see
    what decides it."""
    sizes = (running, prompt_tokens, num_prompts, quiet_tokens)
    found = _long(lab, *sizes)
    print(f"long, as it is: {found}", flush=True)
    if found.ratio > 2:
        target = round(1.7 * found.quiet(50), 6)
        for change in ({"chunk_tokens": 512}, {"chunk_tokens": 128}, {"itl_target": target}):
            changed = _long(replace(lab, options={**lab.options, **change}), *sizes)
            print(f"long, changed: {changed}", flush=True)
    return Verdict(found.ratio <= 2, f"{running} running, {num_prompts} prompts of {prompt_tokens} tokens; {found}")


def _long(lab: Lab, running: int, prompt_tokens: int, num_prompts: int, quiet_tokens: int) -> _Gaps:
    spec, rng = lab.spec(), random.Random(9)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(spec.vocab_size) for _ in range(count)]

    with lab.llm(spec, kv_tokens=600_000) as llm:
        engine, timeline = llm.engine, Timeline()
        shortest = _greedy([1])[0]
        engine.ask(lambda _: setattr(engine.loop, "trace", timeline)).result()
        # As long as memory lets them run together with the prompts.
        config = engine.scheduler.config
        room = (config.num_pages * config.page_size - 2 * prompt_tokens) // running
        length = min(512, room // 4)
        kept = _greedy([min(room, config.context_tokens) - length - config.page_size])[0]
        rows = [_Clocked() for _ in range(running)]
        # Made now: while it runs, this thread would hold Python's lock for as long as several passes take.
        long_prompts = iter([prompt(prompt_tokens) for _ in range(1 + num_prompts)])
        names = [engine.submit(prompt(length), kept, sink=row) for row in rows]
        _wait_for(engine, lambda: all(len(row.tokens) > 8 for row in rows))

        def send_prompt() -> float:
            sink, sent = _Clocked(), time.perf_counter()
            engine.submit(next(long_prompts), shortest, sink=sink)
            _wait_for(engine, sink.ended.is_set)
            if sink.refused is not None:
                raise sink.refused
            return sink.times[0] - sent

        def wait_quietly() -> tuple[float, float]:
            began, target = time.perf_counter(), max(len(row.tokens) for row in rows) + quiet_tokens // 2
            _wait_for(engine, lambda: all(len(row.tokens) >= target or row.last is not None for row in rows))
            assert all(row.last is None for row in rows), "running requests ended too early: give more memory"
            return began, time.perf_counter()

        send_prompt()
        quiet = [wait_quietly()]
        firsts = [send_prompt() for _ in range(num_prompts)]
        quiet.append(wait_quietly())
        for name in names:
            engine.abort(name)
        for row in rows:
            row.ended.wait()
    between, after = quiet[0][1], quiet[1][0]
    busy = [one for one in timeline.passes if one.num_prompts and between < one.waited < after]
    assert busy, "no pass had a prompt: give more slots than requests that run"
    decodes = [one for one in timeline.passes if not one.num_prompts]
    alone = [one for one in decodes for began, ended in quiet if began < one.waited < ended]
    return _Gaps(
        before=[gap for row in rows for gap in row.between(*quiet[0])],
        after=[gap for row in rows for gap in row.between(*quiet[1])],
        busy=[gap for row in rows for gap in row.between(between, after)],
        first_token_s=sum(firsts) / len(firsts),
        prompt_tokens=_mean(one.num_tokens - one.num_decodes for one in busy),
        pass_s=_mean(one.device_s for one in busy),
        quiet_pass_s=_mean(one.device_s for one in alone),
        settings=f"chunk_tokens {config.chunk_tokens}, max_batch_tokens {config.max_batch_tokens}, "
        f"itl_target {config.itl_target}",
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)


def _wait_for(engine: Engine, condition: Callable[[], bool]) -> None:
    while not condition():
        if engine.failure is not None:
            raise engine.failure
        time.sleep(0.001)


# ------------------------------------------------------------------ soak


@dataclass(slots=True, eq=False)
class _Sent:
    prompt: list[int]
    params: SamplingParams
    sink: _Clocked
    aborted: bool = False
    timeout: float | None = None

    def fault(self) -> str | None:
        """What is wrong with how it ended."""
        piece, params = self.sink.last, self.params
        if piece is None or piece.finish_reason is None:
            return f"refused: {self.sink.refused}" if self.sink.refused else "never ended"
        reason, count, limit = piece.finish_reason, len(self.sink.tokens), params.max_tokens or 0
        if params.logprobs is not None and [one.token_id for one in self.sink.logprobs] != self.sink.tokens:
            return f"told the chances of {len(self.sink.logprobs)} other tokens than its {count}"
        told = self.sink.logprobs if params.temperature == 0 and not params.min_tokens and params.logprobs else []
        if any((one.token_id, one.logprob) != one.top[0] for one in told):
            return "greedy, and another token was told to be the likeliest"
        if reason is FinishReason.LENGTH:
            return None if count == limit else f"ended by length with {count} of {limit} tokens"
        if reason is FinishReason.STOP:
            stopped = self.sink.tokens[-1] in params.stop_token_ids and params.min_tokens <= count <= limit
            return None if stopped else f"stopped at token {self.sink.tokens[-1]}, the {count}th"
        if reason is FinishReason.ABORT:
            return None if self.aborted else "aborted, and nobody asked for it"
        if reason is FinishReason.DEADLINE:
            return None if self.timeout is not None else "ended by a deadline that it had not"
        return f"ended with {reason}: {piece.error}"


def soak(
    lab: Lab,
    seconds: float = 300.0,
    *,
    live: int = 96,
    running: int = 64,
    kv_tokens: int = 24_000,
    longest: int = 600,
    num_tokens: int = 200,
    seed: int = 0,
) -> Verdict:
    """Random joins, aborts, deadlines and retractions in a small pool, with shared prefixes, all kinds of sampling and
    logprobs. The scheduler's books are counted again at every step, every output is complete, greedy ones are within
    the margin."""
    spec, rng = lab.spec(4), random.Random(seed)  # through more random layers, roundings alone change most tokens
    prefixes = [[rng.randrange(spec.vocab_size) for _ in range(rng.randint(longest // 8, longest))] for _ in range(8)]
    faults: list[str] = []
    ended: Counter[str] = Counter()
    greedy: list[_Sent] = []  # complete ones, a fair sample of all

    def judge(one: _Sent) -> None:
        if (fault := one.fault()) is not None:
            faults.append(fault)
        elif one.params.temperature == 0 and not one.params.min_tokens and one.sink.tokens:
            ended["greedy"] += 1
            if len(greedy) < 48:
                greedy.append(one)
            elif (place := rng.randrange(ended["greedy"])) < 48:
                greedy[place] = one
        ended[str(one.sink.last.finish_reason) if one.sink.last is not None else "nothing"] += 1

    with lab.llm(spec, kv_tokens=kv_tokens, max_running=running) as llm:
        engine = llm.engine
        num_steps = _disturb(engine, random.Random(seed + 1))
        deadline = time.perf_counter() + seconds
        sent: dict[str, _Sent] = {}
        num_sent = num_aborted = 0
        while time.perf_counter() < deadline and engine.failure is None:
            for name in [name for name, one in sent.items() if one.sink.ended.is_set()]:
                judge(sent.pop(name))
            while len(sent) < rng.randint(live // 2, live):
                one = _random_request(rng, spec, prefixes, longest, num_tokens)
                name = engine.submit(
                    one.prompt, one.params, sink=one.sink, tenant=rng.choice("abc"), timeout=one.timeout
                )
                sent[name] = one
                num_sent += 1
            if rng.random() < 0.3 and num_aborted < 0.2 * num_sent:  # however fast the device is
                name = rng.choice(list(sent))
                sent[name].aborted = True
                engine.abort(name)
                num_aborted += 1
            time.sleep(rng.random() * 0.01)
        for one in sent.values():
            one.sink.ended.wait(timeout=120)
            judge(one)
        if engine.failure is None:
            faults += engine.ask(lambda scheduler: scheduler.check_idle(engine.clock())).result()
            retractions = engine.ask(lambda scheduler: scheduler.counters.retractions).result()
        else:
            faults.insert(0, f"the engine failed: {engine.failure}")
            retractions = 0
    reference, plain = lab.decoder(spec, "float32"), lab.decoder(spec)
    prompts, outputs = [one.prompt for one in greedy], [one.sink.tokens for one in greedy]
    ours, theirs = margin(reference, prompts, outputs), margin(reference, prompts, outputs, plain)
    bound = 1.5 * theirs.worst + _ROUNDING
    num_greedy = ended.pop("greedy", 0)
    return Verdict(
        not faults and retractions > 0 and num_greedy > 0 and ours.worst < bound,
        f"{seconds:.0f} s, {sum(ended.values())} requests ({', '.join(f'{n} {what}' for what, n in ended.items())}), "
        f"{num_steps()} steps checked, {retractions} retractions, {len(faults)} faults"
        f"{''.join(': ' + fault for fault in faults[:3])}; of {num_greedy} greedy outputs {len(greedy)} judged, "
        f"{ours.judged} tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (plain torch "
        f"{theirs.wrong}, {theirs.worst:.3f}; bound {bound:.3f})",
    )


def _random_request(
    rng: random.Random, spec: ModelSpec, prefixes: Sequence[list[int]], longest: int, num_tokens: int
) -> _Sent:
    prefix = rng.choice(prefixes) if rng.random() < 0.7 else []
    prompt = prefix[: rng.randint(1, len(prefix))] if prefix and rng.random() < 0.2 else list(prefix)
    prompt += [rng.randrange(spec.vocab_size) for _ in range(rng.randint(1, longest // 2))]
    count = rng.randint(1, num_tokens)
    options: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "temperature": rng.choice((0, 0, 0.6, 1.0))}
    if options["temperature"]:
        options |= {"top_k": rng.choice((None, 1, 40)), "top_p": rng.choice((1.0, 0.9))}
        options["seed"] = rng.choice((None, rng.randrange(1 << 60)))
    if rng.random() < 0.5:  # then its length is not known in advance
        options["stop_token_ids"] = tuple(rng.sample(range(spec.vocab_size), min(64, spec.vocab_size // 4)))
        options["min_tokens"] = rng.choice((0, min(4, count)))
    if rng.random() < 0.3:
        options["logprobs"] = rng.choice((0, 1, 5, 20))
    timeout = rng.choice((0.05, 0.5)) if rng.random() < 0.05 else None
    return _Sent(prompt, SamplingParams(**options), _Clocked(wants_all_at_once=rng.random() < 0.5), timeout=timeout)


def _disturb(engine: Engine, rng: random.Random) -> Callable[[], int]:
    """From now on every step is checked, and now and then a running request loses its memory. Returns a function that
    tells how many steps were."""
    scheduler, loop = engine.scheduler, engine.loop
    plan, step, num_steps = scheduler.plan, loop.step, 0

    def planning(now: float) -> Plan | None:
        running = [*scheduler.admission.decoding, *scheduler.admission.prefilling]
        if running and rng.random() < 0.03 and (victim := rng.choice(running)).retractions < 2:
            scheduler._retract(victim, now, "a soak")
        return plan(now) or plan(now)  # the only one running may have been taken

    def stepping() -> Any:
        nonlocal num_steps
        updates = step()
        check_invariants(scheduler)
        num_steps += 1
        return updates

    def install(_: object) -> None:
        scheduler.plan = planning  # type: ignore[method-assign]
        loop.step = stepping  # type: ignore[method-assign]

    engine.ask(install).result()
    return lambda: num_steps


# ------------------------------------------------------------------ host memory


class _PageSpy:
    """Remembers a checksum of every page that leaves a GPU, and compares when it comes back. All of it runs on the
    engine's stream, where the pass finds the page, and nothing is waited for."""

    def __init__(self, swap: CudaSwap) -> None:
        self._swap, self._spill, self._fetch = swap, swap.spill, swap.fetch
        self._left: dict[int, Tensor] = {}  # by host page
        self._differ: list[Tensor] = []
        self._weights: Tensor | None = None
        swap.spill, swap.fetch = self.spill, self.fetch  # type: ignore[method-assign]

    def spill(self, pages: Tensor, hosts: Column) -> None:
        self._left.update(zip(hosts.tolist(), self._sums(pages).unbind(), strict=True))
        self._spill(pages, hosts)

    def fetch(self, pages: Tensor, hosts: Column, began: Event, arrived: Event) -> None:
        self._fetch(pages, hosts, began, arrived)
        left = torch.stack([self._left[host] for host in hosts.tolist()])
        self._differ.append(left != self._sums(pages))

    def _sums(self, pages: Tensor) -> Tensor:
        """One for each page, that depends on every bit and its place."""
        kv = self._swap._kv
        bits = kv[:, pages.long()].view(torch.int16 if kv.dtype.itemsize == 2 else torch.int32).long()
        if self._weights is None:
            self._weights = 2 * torch.arange(len(bits) * bits.shape[2], device=kv.device).view(len(bits), 1, -1) + 1
        return (bits * self._weights).sum((0, 2))

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._differ))

    @property
    def num_wrong(self) -> int:
        return sum(int(each.sum()) for each in self._differ)


def swap(
    lab: Lab, *, chats: int = 24, turns: int = 4, longest: int = 1500, num_tokens: int = 16, kv_tokens: int = 12_000
) -> Verdict:
    """Chats that do not fit, turn by turn: every page that comes back from host memory holds what left, bit for bit,
    and greedy tokens are within the margin. On four layers."""
    spec, rng = lab.spec(4), random.Random(9)
    histories = _random_prompts(rng, spec.vocab_size, chats, longest)
    asked: list[list[int]] = []
    answers: list[list[int]] = []
    options: dict[str, Any] = {"num_host_pages": 8 * kv_tokens // 16, "max_swap_pages": 48, "host_page_cost": 0.0}
    if lab.options.get("host_kv_tokens"):
        del options["num_host_pages"]
    with lab.llm(spec, kv_tokens=kv_tokens, **options) as llm:
        device = llm.engine.executor
        spy = _PageSpy(device.swap) if isinstance(device, CudaDevice) and device.swap is not None else None
        for _ in range(turns):
            rng.shuffle(histories)
            found = _tokens(llm, histories, _greedy([num_tokens] * chats))
            asked += histories
            answers += found
            questions = _random_prompts(rng, spec.vocab_size, chats, max(2, longest // 8))
            histories = [[*before, *said, *new] for before, said, new in zip(histories, found, questions, strict=True)]
        faults = llm.engine.ask(lambda scheduler: scheduler.check_idle(llm.engine.clock())).result()
        counters = llm.engine.scheduler.counters
        num_wrong = spy.num_wrong if spy is not None else 0
        compared = f"{spy.num_pages} pages compared, {num_wrong} of them wrong" if spy is not None else "none compared"
    reference, plain = lab.decoder(spec, "float32"), lab.decoder(spec)
    some = slice(0, None, 4)
    ours = margin(reference, asked[some], answers[some])
    theirs = margin(reference, asked[some], answers[some], plain)
    bound = 1.5 * theirs.worst + _ROUNDING
    return Verdict(
        counters.fetched_tokens > 0 and not num_wrong and not faults and ours.worst < bound,
        f"{chats} chats of {turns} turns in {kv_tokens} tokens: {counters.spilled_pages} pages spilled, "
        f"{counters.fetched_tokens} tokens fetched, {counters.hit_tokens} found on the device, "
        f"{counters.computed_tokens} computed; {compared}; {ours.judged} greedy tokens, {ours.wrong} not the float32 "
        f"argmax, worst margin {ours.worst:.3f} (plain torch {theirs.wrong}, {theirs.worst:.3f}; bound {bound:.3f}); "
        f"{len(faults)} faults",
    )


# ------------------------------------------------------------------ memory errors


def tiny(lab: Lab) -> Verdict:
    """Prompts and decodes of two layers, some of them with a common prefix: what a slow tool can follow."""
    spec, rng = replace(lab.spec(2), vocab_size=2048), random.Random(1)
    shared = _random_prompts(rng, spec.vocab_size, 1, 80)[0]
    prompts = [shared + own for own in _random_prompts(rng, spec.vocab_size, 3, 20)]
    prompts += _random_prompts(rng, spec.vocab_size, 2, 90)
    options: dict[str, Any] = {
        "max_running": 4, "context_tokens": 512, "max_batch_tokens": 128, "max_prefill_tokens": 128, "chunk_tokens": 64,
    }  # fmt: skip
    with lab.llm(spec, kv_tokens=2048, **options) as llm:
        params = [
            *_greedy([6, 5, 4]),
            SamplingParams(max_tokens=5, ignore_eos=True, top_k=20, seed=1, logprobs=3),
            *_greedy([3]),
        ]
        found = sum(map(len, _tokens(llm, prompts, params)))
    return Verdict(found == 23, f"{found} of 23 tokens")


def sanitizer(command: Sequence[str]) -> Verdict:
    """`command` under compute-sanitizer. Torch's allocator hands out parts of large blocks, so only accesses outside of
    these show."""
    tool = shutil.which("compute-sanitizer")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *sorted(Path("/usr/local").glob("cuda*"))]
    for place in places:
        candidate = place / "bin" / "compute-sanitizer"
        tool = tool or (str(candidate) if candidate.is_file() else None)
    if tool is None:
        return Verdict(None, "this host has no compute-sanitizer")
    began = time.perf_counter()
    run = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "3", "--print-limit", "20", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=540, check=False,
    )  # fmt: skip
    if run.returncode:
        print(run.stdout[-6000:])
    summary = next((line for line in reversed(run.stdout.splitlines()) if "ERROR SUMMARY" in line), "no summary")
    return Verdict(
        run.returncode == 0 and "ERROR SUMMARY: 0 errors" in summary,
        f"exit status {run.returncode}, {summary.strip('= ')}, {time.perf_counter() - began:.0f} s",
    )


CHECKS: dict[str, Callable[[Lab], Verdict]] = {
    "check": check, "logits": logits, "alone": alone, "long": long, "soak": soak, "swap": swap, "tiny": tiny,
}  # fmt: skip
