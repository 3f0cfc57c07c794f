"""One QMux connection without I/O: bytes in, events out; calls in, bytes out.

The owner works in turns:

1. Pass in the input: `receive_data` (byte streams) or `receive_message` (WebSocket), `handle_timeout`. Use `open_stream`, `send` and so on.
2. Act on the events. Each input returns them; other calls, `data_to_send` among them, leave theirs for `take_events`.
3. While the carrier below takes bytes, write what `data_to_send(now)` returns. Sleep until `next_deadline`.

Queues, flow control and priorities are the core's. Received bytes leave it at once, as events; the owner buffers them, bounded by the
windows, and says with `consumed` what the application has taken.

After `Ended` the owner writes the last output, shuts down its sending side, reads and drops until the peer's end, for
`QmuxConfig.close_timeout` at most, and closes. Source: QX-36, QX-37.
"""

from __future__ import annotations

from .codes import TransportError
from .config import QmuxConfig
from .events import Event
from .frames import Parameters

__all__ = ["QmuxCore"]


class QmuxCore:
    """One side of a connection; a `levada.transports.core.Core` with `BytesInput` and `MessagesInput`.

    Args:
        client: whether this side dialled.
        now: the current time; the peer has `QmuxConfig.handshake_timeout` from here.
        config: windows, limits and time-outs.
        framed: whether the carrier keeps boundaries: a message is a record without its Size. Source: QX-41.
    """

    def __init__(self, *, client: bool, now: float, config: QmuxConfig | None = None, framed: bool = False) -> None:
        self.client = client
        self.config = config or QmuxConfig()
        self.peer_parameters: Parameters | None = None
        """The peer's parameters, once they have come."""
        self.round_trip = 0.0
        """Seconds of the last ping to the peer and back; 0 until the first."""

    @property
    def ended(self) -> bool:
        """Whether `Ended` was emitted."""
        raise NotImplementedError

    @property
    def max_datagram_size(self) -> int:
        """Bytes of the largest datagram that the peer takes; 0 before `Established`, or if it takes none. Source: QX-19."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Bytes queued on all streams and in datagrams."""
        raise NotImplementedError

    @property
    def has_output(self) -> bool:
        """Whether `data_to_send` has something to return now. Owners ask before each write, so it is a few comparisons."""
        raise NotImplementedError

    def take_events(self) -> list[Event]:
        """Return the events that calls of the owner left behind; each is returned once."""
        raise NotImplementedError

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes, cut anywhere; `b""` means the peer sends no more. Return the events."""
        raise NotImplementedError

    def receive_message(self, message: bytes, now: float) -> list[Event]:
        """Take one message, which is one record without its Size. Return the events. Source: QX-41."""
        raise NotImplementedError

    def data_to_send(self, now: float, budget: int = 65_536) -> list[bytes]:
        """Take records, most urgent first, until about `budget` bytes. Call it only when the carrier takes bytes. Source: QX-33.

        Returns:
            for a byte stream one piece with all records, for messages a piece for each record; empty if there is nothing.
        """
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due; `None` if never."""
        raise NotImplementedError

    def handle_timeout(self, now: float) -> list[Event]:
        """Do the work that is due. A call too early or too often does nothing."""
        raise NotImplementedError

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """Note that the carrier below broke."""
        raise NotImplementedError

    def drain(self, now: float) -> list[Event]:
        """Open no more streams; close with code 0 once the peer has everything queued, after `QmuxConfig.drain` seconds at the latest."""
        raise NotImplementedError

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """Drop what is queued and tell the peer the application's code. Source: QX-36."""
        raise NotImplementedError

    def fail(self, code: TransportError, reason: str, now: float) -> list[Event]:
        """Close because the peer broke a rule that the owner checks, such as a text message on a WebSocket (E-10)."""
        raise NotImplementedError

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows now; 0 once the connection drains or has ended."""
        raise NotImplementedError

    def open_stream(self, *, unidirectional: bool = False, priority: int = 128) -> int | None:
        """Open a stream; the peer sees it with its first byte, end or reset.

        Args:
            unidirectional: whether only this side sends.
            priority: 0 (first) to 255.

        Returns:
            its number, or `None` without credit; `StreamsAllowed` tells when there is some.
        """
        raise NotImplementedError

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        """Queue bytes on a stream, and perhaps its end. No bytes without the end do nothing.

        Raises:
            LocalProtocolError: the stream is over, was finished or reset, or only the peer sends on it.
        """
        raise NotImplementedError

    def reset(self, stream_id: int, code: int) -> None:
        """Give up sending: drop the queue, send RESET_STREAM. It does nothing once the end was written, or after a reset.

        Raises:
            LocalProtocolError: only the peer sends on this stream, or the code is not a number of 62 bits.
        """
        raise NotImplementedError

    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to stop sending; no more data of the stream becomes an event, and the credit of what was not taken is given back.

        It does nothing once everything was taken, or after a reset. `StreamReset` still comes, as the peer's answer. Source: QX-25.

        Raises:
            LocalProtocolError: only this side sends on this stream, or the code is not a number of 62 bits.
        """
        raise NotImplementedError

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Change the priority of what is queued and of what follows: 0 (first) to 255."""
        raise NotImplementedError

    def consumed(self, stream_id: int, octets: int) -> None:
        """Note that the application took bytes of `StreamData`: windows grow. For a stream that was stopped or reset it does nothing.

        A stream is over, and counts no more against the peer's limit, once all of it was taken and the end of this side was written.
        """
        raise NotImplementedError

    def accepted(self, stream_id: int) -> None:
        """Note that the application has taken a stream of the peer.

        A stream counts against the peer's limit until it is over and accepted. So a peer cannot pile up streams, however short, at an
        application that accepts none.
        """
        raise NotImplementedError

    def unsent(self, stream_id: int) -> int:
        """Return the bytes queued on a stream and not written."""
        raise NotImplementedError

    def want_flushed(self, stream_id: int) -> None:
        """Ask for `StreamFlushed` once everything that is queued on a stream now, its end included, is written.

        It comes at once if nothing is queued. It never comes if the stream is reset or stopped first.
        """
        raise NotImplementedError

    def want_acked(self, stream_id: int) -> None:
        """Ask for `StreamAcked` once the peer has everything that is queued on a stream now, its end included. Source: D-23.

        A ping is written after it; the answer proves that the peer has handled all before it. One ping is under way at a time. The stream
        may be over. Ask again only after the event. It never comes if the stream is reset or stopped before everything was written.
        """
        raise NotImplementedError

    def send_datagram(self, data: bytes | bytearray | memoryview) -> bool:
        """Queue a datagram; false if the queue is full.

        Raises:
            LocalProtocolError: it is larger than `max_datagram_size`.
        """
        raise NotImplementedError
