"""The comparison of two records of `python -m tests.characterization`: what it reports, and what it tolerates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.characterization.__main__ import differences

RAN = {"case": "a", "precision": "float32", "tokens": [[1, 2], [3]], "logprobs": [[-0.5, -1.0], [-2.0]]}
REFUSED = {"case": "a", "refused": "ConfigError: no"}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (RAN, RAN, []),
        (RAN, {**RAN, "tokens": [[1, 7], [3]]}, ["tokens differ: prompt 0 at 1"]),
        (RAN, {**RAN, "logprobs": [[-0.5, -1.0], [-2.0001]]}, []),
        (RAN, {**RAN, "logprobs": [[-0.5, -1.1], [-2.0]]}, ["logprobs differ by 0.1"]),
        (RAN, {**RAN, "precision": "float16"}, ["precision was float32, is float16"]),
        (REFUSED, {**REFUSED, "refused": "ConfigError: never"}, ["refused was ConfigError: no, is ConfigError: never"]),
        (
            RAN,
            REFUSED,
            ["precision was float32, is missing", "refused was missing, is ConfigError: no", "tokens are gone"],
        ),
        (REFUSED, {**REFUSED, "planned_bytes": 3}, []),
    ],
)
def test_everything_but_small_differences_of_logprobs_is_reported(before: Any, after: Any, expected: list[str]) -> None:
    assert list(differences(before, after, atol=1e-3, ignored=["planned_bytes"])) == expected
