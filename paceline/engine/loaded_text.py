"""What an engine needs for text, the tokenizer and the grammars, loaded without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.model.fetch import DEFAULT_MODEL, find_model
from paceline.model.read_spec import read_spec
from paceline.model.shapes import shape as named_shape
from paceline.request import InvalidRequest
from paceline.sampling.grammar import Grammars
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer


class LoadedText(NamedTuple):
    tokenizer: Tokenizer
    grammars: Grammars


def load_text(model: str | Path | None, options: Mapping[str, Any]) -> LoadedText | None:
    """By the arguments of `build_engine`; None where it will find a mistake in them."""
    shape = options.get("shape")
    if options.get("load", "weights") == "random":
        if not isinstance(shape, str):
            return None
        vocab_size = named_shape(shape).vocab_size
        tokenizer = synthetic_tokenizer(vocab_size)
    else:
        if shape is not None or model == "" or not isinstance(model, str | Path | None):
            return None
        path = find_model(DEFAULT_MODEL if model is None else model, progress=options.get("progress"))
        vocab_size = read_spec(path).vocab_size
        tokenizer = load_tokenizer(path)
    grammars = Grammars(tokenizer, vocab_size)
    set_up_grammars(grammars)
    return LoadedText(tokenizer, grammars)


def set_up_grammars(grammars: Grammars) -> None:
    with suppress(InvalidRequest):  # a request with a grammar will get this error
        grammars.set_up()
