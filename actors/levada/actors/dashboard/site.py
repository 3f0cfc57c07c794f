"""The dashboard's answers to HTTP requests, without I/O: files, the login, and the decision about WebSockets.

A request must name a known host, so a foreign name that points to this address (DNS rebinding) gets nothing.  Requests with an effect
must come from a page of the same origin.  Pages load only their own files, and have no inline scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from importlib import resources
from typing import Final

import attrs

from .login import LASTING, Login

__all__ = ["LOGIN_BODY", "SOCKET", "Site", "SiteRequest", "SiteResponse"]

SOCKET: Final = "/socket"
LOGIN_BODY: Final = 4096
"""The most bytes of a request's body."""

_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_ALWAYS: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
)


@attrs.frozen
class SiteRequest:
    """One request."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = attrs.field(repr=False)
    """Names in lower case."""
    body: bytes = attrs.field(default=b"", repr=False)

    def header(self, name: str) -> str:
        """Return the value of a header; empty if there is none, or more than one."""
        values = [value for each, value in self.headers if each == name]
        return values[0] if len(values) == 1 else ""

    def cookie(self, name: str) -> str:
        """Return the value of a cookie; empty if there is none."""
        for part in self.header("cookie").split(";"):
            each, _, value = part.strip().partition("=")
            if each == name:
                return value
        return ""


@attrs.frozen
class SiteResponse:
    """The answer to one request."""

    status: int
    body: bytes = attrs.field(default=b"", repr=False)
    kind: str = "text/plain"
    headers: tuple[tuple[str, str], ...] = attrs.field(default=(), repr=False)

    def fields(self) -> list[tuple[str, str]]:
        """Return all headers."""
        kind = (("Content-Type", f"{self.kind}; charset=utf-8"),) if self.body else ()
        return [*_ALWAYS, *kind, *self.headers, ("Content-Length", str(len(self.body)))]


class Site:
    """Answers requests.

    Args:
        login: checks tokens and cookies.
        hosts: the accepted ``Host`` headers, in lower case.
        secure: whether browsers use HTTPS.
        cookie: name of the cookie. Browsers send cookies to all ports of a host, so each dashboard needs its own name.
    """

    def __init__(self, login: Login, *, hosts: frozenset[str], secure: bool, cookie: str) -> None:
        self._login = login
        self._hosts = hosts
        self._scheme = "https" if secure else "http"
        self._attributes = "; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")
        self._cookie = f"__Host-{cookie}" if secure else cookie
        self._files = _files()

    def answer(self, request: SiteRequest) -> SiteResponse | None:
        """Return the answer to a request, or ``None`` if the request may open a WebSocket."""
        host = request.header("host").lower()
        if host not in self._hosts:
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the dashboard has no such name: add it to DashboardConfig.names (levada top --name)",
            )
        path = request.target.partition("?")[0]
        if path == SOCKET:
            return self._socket(request, host)
        if path == "/login":
            return self._log_in(request, host)
        file = self._files.get(path)
        if file is None:
            return _refusal(HTTPStatus.NOT_FOUND, "there is no such page")
        if request.method not in ("GET", "HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "only GET", ("Allow", "GET, HEAD"))
        return SiteResponse(HTTPStatus.OK, file[0], file[1])

    def _is_own(self, request: SiteRequest, host: str) -> bool:
        return request.header("origin").lower() == f"{self._scheme}://{host}"

    def _socket(self, request: SiteRequest, host: str) -> SiteResponse | None:
        if not self._is_own(request, host):
            return _refusal(HTTPStatus.FORBIDDEN, "only pages of this dashboard may connect")
        if not self._login.admits(request.cookie(self._cookie)):
            return _refusal(HTTPStatus.UNAUTHORIZED, "not logged in")
        return None

    def _log_in(self, request: SiteRequest, host: str) -> SiteResponse:
        if request.method == "GET":
            # Tells whether this browser is logged in: about a WebSocket a script learns only that it failed.
            right = self._login.admits(request.cookie(self._cookie))
            return SiteResponse(HTTPStatus.NO_CONTENT) if right else _refusal(HTTPStatus.UNAUTHORIZED, "not logged in")
        if request.method != "POST":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "only POST", ("Allow", "GET, POST"))
        if not self._is_own(request, host):
            return _refusal(HTTPStatus.FORBIDDEN, "only pages of this dashboard may log in")
        try:
            members = json.loads(request.body)
        except (ValueError, RecursionError):
            members = None
        token = members.get("token") if isinstance(members, dict) else None
        if not isinstance(token, str) or not token.isascii() or not self._login.redeem(token):
            return _refusal(
                HTTPStatus.UNAUTHORIZED,
                "this link was used before, or belongs to another run of the program: get a new one",
            )
        cookie = f"{self._cookie}={self._login.cookie()}; Max-Age={LASTING}{self._attributes}"
        return SiteResponse(HTTPStatus.NO_CONTENT, headers=(("Set-Cookie", cookie),))


def _refusal(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> SiteResponse:
    return SiteResponse(status, f"{text}\n".encode(), headers=headers)


def _files() -> Mapping[str, tuple[bytes, str]]:
    found: dict[str, tuple[bytes, str]] = {}
    for file in (resources.files("levada.actors.dashboard") / "assets").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found["/" if file.name == "index.html" else f"/{file.name}"] = file.read_bytes(), kind
    return found
