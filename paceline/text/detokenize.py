"""Incremental detokenization: token ids in, text for the client out.

A token is a sequence of bytes and may end in the middle of a character; the detokenizer holds an incomplete character
back until the rest arrives. Where the text of a token depends on its place (`positional.py`), it holds back what the
next token decides. So every delta is final: the concatenated deltas are the text of all tokens, and nothing is
repeated, lost or corrected later. A token costs its own length and not that of the text before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from paceline.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one request's output."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = False) -> None:
        """`at_start`: the ids begin a text instead of continuing a prompt, so the space that SentencePiece puts before
        the first word is dropped."""
        self._bytes_of = tokenizer.bytes_of
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._strip = at_start and tokenizer.strips_leading_space
        self._utf8 = _UTF8("replace")
        positional = tokenizer.positional
        self._positional = None if positional is None else positional.stream(at_start=at_start)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; it may be empty."""
        if self._positional is not None:
            return self._positional.push(index for index in ids if index not in self._skip)
        data = self._bytes_of(ids, self._skip)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The text held back: of an incomplete character U+FFFD. Call it last."""
        return self._utf8.decode(b"", final=True) if self._positional is None else self._positional.flush()
