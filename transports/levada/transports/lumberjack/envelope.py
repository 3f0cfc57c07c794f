"""Unpack envelopes in bounded steps: a small envelope cannot take much memory or time at once (LJ-30, LJ-32, LJ-35, LJ-41)."""

from __future__ import annotations

import zlib
from typing import Any

from levada.framework.errors import RemoteProtocolError
from levada.transports.lumberjack.config import ReaderConfig
from levada.transports.lumberjack.parser import FrameParser, ParserStop

__all__ = ["STEP", "Unpacker"]

STEP = 64 * 1024  # bytes unpacked at a time (LJ-35)
# Bytes given to zlib at a time. At each step zlib copies its unused input, so a whole envelope at once would take quadratic time.
_PIECE = 16 * 1024


class _Layer:
    """One envelope: its packed bytes, and a parser for the frames inside."""

    __slots__ = ("at", "inflater", "parser", "payload", "tail")

    def __init__(self, payload: memoryview, parser: FrameParser) -> None:
        self.payload = payload
        self.parser = parser
        self.inflater = zlib.decompressobj()
        self.at = 0
        self.tail: bytes | memoryview = b""


class Unpacker:
    """The frames of an envelope and of the envelopes nested in it, as one sequence (LJ-31).

    Args:
        version: of the connection.
        payload: of the C frame.
        config: the limits, which apply to the whole envelope.
    """

    def __init__(self, version: int, payload: memoryview, config: ReaderConfig) -> None:
        self._version = version
        self._config = config
        self.unpacked = 0
        """Bytes unpacked so far."""
        self._layers = [_Layer(payload, FrameParser(version, config, depth=1))]
        self.count = self.cost = self.sequence = self.window = 0  # as in `FrameParser`

    @property
    def large(self) -> bool:
        """Whether the next `parse` takes long: see `FrameParser.large`."""
        return self._layers[-1].parser.large

    @property
    def held(self) -> int:
        """Bytes and costs kept for unfinished frames, and the packed bytes."""
        return sum(len(layer.payload) + layer.parser.held for layer in self._layers)

    def parse(
        self, out: list[dict[str, Any]] | None, room: int, cost_room: int, *, cut: bool = True
    ) -> ParserStop | None:
        """Find events, as `FrameParser.parse` does. `ParserStop.NEED_DATA` asks for `unpack`; ``None`` is the end of the envelope.

        Raises:
            RemoteProtocolError: as `FrameParser.parse`; or the envelope ends inside a frame, or has bytes after its zlib stream.
        """
        self.count = self.cost = 0
        while True:
            layer = self._layers[-1]
            parser = layer.parser
            try:
                stop = parser.parse(out, room - self.count, cost_room - self.cost, cut=cut)
            finally:
                self.cost += parser.cost
                if parser.count:
                    self.count += parser.count
                    self.sequence = parser.sequence
            if stop is ParserStop.ENVELOPE:
                self._layers.append(
                    _Layer(parser.payload, FrameParser(self._version, self._config, depth=len(self._layers) + 1))
                )
                parser.payload = memoryview(b"")
            elif stop is ParserStop.WINDOW:
                self.window = parser.window
                return stop
            elif stop is not ParserStop.NEED_DATA or not self._ended(layer):
                return stop
            elif parser.in_frame:
                raise RemoteProtocolError("an envelope ends inside a frame", rule="LJ-30")
            else:
                self._layers.pop()
                if not self._layers:
                    return None

    def _ended(self, layer: _Layer) -> bool:
        if not layer.inflater.eof:
            return False
        if layer.inflater.unused_data or layer.at < len(layer.payload):
            raise RemoteProtocolError("bytes after the end of the zlib stream of an envelope", rule="LJ-30")
        return True

    def unpack(self) -> None:
        """Unpack up to `STEP` bytes for the next `parse`.

        Raises:
            RemoteProtocolError: not a zlib stream, a wrong checksum, a truncated stream, or more than `ReaderConfig.max_unpacked` bytes.
        """
        layer = self._layers[-1]
        data = b""
        while not data and not layer.inflater.eof:
            if not layer.tail:
                layer.tail = layer.payload[layer.at : layer.at + _PIECE]
                layer.at += len(layer.tail)
            given = len(layer.tail)
            try:
                data = layer.inflater.decompress(layer.tail, min(STEP, self._config.max_unpacked - self.unpacked + 1))
            except zlib.error as error:
                raise RemoteProtocolError(
                    f"the payload of an envelope is not a zlib stream: {error}", rule="LJ-30"
                ) from None
            layer.tail = layer.inflater.unconsumed_tail
            if not given and not data and not layer.inflater.eof:
                raise RemoteProtocolError("the zlib stream of an envelope is truncated", rule="LJ-30")
        self.unpacked += len(data)
        if self.unpacked > self._config.max_unpacked:
            raise RemoteProtocolError(
                f"an envelope unpacks to more than {self._config.max_unpacked} bytes (raise max_unpacked)",
                rule="LJ-41",
            )
        layer.parser.feed(data)
