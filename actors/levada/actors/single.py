"""Connections over one stream: a byte stream, or a carrier of messages.

`SingleDriver` reads from the carrier, feeds the core, applies its events at once, and sends its output: right away, or once for a
batch of turns that makes many frames (`SingleDriver.turn`). On a QUIC connection it uses one stream, which the client opens.

Sending never waits: the carrier joins small writes, and producers wait for room first (`SingleDriver.room`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

import attrs
import trio

from levada.actors.listening import Accepted, begin
from levada.framework import handles
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionLost
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
from levada.transports.core import Core

from .driver import Driver, Ended

__all__ = ["CarrierConfig", "SingleCarrier", "SingleDriver", "accept_single", "dial_single", "listen_single"]

CarrierConfig: TypeAlias = Any
"""The settings of the URL's carrier: `TcpConfig`, `TlsConfig`, `UnixConfig`, `MemoryConfig`, ``WebSocketConfig`` or ``QuicConfig``."""

_PIECE: Final = 8192
"""Bytes that a core gets at a time; this bounds the work that they begin."""
_MESSAGES: Final = 64
"""Messages taken at a time, before the output that they cause is sent."""
_ORDERLY: Final = (1000, 1001)  # close codes of RFC 6455, section 7.4.1: done, going away


S = TypeVar("S", ByteStream, MessageStream)


@attrs.define(eq=False)
class SingleCarrier(ABC, Generic[S]):
    """One stream, of bytes or of messages."""

    stream: S

    framed: ClassVar[bool]
    """Whether it keeps the boundaries of messages."""

    @property
    def info(self) -> CarrierInfo:
        """Facts about the carrier and its other end."""
        return self.stream.info

    @property
    def unsent(self) -> int:
        """Bytes that are queued and not sent yet."""
        return self.stream.unsent

    @property
    @abstractmethod
    def receive(self) -> Callable[[], Awaitable[bytes | list[bytes]]]:
        """Waits for bytes, or for a list of whole messages; an empty result means the end. Take it once: this saves a call for each read.

        Raises:
            ConnectionLost: the carrier was cut off.
            ConnectionClosed: this side has closed it.
        """

    @abstractmethod
    def send(self, pieces: list[bytes]) -> int:
        """Queue the output of a core without waiting: messages, or pieces of a byte stream. Return how many bytes are queued now.

        Raises the errors of `receive`.
        """

    @abstractmethod
    async def wait_for_room(self) -> None:
        """Wait while more than the carrier's high watermark is queued; one task at a time. Raises the errors of `receive`."""

    async def aclose(self) -> None:
        """Send the queue, within the carrier's own time for it, and close."""
        await self.stream.aclose()

    def abort(self) -> None:
        """Close at once."""
        self.stream.abort()

    def statistics(self) -> CarrierStatistics:
        """Return the carrier's counters."""
        return self.stream.statistics()


class ByteCarrier(SingleCarrier[ByteStream]):
    """A byte stream as a carrier."""

    framed = False

    @property
    def receive(self) -> Callable[[], Awaitable[bytes]]:
        """Waits for bytes."""
        return self.stream.receive_some

    def send(self, pieces: list[bytes]) -> int:
        """Queue the pieces in order."""
        stream = self.stream
        stream.send_nowait(b"".join(pieces))
        return stream.unsent

    async def wait_for_room(self) -> None:
        """Wait for room by sending nothing."""
        await self.stream.send_all(b"")


class MessageCarrier(SingleCarrier[MessageStream]):
    """A message stream as a carrier."""

    framed = True

    @property
    def receive(self) -> Callable[[], Awaitable[list[bytes]]]:
        """Waits for a message and takes all that have arrived, up to a limit."""
        return self._receive

    async def _receive(self) -> list[bytes]:
        try:
            message: bytes | None = await self.stream.receive()
        except ConnectionLost as error:
            if error.code in _ORDERLY:
                return []
            raise
        messages = []
        while message is not None:
            messages.append(message)
            message = self.stream.receive_nowait() if len(messages) < _MESSAGES else None
        return messages

    def send(self, pieces: list[bytes]) -> int:
        """Queue each piece as a message."""
        for message in pieces:
            self.stream.send_nowait(message)
        return self.stream.unsent

    async def wait_for_room(self) -> None:
        """Wait for room."""
        await self.stream.wait_for_room()


