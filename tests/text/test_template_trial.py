"""A template that does not keep its limits is refused before the server starts."""

from __future__ import annotations

import pytest

from paceline.model.spec import ModelError
from paceline.text.synthetic import CHATML
from paceline.text.template_trial import TemplateTrial

HOSTILE = {
    "a limit of the sandbox": ("{{ 'x' * 999999999 }}", r"made a text of more than"),
    "a limit for long conversations": (
        "{% for m in messages %}{% for n in messages %}{{ m.content == n.content }}{% endfor %}{% endfor %}",
        r"ran for more than 200,000 steps",
    ),
    "time": (
        "{% for i in range(9999) %}{% for m in messages %}{{ 'z' in m.content * 9 }}{% endfor %}{% endfor %}",
        r"runs for more than 1 s",
    ),
    "memory": (
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}"
        "{% set n.x = n.x + [messages[0].content * 2 ~ 'é' ~ i] %}{% endfor %}{{ n.x | length }}",
        r"ran out of memory|ends its process",
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
