"""`/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from paceline.request import InvalidRequest
from paceline.server.errors import ApiError
from paceline.server.fields import check_messages
from paceline.server.request_types import DetokenizeRequest, TokenizeRequest
from paceline.server.response_types import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse
from paceline.server.routing import Call, json_response
from paceline.server.state import ServerState


def _model_card(state: ServerState) -> ModelCard:
    return ModelCard(state.model_name, state.created, state.client.model.max_tokens)


async def list_models(call: Call) -> Response:
    return json_response(ModelList([_model_card(call.state)]))


async def get_model(call: Call) -> Response:
    call.state.check_model(call.path_params["name"])
    return json_response(_model_card(call.state))


async def tokenize(call: Call) -> Response:
    state, body = call.state, call.body
    assert isinstance(body, TokenizeRequest), "the route's request type"
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("Exactly one of `prompt` and `messages` is required.", param="prompt")

    def encode() -> list[int]:
        if body.messages is not None:
            return state.tokenizer.encode_chat(check_messages(body.messages))
        return state.tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens)

    tokens = await asyncio.to_thread(encode)
    return json_response(TokenizeResponse(len(tokens), state.client.model.max_tokens, tokens))


async def detokenize(call: Call) -> Response:
    state, body = call.state, call.body
    assert isinstance(body, DetokenizeRequest), "the route's request type"
    state.check_model(body.model)
    vocab_size = state.tokenizer.vocab_size
    invalid = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if invalid is not None:
        raise InvalidRequest(f"tokens has {invalid}: token ids are 0 to {vocab_size - 1}.")
    text = await asyncio.to_thread(state.tokenizer.decode, body.tokens, skip_special=False)
    return json_response(DetokenizeResponse(text))