@asynccontextmanager
async def dial_single(url: str, config: CarrierConfig = None, *, alpn: str) -> AsyncIterator[SingleCarrier[Any]]:
    """Connect; leaving the block closes the carrier.

    Args:
        url: of the carrier.
        config: its settings.
        alpn: the protocol's name for QUIC, used if the settings leave theirs at its default.

    Raises:
        ConnectionLost: no server answers at the URL, or its certificate is wrong.
        ConfigurationError: the URL or the settings cannot work, or an extra is not installed.
    """
    dialled: AbstractAsyncContextManager[ByteStream | MessageStream | Connection] = dial(
        url, _with_alpn(url, config, alpn)
    )
    async with dialled as carrier:
        if isinstance(carrier, Connection):
            async with await carrier.open_stream() as stream:
                yield ByteCarrier(stream)
        else:
            yield single(carrier)


def listen_single(
    url: str, config: CarrierConfig = None, *, alpn: str
) -> AbstractAsyncContextManager[Listener[Accepted]]:
    """Listen; arguments and errors as for `dial_single`."""
    listening: AbstractAsyncContextManager[Listener[Accepted]] = listen(url, _with_alpn(url, config, alpn))
    return listening


@asynccontextmanager
async def accept_single(accepted: Accepted) -> AsyncIterator[SingleCarrier[Any]]:
    """Open an accepted carrier; leaving the block closes it.

    Raises:
        ConnectionLost: the handshake failed, or the peer left.
    """
    if isinstance(accepted, Incoming):
        async with begin(accepted) as connection:
            await connection.handshake()
            async with await connection.accept_stream() as stream:
                yield ByteCarrier(stream)
        return
    carrier = single(accepted)
    try:
        yield carrier
    finally:
        await carrier.aclose()


def single(stream: ByteStream | MessageStream) -> SingleCarrier[Any]:
    """Make a carrier of an open stream."""
    return ByteCarrier(stream) if isinstance(stream, ByteStream) else MessageCarrier(stream)


def _with_alpn(url: str, config: CarrierConfig, alpn: str) -> CarrierConfig:
    if not url.startswith("quic:"):
        return config
    from levada.transports.quic import QuicConfig  # an extra

    config = QuicConfig() if config is None else config
    return attrs.evolve(config, alpn=(alpn,)) if config.alpn == QuicConfig().alpn else config


class FlushSoon:
    """Tells the connection to send the output of this batch of turns."""

    __slots__ = ()


FLUSH: Final = FlushSoon()


C = TypeVar("C", bound=Core[Any, bytes])


