"""Frames joined to records, and records joined to writes."""

from __future__ import annotations

from .frames import DEFAULT_MAX_RECORD, encode_int

__all__ = ["Records"]


class Records:
    """The records of one write.

    Args:
        framed: whether a record is a message, without its Size. Source: QX-2, QX-41.
    """

    __slots__ = ("body", "fill", "framed", "largest", "pieces", "written")

    def __init__(self, *, framed: bool) -> None:
        self.framed = framed
        self.largest = DEFAULT_MAX_RECORD
        """The largest Size that may be sent. Source: QX-3, QX-6."""
        self.body: list[bytes | memoryview] = []
        """Pieces of the record that is being filled."""
        self.fill = 0
        """Bytes in `body`."""
        self.pieces: list[bytes | memoryview] = []
        """Complete records: messages, or the pieces of all records, with their Sizes."""
        self.written = 0
        """Bytes in complete records, with two bytes for each Size."""

    def add(self, frame: bytes) -> None:
        """Add a frame to the record that is being filled, or to the next one if it does not fit."""
        size = len(frame)
        if self.fill + size > self.largest:
            self.close()
        self.body.append(frame)
        self.fill += size

    def close(self) -> None:
        """Complete the record that is being filled, unless it is empty."""
        fill = self.fill
        if fill:
            if self.framed:
                self.pieces.append(b"".join(self.body))
            else:
                self.pieces.append(encode_int(fill))
                self.pieces += self.body
            self.written += fill + 2
            self.body.clear()
            self.fill = 0

    def take(self) -> list[bytes]:
        """Return the messages, or all records in one piece, and begin the next write."""
        self.close()
        if not self.written:
            return []
        pieces = self.pieces
        out = [bytes(piece) for piece in pieces] if self.framed else [b"".join(pieces)]
        pieces.clear()
        self.written = 0
        return out
