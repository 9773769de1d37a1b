"""Options of vLLM, SGLang and llama.cpp get a hint that is true."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from paceline.config import EngineConfig, SchedulerConfig, ServerConfig, public_options, suggest_option
from paceline.peer_flags import PEER_FLAGS, PeerFlag, peer_hint

OURS = {item.name for kind in (SchedulerConfig, EngineConfig, ServerConfig) for item in public_options(kind)}
OURS |= {"model", "load", "shape", "config"}  # of `paceline serve` itself


def test_every_flag_leads_to_an_option_that_exists_or_says_what_to_do() -> None:
    for flag in PEER_FLAGS:
        assert flag.option in OURS or (not flag.option and flag.note), flag
        assert not flag.note.endswith("."), flag
        for word in flag.note.split():
            if word.startswith("--"):
                assert word.strip("-;,:").replace("-", "_").removeprefix("no_") in OURS, word


def test_a_name_is_in_the_table_once_and_is_none_of_ours() -> None:
    names = Counter(name for flag in PEER_FLAGS for name in flag.names.split())
    assert [name for name, count in names.items() if count > 1 or name in OURS] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--tensor-parallel-size", "here it is called tp; see its help."),
        ("tensor_parallel_size", "here it is called tp; see its help."),
        ("-tp", "here it is called tp; see its help."),
        ("--gpu-memory-utilization=0.9", "here it is called kv_memory_fraction (of the memory that is free after"),
        ("--no-enable-prefix-caching", "here it is called prefix_cache (it is on by default); see its help."),
        ("--enforce-eager", "there is none here: CUDA graphs are captured"),
        ("-ngl", "here it is called device"),
        ("--mem-fraction-static", "here it is called kv_memory_fraction"),
        ("--ctx-size", "here it is called context_tokens"),
        ("--watchdog-timeout", "here it is called watchdog_s; see its help."),
        ("--h11-max-header-count", "here it is called max_headers; see its help."),
        ("--allow-auto-truncate", "here it is called clip_max_tokens (which lowers max_tokens;"),
        ("--kv-cache-memory", "here it is called kv_tokens (in tokens, not in bytes)"),
        ("--uds", "there is none here: the server listens on --host and --port;"),
        ("-ngld", "there is none here: the draft model is on the device"),
        ("--poll", "there is none here: "),
        ("polcy", "did you mean policy"),
        ("nothing_like_it_at_all", ""),
    ],
)
def test_a_hint_names_our_option_or_the_remedy(given: str, expected: str) -> None:
    hint = suggest_option(given, OURS)
    assert hint.startswith(expected) and bool(hint) == bool(expected)


def test_the_help_of_options_names_the_same_flags() -> None:
    by_name = {name: flag for flag in PEER_FLAGS for name in flag.names.split()}
    checked = 0
    for kind in (SchedulerConfig, EngineConfig, ServerConfig):
        for item in public_options(kind):
            for group in re.findall(r"\(((?:vLLM|SGLang).*?)\)", item.metadata["help"]):
                for name in re.findall(r": ([a-z0-9_]+)(?=$|;|,)", group):
                    checked += 1
                    flag = by_name.get(name, PeerFlag(name, name))
                    given = flag.option == item.name or f"--{item.name.replace('_', '-')} " in flag.note
                    assert given, f"{item.name} names {name}, of which the hint is {flag.option}"
    assert checked > 20


def test_a_command_without_our_option_gives_no_hint() -> None:
    assert peer_hint("--max-model-len", ["model"], str) == ""
