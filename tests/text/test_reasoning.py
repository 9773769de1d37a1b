"""Reasoning is separated however the text is split, and nothing but markers and blanks next to them is lost."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.call_syntax import Content
from paceline.text.output_parser import OutputParser, Reasoning, reasoning_markers_of
from paceline.text.reasoning import MARKERS, ReasoningCounter, ReasoningParser
from paceline.text.synthetic import CHATML, synthetic_tokenizer
from paceline.text.tool_calls import HERMES, ToolCallParser

THINK, MISTRAL = MARKERS[0], MARKERS[1]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

# markers, whether the prompt opens the reasoning, output, reasoning, answer
CASES = [
    (THINK, False, "<think>\nLet me see.\n\nYes.\n</think>\n\n4 is even.", "Let me see.\n\nYes.", "4 is even."),
    (THINK, True, "First, add.\n</think>\n\n4", "First, add.", "4"),  # DeepSeek-R1
    (THINK, True, "\n<think>\nFirst.</think>4", "First.", "4"),  # the marker of the prompt, repeated
    (THINK, False, "<think>\n\n</think>\n\nHi", "", "Hi"),  # Qwen3 with /no_think
    (THINK, False, "Hi <think>no</think> ", "", "Hi <think>no</think> "),
    (THINK, False, "  Hi", "", "  Hi"),
    (THINK, False, "<thin ice", "", "<thin ice"),
    (THINK, False, "<think>cut o", "cut o", ""),
    (THINK, False, "<think>cut </thi", "cut </thi", ""),
    (THINK, False, "<think>a < b </ b </think > c</think>d</think>e", "a < b </ b </think > c", "d</think>e"),
    (THINK, False, "", "", ""),
    (THINK, True, "", "", ""),
    (THINK, False, " \n", "", " \n"),
    (MISTRAL, False, "[THINK]Hm, [1, 2].[/THINK]Three.", "Hm, [1, 2].", "Three."),
    (MARKERS[2], False, "<seed:think>x</seed:think>y", "x", "y"),
    (MARKERS[3], True, "x◁/think▷y", "x", "y"),
]


def parsed(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    found = [one for piece in pieces for one in parser.push(piece)] + parser.close()
    assert all(one.text for one in found)
    assert [one.is_reasoning for one in found] == sorted((one.is_reasoning for one in found), reverse=True)
    return tuple("".join(one.text for one in found if one.is_reasoning is kind) for kind in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize(("markers", "is_opened", "text", "reasoning", "answer"), CASES)
def test_reasoning_is_separated_at_every_split(
    markers: object, is_opened: bool, text: str, reasoning: str, answer: str
) -> None:
    splits = [list(text), *([text[:i], text[i:j], text[j:]] for i, j in combinations(range(len(text) + 1), 2)), [text]]
    for pieces in splits:
        assert parsed(ReasoningParser(markers, is_opened=is_opened), pieces) == (reasoning, answer)  # type: ignore[arg-type]
        kept = parsed(ReasoningParser(markers, is_opened=is_opened, keep_markers=True), pieces)  # type: ignore[arg-type]
        assert "".join(kept) == text and kept[1].strip() == answer.strip()


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a", "<"]), max_size=12),
    is_opened=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
@settings(max_examples=120, deadline=None)
def test_any_text_is_separated_as_when_it_arrives_whole(parts: list[str], is_opened: bool, cuts: list[int]) -> None:
    text = "".join(parts)
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[i:j] for i, j in pairwise(ends)]
    for keep in (False, True):
        whole = parsed(ReasoningParser(THINK, is_opened=is_opened, keep_markers=keep), [text])
        assert parsed(ReasoningParser(THINK, is_opened=is_opened, keep_markers=keep), pieces) == whole
        if keep:
            assert "".join(whole) == text


def test_reasoning_is_streamed_while_it_is_written() -> None:
    parser = ReasoningParser(THINK, is_opened=False)
    texts = ("<thi", "nk>\n", "So ", "it is", " </", "think>", "4")
    found = ["".join(one.text for one in parser.push(text)) for text in texts]
    assert found == ["", "", "So", " it is", "", "", "4"]


@pytest.mark.parametrize("separate", [True, False])
def test_a_tool_call_inside_reasoning_is_not_a_call(separate: bool) -> None:
    text = f"<think>I could {CALL}.</think>{CALL}"
    parser = OutputParser(
        ReasoningParser(THINK, is_opened=False, keep_markers=not separate),
        ToolCallParser(HERMES),
        separate_reasoning=separate,
    )
    events = [event for character in text for event in parser.push(character)] + parser.close()
    assert parser.num_calls == 1 and parser.has_reasoning
    kind = Reasoning if separate else Content
    shown = "".join(event.text for event in events if isinstance(event, kind))
    assert shown == (f"I could {CALL}." if separate else f"<think>I could {CALL}.</think>")


def test_tokens_of_reasoning_are_counted_to_the_end_of_the_closing_marker() -> None:
    tokenizer = synthetic_tokenizer(600)
    for reasoning, answer in (("<think>some thoughts</think>", "and an answer"), ("<think>cut", "")):
        ids = tokenizer.encode(reasoning, add_special=False), tokenizer.encode(answer, add_special=False)
        for step in (1, 3, 100):
            counter, both = ReasoningCounter(THINK, tokenizer.token_bytes), ids[0] + ids[1]
            for start in range(0, len(both), step):
                counter.push(both[start : start + step])
            assert counter.num_tokens == len(ids[0])


def test_markers_are_recognised_from_the_template() -> None:
    assert reasoning_markers_of(CHATML) is None
    assert reasoning_markers_of("{{ content.split('</think>')[-1] }}") == THINK
    assert reasoning_markers_of("{{ '[THINK]' + thinking + '[/THINK]' }}") == MISTRAL
    assert THINK.opened_by("<|Assistant|><think>\n") and not THINK.opened_by("What is <think>?<|Assistant|>")
    assert THINK.closed_by("<think>\n\n</think>\n\n") and not THINK.closed_by("<think>\n")
