"""The contracts that every carrier keeps: byte streams, message streams, and connections of many streams.

The rules of this file:

* A carrier moves bytes and does not know the protocol above it.  Each of the three shapes below is a `typing.Protocol`; `check_carrier`
  in `levada.transports.testing` checks their promises for any implementation.
* **Closed** means that this program ended it (`ConnectionClosed`); **lost** means that the peer, the network or the system did
  (`ConnectionLost`, `IdleTimeout`, `StreamWasReset`, `StreamWasStopped`).  Errors are sticky: the next call raises the same error.
* Sending returns when the bytes are queued below a watermark, not when they have arrived, so small writes are joined.  The queue
  is bounded, and a receiver that takes nothing stops the sender after one window.
* Every await may be cancelled.  A cancelled `send_all` has queued all of its bytes or none.  A cancelled `receive_some` has taken nothing.
* Sending and receiving are independent directions, for one task each; a second task gets `trio.BusyResourceError`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

import attrs

from levada.framework.text import printable

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
    """This side's address as in a URL's authority, or the path of a Unix socket."""
    peer: str
    """The peer's address, in the same form; for a Unix socket ``pid=… uid=… gid=…`` if the system tells."""
    alpn: str | None = None
    """Application protocol negotiated by TLS; for QMux over a WebSocket, the subprotocol."""
    tls_version: str | None = None
    """``"TLSv1.3"``, …; ``None`` without TLS."""
    peer_certificate: bytes | None = None
    """The peer's certificate in DER, if the peer showed one and it was verified."""
    peer_subject: str | None = None
    """Subject of that certificate, as in ``"CN=web-01,O=Example"``, escaped as RFC 4514 says."""
    peer_names: tuple[str, ...] = ()
    """Subject alternative names of that certificate, as in ``"DNS:web-01"``, ``"URI:…"``, ``"email:…"`` or ``"IP Address:192.0.2.1"``."""
    server_name: str | None = None
    """Host name that the client asked for (SNI)."""
    resumed: bool = False
    """Whether TLS has resumed an earlier session."""
    early_data_accepted: bool | None = None
    """Whether the server has accepted QUIC's 0-RTT data; ``None`` if there was none."""
    channel_binding: bytes | None = attrs.field(default=None, repr=False)
    """32 bytes that only the two ends of this connection share (``tls-exporter`` of RFC 9266); QUIC only."""
    peer_credentials: tuple[int, int, int] | None = None
    """(pid, uid, gid) of the process at the other end of a Unix socket."""


@attrs.frozen(kw_only=True)
class CarrierStatistics:
    """Counters of one connection or stream; a snapshot."""

    bytes_sent: int
    bytes_received: int
    writes: int
    """Calls to the operating system (or packets) that carried the bytes sent."""
    reads: int
    unsent: int
    """Bytes queued and not handed on yet."""
    datagrams_dropped: int = 0
    """Datagrams that a connection dropped because no task took them."""

    def __add__(self, other: CarrierStatistics) -> CarrierStatistics:
        """Return the sums of the counters."""
        mine, theirs = attrs.astuple(self), attrs.astuple(other)
        names = (field.name for field in attrs.fields(CarrierStatistics))
        return CarrierStatistics(**dict(zip(names, map(sum, zip(mine, theirs, strict=True)), strict=True)))


@attrs.frozen
class CloseReason:
    """How a connection ended."""

    code: int
    """The application's code; 0 is an orderly end. Without codes, a carrier gives 0 for closed and 1 for lost."""
    text: str = attrs.field(default="", converter=printable)
    """The reason in words, made printable."""
    by_peer: bool = False
    """Whether the peer ended it."""
    lost: bool = False
    """Whether the connection failed and was not closed: idle timeout, network, reset, broken rule, failed handshake."""

    def __str__(self) -> str:
        if self.lost:
            return self.text or "lost"
        who = "the peer" if self.by_peer else "this side"
        return f"{who} closed it with code {self.code}{f': {self.text}' if self.text else ''}"


class _Carrier(Protocol):
    """What the three shapes have in common. Leaving their block closes them."""

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end; for a connection complete after `Connection.handshake`."""
        ...

    def statistics(self) -> CarrierStatistics:
        """Return the counters as they are now."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


