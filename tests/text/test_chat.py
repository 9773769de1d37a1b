"""Chat templates render as in transformers, and an invalid one harms only its own request."""

from __future__ import annotations

import time
import tracemalloc
from datetime import datetime
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.request import InvalidRequest
from paceline.text.chat import ChatTemplate, ChatTemplateError, check_messages
from tests.lazy import Lazy

template_utils = Lazy("transformers.utils.chat_template_utils")

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Zürich? 🎉"},
    {"role": "assistant", "content": "  yes\n"},
    {"role": "user", "content": "1 < 2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"a": [1, None]}}}]

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks and whitespace": "{%- for m in messages %}\n    {%- if loop.first %}\nFIRST\n    {%- endif %}\n"
    "    {{ m.role ~ ': ' ~ m.content | trim }}\n{% endfor %}\n",
    "indented blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n"
    "  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "tools": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}",
    "namespace, break, slices": "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}"
    "{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ ns.n }}",
    "macro": "{% macro show(m, tag) %}<{{ tag }}>{{ m.content }}</{{ tag }}>{% endmacro %}"
    "{% for m in messages %}{{ show(m, 'x' * 3) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "undefined": "{% if enable_thinking is defined %}THINK{% endif %}{{ bos_token }}{{ messages | length % 3 }}",
    "string methods": "{% for m in messages %}{{ m.content.split(' ')[-1].strip('?').upper() }}{% endfor %}",
    "filtered loop": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}"
    "{% else %}-{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(name: str, prompt: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": prompt}
    expected, _ = template_utils.render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], bos_token="<s>", **options
    )
    assert ChatTemplate(TEMPLATES[name], bos_token="<s>").render(MESSAGES, **options) == expected[0]
    assert expected[0]


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ eos_token }}", eos_token="</s>")
    assert template.render(MESSAGES, enable_thinking=False) == "False</s>"


def test_time_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"messages is \[\]: give a list of at least one message"),
        ("hello", "messages is 'hello': give a list"),
        (None, "messages is None: give a list"),
        (["hi"], r"messages\[0\] is 'hi': give an object with role and content"),
        ([{"content": "x"}], r"messages\[0\].role is None: choose one of system, developer, user"),
        ([MESSAGES[0], {"role": "wizard", "content": "x"}], r"messages\[1\].role is 'wizard': choose one of"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role is \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content is missing: give a string"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content is missing"),
        (
            [{"role": "user", "content": 7}],
            r"messages\[0\].content is 7: give a string or a list of text parts",
        ),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\].content is \{'a': 1\}"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\].type is 'image_url': only text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is None: give a string"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\].type is None"),
        ([{"role": "user", "content": "x" * 9, "y": 1}, 5], r"messages\[1\] is 5"),
    ],
)
def test_invalid_messages_are_refused_with_field_and_remedy(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate(TEMPLATES["chatml"]).render(messages)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[ab]"),
        ("{% for m in messages %}[{{ m['content'] | trim + '!' }}]{% endfor %}", "[ab!]"),
        (
            "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}{% for part in m.content %}"
            "<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}",
            "<a><b>",
        ),
        ("{% for m in messages %}{{ m.content | map(attribute='text') | join('\n') }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% if m.content is not string %}{{ raise_exception('no') }}{% endif %}"
         "{{ m.content }}{% endfor %}", "ab"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", '"ab"'),
    ],
)  # fmt: skip
def test_text_parts_are_joined_by_the_template_if_it_can(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": PARTS}]) == text


def test_a_template_may_join_parts_of_some_roles_only() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}<{{ part.text }}>{% endfor %}"
        "{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
    )
    roles = ("system", "user", "assistant", "tool")
    found = ChatTemplate(source).render([{"role": role, "content": PARTS} for role in roles])
    assert found == "system:ab<a><b>assistant:abtool:ab"


