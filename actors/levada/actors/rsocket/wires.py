"""What a connection needs of its carrier, the same for octets and for messages; and how URLs of both dialects name carriers.

A `Wire` is a byte stream (RS-2: frames with their length) or a message stream (RS-6: a frame is a message). Of a QUIC connection it is
the one stream that the client opens (RS-8). What a core has queued goes out by `Wire.send`, which never waits: the carrier joins small
writes, and whoever produces more waits in `Wire.wait_for_room` first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

import attrs

from levada.actors.listening import Accepted
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import (
    ByteStream,
    CarrierInfo,
    CarrierStatistics,
    Connection,
    Incoming,
    Listener,
    MessageStream,
    dial,
    listen,
)

__all__ = ["CarrierConfig", "Wire", "carrier_url", "dial_wire", "listen_for", "open_accepted"]

CarrierConfig: TypeAlias = Any
"""`TcpConfig`, `TlsConfig`, `UnixConfig`, `MemoryConfig`, ``WebSocketConfig`` or ``QuicConfig``: the settings of the URL's carrier."""

ALPN = "rsocket"  # RS-8
MESSAGES_AT_ONCE = 64  # taken before what they led to is sent
_ORDERLY = (1000, 1001)  # close codes of RFC 6455, section 7.4.1: done, going away


class Wire(Protocol):
    """One carrier under a connection."""

    framed: bool
    """Whether it keeps the bounds of messages."""

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end."""
        ...

    @property
    def unsent(self) -> int:
        """Octets queued and not handed on yet."""
        ...

    def receive(self) -> Awaitable[bytes | list[bytes]]:
        """Wait for what comes next: octets, or a list of whole messages; nothing at all is the end.

        Raises:
            ConnectionLost: cut off.
            ConnectionClosed: this side closed.
        """
        ...

    def send(self, data: list[bytes]) -> None:
        """Queue what a core had to send, without waiting; errors as `receive`."""
        ...

    async def wait_for_room(self) -> None:
        """Wait while more than the carrier's high watermark is queued; one task at a time. Errors as `receive`."""
        ...

    async def aclose(self) -> None:
        """Close after what is queued, within the carrier's own time."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...

    def statistics(self) -> CarrierStatistics:
        """Return the carrier's counters."""
        ...


@attrs.define(eq=False)
class ByteWire:
    """A byte stream as a wire."""

    stream: ByteStream
    framed: bool = attrs.field(default=False, init=False)

    @property
    def info(self) -> CarrierInfo:
        """See `Wire.info`."""
        return self.stream.info

    @property
    def unsent(self) -> int:
        """See `Wire.unsent`."""
        return self.stream.unsent

    def receive(self) -> Awaitable[bytes | list[bytes]]:
        """See `Wire.receive`."""
        return self.stream.receive_some()

    def send(self, data: list[bytes]) -> None:
        """Queue the pieces as one."""
        self.stream.send_nowait(b"".join(data))

    async def wait_for_room(self) -> None:
        """See `Wire.wait_for_room`."""
        await self.stream.send_all(b"")

    async def aclose(self) -> None:
        """See `Wire.aclose`."""
        await self.stream.aclose()

    def abort(self) -> None:
        """See `Wire.abort`."""
        self.stream.abort()

    def statistics(self) -> CarrierStatistics:
        """See `Wire.statistics`."""
        return self.stream.statistics()


