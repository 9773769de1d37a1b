"""Errors as OpenAI's clients expect them: a status, and `{"error": {message, type, param, code}}`.

Everything that can go wrong with a request becomes an `ApiError` in one place, `api_error`. An unknown exception is our
own bug: the client gets a 500 without details, the log gets the traceback.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice

import msgspec

from paceline.engine.output import Conflict, EngineFailed, UnknownAdapter
from paceline.request import FinishReason, InvalidRequest, PacelineError, Refused

log = logging.getLogger("paceline.server")
_FIELD = re.compile(r"^`?([a-z_]+)[\w\[\].]*`? (?:is|has|must)\b")  # how messages of InvalidRequest begin
_DEFAULT_RETRY_AFTER_S = 1.0
_MAX_SHOWN_NAME = 80
_MAX_SHOWN_ADAPTERS = 8
_MAX_MESSAGE = 1000  # characters; a value that a message quotes may be as long as the body


class ApiError(PacelineError):
    """An error response: its status and body."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = clip(message, _MAX_MESSAGE)
        super().__init__(message)
        self.message, self.status, self.kind, self.code = message, status, kind, code
        self.param = None if param is None else clip(param, _MAX_SHOWN_NAME)
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[object, ...]:  # Exception's own would lose everything but the message
        make = partial(
            ApiError,
            self.message,
            status=self.status,
            kind=self.kind,
            param=self.param,
            code=self.code,
            headers=self.headers,
        )
        return make, ()

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def api_error(error: Exception) -> ApiError:
    """The response to a request that raised `error`. Logs it if it is a bug."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, InvalidRequest):
        field = _FIELD.match(message)
        return ApiError(message, param=field[1] if field else None, code="invalid_value")
    if isinstance(error, Refused):
        return _refused(message, error)
    if isinstance(error, EngineFailed):
        return engine_failed(message)
    if isinstance(error, Conflict):
        return ApiError(message, status=409, code="conflict")
    if isinstance(error, UnknownAdapter):
        return ApiError(message, status=404, param="model", code="model_not_found")
    log.error("request failed", exc_info=error)
    return ApiError(
        "Internal server error: see the server's log.", status=500, kind="server_error", code="internal_error"
    )


def _refused(message: str, error: Refused) -> ApiError:
    if not error.retry:
        return ApiError(message, code="context_length_exceeded")
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="queue_full",
        headers=_retry_after(error.retry_after_s),
    )


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(_DEFAULT_RETRY_AFTER_S if seconds is None else seconds)))}


def engine_failed(message: str) -> ApiError:
    return ApiError(message, status=503, kind="server_error", code="engine_failed", headers=_retry_after(None))


def aborted() -> ApiError:
    return ApiError(
        "The request was aborted, by DELETE /v1/requests or because an administrator paused the engine: retry it.",
        status=409,
        kind="server_error",
        code="aborted",
    )


_TIMED_OUT = {
    FinishReason.DEADLINE: "did not finish before its deadline: raise deadline_ms",
    FinishReason.QUEUE_TIMEOUT: "was not admitted within queue_timeout_ms, or queue_timeout_s of the server: retry it",
    FinishReason.RUNNING_TIMEOUT: "did not finish within running_timeout_ms, or running_timeout_s of the server, after "
    "its admission: ask for less output",
}


def timed_out(reason: FinishReason) -> ApiError | None:
    """The error of a request that ended because of its time; None for other reasons."""
    if reason not in _TIMED_OUT:
        return None
    return ApiError(f"The request {_TIMED_OUT[reason]}.", status=408, code=reason.value)


def shutting_down() -> ApiError:
    return ApiError(
        "The server is shutting down: retry later or on another server.",
        status=503,
        kind="server_error",
        code="shutting_down",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def draining() -> ApiError:
    return ApiError(
        "The server is draining and accepts no new requests: retry later or on another server.",
        status=503,
        kind="server_error",
        code="draining",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def method_not_allowed(method: str, allowed: str) -> ApiError:
    """`allowed` as in the header Allow."""
    return ApiError(
        f"Method {method} not allowed: use {allowed}.",
        status=405,
        code="method_not_allowed",
        headers={"Allow": allowed},
    )


def unknown_route(method: str, path: str) -> ApiError:
    return ApiError(
        f"Unknown route: {method} {clip(path, _MAX_SHOWN_NAME)}. Routes are listed at GET /.",
        status=404,
        code="not_found",
    )


def missing_parameter(name: str, remedy: str = "", *, param: str | None = None) -> ApiError:
    message = f"`{name}` is required: {remedy}." if remedy else f"`{name}` is required."
    return ApiError(message, param=param or name, code="missing_parameter")


def unknown_model(name: str, served: str, adapters: Iterable[str] = ()) -> ApiError:
    others = "".join(f", {clip(one, _MAX_SHOWN_NAME)!r}" for one in islice(adapters, _MAX_SHOWN_ADAPTERS))
    return ApiError(
        f"The model {clip(name, _MAX_SHOWN_NAME)!r} does not exist: use {served!r}{others}.",
        status=404,
        param="model",
        code="model_not_found",
    )
