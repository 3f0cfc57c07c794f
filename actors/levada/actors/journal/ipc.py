"""Arrow IPC streams from the wire, checked before Arrow reads them.

Arrow trusts a stream's description of itself. A few kilobytes of compressed buffers become terabytes. Buffers may overlap, so that one counts a
thousand times. In the description of columns, a flatbuffer, one name may stand for a million columns. Arrow follows offsets that point elsewhere
until the process dies. So a stream is accepted if

* it is one batch, with its columns and perhaps dictionaries before it, and no buffer is compressed;
* no part of a description is used twice (all parts reached have no more bytes together than it has), and it has `MAX_HEAD` bytes at most;
* its buffers have together no more bytes than there are, and it has no more than 8 rows for each byte;
* all offsets and texts in it are valid.

`pyarrow` tells what it has read, not what it is about to read; hence the small reader of flatbuffers below. Its input is untrusted, so it may
fail in any way that `struct` and slices do (`_MISREAD`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache

import pyarrow as pa

from .errors import SchemaMismatch

__all__ = ["MAX_HEAD", "rows_of_stream", "stream_of"]

MAX_HEAD = 1 << 18
"""Most bytes of the description of columns, or of a batch."""
_MISREAD = struct.error, IndexError, ValueError, OverflowError
_I16, _I32, _U16, _U32, _I64 = (struct.Struct(f"<{code}").unpack_from for code in "hiHIq")
# Slots of the tables of Arrow's Message.fbs and Schema.fbs, and numbers of its unions.
_MESSAGE_TYPE, _MESSAGE_HEADER, _MESSAGE_PAIRS = 1, 2, 4
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
_SCHEMA_FIELDS, _SCHEMA_PAIRS = 1, 2
_FIELD_NAME, _FIELD_TYPE_TYPE, _FIELD_TYPE, _FIELD_CHILDREN, _FIELD_PAIRS = 0, 2, 3, 5, 6
_TIMESTAMP, _TIMESTAMP_ZONE, _UNION, _UNION_IDS = 10, 1, 14, 1
_BATCH_BUFFERS, _BATCH_COMPRESSION, _BATCH_VARIADIC = 2, 3, 4
_DICTIONARY_DATA = 1
_SMALLEST_TABLE = 16  # a field has 24 bytes or more, and so has a pair
_END = b"\xff\xff\xff\xff\0\0\0\0"
_MOST_HEADS = 16

_heads: list[tuple[pa.Schema, bytes | None]] = []
"""How streams of some columns begin, the newest first. None: there are dictionaries, which come between the columns and the batch."""


class _Table:
    """A table of a flatbuffer."""

    __slots__ = ("_at", "_data", "_slots", "_slots_at")

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._slots_at = at - _I32(data, at)[0]
        self._slots = (_U16(data, self._slots_at)[0] - 4) // 2

    def place(self, slot: int) -> int | None:
        """Return the position of a field's value; None if it has none."""
        if slot >= self._slots:
            return None
        offset: int = _U16(self._data, self._slots_at + 4 + 2 * slot)[0]
        return self._at + offset if offset else None

    def table(self, slot: int) -> _Table | None:
        """Return the table that a field refers to."""
        at = self.place(slot)
        return None if at is None else _Table(self._data, at + _U32(self._data, at)[0])

    def number(self, slot: int) -> int:
        """Return the value of a field of one byte."""
        at = self.place(slot)
        return 0 if at is None else self._data[at]

    def length(self, slot: int) -> int:
        """Return the number of items of a vector, or of bytes of a text."""
        at = self.place(slot)
        return 0 if at is None else int(_U32(self._data, at + _U32(self._data, at)[0])[0])

    def items(self, slot: int, size: int) -> Iterator[int]:
        """Yield the positions of the items of a vector."""
        at = self.place(slot)
        if at is not None:
            at += _U32(self._data, at)[0]
            yield from range(at + 4, at + 4 + size * self.length(slot), size)

    def tables(self, slot: int) -> Iterator[_Table]:
        """Yield the tables of a vector of tables."""
        for at in self.items(slot, 4):
            yield _Table(self._data, at + _U32(self._data, at)[0])


