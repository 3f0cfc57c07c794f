"""Bodies: Blocks into pieces and pieces into Blocks, for Messages, Requests and Responses alike.

Announced lengths allocate nothing, and large pieces are views of the input. The bytes of a body are copied once at most, when the pieces
of a body that is wanted whole are joined.
"""

from __future__ import annotations

from typing import Final

from levada.transports.core import StreamData

from .codes import ErrorCode, OperationFault
from .config import MaopConfig
from .events import Octets, Output
from .frames import BLOCK, BLOCK_END, UNDEFINED
from .state import MISPLACED

__all__ = ["BodyReader", "write_blocks", "write_end"]

_JOIN: Final = 16_384
"""Chunks up to this size are sent in one piece with their header: a copy costs less than a second write."""
_VIEW: Final = 4096
"""Pieces from this size on are views. Below it a copy is as cheap, and frees the buffer it was cut from."""
_SMALL_BLOCK: Final = 1024
"""Smaller Blocks are counted. Source: section 7."""


class BodyReader:
    """Reads the bytes of one body."""

    __slots__ = (
        "_config", "_head", "_left", "_small", "_zero", "blocks", "ended", "length", "limit", "pieces", "total",
    )  # fmt: skip

    def __init__(self, length: int, limit: int, config: MaopConfig) -> None:
        self.length = length
        """Bytes announced, or `UNDEFINED`."""
        self.limit = limit
        """Bytes allowed, if the length is undefined."""
        self._config = config
        self.total = 0
        """Bytes announced by the Blocks so far."""
        self.blocks = 0
        self.ended = False
        """Whether a correct Block End has come."""
        self.pieces: list[Octets] = []
        """Pieces received; the user of the reader takes them out."""
        self._left = 0
        self._small = 0
        self._head = bytearray()
        self._zero = False

    def read(self, data: bytes, at: int) -> int:
        """Take bytes up to Block End; return where reading stopped.

        Raises:
            Fault: they are malformed.
        """
        end = len(data)
        head, pieces = self._head, self.pieces
        first = len(pieces)
        while at < end:
            if self._left:
                size = min(self._left, end - at)
                if size >= _VIEW:
                    pieces.append(memoryview(data)[at : at + size])
                elif len(pieces) > first and len(pieces[-1]) < _VIEW:
                    # Each Block of 2 bytes would be an object of 40 in a list: 25 times what the quota counts.
                    pieces[-1] = b"".join((pieces[-1], data[at : at + size]))
                else:
                    pieces.append(data[at : at + size])
                self._left -= size
                at += size
                continue
            op = head[0] if head else data[at]
            if op == 5:
                need = 5
            elif op == 6:
                need = 9
            elif op == 0 and self._zero:
                need = (
                    4  # MA-137: the lower half of a length of eight bytes; the upper half was read as an empty Block.
                )
            else:
                raise misplaced(op)
            if head or end - at < need:
                missing = need - len(head)
                head += data[at : at + missing]
                at = min(end, at + missing)
                if len(head) < need:
                    break
                raw = bytes(head)
                head.clear()
                self._header(op, raw, 0)
            else:
                self._header(op, data, at)
                at += need
            if self.ended:
                break
        return at

    def _header(self, op: int, raw: bytes, at: int) -> None:
        if op == 6:
            self._end(BLOCK_END.unpack_from(raw, at)[1])
            return
        if op == 5:
            size = BLOCK.unpack_from(raw, at)[1]
            self._zero = size == 0 and self._config.tolerate_u64_block_length
            self.blocks += 1
            if size < _SMALL_BLOCK and self.length != UNDEFINED:
                self._small += 1
                if self._small > self._config.max_blocks_per_message:
                    raise OperationFault(ErrorCode.CONTENT_TOO_LARGE, "too many small Blocks", "MA-62")
        else:
            size = int.from_bytes(raw[at : at + 4], "big")
            self._zero = False
        self.total += size
        # MA-58: judged by the header alone, before any byte of the chunk.
        if self.total > self.length:
            raise OperationFault(
                ErrorCode.PAYLOAD_LENGTH_MISMATCH, f"{self.total} bytes, {self.length} were announced", "MA-58"
            )
        if self.length == UNDEFINED and self.total > self.limit:
            raise OperationFault(ErrorCode.CONTENT_TOO_LARGE, f"more than {self.limit} bytes", "MA-58")
        self._left = size

    def _end(self, total: int) -> None:
        if not self.blocks and self.length != UNDEFINED:
            raise OperationFault(ErrorCode.ORDER_VIOLATION, "Block End before any Block", "MA-59")
        if total != self.total or (self.length != UNDEFINED and total != self.length):
            raise OperationFault(
                ErrorCode.PAYLOAD_LENGTH_MISMATCH, f"Block End says {total} bytes, Blocks had {self.total}", "MA-58"
            )
        self.ended = True

    def whole(self) -> bytes:
        """Return the collected body."""
        pieces = self.pieces
        if len(pieces) == 1 and type(pieces[0]) is bytes:
            return pieces[0]
        return b"".join(pieces)


def misplaced(op: int) -> OperationFault:
    """Make the fault for an operation that may not come here on a data stream. Source: MA-11 to MA-13, MA-70."""
    code = MISPLACED.get(op)
    if code is None:
        return OperationFault(ErrorCode.INVALID_FORMAT, f"unknown operation 0x{op:02x}", "MA-13")
    return OperationFault(
        code, f"operation 0x{op:02x} has no place here", "MA-11" if op < 2 else "MA-70" if op == 2 else "MA-12"
    )


def write_blocks(out: list[Output], stream_id: int, data: Octets, chunk: int) -> None:
    """Queue bytes of a body as Blocks. Source: section 7 (chunking)."""
    size = len(data)
    if size <= min(_JOIN, chunk):
        out.append(StreamData(stream_id, BLOCK.pack(5, size) + data, False))
        return
    view = memoryview(data)
    for at in range(0, size, chunk):
        piece = view[at : at + chunk]
        out.append(StreamData(stream_id, BLOCK.pack(5, len(piece)), False))
        out.append(StreamData(stream_id, piece, False))


def write_end(out: list[Output], stream_id: int, total: int) -> None:
    """Queue Block End with the end of the stream. Source: MA-62."""
    out.append(StreamData(stream_id, BLOCK_END.pack(6, total), True))
