"""Decoding where the text of a token depends on its place: first, last, or between others.

WordPiece puts a space before a token, but not before the first; a BPE with a suffix puts one after a word, but not
after the last; Metaspace drops the space of the first. Nothing else about the neighbours matters, so a token has a text
for each place, taken from the library's own decoder, and a stream holds back only what depends on a next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

_ANY = "x"  # a token that every supported decoder leaves as it is, but for a space before it


class TokenText(NamedTuple):
    """The text of a token at one place."""

    text: str  # in any case
    if_followed: str  # and then, if another token follows
    if_last: str  # and then, if none does


class PositionalDecoder:
    def __init__(self, decode: Callable[[Sequence[str]], str], token_of: Callable[[int], str | None]) -> None:
        """`decode` is the library's decoder; `token_of` gives a token by id."""
        self._decode, self._token_of = decode, token_of
        self._known: dict[tuple[int, bool], TokenText | None] = {}

    def text_of(self, index: int, *, is_first: bool) -> TokenText | None:
        """None for an id without a token."""
        key = (index, is_first)
        if key not in self._known:
            token = self._token_of(index)
            self._known[key] = None if token is None else self._compute(token, is_first)
        return self._known[key]

    def _compute(self, token: str, is_first: bool) -> TokenText:
        decode, before = self._decode, [] if is_first else [_ANY]
        start = len(decode(before)) if before else 0
        added = len(decode([_ANY, _ANY])) - len(decode([_ANY]))
        last = decode([*before, token])[start:]
        followed = decode([*before, token, _ANY])[start:-added]
        size = 0
        while size < min(len(last), len(followed)) and last[size] == followed[size]:
            size += 1
        return TokenText(last[:size], followed[size:], last[size:])

    def stream(self, *, at_start: bool) -> PositionalStream:
        return PositionalStream(self, at_start)


class PositionalStream:
    """The text of one sequence of tokens."""

    def __init__(self, decoder: PositionalDecoder, at_start: bool) -> None:
        self._decoder, self._is_first = decoder, at_start
        self._if_followed = self._if_last = ""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        texts = []
        for index in ids:
            found = self._decoder.text_of(index, is_first=self._is_first)
            if found is not None:
                texts += [self._if_followed, found.text]
                _, self._if_followed, self._if_last = found
                self._is_first = False
        return "".join(texts)

    def flush(self) -> str:
        return self._if_last
