"""The console's protocol, version 1: a JSON object per line, over a Unix socket that only its owner may open.

The client sends ``{"levada-console": 1, "limit": 1000}``. The server answers each line with one line: ``"levada-console"``, its version, and
the members of `Snapshot` or ``"error"``, a text.  After an error it closes the connection.  A dashboard sends ``"view"`` instead
(`levada.actors.console.viewing.View`) and gets the rows in view; ``"act"`` and ``"confirm"`` are its actions, and ``"do"`` names a command of
the program.  Both sides ignore unknown members, so members can be added without a new version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import trio

from levada.framework.errors import DecodeError

__all__ = ["VERSION", "LineReader", "parse_line", "to_line"]

VERSION = 1
VERSION_KEY = "levada-console"


def to_line(members: Mapping[str, Any]) -> bytes:
    """Encode one line, with the version."""
    return json.dumps({VERSION_KEY: VERSION, **members}, separators=(",", ":")).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any]:
    """Decode one line.

    Raises:
        DecodeError: it is not a JSON object, or it has another version.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a line of JSON: {error}") from error
    if not isinstance(value, dict) or VERSION_KEY not in value:
        raise DecodeError(f'expected a JSON object with the member "{VERSION_KEY}"')
    if value[VERSION_KEY] != VERSION:
        raise DecodeError(
            f"the other side speaks version {value[VERSION_KEY]!r} of the console's protocol, expected {VERSION}: use the same levada on both sides"
        )
    return value


class LineReader:
    """Cuts a stream into lines of at most `limit` bytes."""

    def __init__(self, stream: trio.abc.ReceiveStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._data = bytearray()

    async def line(self) -> bytes | None:
        """Return the next line, without its line end; ``None`` at the end of the stream, where an incomplete line is dropped.

        Raises:
            DecodeError: the line is too long.
            trio.BrokenResourceError: the stream broke.

        Cancellation:
            no line is lost; bytes that have arrived are kept.
        """
        looked = 0
        while True:
            end = self._data.find(b"\n", looked)
            looked = len(self._data)
            if end > self._limit or (end < 0 and looked > self._limit):
                raise DecodeError(f"a line of more than {self._limit} bytes")
            if end >= 0:
                line = bytes(self._data[:end])
                del self._data[: end + 1]
                return line
            received = await self._stream.receive_some()
            if not received:
                return None
            self._data += received