@attrs.define(eq=False)
class MessageWire:
    """A message stream as a wire."""

    stream: MessageStream
    framed: bool = attrs.field(default=True, init=False)

    @property
    def info(self) -> CarrierInfo:
        """See `Wire.info`."""
        return self.stream.info

    @property
    def unsent(self) -> int:
        """See `Wire.unsent`."""
        return self.stream.unsent

    async def receive(self) -> list[bytes]:
        """See `Wire.receive`: all messages that are there, up to a limit."""
        try:
            message: bytes | None = await self.stream.receive()
        except ConnectionLost as error:
            if error.code in _ORDERLY:
                return []
            raise
        messages = []
        while message is not None:
            messages.append(message)
            message = self.stream.receive_nowait() if len(messages) < MESSAGES_AT_ONCE else None
        return messages

    def send(self, data: list[bytes]) -> None:
        """Queue each as a message."""
        for message in data:
            self.stream.send_nowait(message)

    async def wait_for_room(self) -> None:
        """See `Wire.wait_for_room`."""
        await self.stream.wait_for_room()

    async def aclose(self) -> None:
        """See `Wire.aclose`."""
        await self.stream.aclose()

    def abort(self) -> None:
        """See `Wire.abort`."""
        self.stream.abort()

    def statistics(self) -> CarrierStatistics:
        """See `Wire.statistics`."""
        return self.stream.statistics()


def carrier_url(url: str) -> tuple[str, str]:
    """Part a URL into the dialect and the carrier's own URL; without a ``+`` in the scheme the carrier is TCP.

    Raises:
        ConfigurationError: no such scheme.

    Example:
        >>> carrier_url("rsocket+wss://example.org/quotes")
        ('rsocket', 'wss://example.org/quotes')
        >>> carrier_url("reactivesocket://127.0.0.1:7000")
        ('reactivesocket', 'tcp://127.0.0.1:7000')
    """
    scheme, separator, rest = url.partition("://")
    dialect, _, carrier = scheme.partition("+")
    if not separator or dialect not in ("rsocket", "reactivesocket"):
        raise ConfigurationError(f"expected rsocket+tcp://… or reactivesocket+tcp://…, got {url!r}")
    return dialect, f"{carrier or 'tcp'}://{rest}"


@asynccontextmanager
async def dial_wire(url: str, config: CarrierConfig = None) -> AsyncIterator[Wire]:
    """Connect; leaving the block closes.

    Args:
        url: of the carrier.
        config: its settings; for QUIC the protocol name is filled in if the settings leave it at their default.

    Raises:
        ConnectionLost: nobody answers there, or not whom it should be.
        ConfigurationError: a URL or settings that cannot work, or an extra that is not installed.
    """
    dialled: AbstractAsyncContextManager[ByteStream | MessageStream | Connection] = dial(url, _with_alpn(url, config))
    async with dialled as carrier:
        if isinstance(carrier, Connection):
            async with await carrier.open_stream() as stream:
                yield ByteWire(stream)
        else:
            yield as_wire(carrier)


def listen_for(url: str, config: CarrierConfig = None) -> AbstractAsyncContextManager[Listener[Accepted]]:
    """Listen; arguments and errors as for `dial_wire`."""
    listening: AbstractAsyncContextManager[Listener[Accepted]] = listen(url, _with_alpn(url, config))
    return listening


@asynccontextmanager
async def open_accepted(accepted: Accepted) -> AsyncIterator[Wire]:
    """Make a wire of what a listener handed over; leaving the block closes it.

    Raises:
        ConnectionLost: the handshake failed, or the peer left.
    """
    if isinstance(accepted, Incoming):
        async with accepted.accept() as connection:
            await connection.handshake()
            async with await connection.accept_stream() as stream:
                yield ByteWire(stream)
        return
    wire = as_wire(accepted)
    try:
        yield wire
    finally:
        await wire.aclose()


def as_wire(stream: ByteStream | MessageStream) -> Wire:
    """Wrap a stream that is open."""
    return ByteWire(stream) if isinstance(stream, ByteStream) else MessageWire(stream)


def _with_alpn(url: str, config: CarrierConfig) -> CarrierConfig:
    if not url.startswith("quic:"):
        return config
    from levada.transports.quic import QuicConfig  # an extra

    config = QuicConfig() if config is None else config
    return attrs.evolve(config, alpn=(ALPN,)) if config.alpn == QuicConfig().alpn else config
