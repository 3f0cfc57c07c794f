"""Records and frames of QMux, in one direction of its byte stream, from the beginning or from the start of a record.

Over WebSocket a message is a record without its Size, so ``--websocket`` takes the frames of one message.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

import attrs

from levada.transports.qmux.codes import ConnectionFault, error_name
from levada.transports.qmux.frames import Frame, FrameType, Parameters, read_frame, read_int

from . import Line, shown

__all__ = ["HELP", "add_arguments", "explain"]

HELP = "records and frames of one direction of a connection"

_BIDI, _UNI = ("bidirectional", "unidirectional")
_NAMES: Final = {
    FrameType.MAX_STREAMS_BIDI: f"MAX_STREAMS {_BIDI}",
    FrameType.MAX_STREAMS_UNI: f"MAX_STREAMS {_UNI}",
    FrameType.STREAMS_BLOCKED_BIDI: f"STREAMS_BLOCKED {_BIDI}",
    FrameType.STREAMS_BLOCKED_UNI: f"STREAMS_BLOCKED {_UNI}",
    FrameType.TRANSPORT_CLOSE: "CONNECTION_CLOSE of the transport",
    FrameType.APPLICATION_CLOSE: "CONNECTION_CLOSE of the application",
    FrameType.DATAGRAM_LEN: "DATAGRAM",
    FrameType.PARAMETERS: "QX_TRANSPORT_PARAMETERS",
    FrameType.PING: "QX_PING",
    FrameType.PING_ANSWER: "QX_PING answer",
}
_FIELDS: Final = {
    FrameType.RESET_STREAM: ("stream", "code", "final_size"),
    FrameType.RESET_STREAM_AT: ("stream", "code", "final_size", "reliable_size"),
    FrameType.STOP_SENDING: ("stream", "code"),
    FrameType.MAX_STREAM_DATA: ("stream", "maximum"),
    FrameType.STREAM_DATA_BLOCKED: ("stream", "limit"),
    FrameType.MAX_DATA: ("maximum",),
    FrameType.MAX_STREAMS_BIDI: ("maximum",),
    FrameType.MAX_STREAMS_UNI: ("maximum",),
    FrameType.DATA_BLOCKED: ("limit",),
    FrameType.STREAMS_BLOCKED_BIDI: ("limit",),
    FrameType.STREAMS_BLOCKED_UNI: ("limit",),
    FrameType.PING: ("number",),
    FrameType.PING_ANSWER: ("number",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--websocket``, the form of records."""
    parser.add_argument(
        "--websocket", action="store_true", help="the capture is one message, which is a record without its Size"
    )


def explain(data: bytes, args: argparse.Namespace) -> Iterator[Line]:
    """Explain records and, below each, its frames. Source: QX-2, QX-5."""
    if args.websocket:
        yield from _frames(data, 0, len(data))
        return
    at = 0
    while at < len(data):
        try:
            size, start = read_int(data, at, len(data))
        except ConnectionFault:
            yield Line(at, len(data) - at, "an unfinished record", damaged=True)
            return
        end = start + size
        whole = size > 0 and end <= len(data)
        missing = "" if whole else " without a frame" if not size else f", the capture has {len(data) - start:,}"
        yield Line(at, min(end, len(data)) - at, f"record of {size:,} bytes{missing}", damaged=not whole)
        yield from _frames(data, start, min(end, len(data)))
        at = end


def _frames(data: bytes, at: int, stop: int) -> Iterator[Line]:
    padding = at
    while at < stop:
        if data[at] == FrameType.PADDING:
            at += 1
            continue
        yield from _padding(padding, at)
        try:
            frame, end = read_frame(data, at, stop)
            text = _text(frame)
        except ConnectionFault as fault:
            yield Line(at, stop - at, f"not a frame: {fault.detail} [{fault.rule}]", damaged=True)
            return
        yield Line(at, end - at, text)
        padding = at = end
    yield from _padding(padding, stop)


def _padding(start: int, end: int) -> Iterator[Line]:
    if start < end:
        yield Line(start, end - start, "PADDING")


def _text(frame: Frame) -> str:
    kind, fields = frame.kind, frame.fields
    if kind & ~7 == FrameType.STREAM:
        offset = fields[1] if kind & 4 else 0
        end = " end" if kind & 1 else ""
        return f"STREAM {_stream(fields[0])} offset={offset}{end} data={shown(frame.data)}"
    name = _NAMES.get(FrameType(kind), FrameType(kind).name)
    match kind:
        case FrameType.PARAMETERS:
            return " ".join([name, *_parameters(Parameters.decode(frame.data))])
        case FrameType.DATAGRAM | FrameType.DATAGRAM_LEN:
            return f"{name} data={shown(frame.data)}"
        case FrameType.TRANSPORT_CLOSE:
            return f"{name} {error_name(fields[0])} frame={fields[1]:#x} reason={shown(frame.data)}"
        case FrameType.APPLICATION_CLOSE:
            return f"{name} code={fields[0]} reason={shown(frame.data)}"
    told = (
        _stream(number) if field == "stream" else f"{field}={number}"
        for field, number in zip(_FIELDS[FrameType(kind)], fields, strict=True)
    )
    return " ".join([name, *told])


def _stream(stream_id: int) -> str:
    """Show a stream's number, the side that opened it, and its kind. Source: QX-20."""
    return f"stream={stream_id} ({'server' if stream_id & 1 else 'client'}'s, {_UNI if stream_id & 2 else _BIDI})"


def _parameters(parameters: Parameters) -> Iterator[str]:
    default = Parameters()
    for field in attrs.fields(Parameters):
        value = getattr(parameters, field.name)
        if value != getattr(default, field.name):
            yield f"{field.name}={value}"
