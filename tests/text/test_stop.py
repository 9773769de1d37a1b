"""Stop strings against a naive reference that sees the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import MAX_STOPS, InvalidRequest, check_stops
from paceline.text.stop import StopScanner, TextStream
from paceline.text.synthetic import synthetic_tokenizer


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that ends first; of several that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


short = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=15),
    stops=st.lists(short, min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_scanner_equals_naive_reference(pieces: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include_stop=include)
    shown = ""
    expected, matched = naive("".join(pieces), stops, include)
    for piece in pieces:
        shown += scanner.push(piece)
        # Emitted text is final: at every moment it is a prefix of the expected text.
        assert expected.startswith(shown)
    shown += scanner.flush()
    assert (shown, scanner.matched) == (expected, matched)
    assert scanner.num_characters == len(shown)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=15), stops=st.lists(short, min_size=1))
@settings(max_examples=200, deadline=None)
def test_no_more_is_held_back_than_could_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += scanner.push(piece)
        if scanner.matched is None:
            held = text[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_across_deltas_is_found() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert [scanner.push(piece) for piece in ("Hi", "\n", "\nUs", "er", ": x")] == ["Hi", "", "", "", ""]
    assert scanner.matched == "\n\nUser:"
    assert scanner.push("more") == ""
    assert scanner.flush() == ""


def test_text_held_back_is_emitted_when_it_is_not_a_stop_string() -> None:
    scanner = StopScanner(["<stop>"])
    assert [scanner.push(piece) for piece in ("a<", "sto", "ry")] == ["a", "", "<story"]
    assert scanner.push("<st") == ""
    assert scanner.flush() == "<st"


def test_stream_takes_no_token_after_the_stop() -> None:
    ours = synthetic_tokenizer(600)
    ids = [ours.encode(character)[0] for character in "one END two"]
    stream = TextStream(ours, stop=["END"])
    assert stream.push(ids) == "one "
    assert stream.num_tokens == len("one END")
    assert stream.matched == "END"
    assert stream.push(ids) == ""
    assert stream.close() == ""
    stream = TextStream(ours, stop=["END"], include_stop=True)
    assert stream.push(ids) + stream.close() == "one END"


def test_stream_without_stop_strings_is_the_plain_text() -> None:
    ours = synthetic_tokenizer(600)
    ids = ours.encode("Zürich 🎉")
    stream = TextStream(ours)
    assert "".join(stream.push([index]) for index in ids) + stream.close() == "Zürich 🎉"
    assert (stream.num_tokens, stream.matched) == (len(ids), None)


def test_stop_string_matches_an_incomplete_character_at_the_end() -> None:
    ours = synthetic_tokenizer(600)
    stream = TextStream(ours, stop=["x\ufffd"])
    assert stream.push([*ours.encode("x"), ours.encode("🎉")[0]]) == ""
    assert stream.close() == ""
    assert stream.matched == "x\ufffd"


@given(text=st.text(max_size=40), stop=st.text(min_size=1, max_size=4))
@settings(max_examples=120, deadline=None)
def test_stream_stops_in_any_language(text: str, stop: str) -> None:
    ours = synthetic_tokenizer_600
    text += stop + "tail"
    stream = TextStream(ours, stop=[stop])
    shown = "".join(stream.push([index]) for index in ours.encode(text, allow_special=False)) + stream.close()
    assert (shown, stream.matched) == naive(text, [stop], False)


synthetic_tokenizer_600 = synthetic_tokenizer(600)


def test_invalid_stop_strings_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"stop has '': give strings of at least one character"):
        check_stops(["a", ""])
    with pytest.raises(InvalidRequest, match=r"stop has 3: give strings"):
        check_stops([3])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=rf"stop has {MAX_STOPS + 1} strings: give at most"):
        check_stops(["a"] * (MAX_STOPS + 1))
    with pytest.raises(InvalidRequest, match=r"more than 4096 characters"):
        check_stops(["a" * 5000])
    assert check_stops("abc") == ("abc",)
