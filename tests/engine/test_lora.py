"""Adapters in the engine: a batch with several of them equals separate runs with merged weights."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engine.cpu.linear import arrange
from paceline.engine.job import Job
from paceline.engine.output import Conflict, OutputDelta, UnknownAdapter
from paceline.llm import LLM
from paceline.model.weights import load_decoder
from paceline.request import InvalidRequest, PacelineError, SamplingParams, as_tokens
from tests.helpers import retract_often
from tests.oracle.adapters import ALL, linear_shapes, merge, write_adapter
from tests.oracle.tiny import GREEDY, NUM_TOKENS, PROMPTS, SIZES, make_llm, transformers

ADAPTERS = {"a": (2, ALL), "b": (16, ALL), "c": (5, ("q_proj", "v_proj")), "d": (128, ("down_proj", "k_proj"))}
NAMES = ["", *ADAPTERS]


class Collector:
    """A sink that waits for the last output."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ended: Future[list[int]] = Future()

    def put(self, delta: OutputDelta) -> None:
        self._tokens += delta.token_ids
        if delta.finish_reason is not None:
            self._ended.set_result(self._tokens)

    def refuse(self, error: PacelineError) -> None:
        self._ended.set_exception(error)

    def wait(self) -> list[int]:
        return self._ended.result(60)


@dataclass(frozen=True)
class Models:
    base: Path
    folders: dict[str, str]
    merged: dict[str, Any]  # transformers' models, by adapter

    def expected(self, name: str, prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            found = self.merged[name].generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(3)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    base.save_pretrained(folder / "base")
    merged, folders = {"": base}, {}
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        pairs = write_adapter(folder / name, linear_shapes(base, targets), rank=rank, seed=seed)
        merged[name] = copy.deepcopy(base)
        merge(merged[name], pairs, 2.0)
        folders[name] = str(folder / name)
    return Models(folder / "base", folders, merged)


def engine_with(models: Models, names: list[str], dtype: str = "float32", **options: Any) -> LLM:
    decoder = load_decoder(models.base, dtype=dtype)
    llm = make_llm(arrange(decoder) if dtype == "float32" else decoder, **options)
    for name in names:
        llm.load_lora_adapter(name, models.folders[name])
    return llm


JOBS = [(prompt, name) for name in NAMES for prompt in PROMPTS[1:4]]


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[int]]:
    return [models.expected(name, prompt) for prompt, name in JOBS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "off", "chunk_tokens": 5, "prefix_cache": False},
        {"draft_tokens": 4, "max_batch_tokens": 400},
        {"adapter_slots": 1, "max_overtakes": 2},
        {"adapter_slots": 2, "retract_every": 3, "num_host_pages": 64, "num_pages": 24},
    ],
    ids=["overlapped", "serial, chunked", "drafts", "one slot", "retracted, little memory"],
)
def test_a_batch_of_four_adapters_and_the_base_equals_merged_weights(
    models: Models, expected: list[list[int]], options: dict[str, Any]
) -> None:
    options = dict(options)
    retract_every = options.pop("retract_every", None)
    with engine_with(models, list(ADAPTERS), **options) as llm:
        if retract_every is not None:
            retract_often(llm.engine.scheduler, retract_every)
        prompts, names = [prompt for prompt, _ in JOBS], [name for _, name in JOBS]
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(prompts, GREEDY, lora=names)
            assert [output.token_ids for output in outputs] == expected
        counters = llm.engine.scheduler.counters
        assert counters.retractions > 0 or retract_every is None
        if not options.get("prefix_cache", True):
            return
        assert counters.hit_tokens > 0


def test_an_adapter_changes_choices_and_embeddings_alike_alone_and_in_a_batch(models: Models) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, n=2, ignore_eos=True)
    with engine_with(models, ["a", "b"]) as llm:
        alone = [llm.generate([PROMPTS[1]], params, lora=name)[0] for name in ("", "a", "b")]
        together = llm.generate([PROMPTS[1]] * 3, params, lora=["", "a", "b"])
        ids = [[choice.token_ids for choice in output.choices] for output in alone]
        assert ids == [[choice.token_ids for choice in output.choices] for output in together]
        assert ids[0] != ids[1] != ids[2]
        vectors = llm.embed([PROMPTS[1]] * 3, lora=["", "a", "b"])
        for name, vector in zip(("", "a", "b"), vectors, strict=True):
            states = models.merged[name].model(torch.tensor([PROMPTS[1]])).last_hidden_state[0].mean(0)
            expected = states / states.norm()
            torch.testing.assert_close(torch.from_numpy(vector.copy()), expected, atol=1e-4, rtol=1e-3)


