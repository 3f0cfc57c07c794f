"""QMux version 1 (draft 02): QUIC's streams and datagrams over an ordered byte stream or a WebSocket."""

from __future__ import annotations

from .codes import TransportError, error_name
from .config import QmuxConfig
from .core import QmuxCore
from .events import (
    DatagramReceived,
    DatagramRoom,
    Ended,
    Established,
    Event,
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

__all__ = [
    "DatagramReceived", "DatagramRoom", "Ended", "Established", "Event", "Parameters", "QmuxConfig", "QmuxCore",
    "StreamAcked", "StreamData", "StreamFlushed", "StreamOpened", "StreamOver", "StreamReset", "StreamRoom",
    "StreamStopped", "StreamsAllowed", "TransportError", "error_name",
]  # fmt: skip
