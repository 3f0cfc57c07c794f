"""WebSocket carrier (RFC 6455): `dial` and `listen`, and the opening handshake over any byte stream.

The stream itself is in `websocket_stream`, its frames in `websocket_frames`, the HTTP exchange in `websocket_handshake`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import SplitResult, urlsplit

import trio

from levada.framework.errors import ConfigurationError, ConnectionLost, IdleTimeout
from levada.framework.failure_log import FailureLog
from levada.framework.platform import PLATFORM
from levada.transports.carriers import tcp, tls
from levada.transports.carriers.contracts import ByteStream, CarrierInfo, Listener
from levada.transports.carriers.listeners import UpgradingListener
from levada.transports.carriers.places import share_of
from levada.transports.carriers.websocket_config import Refusal, UpgradeRequest, WebSocketConfig
from levada.transports.carriers.websocket_handshake import (
    ClientHandshake,
    HandshakeRefused,
    Head,
    answer,
    is_interim,
    refusal_bytes,
)
from levada.transports.carriers.websocket_stream import WebSocketStream

__all__ = [
    "Refusal", "UpgradeRequest", "WebSocketConfig", "WebSocketListener", "WebSocketStream", "accept_over", "dial", "listen", "listen_over",
    "open_over",
]  # fmt: skip

_AUTHORITY = re.compile(rb"[0-9A-Za-z.:%_\[\]-]+")
_REFUSED_LINGER = 1.0  # seconds for a refused client to take its answer before the connection is closed


async def open_over(stream: ByteStream, url: str, config: WebSocketConfig | None = None) -> WebSocketStream:
    """Open a WebSocket as the client, over an open byte stream.

    Args:
        stream: belongs to the WebSocket from now on; it is aborted if this fails.
        url: ``ws://host:port/path?query``; the server gets host, path and query.
        config: settings of the WebSocket; its `tcp` and `tls` are not used.

    Raises:
        ConnectionLost: the server was lost, or refused. After a refusal, `ConnectionLost.code` is the HTTP status, or 502 for a malformed
            answer.
        IdleTimeout: there was no answer within `WebSocketConfig.handshake_timeout`.
        ConfigurationError: the URL is malformed.

    Cancellation:
        the byte stream was aborted.
    """
    config = config or WebSocketConfig()
    parts = _split(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.lower().removesuffix(":443" if parts.scheme == "wss" else ":80")
    try:
        handshake = ClientHandshake(
            host, target, config.subprotocols, config.headers, random=PLATFORM.get().token_bytes
        )
        with trio.move_on_after(config.handshake_timeout):
            stream.send_nowait(handshake.request)
            try:
                left = config.max_handshake
                head, rest = await _read_head(stream, left)
                while is_interim(head):
                    left -= len(head)
                    head, rest = await _read_head(stream, left, rest)
            except HandshakeRefused as refused:
                raise HandshakeRefused(Refusal(502, f"the server's answer: {refused}")) from refused
            subprotocol = handshake.receive_head(head)
            return WebSocketStream(
                stream, config=config, client=True, early=rest, subprotocol=subprotocol, request=None
            )
        raise IdleTimeout(f"no answer to the WebSocket handshake within {config.handshake_timeout} s")
    except HandshakeRefused as refused:
        stream.abort()
        raise ConnectionLost(f"no WebSocket at {url}: {refused}", refused.refusal.status) from refused
    except BaseException:
        stream.abort()
        raise


async def accept_over(
    stream: ByteStream,
    config: WebSocketConfig | None = None,
    *,
    path: str | None = None,
    failures: FailureLog | None = None,
) -> WebSocketStream:
    """Open a WebSocket as the server, over a byte stream that a client has just opened.

    Args:
        stream: belongs to the WebSocket from now on; it is closed if this fails.
        config: settings of the WebSocket; its `tcp` and `tls` are not used.
        path: the only path to serve, so that others get a 404; ``None`` for any.
        failures: limits the lines about exceptions of `WebSocketConfig.allow`. Make one for each listener; ``None``: each has a line.

    Raises:
        ConnectionLost: the client was lost or refused. After a refusal, `ConnectionLost.code` is the HTTP status.
        ConnectionClosed: this side closed the byte stream.

    Cancellation:
        the byte stream was aborted.
    """
    config = config or WebSocketConfig()
    try:
        refusal = Refusal(408, f"no whole request within {config.handshake_timeout} s")
        with trio.move_on_after(config.handshake_timeout):
            try:
                head, rest = await _read_head(stream, config.max_handshake)
                request, subprotocol, response = answer(
                    head, rest, config, path, failures or FailureLog(), at=stream.info.local
                )
                stream.send_nowait(response)
                return WebSocketStream(
                    stream, config=config, client=False, early=b"", subprotocol=subprotocol, request=request
                )
            except HandshakeRefused as refused:
                refusal = refused.refusal
        await _refuse(stream, refusal)
    except BaseException:
        stream.abort()
        raise
    raise ConnectionLost(f"{stream.info.peer} got no WebSocket: {refusal.status} {refusal.detail}", refusal.status)


async def _read_head(stream: ByteStream, limit: int, data: bytes = b"") -> tuple[bytes, bytes]:
    """Read a head that begins with `data`; return it, and the bytes after it."""
    head = Head(limit)
    while data or (data := await stream.receive_some(max(limit, 1))):
        if (done := head.receive_data(data)) is not None:
            return done
        data = b""
    raise ConnectionLost("the connection ended during the WebSocket handshake")


async def _refuse(stream: ByteStream, refusal: Refusal) -> None:
    """Answer, and give the client a moment to close: closing with unread bytes could destroy the answer."""
    stream.send_nowait(refusal_bytes(refusal))
    with trio.move_on_after(_REFUSED_LINGER):
        try:
            await stream.send_eof()
        except NotImplementedError:
            await stream.flush()
        while await stream.receive_some():
            pass
    await stream.aclose()


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ConfigurationError(f"expected ws://host:port/path or wss://host:port/path, got {url!r}")
    if parts.fragment or "@" in parts.netloc or not re.fullmatch(r"[\x21-\x7e]*", parts.path + parts.query):
        detail = (
            "has a fragment or a user, or bytes that must be percent-encoded (RFC 6455, 3); pass credentials in headers"
        )
        raise ConfigurationError(f"{url!r} {detail}")
    try:
        host = parts.netloc.encode("idna")
    except UnicodeError:
        host = b""
    if not _AUTHORITY.fullmatch(host):
        raise ConfigurationError(f"{url!r} has a host that is not a host name or an address")
    return parts


def below_of_listener(url: str) -> str:
    """Return the URL of the byte streams below a listener.

    Raises:
        ConfigurationError: the URL is malformed, or has a query.
    """
    parts = _split(url)
    if parts.query:
        raise ConfigurationError(f"{url!r} has a query, but only the path selects clients: leave the query out")
    return _below(parts)


def _below(parts: SplitResult) -> str:
    """Return the URL of the byte stream below a WebSocket."""
    scheme, port = ("tls", 443) if parts.scheme == "wss" else ("tcp", 80)
    host = parts.hostname or ""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port if parts.port is None else parts.port}"


@asynccontextmanager
async def dial(
    url: str, config: WebSocketConfig | None = None, *, check: Callable[[CarrierInfo], None] = lambda _: None
) -> AsyncIterator[WebSocketStream]:
    """Connect to a WebSocket server; leaving the block closes as `WebSocketStream` does.

    Args:
        url: ``ws://host:port/path?query``, or ``wss://…`` with TLS.
        check: called with the byte stream below before anything is sent; if it raises, nothing is.

    Raises:
        ConnectionLost, IdleTimeout, ConfigurationError: as `open_over`, and as the carrier below.
    """
    config = config or WebSocketConfig()
    parts = _split(url)
    below = tls.dial(_below(parts), config.tls) if parts.scheme == "wss" else tcp.dial(_below(parts), config.tcp)
    async with below as stream:
        check(stream.info)
        async with await open_over(stream, url, config) as websocket:
            yield websocket


class WebSocketListener(UpgradingListener[WebSocketStream]):
    """Accepts clients after their handshakes; a `Listener`, made by `listen` and `listen_over`."""

    def __init__(self, below: Listener[ByteStream], url: str, config: WebSocketConfig) -> None:
        super().__init__(below, url, config.backlog, WebSocketStream.abort)
        self._path = _split(url).path or None
        self._config = config
        self._failures = FailureLog()

    async def take_in(self, nursery: trio.Nursery, stream: ByteStream) -> None:
        """Begin the handshake of a client. If all wait for `accept`, further clients can wait in the system's queue."""

        async def shake_hands() -> WebSocketStream:
            return await accept_over(stream, self._config, path=self._path, failures=self._failures)

        info = stream.info
        await self.open_for(nursery, info.peer, share_of(info.peer, info), shake_hands, stream.abort)


