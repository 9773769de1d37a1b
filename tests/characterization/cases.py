"""The cases: every family x format x device, and some of them x every option; and what running one of them records."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.engine.loaded_text import LoadedText
from paceline.engine.output import EngineFailed
from paceline.llm import LLM
from paceline.model.read_spec import read_spec
from paceline.request import PacelineError, SamplingParams
from paceline.sampling.grammar import Grammars
from paceline.scheduler.plan import DRAFT_DEPTHS
from paceline.text.synthetic import synthetic_tokenizer
from tests.characterization.checkpoints import FAMILIES, FORMATS, VOCAB, write_checkpoint
from tests.characterization.engines import DEVICES, NotLoaded, build_on
from tests.helpers import RandomDepth
from tests.oracle.adapters import ALL, adapted_shapes, write_adapter

QUANTIZATIONS = ("none", "fp8", "int4", "mxfp4", "gguf", "q8", "q4")
STORED = ("plain", *FORMATS, "gguf")
# One of each architecture in all formats; all others in what the checkpoint has.
IN_ALL_FORMATS = (
    "llama", "mistral sliding window", "qwen2", "qwen3", "smollm3 without rope in some layers", "gemma", "gemma2",
    "gemma3", "phi3", "olmo2", "granite", "qwen3-moe", "qwen2-moe with a shared expert", "mixtral", "olmoe", "gpt-oss",
    "odd sizes", "odd sizes, experts",
)  # fmt: skip
WITH_OPTIONS = ("qwen3", "gemma2", "qwen3-moe", "gpt-oss")
# What is stored, and what is asked for: as stored; each format from 32 bits; GGUF where 16 bits would be faster.
FORMAT_PAIRS = (
    *((stored, "auto") for stored in STORED),
    *(("plain", asked) for asked in QUANTIZATIONS[1:]),
    ("gguf", "gguf"),
)
# In how they are read these differ from fp8 and awq, in what runs they do not.
READ_DIFFERENTLY = ("fp8-channel", "gptq", "gptq-v2", "packed", "packed-zeros")
# Activations on CUDA are in float32 otherwise. Attention before quantized weights writes float16, to which the
# interpreter does not convert bfloat16.
IN_16_BITS = ("bfloat16", "float16", "bfloat16 kv")
OPTIONS: dict[str, dict[str, Any]] = {
    "-": {},
    "chunks": {"chunk_tokens": 5, "page_size": 4},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "lora": {"lora": "a"},
    "fp8 kv": {"kv_dtype": "fp8_e4m3"},
    "bfloat16 kv": {"kv_dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "draft model": {"speculate": "draft", "draft_model": "draft"},
    "new weights": {"new_weights": True},
}


PROMPTS = [
    torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (21, 1)
]
PROMPTS.append([*PROMPTS[0][:13], 7])  # shares a prefix with the first
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
FEWER_TOKENS = replace(GREEDY, max_tokens=4)  # of options on CUDA
BASE: dict[str, Any] = {
    "num_pages": 64, "page_size": 8, "max_running": 4, "context_tokens": 64, "max_batch_tokens": 64,
    "max_prefill_tokens": 64, "chunk_tokens": 64, "prefix_wait_tokens": 8, "itl_target": math.inf, "max_wait": math.inf,
    "threads": 1, "speculate": "off",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str
    stored: str
    asked: str  # quantization
    device: str
    option: str

    @property
    def is_resolved_only(self) -> bool:
        """Stages of a pipeline of GPUs are not pretended."""
        return self.device == "cuda" and self.option == "pp2"

    @property
    def is_built_only(self) -> bool:
        """On CUDA, where building takes milliseconds and generating seconds, if the same kernels run in another
        case."""
        if self.device != "cuda":
            return False
        if (self.stored, self.asked) not in FORMAT_PAIRS:
            return True
        if self.option in IN_16_BITS and (self.stored, self.asked) != ("plain", "auto"):
            return True
        is_first = self.family == WITH_OPTIONS[0] and self.option == "-"
        is_rounded = self.stored == "plain" and self.asked != "auto"
        is_example = self.family in WITH_OPTIONS and self.option == "-"
        return (self.stored in READ_DIFFERENTLY and not is_first) or (is_rounded and not is_example)

    @property
    def name(self) -> str:
        asked = "" if self.asked == "auto" else f" as {self.asked}"
        return f"{self.family}/{self.stored}{asked}/{self.device}/{self.option}"


def all_cases() -> Iterator[Case]:
    for family in FAMILIES:
        pairs = FORMAT_PAIRS if family in IN_ALL_FORMATS else FORMAT_PAIRS[:1]
        if family == WITH_OPTIONS[0]:
            pairs = tuple(dict.fromkeys((*pairs, *((stored, asked) for stored in STORED for asked in QUANTIZATIONS))))
        for stored, asked in pairs:
            for device in DEVICES:
                if device == "reference" and asked != "auto":
                    continue
                has_options = family in WITH_OPTIONS and (stored, asked) in FORMAT_PAIRS
                for option in OPTIONS if has_options else ("-",):
                    yield Case(family, stored, asked, device, option)


class _Lines(logging.Handler):
    """What the engine logs, without what differs from run to run."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "launch of a pass" not in record.msg and "took" not in record.msg:
            self.lines.append(re.sub(r"\d+\.\d+", "#", record.getMessage()))


