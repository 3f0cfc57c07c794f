"""Cut the bytes of a file into records: lines, or several lines that belong together, each with its place in the file. No I/O here.

A line keeps up to `max_line` bytes, a record up to `max_record`.  The rest is left out and the record is marked.  The record still ends
where its last line ends, so that nothing is read again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["LineAssembler", "Record"]


class Record(NamedTuple):
    """One line of a file, or several that belong together."""

    text: str
    """Without the end of the last line; bytes that are not UTF-8 as `surrogateescape` keeps them."""
    start: int
    """Bytes of the file before it."""
    end: int
    """Bytes of the file up to and with its last line end: where to go on once it is safe."""
    cut: bool
    """Whether a part was left out because a limit was reached."""


class LineAssembler:
    r"""Cuts bytes into records; fed with whatever was read.

    Args:
        offset: bytes of the file before the first that will be fed.
        max_line: bytes kept of one line.
        start: a line that contains this begins a record, other lines belong to the record before; ``None``: each line is a record.
        max_record: bytes kept of one record; one line is always kept.

    Example:
        >>> lines = LineAssembler(start=re.compile(r"^\["))
        >>> lines.feed(b"[1] oops\n  at desk\n[2] fi")
        []
        >>> lines.feed(b"ne\n"), lines.holding
        ([Record(text='[1] oops\n  at desk', start=0, end=19, cut=False)], True)
        >>> lines.finish()
        [Record(text='[2] fine', start=19, end=28, cut=False)]
    """

    def __init__(
        self,
        offset: int = 0,
        *,
        max_line: int = 1 << 20,
        start: re.Pattern[str] | None = None,
        max_record: int = 1 << 20,
    ) -> None:
        self._max_line = max_line
        self._pattern = start
        self._max_record = max_record
        self._at = offset
        self._line = bytearray()  # the beginning of a line whose end has not come
        self._left_out = 0  # bytes of that line beyond `max_line`
        self._parts: list[str] = []  # lines of a record that may go on
        self._size = 0
        self._record = Record("", offset, offset, False)  # place and mark of that record

    @property
    def holding(self) -> bool:
        """Whether there is a record that only waits for the line after it; `finish` gives it up."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[Record]:
        """Take the next bytes of the file; return the records that are complete now."""
        first, newline, rest = data.partition(b"\n")
        self._keep(first)
        if not newline:
            return []
        found: list[Record] = []
        self._end_line(found, 1)
        *lines, last = rest.split(b"\n")
        pattern, limit = self._pattern, self._max_line
        for line in lines:
            if pattern is None and len(line) <= limit:
                # The common case, written out: 0.7 instead of 1.6 us a line.
                at, self._at = self._at, self._at + len(line) + 1
                text = line.decode("utf-8", "surrogateescape")
                found.append(Record(text[:-1] if text[-1:] == "\r" else text, at, self._at, False))
            else:
                self._keep(line)
                self._end_line(found, 1)
        self._keep(last)
        return found

    def finish(self, *, partial: bool = False) -> list[Record]:
        """Give up the record that waits for its next line.

        Args:
            partial: the line whose end has not come as well, as if it ended here.
        """
        found: list[Record] = []
        if partial and (self._line or self._left_out):
            self._end_line(found, 0)
        self._end_record(found)
        return found

    def _keep(self, part: bytes) -> None:
        room = self._max_line - len(self._line)
        self._line += part[:room]
        self._left_out += max(0, len(part) - room)

    def _end_line(self, found: list[Record], newline: int) -> None:
        cut = self._left_out > 0
        at, self._at = self._at, self._at + len(self._line) + self._left_out + newline
        text = self._line.decode("utf-8", "surrogateescape")
        if not cut:
            text = text.removesuffix("\r")
        size = len(self._line)
        self._line.clear()
        self._left_out = 0
        if self._pattern is None:
            found.append(Record(text, at, self._at, cut))
            return
        if self._parts and self._pattern.search(text) is None:
            if self._size + 1 + size > self._max_record:
                cut = True
            else:
                self._parts.append(text)
                self._size += 1 + size
            self._record = self._record._replace(end=self._at, cut=cut or self._record.cut)
            return
        self._end_record(found)
        self._parts.append(text)
        self._size = size
        self._record = Record("", at, self._at, cut)

    def _end_record(self, found: list[Record]) -> None:
        if self._parts:
            found.append(self._record._replace(text="\n".join(self._parts)))
            self._parts.clear()
