"""The benchmark workloads, fixed token by token, so that results compare between runs and machines."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.config import OfflineConfig
from paceline.request import Grammar, Request, SamplingParams

SWEEP_OUTPUTS = (16, 272)  # output tokens of a short and a long run
SHARED_TOKENS = 2048  # of shared-sweep
CHAT_TURNS = 6


def gsp(
    groups: int = 64, per_group: int = 16, *, prefix: int = 2048, own: int = 128, output: int = 256
) -> list[Request]:
    """Generated shared prefix: one system prompt per group, a distinct question per request; shuffled once."""
    tokens = np.random.default_rng(0)
    prompts = []
    for _ in range(groups):
        system = tokens.integers(0, 10_000, prefix)
        prompts += [np.concatenate([system, tokens.integers(0, 10_000, own)]) for _ in range(per_group)]
    random.Random(0).shuffle(prompts)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return [Request(f"gsp-{number}", prompt, params) for number, prompt in enumerate(prompts)]


class OfflineWorkload(NamedTuple):
    """Prompts and their sampling parameters, submitted all at once."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    pooling: str | None = None  # the prompts are embedded, and nothing is generated

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.pooling is not None else sum(each.max_tokens or 0 for each in self.params)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens."""
        return sum(map(len, self.prompts)) + self.num_output_tokens

    def shifted(self, by: int) -> OfflineWorkload:
        """The same with other token ids, so that a repeat finds nothing in the prefix cache."""
        return self._replace(prompts=[[token + by for token in prompt] for prompt in self.prompts])

    def within(self, vocab_size: int) -> OfflineWorkload:
        """The same with token ids below `vocab_size`."""
        return self._replace(prompts=[[token % vocab_size for token in prompt] for prompt in self.prompts])

    def scaled(self, scale: float) -> OfflineWorkload:
        """Fewer requests with shorter prompts and outputs, in proportion; shared prefixes stay shared."""
        if scale == 1:
            return self

        def part(count: int) -> int:
            return max(1, round(count * scale))

        few = part(len(self.prompts))
        return self._replace(
            prompts=[[p[i * len(p) // part(len(p))] for i in range(part(len(p)))] for p in self.prompts[:few]],
            params=[replace(each, max_tokens=part(each.max_tokens or 1)) for each in self.params[:few]],
        )


def nano(num_requests: int = 256) -> OfflineWorkload:
    """The offline benchmark of nano-vllm: 256 prompts of 100 to 1,024 tokens, outputs of 100 to 1,024 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(num_requests)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in range(num_requests)
    ]
    return OfflineWorkload(prompts, params)


def sweep(batch: int, output: int, seed: int = 0) -> OfflineWorkload:
    """`batch` prompts of 128 tokens."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    return OfflineWorkload([[rng.randint(0, 10_000) for _ in range(128)] for _ in range(batch)], [params] * batch)


def shared_sweep(batch: int, output: int, seed: int = 0) -> OfflineWorkload:
    """`sweep`, with the same tokens before every prompt."""
    work, rng = sweep(batch, output, seed), random.Random(-seed - 1)
    prefix = [rng.randint(0, 10_000) for _ in range(SHARED_TOKENS)]
    return work._replace(prompts=[prefix + prompt for prompt in work.prompts])


def long_prompts(num_requests: int = 32, output: int = 32) -> OfflineWorkload:
    """Prompts of 256 to 24,000 tokens, with lengths on a logarithmic scale."""
    rng = random.Random(3)
    lengths = [round(256 * (24_000 / 256) ** (number / max(num_requests - 1, 1))) for number in range(num_requests)]
    rng.shuffle(lengths)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for length in lengths]
    return OfflineWorkload(prompts, [params] * num_requests)


def chats(num_chats: int = 64, output: int = 64) -> OfflineWorkload:
    """Conversations that begin with 1,000 to 3,000 distinct tokens."""
    rng = random.Random(4)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(1000, 3000))] for _ in range(num_chats)]
    return OfflineWorkload(prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)] * num_chats)


def short_texts(num_texts: int = 1000, length: int = 200, seed: int = 0) -> OfflineWorkload:
    """Texts as they are embedded for a search, with one output token each."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for _ in range(num_texts)]
    return OfflineWorkload(prompts, [params] * num_texts)


class TimedRequest(NamedTuple):
    """A request of a workload that arrives over time."""

    at: float  # seconds after the first one
    kind: str
    num_prompt_tokens: int
    num_output_tokens: int

    def scaled(self, scale: float) -> TimedRequest:
        sizes = (max(1, round(count * scale)) for count in (self.num_prompt_tokens, self.num_output_tokens))
        return TimedRequest(self.at, self.kind, *sizes)


