"""`paceline bench quality`: distributions of two models on a text, and facts hidden in prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.bench.quality import DEPTHS, TEXT, make_needles
from paceline.cli import app
from paceline.model.decoder import Decoder
from paceline.model.files import open_files
from paceline.model.layout import is_matrix, target_shapes
from paceline.model.weights import QuantizedWeights, load_decoder
from paceline.text.synthetic import synthetic_tokenizer
from tests.helpers import needs_compiler
from tests.model.contiguous_cache import ContiguousCache
from tests.resolving import plan_of
from tests.tiny_folder import save_tiny_model

WINDOW, NUM_TOKENS = 40, 100
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def make(vocab_size: int = 300, seed: int = 0) -> Path:
        return save_tiny_model(tmp_path / f"{vocab_size}-{seed}", vocab_size=vocab_size, seed=seed)

    return make


def run(*arguments: str) -> Any:
    sizes = ("--window", str(WINDOW), "--text-tokens", str(NUM_TOKENS), "--threads", "1")
    return CliRunner().invoke(app, ["bench", "quality", *sizes, *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_model_does_not_differ_from_itself(folder: Folder) -> None:
    found = report("--model", str(folder()), "--needle-lengths", "190,256")
    assert found["mean_kl"] == found["worst_kl"] == 0 and found["top1_agreement"] == 1
    assert found["perplexity"] == found["against_perplexity"] > 1
    assert found["num_tokens"] == NUM_TOKENS - 3, "the first token of each of three windows has no context"
    needles = found["needles"]
    assert [(one["length"], one["depth"]) for one in needles] == [(n, d) for n in (190, 256) for d in DEPTHS]
    assert all(one["logprob"] == one["against_logprob"] < 0 for one in needles)


def rounded(path: Path) -> Decoder:
    files = open_files(path)
    weights = QuantizedWeights(files, plan_of(path, quantization="q4"))
    matrices = {name: weights.matrix(name).dequantize() for name in target_shapes(files.spec) if is_matrix(name)}
    return Decoder(files.spec, weights.vectors | matrices)


@needs_compiler
@pytest.mark.parametrize("kind", ["rounded weights", "another model"])
def test_figures_are_those_of_a_naive_computation(folder: Folder, kind: str) -> None:
    path, other = folder(), folder(seed=1)
    if kind == "rounded weights":
        options: tuple[str, ...] = ("--model", str(path), "--quantization", "q4")
        decoders = (rounded(path), load_decoder(path, dtype="float32"))
    else:
        options = ("--model", str(other), "--against", str(path))
        decoders = (load_decoder(other, dtype="float32"), load_decoder(path, dtype="float32"))
    found = report(*options, "--needle-lengths", "none")
    tokens = synthetic_tokenizer(300).encode(TEXT.read_text())[:NUM_TOKENS]
    divergences, losses, equal = [], [0.0, 0.0], 0
    for start in range(0, NUM_TOKENS, WINDOW):
        window = tokens[start : start + WINDOW]
        logits = [ContiguousCache(decoder).feed(window).double().numpy() for decoder in decoders]
        for at, target in enumerate(window[1:]):
            p, q = (np.exp(one[at]) / np.exp(one[at]).sum() for one in logits)
            divergences.append(sum(q[token] * math.log(q[token] / p[token]) for token in range(300)))
            losses = [losses[0] - math.log(p[target]), losses[1] - math.log(q[target])]
            equal += int(p.argmax() == q.argmax())
    count = len(divergences)
    rel = 0.1 if kind == "rounded weights" else 1e-3  # their KV is in bfloat16, and with AMX prompts are, too
    assert found["mean_kl"] == pytest.approx(sum(divergences) / count, rel=rel) and found["mean_kl"] > 1e-3
    assert found["worst_kl"] == pytest.approx(max(divergences), rel=rel)
    assert found["perplexity"] == pytest.approx(math.exp(losses[0] / count), rel=1e-3)
    assert found["against_perplexity"] == pytest.approx(math.exp(losses[1] / count), rel=1e-5)
    assert abs(found["top1_agreement"] - equal / count) <= 2 / count
    assert "needles" not in found


@needs_compiler
def test_more_bits_are_closer(folder: Folder) -> None:
    path = str(folder())
    four, eight = (report("--model", path, "--quantization", one, "--needle-lengths", "190") for one in ("q4", "q8"))
    assert 0 < eight["mean_kl"] < four["mean_kl"] / 10
    errors = [sum(abs(one["logprob"] - one["against_logprob"]) for one in row["needles"]) for row in (four, eight)]
    assert 0 < errors[1] < errors[0] / 2
    assert four["against_perplexity"] == eight["against_perplexity"]


@pytest.mark.parametrize("depth", range(len(DEPTHS)))
def test_a_needle_is_at_its_depth_and_the_prompt_ends_with_the_answer(depth: int) -> None:
    tokenizer = synthetic_tokenizer(600)
    filler = tokenizer.encode("plain words of no interest. ")
    percent, needle = list(make_needles(tokenizer, filler, 300, seed=3))[depth]
    text = tokenizer.decode(needle.tokens)
    answer = tokenizer.decode(needle.tokens[-needle.num_answer_tokens :])
    assert len(needle.tokens) == 300 and percent == DEPTHS[depth]
    assert answer.strip().isdecimal() and len(answer.strip()) == 6
    assert text.count(answer) == 2 and text.endswith(f"is{answer}")
    before, _, after = text.partition("\n\nThe secret number")
    rest = after.partition("\n\n")[2].partition("\n\nQuestion")[0]
    assert len(before) / (len(before) + len(rest)) == pytest.approx(percent / 100, abs=0.05)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "which cannot be read (No such file or directory): give a text file."),
        (b" \n", "which is empty: give a file with some hundred words."),
        (b"caf\xe9 au lait", "which is not UTF-8 (byte 3): convert it, for example with iconv."),
        (b"a", "text has a single token, and nothing to predict: give a longer one."),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(
    folder: Folder, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert message in refusal("--model", str(folder()), "--text", str(path))


def test_models_and_sizes_that_do_not_fit_are_refused(folder: Folder) -> None:
    path, other = str(folder()), folder(vocab_size=400)
    assert "against has a vocabulary of 400 tokens and model one of 300" in refusal(
        "--model", path, "--against", str(other)
    )
    other = folder(seed=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[50:52]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "against has another tokenizer than model" in refusal("--model", path, "--against", str(other))
    for arguments, message in (
        (("--needle-lengths", "190,257"), "needle_lengths has 257, more than the context of 256 tokens: lower it."),
        (("--needle-lengths", "20"), "needle_lengths has 20, and the fact and the question alone take"),
        (
            ("--needle-lengths", "20,x"),
            "needle_lengths is '20,x': expected positive integers such as 128,256, or none.",
        ),
        (("--window", "300"), "window has 300, more than the context of 256 tokens: lower it."),
    ):
        assert message in refusal("--model", path, *arguments)


def refusal(*arguments: str) -> str:
    result = run("--needle-lengths", "none", *arguments)
    assert result.exit_code == 2, result.output
    return str(result.output)
