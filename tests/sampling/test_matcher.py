"""Masks of drafts: those that plain decoding would compute token by token. A wrong draft leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.request import Grammar, Request, SamplingParams
from paceline.sampling import grammar_source as grammar_module
from paceline.sampling.grammar import Grammars
from paceline.scheduler.plan import Updates
from paceline.scheduler.tracked_request import Phase, TrackedRequest
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer
from tests.sampling.test_grammar import SCHEMAS

VOCAB = 600
EOS = (2, 1)
TOKENIZER = Tokenizer(synthetic_tokenizer(VOCAB)._core, eos_ids=EOS)
A, B, C, D = (TOKENIZER.encode(letter, add_special=False)[0] for letter in "abcd")
GRAMMARS = [
    *(Grammar.json_schema(schema) for schema in SCHEMAS[:24]),
    Grammar.regex("[ab]{2,6}"),
    Grammar.regex("(ab){3}c*"),
    Grammar.choice(["abc", "abd", "b"]),
    Grammar.lark('start: "a" start "b" | "c"'),
]


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, VOCAB)
    yield made
    made.close()


def new_request() -> TrackedRequest:
    return TrackedRequest(Request("a", np.arange(3), SamplingParams()))


def attached(grammars: Grammars, grammar: Grammar) -> TrackedRequest:
    request = new_request()
    grammars.attach(request, grammars.compile(grammar).result(30))
    return request


def buffer(masks: int, words: int) -> Any:
    """What was in the buffer before must not matter."""
    return np.random.default_rng(masks).integers(-(2**31), 2**31, (masks, words)).astype(np.int32)


def advance(grammars: Grammars, request: TrackedRequest, tokens: list[int]) -> list[str]:
    """Commits tokens of one pass. Returns why the grammar failed, if it did."""
    request.output.extend(tokens)
    updates = Updates((request,) * len(tokens), np.array(tokens, np.int32), (), frozenset())
    return [reason for _, reason in grammars.advance(updates)]


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_requests_of_one_grammar_share_its_first_mask(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.regex("[ab]{2,6}")
    requests = [attached(grammars, grammar) for _ in range(8)]
    computed, executor = list[int](), grammars._executor

    class Executor:
        consume_token_par = executor.consume_token_par

        def unsafe_compute_mask_ptr(self, rows: Any, *arguments: Any) -> None:
            computed.append(len(rows))
            executor.unsafe_compute_mask_ptr(rows, *arguments)

    monkeypatch.setattr(grammars, "_executor", Executor())
    matcher = grammars.compile(grammar).result().matcher.deep_copy()
    first = np.frombuffer(matcher.compute_bitmask(), np.int32)
    assert (grammars.masks(requests, buffer).bits == first).all() and not computed
    assert not advance(grammars, requests[3], [B])
    matcher.consume_token(B)
    masks = grammars.masks(requests, buffer).bits
    assert (np.delete(masks, 3, axis=0) == first).all() and computed == [1]
    assert (masks[3] == np.frombuffer(matcher.compute_bitmask(), np.int32)).all()


class Plain:
    """Plain decoding: one token after the other, and a mask for each."""

    def __init__(self, grammars: Grammars, compiled: Any, output: list[int]) -> None:
        self._grammars, self._request = grammars, new_request()
        grammars.attach(self._request, compiled)
        for token in output:
            assert not advance(grammars, self._request, [token])
        self.masks = [self._mask()]  # after the output, and after each further token

    def _mask(self) -> list[int]:
        return allowed(self._grammars.masks([self._request], buffer).bits[0])

    def consume(self, token: int) -> bool:
        """Whether the token is allowed. If not, nothing changes."""
        if token not in self.masks[-1]:
            return False
        assert not advance(self._grammars, self._request, [token])
        self.masks.append(self._mask())
        return True


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.source[:40])
def test_masks_of_drafts_are_those_of_plain_decoding(grammars: Grammars, grammar: Grammar) -> None:
    rng, compiled = random.Random(3), grammars.compile(grammar).result(30)
    num_forbidden = 0
    for _ in range(6):
        request, output, passes = new_request(), list[int](), 0
        grammars.attach(request, compiled)
        while passes < 6 and not any(token in EOS for token in output[:-2]):
            plain, drafts, is_right = Plain(grammars, compiled, output), list[int](), True
            for _ in range(rng.randint(0, 7)):  # allowed ones, then perhaps a random one, then any
                drafts.append(rng.choice(plain.masks[-1]) if rng.random() < 0.9 else rng.randrange(3, VOCAB))
                is_right = is_right and plain.consume(drafts[-1])
            expected = plain.masks
            masks = grammars.masks([request], buffer, [drafts])
            assert masks.rows.tolist() == list(range(1 + len(drafts)))
            assert [allowed(mask) for mask in masks.bits[: len(expected)]] == expected
            num_right = len(expected) - 1
            num_forbidden += num_right < len(drafts)
            accepted = [*drafts[: rng.randint(0, num_right)]]
            accepted.append(rng.choice(expected[len(accepted)]))  # what is sampled behind them, often not the draft
            assert not advance(grammars, request, accepted)
            output += accepted
            passes += 1
        grammars.detach(request)
    assert num_forbidden, "no draft was forbidden"


def test_only_eos_follows_an_eos(grammars: Grammars) -> None:
    """With `min_tokens` or `ignore_eos` a request does not end there."""
    request = attached(grammars, Grammar.regex("[ab]{2,6}"))
    assert not advance(grammars, request, [A, B])
    for eos in EOS:
        bits = grammars.masks([request], buffer, [[eos, EOS[0], EOS[1], A]]).bits
        assert {eos, A, B} <= set(allowed(bits[0]))
        assert [allowed(mask) for mask in bits[1:4]] == [sorted(EOS)] * 3
    assert not advance(grammars, request, [EOS[1]])
    assert [allowed(mask) for mask in grammars.masks([request], buffer, [[EOS[0], A]]).bits[:2]] == [sorted(EOS)] * 2


def test_each_row_has_masks_for_its_own_drafts(grammars: Grammars) -> None:
    """Beside rows without drafts, rows without a grammar, and rows that have ended."""
    one, two, three = (attached(grammars, Grammar.regex(pattern)) for pattern in ("[ab]{4}", "c[ab]d", "[bc]{4}"))
    gone = attached(grammars, Grammar.regex("a"))
    gone.enter(Phase.FINISHED)
    free = new_request()
    sampled = [free, one, gone, two, free, three]
    drafts = [[D, D], [A, B, A], [A], [], [D], [B, D, B]]
    for start in (False, True):
        if start:
            grammars.start_masks(sampled, buffer, drafts)
            masks = grammars.wait_masks()
        else:
            masks = grammars.masks(sampled, buffer, drafts)
        rows = dict(zip(masks.rows.tolist(), map(allowed, masks.bits), strict=True))
        assert list(rows) == [*range(3, 7), 9, *range(12, 16)]
        assert [set(rows[at]) & {A, B, C, D, *EOS} for at in range(3, 7)] == [{A, B}] * 4
        assert C in rows[9] and not {A, B, D} & set(rows[9])
        assert [set(rows[at]) & {A, B, C, D} for at in (12, 13)] == [{B, C}] * 2


def test_tokens_of_one_pass_are_consumed_in_order(grammars: Grammars) -> None:
    one, two = attached(grammars, Grammar.regex("abab")), attached(grammars, Grammar.regex("[ab][cd]{9}"))
    updates = Updates((one, one, two, one), np.array([A, B, A, A], np.int32), (), frozenset())
    assert not grammars.advance(updates)
    first, second = (allowed(mask) for mask in grammars.masks([one, two], buffer).bits)
    assert first == [B] and C in second and not {A, B} & set(second)
    assert len(advance(grammars, one, [B, A, D])) == 1, "a grammar that fails is reported once"
    assert not grammars.apply_to([one]) and grammars.apply_to([two])


AMBIGUOUS = Grammar.lark('start: "c" "d"{1,30} | "a" many\nmany: many many | "b"')  # the cost of `many` grows
COSTLY = [A, *[B] * 12]


@pytest.fixture
def limited(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr(grammar_module, "_LIMITS", {**grammar_module._LIMITS, "step_max_items": 50})
    return grammars


def test_a_draft_that_exceeds_the_cost_limit_does_not_end_its_request(limited: Grammars) -> None:
    request = attached(limited, AMBIGUOUS)
    bits = limited.masks([request], buffer, [COSTLY]).bits
    assert {A, C} <= set(allowed(bits[0])) and B in allowed(bits[1]) and (bits[-1] == -1).all()
    assert not advance(limited, request, [C]), "the draft was wrong"
    assert D in allowed(limited.masks([request], buffer, [[D, D]]).bits[2])
    assert not advance(limited, request, [D, D, D])


def test_a_request_ends_where_its_output_exceeds_the_cost_limit(limited: Grammars) -> None:
    """At the same token with and without drafts."""
    plain = attached(limited, AMBIGUOUS)
    for token in COSTLY:
        limited.masks([plain], buffer)
        if failed := advance(limited, plain, [token]):
            break
    drafted = attached(limited, AMBIGUOUS)
    limited.masks([drafted], buffer, [COSTLY])
    assert advance(limited, drafted, COSTLY[: len(plain.output) - 1]) == []
    limited.masks([drafted], buffer, [[B, B]])
    assert advance(limited, drafted, [B]) == failed and "cost limit" in failed[0]
    whole = attached(limited, AMBIGUOUS)
    limited.masks([whole], buffer, [COSTLY])
    assert advance(limited, whole, COSTLY) == failed
