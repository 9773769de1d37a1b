"""`/v1/requests`: requests in progress. A tenant sees and aborts its own; admins see all."""

from __future__ import annotations

from starlette.responses import Response

from paceline.server.errors import ApiError
from paceline.server.queries import AbortRequests, GetRequests, RequestState
from paceline.server.response_types import RequestDeleted, RequestList, RequestParts
from paceline.server.routing import Call, json_response


async def list_requests(call: Call) -> Response:
    found: list[RequestState] = await call.state.client.query(GetRequests(tenant=call.tenant))
    return json_response(RequestList(found))


async def get_request(call: Call) -> Response:
    request_id = call.path_params["id"]
    found: list[RequestState] = await call.state.client.query(GetRequests(tenant=call.tenant, id=request_id))
    if not found:
        raise _not_found(request_id)
    return json_response(RequestParts(request_id, found))


async def abort_request(call: Call) -> Response:
    request_id = call.path_params["id"]
    if not await call.state.client.query(AbortRequests(id=request_id, tenant=call.tenant)):
        raise _not_found(request_id)
    return json_response(RequestDeleted(request_id))


def _not_found(request_id: str) -> ApiError:
    return ApiError(
        f"Request {request_id!r} not found: it has finished or never existed.", status=404, code="request_not_found"
    )
