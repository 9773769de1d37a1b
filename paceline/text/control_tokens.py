"""Control tokens in the text of users: `<|im_end|>` in a message is text, and does not end the message.

A conversation with the text of a control token in its strings is rendered a second time with an unused character, the
mark, inside each such text. What is still a control token in the result was written by the template. It is encoded
under a private name, by a tokenizer that does not know control tokens by their texts:

    rendered   <|im_start|>user\\n...<*|im_end|>...<|im_end|>      * is the mark
    encoded    [1]user\\n...<|im_end|>...[2]                       [1] and [2] are names, one token each

The two renderings must be equal but for the marks, so nothing else changes.

A template may also make a control token of other texts: by `lower`, `replace` or `split`, or with text of its own next
to them. Where that is possible the conversation is rendered with harmless characters too, and a message that adds
control tokens is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from paceline.request import InvalidRequest
from paceline.text.chat import Message

Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
_Trie = dict[str, "_Trie"]

# Noncharacters: Unicode reserves them for use within a program, and templates neither strip nor escape them.
_NAME = "\ufdd0"  # around the private name of a token
_BREAK = f"{_NAME}-{_NAME}"  # a name that stands for no token: no text joins across it
_HARMLESS = "\U0010fffe"  # instead of a character of control tokens
_MARKS = [chr(code) for code in range(0xFDD1, 0xFDF0)]
_UNKNOWN = "\U0010fffd"  # in no vocabulary
_MAX_NAMED = 16  # messages that are rendered alone to name the one that a template cuts


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """What a chat template wrote. `marked` is the same with marks; both are empty if nothing needs one."""

    text: str
    marked: str = ""
    mark: str = ""


class ControlTokens:
    """The control tokens of one model: the special ones, and other added ones that its templates write. Those whose
    text a template searches for, such as </think>, keep their meaning in messages, except those that end a turn."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        templates: str,
        searched: Collection[str],
        eos_ids: Collection[int],
        *,
        changes_text: bool = False,
    ) -> None:
        """`templates`: the source of all chat templates of the model. `changes_text`: they change or divide strings."""
        self._core, self._added = core, core.get_added_tokens_decoder()
        self._controls = frozenset(
            token.content
            for token in self._added.values()
            if token.special or (token.content in templates and not _is_word(token.content))
        )
        exempt = {text.strip() for text in searched} - {core.id_to_token(index) for index in eos_ids}
        # Where the mark goes, by token. One of a single character has no inside.
        self._inside = {
            text: _offset(text, searched) for text in self._controls if len(text) > 1 and text not in exempt
        }
        self._beginnings = frozenset(text[:2] for text in self._inside)
        self._searched, self._changes_text = [text for text in searched if text], changes_text
        # What control tokens begin and end with; not letters, which every text has.
        self._firsts = frozenset(text[0] for text in self._inside if not text[0].isalnum())
        self._lasts = frozenset(text[-1] for text in self._inside if not text[-1].isalnum())
        # Whether other texts become that of a control token when they are normalized.
        self._can_normalize = core.normalizer is not None and any(
            token.normalized for token in self._added.values() if token.content in self._inside
        )

    def are_in(self, value: object) -> bool:
        """Whether a string in `value`, however deep, contains the text of a control token."""
        text = "\0".join(_strings(value))
        return self._has(text) or (self._can_normalize and self._has(self._core.normalizer.normalize_str(text)))

    def may_be_made_of(self, value: object) -> bool:
        """Whether a template may make a control token of strings in `value` that do not contain it."""
        if self._changes_text:
            return any(first in text for text in _strings(value) for first in self._firsts)
        return any(map(self._is_part, _strings(value)))

    def count(self, text: str) -> int:
        return sum(1 for _ in self._controls_in(text))

    def harmless(self, value: object) -> Any:
        """A copy of `value` of the same shape whose strings are no parts of control tokens, except what the template
        searches for."""
        if isinstance(value, str):
            pieces = self._kept.split(value)
            pieces[::2] = [piece.translate(self._replacements) for piece in pieces[::2]]
            return "".join(pieces)
        if isinstance(value, Mapping):
            return {self.harmless(key): self.harmless(item) for key, item in value.items()}
        return [self.harmless(item) for item in value] if isinstance(value, list | tuple) else value

    def first_in(self, value: object) -> str:
        """The first control token in the strings of `value`; empty if there is none."""
        found = self._search("\0".join(_strings(value)))
        return found[0] if found else ""

    def marked(self, value: object, mark: str) -> Any:
        """A copy of `value` with marks in its strings."""
        if isinstance(value, str):
            return _with(value, self._places(value), mark)
        if isinstance(value, Mapping):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        if not _is_text_parts(value):
            return [self.marked(item, mark) for item in value]
        # A template joins the parts of a message, so a token may begin in one and end in another.
        places, parts, start = self._places("".join(part["text"] for part in value)), [], 0
        for part in value:
            end = start + len(part["text"])
            inside = [place - start for place in places if start <= place < end]
            parts.append({**part, "text": _with(part["text"], inside, mark)})
            start = end
        return parts

    def encode(self, rendered: RenderedChat, encode: Callable[[tokenizers.Tokenizer, str], list[int]]) -> list[int]:
        """The ids of a marked text."""
        named = self._pattern.sub(lambda found: self._names[found[0]], rendered.marked)
        count = named.count(_NAME) // 2
        for instead in ("", _BREAK):
            ids = encode(self._private_core, named.replace(rendered.mark, instead))
            # A vocabulary may spell a control token in pieces. Then no token joins across a mark.
            if self._spelt.isdisjoint(ids) and sum(index in self._name_ids for index in ids) == count:
                return [self._original_ids.get(index, index) for index in ids if index != self._break_id]
        raise InvalidRequest(
            "messages contain the text of a control token, which this model's tokenizer cannot encode as text: "
            "remove it."
        )

    def _has(self, text: str) -> bool:
        # Most texts have no beginning of a token, and `in` is much faster than a pattern.
        return any(beginning in text for beginning in self._beginnings) and self._search(text) is not None

    def _places(self, text: str) -> list[int]:
        """Where marks go: one inside every token, also where two overlap."""
        places: list[int] = []
        found = self._search(text)
        while found is not None:
            if not places or places[-1] <= found.start():
                places.append(found.start() + self._inside[found[0]])
            found = self._search(text, found.start() + 1)
        return places

    def _is_part(self, text: str) -> bool:
        """Whether a text ends as a control token begins, or begins as one ends; the template may strip it."""
        end, begin = text.rstrip()[-self._longest :], text.lstrip()[: self._longest]
        return any(end[at:] in self._parts for first in self._firsts if (at := end.rfind(first)) >= 0) or any(
            begin[: at + 1] in self._parts for last in self._lasts if (at := begin.find(last)) >= 0
        )

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._inside), default=0)

    @cached_property
    def _parts(self) -> frozenset[str]:
        """Proper beginnings and ends of control tokens."""
        return frozenset(part for text in self._inside for at in range(1, len(text)) for part in (text[:at], text[at:]))

    @cached_property
    def _kept(self) -> re.Pattern[str]:
        return re.compile(f"({_pattern_of(self._searched)})")

    @cached_property
    def _replacements(self) -> dict[int, str]:
        """For what is in control tokens, and neither in words nor in names."""
        characters = set("".join(self._inside))
        return {ord(one): _HARMLESS for one in characters if not (one.isalnum() or one.isspace() or one in "_-./:")}

    @cached_property
    def _controls_in(self) -> Callable[[str], Iterator[re.Match[str]]]:
        return re.compile(_pattern_of(self._inside)).finditer

    @cached_property
    def _search(self) -> Callable[..., re.Match[str] | None]:
        return re.compile(_pattern_of(self._inside)).search

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """All added tokens: one that is no control token may contain one that is."""
        return re.compile(_pattern_of(token.content for token in self._added.values()))

    @cached_property
    def _names(self) -> dict[str, str]:
        """What each added token is called in the private tokenizer."""
        return {
            token.content: f"{_NAME}{index}{_NAME}" if token.content in self._controls else token.content
            for index, token in self._added.items()
        }

    @cached_property
    def _private_core(self) -> tokenizers.Tokenizer:
        """The same tokenizer with names instead of control tokens. It shares the vocabulary, so it costs little."""
        core = tokenizers.Tokenizer(self._core.model)
        if self._core.normalizer is not None:
            core.normalizer = self._core.normalizer
        if self._core.pre_tokenizer is not None:
            core.pre_tokenizer = self._core.pre_tokenizer
        renamed = [
            tokenizers.AddedToken(
                self._names[token.content],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and token.content not in self._controls,
                special=token.special,
            )
            for token in self._added.values()
        ]
        core.add_tokens([*renamed, tokenizers.AddedToken(_BREAK, normalized=False, special=True)])
        return core

    def _private_id(self, name: str) -> int:
        found = self._private_core.token_to_id(name)
        assert found is not None, f"{name!r} was added"
        return found

    @cached_property
    def _original_ids(self) -> dict[int, int]:
        """Ids by those in the private tokenizer, for added tokens: names have new ones."""
        return {self._private_id(self._names[token.content]): index for index, token in self._added.items()}

    @cached_property
    def _name_ids(self) -> frozenset[int]:
        return frozenset(self._private_id(self._names[text]) for text in self._controls)

    @cached_property
    def _break_id(self) -> int:
        return self._private_id(_BREAK)

    @cached_property
    def _spelt(self) -> frozenset[int]:
        """Control tokens that the vocabulary has, and so may spell; without the one for unknown characters."""
        core = self._private_core
        spelt = {index for text in self._controls if (index := core.token_to_id(text)) is not None}
        return frozenset(spelt.difference(core.encode(_UNKNOWN, add_special_tokens=False).ids))


