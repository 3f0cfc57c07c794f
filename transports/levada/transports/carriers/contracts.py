"""What every carrier promises: byte streams, message streams, and connections of many streams.

The rules of this file:

* A carrier moves bytes and knows no protocol above it.  Each of the three shapes below is a `typing.Protocol`; `check_carrier` in
  `levada.transports.testing` runs one suite of promises against every implementation.
* **Closed** is what this program did (`ConnectionClosed`), **lost** is what the peer, the network or the system did (`ConnectionLost`,
  `IdleTimeout`, `StreamWasReset`, `StreamWasStopped`).  Errors are sticky: the next call raises the same again.
* Sending returns when the bytes are queued below a watermark, not when they have arrived; so small writes are joined.  The queue
  is bounded, and a receiver that takes nothing stops the peer, within a window.
* Every await may be cancelled.  A cancelled `send_all` has queued all of its bytes or none.  A cancelled `receive_some` has taken nothing.
* Sending and receiving are independent directions; one task at a time in each; a second one gets `trio.BusyResourceError`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

import attrs

from levada.transports.text import printable

__all__ = [
    "ByteStream", "CarrierInfo", "CarrierStatistics", "CloseReason", "Connection", "Datagram", "Incoming", "Listener", "MessageStream",
    "Stream",
]  # fmt: skip

Octets = bytes | bytearray | memoryview


@attrs.frozen(kw_only=True)
class CarrierInfo:
    """Facts about an open connection."""

    scheme: str
    """``"tcp"``, ``"tls"``, ``"unix"``, ``"ws"``, ``"wss"``, ``"quic"``, ``"memory"``, or ``"qmux+unix"`` and so on."""
    local: str
    """Own address as in a URL's authority, or the path of a Unix socket."""
    peer: str
    """The peer's address, in the same form; for a Unix socket ``uid=… gid=… pid=…`` where the system tells."""
    alpn: str | None = None
    """Protocol agreed on by TLS; for QMux over a WebSocket its subprotocol."""
    tls_version: str | None = None
    """``"TLSv1.3"``, …; ``None`` without TLS."""
    peer_certificate: bytes | None = None
    """The peer's certificate in DER, if it showed one and it was verified."""
    peer_subject: str | None = None
    """Subject of that certificate, as in ``"CN=web-01,O=Example"``, escaped as RFC 4514 says."""
    peer_names: tuple[str, ...] = ()
    """Its subject alternative names, as in ``"DNS:web-01"``, ``"URI:…"``, ``"email:…"`` or ``"IP Address:192.0.2.1"``."""
    server_name: str | None = None
    """Name that the client asked for (SNI)."""
    resumed: bool = False
    """Whether the TLS session goes on from an earlier one."""
    early_data_accepted: bool | None = None
    """QUIC 0-RTT: ``None`` if none was tried."""
    channel_binding: bytes | None = attrs.field(default=None, repr=False)
    """32 bytes that both ends of this connection have and no other connection (``tls-exporter`` of RFC 9266); QUIC only."""
    peer_credentials: tuple[int, int, int] | None = None
    """(pid, uid, gid) of the process at the other end of a Unix socket."""


@attrs.frozen(kw_only=True)
class CarrierStatistics:
    """Counters of one connection; plain numbers, a snapshot."""

    bytes_sent: int
    bytes_received: int
    writes: int
    """Calls to the operating system (or packets) that carried the bytes sent."""
    reads: int
    unsent: int
    """Bytes queued and not handed on yet."""
    datagrams_dropped: int = 0
    """Connections: datagrams that were dropped because no task took them."""

    def __add__(self, other: CarrierStatistics) -> CarrierStatistics:
        """Add the counters of another carrier."""
        mine, theirs = attrs.astuple(self), attrs.astuple(other)
        names = (field.name for field in attrs.fields(CarrierStatistics))
        return CarrierStatistics(**dict(zip(names, map(sum, zip(mine, theirs, strict=True)), strict=True)))


