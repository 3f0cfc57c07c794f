"""Settings of WebSockets, and the request and refusal of a server's own check."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.framework.text import texts
from levada.transports.carriers import tcp, tls

__all__ = ["Refusal", "UpgradeRequest", "WebSocketConfig"]

_ABSOLUTE = re.compile(r"https?://[^/?]*", re.IGNORECASE)
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD_VALUE = re.compile(r"[\x21-\x7e\x80-\xff]([\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")
_OWN_HEADERS = frozenset({"host", "connection", "upgrade", "content-length", "transfer-encoding"})


Headers = tuple[tuple[str, str], ...]

_STRINGS = v.deep_iterable(v.instance_of(str), v.instance_of(tuple))


def _check_tokens(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for name in value:
        if not _TOKEN.fullmatch(name):
            raise ConfigurationError(f"{attribute.name}: {name!r} is not a token of HTTP")


def _check_fields(_: object, __: attrs.Attribute[Headers], value: Headers) -> None:
    for name, content in value:
        if not _TOKEN.fullmatch(name) or not _FIELD_VALUE.fullmatch(content):
            raise ConfigurationError(f"headers: {name!r} and {content!r} are not the name and value of an HTTP header")


def _check_own(_: object, __: attrs.Attribute[Headers], value: Headers) -> None:
    for name, _content in value:
        if name.lower() in _OWN_HEADERS or name.lower().startswith("sec-websocket-"):
            raise ConfigurationError(f"headers: {name} is set by the handshake itself")


def _check_seconds(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigurationError(f"{attribute.name} is {value!r}, wanted more than 0 seconds or None")


@attrs.frozen(kw_only=True)
class UpgradeRequest:
    """A client's request for a WebSocket."""

    target: str
    """Path and query, as received."""
    host: str
    """The ``Host`` header: the name under which the client knows this server."""
    origin: str | None
    """The ``Origin`` header: the origin of the web page that connects. Clients other than browsers usually send none."""
    subprotocols: tuple[str, ...]
    """The subprotocols that the client offers, in its order of preference."""
    headers: Headers = attrs.field(repr=False)
    """The other headers, names in lower case."""

    @property
    def path(self) -> str:
        """The target without its query, and without the authority that proxies put before it."""
        return _ABSOLUTE.sub("", self.target).partition("?")[0] or "/"


@attrs.frozen
class Refusal:
    """An HTTP answer instead of a WebSocket."""

    status: int = attrs.field(default=403, validator=v.in_(range(400, 600)))
    """HTTP status code, 400 to 599."""
    detail: str = ""
    """The body of the answer: one line of text for the client."""
    headers: Headers = attrs.field(default=(), validator=[v.instance_of(tuple), _check_fields])
    """Further headers, for example ``("WWW-Authenticate", "Bearer")``."""


@attrs.frozen(kw_only=True)
class WebSocketConfig:
    """Settings of WebSockets, for either side. Immutable; derive with `attrs.evolve`."""

    max_message: int = attrs.field(default=1 << 24, validator=[v.instance_of(int), v.ge(125), v.lt(1 << 63)])
    """Bytes of the largest message to accept, with all its fragments. A larger message ends the connection with code 1009."""
    accept_text: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Whether text messages are accepted, as their UTF-8 bytes. If not, a text message ends the connection with code 1003."""
    leave_faults: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Whether closing is left to the application when the peer breaks a rule, since its protocol may have its own way to end: `receive` raises
    `ConnectionLost` at once, and messages can be sent until `aclose`."""
    subprotocols: tuple[str, ...] = attrs.field(default=(), validator=[_STRINGS, _check_tokens])
    """Subprotocols that a client offers, or that a server can choose: the first of its own that the client offered."""
    headers: Headers = attrs.field(default=(), validator=[v.instance_of(tuple), _check_fields, _check_own], repr=False)
    """Further headers of the request, or of the 101 response."""
    origins: tuple[str, ...] = attrs.field(default=(), validator=_STRINGS)
    """Server: origins (``"https://app.example"``) whose pages may connect, besides the host's own; ``"*"`` for any. Clients that send no
    ``Origin``, which are most clients except browsers, are not affected."""
    hosts: tuple[str, ...] = attrs.field(default=(), converter=texts, validator=_STRINGS)
    """Server: domain names (``"app.example"``) under which clients may reach it at a loopback address, besides ``localhost``; ``"*"`` for any.
    Otherwise a web page could give its own domain name the address of this machine, and read what is served here (DNS rebinding)."""
    allow: Callable[[UpgradeRequest], Refusal | None] | None = None
    """Server: called with each valid request. It returns a `Refusal`, or ``None`` to admit the client."""
    max_handshake: int = attrs.field(default=16_384, validator=[v.instance_of(int), v.ge(1024)])
    """Bytes of the largest HTTP head accepted."""
    handshake_timeout: float = attrs.field(default=10.0, validator=v.gt(0.0))
    """Seconds for the HTTP exchange."""
    backlog: int = attrs.field(default=256, validator=[v.instance_of(int), v.ge(1)])
    """Server: most peers that are in their handshake or wait for `accept`. Any further peer ends the handshake of another."""
    keepalive_interval: float | None = attrs.field(default=20.0, validator=_check_seconds)
    """Seconds of silence, while a task waits in `receive`, after which a ping is sent; ``None`` for never."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=v.gt(0.0))
    """Seconds after such a ping within which the peer must send something."""
    close_timeout: float = attrs.field(default=5.0, validator=v.gt(0.0))
    """Seconds to send the queue and to complete the close handshake."""
    tcp: tcp.TcpConfig = attrs.field(factory=tcp.TcpConfig, validator=v.instance_of(tcp.TcpConfig))
    """Settings of TCP, below ``ws``."""
    tls: tls.TlsConfig = attrs.field(factory=tls.TlsConfig, validator=v.instance_of(tls.TlsConfig))
    """Settings of TLS, below ``wss``."""
