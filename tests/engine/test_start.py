"""What happens before torch is imported."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.config import ConfigError
from paceline.engine import start
from paceline.engine.start import start_engine
from paceline.model.spec import ModelError
from paceline.request import PacelineError

_EARLY = """
import sys
from paceline import LLM, SamplingParams
from paceline.engine import start
start._load_driver = lambda options: object()
start._create_context = lambda driver: None
start._has_kernels = lambda folder: True
start._torch_libraries = lambda: start.Path("lib")
load_text, found = start.load_text, []

def spy(model, options):
    found.append(load_text(model, options))
    assert "torch" not in sys.modules, "text is loaded first"
    return found[-1]

start.load_text = spy
llm = LLM(load="random", shape="tiny-llama", device="cpu", kv_tokens=1024)
assert llm.engine.grammars is found[0].grammars and llm.engine.tokenizer is found[0].tokenizer
assert found[0].grammars._ll_tokenizer is not None, "set up beside the libraries of torch"
print(llm.generate("a b", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].token_ids)
"""


def test_tokenizer_and_grammars_are_ready_before_torch_is_imported() -> None:
    early = subprocess.run([sys.executable, "-c", _EARLY], check=True, capture_output=True, text=True).stdout
    with LLM(load="random", shape="tiny-llama", device="cpu", kv_tokens=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert early == f"{llm.generate('a b', params)[0].token_ids}\n"


class FakeDriver:
    """libcuda with one GPU."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[str] = []
        self.status = status

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> int:
            self.calls.append(name)
            return self.status

        return call


def test_an_engine_on_a_gpu_has_its_context_created_early(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert start._load_driver({"kv_tokens": 1024, "load": "random", "shape": "tiny-llama"}) is driver
    start._create_context(driver)
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    driver = FakeDriver(status=100)  # no device
    start._create_context(driver)
    assert driver.calls == ["cuInit"]


def test_libraries_are_loaded_by_a_foreign_function() -> None:
    libc = Path(ctypes.util.find_library("c") or "libc.so.6")
    assert start._load_library(libc, os.RTLD_NOW).getpid() == os.getpid()
    with pytest.raises(OSError, match=r"no-such\.so"):
        start._load_library(Path("no-such.so"), os.RTLD_NOW)
    start._load_torch_libraries(Path("no-such-folder"))  # nothing happens


@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_torch_without_cuda_has_nothing_to_load_early(
    has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that has a GPU and its driver."""
    (tmp_path / "lib").mkdir()
    if has_cuda:
        (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert start._torch_libraries() == (tmp_path / "lib" if has_cuda else None)
    found.origin = None
    assert start._torch_libraries() is None


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"executor": "virtual"}])
def test_an_engine_without_a_gpu_has_none(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    assert start._load_driver(options) is None


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert start._load_driver({}) is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pagesize": 3}, ConfigError, "did you mean page_size"),
        ({"load": "random"}, ConfigError, "no shape is given"),
        ({"load": "random", "shape": "tiny"}, ModelError, "shape is 'tiny'"),
        ({"load": "some"}, ConfigError, "load is 'some'"),
        ({"model": ""}, ConfigError, "model is ''"),
        ({"model": 3}, ConfigError, "model is 3"),
        ({"shape": "tiny-llama"}, ConfigError, "requires load='random'"),
    ],
)
def test_mistakes_are_reported_as_ever(
    arguments: dict[str, Any], error: type[PacelineError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.delitem(sys.modules, "torch")
    load_driver = start._load_driver
    monkeypatch.setattr(start, "_load_driver", lambda options: load_driver(options) or object())
    monkeypatch.setattr(start, "_create_context", lambda driver: None)
    monkeypatch.setattr(start, "_torch_libraries", lambda: Path("lib"))
    monkeypatch.setattr(start, "_load_torch_libraries", lambda folder: None)
    monkeypatch.setattr(start, "_has_kernels", lambda folder: True)
    with pytest.raises(error, match=message):
        start_engine(**arguments)


@pytest.mark.parametrize("compiled", [None, "cache", "folder"])
def test_processes_that_compile_start_first_if_nothing_is_compiled(
    compiled: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: the processes, the text, the engine that gets them; and they end, whatever happens."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    if compiled is not None:
        folder = tmp_path / "home" / "kernels" if compiled == "cache" else tmp_path / "prepared"
        folder.mkdir(parents=True)
        (folder / "model.list").touch()
    events: list[str] = []

    class Workers:
        def __init__(self) -> None:
            events.append("start")

        def close(self) -> None:
            events.append("close")

    def build(model: object, *, workers: Workers | None, **_: object) -> None:
        events.append(f"build {type(workers).__name__}")
        raise MemoryError

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(start, "_load_driver", lambda options: object())
    monkeypatch.setattr(start, "_create_context", lambda driver: None)
    monkeypatch.setattr(start, "_torch_libraries", lambda: Path("lib"))
    monkeypatch.setattr(start, "_load_torch_libraries", lambda folder: None)
    monkeypatch.setattr(start, "load_text", lambda model, options: events.append("text"))
    monkeypatch.setattr(start, "CompileWorkers", Workers)
    monkeypatch.setattr("paceline.engine.build.build_engine", build)
    with pytest.raises(MemoryError):
        start_engine(kernel_folder=str(tmp_path / "prepared"))
    expected = ["start", "text", "build Workers", "close"] if compiled is None else ["text", "build NoneType"]
    assert events == expected