@asynccontextmanager
async def listen_over(
    below: Listener[ByteStream], url: str, config: WebSocketConfig | None = None
) -> AsyncIterator[WebSocketListener]:
    """Serve WebSockets on the byte streams of another listener. Leaving the block stops accepting; accepted connections stay open.

    Args:
        below: belongs to the new listener, which closes it at the end of the block.
        url: scheme, host and path as clients see them. With a path (also ``/``), only this path is served; without one, any path.

    Raises:
        ConfigurationError: the URL is malformed.
    """
    below_of_listener(url)
    async with WebSocketListener(below, url, config or WebSocketConfig()).running() as listener:
        yield listener


@asynccontextmanager
async def listen(url: str, config: WebSocketConfig | None = None) -> AsyncIterator[WebSocketListener]:
    """Listen for WebSocket clients; leaving the block stops listening. Accepted connections stay open.

    Args:
        url: ``ws://host:port/path``, or ``wss://…`` with TLS; port 0 takes a free one. With a path (also ``/``), only this path is
            served; without one, any path.

    Raises:
        ConfigurationError: the URL is malformed, the address is taken, or the TLS settings have no certificate.
    """
    config = config or WebSocketConfig()
    parts, address = _split(url), below_of_listener(url)
    below = tls.listen(address, config.tls) if parts.scheme == "wss" else tcp.listen(address, config.tcp)
    async with below as streams:
        real = parts._replace(netloc=urlsplit(streams.url).netloc).geturl()
        async with listen_over(streams, real, config) as listener:
            yield listener