@runtime_checkable
class ByteStream(_Carrier, Protocol):
    """A reliable, ordered stream of bytes each way: TCP, TLS, Unix socket, memory pipe, one QUIC stream."""

    @property
    def unsent(self) -> int:
        """Bytes queued and not yet handed on; 0 once the stream is over."""
        ...

    async def send_all(self, data: Octets) -> None:
        """Queue all of `data`, waiting while more than the high watermark is queued.

        Raises:
            ConnectionClosed: this side closed, or `send_eof` was called.
            ConnectionLost: the other side or the network ended the stream (`StreamWasStopped` on a stream of a connection).
        """
        ...

    def send_nowait(self, data: Octets) -> None:
        """Queue without waiting, also above the watermark; the caller keeps its own bound. Errors as `send_all`.

        `send_all(b"")` waits for room and queues nothing. So `send_all(b"")` and then `send_nowait` lets you choose the bytes after the wait.
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
            NotImplementedError: the carrier has no half-close. Among levada's carriers this is only TLS, which sends close_notify when both
                directions close. Use `aclose` instead.
        """
        ...

    async def flush(self) -> None:
        """Wait until nothing is queued on this side any more. Errors as `send_all`."""
        ...

    async def aclose(self) -> None:
        """Close both directions. The queue is sent first, within the time that the carrier's settings allow.

        Cancellation:
            the stream is closed at once; the queue may be lost.
        """
        ...

    def abort(self) -> None:
        """Close at once and drop the queue. The peer sees a loss, if the carrier can express one."""
        ...


@runtime_checkable
class MessageStream(_Carrier, Protocol):
    """A reliable, ordered stream of whole messages each way: WebSocket, or the memory carrier with ``shape="messages"``."""

    @property
    def unsent(self) -> int:
        """Bytes queued and not handed on yet, framing included; 0 once the stream is over."""
        ...

    async def send(self, message: Octets) -> None:
        """Queue one message, waiting while more than the high watermark is queued.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: the other side or the network ended the stream; `ConnectionLost.code` as in `receive`.

        Cancellation:
            nothing was queued.
        """
        ...

    def send_nowait(self, message: Octets) -> None:
        """Queue without waiting, also above the watermark; the caller keeps its own bound. Errors as `send`."""
        ...

    async def wait_for_room(self) -> None:
        """Wait while more than the high watermark is queued, and queue nothing. Errors as `send`.

        Call it before `send_nowait` to choose the message after the wait.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            ConnectionClosed: this side closed.
            ConnectionLost: the peer closed or was lost, and every message that came before was taken. `ConnectionLost.code` is the
                peer's close code, or the code with which this side closed because the peer broke a rule (1009 for a message larger
                than the limit), or ``None``.

        Cancellation:
            no message was taken.
        """
        ...

    def receive_nowait(self) -> bytes | None:
        """Take the next message that has arrived; ``None`` if there is none. It never raises: `receive` raises the error."""
        ...

    async def flush(self) -> None:
        """Wait until nothing is queued on this side any more."""
        ...

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        """Send the queue, then the code and the reason, and close. Messages that have arrived and were not taken are dropped.

        Cancellation:
            the stream is closed at once; the queue may be lost.
        """
        ...

    def abort(self) -> None:
        """Close at once and drop the queue."""
        ...


