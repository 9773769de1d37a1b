import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from paceline.request import Grammar, InvalidRequest, Request, SamplingParams, as_tokens
from paceline.scheduler.tracked_request import IllegalTransition, Phase, TrackedRequest

LEGAL = {
    (Phase.WAITING, Phase.PREFILL),
    (Phase.WAITING, Phase.FINISHED),
    (Phase.PREFILL, Phase.DECODING),
    (Phase.PREFILL, Phase.WAITING),
    (Phase.PREFILL, Phase.FINISHED),
    (Phase.DECODING, Phase.WAITING),
    (Phase.DECODING, Phase.FINISHED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, Phase)))
def test_only_legal_transitions_are_possible(before: Phase, after: Phase) -> None:
    request = TrackedRequest(Request("r", np.array([1])), phase=before)
    if (before, after) in LEGAL:
        request.enter(after)
        assert request.phase is after
    else:
        with pytest.raises(IllegalTransition, match=f"from {before.value} to {after.value}"):
            request.enter(after)
        assert request.phase is before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 1.5}, "max_tokens is 1.5: give 0 (compute the prompt alone) or more."),
        ({"max_tokens": -5}, "max_tokens is -5: give 0 (compute the prompt alone) or more."),
        ({"min_tokens": -1}, "min_tokens is -1: give 0 or more."),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens is 9, more than max_tokens 4: lower it."),
        ({"temprature": 1}, "SamplingParams has no 'temprature': did you mean temperature?"),
        ({"stop": 5}, "stop is 5: give a list."),
        ({"stop": None}, "stop is None: give a list."),
        ({"stop": {"a": 1}}, "stop is {'a': 1}: give a list."),
        ({"stop": b"a"}, "stop is b'a': give a list."),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: give a list."),
        ({"logit_bias": None}, "logit_bias is None: give a mapping."),
        ({"logit_bias": [1, 2]}, "logit_bias has 1: give a mapping of token ids to numbers."),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes': give True or False."),
    ],
)
def test_errors_of_sampling_parameters_name_field_value_and_remedy(fields: dict, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt is empty"),
        ([1, -2], "negative token id"),
        ([1, -(2**32) + 5], "negative token id"),  # 5, in 32 bits
        ([[1, 2]], "a flat list of token ids"),
        ([1.5], "a flat list of token ids"),
        ([2**40], "is too large"),
    ],
)
def test_an_invalid_prompt_is_rejected(tokens: list, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request("r", np.array(tokens))


def test_compute_from_must_be_a_position_of_the_prompt() -> None:
    with pytest.raises(InvalidRequest, match="compute_from is 3"):
        Request("r", np.array([1, 2, 3]), compute_from=3)


def test_prompt_logprobs_are_computed_from_the_token_before_their_start() -> None:
    def compute_from(start: int, pooling: str | None = None) -> int | None:
        params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start)
        return Request("r", np.array([1, 2, 3]), params, pooling=pooling).compute_from

    assert [compute_from(start) for start in range(3)] == [0, 0, 1]
    assert compute_from(2, pooling="mean") == 0
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start is 3: give a position of the prompt, 0 to 2"):
        compute_from(3)


def test_tokens_become_one_flat_int32_array() -> None:
    tokens = as_tokens([3, 4])
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [3, 4])


@pytest.mark.parametrize(
    "ids",
    [
        [], [0], [2**31 - 1, 0], [2**31], [1, 2**40], [1, 2**64], [-1], [5, -(2**31)], [-(2**31) - 1],
        [1, -(2**32) + 5], [True], [True, 2], [2, True], [1.0], [1, 2.0], [1, 2.5], [1, "a"], ["1"], [1, None],
        [1, [2]], [[1, 2]], [np.int64(5), 6], [5, np.int64(6)], [1, np.int64(2**40)], [1, np.array([2])],
        [1, np.bool_(True)], [1, np.float32(2)],
    ],
)  # fmt: skip
def test_a_packed_list_is_checked_as_numpy_checks_it(ids: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> object:
        try:
            tokens = as_tokens(ids)
        except InvalidRequest as error:
            return str(error)
        assert tokens.dtype == np.int32 and tokens.flags.writeable
        return tokens.tolist()

    packed = outcome()
    monkeypatch.setattr("paceline.request._packed", lambda given: given)
    assert packed == outcome()


def test_sampling_parameters_round_trip_through_msgpack() -> None:
    given = SamplingParams(
        temperature=0.5,
        logit_bias={5: 1.5},
        stop="x",
        bad_words=["a"],
        logprobs=3,
        n=2,
        grammar=Grammar.choice(["a", "b"]),
        stop_token_ids=[1, 2],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams) == given


def test_with_seed_changes_only_the_seed() -> None:
    given = SamplingParams(temperature=0.5, logit_bias={5: 1.5}, stop="x", n=2)
    assert given.with_seed(7) == replace(given, seed=7) and given.seed is None


def test_every_choice_has_its_own_seed_and_one_computes_prompt_logprobs() -> None:
    each = SamplingParams(n=2, best_of=3, seed=2**63 - 2, prompt_logprobs=1).each_choice()
    assert [one.seed for one in each] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [one.prompt_logprobs for one in each] == [1, None, None]
    assert all((one.n, one.best_of, one.logprobs) == (1, None, 0) for one in each)
    assert SamplingParams().each_choice() == [SamplingParams()]
    each = SamplingParams(n=2, prompt_logprobs=1, prompt_logprobs_start=5).each_choice()
    assert [(one.prompt_logprobs, one.prompt_logprobs_start) for one in each] == [(1, 5), (None, 0)]