class _Count:
    """Adds up the bytes reached from a table, and refuses more than there are."""

    def __init__(self, size: int) -> None:
        self._left = size

    def spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise SchemaMismatch("these bytes are not rows: parts of the description of their columns are used twice")

    def pairs(self, table: _Table, slot: int) -> None:
        for pair in table.tables(slot):
            self.spend(_SMALLEST_TABLE + pair.length(0) + pair.length(1))

    def fields(self, table: _Table, slot: int) -> None:
        waiting = [table.tables(slot)]
        while waiting:
            field = next(waiting[-1], None)
            if field is None:
                waiting.pop()
                continue
            self.spend(_SMALLEST_TABLE + field.length(_FIELD_NAME))
            self.pairs(field, _FIELD_PAIRS)
            kind = field.table(_FIELD_TYPE)
            if kind is not None:
                number = field.number(_FIELD_TYPE_TYPE)
                self.spend(_SMALLEST_TABLE)
                self.spend(kind.length(_TIMESTAMP_ZONE) if number == _TIMESTAMP else 0)
                self.spend(4 * kind.length(_UNION_IDS) if number == _UNION else 0)
            waiting.append(field.tables(_FIELD_CHILDREN))


def stream_of(batch: pa.RecordBatch) -> bytes:
    """Make an Arrow IPC stream of one batch and its columns; `rows_of_stream` reads it."""
    head = _head_of(batch.schema)
    if head is not None:  # 7 µs for a row of twelve columns; a writer takes 21
        return b"".join((head, batch.serialize(), _END))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _head_of(schema: pa.Schema) -> bytes | None:
    for known, head in _heads:
        if known.equals(schema, check_metadata=True):
            return head
    head = None if _has_dictionary(schema) else schema.serialize().to_pybytes()
    _heads[:] = [(schema, head), *_heads[: _MOST_HEADS - 1]]
    return head


def _has_dictionary(columns: Iterable[pa.Field]) -> bool:
    return any(
        pa.types.is_dictionary(field.type) or _has_dictionary(map(field.type.field, range(field.type.num_fields)))
        for field in columns
    )


def rows_of_stream(data: bytes) -> pa.RecordBatch:
    """Read a stream of `stream_of` without copying it; raise `SchemaMismatch` unless it passes the rules above."""
    buffer = pa.py_buffer(data)
    try:
        try:
            batch = _rows_of_known_columns(data, buffer)
        except EOFError:  # no batch, or not even columns
            batch = None
        if batch is None:
            _judge(buffer)
            with pa.ipc.open_stream(buffer) as stream:
                [batch] = stream
        if batch.num_rows > 8 * len(data):
            raise SchemaMismatch(f"these bytes are not rows: {len(data)} bytes say that they are {batch.num_rows} rows")
        batch.validate(full=True)  # 0.3 ms for a block of 3.6 MB
    except (pa.ArrowException, OSError, *_MISREAD) as error:
        raise SchemaMismatch(f"these bytes are not rows: {str(error)[:200]}") from error
    return batch


def _rows_of_known_columns(data: bytes, buffer: pa.Buffer) -> pa.RecordBatch | None:
    """Read a stream of one batch behind columns without dictionaries; None if it is no such stream.

    Streams of one writer all begin alike, so their columns are read once: 32 µs instead of 65 for a row of twelve columns.
    """
    start = _size_at(data, 0)
    if start > MAX_HEAD or data[:4] != _END[:4]:  # before Arrow 0.15, messages began otherwise
        return None
    schema = _columns_of(data[:start])
    if schema is None:
        return None
    message = pa.ipc.read_message(buffer.slice(start))
    head, body = memoryview(message.metadata), message.body
    table = _Table(head, _U32(head, 0)[0])
    inner = table.table(_MESSAGE_HEADER)
    if (
        table.number(_MESSAGE_TYPE) != _RECORD_BATCH
        or len(head) > MAX_HEAD
        or body is None
        or data[start + _size_at(data, start) + body.size :] != _END
    ):
        return None
    _Count(len(head)).pairs(table, _MESSAGE_PAIRS)
    _judge_batch(inner, head, body)
    return pa.ipc.read_record_batch(message, schema)