def prefill_overload(scale: float = 1.0) -> list[TimedRequest]:
    """190 requests decode, and 60 prompts of 3,000 to 6,000 tokens arrive in 10 s: more than an H200 computes for a 14B
    model. In the end 250 requests decode. `scale`: fraction of the number of requests and of their lengths."""
    rng = random.Random(0)
    streams, prompts = (max(1, round(count * scale)) for count in (190, 60))
    found = [TimedRequest(0.0, "stream", 100, 400)] * streams
    found += [TimedRequest(1 + number / 6, "long", rng.randint(3000, 6000), 100) for number in range(prompts)]
    return [one.scaled(scale) for one in found]


def small_behind_large(scale: float = 1.0) -> list[TimedRequest]:
    """18 prompts of 2,560 tokens and 11 of 256 arrive within 191 ms, the long ones first."""
    kinds = [("large", 2560)] * 18 + [("small", 256)] * 11
    found = [TimedRequest(0.191 * index / (len(kinds) - 1), *kind, 64) for index, kind in enumerate(kinds)]
    return [one.scaled(scale) for one in found]


def sampled(work: OfflineWorkload) -> OfflineWorkload:
    """The same workload with top-k, top-p and all penalties on every row."""
    return OfflineWorkload(
        work.prompts,
        [
            replace(params, top_p=0.9, top_k=50, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.3)
            for params in work.params
        ],
    )


def with_logprobs(work: OfflineWorkload, count: int = 5) -> OfflineWorkload:
    """The same workload with the logprobs of the `count` most likely tokens at every position."""
    return OfflineWorkload(work.prompts, [replace(params, logprobs=count) for params in work.params])


def structured(batch: int, output: int, seed: int = 0) -> OfflineWorkload:
    """`batch` prompts of 128 tokens, each with a JSON schema of its own that needs more than `output` tokens."""
    work = sweep(batch, output, seed)

    def schema(number: int) -> Grammar:
        item = {
            "type": "object",
            "properties": {
                f"name_{number}": {"type": "string", "maxLength": 24},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "kind": {"enum": ["cat", "dog", f"other {number}"]},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
                "weight": {"type": "number"},
                "tame": {"type": "boolean"},
            },
            "required": [f"name_{number}", "age", "kind", "tags", "weight", "tame"],
            "additionalProperties": False,
        }
        return Grammar.json_schema({"type": "array", "items": item, "minItems": output})

    return OfflineWorkload(
        work.prompts,
        [replace(each, ignore_eos=False, grammar=schema(index)) for index, each in enumerate(work.params)],
    )


def gsp_offline() -> OfflineWorkload:
    requests = gsp()
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=requests[0].params.max_tokens)
    return OfflineWorkload([request.prompt.tolist() for request in requests], [params] * len(requests))


def zipf(num_requests: int = 1024, num_prefixes: int = 64) -> OfflineWorkload:
    """Popular and rare prefixes: of 256 to 4,096 tokens, chosen with a probability of 1/rank, each followed by 32 to
    512 tokens of the request's own; 64 to 384 output tokens."""
    rng, tokens = random.Random(5), np.random.default_rng(5)
    prefixes = [tokens.integers(0, 10_000, rng.randint(256, 4096)) for _ in range(num_prefixes)]
    chosen = rng.choices(prefixes, [1 / rank for rank in range(1, num_prefixes + 1)], k=num_requests)
    prompts = [[*prefix.tolist(), *tokens.integers(0, 10_000, rng.randint(32, 512)).tolist()] for prefix in chosen]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(64, 384)) for _ in range(num_requests)
    ]
    return OfflineWorkload(prompts, params)


def num_part_tokens(part: str, config: OfflineConfig) -> int:
    """About how many prompt and output tokens a part of `paceline bench offline` computes at full scale."""
    runs = config.repeats * len(config.overlap_modes)
    compared = 2 * (2 * config.repeats + 1)
    match part:
        case "nano":
            return runs * nano().num_tokens
        case "gsp":
            return runs * gsp_offline().num_tokens // 4  # most of it is found in the prefix cache
        case "zipf":
            return runs * zipf().num_tokens // 4
        case "prompts":
            return runs * long_prompts().num_tokens
        case "chats":
            return runs * CHAT_TURNS * chats().num_tokens
        case "sweep" | "shared-sweep":
            each = sum(sweep(1, count).num_tokens for count in SWEEP_OUTPUTS)
            shared = len(SWEEP_OUTPUTS) * len(config.batch_sizes) * SHARED_TOKENS if part == "shared-sweep" else 0
            return 2 * len(config.overlap_modes) * (sum(config.batch_sizes) * each + shared)
        case "sampling":
            return compared * nano().num_tokens
        case "logprobs":
            return compared * (64 + 256) * sweep(1, 256).num_tokens
        case "grammar":
            return compared * 64 * sweep(1, 256).num_tokens
        case "embed":
            return 2 * compared * short_texts().num_tokens
        case "prefill-overload" | "small-behind-large":
            work = prefill_overload() if part == "prefill-overload" else small_behind_large()
            return (1 + config.repeats) * sum(one.num_prompt_tokens + one.num_output_tokens for one in work)
    return 0
