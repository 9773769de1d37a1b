"""Streamed text: nothing is lost, repeated or corrected later."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from corpus import strings
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import sentence_piece_file

from paceline.model.fetch import fetch_default
from paceline.text.detokenize import Detokenizer
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "smollm2":
        return load_tokenizer(fetch_default())
    return synthetic_tokenizer(600)


def pieces_of(ids: list[int], tokenizer: Tokenizer, **options: bool) -> list[str]:
    stream = Detokenizer(tokenizer, **options)
    return [*(stream.push([index]) for index in ids), stream.flush()]


@given(data=st.data(), kind=st.sampled_from(["smollm2", "synthetic"]), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_whole_text(data: st.DataObject, kind: str, skip: bool) -> None:
    ours = tokenizer(kind)
    # Single bytes are rare in a large vocabulary; drawn more often, they split characters everywhere.
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 5) | st.integers(0, 300), max_size=40))
    pieces = pieces_of(ids, ours, skip_special=skip)
    assert "".join(pieces) == ours.decode(ids, skip_special=skip, at_start=False)
    # In groups, as speculative decoding would deliver them.
    stream, rest, grouped = Detokenizer(ours, skip_special=skip), list(ids), ""
    while rest:
        size = data.draw(st.integers(1, 5))
        grouped, rest = grouped + stream.push(rest[:size]), rest[size:]
    assert grouped + stream.flush() == "".join(pieces)


@given(text=st.text(), kind=st.sampled_from(["smollm2", "synthetic"]))
@settings(max_examples=150, deadline=None)
def test_any_text_streams_back_without_replacement_characters(text: str, kind: str) -> None:
    ours = tokenizer(kind)
    ids = ours.encode(text, allow_special=False)
    # SmolLM2's vocabulary lacks the bytes that occur in no character of its training text.
    if ours.decode(ids) == text:
        pieces = pieces_of(ids, ours)
        assert "".join(pieces) == text
        assert pieces[-1] == ""
    else:
        assert kind == "smollm2"


def test_real_text_round_trips() -> None:
    ours = tokenizer("smollm2")
    for text in strings(300):
        assert "".join(pieces_of(ours.encode(text), ours)) == text


def test_incomplete_character_is_held_back_and_then_flushed() -> None:
    ours = tokenizer("synthetic")
    ids = ours.encode("a🎉")
    assert len(ids) == 5
    stream = Detokenizer(ours)
    assert [stream.push([index]) for index in ids] == ["a", "", "", "", "🎉"]
    assert stream.flush() == ""
    stream = Detokenizer(ours)
    assert [stream.push([index]) for index in ids[:4]] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"


def test_invalid_bytes_do_not_hold_back_the_text_after_them() -> None:
    ours = tokenizer("synthetic")
    emoji, a = ours.encode("🎉")[0], ours.encode("a")[0]
    stream = Detokenizer(ours)
    assert [stream.push([index]) for index in (emoji, a, a)] == ["", "\ufffda", "a"]


def test_special_tokens_are_skipped_or_shown() -> None:
    ours = tokenizer("synthetic")
    ids = [*ours.encode("hi"), 2]
    assert "".join(pieces_of(ids, ours)) == "hi"
    assert "".join(pieces_of(ids, ours, skip_special=False)) == "hi<|im_end|>"


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path, _ = sentence_piece_file(Path(tmp_path_factory.mktemp("spm")))
    return load_tokenizer(path)


@given(ids=st.lists(st.integers(0, 310), max_size=30), at_start=st.booleans())
@settings(max_examples=150, deadline=None)
def test_sentence_piece_streams_the_whole_text(sentence_piece: Tokenizer, ids: list[int], at_start: bool) -> None:
    pieces = pieces_of(ids, sentence_piece, at_start=at_start)
    assert "".join(pieces) == sentence_piece.decode(ids, at_start=at_start)


def test_sentence_piece_keeps_the_space_of_a_continuation(sentence_piece: Tokenizer) -> None:
    ids = sentence_piece.encode("the world", add_special=False)
    assert "".join(pieces_of(ids, sentence_piece, at_start=True)) == "the world"
    assert "".join(pieces_of(ids, sentence_piece)) == " the world"
    assert "".join(pieces_of([1, *ids], sentence_piece, at_start=True)) == "the world"  # a BOS has no text
    # The library agrees on what the text is.
    assert sentence_piece._core.decode(ids) == "the world"


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    class Counting(Tokenizer):
        asked = 0

        def bytes_of(self, ids: Iterable[int], skip: frozenset[int] = frozenset()) -> bytes:
            listed = list(ids)
            Counting.asked += len(listed)
            return super().bytes_of(listed, skip)

    ours = Counting(synthetic_tokenizer(600)._core)
    stream = Detokenizer(ours)
    for index in range(1000):
        stream.push([260 + index % 300])
    assert Counting.asked == 1000
