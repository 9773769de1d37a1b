"""`paceline bench quality`: what a precision costs. Compares the next-token distributions of two models on a text.

Both models get the same tokens, whatever they would have chosen (teacher forcing), through the decoder, the attention
and the KV cache that serve on a CPU. Distributions are compared over the whole vocabulary, in float64. The default
text, `quality.txt`, is a copy of documentation that is never updated, so that figures compare between versions.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.config import ConfigError, EngineConfig, QualityConfig
from paceline.engine.build import find_source, resolve_here
from paceline.engine.build.facts import CPU
from paceline.engine.build.load import load_model
from paceline.engine.cpu.inputs import SlotTables
from paceline.engine.cpu.kv_cache import KVCache
from paceline.engine.cpu.quantized_model import DecoderModel, attention_for
from paceline.engine.cpu.rounded_kv import calibrated_scales, rounding
from paceline.engine.cuda.kv_scales import calibration_ids
from paceline.engine.precision import FP8_KV
from paceline.model.decoder import Attend
from paceline.model.read_spec import read_spec
from paceline.text.load import load_tokenizer
from paceline.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_suffix(".txt")
DEPTHS = (0, 25, 50, 75, 100)  # where the fact is, in percent of the filler text
_KEYS = ("lighthouse", "violin", "glacier", "bakery", "compass", "orchard", "submarine", "windmill")
_DIGITS = 6
_PAGE_SIZE = 16
_CHUNK_TOKENS = 512  # of a forward pass
_CHUNK_ROWS = 64  # whose distributions are in memory, in float64


@dataclass(frozen=True, slots=True)
class TextResult:
    """Two models on one text. KL is that of `model` from `against`, in nats per token."""

    num_tokens: int  # that were predicted
    perplexity: float
    against_perplexity: float
    mean_kl: float
    worst_kl: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """A fact hidden in a prompt: log-probability of the right answer, and whether greedy decoding gives it."""

    length: int
    depth: int
    logprob: float
    against_logprob: float
    found: bool
    against_found: bool


@dataclass(frozen=True, slots=True)
class Needle:
    tokens: list[int]  # the prompt, then the answer
    num_answer_tokens: int


class ScoredModel:
    """A model with a KV cache for one sequence."""

    def __init__(self, decoder: DecoderModel, max_tokens: int, *, fp8_kv: bool = False) -> None:
        self.decoder = decoder
        self.scales: list[Tensor] | None = None  # of a KV cache in FP8
        num_pages = -(-max_tokens // _PAGE_SIZE)
        self._tables = SlotTables(1, max_tokens, _PAGE_SIZE)
        self._tables.pages[0], self._tables.prompts[0] = np.arange(num_pages), max_tokens
        self._attention = attention_for(decoder, KVCache(decoder.spec, num_pages, _PAGE_SIZE, decoder.kv_dtype))
        if fp8_kv:
            ids = calibration_ids(decoder.spec, max_tokens)
            self.scales = calibrated_scales(decoder, ids, self._begin(0, len(ids))[2])

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """What `forward` returns for every token of a sequence."""
        self._tables.tokens[0, : len(tokens)] = tokens
        parts = []
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            length = min(_CHUNK_TOKENS, len(tokens) - start)
            ids, positions, attend = self._begin(start, length)
            if self.scales is not None:
                attend = rounding(attend, self.scales)
            parts.append(self.decoder.forward(ids, positions, attend))
        return torch.cat(parts)

    def _begin(self, start: int, length: int) -> tuple[Tensor, Tensor, Attend]:
        inputs = self._tables.row_inputs(np.zeros(1, np.int64), np.array([start]), np.array([length]))
        return torch.from_numpy(inputs.tokens), torch.from_numpy(inputs.positions), self._attention.begin(inputs)

    def logprobs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [rows, vocabulary] of the next token, in float64."""
        return self.decoder.logits(hidden).double().log_softmax(-1)


