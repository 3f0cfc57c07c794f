"""The HTTP exchange that opens a WebSocket (RFC 6455, section 4), without I/O.

wsproto builds and checks the messages; here is what it leaves to its user: where a head ends, how large it may be, who may come in
(path, origin, the user's own check), and an HTTP answer for everybody who may not.
"""

from __future__ import annotations

import base64
import logging
import re
from http import HTTPStatus

from wsproto.connection import ConnectionType
from wsproto.events import AcceptConnection, RejectConnection, Request
from wsproto.handshake import H11Handshake
from wsproto.utilities import RemoteProtocolError as WsprotoError

from levada.transports.carriers.websocket_config import Refusal, UpgradeRequest, WebSocketConfig

__all__ = ["ClientHandshake", "HandshakeRefused", "Head", "answer", "refusal_bytes"]

logger = logging.getLogger("levada.transports.websocket")

_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]+) \S+ HTTP/1\.([0-9])\r\n")
_ORIGIN = re.compile(r"(https?)://([^/?#@]+)", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class HandshakeRefused(Exception):
    """This peer gets no WebSocket; on a server the refusal is what to answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


class Head:
    """Collects a message head of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._octets = bytearray()
        self._limit = limit

    def receive_data(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Take bytes; return the head with its empty line, and what came after it, once it is complete.

        Raises:
            HandshakeRefused: it is too large, or cannot be HTTP.
        """
        searched = max(0, len(self._octets) - len(_END) + 1)
        self._octets += data
        end = self._octets.find(_END, searched) + len(_END)
        if self._octets[:1] < b"!":  # a TLS hello on a plain port, say
            raise HandshakeRefused(Refusal(400, "this is not HTTP"))
        if (end if end >= len(_END) else len(self._octets)) > self._limit:
            raise HandshakeRefused(Refusal(431, f"head of more than {self._limit} bytes"))
        if end < len(_END):
            return None
        return bytes(self._octets[:end]), bytes(self._octets[end:])


def answer(
    head: bytes, rest: bytes, config: WebSocketConfig, path: str | None
) -> tuple[UpgradeRequest, str | None, bytes]:
    """Judge a request for a WebSocket.

    Args:
        head: the request.
        rest: what came after it.
        path: the only path to serve; ``None``: any.

    Returns:
        The request, the subprotocol that was agreed on, and the bytes of the 101 answer.

    Raises:
        HandshakeRefused: with the HTTP answer to give.
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
    if b"\n" in head.replace(b"\r\n", b""):  # some read an empty line, and so an end, where others do not
        raise HandshakeRefused(Refusal(400, "a line ends without a carriage return"))
    if rest:
        # RFC 6455, 4.1: a client waits for the answer. What follows the head is a body, or frames that a proxy has not seen as such.
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
    _admit(asked, config, path)
    subprotocol = next((name for name in config.subprotocols if name in offered), None)
    octets = server.send(AcceptConnection(subprotocol=subprotocol, extra_headers=_encoded(config.headers)))
    return asked, subprotocol, octets


def _parse(server: H11Handshake, head: bytes) -> tuple[Request, list[tuple[str, str]]]:
    try:
        server.receive_data(head)
        (request,) = server.events()
    except WsprotoError as error:
        hint = error.event_hint
        if isinstance(hint, RejectConnection) and hint.status_code == 426:
            raise HandshakeRefused(Refusal(426, str(error), (("Sec-WebSocket-Version", "13"),))) from error
        raise HandshakeRefused(Refusal(400, str(error))) from error
    except UnicodeError as error:  # a Host that is no domain name, lists that are not ASCII: wsproto lets these through
        raise HandshakeRefused(Refusal(400, "a header is not ASCII")) from error
    assert isinstance(request, Request)
    return request, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.extra_headers]


def _admit(asked: UpgradeRequest, config: WebSocketConfig, path: str | None) -> None:
    if path is not None and asked.path != path:
        raise HandshakeRefused(Refusal(404, "no WebSocket at this path"))
    if asked.origin is not None and "*" not in config.origins and asked.origin not in config.origins:
        page = _ORIGIN.fullmatch(asked.origin)  # not so "null", which sandboxed pages send
        default = _DEFAULT_PORTS[page[1].lower()] if page else ""
        if page is None or page[2].lower().removesuffix(default) != asked.host.lower().removesuffix(default):
            raise HandshakeRefused(Refusal(403, "pages of this origin may not connect"))
    if config.allow is None:
        return
    try:
        refusal = config.allow(asked)
    except Exception as error:  # a request that the user's check stumbles over must not end the listener
        logger.exception("the check of an upgrade request failed", extra={"protocol": "websocket", "event": "refused"})
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
    """The client's request, and what the server says to it.

    Args:
        host: value of the ``Host`` header, with the port unless it is the scheme's own.
        target: path and query.
    """

    def __init__(
        self, host: str, target: str, subprotocols: tuple[str, ...], headers: tuple[tuple[str, str], ...]
    ) -> None:
        self._handshake = H11Handshake(ConnectionType.CLIENT)
        request = Request(host, target, subprotocols=list(subprotocols), extra_headers=_encoded(headers))
        self.request = self._handshake.send(request)
        """Bytes to send."""

    def receive_head(self, head: bytes) -> str | None:
        """Judge the server's answer and return the subprotocol that it chose.

        Raises:
            HandshakeRefused: no WebSocket; the status is the server's, or 502 if its answer makes no sense.
        """
        try:
            self._handshake.receive_data(head)
            event = next(self._handshake.events())
        except (WsprotoError, UnicodeError, StopIteration) as error:
            raise HandshakeRefused(Refusal(502, f"the server's answer is no WebSocket handshake: {error}")) from error
        if isinstance(event, AcceptConnection):
            return event.subprotocol
        assert isinstance(event, RejectConnection)
        location = next((value for name, value in event.headers if name.lower() == b"location"), b"").decode("latin-1")
        detail = f"the server answered {event.status_code}" + (f", location {location}" if location else "")
        raise HandshakeRefused(Refusal(event.status_code if 400 <= event.status_code < 600 else 502, detail))


def _encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
