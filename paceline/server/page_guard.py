"""Protects a server without API keys on a loopback address from the web pages that its user has open.

A browser sends the requests of any page to 127.0.0.1. The page can also read the responses if its own name was made to
resolve to 127.0.0.1 (DNS rebinding): that name is in `Host`. Other pages are recognized by `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from paceline.config import ServerConfig
from paceline.server.errors import ApiError
from paceline.server.fields import short
from paceline.server.http import Scope
from paceline.server.routing import AnyRoute

_AUTHORITY = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")
# Names that nobody can register, so no page can have them. Containers reach their host as host.docker.internal.
_LOCAL_NAME = re.compile(r"(.+\.)?(localhost|internal)")
_PAGE = re.compile(r"https?://(.*)|null")  # other origins are apps and browser extensions, such as vscode-webview://
_JSON_TYPE = re.compile(r"application/(.+\+)?json")


class PageGuard:
    def __init__(self, config: ServerConfig, routes: Sequence[AnyRoute]) -> None:
        self._names, self._own_name = frozenset(config.allowed_host_names), config.host.lower()
        self._origins = frozenset(config.allowed_origins)
        self._json_paths = frozenset(route.path for route in routes if route.request is not None)

    def check(self, scope: Scope) -> None:
        """Raises ApiError unless the request can only come from a program, or from a page that may call the server."""
        headers = dict(scope["headers"])
        host, origin = _text(headers, b"host"), _text(headers, b"origin")
        if host is not None and not self._is_known(host):  # it is optional in HTTP/1.0, which no browser speaks
            raise _refused("Host", host, "host_not_allowed", "allowed_hosts")
        if origin is not None and not self._is_allowed(origin, host):
            raise _refused("Origin", origin, "origin_not_allowed", "cors_origins")
        if (origin is not None or b"sec-fetch-site" in headers) and scope["path"] in self._json_paths:
            _check_content_type(headers)

    def _is_known(self, host: str) -> bool:
        name = _name(host)
        if name in self._names or name == self._own_name or _LOCAL_NAME.fullmatch(name):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))  # an address is not resolved, so it cannot be rebound
        except ValueError:
            return False
        return True

    def _is_allowed(self, origin: str, host: str | None) -> bool:
        page = _PAGE.fullmatch(origin)
        if page is None or origin in self._origins or "*" in self._origins:
            return True
        return page[1] is not None and (page[1] == host or _name(page[1]) in self._names)


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1").strip().lower()


def _name(authority: str) -> str:
    """The host of `host:port`, without the dot that may end a name."""
    match = _AUTHORITY.fullmatch(authority)
    return match[1].removesuffix(".") if match else ""


def _check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """A browser sends JSON for a page of another origin only if the server allows it, other types without asking.
    Programs need no type: `curl -d` sends that of a form."""
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    kind = (_text(headers, b"content-type") or "").partition(";")[0].strip()
    if has_body and not _JSON_TYPE.fullmatch(kind):
        raise ApiError(
            f"Content-Type is {short(kind)}: a browser must send application/json.",
            status=415,
            code="unsupported_content_type",
        )


def _refused(header: str, value: str, code: str, option: str) -> ApiError:
    return ApiError(
        f"{header} is {short(value)}, which may not call this server: start it with API keys, or allow it by {option}.",
        status=403,
        kind="permission_error",
        code=code,
    )
