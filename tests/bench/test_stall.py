"""`paceline bench stall`: its attacks are what their names say, and a row compares an attack with the time before."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import stall
from paceline.bench.stall import ATTACKS, Attack, bench
from paceline.config import ConfigError, ServerConfig
from paceline.config_file import read_file
from tests.server.virtual import TOKENIZER

CONTEXT = 32_768  # of the virtual GPU


def attack(name: str) -> Attack:
    return next(one for one in ATTACKS if one.name == name)


def body(one: Attack, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.make("virtual", number))
    return found


def test_every_row_has_its_own_name() -> None:
    names = [one.name for one in ATTACKS]
    assert len(set(names)) == len(names)


def test_rows_with_limits_give_them_to_the_hostile_tenant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {one.limits for one in ATTACKS} - {""}
    assert found == {"max_requests = 1", "tokens_per_minute = 100000"}

    @contextmanager
    def started(options: str) -> Iterator[str]:
        tenants = {one.name: one for one in read_file(Path(shlex.split(options)[-1])).tenants}
        assert tenants["hostile"].max_requests == 1 and tenants["other"].max_requests is None
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(stall, "started", started)
    monkeypatch.setattr(stall, "_Target", lambda *_: None)
    monkeypatch.setattr(stall, "_run", lambda _, attacks: [{"attack": one.name} for one in attacks])
    rows = bench(url=None, start=None, streams=1, key=None, only="max_requests")
    assert [row["attack"] for row in rows] == ["64 times 126 KB of text, max_requests = 1"]


@pytest.mark.parametrize("name", ["64 times 126 KB of text", "64 times 126 KB of text, closed at once"])
def test_long_texts_have_126_kb_and_do_not_fit_into_the_context(name: str) -> None:
    one = attack(name)
    assert one.count == 64 and 125_000 < len(one.make("virtual", 0)) < 128_000
    assert len(TOKENIZER.encode(body(one)["prompt"])) > CONTEXT
    assert (one.leaves_after_s == 0) == name.endswith("at once")


def test_valid_chats_of_82_kb_fit_into_the_context_and_differ() -> None:
    one = attack("100 valid chats of 82 KB")
    assert one.count == 100 and 82_000 <= len(one.make("virtual", 0)) < 83_000
    prompts = [TOKENIZER.render_chat(body(one, number)["messages"]) for number in (0, 1)]
    assert all(CONTEXT / 2 < len(TOKENIZER.encode_rendered(one)) < CONTEXT for one in prompts)
    assert prompts[0].text[:200] != prompts[1].text[:200], "the second would be a prefix that is cached"


def test_headers_are_many_and_not_long() -> None:
    for name, count in (("20 times 5,000 headers", 20), ("300 times 5,000 headers", 300)):
        one = attack(name)
        assert one.count == count and one.num_headers == 5000
        assert 5000 * len("a:\r\n") < ServerConfig().max_header_bytes, (
            "they are refused for their number, or not at all"
        )


def test_abandoned_schemas_have_5000_properties_and_none_is_compiled_twice() -> None:
    for name, count in (
        ("6 abandoned schemas of 5,000 properties", 6),
        ("16 abandoned schemas of 5,000 properties", 16),
    ):
        one = attack(name)
        assert one.count == count and one.leaves_after_s
        first, second = (body(one, number)["guided_json"]["properties"] for number in (0, 1))
        assert len(first) == 5000 and not first.keys() & second.keys()
        other = json.loads(one.other("virtual", 1000))["guided_json"]
        assert len(other["properties"]) == 1 and "required" not in other


def test_a_row_compares_an_attack_of_one_tenant_with_the_time_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stall, "_WINDOW_S", 0.3)
    monkeypatch.setattr(stall, "_SETTLE_S", 0.0)
    (row,) = bench(url=None, start="--executor virtual", streams=2, key=None, only="20 logprobs")
    assert row["status"] == "400", "the virtual GPU computes no logits"
    names = ["median_gap", "p99_gap", "longest_gap", "median_wait", "longest_wait", "longest_health"]
    assert list(row["before_ms"]) == list(row["during_ms"]) == names
    more = [row["during_ms"][name] - row["before_ms"][name] for name in ("longest_gap", "longest_wait")]
    assert row["passes"] == (max(more) <= 50)
    assert all(value >= 0 for value in (*row["before_ms"].values(), *row["during_ms"].values()))
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("| 20 logprobs"))
    before, during = row["before_ms"]["longest_wait"], row["during_ms"]["longest_wait"]
    assert f"| {before:.0f} -> {during:.0f} ({during - before:+.0f}) |" in line
    assert line.endswith("| passes |" if row["passes"] else "| FAILS |")
    assert f"{int(row['passes'])} of 1 rows pass." in out
    assert json.loads(out.splitlines()[-1])["rows"] == [row]


def test_an_unknown_row_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match="which no row has in its name: 100 KB of text, 1 MB of text"):
        bench(url=None, start=None, streams=1, key=None, only="nothing")
