"""Embeddings of the CUDA executor compared with those of the CPU executor in float32, same weights.

Random weights that give distinct logits make a chaotic function: after 28 layers, bfloat16 alone changes the direction
of a token's hidden state (cosine 0.91; plain torch 0.89). Trained models are smooth. Here all layers together therefore
add a third of the residual stream, and plain torch in the same dtype is measured beside the engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.checks.harness import CheckResult, CheckSetup, hidden_states
from paceline.config import EngineConfig
from paceline.engine.build.assemble import assemble
from paceline.engine.cpu.linear import arrange
from paceline.engine.cuda.executor import CudaExecutor
from paceline.engine.pooling import pool_chunk
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.request import POOLING
from paceline.text.synthetic import synthetic_tokenizer

_LOWEST = 0.999  # cosine similarity
Vectors = list[npt.NDArray[np.float32]]


def check_embeddings(
    setup: CheckSetup,
    *,
    lengths: Sequence[int] = (1, 7, 64, 200, 200, 512, 700, 1300),
    chunk_tokens: int = 512,
    layer_gain: float = 1 / 1024,
) -> CheckResult:
    """Texts of several lengths, some of them in chunks: alone (as CUDA graphs), together, and again, where all but the
    last tokens may be cached. `layer_gain`: factor of what a layer adds to the residual stream."""
    spec, rng = setup.spec(), random.Random(13)

    def decoder(dtype: str, device: str | torch.device) -> Decoder:
        weights = {name: weight.to(device) for name, weight in setup.weights(spec, dtype).items()}
        for name, weight in weights.items():
            if name.endswith(("out", "down")):
                weight.mul_(layer_gain)
        return Decoder(spec, weights, max_positions=spec.context_tokens)

    texts = [[rng.randrange(spec.vocab_size) for _ in range(length)] for length in lengths]
    found: dict[str, list[Vectors]] = {}
    ours_in = decoder(setup.dtype, setup.device)
    with setup.llm(spec, kv_tokens=100_000, chunk_tokens=chunk_tokens, decoder=ours_in) as llm:
        if not isinstance(llm.engine.executor, CudaExecutor):
            return CheckResult(None, "this engine runs on a CPU, which is what embeddings are compared with")
        for pooling in POOLING:
            alone = [llm.embed(text, pooling)[0] for text in texts]
            found[pooling] = [alone, *(llm.embed(texts, pooling) for _ in range(2))]
    exact = _on_the_cpu(decoder("float32", "cpu"), texts)
    plain = _in_plain_torch(decoder(setup.dtype, setup.device), texts)
    lowest = {
        pooling: min(_lowest_cosine(vectors, exact[pooling]) for vectors in runs) for pooling, runs in found.items()
    }
    shown = ", ".join(
        f"{pooling} {cosine:.6f} (plain torch {_lowest_cosine(plain[pooling], exact[pooling]):.6f})"
        for pooling, cosine in lowest.items()
    )
    return CheckResult(
        min(lowest.values()) >= _LOWEST,
        f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens in {setup.dtype}, compared with float32 on the "
        f"CPU: lowest cosine {shown}; bound {_LOWEST}",
    )


def _lowest_cosine(ours: Vectors, theirs: Vectors) -> float:
    return min(float(a @ b) for a, b in zip(ours, theirs, strict=True))


def _on_the_cpu(decoder: Decoder, texts: Sequence[list[int]]) -> dict[str, Vectors]:
    config = EngineConfig(device="cpu", overlap="off", kv_tokens=16 * -(-max(map(len, texts)) // 16) + 16)
    tokenizer = synthetic_tokenizer(decoder.spec.vocab_size)
    with LLM.from_engine(assemble(arrange(decoder), tokenizer, config, {})) as llm:
        return {pooling: llm.embed(texts, pooling) for pooling in POOLING}


def _in_plain_torch(decoder: Decoder, texts: Sequence[list[int]]) -> dict[str, Vectors]:
    found: dict[str, Vectors] = {pooling: [] for pooling in POOLING}
    for text in texts:
        states = hidden_states(decoder, text).float().cpu().numpy()
        for pooling in POOLING:
            pooled = pool_chunk(pooling, states)
            found[pooling].append((pooled / np.linalg.norm(pooled)).astype(np.float32))
    return found
