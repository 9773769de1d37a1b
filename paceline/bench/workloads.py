"""The workloads figures are given for, exactly, so that they compare."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.request import Grammar, Request, SamplingParams


def gsp(
    groups: int = 64, per_group: int = 16, *, prefix: int = 2048, own: int = 128, output: int = 256
) -> list[Request]:
    """Shared prefixes: every group has a system prompt, every request some tokens of its own; shuffled once."""
    tokens = np.random.default_rng(0)
    prompts = []
    for _ in range(groups):
        system = tokens.integers(0, 10_000, prefix)
        prompts += [np.concatenate([system, tokens.integers(0, 10_000, own)]) for _ in range(per_group)]
    random.Random(0).shuffle(prompts)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return [Request(f"gsp-{number}", prompt, params) for number, prompt in enumerate(prompts)]


class Offline(NamedTuple):
    """Prompts to generate from, all at once."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def num_output_tokens(self) -> int:
        return sum(each.max_tokens or 0 for each in self.params)

    def shifted(self, by: int) -> Offline:
        """The same with other token ids, so that a repeat finds nothing in the cache."""
        return Offline([[token + by for token in prompt] for prompt in self.prompts], self.params)

    def within(self, vocab_size: int) -> Offline:
        """The same where a model knows fewer tokens than these."""
        return Offline([[token % vocab_size for token in prompt] for prompt in self.prompts], self.params)

    def scaled(self, scale: float) -> Offline:
        """Fewer requests, with prompts and outputs shorter in proportion: what they share they go on sharing."""
        if scale == 1:
            return self

        def part(count: int) -> int:
            return max(1, round(count * scale))

        few = part(len(self.prompts))
        return Offline(
            [[p[i * len(p) // part(len(p))] for i in range(part(len(p)))] for p in self.prompts[:few]],
            [replace(each, max_tokens=part(each.max_tokens or 1)) for each in self.params[:few]],
        )


def nano(num_requests: int = 256) -> Offline:
    """The offline benchmark of the small engines: 256 prompts of 100 to 1,024 tokens, as many tokens out."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(num_requests)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in range(num_requests)
    ]
    return Offline(prompts, params)


def sweep(batch: int, output: int, seed: int = 0) -> Offline:
    """`batch` prompts of 128 tokens."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    return Offline([[rng.randint(0, 10_000) for _ in range(128)] for _ in range(batch)], [params] * batch)


def long_prompts(num_requests: int = 32, output: int = 32) -> Offline:
    """Prompts of 256 to 24,000 tokens, as many of each magnitude."""
    rng = random.Random(3)
    lengths = [round(256 * (24_000 / 256) ** (number / max(num_requests - 1, 1))) for number in range(num_requests)]
    rng.shuffle(lengths)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for length in lengths]
    return Offline(prompts, [params] * num_requests)


def chats(num_chats: int = 64, output: int = 64) -> Offline:
    """Chats that begin with 1,000 to 3,000 tokens of their own."""
    rng = random.Random(4)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(1000, 3000))] for _ in range(num_chats)]
    return Offline(prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)] * num_chats)


def sampled(work: Offline) -> Offline:
    """The same work with top-k, top-p and all penalties on every row."""
    return Offline(
        work.prompts,
        [
            replace(params, top_p=0.9, top_k=50, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.3)
            for params in work.params
        ],
    )


def with_logprobs(work: Offline, count: int = 5) -> Offline:
    """The same work with so many alternatives to every token."""
    return Offline(work.prompts, [replace(params, logprobs=count) for params in work.params])


def structured(batch: int, output: int, seed: int = 0) -> Offline:
    """`batch` prompts of 128 tokens, each answered by a schema of its own that cannot end before `output` tokens."""
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

    return Offline(
        work.prompts,
        [replace(each, ignore_eos=False, grammar=schema(index)) for index, each in enumerate(work.params)],
    )


def gsp_offline() -> Offline:
    requests = gsp()
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=requests[0].params.max_tokens)
    return Offline([request.prompt.tolist() for request in requests], [params] * len(requests))
