"""Harmony, the format of gpt-oss: channels are separated however the text is split, and calls are streamed."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import Grammar
from paceline.sampling.grammar import Grammars
from paceline.text.call_syntax import ArgumentsDelta, Content, ToolCallStart
from paceline.text.chat import ChatTemplate
from paceline.text.harmony import CHANNEL, HARMONY, START, TOKENS, HarmonyParser, call_header
from paceline.text.output_parser import Reasoning, output_parser, reasoning_markers_of
from paceline.text.reasoning import ReasoningPiece
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import HARMONY as STYLE
from paceline.text.tools import call_grammar, can_call, markers, style_of

PROMPT = "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% for t in tools or () %}// {{ t.function.description + t.function.name }}{% endfor %}<|start|>assistant"
)
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|"}'
F = ("f", '{"a": "<|"}')

# output, reasoning, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>It rains.", "Let me see.", "It rains.", []),
    ("<|channel|>final<|message|>It < rains.<|return|>", "", "It < rains.", []),
    (f"{ANALYSIS}{NEXT}{CALL}", "Let me see.", "", [F]),
    (f"{ANALYSIS}{NEXT}{CALL}<|call|>", "Let me see.", "", [F]),
    # The recipient before the channel, and arguments without a constraint.
    (f"{ANALYSIS}{NEXT} to=functions.get.it<|channel|>commentary json<|message|>{{}}", "Let me see.", "",
     [("get.it", "{}")]),
    (" to=functions.f<|channel|>commentary<|message|>{}", "", "", [("f", "{}")]),
    # What is announced before a call is content; several messages of a kind are paragraphs.
    (f"{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", "Let me see.", "I look.", [F]),
    (f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}<|channel|>commentary<|message|>A<|end|>{NEXT}<|channel|>final<|message|>B",
     "Let me see.\n\nLet me see.", "A\n\nB", []),
    (f"{CALL}<|call|>{NEXT}{CALL}", "", "", [F, F]),
    ("<|channel|>analysis to=functions.f<|message|> {} ", "", "", [("f", "{} ")]),
    # A tool of the model's own is not for the user.
    ("<|channel|>commentary to=python<|message|>print(1)<|end|>", "print(1)", "", []),
    # Without arguments, cut off, or malformed.
    (f"{call_header('f')}<|call|>", "", "", [("f", "{}")]),
    (f"{call_header('f')}", "", "", [("f", "{}")]),
    (f'{call_header("f")}{{"a": 1', "", "", [("f", '{"a": 1')]),
    ("<|channel|>analysis<|message|>cut <|e", "cut <|e", "", []),
    ("<|channel|>anal", "", "", []),
    (f"{ANALYSIS}<|start|>assis", "Let me see.", "", []),
    (f"{ANALYSIS} \n<|channel|>final<|message|>no start", "Let me see.", "no start", []),
    ("<|channel|>analysis<|message|>no end<|channel|>final<|message|>Yes", "no end", "Yes", []),
    (f"{ANALYSIS}text", "Let me see.", "text", []),
    ("no header, <|b|>", "", "no header, <|b|>", []),
    ("to be or not", "", "to be or not", []),
    ("to=", "", "to=", []),
    ("", "", "", []),
]  # fmt: skip


def parsed(pieces: list[str], *, tools: bool = True, separate: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    parser = output_parser(HARMONY, PROMPT, STYLE, [{}] if tools else [], separate_reasoning=separate)
    calls: list[tuple[str, str]] = []
    texts: dict[type, str] = {Reasoning: "", Content: ""}
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.close():
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            calls[-1] = calls[-1][0], calls[-1][1] + event.arguments
        else:
            assert event.text
            texts[type(event)] += event.text
    assert parser.num_calls == len(calls)
    assert parser.has_reasoning or not texts[Reasoning]
    return texts[Reasoning], texts[Content], calls


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_channels_are_separated_at_every_split(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    cuts = combinations(range(0, len(text) + 1, 1 if len(text) < 60 else 5), 2)
    for pieces in [[text], list(text), *([text[:i], text[i:]] for i in range(len(text))), *(
        [text[:i], text[i:j], text[j:]] for i, j in cuts
    )]:  # fmt: skip
        assert parsed(pieces) == (reasoning, content, calls), pieces
    kept = parsed(list(text), tools=False, separate=False)
    assert kept[0] == "" and kept[2] == []
    assert "".join(kept[1].split()) == "".join(text.split()), "all text is content"


@given(
    parts=st.lists(
        st.sampled_from(
            [*TOKENS, "assistant", " to=functions.f", "analysis", "final", "commentary", "<|", "a", " ", "{"]
        ),
        max_size=14,
    ),
    cuts=st.lists(st.integers(0, 90), max_size=6),
    tools=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_text_is_parsed_as_when_it_arrives_whole(parts: list[str], cuts: list[int], tools: bool) -> None:
    text = "".join(parts)
    pieces = [text[i:j] for i, j in pairwise([0, *sorted(cuts), len(text)])]
    for separate in (True, False):
        assert parsed(pieces, tools=tools, separate=separate) == parsed([text], tools=tools, separate=separate)


def test_a_header_has_a_bounded_length() -> None:
    text = "to=" + "x" * 2000 + "<|message|>y"
    assert parsed([text]) == parsed(list(text)) == ("", text, [])


def test_calls_are_text_where_no_tools_were_given() -> None:
    text = f"{ANALYSIS}{NEXT}{CALL}"
    assert parsed([text], tools=False) == ("Let me see.", CALL, [])


def test_text_and_arguments_are_streamed_while_they_are_written() -> None:
    parser = HarmonyParser(PROMPT, calls=True)
    texts = ("<|channel|>", "analysis", "<|message|>", "So", "<|end|>", "<|start|>", f"assistant{call_header('f')}",
             '{"a', '": 1}')  # fmt: skip
    assert [parser.push(text) for text in texts] == [
        [], [], [], [ReasoningPiece("So", True)], [], [], [ToolCallStart("f")], [ArgumentsDelta('{"a')],
        [ArgumentsDelta('": 1}')],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>",
            "So.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ("So.", "Yes"),
        ),
        ("<|channel|>final<|message|>", "Yes", ("", "Yes")),
        ("<|channel|>", "final<|message|>Yes", ("", "Yes")),
    ],
)
def test_a_message_may_begin_in_the_prompt(begun: str, text: str, expected: tuple[str, str]) -> None:
    assert HARMONY.split(PROMPT + begun, text) == expected


def test_the_format_is_recognised_from_the_template() -> None:
    assert reasoning_markers_of(TEMPLATE) is HARMONY
    assert style_of(TEMPLATE) == STYLE and set(markers(STYLE)) == set(TOKENS)
    assert can_call(STYLE, "get_weather") and not can_call(STYLE, "get weather")


def test_reasoning_of_earlier_turns_is_given_to_the_template_as_thinking() -> None:
    template = ChatTemplate(TEMPLATE)
    turn = {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [{}]}
    assert "<|channel|>analysis<|message|>So.<|end|>" in template.render([turn])
    assert "So." not in template.render([{**turn, "content": "I look."}]), "the template refuses both next to a call"


def test_a_tool_without_a_description_has_an_empty_one() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"function": {"name": "g", "description": "x"}}]
    rendered = ChatTemplate(TEMPLATE).render([{"role": "user", "content": "Hi"}], tools=tools)
    assert rendered.endswith("// f// xg<|start|>assistant") and "description" not in tools[0]["function"]


def harmony_tokenizer(*, special: bool) -> Tokenizer:
    core = synthetic_tokenizer(600)._core
    core.add_tokens([tokenizers.AddedToken(one, special=special, normalized=False) for one in TOKENS])
    return Tokenizer(core, eos_ids=(2,), chat_template=TEMPLATE)


@pytest.mark.parametrize("special", [True, False])
def test_grammars_allow_analysis_before_a_call_or_an_answer(special: bool) -> None:
    tokenizer = harmony_tokenizer(special=special)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)

    def accepts(grammar: Grammar, text: str) -> bool:
        ids = tokenizer.encode(text, add_special=False)
        matcher = grammars.compile(grammar).result().matcher.deep_copy()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    before = {"reasoning": HARMONY.before_grammar(PROMPT)}
    call = call_grammar([tool], STYLE, several=True, literal=tokenizer.lark_literal)
    forced = Grammar(call.kind, call.source, **before)
    answer = Grammar("json_schema", json.dumps(schema), **before, prefix=HARMONY.prefix)
    for grammar, header in ((forced, call_header("f")), (answer, "<|channel|>final<|message|>")):
        for start in ("", ANALYSIS + NEXT):
            assert accepts(grammar, f'{start}{header}{{"a": 1}}')
            assert not accepts(grammar, f'{start}{header}{{"a": "x"}}')
        assert not accepts(grammar, '{"a": 1}') and not accepts(grammar, ANALYSIS)
    assert HARMONY.before_grammar(PROMPT + "<|channel|>final<|message|>") is None
    grammars.close()


@pytest.mark.parametrize("marker", [START, CHANNEL])
def test_headers_without_an_end_are_content(marker: str) -> None:
    """More of them than a header is long. The parser must not begin the same header again and again."""
    text = marker * 300
    whole, split = HarmonyParser("<|start|>assistant"), HarmonyParser("<|start|>assistant")
    events = [event for at in range(0, len(text), 7) for event in split.push(text[at : at + 7])] + split.close()
    found = "".join(event.text for event in [*whole.push(text), *whole.close()] if isinstance(event, ReasoningPiece))
    assert found == "".join(event.text for event in events if isinstance(event, ReasoningPiece))
    assert found.replace("\n", "").replace(marker, "") == "" and found.count(marker) > 150
