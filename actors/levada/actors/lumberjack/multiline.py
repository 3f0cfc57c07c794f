"""Cut the bytes of a file into records, each a line or several lines that belong together, with its place in the file. Without I/O.

A line keeps up to `max_line` bytes, a record up to `max_record`.  The rest is left out and the record is marked.  The record still ends
where its last line ends, so nothing is read again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["LineAssembler", "Record"]


class Record(NamedTuple):
    """One line of a file, or several that belong together."""

    text: str
    """Its text without the last line end. Bytes that are not UTF-8 are surrogate escapes."""
    start: int
    """Offset of its first byte in the file."""
    end: int
    """Offset behind its last line end: the place to continue once the record is safe."""
    cut: bool
    """Whether a part was left out because of a limit."""


class LineAssembler:
    r"""Cuts bytes into records.

    Args:
        offset: offset in the file of the first byte that will be fed.
        max_line: bytes kept of one line.
        start: a line that contains this begins a record, and other lines belong to the record before; ``None``: each line is a record.
        max_record: bytes kept of one record; its first line is always kept.
        skip_nuls: leave out NUL bytes at the beginning of lines.

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
        skip_nuls: bool = False,
    ) -> None:
        self._max_line = max_line
        self._pattern = start
        self._max_record = max_record
        self._skip_nuls = skip_nuls
        self._at = offset
        self._line = bytearray()  # an unfinished line, up to `max_line`
        self._left_out = 0  # bytes of that line beyond `max_line`
        self._parts: list[str] = []  # lines of a record that may go on
        self._size = 0
        self._record = Record("", offset, offset, False)  # place and mark of that record

    @property
    def holding(self) -> bool:
        """Whether a record waits for the line after it; `finish` returns it."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[Record]:
        """Take the next bytes of the file, cut anywhere; return the records that are complete now."""
        first, newline, rest = data.partition(b"\n")
        self._keep(first)
        if not newline:
            return []
        found: list[Record] = []
        self._end_line(found, 1)
        *lines, last = rest.split(b"\n")
        plain, limit = self._pattern is None and not (self._skip_nuls and b"\0" in data), self._max_line
        for line in lines:
            if plain and len(line) <= limit:
                # The common case inlined: 0.7 instead of 1.6 us a line.
                at, self._at = self._at, self._at + len(line) + 1
                text = line.decode("utf-8", "surrogateescape")
                found.append(Record(text[:-1] if text[-1:] == "\r" else text, at, self._at, False))
            else:
                self._keep(line)
                self._end_line(found, 1)
        self._keep(last)
        return found

    def finish(self, *, partial: bool = False) -> list[Record]:
        """End the record that waits for its next line, and return it, if there is one.

        Args:
            partial: end the unfinished line too.
        """
        found: list[Record] = []
        if partial and (self._line or self._left_out):
            self._end_line(found, 0)
        self._end_record(found)
        return found

    def _keep(self, part: bytes) -> None:
        if self._skip_nuls and part[:1] == b"\0" and not self._line and not self._left_out:
            rest = part.lstrip(b"\0")
            self._at += len(part) - len(rest)
            part = rest
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
