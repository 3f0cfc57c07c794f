"""Lumberjack versions 1 and 2, the protocol between log shippers and log receivers, without I/O.

`ReaderCore` receives events and acknowledges them. `WriterCore` sends the events of a `SendQueue`.
"""

from __future__ import annotations

from levada.transports.lumberjack.config import ReaderConfig, WriterConfig
from levada.transports.lumberjack.core import ReaderCore
from levada.transports.lumberjack.events import (
    AckTimedOut,
    Batch,
    BatchDone,
    EventsAcked,
    Finished,
    KeepaliveReceived,
    PeerClosed,
    ReaderEvent,
    Refused,
    UnitReady,
    WriterEvent,
)
from levada.transports.lumberjack.frames import (
    EventRejected,
    encode_ack,
    encode_data,
    encode_envelope,
    encode_event,
    encode_json,
    encode_text,
    encode_window,
    flatten,
)
from levada.transports.lumberjack.state import ReaderState, WriterState
from levada.transports.lumberjack.writer import SendQueue, WriterCore

__all__ = [
    "AckTimedOut", "Batch", "BatchDone", "EventRejected", "EventsAcked", "Finished", "KeepaliveReceived", "PeerClosed", "ReaderConfig",
    "ReaderCore", "ReaderEvent", "ReaderState", "Refused", "SendQueue", "UnitReady", "WriterConfig", "WriterCore", "WriterEvent",
    "WriterState", "encode_ack", "encode_data", "encode_envelope", "encode_event", "encode_json", "encode_text", "encode_window",
    "flatten",
]  # fmt: skip
