"""Text to token ids and back.

The `tokenizers` library encodes. Decoding is done here, so that it is exact one token at a time (`detokenize.py`):

- Byte-level BPE and SentencePiece with byte fallback: every token is a fixed sequence of bytes (`token_bytes`), and a
  text is the bytes of its tokens read as UTF-8. Where the library replaces a whole run of byte tokens that is not
  UTF-8, only its invalid bytes are replaced here.
- WordPiece, WordLevel, Unigram and BPE with a suffix: the text of a token depends on its place (`positional.py`).

A tokenizer whose decoder does anything else is refused at load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any

import tokenizers

from paceline.model.spec import ModelError
from paceline.request import InvalidRequest
from paceline.text.chat import ChatTemplate, Message, check_messages
from paceline.text.control_tokens import ControlTokens, RenderedChat, render_as_text
from paceline.text.positional import PositionalDecoder
from paceline.text.tools import describe

_CHARACTERS_PER_TOKEN = 8  # no ordinary text has more; runs of spaces do
_PIECE_CHARACTERS = 65_536
_BOUNDARY_TOKENS = 64  # a cut may split one token into at most about this many
_TOKENS_IN_TEXT = re.compile(r"(<\|\w+\|>)")
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary, as in GPT-2: printable bytes map to themselves, the others
    to characters from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_level_alphabet()
_NOT_A_BYTE = 0x10000  # for characters below 256 that are not in the alphabet
_BYTES = dict.fromkeys(range(256), _NOT_A_BYTE) | {ord(character): byte for character, byte in _ALPHABET.items()}


class TooManyTokens(InvalidRequest):
    """A text has more tokens than its limit."""


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token id, computed on first access."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, index: int) -> bytes:
        found = self[int(index)] = self._compute(int(index))
        return found


class Tokenizer:
    """The vocabulary of one model, its special tokens and its chat template. Safe to use from several threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        tool_template: str | None = None,
        eos_id: int | None = None,
    ) -> None:
        """All of `eos_ids` end an output; `eos_id` is the one that templates call eos_token. `tool_template` is for
        conversations with tools, if the model has another one for them."""
        self._core = core
        self._core_without_special: tokenizers.Tokenizer | None = None  # made on first use
        self._bytes = _TokenBytes(self._compute_bytes)
        kind = _decoder_kind(core)
        self._byte_level, self.strips_leading_space = kind is _Kind.BYTES, kind is _Kind.PIECES_AFTER_SPACE
        self.positional: PositionalDecoder | None = None  # None: every token has its own bytes
        if kind is _Kind.POSITIONAL:
            decode = " ".join if core.decoder is None else core.decoder.decode
            self.positional = PositionalDecoder(decode, lambda index: core.id_to_token(index) if index >= 0 else None)
        added = core.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        chat = partial(
            ChatTemplate,
            bos_token=self._text_of(bos_id),
            eos_token=self._text_of(min(self.eos_ids, default=None) if eos_id is None else eos_id),
        )
        self.chat = chat(chat_template) if chat_template else None
        self._tool_chat = chat(tool_template) if tool_template else None

    def chat_for(self, tools: object) -> ChatTemplate | None:
        """The chat template of a conversation with these tools."""
        return self._tool_chat or self.chat if tools else self.chat

    @property
    def templates(self) -> list[str]:
        """The source of all chat templates."""
        return [chat.source for chat in (self.chat, self._tool_chat) if chat is not None]

    def encode(
        self, text: str, *, add_special: bool = True, allow_special: bool = True, limit: int | None = None
    ) -> list[int]:
        """The ids of `text`. `add_special` prepends a BOS if the model has one; the text of a chat template already
        contains it. Without `allow_special`, a text such as <|im_end|> is encoded as ordinary text.

        A text with far more than `limit` tokens raises TooManyTokens without being encoded whole; one with a few more
        is encoded. Other threads run meanwhile."""
        _check_text(text)
        core = self._core if allow_special else self._without_special()
        ids = _limited(core, text, limit)
        return [self.bos_id, *ids] if add_special and self.add_bos and self.bos_id is not None else ids

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """`encode` for many texts at once, on all cores."""
        for text in texts:
            _check_text(text)
        prefix = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        with _encoding():
            found = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [prefix + encoding.ids for encoding in found]

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], *, limit: int | None = None, **options: Any
    ) -> list[int]:
        """The ids of a conversation, ready for generation; `limit` as in `encode`, `options` as in `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, **options), limit=limit)

    def encode_rendered(
        self, rendered: RenderedChat, *, add_special: bool = False, limit: int | None = None
    ) -> list[int]:
        """The ids of what `render_chat` returns; other arguments as in `encode`."""
        if not rendered.mark:
            return self.encode(rendered.text, add_special=add_special, limit=limit)
        _check_text(rendered.marked)
        return self._control_tokens.encode(rendered, lambda core, text: _limited(core, text, limit))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        allow_control_tokens: bool = False,
        **options: Any,
    ) -> RenderedChat:
        """The text of a conversation; `options` as in `ChatTemplate.render`. A control token that a message spells is
        text, unless `allow_control_tokens`."""
        chat = self.chat_for(tools)
        if chat is None:
            raise InvalidRequest("messages are given, but this model has no chat template: send a prompt instead.")
        source, knows_tools = chat.source, "tools" in chat.source

        def render(messages: Sequence[Message], options: Mapping[str, Any]) -> str:
            if knows_tools:
                return chat.render(messages, **options)
            others = {name: value for name, value in options.items() if name != "tools"}
            try:
                described = describe(messages, options["tools"], source)
            except (KeyError, TypeError):
                raise InvalidRequest(
                    "messages have tool_calls of another form: give each a function with name and arguments."
                ) from None
            return chat.render(described, **others)

        checked, options = check_messages(messages), {**options, "tools": tools or None}
        if allow_control_tokens:
            return RenderedChat(render(checked, options))
        return render_as_text(self._control_tokens, render, checked, options)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        chats = [chat for chat in (self.chat, self._tool_chat) if chat is not None]
        searched = frozenset().union(*(chat.searched for chat in chats))
        changes_text = any(chat.changes_text for chat in chats)
        return ControlTokens(self._core, "\n".join(self.templates), searched, self.eos_ids, changes_text=changes_text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of `ids`. Invalid UTF-8 becomes U+FFFD. `at_start`: the ids begin a text, so the space that
        SentencePiece puts before the first word is dropped."""
        skip = self.special_ids if skip_special else frozenset()
        if self.positional is not None:
            stream = self.positional.stream(at_start=at_start)
            return stream.push(index for index in ids if index not in skip) + stream.flush()
        data = self.bytes_of(ids, skip)
        if at_start and self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token between others. An id beyond the vocabulary has none: models are often padded."""
        return self._bytes[index]

    def bytes_of(self, ids: Iterable[int], skip: frozenset[int] = frozenset()) -> bytes:
        """The bytes of all `ids` that are not in `skip`."""
        known = self._bytes
        return b"".join([known[index] for index in ids if index not in skip])

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return self._core.to_str()

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, without added ones."""
        return self._core.get_vocab(with_added_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token, given as it is spelt in the vocabulary."""
        found = self._core.token_to_id(token)
        return None if found is None else int(found)

    def lark_literal(self, text: str) -> str:
        """`text` in a Lark grammar: by its id if it is a token that no text of a grammar matches. For llguidance these
        are special tokens and all added ones within angle brackets. Text that contains tokens such as <|end|> becomes a
        sequence of these and of strings."""
        parts = [part for part in _TOKENS_IN_TEXT.split(text) if part]
        if len(parts) > 1 and any(self.token_id(part) in self._added_ids for part in parts):
            return " ".join(self.lark_literal(part) for part in parts)
        index = self.token_id(text)
        is_bracketed = text.startswith("<") and text.endswith(">") and index in self._added_ids
        return f"<[{index}]>" if index in self.special_ids or is_bracketed else json.dumps(text, ensure_ascii=False)

    def check_fits(self, vocab_size: int) -> None:
        """Raises ModelError if text can encode to an id that a model with this vocabulary size does not have."""
        if self.vocab_size > vocab_size:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} tokens and the model only {vocab_size}: "
                "they belong to different models, fetch the model again."
            )

    def _compute_bytes(self, index: int) -> bytes:
        if self.positional is not None:
            found = self.positional.text_of(index, is_first=False)
            return b"" if found is None else (found.text + found.if_followed).encode()
        token = self._core.id_to_token(index) if index >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            # Added tokens are plain text. One that is spelt in the alphabet gives the same bytes either way.
            try:
                return token.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode("utf-8")
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode("utf-8")

    def _text_of(self, index: int | None) -> str:
        """A special token as chat templates write it."""
        if index is None:
            return ""
        if self.positional is not None:
            return self._core.id_to_token(index) or ""
        return self.token_bytes(index).decode("utf-8", "replace")

    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that encodes special tokens as ordinary text."""
        if self._core_without_special is None:
            core = tokenizers.Tokenizer.from_str(self._core.to_str())
            core.encode_special_tokens = True
            self._core_without_special = core
        return self._core_without_special


@contextmanager
def _encoding() -> Iterator[None]:
    """A vocabulary without a token for unknown words cannot encode every text."""
    try:
        yield
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"text cannot be encoded by this model's tokenizer ({error}): change it.") from None


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text has a lone surrogate {text[error.start]!r} at character {error.start}: send valid Unicode."
        ) from None


