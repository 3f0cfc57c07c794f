"""Frames of Lumberjack, versions 1 and 2, also inside envelopes."""

from __future__ import annotations

import argparse
import struct
import zlib
from collections.abc import Iterator

from . import Line, shown

__all__ = ["HELP", "add_arguments", "explain"]

HELP = "frames of Lumberjack, versions 1 and 2"

UNPACKED = 64 * 1024 * 1024  # most bytes to unpack from an envelope (LJ-41)
DEPTH = 2  # levels of nested envelopes (LJ-32)
_U32 = struct.Struct(">I")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the frames of both sides are explained alike."""


def explain(data: bytes, args: argparse.Namespace) -> Iterator[Line]:
    """Explain the frames of a writer, or the acks of a reader (LJ-2, LJ-4)."""
    return _frames(data, 0)


def _frames(data: bytes, depth: int) -> Iterator[Line]:
    at = 0
    while at < len(data):
        head = data[at : at + 2]
        try:
            end, text = _frame(data, at, head)
        except (IndexError, struct.error):
            yield Line(at, len(data) - at, f"{depth * '    '}an unfinished frame", damaged=True)
            return
        if end == at:
            yield Line(at, len(data) - at, f"{depth * '    '}not a frame: {text}", damaged=True)
            return
        yield Line(at, end - at, f"{depth * '    '}{text}")
        if head[1:] == b"C":
            yield from _envelope(data[at + 6 : end], at, depth + 1)
        at = end


def _frame(data: bytes, at: int, head: bytes) -> tuple[int, str]:
    """Return the end of a frame and its meaning. If it is not a frame, the end is its start, and the text says why."""
    version, kind = head[:1].decode("latin-1"), head[1:].decode("latin-1")
    if version not in ("1", "2"):
        return at, f"version {head[:1]!r}, expected b'1' or b'2' (LJ-2)"
    (first,) = _U32.unpack_from(data, at + 2)
    match kind:
        case "W":
            return at + 6, f"v{version} WINDOW {first}"
        case "A":
            return at + 6, f"v{version} ACK {first}"
        case "C":
            return _within(data, at + 6 + first), f"v{version} ENVELOPE {first:,} bytes"
        case "J":
            (length,) = _U32.unpack_from(data, at + 6)
            end = _within(data, at + 10 + length)
            return end, f"v{version} JSON {first} {shown(data[at + 10 : end])}"
        case "D":
            end, fields = at + 10, []
            (pairs,) = _U32.unpack_from(data, at + 6)
            for _ in range(pairs):
                key, end = _text(data, end)
                value, end = _text(data, end)
                fields.append(f"{shown(key)}: {shown(value)}")
            return end, f"v{version} DATA {first} {{{', '.join(fields)}}}"
    return at, f"type {head[1:]!r}, expected W, D, J, C or A (LJ-2)"


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = _U32.unpack_from(data, at)
    end = _within(data, at + 4 + length)
    return data[at + 4 : end], end


def _within(data: bytes, end: int) -> int:
    if end > len(data):
        raise IndexError
    return end


def _envelope(packed: bytes, at: int, depth: int) -> Iterator[Line]:
    """Explain the frames in an envelope, with offsets in the unpacked bytes."""
    indent = depth * "    "
    if depth > DEPTH:
        yield Line(at, len(packed), f"{indent}not unpacked: more than {DEPTH} envelopes deep (LJ-32)", damaged=True)
        return
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(packed, UNPACKED)
    except zlib.error as error:
        yield Line(at, len(packed), f"{indent}cannot be unpacked: {error} (LJ-30)", damaged=True)
        return
    yield from _frames(unpacked, depth)
    if not unpacker.eof:
        yield Line(at, len(packed), f"{indent}cut off, or more than {UNPACKED:,} bytes (LJ-30, LJ-41)", damaged=True)
    elif unpacker.unused_data:
        yield Line(at, len(packed), f"{indent}{len(unpacker.unused_data)} bytes after its end (LJ-30)", damaged=True)
