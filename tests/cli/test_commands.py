"""The commands as a user types them, with a tiny random model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from paceline.cli import SUMMARIES, app
from paceline.cli.chat import _Conversation
from paceline.config import (
    BATCHING,
    EVICTION,
    POLICIES,
    ConfigError,
    EngineConfig,
    SchedulerConfig,
    ServerConfig,
    public_options,
)
from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta
from paceline.model.fetch import DEFAULT_MODEL
from paceline.request import SamplingParams
from tests.cli.conftest import RANDOM
from tests.server.scripted import tokenizer_with

Run = Callable[..., Any]


def test_generate_prints_the_answer_and_nothing_else(run: Run) -> None:
    result = run("generate", "Hello", "--max-tokens", "8", *RANDOM)
    assert result.exit_code == 0, result.output
    again = run("generate", "Hello", "--max-tokens", "8", *RANDOM)
    assert result.stdout == again.stdout and result.stdout.strip()
    assert result.stderr == ""


def test_generate_answers_several_prompts_in_their_order(run: Run) -> None:
    asked = ("--max-tokens", "8", *RANDOM)
    result = run("generate", "one", "two", *asked)
    assert result.exit_code == 0, result.output
    one, two = (run("generate", prompt, *asked).stdout.rstrip("\n") for prompt in ("one", "two"))
    assert result.stdout == f"> one\n{one}\n\n> two\n{two}\n\n"


def test_generate_raw_continues_the_text_without_a_template(run: Run) -> None:
    raw, chat = (run("generate", "one", "--max-tokens", "8", *raw, *RANDOM).stdout for raw in (["--raw"], []))
    assert raw != chat


def test_sampling_options_reach_the_model(run: Run) -> None:
    hot = [
        run("generate", "one", "--max-tokens", "8", "--temperature", "9", "--seed", seed, *RANDOM).stdout
        for seed in ("1", "1", "2")
    ]
    assert hot[0] == hot[1] != hot[2]
    greedy = run("generate", "one", "--max-tokens", "8", *RANDOM).stdout
    assert run("generate", "one", "--max-tokens", "8", "--stop", greedy[2:4], *RANDOM).stdout == f"{greedy[:2]}\n"


def test_chat_answers_every_line_of_a_pipe(run: Run) -> None:
    asked = ("chat", "--temperature", "0", "--max-tokens", "6", *RANDOM)
    result = run(*asked, said="hello\n\nand you?\n/reset\nhello\n/exit\nnever read\n")
    assert result.exit_code == 0, result.output
    answers = result.stdout.split("\n\n")
    assert len(answers) == 4 and answers[3] == ""
    first, second, third = answers[:3]
    assert first == third, "/reset starts a new conversation"
    alone = run(*asked, said="and you?\n").stdout
    assert second != alone.split("\n\n")[0], "the history is part of the prompt"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_chat_shows_reasoning_dimmed_in_a_terminal_and_keeps_it_out_of_a_pipe(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}[{{ m.reasoning_content }}]{% endfor %}<think>"
    tokenizer, prompts = tokenizer_with(template), []

    @contextmanager
    def stream(engine: Any, prompt: list[int], params: Any, adapter: str) -> Iterator[Iterator[OutputDelta]]:
        prompts.append(tokenizer.decode(prompt))
        yield (OutputDelta(text, ()) for text in ("Two and", " two.</thi", "nk>\n\nFour", "."))

    monkeypatch.setattr("paceline.cli.streaming.stream", stream)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    engine = cast("Engine", SimpleNamespace(tokenizer=tokenizer, failure=None))
    conversation = _Conversation(engine, SamplingParams(), None)
    conversation._answer("2 + 2?")
    shown = capsys.readouterr().out
    assert shown == ("\x1b[2mTwo and\x1b[0m\x1b[2m two.\x1b[0m\n\nFour.\n\n" if is_terminal else "Four.\n\n")
    conversation._answer("Sure?")
    assert "assistant:Four.[Two and two.]user:Sure?" in prompts[1]
    capsys.readouterr()
    _Conversation(engine, SamplingParams(), None, separate_reasoning=False)._answer("2 + 2?")
    assert capsys.readouterr().out == "Two and two.</think>\n\nFour.\n\n"


def test_chat_continues_after_a_message_that_does_not_fit(run: Run) -> None:
    result = run("chat", "--temperature", "0", "--max-tokens", "6", *RANDOM, said=f"{'word ' * 3000}\nhello\n")
    assert result.exit_code == 0, result.output
    assert "/reset starts a new conversation." in result.stderr
    assert result.stdout == run("chat", "--temperature", "0", "--max-tokens", "6", *RANDOM, said="hello\n").stdout


def test_a_system_message_changes_the_answer(run: Run) -> None:
    asked = ("--max-tokens", "8", *RANDOM)
    assert run("generate", "hi", *asked).stdout != run("generate", "hi", "--system", "be brief", *asked).stdout


def test_models_lists_a_split_file_once(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    for name in ("big-00001-of-00003.gguf", "big-00003-of-00003.gguf", "small.gguf"):  # one part is still missing
        (tmp_path / "models" / name).write_bytes(b"x" * 1000)
    listed = [line for line in run("models").stdout.splitlines() if ".gguf" in line and str(tmp_path) in line]
    assert len(listed) == 2 and "big-00001" in listed[0] and "2 kB" in listed[0] and "small" in listed[1]


def test_models_lists_local_models_and_shapes(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    result = run("models")
    assert result.exit_code == 0, result.output
    assert f"`paceline pull` downloads {DEFAULT_MODEL}" in result.stdout
    assert "tiny-qwen3" in result.stdout and "qwen3-0.6b" in result.stdout and "mistral" in result.stdout
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"x" * 2000)
    listed = run("models").stdout
    assert DEFAULT_MODEL in listed and "2 kB" in listed and str(tmp_path / "models") in listed


def test_pull_prints_the_path_of_a_local_model(run: Run) -> None:
    result = run("pull")
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.strip()).is_file()
    assert run("pull", DEFAULT_MODEL).stdout == result.stdout


def test_pull_reports_download_and_checksum(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    def fetch(name: str, *, progress: Any) -> Path:
        progress(50, 100)
        progress(100, 100)
        return tmp_path / "model.gguf"

    monkeypatch.setattr("paceline.model.fetch.find_model", fetch)
    result = run("pull")
    assert result.stdout == f"{tmp_path / 'model.gguf'}\n"
    assert result.stderr == f"Downloaded {DEFAULT_MODEL} to {tmp_path / 'model.gguf'} (checksum verified).\n"


def test_generate_constrains_output_to_a_regex_or_a_json_schema(run: Run, tmp_path: Path) -> None:
    answer = run("generate", "one", "--regex", "[0-9]{3}-[a-f]{2}", *RANDOM).stdout
    assert re.fullmatch("[0-9]{3}-[a-f]{2}\n", answer)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}')
    assert len(json.loads(run("generate", "one", "--json-schema", str(schema), *RANDOM).stdout)) == 2
    both = run("generate", "one", "--regex", "a", "--json-schema", str(schema), *RANDOM)
    assert both.exit_code == 2 and "exclude each other" in both.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "hi", "--model", "no/such/model/here"), "model is 'no/such/model/here', which does not exist"),
        (
            ("generate", "hi", "--temperature", "-1"),
            "temperature is -1.0: give 0 (always the likeliest token) to 10000.",
        ),
        (("generate", "hi", "--max-tokens=-1"), "max_tokens is -1: give 0 (compute the prompt alone) or more."),
        (("generate", "hi", "--load", "random"), "load is 'random' and no shape is given"),
        (("generate", "hi", "--load", "random", "--shape", "huge"), "shape is 'huge', which is not known"),
        (("generate", "hi", "--load", "random", "--model", "x"), "remove the model and give a shape."),
        (("generate", "hi", *RANDOM[:4], "--kv-tokens", "0"), "kv_tokens is 0: must be at least 1."),
        (("generate", "hi", *RANDOM[:4], "--kv-tokens", "5"), "kv_tokens is 5, less than a page of 16 tokens: give at"),
        (("generate", "hi", *RANDOM[:4], "--kv-tokens", "9999999999"), "kv_tokens is 9999999999, which takes"),
        (("serve", *RANDOM, "--port", "0", "--page-size", "0"), "page_size is 0: must be at least 1."),
        (("serve", "--port", "70000"), "port is 70000: must be at most 65535."),
        (("serve", "--host", "not an address"), "host is 'not an address'"),
        (("serve", "--tenant-weights", "alice"), "tenant_weights has 'alice': expected pairs such as alice=2,bob=1."),
        (("bench", "offline", "--against", "transformers", "--only", "all"), "only is 'all': choose from single"),
        (("bench", "offline", "--only", "batch"), "only is 'batch', which needs --against: remove it."),
        (
            ("bench", "offline", "nano", "--against", "transformers"),
            "parts is ['nano'], which --against does not support",
        ),
        (("bench", "offline", "--against", "transformers", "--page-size", "4"), "page_size is 4, which --against"),
        (("bench", "offline", "--against", "transformers", "--device", "cuda"), "--against runs on the CPU."),
        (("bench", "offline", "fly"), "part is 'fly': choose from nano"),
        (("bench", "offline", "nano", "--batches", "0"), "batches is '0': expected positive integers"),
        (
            ("compile", "--shape", "tiny-qwen3", "--arch", "h200", "-o", "x"),
            "arch is 'h200': give an architecture such as",
        ),
        (("compile", "--shape", "tiny-qwen3", "--arch", "sm_70", "-o", "x"), "sm_80 or newer"),
        (("compile", "--shape", "tiny-qwen3", "-o", "/proc/x"), "output is '/proc/x', which cannot be written: "),
        (("compile", "--shape", "tiny-qwen3", "--model", "x", "-o", "x"), "give one of them"),
    ],
)
def test_an_invalid_value_is_one_line_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # `compile` deletes it: later tests need it again
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("paceline: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--polcy", "fair"), "No such option"),
        (("serve", "--draft-tokens", "2"), "No such option"),
        (("serve", "--policy", "best"), "'best' is not one of 'fair', 'fcfs'"),
        (("serve", "--port", "web"), "--port"),
        (("generate",), "Missing argument"),
        (("generate", "--raw", "--system", "x", "hi"), "--system needs the chat template"),
        (("bench", "offline", "--against", "llama.cpp"), "is not one of 'transformers'"),
        (("fly",), "No such command"),
    ],
)
def test_an_unknown_option_is_named(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert message in flat and "Traceback" not in flat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--tensor-parallel-size", "2"), "--tensor-parallel-size is no option: here it is called --tp;"),
        (
            ("serve", "Qwen/Qwen3-0.6B", "--max-model-len=99"),
            "--max-model-len is no option: here it is called --context",
        ),
        (("serve", "-ngl", "99"), "-ngl is no option: here it is called --device"),
        (("serve", "--enforce-eager"), "--enforce-eager is no option: there is none here: CUDA graphs"),
        (
            ("bench", "offline", "--kv-cache-dtype", "fp8"),
            "--kv-cache-dtype is no option: here it is called --kv-dtype",
        ),
    ],
)
def test_an_option_of_another_engine_is_translated(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"paceline: {message}"), result.stderr


def test_serve_takes_the_model_as_an_argument(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = run("serve", "/no/such/model")
    assert missing.exit_code == 75 and "model is '/no/such/model', which does not exist" in missing.stderr
    both = run("serve", "/no/such/model", "--model", "/another")
    assert both.exit_code == 2 and "model is '/another', and '/no/such/model' is given, too" in both.stderr
    monkeypatch.setenv("PACELINE_MODEL", "/of/the/environment")
    assert "'/no/such/model', which does not exist" in run("serve", "/no/such/model").stderr


def test_serve_help_lists_every_option_and_every_choice() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    for config in (ServerConfig, EngineConfig, SchedulerConfig):
        for item in public_options(config):
            assert f"--{item.name.replace('_', '-')} " in text, item.name
    for group in (
        "Server",
        "HTTP limits",
        "Logs",
        "Engine",
        "Memory",
        "Batching",
        "Scheduling policy",
        "Queue limits",
        "Other",
    ):
        assert f"─ {group} ─" in text
    flat = " ".join(text.replace("│", " ").split())
    for choices in (POLICIES, BATCHING, EVICTION):
        for name, sentence in choices.items():
            assert f"{name}: {sentence}" in flat


def test_help_shows_no_default_for_options_that_the_engine_computes() -> None:
    from paceline.cli.options import COMPUTED
    from paceline.engine.build.resolution import DEFAULTS

    assert {*DEFAULTS["cpu"], "num_pages", "context_tokens"} == COMPUTED


def test_tenant_weights_are_parsed_as_pairs() -> None:
    from paceline.cli.options import parse_weights

    assert parse_weights("alice=2, bob=0.5") == {"alice": 2.0, "bob": 0.5}
    with pytest.raises(ConfigError, match="tenant_weights has 'bob=x'"):
        parse_weights("bob=x")


def test_adapters_are_parsed_as_pairs_and_a_command_uses_one() -> None:
    from paceline.cli.options import one_adapter, parse_adapters

    assert parse_adapters("sql=/a/b, chat=c=d") == {"sql": "/a/b", "chat": "c=d"}
    for text in ("sql", "=x", "sql="):
        with pytest.raises(ConfigError, match=f"lora has '{text}': expected pairs"):
            parse_adapters(text)
    with pytest.raises(ConfigError, match="lora has 'a' twice"):
        parse_adapters("a=x,a=y")
    assert (one_adapter({}), one_adapter({"lora": {"sql": "x"}})) == ("", "sql")
    with pytest.raises(ConfigError, match="lora has a, b: give one"):
        one_adapter({"lora": {"a": "x", "b": "y"}})


def test_bench_offline_equals_the_module(run: Run, tmp_path: Path) -> None:
    """The command and `python -m paceline.bench.offline` take the same options and print the same."""
    from paceline.bench import offline
    from paceline.config import OfflineConfig

    result = run(
        "bench", "offline", "nano", *RANDOM, "--scale", "0.01", "--repeats", "1", "--trace", str(tmp_path / "out.json")
    )
    assert result.exit_code == 0, result.output
    assert sum(line.startswith("RESULT {") for line in result.stdout.splitlines()) == 1
    assert (tmp_path / "out.json").stat().st_size > 1000
    known = {action.dest for action in offline._parser()._actions}
    for config in (OfflineConfig, EngineConfig, SchedulerConfig):
        assert {item.name for item in public_options(config)} - {"tenant_weights", "lora"} <= known


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["bench", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = ['paceline', *{arguments}]\nfrom paceline.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'tokenizers', 'starlette', 'uvicorn') if name in sys.modules])\n"
        "print([name for name in ('numpy', 'msgspec', 'rich') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy, light = run.stdout.splitlines()[-2:]
    assert heavy == "[]"
    assert light == "[]" or len(arguments) > 1, "imports that double the time of `paceline --help`"


def test_the_list_of_commands_has_their_own_summaries(run: Run) -> None:
    for name, summary in SUMMARIES.items():
        shown = " ".join(run(name, "--help").output.replace("│", " ").split())
        assert summary in shown, name
        assert f"Usage: paceline {name} " in shown
    assert "Did you mean 'serve'?" in run("srve").output


def test_compiling_without_triton_says_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    done = run("compile", "--shape", "tiny-qwen3", "-o", "x")
    assert (done.exit_code, done.stderr) == (
        2,
        "paceline: triton is not installed, which compiles kernels: pip install triton.\n",
    )
