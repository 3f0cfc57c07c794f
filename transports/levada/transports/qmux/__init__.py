"""QMux version 1 (draft 02): QUIC's streams and datagrams over an ordered byte stream or a WebSocket.

::

    async with listen("qmux+unix:///run/desk.socket") as listener:
        incoming = await listener.accept()
        async with incoming.accept() as connection:
            stream = await connection.accept_stream()

    async with dial("qmux+unix:///run/desk.socket") as connection:
        stream = await connection.open_stream()
        await stream.send_all(b"hello")

`QmuxCore` is the protocol without I/O. ``docs/reference/carriers.md`` says what the carrier can and cannot do.
"""

from __future__ import annotations

from .codes import TransportError, error_name
from .config import QmuxConfig
from .connection import QmuxConnection, QmuxStream
from .core import QmuxCore
from .entry import dial, dial_over, listen, listen_over
from .events import (
    DatagramReceived,
    DatagramRoom,
    Ended,
    Established,
    Event,
    QueueRoom,
    StreamAcked,
    StreamData,
    StreamFlushed,
    StreamOpened,
    StreamOver,
    StreamReset,
    StreamRoom,
    StreamsAllowed,
    StreamStopped,
)
from .frames import Parameters
from .listener import QmuxIncoming, QmuxListener

__all__ = [
    "DatagramReceived", "DatagramRoom", "Ended", "Established", "Event", "Parameters", "QmuxConfig", "QmuxConnection",
    "QmuxCore", "QmuxIncoming", "QmuxListener", "QmuxStream", "QueueRoom", "StreamAcked", "StreamData", "StreamFlushed",
    "StreamOpened", "StreamOver", "StreamReset", "StreamRoom", "StreamStopped", "StreamsAllowed", "TransportError", "dial",
    "dial_over", "error_name", "listen", "listen_over",
]  # fmt: skip