def _size_at(data: bytes, at: int) -> int:
    """Return the size of a message with its length, but without its body."""
    return 8 + int(_U32(data, at + 4)[0])


@lru_cache(maxsize=_MOST_HEADS)
def _columns_of(head: bytes) -> pa.Schema | None:
    """Return columns without dictionaries; None if there are no such columns."""
    message = pa.ipc.read_message(head)
    if message.type != "schema" or len(message.metadata) > MAX_HEAD:
        return None
    _judge_columns(message.metadata.to_pybytes())
    schema = pa.ipc.read_schema(message)
    return None if _has_dictionary(schema) else schema


def _judge(stream: pa.Buffer) -> None:
    batches = 0
    for message in pa.ipc.MessageReader.open_stream(stream):
        head = memoryview(message.metadata)
        if len(head) > MAX_HEAD:
            raise SchemaMismatch(f"these bytes are not rows: a description of {len(head)} bytes, at most {MAX_HEAD}")
        table = _Table(head, _U32(head, 0)[0])
        count = _Count(len(head))
        count.pairs(table, _MESSAGE_PAIRS)
        inner = table.table(_MESSAGE_HEADER)
        match table.number(_MESSAGE_TYPE):
            case _ if inner is None:
                raise SchemaMismatch("these bytes are not rows: a message without a header")
            case 1:  # a schema
                _judge_columns(head.tobytes())
            case 2:  # a dictionary
                _judge_batch(inner.table(_DICTIONARY_DATA), head, message.body)
            case 3:  # a record batch
                batches += 1
                _judge_batch(inner, head, message.body)
            case kind:
                raise SchemaMismatch(f"these bytes are not rows: a message of kind {kind}")
    if batches != 1:
        raise SchemaMismatch(f"these bytes are not rows: {batches} batches, wanted one")


@lru_cache(maxsize=16)  # streams of one writer all begin alike: 3 µs instead of 75 for twelve columns
def _judge_columns(data: bytes) -> None:
    head = memoryview(data)
    table = _Table(head, _U32(head, 0)[0])
    count = _Count(len(head))
    count.pairs(table, _MESSAGE_PAIRS)
    inner = table.table(_MESSAGE_HEADER)
    if inner is not None:
        count.pairs(inner, _SCHEMA_PAIRS)
        count.fields(inner, _SCHEMA_FIELDS)


def _judge_batch(batch: _Table | None, head: memoryview, body: pa.Buffer | None) -> None:
    if batch is None:
        raise SchemaMismatch("these bytes are not rows: a dictionary without values")
    if batch.place(_BATCH_COMPRESSION) is not None:
        raise SchemaMismatch("these bytes are not rows: compressed buffers are not taken")
    # `RecordBatch.nbytes` would tell it too, but a damaged batch makes it crash the process.
    there, used = body.size if body is not None else 0, 0
    for at in batch.items(_BATCH_BUFFERS, 16):
        size = _I64(head, at + 8)[0]
        used += size
        if size < 0 or used > there:
            raise SchemaMismatch(f"these bytes are not rows: buffers of more than the {there} bytes that there are")
    buffers = batch.length(_BATCH_BUFFERS)
    if any(not 0 <= _I64(head, at)[0] <= buffers for at in batch.items(_BATCH_VARIADIC, 8)):
        raise SchemaMismatch("these bytes are not rows: more buffers of a column than there are")