def render_as_text(
    control: ControlTokens, render: Render, messages: Sequence[Message], variables: Mapping[str, object]
) -> RenderedChat:
    """What `render` writes of these messages and variables, with marks where users wrote control tokens."""
    text = render(messages, variables)
    given = [messages, variables]
    if not control.are_in(given):
        _check_made(control, render, text, messages, variables)
        return RenderedChat(text)
    mark = _unused_mark(given)

    def marked(some: Sequence[Message], others: Mapping[str, object]) -> str | None:
        """None if the template does not keep the marks."""
        try:
            found = render(some, others).replace(_escaped(mark), mark)
        except InvalidRequest:
            return None
        return found if found.replace(mark, "") == text else None

    whole = control.marked(given, mark)
    found = marked(*whole)
    if found is not None:
        _check_made(control, render, found, messages, variables)
        return RenderedChat(text, found, mark)
    where, token = "tools or template variables", control.first_in(given)
    suspects = [index for index, message in enumerate(messages) if control.first_in(message)]
    for index in suspects[:_MAX_NAMED]:
        if marked([*messages[:index], whole[0][index], *messages[index + 1 :]], variables) is None:
            where, token = f"messages[{index}]", control.first_in(messages[index])
            break
    raise InvalidRequest(
        f"{where} has the text of the control token {token}, and the model's chat template cuts or changes it: remove "
        "it, or set allow_control_tokens."
    )


