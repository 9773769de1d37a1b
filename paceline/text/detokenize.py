"""Token by token to text, as the client sees it.

A token is a run of bytes and may end in the middle of a character; the decoder below holds such a
beginning back until the rest arrives. So pieces are final: joined together they are the text of all
tokens, nothing is repeated, lost or corrected later, and a token costs its own length and not that of the
text before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from paceline.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one request's output."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = False) -> None:
        """`at_start`: the ids begin a text instead of continuing a prompt, so that the space
        SentencePiece puts before the first word is dropped."""
        self._bytes_of = tokenizer.bytes_of
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._strip = at_start and tokenizer.strips_leading_space
        self._utf8 = _UTF8("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; it may be empty."""
        data = self._bytes_of(ids, self._skip)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What was held back: U+FFFD if the output ended within a character. Nothing may be pushed after
        it."""
        return self._utf8.decode(b"", final=True)
