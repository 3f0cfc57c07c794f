"""Whole numbers, and rows, in the binary format of PostgreSQL."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
from psycopg.pq.abc import PGresult

from levada.actors.journal import JournalDamaged

from .values import Kind

__all__ = ["bigint", "bigints_in", "double", "integer", "number_in", "only_value", "rows_in"]

_ITEM = struct.Struct(">4xq").iter_unpack


def bigint(number: int) -> bytes:
    """Return a parameter of the type ``bigint``."""
    return number.to_bytes(8, "big", signed=True)


def integer(number: int) -> bytes:
    """Return a parameter of the type ``integer``."""
    return number.to_bytes(4, "big", signed=True)


def double(number: float) -> bytes:
    """Return a parameter of the type ``float8``."""
    return struct.pack(">d", number)


def only_value(array: bytes) -> bytes | None:
    """Return the value of an array of one, as a parameter of its own; None if it is null."""
    return None if array[20:24] == b"\xff\xff\xff\xff" else array[24:]


def number_in(result: PGresult, column: int) -> int:
    """Return a whole number of the first row."""
    return int.from_bytes(result.get_value(0, column) or b"", "big", signed=True)


def bigints_in(result: PGresult, column: int) -> list[int]:
    """Return an array of ``bigint`` without nulls of the first row; null is an empty one."""
    data = result.get_value(0, column)
    return [] if data is None else [number for (number,) in _ITEM(data[20:])]


def rows_in(result: PGresult, first: int, kinds: list[Kind], schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return rows that came as one array for each column.

    Args:
        result: has their number in the first column.
        first: the place of the first array.
        kinds: how the columns are kept.
        schema: the columns.
        where: names the log in errors.

    Raises:
        JournalDamaged: a value was changed by hand, and is none of its column.
    """
    count, arrays = number_in(result, 0), list[Any]()
    for place, (field, kind) in enumerate(zip(schema, kinds, strict=True), first):
        data = result.get_value(0, place)
        try:
            arrays.append(pa.nulls(0, kind.type) if data is None else kind.decode(data, count))
            if not field.nullable and arrays[-1].null_count:
                raise ValueError("it is null")
        except (
            pa.ArrowException,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            struct.error,
        ) as error:
            raise JournalDamaged(
                f"the column {field.name} has a value that levada did not write: {error}", path=where
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
