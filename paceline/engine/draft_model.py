"""Loads a draft model: a smaller model that predicts the tokens of another, for speculative decoding.

Any model with the same tokenizer will do. Families, sizes of heads and lengths of the context may differ; a vocabulary
that is padded to another size is cut or filled to that of the target model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from paceline.config import ConfigError
from paceline.model.decoder import Decoder
from paceline.model.fetch import find_model
from paceline.model.files import UnloadedModel, open_files
from paceline.model.shapes import shape
from paceline.model.spec import ModelSpec
from paceline.model.weights import Progress
from paceline.text.load import load_tokenizer
from paceline.text.tokenizer import Tokenizer


def draft_source(name: str, target: ModelSpec, *, random: bool, progress: Progress | None = None) -> UnloadedModel:
    """A draft model by folder, .gguf file or hub id; of random weights, by the name of a shape."""
    files = None if random else open_files(find_model(name, progress=progress))
    spec = shape(name) if files is None else files.spec
    if spec.num_parameters > target.num_parameters:
        raise ConfigError(
            f"draft_model is {name!r} with {spec.num_parameters:,} parameters, more than the model's "
            f"{target.num_parameters:,}: choose a smaller one."
        )
    return UnloadedModel(replace(spec, vocab_size=target.vocab_size), files)


def check_tokenizer(source: UnloadedModel, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the draft model has another tokenizer. Added tokens, such as those of a chat template, may
    differ."""
    if source.files is None:
        return
    ours, theirs = tokenizer.vocabulary(), load_tokenizer(source.files.path).vocabulary()
    for token, index in ours.items():
        if theirs.get(token) != index:
            raise ConfigError(
                f"draft_model has another tokenizer: {token!r} is token {index} of the model and "
                f"{theirs.get(token, 'none')} of the draft model; choose one with the same tokenizer."
            )


def with_vocabulary(decoder: Decoder, vocab_size: int) -> Decoder:
    """The decoder with a vocabulary of so many tokens; those that it did not have get zeros."""
    spec = decoder.spec
    if decoder.whole_spec.vocab_size == vocab_size:
        return decoder
    assert decoder.group is None and decoder.stages is None, "a draft model is not divided"
    decoder.embedding = _with_rows(decoder.embedding, vocab_size)
    decoder.head.weight = decoder.embedding if spec.tied else _with_rows(decoder.head.tensor, vocab_size)
    decoder.spec = decoder.whole_spec = replace(spec, vocab_size=vocab_size)
    return decoder


def _with_rows(weight: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(weight, (0, 0, 0, count - len(weight))).contiguous()
