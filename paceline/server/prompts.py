"""The prompts of a completion or embedding request: text or token ids, one or several."""

from __future__ import annotations

from typing import Any

from paceline.request import InvalidRequest
from paceline.server.errors import ApiError
from paceline.server.fields import short
from paceline.text.tokenizer import Tokenizer

Prompt = str | list[int]


def split_prompts(value: Any, field: str) -> list[Prompt]:
    """The prompts in the request field `field`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
    raise ApiError(
        f"{field} is {short(value)}: give a string, a list of token ids, or a list of either.",
        param=field,
        code="invalid_type",
    )


def _is_token_ids(value: Any) -> bool:
    # An empty list is a prompt without tokens: `encode_prompts` rejects it as empty, not as a wrong type.
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def check_num_prompts(num_prompts: int, num_choices: int, max_prompts: int, field: str) -> None:
    if num_prompts * num_choices > max_prompts:
        choices = "" if num_choices == 1 else f" with {num_choices} choices each"
        raise ApiError(f"{field} has {num_prompts} entries{choices}: give at most {max_prompts}.", param=field)


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer, field: str) -> list[list[int]]:
    return [
        _encode(prompt, field if len(prompts) == 1 else f"{field}[{index}]", tokenizer, field)
        for index, prompt in enumerate(prompts)
    ]


def _encode(prompt: Prompt, path: str, tokenizer: Tokenizer, field: str) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt)
        except InvalidRequest as error:
            raise ApiError(f"{path}: {error}", param=field) from None
    else:
        ids = prompt
        invalid = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
        if invalid is not None:
            raise ApiError(
                f"{path} has token id {invalid}: token ids are 0 to {tokenizer.vocab_size - 1}.", param=field
            )
    if not ids:
        raise ApiError(f"{path} is empty: give at least one token.", param=field, code="invalid_value")
    return ids
