"""Frames of ReactiveSocket, the older draft."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from levada.framework.errors import DecodeError
from levada.transports.reactivesocket.frames import Frame

from . import Line, shown

__all__ = ["HELP", "add_arguments", "explain"]

HELP = "frames of ReactiveSocket, RSocket's predecessor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the frames need no further facts."""


def explain(data: bytes, args: argparse.Namespace) -> Iterator[Line]:
    """Explain frames with length fields, which count themselves (RX-3)."""
    at = 0
    while at < len(data):
        end = at + int.from_bytes(data[at : at + 4], "big")
        if len(data) - at < 4 or end > len(data):
            yield Line(at, len(data) - at, "an unfinished frame", damaged=True)
            return
        if end < at + 12:
            yield Line(at, len(data) - at, f"not a frame: a length of {end - at}, at least 12 (RX-4)", damaged=True)
            return
        try:
            frame = Frame.decode(data[at:end])
        except DecodeError as error:
            yield Line(at, end - at, f"not a frame: {error}", damaged=True)
        else:
            yield Line(at, end - at, _text(frame))
        at = end


def _text(frame: Frame) -> str:
    parts = [frame.kind.name]
    if frame.stream_id:
        parts.append(f"stream={frame.stream_id}")
    if frame.flags:
        parts.append(f"flags={frame.flags:#06x}")
    parts += [f"numbers={','.join(map(str, frame.numbers))}"] if frame.numbers else []
    parts += [f"types={','.join(frame.mime_types)}"] if frame.mime_types else []
    parts += [f"metadata={shown(frame.metadata)}"] if frame.metadata is not None else []
    parts += [f"data={shown(frame.data)}"] if frame.data else []
    return " ".join(parts)