class SingleDriver(Driver[C]):
    """A connection over one stream.

    The core satisfies `levada.transports.core.BytesInput`, `MessagesInput` or both.

    The carrier may be replaced when a session is resumed, so a task that has waited for it must look at `carrier` again.
    """

    reflex: ClassVar[int] = 1 << 20
    """Bytes that the core may queue by itself (`own_bytes`) while the carrier is crowded, before the reader waits."""
    most_unbegun: ClassVar[int] = 64
    """The most children that have been given work and have not begun; beyond it, the reader waits until they have."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.carrier: SingleCarrier[Any] | None = None
        self.high_watermark = 65_536
        """Bytes queued on the carrier above which producers wait."""
        self.filled = True
        """Whether the carrier had more than that queued after the last send, or there is none: only then `crowded` looks at the carrier."""
        self.unbegun = 0
        """Children that have been given work and have not begun."""
        self.line = trio.Lock()
        """Held by the one producer with more than a slice of work, or more than the carrier takes, that continues now."""
        self._carried = trio.Event()
        self.reading = trio.CancelScope()
        """Cancels the task that reads for this connection."""
        self._used: SingleCarrier[Any] | None = None
        """The last carrier whose bytes this connection counts."""
        self._before: CarrierStatistics | None = None
        """Counters of the carriers before that."""
        self._now: Callable[[], float] = trio.current_time
        """Once there is a carrier, the clock itself: two calls fewer, 0.3 us of each frame."""
        self._flush_due = False
        self._all_begun: trio.Event | None = None
        self._room: trio.Event | None = None
        self._own_before = 0
        """`own_bytes` when the carrier became too full."""

    def attach(self, carrier: SingleCarrier[Any]) -> None:
        """Use a carrier from now on; the core knows whether it is framed.

        Raises:
            ConfigurationError: the core takes bytes and the carrier has messages, or the reverse.
        """
        takes = "receive_message" if carrier.framed else "receive_data"
        receive: Callable[[bytes, float], list[Any]] | None = getattr(self.core, takes, None)
        if receive is None:
            needs, got = ("a byte stream", "messages") if carrier.framed else ("messages", "a byte stream")
            raise ConfigurationError(
                f"{self.protocol} needs a carrier of {needs}; {carrier.info.scheme}:// carries {got}"
            )
        self._receive = receive
        self._now = trio.lowlevel.current_clock().current_time
        self._before, self._used = self.all_statistics(), carrier
        self.carrier = carrier
        self.filled = carrier.unsent > self.high_watermark
        self.meet(carrier.info)
        self._carried.set()
        if self._room is not None:  # of the carrier before, which may never have any
            self._room.set()
            self._room = None

    def detach(self) -> SingleCarrier[Any] | None:
        """Stop using the carrier, and return it."""
        carrier, self.carrier = self.carrier, None
        self.filled = True
        self._carried = trio.Event()
        return carrier

    def hand_over(self) -> SingleCarrier[Any] | None:
        """Detach for another connection, which counts all bytes of the carrier."""
        self._used = None
        return self.detach()

    def user(self, carrier: SingleCarrier[Any]) -> SingleDriver[Any] | None:
        """Return the connection that uses a carrier: this one, one whose session continues on it, or None."""
        return self if self.carrier is carrier and self.end is None else None

    async def read(self, carrier: SingleCarrier[Any]) -> None:
        """Read from a carrier until it ends, or the connection that uses it."""
        # In a task of its own: each coroutine around the waiting one costs a call for every piece that arrives.
        async with trio.open_nursery() as nursery:
            self.reading = trio.CancelScope()  # here, because the connection may end before the task has begun
            nursery.start_soon(self._read, carrier, self.reading)

    async def _read(self, carrier: SingleCarrier[Any], scope: trio.CancelScope) -> None:
        code, reason = 0, ""
        receive = carrier.receive
        with scope:
            while True:
                try:
                    data = await receive()
                except CarrierError as error:
                    code, reason = getattr(error, "code", 0), str(error)
                    break
                if not data:
                    break
                user: SingleDriver[Any] | None = self
                if type(data) is bytes and len(data) <= _PIECE and self.carrier is carrier and self.end is None:
                    # As `_feed`, which costs 1 us; a request and its response pay for it at each end.
                    self.feed(data)
                    if self.unbegun > self.most_unbegun:
                        await self.all_begun()
                else:
                    for part in data if isinstance(data, list) else (data,):
                        await self._feed(carrier, part)
                    # Held while this waits, it would double the cost of a peer that stops in a frame.
                    data = part = b""
                    user = self.user(carrier)
                if (
                    user is not None
                    and user.filled
                    and user.own_bytes - user._own_before > self.reflex
                    and user.crowded
                    and self.user(carrier) is user
                ):
                    await user.room()
                    user.read_again()
        user = self.user(carrier)
        if user is not None:
            user.detach()
            user.lost(code, reason)

    async def _feed(self, carrier: SingleCarrier[Any], data: bytes) -> None:
        """Feed the core in pieces, so that children are free again when the next piece needs them."""
        at = 0
        while (user := self.user(carrier)) is not None:
            step = len(data) if carrier.framed else max(_PIECE, user.missing())
            user.feed(data[at : at + step] if at or step < len(data) else data)
            if user.unbegun > user.most_unbegun:
                await user.all_begun()
            at += step
            if at >= len(data):
                return

    @property
    def own_bytes(self) -> int:
        """Bytes so far that the core has queued by itself, because of what the peer sends and however much waits.

        By default these are all bytes. A protocol whose sides both send much at the same time must count without the payloads of the
        program: two readers that each wait until the other reads would wait without end.
        """
        statistics = self.all_statistics()
        return 0 if statistics is None else statistics.bytes_sent + statistics.unsent

    def missing(self) -> int:
        """Return how many bytes the core needs before it can do anything; it gets them in one piece."""
        return 0

    def read_again(self) -> None:
        """Record that the reader continues after it has waited for room."""

    def feed(self, data: bytes) -> None:
        """Feed the core, apply its events, and hand its output to the carrier."""
        now = self._now()
        table = self.events
        for event in self._receive(data, now):
            table[type(event)](self, event)
        if not self._flush_due and (pieces := self.core.data_to_send(now)):
            self._send(pieces)

    def flush(self) -> bool:
        """Hand the core's output to the carrier; return whether there was any."""
        if self.carrier is None:
            return False
        pieces = self.core.data_to_send(self._now())
        if pieces:
            self._send(pieces)
        return bool(pieces)

    def _send(self, pieces: list[bytes]) -> None:
        carrier = self.carrier
        if carrier is not None:
            try:
                filled = carrier.send(pieces) > self.high_watermark
            except CarrierError:
                return  # the reader finds out, and tells the core
            if filled and not self.filled:
                self._own_before = self.own_bytes
            self.filled = filled

    def flush_soon(self) -> None:
        """Flush at the end of the batch of turns that is running, together with others."""
        if not self._flush_due and self.end is None:
            self._flush_due = True
            self.own.tell(FLUSH)

    @handles
    def on_flush_soon(self, m: FlushSoon) -> None:
        """Flush."""
        self._flush_due = False
        self.flush()

    @property
    def crowded(self) -> bool:
        """Whether producers have to wait: the carrier has too much queued, or there is none for now."""
        carrier = self.carrier
        if carrier is None:
            return self.end is None
        if self.filled:
            self.filled = carrier.unsent > self.high_watermark
        return self.filled

    async def room(self) -> None:
        """Wait until the carrier takes more, or the connection has ended."""
        if self.carrier is None:
            await self._carried.wait()
            return
        await self.await_room(self.carrier).wait()

    def await_room(self, carrier: SingleCarrier[Any]) -> trio.Event:
        """Begin to wait until the carrier takes more; return the event for it. `relieved` is called, too."""
        if self._room is None:
            self._room = trio.Event()
            self.start_soon(self._wait_for_room, carrier, self._room)
        return self._room

    async def _wait_for_room(self, carrier: SingleCarrier[Any], room: trio.Event) -> None:
        lost = False
        try:
            await carrier.wait_for_room()
        except CarrierError:
            lost = True  # the reader finds out
        finally:
            if self._room is room:
                self._own_before = self.own_bytes
                self._room = None
                room.set()
        if self.carrier is carrier and not lost:
            self.relieved()

    def relieved(self) -> None:
        """Record that the carrier takes more."""

    async def turn(self) -> None:
        """Wait for a producer's next turn, and for room: one producer of a connection continues in each pass of trio.

        So the reader and new handlers wait for one slice, not for a slice of each producer: the last of 667 streams began after 0.7 s of
        CPU time instead of 13 s.
        """
        async with self.line:  # a checkpoint
            self.flush()  # the output of the previous producer counts, too
            if self.crowded:
                await self.room()
            self.system.scheduler.begin_slice()

    async def all_begun(self) -> None:
        """Wait until each child that was given work has begun."""
        self._all_begun = trio.Event()
        await self._all_begun.wait()

    def begun(self) -> None:
        """Record that a child has begun its work."""
        self.unbegun -= 1
        if self._all_begun is not None and not self.unbegun:
            self._all_begun.set()
            self._all_begun = None

    async def wind_up(self) -> None:
        """Wait until children have begun the work that came before the end. They cannot begin once this actor is stopping."""
        if self.unbegun:
            await self.all_begun()

    def ended(self, event: Ended, reason: str) -> None:
        """Send the last output of the core, and read no further."""
        super().ended(event, reason)
        self.flush()
        self.detach()
        self._carried.set()
        if self._all_begun is not None:
            self._all_begun.set()
        self.reading.cancel()

    def carrier_statistics(self) -> CarrierStatistics | None:
        """Return the counters of the carrier now in use."""
        return self.carrier.statistics() if self.carrier is not None else None

    def all_statistics(self) -> CarrierStatistics | None:
        """Return the counters of all carriers."""
        if self._used is None:
            return self._before
        latest = self._used.statistics()
        return latest if self._before is None else self._before + latest