@runtime_checkable
class Stream(ByteStream, Protocol):
    """One stream of a connection: a byte stream whose directions can each be given up with a code.

    A unidirectional stream has only one direction; calls for the other raise `LocalProtocolError`.
    """

    @property
    def stream_id(self) -> int:
        """Number on the wire, counted as in QUIC, also in the memory carrier."""
        ...

    @property
    def initiated_here(self) -> bool:
        """Whether this side opened the stream."""
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
        """0 (first) to 255; streams with equal priority take turns. Setting it on a stream that is only received on raises `LocalProtocolError`."""
        ...

    @priority.setter
    def priority(self, value: int) -> None: ...

    @property
    def unacked(self) -> int:
        """Bytes queued or sent that the peer has not acknowledged."""
        ...

    def send_nowait(self, data: Octets, *, fin: bool = False) -> None:
        """Queue without waiting, also above the watermark, and end this direction if `fin`; the caller keeps its own bound.

        Raises:
            ConnectionClosed, ConnectionLost, StreamWasStopped: as `send_all`.
        """
        ...

    def reset(self, code: int) -> None:
        """Give up sending: the queue is dropped, and the peer's `receive_some` raises `StreamWasReset` with this code."""
        ...

    def stop(self, code: int) -> None:
        """Ask the peer to stop sending, and drop its data. The peer's `send_all` raises `StreamWasStopped` with this code."""
        ...

    async def stopped(self) -> int | None:
        """Wait until the peer stops this side's sending, and return its code; ``None`` once everything is acknowledged, or reset here."""
        ...

    def on_stopped(self, tell: Callable[[int, int], None]) -> None:
        """Call ``tell(stream_id, code)`` when the peer stops this side's sending, as `stopped` without a waiting task.

        It is called at most once: at once if the peer has stopped it already, and never if everything was acknowledged first, if sending
        was given up here, or if the connection ends.  It runs in the carrier's task, so it must be short and must not raise.
        Another call replaces it.  The stream releases it when it can no longer be called.

        Raises:
            LocalProtocolError: only the peer sends on this stream.
        """
        ...

    async def acked(self) -> bool:
        """Wait until the peer has everything that was sent, including the end; false if the stream was reset or stopped.

        Raises:
            ConnectionClosed, ConnectionLost: the connection ended first.
        """
        ...

    async def all_acked(self) -> None:
        """Wait until the peer has acknowledged everything sent so far, while the stream stays open.

        Raises:
            ConnectionClosed, ConnectionLost, StreamWasStopped: it never will.
        """
        ...

    def receive_nowait(self) -> bytes | None:
        """Take all bytes that have arrived: ``b""`` if the peer sends no more, ``None`` if there are none yet. Errors as `receive_some`."""
        ...

    @property
    def at_end(self) -> bool:
        """Whether the peer's end has come and everything before it was taken."""
        ...

    @property
    def was_reset(self) -> bool:
        """Whether the next call that takes bytes will raise `StreamWasReset`. Asking does not change the peer's window."""
        ...

    def on_readable(self, tell: Callable[[int], None]) -> None:
        """Call ``tell(stream_id)`` when there is something to take (bytes, the end, an error), as `receive_some` without a waiting task.

        It is called at once if there is something already, and is sometimes called when there is nothing.  It runs in the carrier's task,
        so it must be short and must not raise, and must not itself call `receive_nowait`.  Another call replaces it.  The stream releases it
        after the end or an error.

        Raises:
            LocalProtocolError: only this side sends on this stream.
        """
        ...


@attrs.frozen
class Datagram:
    """An unreliable message that has arrived."""

    data: bytes
    early: bool = False
    """Whether it came as 0-RTT data, which may be a replay."""


