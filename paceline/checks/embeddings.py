"""Embeddings of the CUDA executor compared with those of the CPU executor in float32, same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.checks.harness import CheckResult, CheckSetup
from paceline.config import EngineConfig
from paceline.engine.build import assemble
from paceline.engine.cpu.model import CpuModel
from paceline.engine.cuda.executor import CudaExecutor
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.spec import ModelSpec
from paceline.request import POOLING
from paceline.text.synthetic import synthetic_tokenizer

_LOWEST = 0.999  # cosine similarity
Vectors = list[npt.NDArray[np.float32]]


def check_embeddings(
    setup: CheckSetup, *, lengths: Sequence[int] = (1, 7, 64, 200, 200, 512, 700, 1300), chunk_tokens: int = 512
) -> CheckResult:
    """Texts of several lengths, some of them in chunks: alone (as CUDA graphs), together, and again, where all but the
    last tokens may be cached."""
    spec, rng = setup.spec(), random.Random(13)
    texts = [[rng.randrange(spec.vocab_size) for _ in range(length)] for length in lengths]
    found: dict[str, list[Vectors]] = {}
    with setup.llm(spec, kv_tokens=100_000, chunk_tokens=chunk_tokens) as llm:
        if not isinstance(llm.engine.executor, CudaExecutor):
            return CheckResult(None, "this engine runs on a CPU, which is what embeddings are compared with")
        for pooling in POOLING:
            alone = [llm.embed(text, pooling)[0] for text in texts]
            found[pooling] = [alone, *(llm.embed(texts, pooling) for _ in range(2))]
    exact = _on_the_cpu(setup, spec, texts)
    lowest = {
        pooling: min(
            float(ours @ theirs) for vectors in runs for ours, theirs in zip(vectors, exact[pooling], strict=True)
        )
        for pooling, runs in found.items()
    }
    shown = ", ".join(f"{pooling} {cosine:.6f}" for pooling, cosine in lowest.items())
    return CheckResult(
        min(lowest.values()) >= _LOWEST,
        f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens in {setup.dtype}, compared with float32 on the "
        f"CPU: lowest cosine {shown} (bound {_LOWEST})",
    )


def _on_the_cpu(setup: CheckSetup, spec: ModelSpec, texts: Sequence[list[int]]) -> dict[str, Vectors]:
    weights = {name: weight.cpu() for name, weight in setup.weights(spec, "float32").items()}
    model = CpuModel(Decoder(spec, weights, max_positions=spec.context_tokens))
    config = EngineConfig(device="cpu", overlap="off", kv_tokens=16 * -(-max(map(len, texts)) // 16) + 16)
    with LLM.from_engine(assemble(model, synthetic_tokenizer(spec.vocab_size), config, {})) as llm:
        return {pooling: llm.embed(texts, pooling) for pooling in POOLING}
