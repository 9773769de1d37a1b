"""Errors as OpenAI's clients expect them: a status, and `{"error": {message, type, param, code}}`.

Everything that can go wrong with a request becomes an `ApiError` in one place, `api_error`; whatever it does not know
is our own bug and answered with 500, without telling the client more than that.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec

from paceline.engine.output import EngineFailed
from paceline.request import InvalidRequest, PacelineError, Refused

log = logging.getLogger("paceline.server")
_NAMED = re.compile(r"^([a-z_]+)[\w\[\].]* (?:is|has)\b")  # how our messages begin: the field, then what it is
_RETRY_AFTER_S = 1.0  # where nobody can tell how long it will take


class ApiError(PacelineError):
    """What a client is told, and with which status."""

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
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def api_error(error: Exception) -> ApiError:
    """The answer to a request that ended in `error`."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, InvalidRequest):
        named = _NAMED.match(message)
        return ApiError(message, param=named[1] if named else None, code="invalid_value")
    if isinstance(error, Refused) and error.retry:
        return ApiError(message, status=429, kind="rate_limit_error", code="queue_full",
                        headers=_retry_after(error.retry_after_s))  # fmt: skip
    if isinstance(error, Refused):
        return ApiError(message, code="context_length_exceeded")
    if isinstance(error, EngineFailed):
        return engine_failed(message)
    return ApiError("the server made a mistake: its log says more.", status=500, kind="server_error",
                    code="internal_error")  # fmt: skip


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(_RETRY_AFTER_S if seconds is None else seconds)))}


def engine_failed(message: str) -> ApiError:
    return ApiError(message, status=503, kind="server_error", code="engine_failed", headers=_retry_after(None))


def aborted() -> ApiError:
    return ApiError("the request was aborted: somebody deleted it.", status=409, kind="server_error", code="aborted")


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down: send the request again, to another one or later.",
        status=503, kind="server_error", code="shutting_down", headers={"Retry-After": "1", "Connection": "close"},
    )  # fmt: skip


def answer_to(error: Exception) -> ApiError:
    """As `api_error`, and the log says more of what is our own mistake."""
    known = api_error(error)
    if known.status == 500:
        log.error("a request failed", exc_info=error)
    return known


def wrong_method(method: str, allowed: str) -> ApiError:
    return ApiError(f"method is {method}: use {allowed}.", status=405, code="method_not_allowed",
                    headers={"Allow": allowed})  # fmt: skip


def unknown_model(name: str, served: str) -> ApiError:
    name = name if len(name) <= 80 else f"{name[:77]}..."
    return ApiError(
        f"model is {name!r}, which is not served here: use {served!r}.",
        status=404, param="model", code="model_not_found",
    )  # fmt: skip