@cache
def _text() -> LoadedText:
    tokenizer = synthetic_tokenizer(VOCAB)
    return LoadedText(tokenizer, Grammars(tokenizer, VOCAB))


def run(case: Case, root: Path) -> dict[str, Any]:
    """The record of a case. root: where checkpoints are, or will be written."""
    lines, facts, log = _Lines(), dict[str, Any](), logging.getLogger("paceline.engine")
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        found = _run(case, root, facts)
    except Exception as error:
        is_refused = isinstance(error, PacelineError) and not isinstance(error, EngineFailed)
        kind = "refused" if is_refused else "failed"
        found = {kind: f"{type(error).__name__}: {error}".replace(str(root), "ROOT")}
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
    log_lines = {"log": [line.replace(str(root), "ROOT") for line in lines.lines]} if lines.lines else {}
    return {"case": case.name, **facts, **found, **log_lines}


def _run(case: Case, root: Path, facts: dict[str, Any]) -> dict[str, Any]:
    path = write_checkpoint(root, case.family, case.stored)
    options: dict[str, Any] = {**BASE, **OPTIONS[case.option]}
    has_new, adapter = options.pop("new_weights", False), options.pop("lora", None)
    if adapter is not None:
        options["lora"] = {adapter: str(_adapter(root, case.family, path))}
    if "draft_model" in options:
        options["draft_model"] = str(write_checkpoint(root, "qwen3", "plain", seed=4))
    options["quantization"] = "none" if case.device == "reference" else case.asked
    try:
        engine = build_on(
            case.device,
            path,
            facts,
            resolve_only=case.is_resolved_only,
            keep_dtype=case.option in IN_16_BITS,
            text=_text(),
            **options,
        )
    except NotLoaded:
        return {"resolved": True}
    facts |= {"precision": engine.info.dtype, "kv_dtype": engine.info.kv_dtype, "kv_scales": engine.info.kv_scales}
    # Weights that CUDA expands are those of another model in 16 bits.
    is_expanded = case.device == "cuda" and case.stored != "plain" and facts["quantization"] == "none"
    is_short = case.device == "cuda" and case.option != "-"
    with LLM.from_engine(engine) as llm:
        if "draft_model" in options:  # otherwise the depth follows measured times, and the batches with it
            llm.engine.scheduler.draft_depth = RandomDepth(max(DRAFT_DEPTHS), lambda _: DRAFT_DEPTHS[0])
        if has_new:
            llm.update_weights(write_checkpoint(root, case.family, case.stored, seed=4))
        if case.is_built_only or is_expanded:
            return {"built": True}
        names = "" if adapter is None else ["", adapter, adapter]
        outputs = llm.generate(PROMPTS, FEWER_TOKENS if is_short else GREEDY, progress=False, lora=names)
        if not is_short:  # one row, from the prefix cache
            outputs += llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=2), progress=False)
    return {
        "tokens": [one.token_ids for one in outputs],
        "logprobs": [[each.logprob for each in one.logprobs or ()] for one in outputs],
    }


@cache
def _adapter(root: Path, family: str, path: Path) -> Path:
    folder = root / f"adapter-{path.name}"
    write_adapter(folder, adapted_shapes(read_spec(path), ALL), rank=4)
    return folder
