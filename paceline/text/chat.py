"""Chat templates: turn a conversation into the text format a model was trained on.

A template is a program from a model file, so it runs in a sandbox (`template_sandbox.py`): a template that fails or
never ends is an error of its own request only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes

from paceline.request import InvalidRequest, short
from paceline.text.template_sandbox import (
    LIMIT_NAMES,
    LimitExceeded,
    LimitInserter,
    Limits,
    TemplateEnvironment,
    TemplateRefusal,
    limit_names,
    weight,
)

Message = dict[str, Any]  # role, content and what else the template of a model reads
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_HARMONY = "<|channel|>"  # in the template of gpt-oss
_LIST = re.compile(r"""['"](?:type|text)['"]""")  # parts as Python or JSON write them
# What a conversation needs before and after a message of a role.
_AROUND: Mapping[str, tuple[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]]]] = {
    "system": ((), ({"role": "user", "content": "a"},)),
    "assistant": (({"role": "user", "content": "a"},), ({"role": "user", "content": "a"},)),
    "tool": (
        (
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
        (),
    ),
}

# Variables that `render` sets itself.
RESERVED_VARIABLES = frozenset(
    ("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token", *LIMIT_NAMES)
)


class ChatTemplateError(InvalidRequest):
    """The template refuses the conversation, or the template fails."""


class ChatTemplateLimitError(ChatTemplateError):
    """The template exceeds a limit."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"chat_template {reason}: choose another template.")
        self.reason = reason


class ChatTemplate:
    """The template of one model, compiled on first use: an invalid one is an error of chat requests only."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source, self._now = source, now
        self._joining: dict[str, bool] = {}  # by role
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The text of a conversation. `variables` are passed to the template (such as enable_thinking)."""
        checked = [self._with_content(message) for message in check_messages(messages)]
        if _HARMONY in self.source:
            checked = [_with_thinking(message) for message in checked]
            tools = None if tools is None else [_with_description(tool) for tool in tools]
        return self._render(checked, add_generation_prompt=add_generation_prompt, tools=tools, **variables)

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        limits = Limits(weight([messages, tools, variables]))
        names = {
            **variables,
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **limit_names(limits),
        }
        template, pieces, length = self._template, [], 0
        try:
            for piece in template.generate(names):
                pieces.append(piece)
                length += len(piece)
                limits.check(length)
        except TemplateRefusal as error:
            raise ChatTemplateError(f"messages do not fit the model's chat template: {error}") from None
        except LimitExceeded as error:
            raise ChatTemplateLimitError(str(error)) from None
        except MemoryError:
            raise ChatTemplateLimitError("ran out of memory") from None
        except Exception as error:  # a template is a program and can raise anything
            raise ChatTemplateError(
                f"chat_template failed with {type(error).__name__} ({error}): "
                "check the messages, or choose another template."
            ) from None
        return "".join(pieces)

    @cached_property
    def searched(self) -> frozenset[str]:
        """The texts that the template searches for in other texts, such as </think>."""
        return _searched_texts(self._parse(TemplateEnvironment(self._now)))

    @cached_property
    def changes_text(self) -> bool:
        """Whether the template changes texts or divides them, so that others come out than those that were given."""
        parsed = self._parse(TemplateEnvironment(self._now))
        called = [call.node.attr for call in parsed.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)]
        return not _CHANGING.isdisjoint([*called, *(applied.name for applied in parsed.find_all(nodes.Filter))])

    def _with_content(self, message: Message) -> Message:
        """A message with its text parts as one string, unless the template joins them itself."""
        content = message["content"]
        if isinstance(content, str) or self._joins_parts(message["role"]):
            return message
        return {**message, "content": text_of(content)}

    def _joins_parts(self, role: str) -> bool:
        """Whether the template writes the text of each part, and does not take the list for a string."""
        if role not in self._joining:
            first, last = "\ufdd0", "\ufdd1"
            probed = {"role": role, "content": [{"type": "text", "text": text} for text in (first, last)]}
            self._joining[role] = False  # while it is rendered
            before, after = _AROUND.get(role, ((), ()))
            with suppress(ChatTemplateError):
                text = self._render([*before, probed, *after])
                begin, end = text.find(first), text.find(last)
                self._joining[role] = 0 <= begin < end and not _LIST.search(text)
        return self._joining[role]

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and a caller may set, such as enable_thinking."""
        environment = TemplateEnvironment(self._now)
        parsed = self._parse(environment)
        try:
            names = meta.find_undeclared_variables(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            raise _cannot_compile(error) from None
        return frozenset(names) - RESERVED_VARIABLES - environment.globals.keys()

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = TemplateEnvironment(self._now)
        parsed = self._parse(environment)
        try:
            return environment.from_string(LimitInserter().visit(parsed))
        except (jinja2.TemplateError, RecursionError) as error:
            raise _cannot_compile(error) from None

    def _parse(self, environment: jinja2.Environment) -> nodes.Template:
        try:
            return environment.parse(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise _cannot_compile(error) from None


def _cannot_compile(error: Exception) -> ChatTemplateError:
    return ChatTemplateError(f"chat_template cannot be compiled ({error}): correct it or choose another.")


def check_messages(messages: object) -> list[Message]:
    """The messages, with a `content` that is a string or a list of text parts. Raises InvalidRequest if they are not
    valid."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages is {short(messages)}: give a list of at least one message.")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {short(message)}: give an object with role and content.")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role is {short(role)}: choose one of {', '.join(ROLES)}.")
    content = message.get("content")
    if content is None:
        if role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
            return {**message, "content": ""}
        raise InvalidRequest(f"{where}.content is missing: give a string or a list of text parts.")
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{where}.content is {short(content)}: give a string or a list of text parts.")
    texts = [_part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content)]
    return {**message, "content": [{"type": "text", "text": text} for text in texts] or ""}


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    """A content as one string."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _with_thinking(message: Message) -> Message:
    """For the template of gpt-oss, which calls reasoning so. It refuses both reasoning and content next to a call, and
    writes either as analysis, so content takes precedence."""
    reasoning = message.get("reasoning_content")
    is_refused = bool(message.get("tool_calls") and message.get("content"))
    return {**message, "thinking": reasoning} if reasoning and not is_refused else message


def _with_description(tool: Mapping[str, object]) -> Mapping[str, object]:
    """For the same template, which fails without one."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or function.get("description"):
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise InvalidRequest(f"{where}.type is {short(kind)}: only text parts are supported.")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is {short(text)}: give a string.")
    return text


_CHANGING = frozenset(
    ("capitalize", "casefold", "format", "join", "lower", "map", "partition", "replace", "reverse", "rpartition",
     "rsplit", "split", "splitlines", "swapcase", "title", "upper")
)  # fmt: skip
_SEARCHING_METHODS = frozenset(
    ("split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "count", "replace",
     "startswith", "endswith", "removeprefix", "removesuffix")
)  # fmt: skip


def _searched_texts(template: nodes.Template) -> frozenset[str]:
    """The constants that a template searches for: `'</think>' in content`, `content.split('</think>')`, also by a name
    that the template gives them."""
    found: set[str] = set()
    constants: dict[str, list[nodes.Node]] = {}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            constants.setdefault(assign.target.name, []).append(assign.node)
    for node in _searched(template):
        for one in constants.get(node.name, ()) if isinstance(node, nodes.Name) else (node,):
            found.update(const.value for const in _and_children(one) if isinstance(const.value, str))
    return frozenset(found - {""})


def _searched(template: nodes.Template) -> Iterator[nodes.Node]:
    for compare in template.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            yield compare.expr
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHING_METHODS:
            yield from call.args[:1]
    for applied in template.find_all(nodes.Filter):
        if applied.name == "replace":
            yield from applied.args[:1]


def _and_children(node: nodes.Node) -> Iterator[nodes.Const]:
    if isinstance(node, nodes.Const):
        yield node
    yield from node.find_all(nodes.Const)
