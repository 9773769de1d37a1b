"""LogitAdjustments of a request's logits before sampling: penalties, logit bias, banned tokens.

They are applied in this order: repetition, frequency and presence penalties, the bias, then the bans. A banned token
gets a logit below all others, but a finite one: where a grammar allows nothing else, it can still be sampled. All
devices use these lists; `adjust_row` is the reference implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.request import Tokens
from paceline.scheduler.plan import Join

BANNED_LOGIT = -1e30
ALWAYS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class LogitAdjustments:
    """The adjustments of one request, without token ids beyond the vocabulary."""

    repetition: float
    frequency: float
    presence: float
    num_prompt_tokens: int
    bias_ids: npt.NDArray[np.int32]
    bias: npt.NDArray[np.float32]
    # banned_ids[i] is banned at positions below banned_until[i], if the tokens before it end with banned_prefixes[i]
    banned_ids: npt.NDArray[np.int32]
    banned_until: npt.NDArray[np.int32]
    banned_prefixes: tuple[tuple[int, ...], ...]

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


def logit_adjustments(join: Join, vocab_size: int) -> LogitAdjustments | None:
    """The adjustments of a request; None if it has none."""
    params = join.params
    bias = {token: value for token, value in params.biases if token < vocab_size}
    banned: list[tuple[int, int, tuple[int, ...]]] = []
    if params.min_tokens:
        # With min_tokens = n, the n-th output token is the first that can end the request.
        first = join.num_prompt_tokens + params.min_tokens - 1
        banned += [(token, first, ()) for token in join.stop_ids if token < vocab_size]
    banned += [(word[-1], ALWAYS, word[:-1]) for word in join.bad_word_ids if word[-1] < vocab_size]
    adjustments = LogitAdjustments(
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        num_prompt_tokens=join.num_prompt_tokens,
        bias_ids=np.array(list(bias), np.int32),
        bias=np.array(list(bias.values()), np.float32),
        banned_ids=np.array([token for token, _, _ in banned], np.int32),
        banned_until=np.array([until for _, until, _ in banned], np.int32),
        banned_prefixes=tuple(prefix for _, _, prefix in banned),
    )
    return adjustments if adjustments.has_penalties or bias or banned else None


def token_counts(tokens: Tokens, num_prompt_tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The distinct tokens of a request, and how often each occurs in the output."""
    ids, where = np.unique(tokens, return_inverse=True)
    counts = np.bincount(where[num_prompt_tokens:], minlength=len(ids))
    return ids.astype(np.int32), counts.astype(np.int32)


def adjust_row(logits: npt.NDArray[np.float32], tokens: Tokens, by: LogitAdjustments) -> None:
    """Adjusts the logits [V] of one row in place; `tokens` are all tokens before the one to sample."""
    if by.has_penalties:
        output, counts = np.unique(tokens[by.num_prompt_tokens :], return_counts=True)
        if by.repetition != 1:
            seen = np.union1d(tokens[: by.num_prompt_tokens], output)
            old, penalty = logits[seen], np.float32(by.repetition)
            logits[seen] = np.where(old > 0, old / penalty, old * penalty)
        logits[output] -= np.float32(by.frequency) * counts.astype(np.float32) + np.float32(by.presence)
    logits[by.bias_ids] += by.bias
    for token, until, prefix in zip(by.banned_ids.tolist(), by.banned_until.tolist(), by.banned_prefixes, strict=True):
        if len(tokens) < until and (not prefix or tuple(tokens[len(tokens) - len(prefix) :].tolist()) == prefix):
            logits[token] = BANNED_LOGIT
