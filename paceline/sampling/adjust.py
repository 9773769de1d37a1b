"""What changes a request's logits before a token is chosen: penalties, biases, tokens that may not come.

In this order: repetition, frequency and presence penalties, the bias, then what is forbidden. A forbidden token gets a
logit that no other loses against, yet a finite one: where a grammar leaves nothing else, it may still be chosen.
Both kinds of device take their lists from here; `adjust_row` is the plain way to apply them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.request import Tokens
from paceline.scheduler.plan import Join

FORBIDDEN = -1e30
ALWAYS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """One request's lists. Token ids beyond the vocabulary are not in them."""

    repetition: float
    frequency: float
    presence: float
    num_prompt_tokens: int
    bias_ids: npt.NDArray[np.int32]
    bias: npt.NDArray[np.float32]
    # forbidden[i] may not stand at positions below until[i], nor ever after the tokens prefixes[i]
    forbidden: npt.NDArray[np.int32]
    until: npt.NDArray[np.int32]
    prefixes: tuple[tuple[int, ...], ...]

    @property
    def penalises(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


def adjustments_of(join: Join, vocab_size: int) -> Adjustments | None:
    """None for a request whose logits stay as they are."""
    params = join.params
    bias = {token: value for token, value in params.biases if token < vocab_size}
    banned: list[tuple[int, int, tuple[int, ...]]] = []
    if params.min_tokens:
        # With min_tokens = n, the n-th output token is the first that may end the request.
        first = join.num_prompt_tokens + params.min_tokens - 1
        banned += [(token, first, ()) for token in join.stop_ids if token < vocab_size]
    banned += [(word[-1], ALWAYS, word[:-1]) for word in join.bad_word_ids if word[-1] < vocab_size]
    found = Adjustments(
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty, join.num_prompt_tokens,
        np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32),
        np.array([token for token, _, _ in banned], np.int32), np.array([until for _, until, _ in banned], np.int32),
        tuple(prefix for _, _, prefix in banned),
    )  # fmt: skip
    return found if found.penalises or bias or banned else None


def seen_tokens(tokens: Tokens, num_prompt_tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Every token of a request once, and how often each stands in the output."""
    ids, where = np.unique(tokens, return_inverse=True)
    counts = np.bincount(where[num_prompt_tokens:], minlength=len(ids))
    return ids.astype(np.int32), counts.astype(np.int32)


def adjust_row(logits: npt.NDArray[np.float32], tokens: Tokens, by: Adjustments) -> None:
    """Changes one row's logits [V]; `tokens` are all that stand before the one to be chosen."""
    if by.penalises:
        output, counts = np.unique(tokens[by.num_prompt_tokens :], return_counts=True)
        if by.repetition != 1:
            seen = np.union1d(tokens[: by.num_prompt_tokens], output)
            found = logits[seen]
            logits[seen] = np.where(found > 0, found / np.float32(by.repetition), found * np.float32(by.repetition))
        logits[output] -= np.float32(by.frequency) * counts.astype(np.float32) + np.float32(by.presence)
    logits[by.bias_ids] += by.bias
    for token, until, prefix in zip(by.forbidden.tolist(), by.until.tolist(), by.prefixes, strict=True):
        if len(tokens) < until and (not prefix or tuple(tokens[len(tokens) - len(prefix) :].tolist()) == prefix):
            logits[token] = FORBIDDEN