def test_an_assistant_message_with_calls_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert check_messages([call])[0]["content"] == ""
    assert call["content"] is None  # the caller's message is not touched


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}", "cannot be compiled"),
        ("{% nonsense %}", "cannot be compiled"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "do not fit the model's chat template: roles must alternate",
        ),
        ("{{ messages[0].nothing.at_all }}", "failed with UndefinedError"),
        ("{{ 1 / 0 }}", "failed with ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "failed with SecurityError"),
        ("{% set _ = messages.append(1) %}", "failed with SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed with RecursionError|more than"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 200,000 steps",
        ),
        ("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", r"more than 1,00\d,\d+ characters"),
        ("{{ 'x' * 999999999999 }}", r"more than 1,00\d,\d+ characters"),
        ("{{ 999999999999 * 'x' }}", r"more than 1,00\d,\d+ characters"),
        ("{{ 9 ** 9 ** 9 }}", r"uses \*\*, which is not allowed"),
        ("{{ '%999999999d' % 1 }}", "uses %, which is not allowed"),
        (
            "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            r"more than 1,00\d,\d+ characters",
        ),
        (
            "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            r"more than 1,00\d,\d+ characters",
        ),
        ("{{ range(9999999) | list }}", "failed with OverflowError"),
        # Sizes are checked before anything is allocated.
        ("{{ 'x' | center(2000000000) }}", "No filter named 'center'"),
        ("{{ 'x'.center(2000000000) }}", "SecurityError"),
        ("{{ 'x'.ljust(2000000000) }}", "SecurityError"),
        ("{{ 'x'.zfill(2000000000) }}", "SecurityError"),
        ("{{ '\t'.expandtabs(2000000000) }}", "SecurityError"),
        ("{{ (1).to_bytes(2000000000, 'big') }}", "SecurityError"),
        ("{{ '%1000000000d' | format(1) }}", "uses %, which"),
        ("{{ '%*d' | format(1000000000, 1) }}", "uses %, which"),
        ("{{ '%s%s' | format('x' * 999999, 'x' * 999999) }}", "more than 1,"),
        ("{{ '{:>1000000000}'.format(1) }}", "uses format with a wide field"),
        ("{{ '{:>{}}'.format(1, 1000000000) }}", "uses format with a wide field"),
        ("{{ ('{0}' * 9999).format('x' * 9999) }}", "more than 1,"),
        ("{{ lipsum(n=1000000) }}", "UndefinedError"),
        ("{{ cycler('a').next() }}{{ joiner() }}", "UndefinedError"),
        ("{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "64 bits"),
        ("{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "64 bits"),
        ("{{ ('9' * 4000) | int }}", "uses int with a long text"),
        ("{{ 1 | round(1000000000, 'ceil') }}", "uses round with"),
        ("{{ ('\n' * 999999) | indent(999) }}", "more than 1,"),
        ("{{ 'x\ny' | indent(1000000000) }}", "uses indent with"),
        ("{{ 'x\ny' | indent(width=1000000000) }}", "uses indent with"),
        ("{{ ['x'] | tojson(indent=1000000000) }}", "uses tojson with"),
        ("{{ [1, 2] | tojson(separators=['x' * 999999, ':']) }}", "uses tojson with"),
        ("{{ ('x' * 9999) | replace('', 'y' * 9999) }}", "more than 1,"),
        ("{{ ('x' * 9999).replace('x', 'y' * 9999) }}", "more than 1,"),
        ("{{ range(9999) | join('x' * 9999) }}", "more than 1,"),
        ("{{ ('x' * 9999).join(range(9999) | list | map('string') | list) }}", "more than 1,"),
        ("{{ ('x' * 9999).join('y' * 9999) }}", "more than 1,"),
        ("{{ ('x ' * 499999).split(' ') | length }}", "more than 1,"),
        ("{{ ('x ' * 499999).split() | length }}", "more than 1,"),
        ("{{ ('x' * 999999) | list | length }}", "more than 1,"),
        ("{{ ('<' * 999999) | e }}", "more than 1,"),
        ("{{ ('<' * 999999) | urlencode }}", "more than 1,"),
        ("{{ [1] * 999999999 }}", "more than 1,"),
        ("{{ ([1] * 99999 + [1] * 99999) | length }}", "more than 1,"),
        ("{{ strftime_now('%999999999Y') }}", "strftime_now with a wide field"),
        ("{{ 'x' | xmlattr }}{{ 'x' | urlize }}{{ 'x' | wordwrap(1) }}", "No filter named"),
        ("{{ ['x' * 9999] * 9999 }}", "more than 1,"),
        ("{{ (['x' * 9999] * 9999) | tojson }}", "more than 1,"),
        ("{{ (['x' * 9999] * 9999) | upper }}", "more than 1,"),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
            "more than 1,",
        ),
        (
            "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
            "more than 1,",
        ),
        (
            "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}",
            "more than 1,",
        ),
        (
            "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
            "more than 1,",
        ),
        (
            "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['x' * 999999] %}{% endfor %}",
            "made too many long texts",
        ),
        (
            "{% set n = namespace(x=[]) %}{% set t = 'x' * 999999 %}{% for i in range(9999) %}"
            "{% set n.x = n.x + [t[i:]] %}{% endfor %}",
            "made too many long texts",
        ),
        (
            "{% set n = namespace(x=[]) %}{% set t = 'x' * 999999 %}{% for i in range(9999) %}"
            "{% set n.x = n.x + [t.upper()] %}{% endfor %}",
            "made too many long texts",
        ),
        # The names of the limits cannot be taken.
        ("{% set _step = namespace %}{% for i in range(9) %}{% endfor %}", "_step is reserved"),
        ("{% macro _join(a, b) %}{% endmacro %}", "_join is reserved"),
        ("{% macro f(_limits) %}{% endmacro %}", "_limits is reserved"),
        ("{% for _made in messages %}{% endfor %}", "_made is reserved"),
    ],
)
def test_invalid_template_is_an_error_of_its_request(source: str, words: str) -> None:
    start = time.thread_time()
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - start < 20