def _check_made(
    control: ControlTokens,
    render: Render,
    text: str,
    messages: Sequence[Message],
    variables: Mapping[str, object],
) -> None:
    """Refuses strings of which the template makes control tokens in `text`, where those that users write have marks."""
    if not control.may_be_made_of([messages, variables]):
        return

    def count(some: Sequence[Message], others: Mapping[str, object]) -> int:
        try:
            return control.count(render(some, others))
        except InvalidRequest:  # with other characters: nothing is known
            return control.count(text) - 1

    harmless = control.harmless(messages)
    if control.count(text) <= count(harmless, control.harmless(variables)):
        return
    where, all_controls = "tools or template variables", control.count(render(messages, variables))
    suspects = [index for index, message in enumerate(messages) if control.may_be_made_of(message)]
    for index in suspects[:_MAX_NAMED]:
        if count([*messages[:index], harmless[index], *messages[index + 1 :]], variables) < all_controls:
            where = f"messages[{index}]"
            break
    raise InvalidRequest(
        f"{where} has text of which the model's chat template makes a control token: change it, or set "
        "allow_control_tokens."
    )


def _unused_mark(value: object) -> str:
    text = "\0".join(_strings(value))
    mark = next((mark for mark in _MARKS if mark not in text and _escaped(mark) not in text), None)
    if mark is None or _NAME in text:
        raise InvalidRequest(
            "messages have the text of a control token and noncharacters (U+FDD0 to U+FDEF): remove either."
        )
    return mark


def _escaped(mark: str) -> str:
    """The mark in the JSON of a template that writes ASCII."""
    return f"\\u{ord(mark):04x}"


def _strings(value: object) -> Iterator[str]:
    """All strings in a value, keys included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple):
            if _is_text_parts(item):
                yield "".join(part["text"] for part in item)
            else:
                stack += item


def _is_text_parts(value: Sequence[object]) -> bool:
    return bool(value) and all(
        isinstance(part, Mapping) and part.keys() == {"type", "text"} and isinstance(part["text"], str)
        for part in value
    )


def _is_word(text: str) -> bool:
    """Whether an added token is vocabulary, such as a word or a run of spaces, rather than a marker."""
    return text.isspace() or text.strip().isalnum()


def _offset(token: str, searched: Iterable[str]) -> int:
    """Where a mark goes in a token: not within a part that a template searches for."""
    parts = [
        (begin.start(), begin.start() + len(part))
        for part in searched
        if part
        for begin in re.finditer(re.escape(part), token)
    ]
    inside = range(1, len(token))
    return next((at for at in inside if not any(begin < at < end for begin, end in parts)), 1)


def _with(text: str, places: Sequence[int], mark: str) -> str:
    ends = [*places, len(text)]
    return mark.join(text[begin:end] for begin, end in zip([0, *places], ends, strict=True))


def _pattern_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of these texts that begins at a place. It is a trie: an alternation of a thousand texts
    would be tried one by one."""
    trie: _Trie = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(trie) if trie else r"(?!)"


def _branches(node: _Trie) -> str:
    # The empty branch, the end of a text, is last: longer ones are tried before it.
    found = [re.escape(character) + _branches(node[character]) for character in sorted(node, reverse=True) if character]
    found += [""] if "" in node else []
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