@attrs.frozen
class CloseReason:
    """How a connection ended."""

    code: int
    """The application's code; 0 is orderly. Carriers without codes: 0 closed, 1 lost."""
    text: str = attrs.field(default="", converter=printable)
    by_peer: bool = False
    lost: bool = False
    """Neither side closed it: idle, network, reset, failed handshake."""

    def __str__(self) -> str:
        if self.lost:
            return self.text or "lost"
        who = "the peer" if self.by_peer else "this side"
        return f"{who} closed it with code {self.code}{f': {self.text}' if self.text else ''}"


@runtime_checkable
class ByteStream(Protocol):
    """A reliable, ordered stream of bytes each way: TCP, TLS, Unix socket, memory pipe, one QUIC stream."""

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end."""
        ...

    @property
    def unsent(self) -> int:
        """Bytes queued and not handed on yet; 0 once the stream is over."""
        ...

    async def send_all(self, data: Octets) -> None:
        """Queue all of `data`, waiting while more than the high watermark is queued.

        Raises:
            ConnectionClosed: this side closed, or `send_eof` was called.
            ConnectionLost: the other side or the network ended it (`StreamWasStopped` on a stream of a connection).
        """
        ...

    def send_nowait(self, data: Octets) -> None:
        """Queue without waiting, also above the watermark; the caller keeps its own bound. Errors as `send_all`.

        `send_all(b"")` waits for room and queues nothing: the two together are a send whose bytes are chosen after the wait.
        """
        ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes and take up to `max_bytes` of them (``None``: all that have arrived); ``b""`` means that the peer sends no more.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: cut off before the end (`StreamWasReset` on a stream of a connection).
        """
        ...

    async def send_eof(self) -> None:
        """End this direction after the queue; receiving goes on. A second call changes nothing.

        Raises:
            NotImplementedError: a carrier without half-close: TLS, whose own end (close_notify) is only said when both directions
                close. `aclose` instead. All other byte streams have it.
        """
        ...

    async def flush(self) -> None:
        """Wait until nothing is queued on this side any more."""
        ...

    async def aclose(self) -> None:
        """Close both directions. The queue is sent first, within the time that the carrier's settings allow.

        Cancellation:
            closes at once; the queue may be lost.
        """
        ...

    def abort(self) -> None:
        """Close at once and drop the queue; the peer sees a loss where the carrier can tell."""
        ...

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@runtime_checkable
class MessageStream(Protocol):
    """A reliable, ordered stream of whole messages each way: WebSocket, framed memory pipe."""

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end."""
        ...

    @property
    def unsent(self) -> int:
        """Bytes queued and not handed on yet, framing included; 0 once the stream is over."""
        ...

    async def send(self, message: Octets) -> None:
        """Queue one message, waiting while more than the high watermark is queued.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: the other side or the network ended it; `ConnectionLost.code` as in `receive`.

        Cancellation:
            nothing was queued.
        """
        ...

    def send_nowait(self, message: Octets) -> None:
        """Queue without waiting, also above the watermark; the caller keeps its own bound. Errors as `send`."""
        ...

    async def wait_for_room(self) -> None:
        """Wait while more than the high watermark is queued, and queue nothing. Errors as `send`.

        With `send_nowait` it is a send whose message is chosen after the wait; `ByteStream.send_all` of no bytes is the same for bytes.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: the peer closed or was lost, and every message that came before was taken. `ConnectionLost.code` is the
                peer's close code; the code with which this side closed, if the peer broke a rule (1009 for a message larger than
                the limit); ``None`` if it was lost without one.
        """
        ...

    def receive_nowait(self) -> bytes | None:
        """Take the next message that has arrived; ``None`` if there is none. It never raises: `receive` has the error."""
        ...

    async def flush(self) -> None:
        """Wait until nothing is queued on this side any more."""
        ...

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        """Send the queue, tell the peer why, and close; messages that have arrived and were not taken are dropped.

        Cancellation:
            closes at once; the queue may be lost.
        """
        ...

    def abort(self) -> None:
        """Close at once and drop the queue."""
        ...

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Stream(ByteStream, Protocol):
    """One stream of a connection: a byte stream that can be given up with a code, in each direction by itself.

    A unidirectional one has one direction only; the other raises `LocalProtocolError`.
    """

    @property
    def stream_id(self) -> int:
        """Number on the wire: QUIC's, also in the memory carrier."""
        ...

    @property
    def initiated_here(self) -> bool:
        """Whether this side opened it."""
        ...

    @property
    def unidirectional(self) -> bool:
        """Whether only the opener sends."""
        ...

    @property
    def early(self) -> bool:
        """Whether bytes received so far came as 0-RTT data, which an attacker may have replayed."""
        ...

    @property
    def priority(self) -> int:
        """0 (first) to 255; equal ones share in turn. May be set at any time, but where there is no sending (`LocalProtocolError`)."""
        ...

    @priority.setter
    def priority(self, value: int) -> None: ...

    @property
    def unacked(self) -> int:
        """Bytes queued or sent that the peer has not acknowledged."""
        ...

    def send_nowait(self, data: Octets, *, fin: bool = False) -> None:
        """Queue without waiting, also above the watermark, and perhaps finish; the caller keeps its own bound.

        Raises:
            ConnectionClosed, ConnectionLost, StreamWasStopped: as `send_all`.
        """
        ...

    def reset(self, code: int) -> None:
        """Give up sending: the queue is dropped, and the peer's `receive_some` raises `StreamWasReset(code)`."""
        ...

    def stop(self, code: int) -> None:
        """Ask the peer to stop sending, and drop all that it has sent. Its `send_all` raises `StreamWasStopped(code)`."""
        ...

    async def stopped(self) -> int | None:
        """Wait until the peer stops this side's sending and return its code; ``None`` once everything was acknowledged."""
        ...

    def on_stopped(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called with the code when the peer stops this side's sending: `stopped` without a task that waits.

        It is called once at most, at once if that has happened already, and never if everything was acknowledged first, if sending was
        given up here, or if the connection ends.  It runs in the carrier's task, so it must be short, and neither wait nor raise.
        One for a stream: another call replaces it.

        Raises:
            LocalProtocolError: a stream that only the peer sends on.
        """
        ...

    async def acked(self) -> bool:
        """Wait until the peer has everything that was sent, the end included; false if it was reset or stopped."""
        ...

    async def all_acked(self) -> None:
        """Wait until the peer has acknowledged all that was sent so far, on a stream that goes on; `ByteStream.flush` is as much as TCP knows.

        Raises:
            ConnectionClosed, ConnectionLost, StreamWasStopped: it never will.
        """
        ...

    def receive_nowait(self) -> bytes | None:
        """Take the bytes that have arrived: ``b""`` if the peer sends no more, ``None`` if there are none yet. Errors as `receive_some`."""
        ...

    @property
    def at_end(self) -> bool:
        """Whether the peer's end has come and everything before it was taken."""
        ...

    @property
    def was_reset(self) -> bool:
        """Whether the next call that takes bytes raises `StreamWasReset`. It takes nothing, so the peer's window stays as it is."""
        ...

    def on_readable(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when there is something to take: bytes, the end, an error. `receive_some` without a task that waits.

        It is called at once if there is something already, and may be called when there is nothing after all.  It runs in the carrier's
        task, so that it must be short, and neither wait nor raise, nor take anything: `receive_nowait` comes later.  Another call
        replaces it.

        Raises:
            LocalProtocolError: a stream that only this side sends on.
        """
        ...


@attrs.frozen
class Datagram:
    """An unreliable message as it arrived."""

    data: bytes
    early: bool = False
    """It came as 0-RTT data."""


@runtime_checkable
class Connection(Protocol):
    """Many streams and datagrams between two ends: QUIC, multi-stream memory carrier."""

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end; complete after `handshake`."""
        ...

    @property
    def is_client(self) -> bool:
        """Whether this side dialled."""
        ...

    async def handshake(self) -> CarrierInfo:
        """Wait until the handshake is complete: the peer is who it says, early data is accepted or not.

        Raises:
            ConnectionLost: it failed.
        """
        ...

    async def open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> Stream:
        """Open a stream, waiting for the peer's credit. The peer sees it with its first byte, end or reset."""
        ...

    def try_open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> Stream | None:
        """Open a stream if there is credit for it now."""
        ...

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows now; 0 when the connection is over."""
        ...

    def credit(self) -> tuple[int, int]:
        """Return the bytes that this side may send now, and those that the peer may send, on all streams together.

        The window of a single stream may be smaller. Both are 0 when the connection is over.
        """
        ...

    async def accept_stream(self) -> Stream:
        """Wait for the next stream that the peer opened; streams come in the order of their first byte."""
        ...

    def accept_stream_nowait(self) -> Stream | None:
        """Take the next stream that the peer has opened. All streams of one batch are there at once.

        ``None`` if there is none. It never raises: `accept_stream` has the error.
        """
        ...

    def on_stream(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when `accept_stream_nowait` has a stream, instead of waiting in `accept_stream`.

        It is called in the task that moves the bytes, so it must be quick and must not raise. It is called at once if streams are waiting.
        A later call of `on_stream` replaces it, and the end of the connection releases it.
        """
        ...

    def on_batch(self, tell: Callable[[], None]) -> None:
        """Have `tell` called after each batch of input, behind all `on_readable` and `on_stream` of the batch.

        It is called in the task that moves the bytes, so it must be quick and must not raise. What it sends may go out with the batch's
        own output. A carrier that reads one stream at a time never calls it. A later call of `on_batch` replaces it.
        """
        ...

    def together(self, send: Callable[[], None]) -> None:
        """Call `send`, which sends on several streams, and write all of it together. A carrier may write a lonely call at once."""
        ...

    def round_trip(self) -> float:
        """Estimate of the time to the peer and back, in seconds; 0 while there is none."""
        ...

    def max_datagram_size(self) -> int:
        """Bytes of the largest datagram that fits now; 0 if the peer takes none."""
        ...

    async def send_datagram(self, data: Octets) -> None:
        """Queue a datagram, waiting while the queue is full.

        Raises:
            DatagramTooLarge: more than `max_datagram_size`.
        """
        ...

    def send_datagram_nowait(self, data: Octets) -> bool:
        """Queue a datagram; false if the queue is full."""
        ...

    async def receive_datagram(self) -> Datagram:
        """Wait for a datagram. While no task takes them, the oldest are dropped and counted."""
        ...

    def close(self, code: int = 0, reason: str = "") -> None:
        """Tell the peer that the connection is over, now, and drop the queues."""
        ...

    async def aclose(self, code: int = 0, reason: str = "", *, drain_timeout: float = 5.0) -> None:
        """Wait up to `drain_timeout` seconds until the peer has received the finished streams, then close."""
        ...

    async def wait_closed(self) -> CloseReason:
        """Wait for the end, however it comes."""
        ...

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


S_co = TypeVar("S_co", covariant=True)


@runtime_checkable
class Listener(Protocol[S_co]):
    """Accepts byte streams, message streams or connections."""

    @property
    def url(self) -> str:
        """Where it listens, with the real port."""
        ...

    async def accept(self) -> S_co:
        """Wait for the next peer, its handshake done. A peer that fails its handshake, or is slow, disturbs no other.

        QUIC hands over an `Incoming` before the handshake instead, so that it can be refused cheaply.
        """
        ...

    async def aclose(self) -> None:
        """Stop accepting; accepted connections live on."""
        ...


@runtime_checkable
class Incoming(Protocol):
    """A peer that asks for a connection."""

    @property
    def peer(self) -> str:
        """Its address."""
        ...

    @property
    def validated(self) -> bool:
        """Whether it has shown that it receives at this address (by a token)."""
        ...

    def accept(self) -> Connection:
        """Begin the handshake; see `Connection.handshake`."""
        ...

    def refuse(self, why: str = ...) -> None:
        """Close it at once, so that the peer knows; `why` is for this side's log only."""
        ...

    def retry(self) -> None:
        """Make it prove its address first; it comes back as another `Incoming`."""
        ...

    def ignore(self) -> None:
        """Forget it and answer nothing."""
        ...
