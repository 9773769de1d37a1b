"""`/v1/responses`: OpenAI's responses. A request is translated to a chat request, its output to output items."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from paceline.engine.output import OutputDelta
from paceline.server.apis.dialects import named_event
from paceline.server.apis.responses_request import (
    ReasoningConfig,
    ResponsesRequest,
    add_call,
    input_items,
    to_chat,
)
from paceline.server.chat import ChatBuilder, arguments_of
from paceline.server.errors import ApiError
from paceline.server.fields import Json, short
from paceline.server.queries import DeleteResponse, GetResponse, StoreResponse
from paceline.server.response_types import FunctionCall, UsageInfo
from paceline.server.routing import Call, json_response
from paceline.server.state import RequestContext, ServerState
from paceline.text.call_syntax import ArgumentsDelta, Content, ToolCallStart
from paceline.text.output_parser import OutputEvent, Reasoning


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: str
    role: str = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: str
    summary: list[Any] = []


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseObject(msgspec.Struct):
    id: str
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    usage: Json | None
    error: Json | None
    incomplete_details: Json | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig | None
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_p: float
    object: str = "response"
    truncation: str = "disabled"


class TextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    """The event of a token: a struct costs half of what `named_event` does."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[Json] = []


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemsQuery(msgspec.Struct, kw_only=True):
    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[str] | None = None  # there is nothing more


class InputItemList(msgspec.Struct):
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class StoredResponse(msgspec.Struct):
    response: msgspec.Raw
    messages: list[Json]  # the conversation up to and with this response, without instructions
    input: tuple[int, int]  # of them, those that this request had: the first, and the one after the last


