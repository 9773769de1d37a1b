"""The prompts of a request: text, token ids or messages, checked against the context before they are encoded whole."""

from __future__ import annotations

from typing import Any

from paceline.request import InvalidRequest
from paceline.server import fields
from paceline.server.errors import ApiError
from paceline.server.fields import Json
from paceline.server.limits import MAX_CACHE_SALT_CHARACTERS
from paceline.server.request_types import Prediction
from paceline.server.state import RequestContext
from paceline.text.control_tokens import RenderedChat
from paceline.text.tokenizer import TooManyTokens

Prompt = str | list[int]


def split_prompts(value: object, field: str) -> list[Prompt]:
    """The prompts in the request field `field`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
    raise ApiError(
        f"{field} is {fields.short(value)}: give a string, a list of token ids, or a list of either.",
        param=field,
        code="invalid_type",
    )


def _is_token_ids(value: object) -> bool:
    # An empty list is a prompt without tokens: `encode_prompts` rejects it as empty, not as a wrong type.
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def check_num_prompts(num_prompts: int, num_choices: int, max_prompts: int, field: str) -> None:
    if num_prompts * num_choices > max_prompts:
        choices = "" if num_choices == 1 else f" with {num_choices} choices each"
        raise ApiError(f"{field} has {num_prompts} entries{choices}: give at most {max_prompts}.", param=field)


def encode_prompts(prompts: list[Prompt], context: RequestContext, field: str) -> list[list[int]]:
    return [
        encode_prompt(prompt, context, field if len(prompts) == 1 else f"{field}[{index}]")
        for index, prompt in enumerate(prompts)
    ]


def encode_prompt(prompt: Prompt, context: RequestContext, path: str) -> list[int]:
    """The token ids of the prompt at `path`, such as `prompt[2]`."""
    tokenizer, limit, field = context.tokenizer, context.model.max_tokens, path.partition("[")[0]
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt, limit=limit)
        except TooManyTokens:
            raise too_long(path, f"more than {limit}", limit, field) from None
        except InvalidRequest as error:
            raise ApiError(f"{path}: {error}", param=field) from None
    else:
        ids = prompt
        if len(ids) > limit:
            raise too_long(path, str(len(ids)), limit, field)
        invalid = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
        if invalid is not None:
            raise ApiError(
                f"{path} has token id {invalid}: token ids are 0 to {tokenizer.vocab_size - 1}.", param=field
            )
    if not ids:
        raise ApiError(f"{path} is empty: give at least one token.", param=field, code="invalid_value")
    return ids


def render_chat(messages: list[Json], context: RequestContext, **options: Any) -> RenderedChat:
    """The conversation as the chat template writes it; `options` as in `Tokenizer.render_chat`."""
    allow = context.config.allow_control_tokens
    return context.tokenizer.render_chat(messages, allow_control_tokens=allow, **options)


def encode_rendered(rendered: RenderedChat, context: RequestContext) -> list[int]:
    """The token ids of a rendered conversation."""
    limit = context.model.max_tokens
    try:
        return context.tokenizer.encode_rendered(rendered, limit=limit)
    except TooManyTokens:
        raise too_long("messages", f"more than {limit}", limit, "messages") from None


def encode_prediction(prediction: Prediction | None, context: RequestContext) -> list[int]:
    """The token ids of predicted output. It costs at most what a prompt costs to encode and to carry."""
    if prediction is None:
        return []
    limit = context.model.max_tokens
    too_many = ApiError(
        f"prediction has more than {limit} tokens, this model's maximum context length: shorten it.",
        param="prediction",
        code="context_length_exceeded",
    )
    try:
        ids = context.tokenizer.encode(prediction.text(), add_special=False, limit=limit)
    except TooManyTokens:
        raise too_many from None
    except InvalidRequest as error:
        raise ApiError(f"prediction: {error}", param="prediction") from None
    if len(ids) > limit:
        raise too_many
    return ids


def check_messages(messages: list[Json], context: RequestContext) -> list[Json]:
    """The messages as the chat template expects them."""
    if len(messages) > context.model.max_tokens:  # a message has at least one token
        raise too_long("messages", f"at least {len(messages)}", context.model.max_tokens, "messages")
    return fields.check_messages(messages)


def too_long(path: str, count: str, limit: int, field: str) -> ApiError:
    return ApiError(
        f"{path} has {count} tokens: this model's maximum context length is {limit} tokens, for prompt and output "
        "together; shorten the prompt.",
        param=field,
        code="context_length_exceeded",
    )


def check_cache_salt(salt: str) -> None:
    if len(salt) > MAX_CACHE_SALT_CHARACTERS:
        raise ApiError(
            f"cache_salt has {len(salt)} characters: give at most {MAX_CACHE_SALT_CHARACTERS}.",
            param="cache_salt",
            code="invalid_value",
        )
