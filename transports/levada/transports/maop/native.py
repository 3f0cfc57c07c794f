"""The two messages that every implementation knows: Success (0) and Test (1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import attrs

from .codes import ErrorCode, OperationFault
from .events import Completed, Octets
from .frames import BLOCK, UNDEFINED

__all__ = ["OCTET_STREAM", "TestPlan", "check_test", "success_header", "test_payload"]

SUCCESS: Final = 0
TEST: Final = 1
OCTET_STREAM: Final = "application/octet-stream"
"""Content type of plain bytes. Source: MA-97."""
_MEDIA_TYPE: Final = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+")
TEST_WINDOW: Final = 65_536
"""Bytes of a Test's Response that are queued before the stream must have room again; they count in the quota of bodies."""
_ZEROS: Final = memoryview(bytes(TEST_WINDOW))
"""Content of all Test bodies."""


def success_header(content_type: str) -> bytes:
    """Return the header that precedes the body of a Success. Source: MA-96, MA-97.

    Raises:
        ValueError: not a media type, or longer than 255 bytes.

    Example:
        >>> success_header("application/json").hex()
        '106170706c69636174696f6e2f6a736f6e'
    """
    if not 0 < len(content_type) < 256 or not _MEDIA_TYPE.fullmatch(content_type):
        raise ValueError(f"not a media type without parameters: {content_type!r} [MA-97]")
    return bytes((len(content_type),)) + content_type.encode("ascii")


class SuccessReader:
    """Removes the header from the start of a Success."""

    __slots__ = ("_head", "content_type")

    def __init__(self) -> None:
        self._head = bytearray()
        self.content_type: str | None = None
        """In lower case, once the header is whole."""

    def read(self, data: bytes | memoryview) -> bytes | memoryview | None:
        """Take bytes of the payload; return the bytes after the header, None while it is not whole.

        Raises:
            Fault: the header is missing (3) or wrong (0). Source: MA-111.
        """
        head = self._head
        need = 1 + head[0] if head else 1 + data[0]
        if need == 1:
            raise OperationFault(ErrorCode.INVALID_HEADER, "Success header is missing", "MA-111")
        missing = need - len(head)
        head += data[:missing]
        if len(head) < need:
            return None
        text = head[1:]
        if not text.isascii() or not _MEDIA_TYPE.fullmatch(text.decode("ascii")):
            raise OperationFault(ErrorCode.INVALID_FORMAT, "content type is no media type", "MA-111")
        self.content_type = text.decode("ascii").lower()
        return data[missing:]

    def end(self) -> None:
        """Check that the header was whole at the end of the payload.

        Raises:
            Fault: the header is not whole.
        """
        if self.content_type is None:
            code = ErrorCode.INVALID_FORMAT if self._head else ErrorCode.INVALID_HEADER
            raise OperationFault(code, "the payload ends inside the Success header", "MA-111")


@attrs.frozen(kw_only=True)
class TestPlan:
    """The transfer that a Test requests. Source: section 13.2."""

    __test__ = False  # pytest: not a class of tests

    mode: int
    """0 no body, 1 known length, 2 undefined length."""
    multi: bool = False
    """Whether in several Blocks."""
    exp: int = 0
    """The length is 1024 times two to this power."""

    @property
    def length(self) -> int:
        """Bytes of the payload, including the Success header. Source: MA-103, MA-104."""
        return 1024 << self.exp if self.mode else 0

    @property
    def blocks(self) -> int:
        """Number of Blocks. Source: MA-105."""
        return (4 << self.exp % 4 if self.multi else 1) if self.mode else 0

    @property
    def announced(self) -> int:
        """Length in the Response header."""
        return UNDEFINED if self.mode == 2 else self.length

    def encode(self) -> bytes:
        """Return the payload of the Test."""
        return bytes((0, self.mode << 6 | self.multi << 5 | self.exp))

    def pieces(self) -> Iterator[Octets]:
        """Yield the Blocks in pieces; they ignore the limit on chunks. Source: MA-103."""
        header = success_header(OCTET_STREAM)
        left = self.length
        size = -(-left // self.blocks)
        while left:
            chunk = min(size, left)
            yield BLOCK.pack(5, chunk) + header
            todo = chunk - len(header)
            while todo:
                piece = _ZEROS[: min(todo, len(_ZEROS))]
                yield piece
                todo -= len(piece)
            header = b""
            left -= chunk


OPAQUE: Final = success_header(OCTET_STREAM) + b"\0"
"""Payload of the answer to a Test of another size. Source: MA-107."""


def test_payload(payload: bytes) -> TestPlan | None:
    """Read the payload of a Test; None for an opaque one. Source: MA-100, MA-102, MA-107.

    Raises:
        Fault: type or mode is unknown (13), or one byte is missing (0).
    """
    if len(payload) == 1:
        raise OperationFault(ErrorCode.INVALID_FORMAT, "a Test of one octet", "MA-107")
    if len(payload) != 2:
        return None
    kind, transfer = payload
    mode = transfer >> 6
    if kind:
        raise OperationFault(ErrorCode.UNSUPPORTED_TEST_TYPE, f"UNSUPPORTED_TEST_TYPE {kind}", "MA-100")
    if mode == 3:
        raise OperationFault(ErrorCode.UNSUPPORTED_TEST_TYPE, "UNSUPPORTED_TEST_MODE", "MA-100")
    return TestPlan(mode=mode, multi=bool(transfer & 32), exp=transfer & 15)


test_payload.__test__ = False  # type: ignore[attr-defined] # pytest: not a test


def check_test(plan: TestPlan, answer: Completed) -> str | None:
    """Compare the answer to a Test with its plan; None if they match, else the difference. Source: MA-110.

    Block End, the sum of the Blocks and the Success header were checked when the answer was read.
    """
    total = 0 if answer.body is None or answer.content_type is None else len(answer.body) + 1 + len(answer.content_type)
    if (UNDEFINED if answer.length is None else answer.length) != plan.announced:
        return f"mode {plan.mode} wants length {plan.announced}, the Response announced {answer.length}"
    if plan.mode and not plan.length <= total <= (
        plan.length * 11 // 10 if plan.mode == 2 and plan.multi else plan.length
    ):
        return f"{total} bytes, wanted {plan.length}"
    wrong = answer.blocks < 2 if plan.mode == 2 and plan.multi else answer.blocks != plan.blocks
    return f"{answer.blocks} Blocks, wanted {plan.blocks}" if wrong else None