def _limited(core: tokenizers.Tokenizer, text: str, limit: int | None) -> list[int]:
    if limit is not None and len(text) > _CHARACTERS_PER_TOKEN * limit:
        _check_count(core, text, limit)
    ids: list[int] = _encoded(core, text).ids
    return ids


def _encoded(core: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    # `encode` would hold the GIL for as long as it takes.
    with _encoding():
        return core.encode_batch_fast([text], add_special_tokens=False)[0]


def _check_count(core: tokenizers.Tokenizer, text: str, limit: int) -> None:
    """Counts piece by piece and raises TooManyTokens as soon as the whole text must have more than `limit`."""
    count = 0
    for number, start in enumerate(range(0, len(text), _PIECE_CHARACTERS)):
        count += len(_encoded(core, text[start : start + _PIECE_CHARACTERS]))
        if count > limit + number * _BOUNDARY_TOKENS:
            raise TooManyTokens(f"the text has more than {limit} tokens: shorten it.")


class _Kind(Enum):
    """How the text of tokens is put together."""

    BYTES = auto()  # byte-level: characters of the vocabulary are bytes
    PIECES = auto()  # SentencePiece with byte fallback
    PIECES_AFTER_SPACE = auto()  # the same, and the space before the first word is dropped
    POSITIONAL = auto()


# Decoders that change each token by its place alone. Strip does too, unless tokens were fused before it.
_POSITIONAL = frozenset(("WordPiece", "Metaspace", "BPEDecoder", "Replace", "Strip"))


def _decoder_kind(core: tokenizers.Tokenizer) -> _Kind:
    # The pickled state of the decoder is its JSON; `core.to_str()` would serialise the whole vocabulary.
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder else {"decoders": []}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _Kind.BYTES
    if "ByteFallback" in kinds and {*kinds} - {"ByteFallback", "Fuse"} <= _POSITIONAL:
        is_spaced = any(
            (step["type"] == "Strip" and step.get("start"))
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return _Kind.PIECES_AFTER_SPACE if is_spaced else _Kind.PIECES
    if {*(kinds[:-1] if kinds[-1:] == ["Fuse"] else kinds)} <= _POSITIONAL:
        return _Kind.POSITIONAL
    raise ModelError(
        f"tokenizer.json has the decoder {', '.join(map(str, kinds))}, which is not supported: use a tokenizer with "
        "the decoder ByteLevel, ByteFallback, Metaspace, WordPiece, BPEDecoder or none."
    )