@runtime_checkable
class Connection(_Carrier, Protocol):
    """Many streams and datagrams between two ends: QUIC, QMux, or the memory carrier with ``shape="connection"``."""

    @property
    def is_client(self) -> bool:
        """Whether this side dialled."""
        ...

    async def handshake(self) -> CarrierInfo:
        """Wait until the handshake is complete: the peer is authenticated, and it is known whether early data was accepted.

        Raises:
            ConnectionClosed: this side closed the connection before the handshake was complete.
            ConnectionLost: the handshake failed.
        """
        ...

    async def open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> Stream:
        """Open a stream, waiting for the peer's credit. The peer sees it with its first byte, end or reset.

        Raises:
            ConnectionClosed, ConnectionLost: the connection has ended.
            ValueError: the priority is not between 0 and 255.

        Cancellation:
            no stream was opened.
        """
        ...

    def try_open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> Stream | None:
        """Open a stream if there is credit for it now; otherwise return ``None``. Errors as `open_stream`."""
        ...

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows now; 0 after the end of the connection."""
        ...

    def credit(self) -> tuple[int, int]:
        """Return the bytes that this side may send now, and those that the peer may send, on all streams together.

        The window of a single stream may be smaller. Both are 0 when the connection is over.
        """
        ...

    async def accept_stream(self) -> Stream:
        """Wait for the next stream that the peer opened. Streams come in the order in which their first byte, end or reset arrived.

        Raises:
            ConnectionClosed, ConnectionLost: the connection has ended; after a loss, streams that came before are returned first.

        Cancellation:
            no stream was taken.
        """
        ...

    def accept_stream_nowait(self) -> Stream | None:
        """Take the next stream that the peer has opened; ``None`` if there is none. It never raises: `accept_stream` raises the error.

        After `accept_stream` has returned, it finds all other streams that arrived together with that one.
        """
        ...

    def on_stream(self, tell: Callable[[], None]) -> None:
        """Call `tell` when `accept_stream_nowait` has a stream, instead of waiting in `accept_stream`.

        It is called in the task that moves the bytes, so it must be quick and must not raise. It is called at once if streams are waiting.
        A later call of `on_stream` replaces it, and the end of the connection releases it.
        """
        ...

    def on_batch(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each batch of input, after the callbacks of `on_readable` and `on_stream` for the batch.

        It is called in the task that moves the bytes, so it must be quick and must not raise. What it sends may go out with the batch's
        own output. A carrier that reads one stream at a time never calls it. A later call of `on_batch` replaces it.
        """
        ...

    def together(self, send: Callable[[], None]) -> None:
        """Call `send`, which sends on several streams, and write their output together. Otherwise a carrier may write each call at once.

        An error of `send` is raised after the output was written.
        """
        ...

    def round_trip(self) -> float:
        """Return an estimate of the round-trip time in seconds; 0 while there is none."""
        ...

    def max_datagram_size(self) -> int:
        """Return the size in bytes of the largest datagram that fits now; 0 if the peer takes none."""
        ...

    async def send_datagram(self, data: Octets) -> None:
        """Queue a datagram, waiting while the queue is full.

        Raises:
            DatagramTooLarge: more than `max_datagram_size`.
            ConnectionClosed, ConnectionLost: the connection has ended.

        Cancellation:
            nothing was queued.
        """
        ...

    def send_datagram_nowait(self, data: Octets) -> bool:
        """Queue a datagram, and return whether there was room. Errors as `send_datagram`."""
        ...

    async def receive_datagram(self) -> Datagram:
        """Wait for a datagram. While no task takes them, the oldest are dropped and counted.

        Raises:
            ConnectionClosed, ConnectionLost: the connection has ended; after a loss, datagrams that came before are returned first.

        Cancellation:
            no datagram was taken.
        """
        ...

    def close(self, code: int = 0, reason: str = "") -> None:
        """Close the connection at once, tell the peer, and drop the queues. After the end this does nothing."""
        ...

    async def aclose(self, code: int = 0, reason: str = "", *, drain_timeout: float = 5.0) -> None:
        """Wait up to `drain_timeout` seconds until the peer has received the finished streams, then close.

        Cancellation:
            the connection is closed at once; data that the peer has not received may be lost.
        """
        ...

    async def wait_closed(self) -> CloseReason:
        """Wait for the end of the connection, and return its reason."""
        ...


S_co = TypeVar("S_co", covariant=True)


@runtime_checkable
class Listener(Protocol[S_co]):
    """Accepts byte streams, message streams or connections."""

    @property
    def url(self) -> str:
        """The URL at which it listens, with the real port."""
        ...

    async def accept(self) -> S_co:
        """Wait for the next peer whose handshake is complete. A peer that fails its handshake, or is slow, does not delay others.

        QUIC returns an `Incoming` before the handshake instead, so that it can be refused cheaply.

        Raises:
            ConnectionClosed: the listener was closed.

        Cancellation:
            no peer was taken.
        """
        ...

    async def aclose(self) -> None:
        """Stop accepting. Accepted connections stay open."""
        ...


@runtime_checkable
class Incoming(Protocol):
    """A peer that asks for a connection."""

    @property
    def peer(self) -> str:
        """The peer's address."""
        ...

    @property
    def validated(self) -> bool:
        """Whether the peer has proved that it receives at this address."""
        ...

    def accept(self) -> Connection:
        """Begin the handshake, for which `Connection.handshake` waits."""
        ...

    def refuse(self, why: str = ...) -> None:
        """Refuse the peer, and tell it. `why` appears only in this side's log."""
        ...

    def retry(self) -> None:
        """Make the peer prove its address first. Then it comes as another `Incoming`."""
        ...

    def ignore(self) -> None:
        """Drop the peer without an answer, if the carrier can."""
        ...
