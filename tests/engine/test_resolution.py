"""What options become, and what is refused: of headers, options and facts of a device alone. No weight exists here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from paceline.config import ConfigError, EngineConfig
from paceline.engine.build.facts import CPU, DeviceFacts, gpu_of_arch
from paceline.engine.build.resolution import Resolution, resolve
from paceline.model.files import ModelFiles, UnloadedModel
from paceline.model.layout import PackedForm, StoredTensor, is_matrix, matrix_kind, stored_parts
from paceline.model.shapes import shape, vary
from paceline.model.spec import ModelError, ModelSpec
from paceline.model.weights_plan import Origin
from paceline.weight_formats import FP8, GGUF, INT4, MXFP4, Q4, Q8, MatrixKind, WeightFormat
from tests.moving_average import recurrent_spec

GPU, HOST = replace(gpu_of_arch(90), free_bytes=100 << 30), DeviceFacts(CPU, free_bytes=100 << 30, num_threads=8)
DENSE, LARGE, EXPERTS = shape("tiny-qwen3"), shape("qwen3-14b"), shape("qwen3-30b-a3b")


def never(*_: object) -> NoReturn:
    raise AssertionError("nothing is read")


def stored_in(
    spec: ModelSpec, format: WeightFormat, *, group: int | None = None, block_rows: int = 1, wide: str = "-"
) -> UnloadedModel:
    """Headers of a checkpoint whose linear layers and experts have this format. wide: names that contain it do not."""
    form = PackedForm(format, never, format.groups[-1] if group is None else group, block_rows)
    stored = {}
    for name, part in stored_parts(spec).items():
        kinds = (MatrixKind.LINEAR, MatrixKind.EXPERTS)
        is_packed = is_matrix(part.target) and matrix_kind(part.target) in kinds and wide not in name
        stored[name] = StoredTensor(part.shape, 1000 if is_packed else 1, never, form if is_packed else None)
    path = Path("model.gguf" if format in (Q4, Q8) else "model")
    return UnloadedModel(spec, ModelFiles(path, spec, stored, None if path.suffix else format))


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.files.is_gguf", lambda path: Path(path).suffix == ".gguf")


def resolved(source: UnloadedModel, device: DeviceFacts = GPU, **options: Any) -> Resolution:
    return resolve(source, EngineConfig(**options), {}, device)


def reason(found: Resolution, option: str = "quantization") -> str:
    return next(one.reason for one in found.choices if one.option == option)


@pytest.mark.parametrize(
    ("source", "device", "expected"),
    [
        (stored_in(LARGE, FP8, group=0), GPU, "fp8"),
        (stored_in(EXPERTS, FP8, group=0), GPU, "fp8"),
        (stored_in(EXPERTS, FP8, group=128, block_rows=128), GPU, "fp8"),
        (stored_in(LARGE, INT4, group=128), GPU, "int4"),
        (stored_in(shape("gpt-oss-20b"), MXFP4), GPU, "mxfp4"),
        (stored_in(LARGE, Q4), GPU, GGUF),
        (stored_in(DENSE, Q4), HOST, GGUF),
        (stored_in(DENSE, INT4, group=32), HOST, "int4"),
    ],
)
def test_weights_stay_as_they_are_stored(source: UnloadedModel, device: DeviceFacts, expected: str) -> None:
    found = resolved(source, device)
    assert (found.config.quantization, found.weights.is_stored) == (expected, True)
    assert reason(found) == "the weights are stored so" and not any(one.is_warning for one in found.choices)
    kinds = {one.kind for one in found.weights.matrices if one.origin is Origin.STORED}
    assert kinds == {MatrixKind.EXPERTS if source.spec.has_experts else MatrixKind.LINEAR}
    wide = resolved(source, device, quantization="none")
    assert found.weights.num_bytes < wide.weights.num_bytes == wide.weights.loading_bytes


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"tp": 2, "quantization": "q8"}])
def test_ranks_of_a_cpu_keep_weights_in_4_and_8_bits(options: dict[str, Any]) -> None:
    found = resolved(stored_in(shape("smollm2-135m"), Q4), HOST, **options)
    assert found.config.quantization == options.get("quantization", GGUF)
    assert not any(one.is_warning for one in found.choices)


@pytest.mark.parametrize(
    ("spec", "format", "group"),
    [(LARGE, FP8, 0), (LARGE, INT4, 128), (shape("tiny-gemma2"), FP8, 0), (shape("tiny-olmo2"), INT4, 32)],
)
def test_a_gpu_keeps_weights_whatever_the_norms_and_with_adapters(
    spec: ModelSpec, format: WeightFormat, group: int
) -> None:
    for options in ({}, {"max_lora_rank": 8}):
        assert resolved(stored_in(spec, format, group=group), GPU, **options).config.quantization == format.name
        assert resolved(UnloadedModel(spec), GPU, quantization="fp8", **options).config.quantization == "fp8"


@pytest.mark.parametrize(
    ("source", "device", "options", "expected", "is_warning"),
    [
        # What users of such checkpoints meet, and was silent once.
        (stored_in(EXPERTS, INT4, group=128), GPU, {}, "no kernels for experts in this form", True),
        (stored_in(LARGE, FP8, group=128, block_rows=128), GPU, {}, "only experts have kernels for scales of", True),
        (stored_in(LARGE, FP8, group=0, wide="layers.3.mlp.down"), GPU, {}, "3.down is stored in 16 bits", True),
        (stored_in(LARGE, INT4, group=128), GPU, {"tp": 16}, "tp 16 divides columns that have one scale", True),
        (stored_in(LARGE, INT4, group=128), GPU, {"dtype": "float16"}, "dtype is float16", False),
        (stored_in(DENSE, Q4), GPU, {}, "that is faster for a model as small as this", False),
        (stored_in(DENSE, INT4, group=64), HOST, {"tp": 3}, "tp 3 divides columns that have one scale", True),
        (stored_in(DENSE, Q8), HOST, {"dtype": "bfloat16"}, "dtype is bfloat16", False),
        (stored_in(DENSE, FP8, group=0), HOST, {}, "a CPU has no kernels for them", True),
        (stored_in(shape("tiny-qwen3-moe"), Q4), HOST, {}, "there are no kernels for experts in 4 and 8 bits", True),
        (stored_in(DENSE, Q4), replace(HOST, native_error="no compiler"), {}, "4 and 8 bits: no compiler", True),
    ],
)
def test_what_is_expanded_says_why(
    source: UnloadedModel, device: DeviceFacts, options: dict[str, Any], expected: str, is_warning: bool
) -> None:
    device = replace(device, count=64)
    found = resolved(source, device, **options)
    assert found.config.quantization == "none" and expected in reason(found)
    assert "are expanded to " in reason(found)
    assert [one.option for one in found.choices if one.is_warning] == ["quantization"] * is_warning


@pytest.mark.parametrize(
    ("source", "device", "options", "message"),
    [
        (UnloadedModel(EXPERTS), GPU, {"quantization": "int4"}, "'int4' and the model has a mixture of experts"),
        (UnloadedModel(EXPERTS), GPU, {"quantization": "q8"}, "'q8' and the model has a mixture of experts"),
        (UnloadedModel(LARGE), GPU, {"quantization": "mxfp4"}, "'mxfp4' and the model has no experts: leave it out"),
        (UnloadedModel(shape("tiny-gpt-oss")), GPU, {"quantization": "mxfp4"}, "matrices have 56, 64 columns"),
        (UnloadedModel(LARGE), GPU, {"quantization": "fp8", "dtype": "float16"}, "dtype is 'float16': set it to bf"),
        (UnloadedModel(LARGE), GPU, {"quantization": "gguf"}, "'gguf', which needs a quantized GGUF file"),
        (stored_in(LARGE, Q4), GPU, {"quantization": "gguf", "tp": 64}, "tp 64 divides columns that have one"),
        (UnloadedModel(LARGE), replace(GPU, arch=80), {"quantization": "fp8"}, "needs a GPU of sm_89 or newer, and"),
        (UnloadedModel(LARGE), replace(GPU, arch=80), {"kv_dtype": "fp8_e4m3"}, "needs a GPU of sm_89 or newer"),
        (UnloadedModel(DENSE), HOST, {"quantization": "fp8"}, "the device is a CPU: set quantization to q8, or leave"),
        (UnloadedModel(DENSE), HOST, {"quantization": "int4"}, "the device is a CPU: set quantization to q4, or"),
        (UnloadedModel(DENSE), HOST, {"quantization": "mxfp4"}, "the device is a CPU: leave it out"),
        (UnloadedModel(DENSE), HOST, {"quantization": "q4"}, "load is 'random': give a model"),
        (stored_in(DENSE, Q4), HOST, {"quantization": "q4", "dtype": "bfloat16"}, "dtype is 'bfloat16': leave it out"),
        (UnloadedModel(shape("tiny-qwen3-moe")), HOST, {"quantization": "q4"}, "the model has experts, whose weights"),
        (
            stored_in(DENSE, Q4),
            replace(HOST, native_error="no compiler"),
            {"quantization": "q8"},
            "needs kernels compiled for this CPU: no compiler",
        ),
        (UnloadedModel(DENSE), HOST, {"kv_dtype": "fp8_e4m3"}, "kv_dtype is 'fp8_e4m3', which needs a GPU"),
        (UnloadedModel(DENSE), HOST, {"kv_dtype": "bfloat16"}, "kv_dtype is 'bfloat16' and dtype is 'float32'"),
        (UnloadedModel(DENSE), replace(GPU, shares_gpus=False), {"tp": 2}, "tp is 2 and there are 1 GPUs: each rank"),
        (UnloadedModel(DENSE), replace(GPU, shares_gpus=False), {"pp": 2}, "pp is 2 and there are 1 GPUs: each stage"),
        (UnloadedModel(DENSE), HOST, {"collectives": "nccl", "tp": 2}, "collectives is 'nccl', which needs GPUs"),
        (UnloadedModel(DENSE), HOST, {"tp": 64}, "which 64 ranks cannot divide among them"),
        (UnloadedModel(LARGE), replace(GPU, free_bytes=20 << 30), {}, "take 27.51 GiB, but only 20.00 GiB of memory"),
        (UnloadedModel(LARGE), replace(GPU, free_bytes=20 << 30), {"quantization": "fp8"}, "take 27.51 GiB, but only"),
        (UnloadedModel(vary(DENSE, head_dim=24)), GPU, {}, "head_dim is 24: device cuda needs a multiple of 16"),
    ],
)
def test_what_is_not_possible_is_refused(
    source: UnloadedModel, device: DeviceFacts, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        resolved(source, device, **options)


def test_a_file_that_fits_only_as_it_is_stored_fits() -> None:
    source, small = stored_in(LARGE, INT4, group=128), replace(GPU, free_bytes=12 << 30)
    assert resolved(source, small).weights.quantization == "int4"
    with pytest.raises(ConfigError, match=r"but only 12\.00 GiB of memory are free"):
        resolved(source, small, quantization="none")


def test_adapters_decide_the_rank_that_a_gpu_allocates_memory_for() -> None:
    for device, expected in ((GPU, 16), (HOST, 0)):
        found = resolve(UnloadedModel(DENSE), EngineConfig(), {}, device, adapter_ranks=(8, 16))
        assert found.config.max_lora_rank == expected
    with pytest.raises(ConfigError, match="max_lora_rank is 8 and an adapter of lora has rank 16: raise it"):
        resolve(UnloadedModel(DENSE), EngineConfig(max_lora_rank=8), {}, GPU, adapter_ranks=(8, 16))


def test_ranks_share_the_threads_of_a_cpu() -> None:
    assert [resolved(UnloadedModel(DENSE), HOST, tp=tp).config.threads for tp in (1, 2, 3)] == [None, 4, 2]


def test_a_draft_model_has_the_kernels_of_the_model_on_a_gpu_and_its_own_on_a_cpu() -> None:
    options = {"speculate": "draft", "draft_model": "tiny-qwen3"}
    config = EngineConfig(**options)
    for target, expected in (
        (stored_in(LARGE, Q4), {"q8"}),
        (stored_in(LARGE, FP8, group=0), {"fp8"}),
        (stored_in(shape("gpt-oss-20b"), MXFP4), set()),
        (UnloadedModel(LARGE), set()),
    ):
        found = resolve(target, config, {}, GPU, draft=UnloadedModel(DENSE))
        assert found.draft_weights is not None
        assert {one.format for one in found.draft_weights.matrices if one.packed is not None} == expected
    found = resolve(UnloadedModel(DENSE), config, {}, HOST, draft=stored_in(DENSE, Q4))
    assert [plan.quantization for plan in found.plans] == ["none", GGUF]


def test_every_choice_has_a_reason() -> None:
    found = resolved(stored_in(LARGE, INT4, group=128), replace(GPU, count=2), tp=2)
    assert {one.option for one in found.choices} == {
        "device", "dtype", "quantization", "kv_dtype", "speculate", "collectives"
    }  # fmt: skip
    assert all(one.value and one.reason for one in found.choices)
    assert "auto" not in (found.config.dtype, found.config.quantization)
    assert found.kv_bytes_per_token == LARGE.kv_bytes_per_token(2) and found.kv_dtype == "bfloat16"
    assert resolved(UnloadedModel(LARGE), kv_dtype="fp8_e4m3").kv_bytes_per_token == LARGE.kv_bytes_per_token(1)


RECURRENT = UnloadedModel(recurrent_spec("qwen3-0.6b", 1, 2))


def test_a_model_with_states_runs_without_the_prefix_cache_and_without_drafts() -> None:
    for device in (HOST, GPU):
        source = UnloadedModel(recurrent_spec()) if device is GPU else RECURRENT
        found = resolved(source, device)
        warnings = [(one.option, one.value, one.reason) for one in found.choices if one.is_warning]
        reason = "the model has layers with a state, from which no earlier position can be resumed"
        assert warnings == [("prefix_cache", "off", reason)] and not found.scheduler.prefix_cache
        assert ("speculate", "off", reason) in [(one.option, one.value, one.reason) for one in found.choices]
        assert not found.scheduler.draft_tokens and resolved(UnloadedModel(DENSE), device).scheduler.prefix_cache
    given = resolve(RECURRENT, EngineConfig(), {"prefix_cache": False, "num_host_pages": 0}, HOST)
    assert not given.scheduler.prefix_cache


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"prefix_cache": True}, "True"),
        ({"role": "prefill"}, "'prefill'"),
        ({"role": "decode"}, "'decode'"),
        ({"speculate": "auto"}, "'auto'"),
        ({"speculate": "ngram"}, "'ngram'"),
        ({"host_kv_tokens": 4096}, "4096"),
        ({"num_host_pages": 5}, "5"),
    ],
)
def test_what_shares_or_sends_a_part_of_a_request_is_refused_with_states(options: dict[str, Any], value: str) -> None:
    name, options = next(iter(options)), dict(options)
    scheduler = {name: options.pop(name) for name in list(options) if name in ("prefix_cache", "num_host_pages")}
    with pytest.raises(ConfigError, match=f"^{name} is {value} and the model has layers with a state, "):
        resolve(RECURRENT, EngineConfig(**options), scheduler, HOST)


def test_a_draft_model_with_states_is_refused() -> None:
    config = EngineConfig(speculate="draft", draft_model="other")
    with pytest.raises(ConfigError, match=r"^speculate is 'draft' and the model has layers with a state, from which"):
        resolve(UnloadedModel(DENSE), config, {}, HOST, draft=RECURRENT)


def test_memory_is_counted_by_the_units_of_every_group() -> None:
    found, whole = resolved(RECURRENT, HOST), resolved(UnloadedModel(shape("qwen3-0.6b")), HOST)
    layer = whole.kv_bytes_per_token // 28
    assert found.unit_bytes == (26 * 16 * layer, 2 * 1024) and whole.unit_bytes == (28 * 16 * layer, 0)
    assert found.kv_bytes_per_token == 26 * layer
