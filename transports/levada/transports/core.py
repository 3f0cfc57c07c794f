"""The contract of protocol cores: what a connection calls, whatever the protocol.

A core is one side of one connection without I/O. It owns no socket, task or clock. Its owner gives it what arrived and the
current time, applies the events it returns, and sends what it has queued::

    for event in core.receive_data(data, now):
        apply(event)
    carrier.send_nowait(b"".join(core.data_to_send(now)))
    deadline = core.next_deadline()

`Core` is the part that every protocol shares. What arrives depends on the carrier, so each core also satisfies one of three input
protocols: `BytesInput`, `MessagesInput` or `StreamsInput`.

Every method that takes input returns the events it caused, after those that earlier calls left behind; `Core.take_events` returns
only the latter. So each event is returned exactly once, and in order.

The peer's mistakes never raise: the core queues the goodbye that the protocol has for them, and its last event names the mistake.
The caller's mistakes raise `LocalProtocolError` and change nothing.

A core ends once. Its last event says how. After it the core ignores input, has no deadline and queues nothing new; its queue
may still be sent.

`now` is in seconds on any clock that does not go backwards, the same clock for all calls.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

import attrs

__all__ = [
    "MAX_CONNECTIONS", "BytesInput", "Core", "MessagesInput", "OpenStream", "ResetStream", "StopStream", "StreamData",
    "StreamsInput",
]  # fmt: skip

E = TypeVar("E")
"""The events of the protocol."""
Out = TypeVar("Out")
"""What goes out: `bytes`, or the actions on streams of a carrier with many."""

MAX_CONNECTIONS: Final = 1_024
"""Default of `max_connections` in every listener. It is the number of files that a process may open on most systems, so a server that is to
have more clients over TCP needs a higher limit from the system as well (``ulimit -n``)."""


class Core(Protocol[E, Out]):
    """One side of a connection without I/O."""

    def take_events(self) -> list[E]:
        """Return the events that calls of the owner left behind; each is returned once."""
        ...

    def data_to_send(self, now: float) -> list[Out]:
        """Take the queued output.

        For a byte stream the pieces are sent one after another; for a carrier of messages each is a message; for a carrier of
        many streams each is an action on a stream.
        """
        ...

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due, as of the last call of any other method; `None` if never."""
        ...

    def handle_timeout(self, now: float) -> list[E]:
        """Do the work that is due. A call too early or too often does nothing."""
        ...

    def connection_lost(self, code: int, reason: str, now: float) -> list[E]:
        """Record that the carrier has ended.

        Args:
            code: the carrier's code for the end; 0 if it has none.
            reason: the carrier's words; may be empty.
            now: the current time.
        """
        ...

    def drain(self, now: float) -> list[E]:
        """Begin no new work, let open work finish within the time that the settings allow, then end.

        A second call changes nothing.
        """
        ...

    def close(self, code: int, reason: str, now: float) -> list[E]:
        """End now: open work fails, and the peer is told if the protocol has words for it.

        Args:
            code: 0 for an orderly end, else an error code of the protocol.
            reason: for the peer; may be empty.
            now: the current time.
        """
        ...


class BytesInput(Protocol[E]):
    """Input from a byte stream."""

    def receive_data(self, data: bytes, now: float) -> list[E]:
        """Take bytes, cut anywhere; `b""` means the peer sends no more."""
        ...


class MessagesInput(Protocol[E]):
    """Input from a carrier that keeps the boundaries of messages."""

    def receive_message(self, message: bytes, now: float) -> list[E]:
        """Take exactly one message."""
        ...


class StreamsInput(Protocol[E]):
    """Input from a carrier with many streams."""

    def receive_stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> list[E]:
        """Take bytes of a stream, cut anywhere.

        Args:
            stream_id: as in QUIC.
            data: may be empty.
            fin: whether they are the last.
            now: the current time.
        """
        ...

    def stream_reset(self, stream_id: int, code: int, now: float) -> list[E]:
        """Record that the peer has reset its direction of a stream: bytes that have not arrived never will."""
        ...

    def stream_stopped(self, stream_id: int, code: int, now: float) -> list[E]:
        """Record that the peer wants no more bytes on a stream."""
        ...

    def receive_datagram(self, data: bytes, now: float) -> list[E]:
        """Take a datagram."""
        ...


@attrs.define
class OpenStream:
    """Open a stream. If streams are opened in the order of these outputs, QUIC gives them the same ids."""

    stream_id: int
    """Number that the core uses for it."""
    unidirectional: bool
    """Whether only this side sends on it."""
    priority: int
    """0 (first) to 255; a lower number counts as 0. Control streams go first, so that they do not queue behind bulk data."""


@attrs.define
class StreamData:
    """Send bytes on a stream, in order; wait for room there without holding up other streams."""

    stream_id: int
    """Number of the stream."""
    data: bytes | memoryview
    """Bytes; may be empty if `fin`."""
    fin: bool
    """Whether these bytes are the last."""


@attrs.define
class ResetStream:
    """Reset this side's direction of a stream, and drop its queued data. After its end this may be ignored."""

    stream_id: int
    """Number of the stream."""
    code: int
    """A code of the protocol."""


@attrs.define
class StopStream:
    """Ask the peer to stop sending on a stream. Later bytes may be passed to the core or dropped; the end must be passed."""

    stream_id: int
    """Number of the stream."""
    code: int
    """A code of the protocol."""
