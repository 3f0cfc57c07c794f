"""Each core satisfies the contract of `levada.transports.core`; read by mypy and pyright in `run.py check`, never run."""

from __future__ import annotations

from levada.transports.core import BytesInput, Core, MessagesInput, StreamsInput
from levada.transports.lumberjack import ReaderCore, ReaderEvent, WriterCore, WriterEvent
from levada.transports.maop import Event as MaopEvent
from levada.transports.maop import MaopCore, Output
from levada.transports.qmux import Event as QmuxEvent
from levada.transports.qmux import QmuxCore
from levada.transports.reactivesocket import ReactiveSocketCore
from levada.transports.rsocket import RSocketCore
from levada.transports.rsocket.events import Event as RSocketEvent


def rsocket(
    core: RSocketCore,
) -> tuple[Core[RSocketEvent, bytes], BytesInput[RSocketEvent], MessagesInput[RSocketEvent]]:
    return core, core, core


def reactivesocket(
    core: ReactiveSocketCore,
) -> tuple[Core[RSocketEvent, bytes], BytesInput[RSocketEvent], MessagesInput[RSocketEvent]]:
    return core, core, core


def lumberjack_reader(core: ReaderCore) -> tuple[Core[ReaderEvent, bytes], BytesInput[ReaderEvent]]:
    return core, core


def lumberjack_writer(core: WriterCore) -> tuple[Core[WriterEvent, bytes], BytesInput[WriterEvent]]:
    return core, core


def maop(core: MaopCore) -> tuple[Core[MaopEvent, Output], StreamsInput[MaopEvent]]:
    return core, core


def qmux(core: QmuxCore) -> tuple[Core[QmuxEvent, bytes], BytesInput[QmuxEvent], MessagesInput[QmuxEvent]]:
    return core, core, core
