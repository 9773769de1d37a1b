"""Checks chat templates: they render as in plain Jinja, and texts of users add no control token.

    python -m tests.text.published_templates FOLDER      all .jinja files below a folder

The tests run the same checks over `template_shapes.py`. Published templates belong to others, so none is in this
repository.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from paceline.model.spec import ModelError
from paceline.request import InvalidRequest
from paceline.text.chat import ChatTemplate, ChatTemplateError
from paceline.text.template_sandbox import _GenerationExtension
from paceline.text.template_trial import TemplateTrial
from paceline.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
NOW = datetime(2026, 11, 19, 12)
# What published templates write as one token.
_TOKENS = re.compile(
    r"<\|[^|<>'\"{} ]{1,40}\|>|<｜[^｜<>'\"{} ]{1,40}｜>|</?[a-z_]{2,30}>|\[/?[A-Za-z_]{2,30}\]|<\|[a-z_/]{1,30}>"
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city, such as Zürich."},
        "unit": {"type": "string", "enum": ["c", "f"], "description": "Of the temperature."},
        "days": {"type": "array", "items": {"type": "integer"}, "description": "Which."},
    },
    "required": ["city"],
}


def conversations(text: str = "1 < 2 & \"x\" 'y'\n\n  Zürich 🎉 {{ a }}") -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of `ChatTemplate.render` with `text` where users write."""
    user, assistant = {"role": "user", "content": f"Hello. {text}"}, {"role": "assistant", "content": f"  {text}\n"}
    system = {"role": "system", "content": f"Be brief. {text}"}
    arguments = {"city": text, "days": [1, 2], "nested": {"a": None, "b": True}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "weather"}
    function = {"name": "weather", "description": f"Tells. {text}", "parameters": _SCHEMA}
    tools = [{"type": "function", "function": function}]
    thought = {"role": "assistant", "content": f"<think>\na {text}</think>\n\n{text}"}
    lists: dict[str, list[dict[str, Any]]] = {
        "one": [user],
        "system": [system, user],
        "turns": [user, assistant, user],
        "system and turns": [system, user, assistant, user, assistant, user],
        "ends with the assistant": [user, assistant],
        "thinking": [user, thought, user],
    }
    called: dict[str, list[dict[str, Any]]] = {
        "tools": [user],
        "tools and system": [system, user],
        "call": [user, asks, result],
        "call and answer": [system, user, asks, result, assistant, user],
    }
    for name, messages in lists.items():
        yield name, {"messages": messages}
        yield f"{name}, open", {"messages": messages, "add_generation_prompt": False}
    for name, messages in called.items():
        yield name, {"messages": messages, "tools": tools}
    yield "variables", {"messages": [system, user], "enable_thinking": False, "reasoning_effort": "low"}
    documents = [{"title": "A", "text": f"b {text}", "doc_id": 1}]
    yield "documents", {"messages": [user], "documents": documents}


def plain(source: str, arguments: dict[str, Any]) -> str | None:
    """What Jinja's own sandbox makes, as transformers sets it up; None if the template refuses or fails."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationExtension]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": NOW.strftime}
    try:
        return environment.from_string(source).render(
            **{"add_generation_prompt": True, "tools": None, **arguments}, bos_token=BOS, eos_token=EOS
        )
    except Exception:  # a template is a program and can raise anything
        return None


def rendering_faults(source: str) -> list[str]:
    """How the template renders otherwise than in plain Jinja."""
    faults = []
    template = ChatTemplate(source, bos_token=BOS, eos_token=EOS, now=lambda: NOW)
    for name, arguments in conversations():
        expected, found = plain(source, arguments), None
        try:
            found = template.render(**arguments)
        except ChatTemplateError as error:
            if expected is not None:
                faults.append(f"{name}: refused: {error}")
        if found is not None and expected is not None and found != expected:
            faults.append(f"{name}: {found!r} instead of {expected!r}")
    return faults


@cache
def _byte_level() -> str:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(["a"], trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet))
    return core.to_str()


def control_faults(source: str) -> tuple[list[str], int]:
    """Where a text of a user adds control tokens, and the number of conversations that are refused by name."""
    texts = sorted({*_TOKENS.findall(source), BOS, EOS, "<|im_start|>", "<|im_end|>"})
    core = tokenizers.Tokenizer.from_str(_byte_level())
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    tokenizer = Tokenizer(core, eos_ids=[core.token_to_id(EOS)], bos_id=core.token_to_id(BOS), chat_template=source)
    controls = {core.token_to_id(text): text for text in texts}
    # Those that the template searches for keep their meaning.
    evil = [text for text in texts if tokenizer._control_tokens.are_in(text)]
    faults, num_refused = [], 0
    hostile = " ".join([*evil, *(text.upper() for text in evil), *(f"a{text[:-1]}" for text in evil[:3])])
    for (name, harmless), (_, attack) in zip(conversations("a b"), conversations(hostile), strict=True):
        try:
            expected = Counter(controls[one] for one in tokenizer.encode_chat(**harmless) if one in controls)
        except InvalidRequest:
            continue
        try:
            found = Counter(controls[one] for one in tokenizer.encode_chat(**attack) if one in controls)
        except InvalidRequest as error:
            num_refused += 1
            if "control token" not in str(error):
                faults.append(f"{name}: {error}")
            continue
        if found != expected:
            faults.append(f"{name}: control tokens {found - expected} are added and {expected - found} are missing")
    return faults, num_refused


def trial_fault(sources: list[str]) -> str:
    try:
        TemplateTrial(sources).check()
    except ModelError as error:
        return str(error)
    return ""


def main() -> None:
    paths = sorted(Path(sys.argv[1]).rglob("*.jinja"))
    num_rendered = num_refused = num_faulty = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        faults = rendering_faults(source)
        more, refused = control_faults(source)
        faults += more
        if reason := trial_fault([source]):
            faults.append(reason)
        num_rendered += sum(plain(source, arguments) is not None for _, arguments in conversations())
        num_refused += refused
        num_faulty += bool(faults)
        for fault in faults:
            print(f"{path.name}: {fault[:400]}")
    print(
        f"{len(paths)} templates, {num_rendered} conversations rendered as in plain Jinja, {num_refused} hostile ones "
        f"refused by name, {num_faulty} templates with faults"
    )
    sys.exit(bool(num_faulty))


if __name__ == "__main__":
    main()
