"""Carriers in memory, for tests and for two parts of one process: byte streams, message streams, connections of many streams.

They keep the contracts of `levada.transports.carriers.contracts`, with bounded windows and real backpressure, without system calls. A run
with the same seed repeats exactly.  `MemoryConfig` sets windows, latency, the sizes of chunks, and when the connection is lost. Each carrier
has an attribute ``link``, which holds, releases and cuts the connection.

Example:
    >>> import trio
    >>> async def main() -> bytes:
    ...     client, server = memory_streams(MemoryConfig(chunk=(1, 3)))
    ...     await client.send_all(b"hello")
    ...     await client.send_eof()
    ...     return b"".join([part async for part in server])
    >>> trio.run(main)
    b'hello'
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

import trio

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.transports.carriers._memory_connection import MemoryConnection, MemoryStream, memory_connections
from levada.transports.carriers._memory_pipe import Flow, MemoryConfig, MemoryLink, Pipe, pipe_statistics
from levada.transports.carriers.contracts import CarrierInfo, CarrierStatistics, Octets
from levada.transports.carriers.streams import again

__all__ = [
    "MemoryByteStream", "MemoryConfig", "MemoryConnection", "MemoryIncoming", "MemoryLink", "MemoryListener", "MemoryMessageStream",
    "MemoryStream", "dial", "listen", "memory_connections", "memory_messages", "memory_streams",
]  # fmt: skip

MESSAGE_TOO_LARGE = 1009
"""Close code of a message above the limit, as in WebSocket (RFC 6455, section 7.4.1)."""
_LENGTH = 4  # bytes of the length before each message


class MemoryByteStream(trio.abc.AsyncResource):
    """One end of a byte stream in memory; a `ByteStream`, made by `memory_streams`, `dial` and `listen`."""

    __slots__ = ("_closing", "_in", "_info", "_out", "link")

    def __init__(self, link: MemoryLink, sending: Pipe, receiving: Pipe, info: CarrierInfo) -> None:
        self.link = link
        """The link between the two ends, which tests may hold and cut."""
        self._out = sending
        self._in = receiving
        self._info = info
        self._closing = False
        link.ends.append(self)

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end."""
        return self._info

    @property
    def unsent(self) -> int:
        """Bytes queued without window credit."""
        return len(self._out.unsent)

    async def send_all(self, data: Octets) -> None:
        """Queue bytes, waiting for room: see `ByteStream.send_all`."""
        await self._out.send(data)

    def send_nowait(self, data: Octets) -> None:
        """Queue bytes without waiting: see `ByteStream.send_nowait`."""
        self._out.send_nowait(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes: see `ByteStream.receive_some`."""
        return await self._in.receive(max_bytes)

    def receive_nowait(self, max_bytes: int) -> bytes:
        """Take the bytes that have arrived, up to `max_bytes`; ``b""`` if there are none, for any reason."""
        return self._in.receive_nowait(max_bytes)

    async def send_eof(self) -> None:
        """End sending: see `ByteStream.send_eof`."""
        self.link.count_call()
        if self._out.finished and not self._closing:
            return
        self._out.check_sending()
        if self._out.sender.task is not None:
            raise trio.BusyResourceError("another task is sending")
        self._out.finish()

    async def flush(self) -> None:
        """Wait until the queue is empty: see `ByteStream.flush`."""
        self._check_open()
        await self._out.flush()

    def _check_open(self) -> None:
        if self._closing:
            raise ConnectionClosed("this side closed the stream")

    async def aclose(self) -> None:
        """Close; wait up to `MemoryConfig.close_timeout` for the queue. See `ByteStream.aclose`."""
        await self.close_with(ConnectionLost("the peer closed the stream"))

    async def close_with(self, told: ConnectionLost) -> None:
        """Close; sending at the other end raises `told`."""
        if not self._closing:
            self._closing = True
            self._out.finish()
            self._in.refuse(ConnectionClosed("this side closed the stream"), told)
            try:
                with trio.move_on_after(self.link.config.close_timeout):
                    await self._out.sent()
                await trio.lowlevel.checkpoint()
            finally:
                self._cut_off(told)
        else:
            await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close at once and drop the queue: see `ByteStream.abort`."""
        self.abort_with(ConnectionLost("the peer aborted the stream"))

    def abort_with(self, told: ConnectionLost) -> None:
        """Abort; sending and receiving at the other end raise `told`."""
        self._closing = True
        self._out.finished = True
        self._in.refuse(ConnectionClosed("this side aborted the stream"), told)
        self._cut_off(told)

    def _cut_off(self, told: ConnectionLost) -> None:
        """Drop the unsent bytes, and tell the peer if there are any."""
        if self in self.link.ends:
            self.link.ends.remove(self)  # otherwise only the garbage collector could free both
        if not self._out.end_sent and self._out.send_error is None:
            self.link.post(self._out.fail_receiver, told)
        self._out.fail_sender(ConnectionClosed("this side closed the stream"))

    def lose(self, error: ConnectionLost) -> None:
        """Fail, because the link was cut."""
        self._out.fail_sender(error)
        self._in.fail_receiver(error)

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        return pipe_statistics(self._out, self._in)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if data := await self.receive_some():
            return data
        raise StopAsyncIteration


class MemoryMessageStream(trio.abc.AsyncResource):
    """One end of a stream of whole messages in memory; a `MessageStream`, made by `memory_messages`, `dial` and `listen`."""

    __slots__ = ("_assembled", "_bytes", "_error", "_peer", "_peer_close")

    def __init__(self, stream: MemoryByteStream) -> None:
        self._bytes = stream
        self._assembled = bytearray()  # an attribute, so that a cancelled `receive` loses nothing
        self._error: ConnectionLost | None = None
        self._peer = self
        self._peer_close = ConnectionLost("the peer closed the stream")

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end."""
        return self._bytes.info

    @property
    def link(self) -> MemoryLink:
        """The link between the two ends, which tests may hold and cut."""
        return self._bytes.link

    def meet(self, peer: MemoryMessageStream) -> None:
        """Set the other end."""
        self._peer = peer

    @property
    def unsent(self) -> int:
        """Bytes queued without window credit, including the lengths before the messages."""
        return self._bytes.unsent

    async def send(self, message: Octets) -> None:
        """Queue a message, waiting for room: see `MessageStream.send`."""
        self._raise_if_refused()
        await self._bytes.send_all(len(message).to_bytes(_LENGTH, "big") + message)

    def send_nowait(self, message: Octets) -> None:
        """Queue a message without waiting: see `MessageStream.send_nowait`."""
        self._raise_if_refused()
        self._bytes.send_nowait(len(message).to_bytes(_LENGTH, "big") + message)

    async def wait_for_room(self) -> None:
        """Wait for room in the queue: see `MessageStream.wait_for_room`."""
        self._raise_if_refused()
        await self._bytes.send_all(b"")

    async def receive(self) -> bytes:
        """Wait for the next message: see `MessageStream.receive`."""
        while (message := self.receive_nowait()) is None:
            self._raise_if_refused()
            data = await self._bytes.receive_some(self._missing())
            if not data:
                raise again(self._peer_close)
            self._assembled += data
        return message

    def receive_nowait(self) -> bytes | None:
        """Take the next message if there is one: see `MessageStream.receive_nowait`."""
        buffer = self._assembled
        while (missing := self._missing()) > 0:
            # Take only the missing bytes, so that the window still bounds what arrives after this message.
            data = self._bytes.receive_nowait(missing) if self._error is None else b""
            if not data:
                return None
            buffer += data
        end = len(buffer) + missing
        message = bytes(buffer[_LENGTH:end])
        del buffer[:end]
        return message

    def _missing(self) -> int:
        """Return how many bytes of the next message are missing. Refuse a message above the limit before any of it is taken."""
        buffer = self._assembled
        if len(buffer) < _LENGTH:
            return _LENGTH - len(buffer)
        size = int.from_bytes(buffer[:_LENGTH], "big")
        limit = self.link.config.max_message
        if size > limit and self._error is None:
            text = f"message of {size} bytes, at most {limit} (raise max_message)"
            self._error = ConnectionLost(text, code=MESSAGE_TOO_LARGE)
            self._bytes.abort_with(self._error)
        return _LENGTH + size - len(buffer)

    def _raise_if_refused(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def take_close(self, error: ConnectionLost) -> None:
        """Record the reason with which the peer will close after its messages."""
        self._peer_close = error

    async def flush(self) -> None:
        """Wait until the queue is empty: see `MessageStream.flush`."""
        await self._bytes.flush()

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        """Send the queue and close: see `MessageStream.aclose`."""
        self._assembled.clear()
        told = ConnectionLost(f"the peer closed the stream with code {code}: {reason or 'no reason given'}", code=code)
        self._error = None
        self.link.post(self._peer.take_close, told)
        await self._bytes.close_with(told)

    def abort(self) -> None:
        """Close at once and drop the queue: see `MessageStream.abort`."""
        self._error = None
        self._assembled.clear()
        self._bytes.abort()

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        return self._bytes.statistics()


def memory_streams(
    config: MemoryConfig | None = None, *, name: str = "pair"
) -> tuple[MemoryByteStream, MemoryByteStream]:
    """Return the two ends (client, server) of a byte stream in memory."""
    link = MemoryLink(config or MemoryConfig())
    there, back = Pipe(link, Flow()), Pipe(link, Flow())
    client, server = f"{name}/client", f"{name}/server"
    return (
        MemoryByteStream(link, there, back, CarrierInfo(scheme="memory", local=client, peer=server)),
        MemoryByteStream(link, back, there, CarrierInfo(scheme="memory", local=server, peer=client)),
    )


def memory_messages(
    config: MemoryConfig | None = None, *, name: str = "pair"
) -> tuple[MemoryMessageStream, MemoryMessageStream]:
    """Return the two ends (client, server) of a stream of messages in memory."""
    client, server = map(MemoryMessageStream, memory_streams(config, name=name))
    client.meet(server)
    server.meet(client)
    return client, server


class MemoryIncoming:
    """A dialler that waits to be accepted; an `Incoming`."""

    __slots__ = ("_client", "_decided", "_listener", "_server", "_validated")

    def __init__(
        self, listener: MemoryListener, ends: tuple[MemoryConnection, MemoryConnection], *, validated: bool
    ) -> None:
        self._listener = listener
        self._client, self._server = ends
        self._validated = validated
        self._decided = trio.Event()

    @property
    def peer(self) -> str:
        """The peer's address."""
        return self._server.info.peer

    @property
    def validated(self) -> bool:
        """Whether `retry` was called."""
        return self._validated

    def accept(self) -> MemoryConnection:
        """Begin the handshake: see `Incoming.accept`."""
        self._decided.set()
        return self._server

    def refuse(self, why: str = "") -> None:
        """Refuse the peer, without a line in the log: see `Incoming.refuse`."""
        self._server.link.cut("the peer refused the connection")
        self._decided.set()

    def retry(self) -> None:
        """Make the peer prove its address: see `Incoming.retry`."""
        self._validated = True
        self._listener.offer(self)

    def ignore(self) -> None:
        """Drop the peer without an answer, so that it waits until its timeout: see `Incoming.ignore`."""

    async def decided(self) -> None:
        """Wait until the peer is accepted or refused.

        Raises:
            ConnectionLost: the peer was refused.
        """
        await self._decided.wait()
        if self._client.error is not None:
            raise again(self._client.error)


MemoryPeer = MemoryByteStream | MemoryMessageStream | MemoryIncoming
"""The peers that a memory listener accepts; the class depends on `MemoryConfig.shape`."""


class MemoryListener:
    """Accepts the peers that dial its name; a `Listener`, made by `listen`."""

    def __init__(self, name: str, config: MemoryConfig) -> None:
        self.config = config
        self.name = name
        self._backlog: deque[MemoryPeer] = deque()
        self._accepting = trio.lowlevel.ParkingLot()
        self._closed = False

    @property
    def url(self) -> str:
        """``memory://name``."""
        return f"memory://{self.name}"

    def offer(self, peer: MemoryPeer) -> None:
        """Queue a peer for `accept`.

        Raises:
            ConnectionLost: too many peers wait to be accepted, or the listener is closed.
        """
        if self._closed or len(self._backlog) >= self.config.backlog:
            raise ConnectionLost(
                f"{self.url} takes no more peers: {'closed' if self._closed else 'its backlog is full'}"
            )
        self._backlog.append(peer)
        self._accepting.unpark()

    async def accept(self) -> MemoryPeer:
        """Wait for the next peer, which is an `Incoming` if the shape is ``"connection"``.

        Raises:
            ConnectionClosed: the listener was closed.
        """
        while not self._backlog:
            if self._closed:
                raise ConnectionClosed(f"this side closed the listener {self.url}")
            await self._accepting.park()
        return self._backlog.popleft()

    async def aclose(self) -> None:
        """Stop accepting, and refuse peers that were not accepted: see `Listener.aclose`."""
        if not self._closed:
            self._closed = True
            _listeners().pop(self.name, None)
            while self._backlog:
                peer = self._backlog.popleft()
                if isinstance(peer, MemoryIncoming):
                    peer.refuse()
                else:
                    peer.abort()
            self._accepting.unpark_all()
        await trio.lowlevel.checkpoint()


_names: trio.lowlevel.RunVar[dict[str, MemoryListener]] = trio.lowlevel.RunVar(
    "levada.transports.carriers.memory names"
)


def _listeners() -> dict[str, MemoryListener]:
    """Return the listeners of this run of trio, by name. Ends in different runs could not wake each other."""
    try:
        return _names.get()
    except LookupError:
        names: dict[str, MemoryListener] = {}
        _names.set(names)
        return names


def _name(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "memory":
        raise ConfigurationError(f"expected memory://name, got {url!r}")
    return parts.netloc + parts.path


@asynccontextmanager
async def listen(url: str, config: MemoryConfig | None = None) -> AsyncIterator[MemoryListener]:
    """Listen at a name in this run of trio; ``memory://`` alone chooses a free name.

    Raises:
        ConfigurationError: `url` is not a memory URL, or the name is taken.
    """
    names = _listeners()
    name = _name(url)
    if not name:
        name = str(next(number for number in range(len(names) + 1) if str(number) not in names))
    if name in names:
        raise ConfigurationError(f"memory://{name} is taken: another listener of this run has that name")
    listener = names[name] = MemoryListener(name, config or MemoryConfig())
    try:
        yield listener
    finally:
        with trio.CancelScope(shield=True):
            await listener.aclose()


@asynccontextmanager
async def dial(
    url: str, config: MemoryConfig | None = None
) -> AsyncIterator[MemoryByteStream | MemoryMessageStream | MemoryConnection]:
    """Connect to the listener with this name, by default with the listener's settings.

    Raises:
        ConnectionLost: no listener has that name, the listener refused, or its backlog is full.
        IdleTimeout: the listener did not decide within `MemoryConfig.handshake_timeout`.
        ConfigurationError: the listener has another shape.
    """
    name = _name(url)
    listener = _listeners().get(name)
    if listener is None:
        raise ConnectionLost(f"no listener at memory://{name}")
    config = config or listener.config
    if config.shape != listener.config.shape:
        raise ConfigurationError(
            f"the shape is {config.shape!r}, wanted {listener.config.shape!r}, as memory://{name} has"
        )
    carrier: MemoryByteStream | MemoryMessageStream | MemoryConnection
    if config.shape == "bytes":
        carrier, server = memory_streams(config, name=name)
        listener.offer(server)
    elif config.shape == "messages":
        carrier, messages = memory_messages(config, name=name)
        listener.offer(messages)
    else:
        ends = memory_connections(config, name=name)
        carrier = ends[0]
        incoming = MemoryIncoming(listener, ends, validated=False)
        listener.offer(incoming)
        if config.early is None:
            try:
                with trio.move_on_after(config.handshake_timeout) as scope:
                    await incoming.decided()
                if scope.cancelled_caught:
                    raise IdleTimeout(f"memory://{name} did not answer within {config.handshake_timeout} s")
            except BaseException:
                carrier.link.cut("the dialler gave up")
                raise
    async with carrier:
        yield carrier
