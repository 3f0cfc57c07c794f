"""Segment files that are rewritten: small blocks merged, or rows erased. The new file takes the name of the old one.

The old file stays as ``NAME.old``, where readers that are under way read on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from os.path import samestat
from pathlib import Path

import pyarrow as pa

from .blocks import Message, Uncertain, missing, split_erased
from .segments import Segment

__all__ = ["merged", "without"]


def merged(segment: Segment, journal: bytes, join: Callable[[Sequence[pa.RecordBatch]], Iterable[Message]]) -> Segment:
    """Replace a file by one with the same rows in large blocks, synced; return it, open for writing.

    The new blocks have the time of the last one.

    Args:
        segment: is indexed.
        journal: sixteen bytes that identify it.
        join: makes messages of batches.

    Raises:
        OSError: the disk refuses, and the segment stays as it is; `Uncertain` if that is not sure.
        JournalDamaged: a block is damaged.
    """
    messages: list[Message] = []
    blocks = segment.read(segment.first, segment.end, segment.size, 0)
    for erased, run in groupby(blocks, lambda block: block.erased):
        if erased:
            messages += missing(sum(block.rows for block in run))
        else:
            messages += join([block.batch() for block in run])
    number = max((header.transaction for header, _ in segment.walk()), default=0)
    gaps = any(not message.data.size for message in messages)
    return _replaced(
        segment, journal, [(message, number, segment.last) for message in messages], erased=0 if gaps else None
    )


def without(
    segment: Segment, journal: bytes, choose: Callable[[int, pa.RecordBatch], Sequence[bool]], *, sealed: bool
) -> tuple[Segment, int] | None:
    """Replace a file by one without some rows, synced, as `merged`; return it and the number of rows erased, None if there are none.

    Args:
        segment: the file.
        journal: sixteen bytes that identify it.
        choose: gets the offset of the first row of a block and its rows, and says which ones go.
        sealed: another segment follows.

    Raises:
        OSError: the disk refuses, and the segment stays as it is; `Uncertain` if that is not sure.
        JournalDamaged: a block is damaged.
    """
    messages: list[tuple[Message, int, float]] = []
    count = 0
    for header, data in segment.walk():
        here = [Message(pa.py_buffer(data), header.rows)]
        if header.length:
            segment.check(header, header.at, data)
            batch = pa.ipc.read_record_batch(here[0].data, segment.schema)
            gone = choose(header.first, batch)
            if any(gone):
                count += sum(gone)
                here = list(split_erased(batch, gone))
        messages += [(message, header.transaction, header.time / 1e6) for message in here]
    if not count:
        return None
    return _replaced(segment, journal, list(_joined(messages)), erased=segment.named_size if sealed else 0), count


def _joined(messages: Iterable[tuple[Message, int, float]]) -> Iterator[tuple[Message, int, float]]:
    """Put places of erased rows together that follow each other."""
    for (erased, transaction), run in groupby(messages, lambda each: (not each[0].data.size, each[1])):
        if erased:
            places = list(run)
            for message in missing(sum(message.rows for message, _, _ in places)):
                yield message, transaction, places[-1][2]
        else:
            yield from run


def _replaced(
    segment: Segment, journal: bytes, messages: Sequence[tuple[Message, int, float]], *, erased: int | None
) -> Segment:
    files, whole = segment.files, segment.path.with_suffix(".old")
    files.discard(whole)
    files.link(segment.path, whole)
    segment.path = whole
    try:
        return Segment.create(
            files,
            whole.parent,
            partition=segment.partition,
            first=segment.first,
            schema=segment.schema,
            journal=journal,
            before=segment.before,
            messages=messages,
            erased=erased,
        )
    except BaseException:
        try:
            _put_back(segment, whole)
        except OSError as failure:
            raise Uncertain.of(failure) from failure
        raise


def _put_back(segment: Segment, whole: Path) -> None:
    """Give the old file its name again, which the new one may have got. Readers find it by one name or the other at any time."""
    files, path, beside = segment.files, whole.with_suffix(".segment"), whole.with_suffix(".new")
    replaced = not samestat(files.stat(path), files.stat(whole))
    if replaced:
        files.link(whole, beside)
        files.rename(beside, path)
    segment.path = path
    files.unlink(whole)
    if replaced:
        files.sync_folder(path.parent)  # rows that are appended to the old file must not lose their name to the new one