ALLOCATING = {
    "'%(a)200000000d' % {'a': 1}": "uses %, which is not allowed with a wide field",
    "'%((a)%)200000000d' % {'(a)%': 1}": "uses %, which is not allowed with a wide field",
    "'%(a)200000000d' | format(a=1)": "uses %, which is not allowed with a wide field",
    "'%(a).200000000f' | format(a=1)": "uses %, which is not allowed with a wide field",
    "'%-0 200000000d' % 1": "uses %, which is not allowed with a wide field",
    "'%.*f' % (200000000, 1)": "uses %, which is not allowed with a wide field",
    "('%999d' * 200000) % ((1,) * 200000)": "more than 1,",
    "('{:999}' * 150000).format(1)": "more than 1,",
    "('%r' * 400) % (('\x01' * 900,) * 400)": "more than 1,",
    "'{0[}]:>200000000}'.format({'}': 1})": "uses format with a wide field",
    "1 | round(method='ceil', precision=200000000)": "uses round with",
    "('\n' * 900000) | indent(first=true, width=999)": "more than 1,",
    "('\x0b' * 900000) | indent(999)": "more than 1,",
    "('x' * 20000) | replace(new='y' * 20000, old='x')": "more than 1,",
    "range(20000) | join(attribute='real', d='x' * 20000)": "more than 1,",
}


@pytest.mark.parametrize("expression", ALLOCATING)
@pytest.mark.parametrize("condition", ["true", "messages[0].content == 'boom'"])
def test_no_expression_allocates_much(expression: str, condition: str) -> None:
    """Also where the trial at the start does not get to."""
    template = ChatTemplate(f"{{% if {condition} %}}{{{{ ({expression}) | length }}}}{{% endif %}}")
    tracemalloc.start()
    with pytest.raises(ChatTemplateError, match=ALLOCATING[expression]):
        template.render([{"role": "user", "content": "boom"}])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000


def test_deep_json_with_indents_is_bounded_before_it_is_written() -> None:
    value: Any = ["a"] * 60_000
    for _ in range(100):
        value = [value]
    template = ChatTemplate("{{ tools | tojson(indent=16) | length }}")
    tracemalloc.start()
    with pytest.raises(ChatTemplateError, match="more than"):
        template.render(MESSAGES, tools=value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60_000_000
    assert ChatTemplate("{{ tools | tojson(indent=4) }}").render(MESSAGES, tools=TOOLS).count("\n") > 8


@pytest.mark.parametrize(
    "expression",
    [
        "'%5.1f|%-8s|%03d|%%|%s' % (1.25, 'a', 7, 'b')",
        "'%(a)s %(b (c))5d' % {'a': 'x', 'b (c)': 2}",
        "'{0:>8}|{1!r:<9}|{2:.3f}|{{}}|{a[b]}'.format('a', 'b', 1.5, a={'b': 3})",
        "'%(a)5s' | format(a=1)",
        "1.2345 | round(precision=2, method='floor')",
        "'a\nb' | indent(first=true, width=3)",
        "'aXa' | replace(new='-', old='X')",
        "'9' | int(default=5000)",
    ],
)
def test_ordinary_formats_are_those_of_jinja(expression: str) -> None:
    expected = ImmutableSandboxedEnvironment().from_string(f"{{{{ {expression} }}}}").render()
    assert ChatTemplate(f"{{{{ {expression} }}}}").render(MESSAGES) == expected


def test_variables_of_a_request_cannot_replace_the_limits() -> None:
    template = ChatTemplate("{% for a in range(3) %}{{ a ~ '' }}{% endfor %}{{ messages | length }}")
    assert template.render(MESSAGES, _step=None, _join=None) == "0124"
