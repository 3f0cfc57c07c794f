"""Lumberjack, the protocol of log shippers: `serve` receives logs, `connect` sends them, `tail` follows files.

The rules of the protocol are in `levada.transports.lumberjack`; this package has the actors that run them.
"""

from __future__ import annotations

from levada.transports.lumberjack import EventRejected, ReaderConfig, WriterConfig

from .balance import HostConfig
from .disk_spool import SpoolConfig
from .load import ReaderStatistics
from .logging_handler import LumberjackHandler
from .reader import Reader, serve
from .spool import SpoolSink
from .tail import Deliver, Tail, TailConfig, TailStatus, tail
from .unit import Origin, Sink, Unit
from .writer import Writer, WriterStatistics, connect, relay
from .writer_queue import EventsDropped

__all__ = [
    "Deliver", "EventRejected", "EventsDropped", "HostConfig", "LumberjackHandler", "Origin", "Reader", "ReaderConfig", "ReaderStatistics",
    "Sink", "SpoolConfig", "SpoolSink", "Tail", "TailConfig", "TailStatus", "Unit", "Writer", "WriterConfig", "WriterStatistics", "connect",
    "relay", "serve", "tail",
]  # fmt: skip
