"""Aqueduct 0.0.0-AFTER, without I/O: typed channels inside messages, over QUIC, with exact loss semantics.

`AqueductCore` is one side of a connection. It refers to streams by number; its owner opens, writes and resets them. `SenderHalf` and
`ReceiverHalf` are the channels. ``docs/protocols/aqueduct.md`` has every decision, and the rules with their tests.

Example:
    A client and a server are wired to each other by hand. The client attaches a sender, and the answer comes back on it.

    >>> def pump() -> None:
    ...     for one, other in (client, server), (server, client), (client, server), (server, client):
    ...         for out in one.data_to_send(0.0):
    ...             if isinstance(out, StreamData):
    ...                 other.receive_stream_data(out.stream_id, out.data, out.fin, 0.0)
    >>> client, server = AqueductCore(client=True), AqueductCore(client=False)
    >>> events = [core.handshake_completed(1170) for core in (client, server)]
    >>> pump()
    >>> server.accept((("greeting", b"hello"),))
    >>> pump()
    >>> client.peer_headers
    (('greeting', b'hello'),)
    >>> (answers,) = client.entrypoint.send(b"question", [Attach.SENDER])
    >>> pump()
    >>> message = server.entrypoint.take()
    >>> message.payload
    b'question'
    >>> message.attachments[0].send(b"answer")
    ()
    >>> pump()
    >>> answers.take().payload
    b'answer'
"""

from __future__ import annotations

from levada.transports.core import OpenStream, ResetStream, StopStream, StreamData

from .codes import PROTOCOL_ERRORS, CloseCode, LimitExceeded, ResetCode
from .config import AqueductConfig
from .core import AqueductCore
from .events import (
    CloseConnection,
    ConnectionEnded,
    Ended,
    Event,
    HeadersReceived,
    Output,
    Reached,
    Readable,
    Settled,
    StreamUnblocked,
    Writable,
)
from .frames import ALPN, QMUX_ALPN, Attach, Frame, FrameType, Headers, Incomplete, decode_frame
from .receiver import Delivery, ReceiverHalf
from .sender import SenderHalf
from .state import ConnectionState, Mode, ReceiverState, SenderState
from .streams import DatagramData, StreamDone

__all__ = [
    "ALPN", "PROTOCOL_ERRORS", "QMUX_ALPN", "AqueductConfig", "AqueductCore", "Attach", "CloseCode", "CloseConnection",
    "ConnectionEnded", "ConnectionState", "DatagramData", "Delivery", "Ended", "Event", "Frame", "FrameType", "Headers",
    "HeadersReceived", "Incomplete", "LimitExceeded", "Mode", "OpenStream", "Output", "Reached", "Readable",
    "ReceiverHalf", "ReceiverState", "ResetCode", "ResetStream", "SenderHalf", "SenderState", "Settled", "StopStream",
    "StreamData", "StreamDone", "StreamUnblocked", "Writable", "decode_frame",
]  # fmt: skip
