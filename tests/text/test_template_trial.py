"""A template that does not keep its limits is refused before the server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine.build import build_engine
from paceline.model.spec import ModelError
from paceline.text.synthetic import CHATML
from paceline.text.template_trial import TemplateTrial
from tests.tiny_folder import save_tiny_model

HOSTILE = {
    "a limit of the sandbox": ("{{ 'x' * 999999999 }}", r"made a text of more than"),
    "a limit for long conversations": (
        "{% for m in messages %}{% for n in messages %}{% for i in range(20) %}{% endfor %}{% endfor %}{% endfor %}",
        r"(ran for more than 200,000 steps|runs for more than 1 s)",
    ),
    "time": (
        "{% set t = 'x' * 999999 %}{% for i in range(9999) %}{% for j in range(15) %}{{ 'z' in t }}{% endfor %}"
        "{% endfor %}",
        r"runs for more than 1 s",
    ),
    "memory": (
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = n.x + ['x' * 999000 ~ '\U0001d11e'] %}"
        "{% endfor %}",
        r"(ran out of memory|made too many long texts)",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name: str) -> None:
    source, words = HOSTILE[name]
    with pytest.raises(ModelError, match=rf"The model's chat template {words}"):
        TemplateTrial([CHATML, source]).check()


@pytest.mark.parametrize(
    "source",
    [CHATML, "{{ raise_exception('no') }}", "{{ messages[0].nothing.at_all }}", "{% nonsense %}"],
)
def test_others_are_not(source: str) -> None:
    """Also those that refuse every conversation: requests without messages may be what the model is for."""
    TemplateTrial([source]).check()


def test_a_model_with_a_hostile_template_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ 'x' * 999999999 }}")
    with pytest.raises(ModelError, match=r"chat template made a text of more than .* in a trial at the start"):
        build_engine(folder)
