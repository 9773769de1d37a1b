"""Templates in the style of published ones render as in plain Jinja, and texts of users add no control token."""

from __future__ import annotations

import pytest

from tests.text.published_templates import control_faults, conversations, plain, rendering_faults, trial_fault
from tests.text.template_shapes import SHAPES

_FEW = 6  # conversations that even the strictest family renders


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_renders_byte_for_byte_as_in_plain_jinja(name: str) -> None:
    source = SHAPES[name]
    assert sum(plain(source, arguments) is not None for _, arguments in conversations()) >= _FEW
    assert not rendering_faults(source)


@pytest.mark.parametrize("name", SHAPES)
def test_hostile_text_adds_no_control_token(name: str) -> None:
    assert not control_faults(SHAPES[name])[0]


def test_the_trial_at_the_start_accepts_every_family() -> None:
    assert not trial_fault(list(SHAPES.values()))
