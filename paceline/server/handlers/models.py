"""`/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.responses import Response

from paceline.request import InvalidRequest
from paceline.server.apis.dialects import is_anthropic
from paceline.server.errors import ApiError
from paceline.server.limits import MAX_DETOKENIZE_TOKENS, MAX_TOKENIZE_CHARACTERS
from paceline.server.prompts import check_messages, render_chat
from paceline.server.request_types import DetokenizeRequest, TokenizeRequest
from paceline.server.response_types import (
    AnthropicModel,
    AnthropicModelList,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from paceline.server.routing import Call, json_response
from paceline.server.state import RequestContext, ServerState
from paceline.text.control_tokens import RenderedChat


async def _model_cards(state: ServerState) -> list[ModelCard]:
    """The served model, then its adapters."""
    max_tokens = state.client.model.max_tokens
    await state.refresh_adapters()
    adapters = [ModelCard(name, state.created, max_tokens, parent=state.model_name) for name in state.adapters]
    return [ModelCard(state.model_name, state.created, max_tokens), *adapters]


async def list_models(call: Call) -> Response:
    cards = await _model_cards(call.state)
    if not is_anthropic(call.http.headers):
        return json_response(ModelList(cards))
    models = [_anthropic_model(card) for card in cards]
    return json_response(AnthropicModelList(models, models[0].id, models[-1].id))


async def get_model(call: Call) -> Response:
    cards, name = await _model_cards(call.state), call.path_params["name"]
    call.state.context.check_model(name)
    card = next(card for card in cards if card.id == name)
    return json_response(_anthropic_model(card) if is_anthropic(call.http.headers) else card)


def _anthropic_model(card: ModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(card.id, card.id, created, card.max_model_len)


def prepare_tokenize(context: RequestContext, body: TokenizeRequest) -> bytes:
    """The body of the response."""
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("Exactly one of `prompt` and `messages` is required.", param="prompt")
    tokenizer, add_special = context.tokenizer, body.add_special_tokens
    rendered = RenderedChat(body.prompt or "")
    if body.messages is not None:
        rendered, add_special = render_chat(check_messages(body.messages, context), context), False
    text = rendered.text
    if len(text) > MAX_TOKENIZE_CHARACTERS:
        raise ApiError(
            f"The text has {len(text)} characters: give at most {MAX_TOKENIZE_CHARACTERS}.",
            param="prompt" if body.messages is None else "messages",
            code="invalid_value",
        )
    tokens = tokenizer.encode_rendered(rendered, add_special=add_special)
    return msgspec.json.encode(TokenizeResponse(len(tokens), context.model.max_tokens, tokens))


def prepare_detokenize(context: RequestContext, body: DetokenizeRequest) -> bytes:
    """The body of the response."""
    context.check_model(body.model)
    if len(body.tokens) > MAX_DETOKENIZE_TOKENS:
        raise InvalidRequest(f"tokens has {len(body.tokens)} entries: give at most {MAX_DETOKENIZE_TOKENS}.")
    vocab_size = context.tokenizer.vocab_size
    invalid = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if invalid is not None:
        raise InvalidRequest(f"tokens has {invalid}: token ids are 0 to {vocab_size - 1}.")
    return msgspec.json.encode(DetokenizeResponse(context.tokenizer.decode(body.tokens, skip_special=False)))


async def send_prepared(call: Call) -> Response:
    """Responds with what `prepare_tokenize` or `prepare_detokenize` made."""
    return Response(call.body, media_type="application/json")
