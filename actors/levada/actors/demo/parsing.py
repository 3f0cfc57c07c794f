"""Lines as they come from a shipper, put into columns: the part of the way in that runs in each reader, on nodes or in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import trio

from levada.actors.journal.ipc import stream_of
from levada.actors.lumberjack import Unit
from levada.framework import Actor, Ref, handles
from levada.transports.lumberjack import encode_text

from .rows import Lines

__all__ = ["Ingest", "lines_of", "source_of", "warm_up"]

MOST = 2 << 20
"""Characters of one message, unless a single line has more: with four bytes each it still fits Aqueduct's largest message."""

# One expression with three names: 0.5 µs a line, half of what three expressions take.
_SOURCE = re.compile(
    r"(?P<access>\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}:)"
    r"|(?P<auth>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^:]+: )"
    r"|(?P<kafka>\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] [A-Z]+ )"
)
# As `levada.actors.lumberjack.connect` makes them; a field of this name that says something else does not count.
_STAMP = re.compile(r"([0-9a-f]{12})-(\d{1,18})")


def source_of(text: str) -> str:
    """Return the source of a line by its beginning, or ``other``."""
    found = _SOURCE.match(text)
    return "other" if found is None else found.lastgroup or "other"


def lines_of(unit: Unit, node: str = "") -> list[Lines]:
    """Put the lines of a unit into columns, each file and writer apart.

    Args:
        unit: of a reader.
        node: where it runs.
    """
    by_file: dict[tuple[str, str, str], list[tuple[str, int, int]]] = {}
    for event in unit.events:
        # Ours says "line", the Beats say "message" and have the rest elsewhere.
        text = str(event.get("line", event.get("message", "")))
        host, file = event.get("host"), event.get("file")
        stamp = _STAMP.fullmatch(str(event.get("stamp", "")))
        writer, number = stamp.groups() if stamp is not None else ("", "0")
        where = (host if isinstance(host, str) else unit.origin.peer, file if isinstance(file, str) else "", writer)
        by_file.setdefault(where, []).append((text, _number(event.get("offset")), int(number)))
    return [_lines(*where, part, node) for where, found in by_file.items() for part in _parts(found)]


def _parts(found: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """Cut lines into parts of at most `MOST` characters."""
    begin = size = 0
    for at, (text, _, _) in enumerate(found):
        if size + len(text) > MOST and at > begin:
            yield found[begin:at]
            begin, size = at, 0
        size += len(text)
    yield found[begin:]


def _lines(host: str, file: str, writer: str, found: list[tuple[str, int, int]], node: str) -> Lines:
    texts, offsets, numbers = zip(*found, strict=True)
    # By columns: a message for each line would cost 2 µs more.
    columns = [pa.array(list(map(source_of, texts)), pa.string()), pa.array(offsets, pa.int64()), _strings(texts)]
    rows = pa.RecordBatch.from_arrays(columns, ["source", "offset", "text"])
    return Lines(stream_of(rows), _readable(host), _readable(file), writer, _runs(numbers) if writer else [], node)


def _number(text: object) -> int:
    """Read a number that a writer sent as text; 0 for anything else."""
    # A column has 63 bits for it.
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 19 else 0


def _strings(texts: Sequence[str]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array(list(map(_readable, texts)), pa.string())


def _readable(text: str) -> str:
    """Replace bytes that are not UTF-8, and escape halves of surrogate pairs, because Spark's strings cannot hold them."""
    return encode_text(text).decode("utf-8", "replace")


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Write numbers as ranges: the first number, and the one behind the last."""
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 and numbers == tuple(range(first, last + 1)):
        return [(first, last + 1)]
    return [(number, number + 1) for number in numbers]


async def warm_up() -> None:
    """Make an array in a thread, before there are lines: Arrow imports pandas for the first one, which takes half a second."""
    await trio.to_thread.run_sync(pa.array, [""])


class Ingest(Actor[Unit]):
    """Parses the lines of one connection of the reader."""

    intake: Ref[Lines]

    @handles
    async def take(self, unit: Unit) -> None:
        """Put the lines of a unit into the journal; the answer, when they are on disk, is the acknowledgement."""
        for lines in lines_of(unit, self.system.name):
            await self.intake.ask(lines, timeout=None)