class ResponsesResponse(ChatBuilder):
    id_prefix = "resp_"
    prompt_field = "input"

    def __init__(self, context: RequestContext, request: ResponsesRequest) -> None:
        self._given, self._tenant = request, ""
        self._is_stored = self._check_store(context.config.stored_responses > 0)
        self._chat = to_chat(request)
        request.input = ""  # the chat request has it
        self._output: list[OutputItem] = []
        self._is_open = False  # the last item of the output is being streamed
        self._status, self._num_events = "in_progress", 0
        self._final = b""  # the response object, once it is complete
        if request.previous_response_id is None:
            self._start(context, [])

    def _check_store(self, is_on: bool) -> bool:
        """Whether the response is stored. Refuses what needs the store of a server that has none."""
        given = self._given
        for name in ("store", "previous_response_id"):
            if getattr(given, name) and not is_on:
                raise ApiError(
                    f"{name} is {short(getattr(given, name))}, and this server stores no responses (stored_responses "
                    "is 0): omit it, and send the whole conversation as input.",
                    param=name,
                    code="unsupported_value",
                )
        return is_on and given.store is not False

    def _start(self, context: RequestContext, history: list[Json]) -> None:
        instructions = self._given.instructions
        system = [{"role": "system", "content": instructions}] if instructions else []
        self._conversation = [*history, *self._chat.messages]
        self._input = len(history), len(self._conversation)
        self._chat.messages = [*system, *self._conversation]
        super().__init__(context, self._chat)

    def continued(self, stored: bytes, context: RequestContext) -> ResponsesResponse:
        """With the conversation of the response that it continues."""
        self._start(context, _stored_decoder.decode(stored).messages)
        return self

    async def prepare(self, state: ServerState, tenant: str, charge: Callable[[int], None]) -> ResponsesResponse:
        self._tenant = tenant
        previous = self._given.previous_response_id
        if previous is None:
            return self
        # A short body with a long history is a long one.
        stored = await _stored(state, previous, tenant, "previous_response_id")
        charge(len(stored))
        return await state.workers.run(_continued, stored, self, state.context, tenant=tenant)

    async def finish(self, state: ServerState) -> None:
        if self._is_stored:
            config, stored = state.config, StoredResponse(msgspec.Raw(self._final), self._conversation, self._input)
            await state.client.query(
                StoreResponse(
                    self._tenant,
                    self.id,
                    msgspec.json.encode(stored),
                    config.stored_responses,
                    config.stored_response_bytes,
                )
            )

    # ------------------------------------------------------------------ output

    def final_body(self, outputs: Sequence[Sequence[OutputDelta]], usage: UsageInfo) -> bytes:
        parts, reason = self.parts(0, outputs[0])
        self._set_status(reason)
        for part in parts:
            self._output.append(self._call(part.name) if isinstance(part, FunctionCall) else _text_item(part))
            self._extend(part.arguments if isinstance(part, FunctionCall) else part.text)
            self._output[-1].status = "completed"
        return self._complete(usage)

    def first_chunks(self) -> Iterable[bytes]:
        yield self._event("response.created", response=self._object())
        yield self._event("response.in_progress", response=self._object())

    def chunks(self, index: int, output: OutputDelta, finish_reason: str | None) -> Iterable[bytes]:
        events, reason = self.parse(index, [output])
        for event in events:
            yield from self._event_chunks(event)
        if reason is not None:
            self._set_status(reason)

    def last_chunks(self, usage: UsageInfo) -> Iterable[bytes]:
        yield from self._end_item(self._status)
        yield self._event(f"response.{self._status}", response=msgspec.Raw(self._complete(usage)))

    def error_chunk(self, error: ApiError) -> bytes | None:
        self._status = "failed"
        failed = self._object()
        failed.error = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def _event_chunks(self, event: OutputEvent) -> Iterator[bytes]:
        if isinstance(event, ToolCallStart):
            yield from self._begin_item(self._call(event.name))
            return
        if isinstance(event, ArgumentsDelta):
            self._extend(event.arguments)
            yield self._item_event("response.function_call_arguments.delta", delta=event.arguments)
            return
        kind = OutputMessage if isinstance(event, Content) else OutputReasoning
        if not self._is_open or not isinstance(self._output[-1], kind):
            yield from self._begin_item(_text_item(event))
        self._extend(event.text)
        if isinstance(event, Content):
            self._num_events += 1
            number, index = self._num_events - 1, len(self._output) - 1
            yield msgspec.json.encode(TextDelta(number, self._output[index].id, index, event.text))
        else:
            yield self._item_event("response.reasoning_text.delta", content_index=0, delta=event.text)

    def _call(self, name: str) -> OutputCall:
        return OutputCall(f"fc_{uuid.uuid4().hex}", self.make_call_id(), name, "", "in_progress")

    def _begin_item(self, item: OutputItem) -> Iterator[bytes]:
        yield from self._end_item("completed")
        self._output.append(item)
        self._is_open = True
        empty = item if isinstance(item, OutputCall) else msgspec.structs.replace(item, content=[])
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=empty)
        if not isinstance(item, OutputCall):
            yield self._item_event("response.content_part.added", content_index=0, part=item.content[0])

    def _end_item(self, status: str) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        item.status = status
        if isinstance(item, OutputCall):
            yield self._item_event("response.function_call_arguments.done", arguments=item.arguments)
        else:
            part = item.content[0]
            if isinstance(part, OutputText):
                yield self._item_event("response.output_text.done", content_index=0, text=part.text, logprobs=[])
            else:
                yield self._item_event("response.reasoning_text.done", content_index=0, text=part.text)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _extend(self, text: str) -> None:
        item = self._output[-1]
        if isinstance(item, OutputCall):
            item.arguments += text
        else:
            item.content[0].text += text

    def _item_event(self, name: str, **fields: object) -> bytes:
        index = len(self._output) - 1
        return self._event(name, item_id=self._output[index].id, output_index=index, **fields)

    def _event(self, name: str, **fields: object) -> bytes:
        self._num_events += 1
        return named_event(name, sequence_number=self._num_events - 1, **fields)

    def _set_status(self, reason: str) -> None:
        self._status = "incomplete" if reason == "length" else "completed"

    def _complete(self, usage: UsageInfo) -> bytes:
        """Ends the output; returns the response object."""
        if self._output:
            self._output[-1].status = self._status
        response, usage = self._object(), self.with_reasoning(usage)
        response.usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": msgspec.structs.asdict(usage.completion_tokens_details),
            "total_tokens": usage.total_tokens,
        }
        self._add_turn()
        self._final = msgspec.json.encode(response)
        return self._final

    def _add_turn(self) -> None:
        """Adds the output to the conversation that is stored."""
        turn: list[Json] = []
        thoughts = ""
        for item in self._output:
            if isinstance(item, OutputMessage):
                turn.append({"role": "assistant", "content": item.content[0].text})
            elif isinstance(item, OutputReasoning):
                thoughts += item.content[0].text
            else:
                add_call(turn, item.call_id, item.name, arguments_of(FunctionCall(item.name, item.arguments)))
        if thoughts and turn:
            turn[0]["reasoning_content"] = thoughts
        self._conversation += turn

    def _object(self) -> ResponseObject:
        given = self._given
        return ResponseObject(
            id=self.id,
            created_at=self.created,
            status=self._status,
            model=given.model,
            output=self._output,
            usage=None,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            instructions=given.instructions,
            max_output_tokens=given.max_output_tokens,
            metadata=given.metadata or {},
            parallel_tool_calls=given.parallel_tool_calls is not False,
            previous_response_id=given.previous_response_id,
            reasoning=given.reasoning,
            store=self._is_stored,
            temperature=1.0 if given.temperature is None else given.temperature,
            text={"format": (given.text and given.text.format) or {"type": "text"}},
            tool_choice="auto" if given.tool_choice is None else given.tool_choice,
            tools=given.tools or [],
            top_p=1.0 if given.top_p is None else given.top_p,
        )


