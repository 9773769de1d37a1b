"""Adapters on several ranks and stages: the tokens are those of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from paceline.llm import LLM
from paceline.model.shapes import shape
from paceline.request import SamplingParams
from tests.oracle.adapters import adapted_shapes, write_adapter
from tests.parallel.ranks import cpu_llm, pipeline_llm
from tests.parallel.test_cpu import PROMPTS, model

SHAPE = "tiny-qwen2"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NAMES = ["", "a", "b", "a", "b"]


def write_adapters(folder: Path, name: str = SHAPE) -> dict[str, str]:
    shapes = adapted_shapes(shape(name))
    found = {}
    for seed, (adapter, rank) in enumerate({"a": 3, "b": 17}.items()):
        write_adapter(folder / adapter, shapes, rank=rank, seed=seed)
        found[adapter] = str(folder / adapter)
    return found


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, lora=NAMES)]


@cache
def alone(folder: Path) -> list[list[int]]:
    with cpu_llm(*model(SHAPE), 1) as llm:
        for name, path in write_adapters(folder).items():
            llm.load_lora_adapter(name, path)
        return tokens_of(llm)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize(("kind", "size"), [("tp", 2), ("tp", 3), ("pp", 2)])
def test_ranks_and_stages_give_the_tokens_of_one_process(kind: str, size: int, folder: Path) -> None:
    expected = alone(folder)
    assert expected[1] != expected[2]
    make = cpu_llm if kind == "tp" else pipeline_llm
    with make(*model(SHAPE), size, adapter_slots=1) as llm:
        for name, path in write_adapters(folder).items():
            llm.load_lora_adapter(name, path)
        assert tokens_of(llm) == expected
        llm.unload_lora_adapter("a")
        llm.load_lora_adapter("a", folder / "b")
        swapped = llm.generate([PROMPTS[2]], GREEDY, lora="a")[0].token_ids
        assert swapped == llm.generate([PROMPTS[2]], GREEDY, lora="b")[0].token_ids


@pytest.mark.cluster
def test_two_processes_with_adapters_give_the_tokens_of_one(tmp_path: Path) -> None:
    options = {"load": "random", "shape": SHAPE, "threads": 1, "kv_tokens": 2048, "lora": write_adapters(tmp_path)}
    with LLM(**options) as llm:
        expected = tokens_of(llm)
    with LLM(**options, tp=2) as llm:
        assert tokens_of(llm) == expected
