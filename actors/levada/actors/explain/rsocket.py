"""Frames of RSocket, with the entries of composite metadata."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import attrs

from levada.framework.errors import DecodeError
from levada.transports.rsocket import ErrorCode, Payload
from levada.transports.rsocket.extensions import Authentication, CompositeMetadata, Entry, Routing
from levada.transports.rsocket.frames import (
    ErrorFrame,
    Frame,
    FrameType,
    RequestFrame,
    SetupFrame,
    UnknownFrame,
    decode,
)

from . import Line, shown

__all__ = ["HELP", "add_arguments", "explain"]

HELP = "frames of RSocket 1.0, over TCP or one WebSocket message each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for facts that are not in the bytes."""
    parser.add_argument(
        "--composite",
        action="store_true",
        help="metadata is composite (detected if the capture begins with SETUP)",
    )


def explain(data: bytes, args: argparse.Namespace) -> Iterator[Line]:
    """Explain frames with length fields (RS-2)."""
    composite = args.composite
    at = 0
    while at < len(data):
        end = at + 3 + int.from_bytes(data[at : at + 3], "big")
        if end > len(data) or len(data) - at < 3:
            yield Line(at, len(data) - at, "an unfinished frame", damaged=True)
            return
        try:
            frame = decode(data[at + 3 : end])
        except DecodeError as error:
            yield Line(at, end - at, f"not a frame: {error}", damaged=True)
        else:
            if isinstance(frame, SetupFrame):
                composite = frame.metadata_mime_type == CompositeMetadata.MIME_TYPE
            yield Line(at, end - at, _text(frame, composite=composite), damaged=isinstance(frame, UnknownFrame))
        at = end


def _text(frame: Frame, *, composite: bool) -> str:
    parts = [_name(frame)]
    if frame.stream_id:
        parts.append(f"stream={frame.stream_id}")
    for field in attrs.fields(type(frame)):
        value = getattr(frame, field.name)
        if field.name == "code" and isinstance(frame, ErrorFrame):
            parts.append(_code(value))
        elif field.name == "version":
            parts.append(f"version={value[0]}.{value[1]}")
        elif field.name == "token" and value is not None:
            parts.append(f"token=({len(value)} bytes, not shown)")
        elif isinstance(value, Payload):
            parts += _payload(value, composite=composite)
        elif isinstance(value, bool):
            parts += [field.name] if value else []
        elif value not in (None, b"") and field.name != "stream_id" and not isinstance(value, FrameType):
            parts.append(f"{field.name}={shown(value)}")
    return " ".join(parts)


def _name(frame: Frame) -> str:
    if isinstance(frame, RequestFrame):
        return frame.type.name
    name = type(frame).__name__.removesuffix("Frame")
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


def _payload(payload: Payload, *, composite: bool) -> list[str]:
    parts = []
    if payload.metadata is not None:
        parts.append(f"metadata={_metadata(payload.metadata, composite=composite)}")
    if payload.data:
        parts.append(f"data={shown(payload.data)}")
    return parts


def _metadata(data: bytes, *, composite: bool) -> str:
    if composite:
        try:
            entries = CompositeMetadata.decode(data)
        except DecodeError:
            pass  # it may be a fragment
        else:
            return f"[{', '.join(map(_entry, entries.entries))}]"
    return shown(data)


def _entry(entry: Entry) -> str:
    if entry.mime_type == Routing.MIME_TYPE:
        return f"route: {shown(entry.metadata[1:])}"
    if entry.mime_type == Authentication.MIME_TYPE:
        return f"authentication: {len(entry.metadata)} bytes, not shown"
    return f"{entry.mime_type}: {shown(entry.metadata)}"


def _code(code: int) -> str:
    return ErrorCode(code).name if code in set(ErrorCode) else f"code={code:#x}"