def test_a_replaced_adapter_never_finds_kv_of_the_old_one(models: Models) -> None:
    with engine_with(models, ["a"]) as llm:

        def run() -> tuple[list[int], int]:
            output = llm.generate([PROMPTS[2]], GREEDY, lora="a")[0]
            return output.token_ids, output.num_cached_tokens

        old, new = (models.expected(name, PROMPTS[2]) for name in ("a", "b"))
        assert run() == (old, 0)
        with pytest.raises(InvalidRequest, match=r"lora_name is 'a', which is loaded already.*load_inplace"):
            llm.load_lora_adapter("a", models.folders["b"])
        llm.load_lora_adapter("a", models.folders["b"], load_inplace=True)
        assert run() == (new, 0)
        llm.unload_lora_adapter("a")
        with pytest.raises(UnknownAdapter, match=r"the adapter 'a' is not loaded.*these: none"):
            run()
        llm.load_lora_adapter("a", models.folders["a"])
        tokens, num_cached = run()
        assert tokens == old and num_cached > 0  # the same contents as at first: its KV is valid
        assert llm.engine.scheduler.memory.adapters.faults() == []


def test_an_adapter_in_use_is_not_unloaded_and_a_replaced_one_finishes_its_requests(models: Models) -> None:
    with engine_with(models, ["a", "b"]) as llm:
        engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        engine.pause().result()
        done = Collector()
        request_id = engine.submit(Job(as_tokens(PROMPTS[1]), params, adapter="a"), done)
        engine.call(lambda _: None).result()
        with pytest.raises(Conflict, match="the adapter 'a' is in use by 1 request: unload it when"):
            llm.unload_lora_adapter("a")
        llm.load_lora_adapter("a", models.folders["c"], load_inplace=True)
        engine.resume()
        assert done.wait()[:NUM_TOKENS] == models.expected("a", PROMPTS[1])
        assert request_id not in engine.scheduler.requests
        assert llm.generate([PROMPTS[1]], GREEDY, lora="a")[0].token_ids == models.expected("c", PROMPTS[1])
        assert not engine.adapters.has_retired
        assert set(engine.scheduler.memory.adapters.slots) <= {one.adapter for one in engine.adapters.loaded}
        llm.unload_lora_adapter("a")


def test_what_of_an_adapter_changes_nothing_is_logged(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = linear_shapes(models.merged[""], ["q_proj"])
    absent = {"model.layers.0.self_attn.wq": (8, 8)}
    write_adapter(tmp_path, {**shapes, **absent}, config={"target_modules": ["q_proj", "wq", "wv"]})
    with engine_with(models, []) as llm:
        llm.load_lora_adapter("partly", tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "LoRA adapter partly: the model does not have model.layers.0.self_attn.wq.",
        "LoRA adapter partly: adapter_model.safetensors lacks, and target_modules has wv.",
    ]


def test_adapters_follow_weights_that_are_replaced(models: Models, tmp_path: Path) -> None:
    other = copy.deepcopy(models.merged["a"])
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    other.save_pretrained(tmp_path / "other")
    with engine_with(models, ["b"]) as llm:
        llm.generate([PROMPTS[1]], GREEDY, lora="b")
        llm.update_weights(tmp_path / "other")
        found = llm.generate([PROMPTS[1]], GREEDY, lora="b")[0].token_ids
    fresh = Models(tmp_path / "other", models.folders, models.merged)
    with engine_with(fresh, ["b"]) as llm:
        assert llm.generate([PROMPTS[1]], GREEDY, lora="b")[0].token_ids == found


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 uses BLAS
def test_bfloat16_adapters_are_close_to_float32(models: Models) -> None:
    prompt, params = PROMPTS[2], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(dtype: str, name: str) -> torch.Tensor:
        with engine_with(models, ["a"], dtype) as llm:
            found = llm.generate([prompt], params, lora=name)[0].prompt_logprobs
            assert found is not None
            return torch.tensor([one.logprob for one in found if one is not None])

    exact, rounded, base = logprobs("float32", "a"), logprobs("bfloat16", "a"), logprobs("float32", "")
    assert (exact - rounded).abs().mean() < 0.1 * (exact - base).abs().mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "virtual", "lora": {"a": "x"}}, "lora is .* and executor is 'virtual'"),
        ({"executor": "virtual", "max_loras": 3}, "max_loras is 3 and executor is 'virtual'"),
        ({"load": "random", "shape": "tiny-llama", "lora": {"a": ""}}, "expected pairs such as name=folder"),
        (
            {"load": "random", "shape": "tiny-llama", "lora": {"a": "/none"}},
            "the adapter is '/none', which is no folder",
        ),
        ({"load": "random", "shape": "tiny-llama", "max_loras": 0}, "max_loras is 0: must be at least 1"),
        ({"load": "random", "shape": "tiny-llama", "adapter_slots": 3}, "set max_loras instead"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        LLM(**options)
