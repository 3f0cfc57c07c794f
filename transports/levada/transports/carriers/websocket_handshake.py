"""The HTTP exchange that opens a WebSocket (RFC 6455, section 4), without I/O.

wsproto builds and checks the messages. This module does the rest: it finds the end of a head, limits its size, decides which clients may
connect (by path, origin and the application's own check), and makes the HTTP answer for all others.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable
from http import HTTPStatus

from wsproto.connection import ConnectionType
from wsproto.events import AcceptConnection, RejectConnection, Request
from wsproto.handshake import H11Handshake
from wsproto.utilities import RemoteProtocolError as WsprotoError
from wsproto.utilities import generate_accept_token

from levada.framework.failure_log import FailureLog
from levada.transports.carriers.addresses import may_name
from levada.transports.carriers.websocket_config import Refusal, UpgradeRequest, WebSocketConfig

__all__ = ["ClientHandshake", "HandshakeRefused", "Head", "answer", "is_interim", "refusal_bytes"]

logger = logging.getLogger("levada.transports.websocket")

_END = b"\r\n\r\n"
_INTERIM = re.compile(rb"HTTP/1\.1 1(?!01)[0-9][0-9]\b")
_REQUEST_LINE = re.compile(rb"([A-Z]+) \S+ HTTP/1\.([0-9])\r\n")
_KEY = re.compile(rb"\r\nSec-WebSocket-Key: (\S+)\r\n", re.IGNORECASE)
_ORIGIN = re.compile(r"(https?)://([^/?#@]+)", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class HandshakeRefused(Exception):
    """The peer gets no WebSocket. On a server, `refusal` is the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


class Head:
    """Collects the head of an HTTP message, of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._data = bytearray()
        self._limit = limit

    def receive_data(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Take bytes; once the head is complete, return it with its empty line, and the bytes after it.

        Raises:
            HandshakeRefused: the head is too large, or is not HTTP.
        """
        searched = max(0, len(self._data) - len(_END) + 1)
        self._data += data
        end = self._data.find(_END, searched) + len(_END)
        if self._data[:1] < b"!":  # a TLS hello on a plain port, say
            raise HandshakeRefused(Refusal(400, "this is not HTTP"))
        if (end if end >= len(_END) else len(self._data)) > self._limit:
            raise HandshakeRefused(Refusal(431, f"head of more than {self._limit} bytes"))
        if end < len(_END):
            return None
        return bytes(self._data[:end]), bytes(self._data[end:])


def is_interim(head: bytes) -> bool:
    """Whether another answer follows this one, as after 100 (Continue) and 103 (Early Hints). Source: RFC 9110, section 15.2."""
    return _INTERIM.match(head) is not None


def answer(
    head: bytes, rest: bytes, config: WebSocketConfig, path: str | None, failures: FailureLog, *, at: str = ""
) -> tuple[UpgradeRequest, str | None, bytes]:
    """Check a request for a WebSocket, and make the answer.

    Args:
        head: the request.
        rest: bytes after it.
        config: subprotocols, headers, origins and the application's own check.
        path: the only path to serve; ``None`` for any.
        failures: gets the exceptions of `WebSocketConfig.allow`.
        at: the address at which the client has reached this server, if it is one of IP.

    Returns:
        The request, the chosen subprotocol, and the bytes of the 101 answer.

    Raises:
        HandshakeRefused: the client gets no WebSocket; `HandshakeRefused.refusal` is the HTTP answer.
    """
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise HandshakeRefused(Refusal(400, "this is not an HTTP/1.1 request"))
    if line[1] != b"GET":
        raise HandshakeRefused(Refusal(405, "a WebSocket begins with GET", (("Allow", "GET"),)))
    if line[2] == b"0":
        raise HandshakeRefused(Refusal(505, "a WebSocket begins with HTTP/1.1"))
    if b"\r\nupgrade:" not in head.lower():
        raise HandshakeRefused(Refusal(426, "only WebSockets are served here", (("Upgrade", "websocket"),)))
    # Programs differ on whether that ends a line, and so on where the head ends.
    if b"\n" in head.replace(b"\r\n", b""):
        raise HandshakeRefused(Refusal(400, "a line ends without a carriage return"))
    if rest:
        # RFC 6455, 4.1: a client waits for the answer. More bytes are a body, or frames that a proxy may take for another request.
        raise HandshakeRefused(Refusal(400, "bytes after the request"))
    server = H11Handshake(ConnectionType.SERVER)
    request, headers = _parse(server, head)
    keys = [value for name, value in headers if name == "sec-websocket-key"]
    try:
        nonce = base64.b64decode(keys[0].strip(), validate=True)
    except ValueError:
        nonce = b""
    if len(keys) != 1 or len(nonce) != 16:
        raise HandshakeRefused(Refusal(400, "one Sec-WebSocket-Key of 16 bytes is needed"))
    if any(name == "transfer-encoding" or (name == "content-length" and value != "0") for name, value in headers):
        raise HandshakeRefused(Refusal(400, "a request for a WebSocket has no body"))
    origin = next((value for name, value in headers if name == "origin"), None)
    offered = tuple(request.subprotocols)
    asked = UpgradeRequest(
        target=request.target, host=request.host, origin=origin, subprotocols=offered, headers=tuple(headers)
    )
    if not may_name(asked.host, at, config.hosts):
        raise HandshakeRefused(
            Refusal(421, "a server that is reached at a loopback address needs this name in WebSocketConfig.hosts")
        )
    _admit(asked, config, path, failures)
    subprotocol = next((name for name in config.subprotocols if name in offered), None)
    response = server.send(AcceptConnection(subprotocol=subprotocol, extra_headers=_encoded(config.headers)))
    return asked, subprotocol, response


