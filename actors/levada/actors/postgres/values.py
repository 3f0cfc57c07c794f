"""Columns of Arrow as arrays of PostgreSQL, in its binary format, and back: a whole column is one parameter of a statement.

=====================================  ============================  =========================================================
column of the journal                  column of the table           on the way
=====================================  ============================  =========================================================
int64, int32, bool, double             bigint, integer, boolean,
                                       double precision
string                                 text                          U+0000, which PostgreSQL's texts cannot have, is escaped
binary                                 bytea
timestamp in µs, with or without UTC   timestamptz, timestamp        microseconds since 2000
date32                                 date                          days since 2000
duration in µs                         interval
decimal128                             numeric                       as text
list, map, struct                      jsonb                         as text, see `json_values`
=====================================  ============================  =========================================================

Values of a fixed size are moved a byte of each value at a time, with strided slices: 15 ns a value in a group of 256, where a loop takes 120.
There is no NumPy here, because Arrow does not need it any more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import repeat
from types import NoneType
from typing import Any, Final

import attrs
import pyarrow as pa
import pyarrow.compute

from levada.actors.journal import SchemaMismatch
from levada.framework.errors import ConfigurationError

from .escapes import ESCAPE, escaped, unescaped
from .json_values import from_json, to_json

__all__ = ["Kind", "kind_of"]

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none

_EPOCH: Final = 946_684_800_000_000
"""Microseconds from 1970 to 2000."""
_EPOCH_DAYS: Final = 10_957
_HEAD: Final = struct.Struct(">5i")
"""Of an array: dimensions, whether there are nulls, the type of its values, their number, and the number of the first."""
_SIZE: Final = struct.Struct(">i")
_NULL: Final = b"\xff\xff\xff\xff"
_DAY: Final = 86_400_000_000
_BINARY: Final = pa.binary()


@attrs.frozen
class Kind:
    """How the values of one type of Arrow are kept."""

    type: pa.DataType
    column: str
    """The type of the column in the table."""
    sent: str
    """The type in which values travel."""
    oid: int
    """The number of this type."""
    encode: Callable[[pa.Array], bytes]
    """Makes an array of PostgreSQL; `SchemaMismatch` if a value cannot be kept."""
    decode: Callable[[bytes, int], pa.Array]
    """Undoes it, for so many values."""
    counts: bool = False
    """Whether a value may be large."""
    plain: type = NoneType
    """The class of values that `value` takes; no value has the default."""
    value: Callable[[Any], bytes] = bytes
    """Makes a parameter of a value that is alone."""


def _head(oid: int, count: int, *, nulls: bool) -> bytes:
    return _HEAD.pack(1, int(nulls), oid, count, 1)


def _fixed(kind: pa.DataType, column: str, oid: int, size: int, code: str, raw: pa.DataType, shift: int = 0) -> Kind:
    """Return how a type of a fixed size is kept; `raw` is the whole number that Arrow keeps, and `shift` is added to it on the way back."""
    one = struct.Struct(">i" + code).pack
    is_bits, is_raw = pa.types.is_boolean(kind), raw == kind

    def encode(values: pa.Array) -> bytes:
        count, nulls = len(values), values.null_count
        head = _head(oid, count, nulls=bool(nulls))
        if nulls == count:
            return head + _NULL * count
        plain = values if is_raw else values.cast(raw) if is_bits else values.view(raw)
        if nulls or count < 8:
            return head + b"".join([_NULL if v is None else one(size, v - shift) for v in plain.to_pylist()])
        if shift:
            plain = pc.subtract_checked(plain, pa.scalar(shift, raw))
        width, first = 4 + size, size * plain.offset
        little = memoryview(plain.buffers()[1])[first : first + size * count]
        out = bytearray(width * count)
        out[3::width] = bytes((size,)) * count
        for place in range(size):
            out[4 + place :: width] = little[size - 1 - place :: size].tobytes()
        return head + out

    def decode(data: bytes, count: int) -> pa.Array:
        width = 4 + size
        if len(data) == _HEAD.size + width * count:
            little = bytearray(size * count)
            for place in range(size):
                little[size - 1 - place :: size] = data[_HEAD.size + 4 + place :: width]
            if is_bits:
                return pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(little)]).cast(kind)
            plain = pa.Array.from_buffers(raw, count, [None, pa.py_buffer(little)])
        elif len(data) == _HEAD.size + 4 * count:
            return pa.nulls(count, kind)
        else:
            unpack = struct.Struct(">" + code).unpack
            plain = pa.array([None if v is None else unpack(v)[0] for v in _items(data, count)], raw)
            if is_bits:
                return plain.cast(kind)
        if shift:
            plain = pc.add_checked(plain, pa.scalar(shift, raw))
        return plain if raw == kind else plain.view(kind)

    plain = bool if is_bits else float if code == "d" else int
    alone = struct.Struct(f">{code}").pack
    value = (lambda number: alone(number - shift)) if shift else alone
    return Kind(kind, column, column, oid, encode, decode, plain=plain, value=value)


def _items(data: bytes, count: int) -> list[bytes | None]:
    """Return the values of an array."""
    found: list[bytes | None] = []
    at = _HEAD.size
    for _ in repeat(None, count):
        [size] = _SIZE.unpack_from(data, at)
        at += 4
        if size < 0:
            found.append(None)
        else:
            found.append(data[at : at + size])
            at += size
    return found


def _array(oid: int, values: list[bytes | None], *, nulls: bool) -> bytes:
    pack = _SIZE.pack
    parts = [_head(oid, len(values), nulls=nulls)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts += (pack(len(value)), value)
    return b"".join(parts)


def _binary(kind: pa.DataType) -> Kind:
    def encode(values: pa.Array) -> bytes:
        count, nulls = len(values), values.null_count
        if nulls == count:
            return _head(17, count, nulls=True) + _NULL * count
        return _array(17, values.to_pylist(), nulls=bool(nulls))

    def decode(data: bytes, count: int) -> pa.Array:
        same = _same(data, count)
        return pa.array(_items(data, count), kind) if same is _DIFFERENT else pa.repeat(pa.scalar(same, kind), count)

    return Kind(kind, "bytea", "bytea", 17, encode, decode, counts=True, plain=bytes)


_DIFFERENT: Any = object()


def _same(data: bytes, count: int) -> Any:
    """Return the value that all of an array are, such as the entity or null; or `_DIFFERENT`. Taking them apart costs 0.2 µs each."""
    if not count:
        return _DIFFERENT
    [size] = _SIZE.unpack_from(data, _HEAD.size)
    width = 4 + max(size, 0)
    first = data[_HEAD.size : _HEAD.size + width]
    if len(data) != _HEAD.size + width * count or data[_HEAD.size :] != first * count:
        return _DIFFERENT
    return None if size < 0 else first[4:]


def _text(kind: pa.DataType) -> Kind:
    def encode(values: pa.Array) -> bytes:
        count, nulls = len(values), values.null_count
        if nulls == count:
            return _head(25, count, nulls=True) + _NULL * count
        found = values.view(_BINARY).to_pylist()
        buffer = values.buffers()[2]
        if buffer is not None and (b"\0" in (whole := buffer.to_pybytes()) or ESCAPE in whole):
            found = [None if v is None else escaped(v) for v in found]
        return _array(25, found, nulls=bool(nulls))

    def decode(data: bytes, count: int) -> pa.Array:
        same = _same(data, count)
        if same is not _DIFFERENT:
            return pa.repeat(pa.scalar(None if same is None else unescaped(same).decode(), kind), count)
        found = _items(data, count)
        if ESCAPE in data:
            found = [None if v is None else unescaped(v) for v in found]
        return pa.array(found, _BINARY).cast(kind)

    column = 'text COLLATE "C"'
    return Kind(kind, column, "text", 25, encode, decode, counts=True, plain=str, value=lambda v: escaped(v.encode()))


def _interval(kind: pa.DataType) -> Kind:
    value = struct.Struct(">qii")

    def encode(values: pa.Array) -> bytes:
        plain = values.view(pa.int64()).to_pylist()
        found = [None if v is None else value.pack(v, 0, 0) for v in plain]
        return _array(1186, found, nulls=bool(values.null_count))

    def decode(data: bytes, count: int) -> pa.Array:
        found: list[int | None] = []
        for each in _items(data, count):
            if each is None:
                found.append(None)
                continue
            micros, days, months = value.unpack(each)
            if months:
                raise ValueError("an interval of months has no length")
            found.append(micros + days * _DAY)
        return pa.array(found, pa.int64()).view(kind)

    return Kind(kind, "interval", "interval", 1186, encode, decode)


def _decimal(kind: pa.DataType) -> Kind:
    def encode(values: pa.Array) -> bytes:
        found = values.cast(pa.string()).view(_BINARY).to_pylist()
        return _array(25, found, nulls=bool(values.null_count))

    def decode(data: bytes, count: int) -> pa.Array:
        return pa.array(_items(data, count), _BINARY).cast(pa.string()).cast(kind)

    return Kind(kind, f"numeric({kind.precision},{kind.scale})", "text", 25, encode, decode)


def _json(kind: pa.DataType) -> Kind:
    def encode(values: pa.Array) -> bytes:
        try:
            found = [None if v is None else to_json(v, kind) for v in values.to_pylist()]
        except (ValueError, OverflowError) as error:  # a date of the year 20,000
            raise SchemaMismatch(f"a value of {kind} cannot be kept: {error}") from error
        return _array(25, found, nulls=bool(values.null_count))

    def decode(data: bytes, count: int) -> pa.Array:
        return pa.array([None if v is None else from_json(v, kind) for v in _items(data, count)], kind)

    return Kind(kind, "jsonb", "text", 25, encode, decode, counts=True)


def kind_of(field: pa.Field) -> Kind:
    """Return how a column is kept; `ConfigurationError` if it has a type that columns of messages do not have."""
    kind = field.type
    if kind == pa.int64():
        return _fixed(kind, "bigint", 20, 8, "q", kind)
    if kind == pa.int32():
        return _fixed(kind, "integer", 23, 4, "i", kind)
    if kind == pa.bool_():
        return _fixed(kind, "boolean", 16, 1, "b", pa.int8())
    if kind == pa.float64():
        return _fixed(kind, "double precision", 701, 8, "d", kind)
    if kind == pa.string():
        return _text(kind)
    if kind == pa.binary():
        return _binary(kind)
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        if kind.tz is None:
            return _fixed(kind, "timestamp without time zone", 1114, 8, "q", pa.int64(), _EPOCH)
        return _fixed(kind, "timestamp with time zone", 1184, 8, "q", pa.int64(), _EPOCH)
    if kind == pa.date32():
        return _fixed(kind, "date", 1082, 4, "i", pa.int32(), _EPOCH_DAYS)
    if kind == pa.duration("us"):
        return _interval(kind)
    if pa.types.is_decimal128(kind):
        return _decimal(kind)
    if pa.types.is_list(kind) or pa.types.is_map(kind) or pa.types.is_struct(kind):
        return _json(kind)
    raise ConfigurationError(f"{field.name}: a log in PostgreSQL has no columns of {kind}")