def bench(config: QualityConfig, path: Path, against_path: Path) -> None:
    text = read_text(TEXT if config.text is None else Path(config.text))
    paths = (path, against_path)
    specs, tokenizers = [read_spec(one) for one in paths], [load_tokenizer(one) for one in paths]
    tokens = _tokens_of(text, tokenizers, [spec.vocab_size for spec in specs])
    needles = [
        (length, depth, needle)
        for length in config.lengths
        for depth, needle in make_needles(tokenizers[0], tokens, length, config.needle_seed)
    ]
    for name, value in (("window", config.window), *(("needle_lengths", length) for length in config.lengths)):
        if value > (most := min(spec.context_tokens for spec in specs)):
            raise ConfigError(f"{name} has {value}, more than the context of {most} tokens: lower it.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    longest = max([config.window, *config.lengths])
    model = _load(path, config.dtype, config.quantization, longest, config.kv_dtype)
    against = _load(against_path, config.against_dtype, config.against_quantization, longest)
    names = [
        f"{one.name}, {scored.decoder.precision}{'' if scored.scales is None else ', KV in FP8'}"
        for one, scored in zip(paths, (model, against), strict=True)
    ]
    found = compare_text(model, against, tokens[: config.text_tokens], config.window)
    console = Console()
    for role, name in zip(("model", "against"), names, strict=True):
        print(f"{role}: {name}")
    console.print(_text_table(found))
    report = {"model": names[0], "against": names[1], "window": config.window, **asdict(found)}
    if needles:
        results = [compare_needle(model, against, needle, length, depth) for length, depth, needle in needles]
        console.print(_needle_table(results))
        report["needles"] = [asdict(one) for one in results]
    print(json.dumps(report))


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"text is {str(path)!r}, which cannot be read ({error.strerror}): give a text file."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"text is {str(path)!r}, which is not UTF-8 (byte {error.start}): convert it, for example with iconv."
        ) from None
    if not text.strip():
        raise ConfigError(f"text is {str(path)!r}, which is empty: give a file with some hundred words.")
    return text


def compare_text(model: ScoredModel, against: ScoredModel, tokens: Sequence[int], window: int) -> TextResult:
    """Every window begins a sequence of its own: its first token is not predicted."""
    losses, against_losses, kl, agreements = [], [], [], []
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window]
        targets = torch.tensor(part[1:])
        hidden, against_hidden = model.hidden(part), against.hidden(part)
        for row in range(0, len(targets), _CHUNK_ROWS):
            rows = slice(row, min(row + _CHUNK_ROWS, len(targets)))
            logprobs, reference = model.logprobs(hidden[rows]), against.logprobs(against_hidden[rows])
            chosen = targets[rows, None]
            losses.append(-logprobs.gather(1, chosen)[:, 0])
            against_losses.append(-reference.gather(1, chosen)[:, 0])
            agreements.append(logprobs.argmax(-1) == reference.argmax(-1))
            kl.append((reference.exp() * (reference - logprobs)).sum(-1))
    divergence = torch.cat(kl)
    return TextResult(
        len(divergence),
        math.exp(torch.cat(losses).mean()),
        math.exp(torch.cat(against_losses).mean()),
        float(divergence.mean()),
        float(divergence.max()),
        float(torch.cat(agreements).double().mean()),
    )


def make_needles(tokenizer: Tokenizer, filler: Sequence[int], length: int, seed: int) -> Iterator[tuple[int, Needle]]:
    """Prompts of `length` tokens, answer included, that hide a fact in the filler text; one for each depth."""
    rng = random.Random(f"{seed} {length}")
    for depth in DEPTHS:
        key, value = rng.choice(_KEYS), "".join(rng.choices("0123456789", k=_DIGITS))
        fact = f"The secret number of the {key} is"
        asked = f"\n\nQuestion: What is the secret number of the {key}?\nAnswer: {fact}"
        hidden, question, whole = (
            tokenizer.encode(one, add_special=False) for one in (f"\n\n{fact} {value}.\n\n", asked, f"{asked} {value}")
        )
        begin = tokenizer.encode("")
        num_filler = length - len(begin) - len(hidden) - len(whole)
        if num_filler < 1:
            raise ConfigError(
                f"needle_lengths has {length}, and the fact and the question alone take {length - num_filler} tokens: "
                "raise it."
            )
        text = [filler[index % len(filler)] for index in range(num_filler)]
        cut = num_filler * depth // 100
        # Not the length of the question: a tokenizer may merge its end with the answer.
        num_same = next(at for at, token in enumerate(whole) if token not in question[at : at + 1])
        yield depth, Needle([*begin, *text[:cut], *hidden, *text[cut:], *whole], len(whole) - num_same)