def _parse(server: H11Handshake, head: bytes) -> tuple[Request, list[tuple[str, str]]]:
    try:
        server.receive_data(head)
        (request,) = server.events()
    except WsprotoError as error:
        hint = error.event_hint
        if isinstance(hint, RejectConnection) and hint.status_code == 426:
            raise HandshakeRefused(Refusal(426, str(error), (("Sec-WebSocket-Version", "13"),))) from error
        raise HandshakeRefused(Refusal(400, str(error))) from error
    except UnicodeError as error:  # wsproto lets through a Host that is no domain name, and lists that are not ASCII
        raise HandshakeRefused(Refusal(400, "a header is not ASCII")) from error
    assert isinstance(request, Request)
    return request, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.extra_headers]


def _admit(asked: UpgradeRequest, config: WebSocketConfig, path: str | None, failures: FailureLog) -> None:
    if path is not None and asked.path != path:
        raise HandshakeRefused(Refusal(404, "no WebSocket at this path"))
    if asked.origin is not None and "*" not in config.origins and asked.origin not in config.origins:
        page = _ORIGIN.fullmatch(asked.origin)  # no match for "null", which sandboxed pages send
        default = _DEFAULT_PORTS[page[1].lower()] if page else ""
        if page is None or page[2].lower().removesuffix(default) != asked.host.lower().removesuffix(default):
            raise HandshakeRefused(Refusal(403, "pages of this origin may not connect"))
    if config.allow is None:
        return
    try:
        refusal = config.allow(asked)
    except Exception as error:  # an error of the application's check must not end the listener
        text = "the check of an upgrade request failed"
        failures.log(logger, error, text, protocol="websocket", event="refused")
        raise HandshakeRefused(Refusal(500, "the request could not be checked")) from error
    if refusal is not None:
        raise HandshakeRefused(refusal)


def refusal_bytes(refusal: Refusal) -> bytes:
    """Return the whole HTTP answer, after which the connection closes."""
    body = f"{refusal.detail}\n".encode() if refusal.detail else b""
    try:
        phrase = HTTPStatus(refusal.status).phrase
    except ValueError:
        phrase = "Refused"
    fields = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in (*fields, *refusal.headers))
    return f"HTTP/1.1 {refusal.status} {phrase}\r\n{lines}\r\n".encode("latin-1") + body


class ClientHandshake:
    """The client's request, and the check of the server's answer.

    Args:
        host: value of the ``Host`` header, with the port unless it is the scheme's default.
        target: path and query.
        subprotocols: to offer.
        headers: further headers.
        random: returns the given number of unpredictable bytes, for the key (RFC 6455, 4.1).
    """

    def __init__(
        self,
        host: str,
        target: str,
        subprotocols: tuple[str, ...],
        headers: tuple[tuple[str, str], ...],
        *,
        random: Callable[[int], bytes],
    ) -> None:
        self._handshake = H11Handshake(ConnectionType.CLIENT)
        request = Request(host, target, subprotocols=list(subprotocols), extra_headers=_encoded(headers))
        made = self._handshake.send(request)
        # wsproto draws a key of its own. The server gets another one, and wsproto the answer to its own.
        found = _KEY.search(made)
        assert found is not None
        key = base64.b64encode(random(16))
        self._answers = generate_accept_token(key), generate_accept_token(found[1])
        self.request = made[: found.start(1)] + key + made[found.end(1) :]
        """The bytes of the request."""

    def receive_head(self, head: bytes) -> str | None:
        """Check the server's answer, and return the subprotocol that it chose.

        Raises:
            HandshakeRefused: the server refused (with its status), or its answer is malformed (with status 502).
        """
        try:
            self._handshake.receive_data(head.replace(*self._answers, 1))
            event = next(self._handshake.events())
        except (WsprotoError, UnicodeError, StopIteration) as error:
            raise HandshakeRefused(
                Refusal(502, f"the server's answer is not a WebSocket handshake: {error}")
            ) from error
        if isinstance(event, AcceptConnection):
            return event.subprotocol
        assert isinstance(event, RejectConnection)
        location = next((value for name, value in event.headers if name.lower() == b"location"), b"").decode("latin-1")
        detail = f"the server answered {event.status_code}" + (f", location {location}" if location else "")
        raise HandshakeRefused(Refusal(event.status_code if 400 <= event.status_code < 600 else 502, detail))


def _encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