def _text_item(text: Content | Reasoning) -> OutputMessage | OutputReasoning:
    """An empty item for text of this kind."""
    if isinstance(text, Content):
        return OutputMessage(f"msg_{uuid.uuid4().hex}", [OutputText("")], "in_progress")
    return OutputReasoning(f"rs_{uuid.uuid4().hex}", [ReasoningText("")], "in_progress")


# ---------------------------------------------------------------------- stored responses

_MAX_ITEMS = 100  # of a page
_stored_decoder = msgspec.json.Decoder(StoredResponse)


async def _stored(state: ServerState, response_id: str, tenant: str | None, param: str | None) -> bytes:
    """A stored response, still as JSON: decoding a long one takes long."""
    data: bytes | None = await state.client.query(GetResponse(response_id, tenant))
    if data is None:
        raise _not_found(response_id, param)
    return data


def _continued(stored: bytes, response: ResponsesResponse, context: RequestContext) -> ResponsesResponse:
    return response.continued(stored, context)


def _object_of(stored: bytes) -> bytes:
    return bytes(_stored_decoder.decode(stored).response)


def _not_found(response_id: str, param: str | None) -> ApiError:
    return ApiError(
        f"Response {short(response_id)} not found: it was not stored, was deleted, or was dropped for newer ones.",
        status=404 if param is None else 400,
        param=param,
        code="response_not_found" if param is None else "previous_response_not_found",
    )


async def get_response(call: Call) -> Response:
    stored = await _stored(call.state, call.path_params["id"], call.tenant, None)
    found = await call.state.workers.run(_object_of, stored, tenant=call.tenant)
    return Response(found, media_type="application/json")


async def list_input_items(call: Call) -> Response:
    query, response_id = call.query, call.path_params["id"]
    assert isinstance(query, InputItemsQuery), "the route's query type"
    if not 1 <= query.limit <= _MAX_ITEMS:
        raise ApiError(f"limit is {query.limit}: give 1 to {_MAX_ITEMS}.", param="limit", code="invalid_value")
    stored = await _stored(call.state, response_id, call.tenant, None)
    return json_response(await call.state.workers.run(_page_of_items, stored, query, response_id, tenant=call.tenant))


def _page_of_items(stored: bytes, query: InputItemsQuery, response_id: str) -> InputItemList:
    found = _stored_decoder.decode(stored)
    items = list(input_items(found.messages[slice(*found.input)], response_id.removeprefix("resp_")))
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise ApiError(
                f"after is {short(query.after)}, which is no item of this input: give the last id of a page.",
                param="after",
                code="invalid_value",
            )
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList(page, first, last, len(items) > len(page))


async def delete_response(call: Call) -> Response:
    response_id = call.path_params["id"]
    if not await call.state.client.query(DeleteResponse(response_id, call.tenant)):
        raise _not_found(response_id, None)
    return json_response(ResponseDeleted(response_id))
