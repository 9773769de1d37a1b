"""Three hundred invalid requests: each gets a one-line error, and the next request is served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.serving import CHAT, COMPLETIONS, HELLO, TEXT, Caller

BIG, DEEP = 10**400, "[" * 5000 + "]" * 5000
USER = {"role": "user", "content": "hi"}

# field -> invalid values, on both routes
FIELDS: dict[str, list[Any]] = {
    "model": [None, 3, [], {}, "Tiny", "tiny ", "tiny/../tiny", "x" * 10_000, True],
    "stream": ["true", 1, 0, [], {}, "yes", 1.0],
    "stream_options": [True, "usage", [], {"include_usage": "yes"}, {"unknown": True}, {"include_usage": True}, 1],
    "max_tokens": [-1, 0, -(2**63), 2**63, BIG, 1.5, "5", "", [], {}, True, [5], 10**9],
    "temperature": [-0.1, -1, 10_001, 1e300, "1", "hot", [], {}, True, [0.5]],
    "top_p": [0, -0.5, 1.0001, 2, "0.5", [], {}, True],
    "top_k": [0, -2, 1.5, "5", [], {}, True, 2**63],
    "seed": [1.5, "7", [], {}, True, 2**63, -(2**63) - 1, BIG],
    "stop": [3, [3], [""], "", ["a"] * 65, ["x" * 5000], {}, [[]], [None], True, ["ok", 1]],
    "stop_token_ids": ["1", 5, [-1], ["1"], [1.5], [True], {}, [[1]], [2**63]],
    "min_tokens": [-1, 1.5, "1", [], {}, True, 7, 10**6],
    "ignore_eos": ["true", 1, [], {}, 0.0],
    "priority": ["high", 1.5, [], {}, True, 1, 2**31, -(2**31), BIG],
    "deadline_ms": [0, -1, "100", [], {}, True, 1e11],
    "queue_timeout_ms": [0, -1, "100", [], {}, True, 1e11],
    "running_timeout_ms": [0, -1, "100", [], {}, True, 1e11],
    "cache_salt": [1, [], {}, True, "s" * 257],
    "n": [0, -1, 1.5, "2", [], {}, True, 10**6],
    "logit_bias": [1, "x", [1], {"a": 1}, {"1": "x"}, {"-1": 1}, {"1": 1e9}],
    "presence_penalty": ["1", [], {}, 99, -99, True],
    "frequency_penalty": ["1", [], {}, 99, -99, True],
    "response_format": ["json", 1, [], {"type": "xml"}, {"type": 1}, {}],
    "logprobs": ["yes", [], {}, -1, 10**6],
    "echo": ["yes", [], {}, 2],
    "prompt_logprobs_start": [0, 2, -1, "1", [], {}, True, 2**63],
    "temprature": [1],
    "max_token": [1],
    "prompts": ["x"],
    "": [1],
    "__class__": [1],
    "Model": ["tiny"],
}
MESSAGES: list[Any] = [
    None, "hi", 3, {}, [], [[]], [None], ["hi"], [3], [{}], [{"role": "user"}], [{"content": "x"}],
    [{"role": None, "content": "x"}], [{"role": "", "content": "x"}], [{"role": "User", "content": "x"}],
    [{"role": "king", "content": "x"}], [{"role": 3, "content": "x"}], [{"role": ["user"], "content": "x"}],
    [{"role": "user", "content": 3}], [{"role": "user", "content": {}}], [{"role": "user", "content": [3]}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [{"type": "unknown"}]}], [{"role": "user", "content": "x", "colour": "red"}],
    [USER, {"role": "user"}], [USER, None], [USER, "x"], [{"role": "user", "content": True}],
    [{"role": "user", "content": "word " * 3000}], [USER] * 3000, [{"role": "user", "content": "x", "": 1}],
]  # fmt: skip
PROMPTS: list[Any] = [
    None, "", [], {}, 3, 1.5, True, [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, "a"], [1.5], [True], [None],
    [[1.5]], [[True]], [["a"]], [[[1]]], {"text": "a"}, [-1], [512], [2**31], [2**70], [[-1]], [[1], [512]],
    ["a"] * 129, [[1]] * 129, [5] * 3000, "word " * 3000, ["a", "word " * 3000], [[1], None], [{}],
]  # fmt: skip
BODIES: list[bytes] = [
    b"", b" ", b"{", b"}", b"[]", b"[1]", b"3", b'"x"', b"null", b"true", b"NaN", b"{]", b"{'model': 'tiny'}",
    b'{"model": NaN}', b'{"model": tiny}', b'{"model": "tiny",}', b"\xff\xfe", b"\x00", b'{"model": "\xff"}',
    b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', b'{"model":"tiny","prompt":"\\udfff"}',
    DEEP.encode(), b'{"a":' * 5000 + b"1" + b"}" * 5000, b"model=tiny&prompt=x", b"<xml/>", b'{"model":"tiny"',
    b'{"model":"tiny","prompt":"x"}{"again":1}', b'{"model":"tiny","prompt":"x"} trailing', b"[" * 100_000,
    b'{"max_tokens":' + b"9" * 100_000 + b"}",
]  # fmt: skip


def cases() -> list[tuple[str, bytes]]:
    found = []
    for path, good in ((CHAT, HELLO), (COMPLETIONS, TEXT)):
        for name, values in FIELDS.items():
            if path == COMPLETIONS and name in ("logprobs", "echo"):
                continue
            found += [(path, json.dumps({**good, name: value}).encode()) for value in values]
        found += [(path, body) for body in BODIES]
        found += [
            (path, json.dumps({key: value for key, value in good.items() if key != missing}).encode())
            for missing in ("messages", "prompt")
            if missing in good
        ]
    found += [(CHAT, json.dumps({**HELLO, "messages": value}).encode()) for value in MESSAGES]
    found += [(COMPLETIONS, json.dumps({**TEXT, "prompt": value}).encode()) for value in PROMPTS]
    return found


def test_the_corpus_has_three_hundred_requests() -> None:
    assert len(set(cases())) >= 300


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_bad_request_is_a_4xx_and_the_next_request_is_served(caller: Caller, path: str) -> None:
    wrong = []
    for route, body in cases():
        if route != path:
            continue
        response = caller.request("POST", path, content=body)
        error = response.json().get("error", {}) if response.headers["content-type"] == "application/json" else {}
        clear = error.get("message") and "\n" not in error["message"] and len(error["message"]) < 1000
        if not (400 <= response.status_code < 500 and clear and set(error) == {"message", "type", "param", "code"}):
            wrong.append((body[:120], response.status_code, response.text[:200]))
    assert not wrong
    caller.ok(CHAT, HELLO)
    caller.ok(COMPLETIONS, TEXT)