def compare_needle(model: ScoredModel, against: ScoredModel, needle: Needle, length: int, depth: int) -> NeedleResult:
    scores = []
    count = needle.num_answer_tokens
    answer = torch.tensor(needle.tokens[-count:])
    for one in (model, against):
        logprobs = one.logprobs(one.hidden(needle.tokens[:-1])[-count:])
        scores.append((float(logprobs.gather(1, answer[:, None]).sum()), bool((logprobs.argmax(-1) == answer).all())))
    (logprob, found), (against_logprob, against_found) = scores
    return NeedleResult(length, depth, logprob, against_logprob, found, against_found)


def _tokens_of(text: str, tokenizers: Sequence[Tokenizer], vocab_sizes: Sequence[int]) -> list[int]:
    """The tokens of the text, if they are the same for both models."""
    one, other = tokenizers
    if vocab_sizes[0] != vocab_sizes[1]:
        raise ConfigError(
            f"against has a vocabulary of {vocab_sizes[1]:,} tokens and model one of {vocab_sizes[0]:,}: distributions "
            "can be compared over the same tokens only; choose models with the same tokenizer."
        )
    tokens = one.encode(text)
    if one.vocabulary() != other.vocabulary() or tokens != other.encode(text):
        raise ConfigError("against has another tokenizer than model: choose models with the same tokenizer.")
    if len(tokens) < 2:
        raise ConfigError("text has a single token, and nothing to predict: give a longer one.")
    return tokens


def _load(path: Path, dtype: str, quantization: str, max_positions: int, kv_dtype: str = "auto") -> ScoredModel:
    is_fp8 = kv_dtype == FP8_KV  # computed by `ScoredModel`
    config = EngineConfig(device=CPU, dtype=dtype, quantization=quantization, kv_dtype="auto" if is_fp8 else kv_dtype)
    source = find_source(path)
    found = resolve_here(config, {}, source)
    if is_fp8 and found.weights.quantization != "none":
        raise ConfigError(
            f"kv_dtype is {kv_dtype!r} and weights stay in 4 or 8 bits, whose KV is in bfloat16: set "
            "quantization to none."
        )
    found.log_choices()
    decoder = load_model(source, found.weights, CPU, max_positions=max_positions)
    return ScoredModel(decoder, max_positions, fp8_kv=is_fp8)


def _text_table(found: TextResult) -> Table:
    table = Table(title=f"{found.num_tokens:,} predicted tokens", show_header=False)
    table.add_row("perplexity of model", f"{found.perplexity:.4f}")
    table.add_row("perplexity of against", f"{found.against_perplexity:.4f}")
    table.add_row("KL, mean", f"{found.mean_kl:.6f}")
    table.add_row("KL, worst", f"{found.worst_kl:.6f}")
    table.add_row("top-1 agreement", f"{found.top1_agreement:.4f}")
    return table


def _needle_table(results: Sequence[NeedleResult]) -> Table:
    table = Table(title="needle in a haystack: log-probability of the answer, greedy decoding")
    for title in ("tokens", "depth", "model", "against", "difference", "model", "against"):
        table.add_column(title, justify="right")
    for one in results:
        table.add_row(
            f"{one.length:,}",
            f"{one.depth}%",
            f"{one.logprob:.3f}",
            f"{one.against_logprob:.3f}",
            f"{one.logprob - one.against_logprob:+.3f}",
            "found" if one.found else "not found",
            "found" if one.against_found else "not found",
        )
    return table
