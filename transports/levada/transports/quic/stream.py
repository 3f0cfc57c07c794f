"""One stream of a QUIC connection."""

from __future__ import annotations

from levada.transports.carriers.connection_stream import ConnectionStream

__all__ = ["QuicStream"]


class QuicStream(ConnectionStream):
    """A `levada.transports.carriers.contracts.Stream`, made by `QuicConnection.open_stream` and `QuicConnection.accept_stream`.

    `send_all` waits while more than `QuicConfig.send_high` bytes are in no packet yet, and while the connection has more than
    `QuicConfig.max_unacked` bytes unacknowledged. The peer may send `QuicConfig.stream_window` bytes beyond what `receive_some` has returned.
    """

    __slots__ = ()
